// Operators of the pretended device: copies and views of its own, and for everything else the CPU's kernels.
//
// The fallback finds the shapes of the results by way of the meta device, allocates them, and puts the CPU's kernel on
// the current stream. It works there on raw addresses, without keeping any memory alive, as a kernel of a GPU does.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "memory.h"

namespace pretended {

struct Counts {
  std::atomic<uint64_t> operators{0}, asynchronous{0}, copies{0}, fail_copy_at{0};
};
inline Counts& counts() {
  static auto* all = new Counts;
  return *all;
}

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// The same memory as a tensor of the CPU, which does not keep it alive.
inline at::Tensor host_alias(const at::Tensor& tensor) {
  c10::InferenceMode off(false);
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .options(at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU))
      .make_tensor();
}

// Kernels run below autograd and autocast, whatever the calling thread has switched on.
struct KernelsOnly {
  at::AutoDispatchBelowAutograd below;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard python{
      c10::DispatchKeySet(c10::DispatchKey::Python) | c10::DispatchKeySet(c10::DispatchKey::PythonTLSSnapshot)};
};
inline void copy_on_host(at::Tensor target, const at::Tensor& source) {
  KernelsOnly guard;
  target.copy_(source);
}

// ---- memory and views ----

inline c10::Device device_or_current(const std::optional<c10::Device>& device) {
  return {kDevice, device && device->has_index() ? device->index() : current_device()};
}
inline at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(
      size, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}
inline at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      dtype.value_or(at::get_default_dtype_as_scalartype()));
}
inline void record_stream(at::Tensor& self, c10::Stream stream) {
  device_memory().recordStream(self.storage().data_ptr(), stream);
}
inline at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_storage_offset(offset);
  if (stride.data() != nullptr) {
    tensor->set_sizes_and_strides(size, stride);
  } else {
    tensor->set_sizes_contiguous(size);
  }
  return self;
}
inline at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}
inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline at::Tensor& set_nothing(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  auto& memory = device_memory();
  return set_storage(self, at::Storage(at::Storage::use_byte_size_t(), 0, memory.allocate(0), &memory, true), 0, {0}, {});
}
inline const at::Tensor& resize_(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  const int64_t count = c10::multiply_integers(size);
  const size_t needed = (count + self.storage_offset()) * self.dtype().itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (count != 0 && storage->nbytes() < needed) {
    auto data = device_memory().allocate(needed);
    if (const size_t before = storage->nbytes()) {
      void *target = data.get(), *source = storage->mutable_data();
      current_queue(self.device().index()).push([=] { memcpy(target, source, before); });
    }
    storage->set_data_ptr(std::move(data));
    storage->set_nbytes(needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

// ---- copies ----

inline void copy_between_devices(at::Tensor& self, const at::Tensor& source) {
  const auto to = self.device().index(), from = source.device().index();
  Queue &theirs = current_queue(to), &ours = current_queue(from);
  // As native::copy_device_to_device: the copy runs on the source's stream, which is joined with the other at both ends.
  if (to != from) ours.wait(theirs.record());
  ours.push([target = host_alias(self), read = host_alias(source)] { copy_on_host(target, read); });
  if (to != from) theirs.wait(ours.record());
}

inline at::Tensor& copy_(at::Tensor& self, const at::Tensor& given, bool non_blocking) {
  c10::InferenceMode off(false);
  ++counts().copies;
  if (counts().fail_copy_at && counts().copies == counts().fail_copy_at) {
    TORCH_CHECK(false, "CUDA error (pretended): a copy failed");
  }
  if (self.numel() == 0) return self;
  const at::Tensor source = given.sizes() == self.sizes() ? given : given.expand(self.sizes());
  if (self.is_cuda() && source.is_cuda()) {
    copy_between_devices(self, source);
    return self;
  }
  const auto device = (self.is_cuda() ? self : source).device().index();
  const auto stream = current_stream(device);
  const at::Tensor& host = self.is_cuda() ? source : self;
  // Only between pinned memory and contiguous memory of the same dtype does the device itself read or write the host's
  // memory later on. Everything else is staged now or awaited.
  const bool direct = non_blocking && self.scalar_type() == source.scalar_type() && self.is_contiguous() &&
                      source.is_contiguous() && pinned_pages().contain(host.data_ptr());
  if (direct) {
    const auto target = self.is_cuda() ? host_alias(self) : host_alias(host);
    const auto read = self.is_cuda() ? host_alias(host) : host_alias(source);
    queue(stream).push([target, read] { copy_on_host(target, read); });
    pinned_memory.record_event(host.data_ptr(), host.storage().data_ptr().get_context(), stream);
    return self;
  }
  if (self.is_cuda()) {
    const at::Tensor staged = at::empty(source.sizes(), source.options().pinned_memory(false));
    copy_on_host(staged, source);
    queue(stream).push([target = host_alias(self), staged] { copy_on_host(target, staged); });
    if (non_blocking) return self;
  } else {
    queue(stream).push([target = host_alias(self), read = host_alias(source)] { copy_on_host(target, read); });
  }
  queue(stream).synchronize();
  asynchronous_error().raise();
  return self;
}
inline at::Scalar local_scalar_dense(const at::Tensor& self) {
  current_queue(self.device().index()).synchronize();
  asynchronous_error().raise();
  KernelsOnly guard;
  return host_alias(self).item();
}

// ---- everything else ----

template <typename Map>
c10::IValue map_tensors(const c10::IValue& value, const Map& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) mapped.push_back(map(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      mapped.push_back(tensor ? std::optional<at::Tensor>(map(*tensor)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

// One call of an operator that has no kernel here.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), device_(current_device()) {
    args_.assign(stack->end() - schema_.arguments().size(), stack->end());
    for (size_t i = 0; i < args_.size(); ++i) inspect(i);
    for (const auto& result : schema_.returns()) {
      const auto* alias = result.alias_info();
      TORCH_CHECK(!alias || alias->isWrite(), "the pretended device lacks the view ", op.operator_name());
      fresh_ = fresh_ || !alias;
      const auto kind = result.type()->kind();
      plain_ = plain_ && (kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType);
    }
  }

  void run() {
    c10::DeviceGuard guard(c10::Device(kDevice, device_));
    Queue& ours = current_queue(device_);
    const auto host_args = on_host();
    // Random numbers are drawn in the program's order, from the CPU's generator; in a capture, at every replay.
    const bool drawn_now = draws_ && !ours.capture();
    std::vector<at::Tensor> results;
    if (plain_ && !drawn_now && !reads_host_ && unsized_.empty() && (!fresh_ || allocate_results(&results))) {
      ++counts().asynchronous;
      launch(ours, host_args, results);
      finish({results.begin(), results.end()});
    } else {
      finish(run_now(ours, host_args));
    }
  }

 private:
  bool is_written(size_t i) const {
    const auto* alias = schema_.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }
  void inspect(size_t i) {
    draws_ = draws_ || schema_.arguments()[i].name() == "generator";
    if (args_[i].isDevice() && args_[i].toDevice().has_index()) device_ = args_[i].toDevice().index();
    map_tensors(args_[i], [&](const at::Tensor& tensor) {
      if (on_device(tensor)) device_ = tensor.device().index();
      if (tensor.defined() && !tensor.is_cuda() && tensor.dim() > 0) reads_host_ = true;
      return tensor;
    });
    // An output without a size is resized by the kernel: its memory is not known before.
    if (is_written(i) && args_[i].isTensor() && on_device(args_[i].toTensor()) && args_[i].toTensor().numel() == 0) {
      unsized_.push_back(i);
    }
  }
  std::vector<c10::IValue> on_host() const {
    std::vector<c10::IValue> mapped;
    for (const auto& arg : args_) {
      mapped.push_back(arg.isDevice() ? c10::IValue(c10::Device(at::kCPU)) : map_tensors(arg, [](const at::Tensor& t) {
        if (on_device(t)) return host_alias(t);
        return t.defined() && t.dim() == 0 ? t.clone() : t;  // a number that the host may change afterwards
      }));
    }
    for (size_t i : unsized_) {
      mapped[i] = at::empty({0}, at::TensorOptions().dtype(args_[i].toTensor().dtype()).device(at::kCPU));
    }
    return mapped;
  }
  at::Tensor like(const at::Tensor& tensor, c10::Device device) const {
    const auto options = at::TensorOptions().dtype(tensor.dtype()).device(device);
    return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  }
  static std::vector<c10::IValue> call(const c10::OperatorHandle& op, std::vector<c10::IValue> stack) {
    KernelsOnly guard;
    op.callBoxed(&stack);
    return stack;
  }
  // Returns false where the meta device does not know the shapes, or there are lists among the results.
  bool allocate_results(std::vector<at::Tensor>* results) const {
    std::vector<c10::IValue> shapes;
    try {
      std::vector<c10::IValue> meta;
      for (const auto& arg : args_) {
        meta.push_back(arg.isDevice() ? c10::IValue(c10::Device(at::kMeta)) : map_tensors(arg, [&](const at::Tensor& t) {
          return on_device(t) ? like(t, at::kMeta) : t;
        }));
      }
      shapes = call(op_, std::move(meta));
    } catch (const std::exception&) {
      return false;
    }
    for (const auto& shape : shapes) {
      if (!shape.isTensor()) return false;
    }
    for (const auto& shape : shapes) {
      const auto& tensor = shape.toTensor();
      results->push_back(tensor.defined() ? like(tensor, c10::Device(kDevice, device_)) : tensor);
    }
    return true;
  }
  void launch(Queue& ours, const std::vector<c10::IValue>& host_args, const std::vector<at::Tensor>& results) const {
    std::vector<at::Tensor> targets;
    for (const auto& tensor : results) targets.push_back(tensor.defined() ? host_alias(tensor) : tensor);
    std::vector<std::pair<at::Tensor, std::vector<int64_t>>> written;
    for (size_t i = 0; i < args_.size(); ++i) {
      if (is_written(i) && host_args[i].isTensor()) {
        written.emplace_back(host_args[i].toTensor(), host_args[i].toTensor().sizes().vec());
      }
    }
    ours.push([op = op_, host_args, targets, written] {
      const auto found = call(op, host_args);
      for (size_t i = 0; i < targets.size(); ++i) {
        if (targets[i].defined() && found[i].toTensor().defined()) copy_on_host(targets[i], found[i].toTensor());
      }
      for (const auto& [tensor, size] : written) {
        TORCH_CHECK(tensor.sizes() == size, c10::toString(op.operator_name()), " resized an output on the device");
      }
    });
  }
  std::vector<c10::IValue> run_now(Queue& ours, const std::vector<c10::IValue>& host_args) const {
    ours.synchronize();
    asynchronous_error().raise();
    auto found = call(op_, host_args);
    for (size_t i : unsized_) {
      const at::Tensor from = host_args[i].toTensor(), to = args_[i].toTensor();
      resize_(to, from.sizes(), std::nullopt);
      ours.synchronize();
      if (from.numel()) copy_on_host(host_alias(to), from);
    }
    if (!fresh_) return {};
    for (auto& value : found) {
      value = map_tensors(value, [&](const at::Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        const auto result = like(tensor, c10::Device(kDevice, device_));
        ours.synchronize();  // after the memory's former use, and after it was overwritten
        if (tensor.numel()) copy_on_host(host_alias(result), tensor);
        return result;
      });
    }
    return found;
  }
  // Replaces the arguments on the stack by what the operator returns.
  void finish(std::vector<c10::IValue> results) {
    torch::jit::drop(*stack_, args_.size());
    if (!fresh_) {
      for (size_t i = 0; i < args_.size() && results.size() < schema_.returns().size(); ++i) {
        if (is_written(i)) results.push_back(args_[i]);
      }
    }
    for (auto& result : results) stack_->push_back(std::move(result));
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  std::vector<c10::IValue> args_;
  std::vector<size_t> unsized_;
  c10::DeviceIndex device_;
  bool fresh_ = false, plain_ = true, draws_ = false, reads_host_ = false;
};
inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  ++counts().operators;
  c10::InferenceMode off(false);
  Call(op, stack).run();
}

}  // namespace pretended
