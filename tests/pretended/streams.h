// Streams, events and captures of the pretended device.
//
// A stream is a queue that a thread of its own works off in order; the host goes on at once. Nothing but an event
// orders two streams, which is what makes a missing edge between them show in the results.
#pragma once

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace pretended {

constexpr auto kDevice = c10::DeviceType::CUDA;
constexpr int kStreams = 33;  // per device: the default one, and as many in the pool as CUDA's
using Work = std::function<void()>;

inline int environment(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}
inline int device_count() {
  static const int count = environment("PRETENDED_DEVICES", 1);
  return count;
}

// Errors of work that runs later are reported by whatever synchronizes next, as CUDA's are.
class AsynchronousError {
 public:
  void note(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (first_.empty()) first_ = text;
  }
  std::string take() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::string text;
    text.swap(first_);
    return text;
  }
  void raise() {
    const std::string text = take();
    TORCH_CHECK(text.empty(), "CUDA error (pretended, asynchronous): ", text);
  }

 private:
  std::mutex mutex_;
  std::string first_;
};
// Everything global is leaked on purpose: the streams' threads live until the process ends.
inline AsynchronousError& asynchronous_error() {
  static auto* error = new AsynchronousError;
  return *error;
}

// A capture in progress. While a stream belongs to one, its work is noted instead of run.
struct Capture {
  std::thread::id owner = std::this_thread::get_id();
  bool global = true;
  uint64_t pool = 0;  // memory allocated within belongs to the graph
  std::vector<Work> work;
  std::atomic<bool> done{false}, spoiled{false};
};
using CapturePtr = std::shared_ptr<Capture>;

// What CUDA forbids while others capture. The calls are counted, and the capture is spoiled.
class Captures {
 public:
  void add(const CapturePtr& capture) {
    std::lock_guard<std::mutex> lock(mutex_);
    active_.insert(capture);
    any_ = true;
  }
  void remove(const CapturePtr& capture) {
    std::lock_guard<std::mutex> lock(mutex_);
    active_.erase(capture);
    any_ = !active_.empty();
  }
  void unsafe_call(const char* name) {
    if (!any_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& capture : active_) {
      const bool own = capture->owner == std::this_thread::get_id();
      if (own || !capture->global) continue;  // the owner's own calls raise where they are made
      capture->spoiled = true;
      ++forbidden;
      last = name;
    }
  }
  std::string last_name() {
    std::lock_guard<std::mutex> lock(mutex_);
    return last;
  }
  std::atomic<uint64_t> forbidden{0};

 private:
  std::mutex mutex_;
  std::set<CapturePtr> active_;
  std::atomic<bool> any_{false};
  std::string last;
};
inline Captures& captures() {
  static auto* all = new Captures;
  return *all;
}

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, reached = 0;  // recorded again, an event means the later point
  double time = 0;
  CapturePtr capture;  // in which it was recorded, if any

  bool is_reached(uint64_t point) {
    std::lock_guard<std::mutex> lock(mutex);
    return reached >= point;
  }
  void wait(uint64_t point) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return reached >= point; });
  }
  void reach(uint64_t point) {
    std::lock_guard<std::mutex> lock(mutex);
    reached = std::max(reached, point);
    time = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    changed.notify_all();
  }
};
using EventPtr = std::shared_ptr<Event>;

// A point of an event that has been recorded.
struct Mark {
  EventPtr event;
  uint64_t point;
  bool is_reached() const { return event->is_reached(point); }
};

inline std::atomic<int>& delay(int stream) {
  static auto* delays = new std::atomic<int>[kStreams]();
  return delays[stream];
}

class Queue {
 public:
  explicit Queue(int id) : id_(id), random_(id * 7919 + environment("PRETENDED_SEED", 0)) {}

  void push(Work work) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_capturing()) {
      capture_->work.push_back(std::move(work));
      return;
    }
    put(std::move(work));
  }
  // Every operation of a graph in the order in which it was captured, which respects every edge within.
  void replay(const std::vector<Work>& all) {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!is_capturing(), "a pretended graph cannot be replayed within a capture");
    for (const auto& work : all) put(work);
  }
  // Waits for all that was put here. Other threads must let go of the GIL before.
  void synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    TORCH_CHECK(!is_capturing(), "CUDA error (pretended): operation not permitted when stream is capturing");
    const auto target = put_;
    idle_.wait(lock, [&] { return ran_ >= target; });
  }
  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!is_capturing(), "CUDA error (pretended): operation not permitted when stream is capturing");
    return ran_ >= put_;
  }
  CapturePtr capture() {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_capturing() ? capture_ : nullptr;
  }
  void set_capture(CapturePtr capture) {
    std::lock_guard<std::mutex> lock(mutex_);
    capture_ = std::move(capture);
  }
  Mark record(const EventPtr& event) {
    Mark mark{event, 0};
    {
      std::lock_guard<std::mutex> lock(event->mutex);
      mark.point = ++event->recorded;
      event->capture = capture();
    }
    push([mark] { mark.event->reach(mark.point); });
    return mark;
  }
  Mark record() { return record(std::make_shared<Event>()); }
  void wait(const Mark& mark) {
    CapturePtr theirs, ours = capture();
    {
      std::lock_guard<std::mutex> lock(mark.event->mutex);
      theirs = mark.event->capture;
    }
    if (theirs && theirs->done) return;
    if (theirs) {
      // Waiting for a captured stream joins the capture; its list is in an order that needs no wait.
      TORCH_CHECK(!ours || ours == theirs, "CUDA error (pretended): two captures would be merged");
      set_capture(theirs);
      return;
    }
    TORCH_CHECK(!ours, "CUDA error (pretended): dependency created on uncaptured work in another stream");
    push([mark] { mark.event->wait(mark.point); });
  }

 private:
  bool is_capturing() const { return capture_ && !capture_->done; }
  void put(Work work) {
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();
    }
    queue_.push_back(std::move(work));
    ++put_;
    filled_.notify_one();
  }
  void run() {
    for (;;) {
      Work work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        filled_.wait(lock, [&] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      const int most = 2 * delay(id_);
      if (most > 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % most));
      try {
        work();
      } catch (const std::exception& error) {
        asynchronous_error().note(error.what());
      }
      work = nullptr;  // tensors it holds are let go before anybody is told that it is done
      std::lock_guard<std::mutex> lock(mutex_);
      ++ran_;
      idle_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable filled_, idle_;
  std::deque<Work> queue_;
  uint64_t put_ = 0, ran_ = 0;
  bool started_ = false;
  const int id_;
  std::mt19937 random_;
  CapturePtr capture_;
};

inline Queue& queue(c10::DeviceIndex device, c10::StreamId stream) {
  static auto* queues = [] {
    auto* all = new std::vector<std::unique_ptr<Queue>>;
    for (int i = 0; i < device_count() * kStreams; ++i) all->push_back(std::make_unique<Queue>(i % kStreams));
    return all;
  }();
  return *queues->at(device * kStreams + stream);
}
inline Queue& queue(const c10::Stream& stream) { return queue(stream.device_index(), stream.id()); }

// The current device and its current streams are each thread's own.
inline c10::DeviceIndex& current_device() {
  static thread_local c10::DeviceIndex device = 0;
  return device;
}
inline c10::StreamId& current_stream_id(c10::DeviceIndex device) {
  static thread_local std::vector<c10::StreamId> streams(device_count(), 0);
  return streams.at(device);
}
inline c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), id);
}
inline c10::Stream current_stream(c10::DeviceIndex device) { return stream_of(device, current_stream_id(device)); }
inline Queue& current_queue(c10::DeviceIndex device) { return queue(device, current_stream_id(device)); }

inline void synchronize_device(c10::DeviceIndex device) {
  for (int stream = 0; stream < kStreams; ++stream) queue(device, stream).synchronize();
}

}  // namespace pretended
