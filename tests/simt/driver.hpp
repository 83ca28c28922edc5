// The state of the fake CUDA driver of runtime.hpp: two devices with their memory and kernels,
// streams, events, and the rules of captures.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "simt/block.hpp"

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorCallRequiresNewerDriver = 36,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchFailure = 719,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureInvalidated = 901,
  cudaErrorStreamCaptureImplicit = 906,
  cudaErrorCapturedEvent = 907
};
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice };
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeThreadLocal,
  cudaStreamCaptureModeRelaxed
};

namespace simt {

using Operation = std::function<void()>;

struct Stream;
inline std::set<Stream*>& all_streams() {
  static std::set<Stream*> streams;
  return streams;
}

struct Stream {
  Stream() { all_streams().insert(this); }
  ~Stream() { all_streams().erase(this); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  std::deque<Operation> queue;
  std::vector<Operation>* capture = nullptr;
  int device = 0;
  bool blocking = true;  // waits for the default stream, so that one knows of the other's capture

  void enqueue(Operation operation) {
    if (capture != nullptr)
      capture->push_back(std::move(operation));
    else
      queue.push_back(std::move(operation));
  }
  void drain() {
    while (!queue.empty()) {
      const Operation operation = std::move(queue.front());
      queue.pop_front();
      operation();
    }
  }
};

struct Event {
  int device = 0;
  Stream* stream = nullptr;
  std::uint64_t recorded = 0;
  bool captured = false;  // recorded inside a capture last: nobody can wait for it, or ask
  // Outlives the event.
  std::shared_ptr<std::uint64_t> passed = std::make_shared<std::uint64_t>(0);
  /// A stream that is gone, or whose work was dropped, has done it.
  bool is_under_way() const {
    return *passed < recorded && all_streams().contains(stream) && !stream->queue.empty();
  }
};

/// What was set up of a kernel before its first launch.
struct KernelState {
  int shared_bytes = 48 * 1024;  // dynamic, at most
  bool max_carveout = false;
};

/// The fake driver and what it noticed. Its two devices are alike.
struct Device {
  struct Range {
    std::size_t bytes;
    cudaMemoryType type;
    int device;
  };
  std::map<const unsigned char*, Range> memory;
  std::array<Stream, 2> default_streams;
  std::map<std::string, int> calls;
  Operation interrupt;  // what another thread does in each call
  std::string failing_call;
  cudaError_t failure = cudaSuccess;
  int calls_before_failure = 0;
  int any_before_failure = -1;  // calls of any name; negative: none fails
  int count = 2, current = 0, major = 9, sms = 2, shared_per_block = 232448, shared_per_sm = 233472;
  int driver_version = 13000;
  int blocks_by_registers = 2;  // of a multiprocessor
  // Those that are loaded, by device.
  std::map<std::pair<int, const void*>, KernelState> kernels;
  int late_loads = 0;          // kernels that their first launch had to load
  int early_reuses = 0;        // pinned memory that changed while a copy from it was under way
  int capture_violations = 0;  // what would have ended a capture
  Stream* capturing = nullptr;
  bool capture_broken = false;
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;  // of the one thread
  cudaError_t last_error = cudaSuccess;
  std::vector<std::string> launches;
  std::vector<Launch>* gathered = nullptr;  // if set, takes launches whose turn it is

  Device() { default_streams[1].device = 1; }

  cudaError_t result(cudaError_t error) {
    if (error != cudaSuccess) last_error = error;
    return error;
  }
  cudaError_t called(const char* name) {
    ++calls[name];
    if (interrupt) interrupt();
    if (any_before_failure >= 0 && any_before_failure-- == 0) return result(failure);
    if (failing_call == name && calls_before_failure-- == 0) {
      failing_call.clear();
      return result(failure);
    }
    return cudaSuccess;
  }
  /// A call that waits, allocates or asks whether something is done: during a capture only threads
  /// that have said so may make it. Others end the capture.
  cudaError_t unsafe(const char* name) {
    const cudaError_t called_result = called(name);
    if (called_result != cudaSuccess) return called_result;
    if (capturing == nullptr || capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
    return break_capture(cudaErrorStreamCaptureUnsupported);
  }
  /// Work on the default stream, for which the stream that is captured would have to wait.
  cudaError_t on_default_stream(const char* name) {
    const cudaError_t unsafe_result = unsafe(name);
    if (unsafe_result != cudaSuccess || capturing == nullptr || !capturing->blocking)
      return unsafe_result;
    return break_capture(cudaErrorStreamCaptureImplicit);
  }
  cudaError_t break_capture(cudaError_t error) {
    ++capture_violations;
    capture_broken = true;
    return result(error);
  }
  /// Lets the next call but `after` fail.
  void fail(const char* name, cudaError_t error, int after = 0) {
    failing_call = name;
    failure = error;
    calls_before_failure = after;
  }
  /// Lets the next call but `after` fail, whichever that is.
  void fail_any(cudaError_t error, int after) {
    failure = error;
    any_before_failure = after;
  }
  const Range* find(const void* pointer) const {
    auto next = memory.upper_bound(static_cast<const unsigned char*>(pointer));
    if (next == memory.begin()) return nullptr;
    --next;
    const bool inside =
        static_cast<const unsigned char*>(pointer) < next->first + next->second.bytes;
    return inside ? &next->second : nullptr;
  }
  /// Whether these bytes have an address of memory of another device than `device`.
  bool has_foreign(const void* bytes, std::size_t size, int which) const {
    for (std::size_t i = 0; i + sizeof(void*) <= size; i += sizeof(void*)) {
      const void* word;
      std::memcpy(&word, static_cast<const unsigned char*>(bytes) + i, sizeof word);
      const Range* range = find(word);
      if (range != nullptr && range->type == cudaMemoryTypeDevice && range->device != which)
        return true;
    }
    return false;
  }
  cudaError_t allocate(void** out, std::size_t bytes, cudaMemoryType type) {
    *out = ::operator new(bytes, std::align_val_t{256}, std::nothrow);
    if (*out == nullptr) return result(cudaErrorMemoryAllocation);
    std::memset(*out, 0xff, bytes);
    memory[static_cast<unsigned char*>(*out)] = {bytes, type, current};
    return cudaSuccess;
  }
  /// Waits for nobody.
  void release(void* pointer) {
    memory.erase(static_cast<unsigned char*>(pointer));
    ::operator delete(pointer, std::align_val_t{256});
  }
};
inline Device& device() {
  static Device fake;
  return fake;
}

inline Stream& stream_of(Stream* stream) {
  Device& driver = device();
  return stream != nullptr ? *stream
                           : driver.default_streams[static_cast<std::size_t>(driver.current)];
}

/// Another device is current while this lives.
class OnDevice {
 public:
  explicit OnDevice(int which) : before_(std::exchange(device().current, which)) {}
  ~OnDevice() { device().current = before_; }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_;
};

/// Records what is enqueued on a stream; replay() enqueues it again.
class Graph {
 public:
  explicit Graph(Stream& stream) : stream_(stream) {
    stream.capture = &operations_;
    device().capturing = &stream;
    device().capture_broken = false;
  }
  /// Throws where a call in between has ended the capture.
  void end() {
    stream_.capture = nullptr;
    device().capturing = nullptr;
    if (device().capture_broken) throw std::runtime_error("simt: the capture is invalid");
  }
  void replay() { replay(stream_); }
  void replay(Stream& on) {
    for (const Operation& operation : operations_) on.enqueue(operation);
  }
  std::size_t size() const { return operations_.size(); }

 private:
  Stream& stream_;
  std::vector<Operation> operations_;
};

}  // namespace simt
