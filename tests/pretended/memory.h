// Memory of the pretended device, and pinned memory of the host.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <cstring>
#include <map>

#include "streams.h"

namespace pretended {

enum Poison { kNever = 0, kAtFree = 1, kAtHandOut = 2 };

struct Block {
  char* data;
  size_t size;
  c10::DeviceIndex device;
  c10::StreamId stream;
  uint64_t pool;  // of the graph in whose capture it was allocated, 0 for none
  std::set<c10::StreamId> users;  // other streams, by record_stream
};

// CUDA's rule: a freed block may be handed out again at once to the stream on which it was allocated, whatever other
// streams still do with it. So that this shows, a block is overwritten with 0xFF, which are NaN, in that stream's order.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  std::atomic<int> poison{kAtFree};
  std::atomic<uint64_t> limit{uint64_t(4) << 30};

  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(kDevice, current_device());
    if (nbytes == 0) return {nullptr, nullptr, &free_block, device};
    Block* block = take(nbytes);
    return {block->data, block, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t nbytes) const override { memcpy(target, source, nbytes); }
  bool initialized() override { return true; }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (!data.get_context()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    auto* block = static_cast<Block*>(data.get_context());
    if (stream.id() != block->stream) block->users.insert(stream.id());
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (int device = 0; device < device_count(); ++device) empty_cache(device);
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return {limit - std::min<uint64_t>(limit, stats_[device].reserved_bytes[0].current), limit};
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : stats_of(device)) stat->reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : stats_of(device)) stat->reset_peak();
  }
  // The k-th allocation from now on fails, once; 0: none does.
  void fail_at(uint64_t k) {
    std::lock_guard<std::mutex> lock(mutex_);
    fail_at_ = k ? calls_ + k : 0;
  }
  void release(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_[block->device].allocated_bytes[0].decrease(block->size);
    stats_[block->device].active_bytes[0].decrease(block->size);
    if (block->users.empty()) {
      cache(block);
      return;
    }
    Held held{block, {}};
    for (auto stream : block->users) held.uses.push_back(queue(block->device, stream).record());
    block->users.clear();
    held_.push_back(std::move(held));
  }

 private:
  struct Held {
    Block* block;
    std::vector<Mark> uses;
  };
  using Key = std::tuple<c10::DeviceIndex, c10::StreamId, uint64_t>;
  static constexpr size_t kRounding = 512;
  static constexpr size_t kPaged = 65536;
  static constexpr size_t kAddresses = size_t(1) << 40;  // reserved, not used

  static void free_block(void* block);

  Block* take(size_t nbytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto device = current_device();
    const auto stream = current_stream_id(device);
    const size_t size = (nbytes + kRounding - 1) / kRounding * kRounding;
    ++calls_;
    if (calls_ == fail_at_) refuse(nbytes);
    collect_held();
    const auto capture = queue(device, stream).capture();
    const uint64_t pool = capture ? capture->pool : 0;
    Block* block = cached({device, stream, pool}, size);
    if (block == nullptr) {
      // Torch's allocator may do so within a capture, for which it asks CUDA to relax.
      if (!capture) captures().unsafe_call("cudaMalloc");
      if (stats_[device].reserved_bytes[0].current + size > limit && !capture) empty_cache(device);
      if (stats_[device].reserved_bytes[0].current + size > limit) refuse(nbytes);
      block = new Block{addresses(size), size, device, stream, pool, {}};
      stats_[device].reserved_bytes[0].increase(size);
      if (poison != kNever) overwrite(block);
    } else if (poison == kAtHandOut) {
      overwrite(block);
    }
    stats_[device].allocated_bytes[0].increase(block->size);
    stats_[device].active_bytes[0].increase(block->size);
    return block;
  }
  [[noreturn]] void refuse(size_t nbytes) {
    throw c10::OutOfMemoryError(
        {__func__, __FILE__, uint32_t(__LINE__)},
        "CUDA out of memory (pretended). Tried to allocate " + std::to_string(nbytes) + " bytes.");
  }
  void overwrite(Block* block) {
    char* data = block->data;
    const size_t size = block->size;
    queue(block->device, block->stream).push([data, size] { memset(data, 0xFF, size); });
  }
  void cache(Block* block) {
    // What a graph owns is not touched after its capture, or its replays would find it changed.
    const auto capture = queue(block->device, block->stream).capture();
    if (poison == kAtFree && block->pool == (capture ? capture->pool : 0)) overwrite(block);
    cache_[{block->device, block->stream, block->pool}].emplace(block->size, block);
  }
  Block* cached(const Key& key, size_t size) {
    auto& blocks = cache_[key];
    auto found = blocks.lower_bound(size);
    // A block that is much too large would make memory look fuller than it is.
    if (found == blocks.end() || found->first > size + size / 4) return nullptr;
    // The one that was freed last, which shows at once who still uses it.
    found = std::prev(blocks.upper_bound(found->first));
    Block* block = found->second;
    blocks.erase(found);
    return block;
  }
  void collect_held() {
    std::vector<Held> left;
    for (auto& held : held_) {
      bool over = true;
      for (const auto& use : held.uses) over = over && use.is_reached();
      if (over) {
        cache(held.block);
      } else {
        left.push_back(std::move(held));
      }
    }
    held_.swap(left);
  }
  void empty_cache(c10::DeviceIndex device) {
    for (auto& [key, blocks] : cache_) {
      const auto [where, stream, pool] = key;
      if (where != device || pool != 0 || blocks.empty() || queue(where, stream).capture()) continue;
      queue(where, stream).synchronize();  // cudaFree waits for the device
      for (auto& [size, block] : blocks) {
        stats_[device].reserved_bytes[0].decrease(size);
        // The addresses stay valid: an access after this is a wrong number, not the end of the process.
        if (size >= kPaged) madvise(block->data, size, MADV_DONTNEED);
        unused_.emplace(size, block->data);
        delete block;
      }
      blocks.clear();
    }
  }
  char* addresses(size_t size) {
    const auto found = unused_.find(size);
    if (found != unused_.end()) {
      char* data = found->second;
      unused_.erase(found);
      return data;
    }
    if (next_ == nullptr) {
      const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      void* mapped = mmap(nullptr, kAddresses, PROT_READ | PROT_WRITE, flags, -1, 0);
      TORCH_CHECK(mapped != MAP_FAILED, "no addresses for the pretended device");
      next_ = static_cast<char*>(mapped);
      end_ = next_ + kAddresses;
    }
    // Large blocks begin at a page, so that their pages can be given back.
    const uintptr_t alignment = size >= kPaged ? 4096 : kRounding;
    char* data = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(next_) + alignment - 1) / alignment * alignment);
    next_ = data + size;
    TORCH_CHECK(next_ <= end_, "the pretended device has no addresses left");
    return data;
  }
  std::array<c10::CachingAllocator::Stat*, 3> stats_of(c10::DeviceIndex device) {
    auto& stats = stats_[device];
    return {&stats.allocated_bytes[0], &stats.reserved_bytes[0], &stats.active_bytes[0]};
  }

  std::mutex mutex_;
  std::map<Key, std::multimap<size_t, Block*>> cache_;
  std::multimap<size_t, char*> unused_;
  std::vector<Held> held_;
  std::map<c10::DeviceIndex, c10::CachingDeviceAllocator::DeviceStats> stats_;
  uint64_t calls_ = 0, fail_at_ = 0;
  char *next_ = nullptr, *end_ = nullptr;
};
inline DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory;
  return *memory;
}
inline void DeviceMemory::free_block(void* block) {
  if (block) device_memory().release(static_cast<Block*>(block));
}

// Pinned memory: torch's own cache over the pages that are registered here.
class PinnedPages {
 public:
  std::atomic<uint64_t> most{0};  // bytes of the largest allocation that succeeds, 0 for any
  std::atomic<uint64_t> calls{0};

  void* allocate(size_t size) {
    ++calls;
    captures().unsafe_call("cudaHostAlloc");
    TORCH_CHECK(!most || size <= most, "CUDA error (pretended): out of memory (cudaHostAlloc)");
    void* data = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    TORCH_CHECK(data, "CUDA error (pretended): the host has no memory");
    std::lock_guard<std::mutex> lock(mutex_);
    pages_[static_cast<char*>(data)] = size;
    return data;
  }
  void release(void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    pages_.erase(static_cast<char*>(data));
    std::free(data);
  }
  bool contain(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    const char* at = static_cast<const char*>(data);
    auto after = pages_.upper_bound(const_cast<char*>(at));
    return after != pages_.begin() && at < std::prev(after)->first + std::prev(after)->second;
  }

 private:
  std::mutex mutex_;
  std::map<char*, size_t> pages_;
};
inline PinnedPages& pinned_pages() {
  static auto* pages = new PinnedPages;
  return *pages;
}

struct PinnedImpl final : public at::CachingHostAllocatorImpl<c10::Stream, Mark> {
  void allocate_host_memory(size_t size, void** data) override { *data = pinned_pages().allocate(size); }
  void free_block(at::HostBlock<c10::Stream>* block) override { pinned_pages().release(block->ptr_); }
  void record_stream(std::optional<std::vector<Mark>>& events, c10::Stream stream) override {
    events->push_back(queue(stream).record());
  }
  bool query_event(Mark& mark) override {
    captures().unsafe_call("cudaEventQuery");
    return mark.is_reached();
  }
  c10::Stream get_current_stream() const override { return current_stream(current_device()); }
  bool stream_is_capturing(c10::Stream stream) const override { return queue(stream).capture() != nullptr; }
};
DECLARE_HOST_ALLOCATOR(PinnedMemory, PinnedImpl, free_pinned, pinned_memory)

}  // namespace pretended
