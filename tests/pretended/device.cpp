// A pretended CUDA for the CPU build of torch: what torch asks of DeviceType::CUDA, and what Python asks of this.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "cells.h"

namespace pretended {

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;

  c10::DeviceType type() const override { return kDevice; }
  Device getDevice() const override { return Device(kDevice, current_device()); }
  void setDevice(Device device) const override { current_device() = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device() = device.index(); }
  Device exchangeDevice(Device device) const override {
    return Device(kDevice, std::exchange(current_device(), device.index()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  Stream getStream(Device device) const override { return current_stream(index(device)); }
  Stream getDefaultStream(Device device) const override { return stream_of(index(device), 0); }
  Stream getNewStream(Device device, int = 0) const override {
    // CUDA's, too, are handed out in turn and come round again.
    static auto* next = new std::atomic<unsigned>[device_count()]();
    return stream_of(index(device), 1 + next[index(device)]++ % (kStreams - 1));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device); }
  Stream exchangeStream(Stream stream) const override {
    auto& id = current_stream_id(stream.device_index());
    return stream_of(stream.device_index(), std::exchange(id, stream.id()));
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const Stream& stream) const override { return queue(stream).is_idle(); }
  bool isStreamCapturing(const Stream& stream) const override { return queue(stream).capture() != nullptr; }
  void synchronizeStream(const Stream& stream) const override {
    captures().unsafe_call("cudaStreamSynchronize");
    queue(stream).synchronize();
    asynchronous_error().raise();
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    captures().unsafe_call("cudaDeviceSynchronize");
    synchronize_device(device);
    asynchronous_error().raise();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    device_memory().recordStream(data, stream);
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
  void record(void** event, const Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new EventPtr(std::make_shared<Event>());
    queue(stream).record(of(*event));
  }
  void block(void* event, const Stream& stream) const override {
    if (event) queue(stream).wait(last(event));
  }
  bool queryEvent(void* event) const override {
    captures().unsafe_call("cudaEventQuery");
    return !event || last(outside(event)).is_reached();
  }
  void synchronizeEvent(void* event) const override {
    captures().unsafe_call("cudaEventSynchronize");
    if (!event) return;
    const Mark mark = last(outside(event));
    mark.event->wait(mark.point);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    return (of(end)->time - of(start)->time) * 1e3;
  }

 private:
  static c10::DeviceIndex index(Device device) { return device.has_index() ? device.index() : current_device(); }
  static const EventPtr& of(void* event) { return *static_cast<EventPtr*>(event); }
  static Mark last(void* event) {
    std::lock_guard<std::mutex> lock(of(event)->mutex);
    return {of(event), of(event)->recorded};
  }
  static void* outside(void* event) {
    std::lock_guard<std::mutex> lock(of(event)->mutex);
    TORCH_CHECK(
        !of(event)->capture, "CUDA error (pretended): operation not permitted on an event last recorded in a capture");
    return event;
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex current_device() const override { return pretended::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return pretended::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { pretended::current_device() = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? pretended::current_device() : std::exchange(pretended::current_device(), device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return pinned_pages().contain(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Device getDeviceFromPtr(void*) const override { return {kDevice, pretended::current_device()}; }
  void deviceSynchronize(c10::DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("copy_", copy_);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("record_stream", record_stream);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("resize_", resize_);
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  library.impl("mm.dtype", mm_to);
  library.impl("mm.dtype_out", mm_to_out);
  library.impl("addmm.dtype", addmm_to);
  library.impl("bmm.dtype", bmm_to);
}
TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

struct Registration {
  Registration() {
    c10::SetAllocator(kDevice, &device_memory());
    at::setHostAllocator(kDevice, &pinned_memory);
  }
} registration;

// A graph after its capture; Python holds it by its address.
struct Graph {
  CapturePtr capture;
};

}  // namespace pretended

namespace at {
using PretendedHooks = pretended::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendedHooks)
}  // namespace at

// What Python calls by ctypes, which lets go of the GIL meanwhile.
using namespace pretended;
extern "C" {
void pretended_set_delay(int stream, int microseconds) { delay(stream) = microseconds; }
void pretended_set_poison(int mode) { device_memory().poison = mode; }
void pretended_set_limit(uint64_t nbytes) { device_memory().limit = nbytes; }
uint64_t pretended_limit() { return device_memory().limit; }
void pretended_fail_allocation(uint64_t k) { device_memory().fail_at(k); }
void pretended_fail_copy(uint64_t k) { counts().fail_copy_at = k ? counts().copies + k : 0; }
void pretended_limit_pinned(uint64_t nbytes) { pinned_pages().most = nbytes; }
uint64_t pretended_pinned_calls() { return pinned_pages().calls; }
void pretended_counts(uint64_t* out) {
  out[0] = counts().operators;
  out[1] = counts().asynchronous;
  out[2] = counts().copies;
}
void pretended_synchronize() {
  for (int device = 0; device < device_count(); ++device) synchronize_device(device);
}
const char* pretended_error() {
  static thread_local std::string text;
  text = asynchronous_error().take();
  return text.c_str();
}

Graph* pretended_graph_begin(int device, int64_t stream, int global, uint64_t pool) {
  if (queue(device, stream).capture()) return nullptr;
  auto capture = std::make_shared<Capture>();
  capture->global = global != 0;
  capture->pool = pool;
  captures().add(capture);
  queue(device, stream).set_capture(capture);
  return new Graph{capture};
}
// Returns how many operations were captured, or -1 if somebody else's call has spoiled it.
int64_t pretended_graph_end(Graph* graph) {
  graph->capture->done = true;
  captures().remove(graph->capture);
  return graph->capture->spoiled ? -1 : static_cast<int64_t>(graph->capture->work.size());
}
void pretended_graph_replay(Graph* graph, int device, int64_t stream) {
  queue(device, stream).replay(graph->capture->work);
}
void pretended_graph_delete(Graph* graph) { delete graph; }
uint64_t pretended_forbidden() { return captures().forbidden; }
const char* pretended_last_forbidden() {
  static thread_local std::string text;
  text = captures().last_name();
  return text.c_str();
}
}
