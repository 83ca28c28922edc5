// A fake of the CUDA runtime calls the library makes, for tests without a GPU: include it before
// cuda.cuh, after emulator.hpp.
//
// Streams are queues that run only when somebody waits for them: copies and kernels happen as late
// as is legal, so a pinned buffer that is written again too early, or a plan that is used before
// its upload, gives wrong results; the former is also noticed by itself. Device memory starts as
// NaN bytes. Captured graphs replay what they recorded. Any call can be told to fail.
#pragma once

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "chunkattn/error.hpp"
#include "simt/emulator.hpp"

#define CHUNKATTN_CUDA_RUNTIME_PROVIDED 1
#define CUDART_VERSION 13000

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorNoDevice = 100,
  cudaErrorNotReady = 600,
  cudaErrorLaunchFailure = 719,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureImplicit = 906
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum cudaSharedCarveout { cudaSharedmemCarveoutMaxShared = 100 };
struct cudaFuncAttributes {};
enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
inline constexpr unsigned cudaEventDisableTiming = 2;

struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void* devicePointer;
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
  Stream* stream = nullptr;
  std::uint64_t recorded = 0, passed = 0;
};

/// What was set up of a kernel before its first launch.
struct KernelState {
  int shared_bytes = 48 * 1024;  // dynamic, at most
  bool max_carveout = false;
};

/// The one fake device and what it noticed.
struct Device {
  struct Range {
    std::size_t bytes;
    cudaMemoryType type;
  };
  std::map<const unsigned char*, Range> memory;
  Stream default_stream;
  std::map<std::string, int> calls;
  std::string failing_call;
  cudaError_t failure = cudaSuccess;
  int calls_before_failure = 0;
  int count = 1, major = 9, sms = 2, shared_per_block = 232448, shared_per_sm = 233472;
  int blocks_by_registers = 2;                 // of a multiprocessor
  std::map<const void*, KernelState> kernels;  // those that are loaded
  int late_loads = 0;                          // kernels that their first launch had to load
  int early_reuses = 0;        // pinned memory that changed while a copy from it was under way
  int capture_violations = 0;  // allocations and waits inside a capture
  Stream* capturing = nullptr;
  std::vector<std::string> launches;

  cudaError_t called(const char* name) {
    ++calls[name];
    if (failing_call == name && calls_before_failure-- == 0) {
      failing_call.clear();
      return failure;
    }
    return cudaSuccess;
  }
  /// Lets the next call but `after` fail.
  void fail(const char* name, cudaError_t error, int after = 0) {
    failing_call = name;
    failure = error;
    calls_before_failure = after;
  }
  const Range* find(const void* pointer) const {
    auto next = memory.upper_bound(static_cast<const unsigned char*>(pointer));
    if (next == memory.begin()) return nullptr;
    --next;
    const bool inside =
        static_cast<const unsigned char*>(pointer) < next->first + next->second.bytes;
    return inside ? &next->second : nullptr;
  }
  cudaError_t allocate(void** out, std::size_t bytes, cudaMemoryType type) {
    if (capturing != nullptr) ++capture_violations;
    if (posix_memalign(out, 256, bytes) != 0) return cudaErrorMemoryAllocation;
    std::memset(*out, 0xff, bytes);
    memory[static_cast<unsigned char*>(*out)] = {bytes, type};
    return cudaSuccess;
  }
  cudaError_t release(void* pointer) {
    default_stream.drain();
    memory.erase(static_cast<unsigned char*>(pointer));
    std::free(pointer);
    return cudaSuccess;
  }
};
inline Device& device() {
  static Device fake;
  return fake;
}

}  // namespace simt

using cudaStream_t = simt::Stream*;
using cudaEvent_t = simt::Event*;

namespace simt {
inline Stream& stream_of(cudaStream_t stream) {
  return stream != nullptr ? *stream : device().default_stream;
}
}  // namespace simt

inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
inline const char* cudaGetErrorString(cudaError_t) {
  return "fake";
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = simt::device().count;
  const cudaError_t result = simt::device().called("cudaGetDeviceCount");
  return result != cudaSuccess ? result : *count > 0 ? cudaSuccess : cudaErrorNoDevice;
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return simt::device().called("cudaGetDevice");
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  const simt::Device& device = simt::device();
  *value = which == cudaDevAttrMultiProcessorCount                ? device.sms
           : which == cudaDevAttrComputeCapabilityMajor           ? device.major
           : which == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? device.shared_per_sm
                                                                  : device.shared_per_block;
  return simt::device().called("cudaDeviceGetAttribute");
}
inline cudaError_t cudaMalloc(void** out, std::size_t bytes) {
  const cudaError_t result = simt::device().called("cudaMalloc");
  return result != cudaSuccess ? result : simt::device().allocate(out, bytes, cudaMemoryTypeDevice);
}
inline cudaError_t cudaMallocHost(void** out, std::size_t bytes) {
  const cudaError_t result = simt::device().called("cudaMallocHost");
  return result != cudaSuccess ? result : simt::device().allocate(out, bytes, cudaMemoryTypeHost);
}
inline cudaError_t cudaFree(void* pointer) {
  return simt::device().release(pointer);
}
inline cudaError_t cudaFreeHost(void* pointer) {
  return simt::device().release(pointer);
}
// A memset, and a copy from memory that is not pinned, may return before the device has done it,
// and streams need not wait for the default stream it is done on: whoever depends on it
// synchronises.
inline cudaError_t cudaMemset(void* target, int value, std::size_t bytes) {
  simt::device().default_stream.enqueue([=] { std::memset(target, value, bytes); });
  return simt::device().called("cudaMemset");
}
inline cudaError_t cudaMemcpy(void* target, const void* source, std::size_t bytes,
                              cudaMemcpyKind kind) {
  if (simt::device().capturing != nullptr) ++simt::device().capture_violations;
  simt::Stream& stream = simt::device().default_stream;
  if (kind == cudaMemcpyDeviceToHost) {
    stream.drain();
    std::memcpy(target, source, bytes);
  } else {
    const auto* first = static_cast<const unsigned char*>(source);
    stream.enqueue([target, bytes, staged = std::vector<unsigned char>(first, first + bytes)] {
      std::memcpy(target, staged.data(), bytes);
    });
  }
  return simt::device().called("cudaMemcpy");
}
inline cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes,
                                   cudaMemcpyKind, cudaStream_t stream) {
  const cudaError_t result = simt::device().called("cudaMemcpyAsync");
  if (result != cudaSuccess) return result;
  const simt::Device::Range* to = simt::device().find(target);
  const simt::Device::Range* from = simt::device().find(source);
  if (to == nullptr || from == nullptr || from->type != cudaMemoryTypeHost)
    return cudaErrorInvalidValue;
  const auto* first = static_cast<const unsigned char*>(source);
  simt::stream_of(stream).enqueue([=, then = std::vector<unsigned char>(first, first + bytes)] {
    if (std::memcmp(then.data(), source, bytes) != 0) ++simt::device().early_reuses;
    std::memcpy(target, source, bytes);
  });
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new simt::Event;
  return simt::device().called("cudaEventCreateWithFlags");
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (event->passed < event->recorded) event->stream->drain();  // else its stream may be gone
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const cudaError_t result = simt::device().called("cudaEventRecord");
  if (result != cudaSuccess) return result;
  event->stream = &simt::stream_of(stream);
  const std::uint64_t number = ++event->recorded;
  event->stream->enqueue([=] { event->passed = number; });
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  const cudaError_t result = simt::device().called("cudaEventQuery");
  if (result != cudaSuccess) return result;
  return event->passed < event->recorded ? cudaErrorNotReady : cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (simt::device().capturing != nullptr) ++simt::device().capture_violations;
  while (event->passed < event->recorded) {  // no further than it must
    const simt::Operation operation = std::move(event->stream->queue.front());
    event->stream->queue.pop_front();
    operation();
  }
  return simt::device().called("cudaEventSynchronize");
}
inline cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  *device = simt::stream_of(stream).device;
  return simt::device().called("cudaStreamGetDevice");
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = simt::stream_of(stream).capture != nullptr ? cudaStreamCaptureStatusActive
                                                       : cudaStreamCaptureStatusNone;
  const simt::Stream* capturing = simt::device().capturing;
  if (stream == nullptr && capturing != nullptr && capturing->blocking)
    return cudaErrorStreamCaptureImplicit;
  return simt::device().called("cudaStreamIsCapturing");
}
inline cudaError_t cudaDeviceSynchronize() {
  if (simt::device().capturing != nullptr) ++simt::device().capture_violations;
  for (simt::Stream* stream : simt::all_streams()) stream->drain();
  return simt::device().called("cudaDeviceSynchronize");
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new simt::Stream;
  return simt::device().called("cudaStreamCreate");
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  stream->drain();
  delete stream;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  simt::stream_of(stream).drain();
  return simt::device().called("cudaStreamSynchronize");
}
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                            const void* pointer) {
  const simt::Device::Range* range = simt::device().find(pointer);
  *attributes = {range != nullptr ? range->type : cudaMemoryTypeUnregistered, 0,
                 range != nullptr ? const_cast<void*>(pointer) : nullptr};
  return simt::device().called("cudaPointerGetAttributes");
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* kernel) {
  const cudaError_t result = simt::device().called("cudaFuncGetAttributes");
  if (result == cudaSuccess) (void)simt::device().kernels[kernel];
  return result;
}
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute which, int value) {
  const cudaError_t result = simt::device().called("cudaFuncSetAttribute");
  if (result != cudaSuccess) return result;
  simt::KernelState& state = simt::device().kernels[kernel];
  if (which == cudaFuncAttributePreferredSharedMemoryCarveout)
    state.max_carveout = value == cudaSharedmemCarveoutMaxShared;
  else if (value > simt::device().shared_per_block)
    return cudaErrorInvalidValue;
  else
    state.shared_bytes = value;
  return cudaSuccess;
}
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel,
                                                                 int, std::size_t shared_bytes) {
  const simt::KernelState& state = simt::device().kernels[kernel];
  const auto bytes = static_cast<int>(shared_bytes);
  // Without the carve-out set the driver may keep half of the memory as L1.
  const int per_sm = simt::device().shared_per_sm / (state.max_carveout ? 1 : 2);
  *blocks = bytes > state.shared_bytes
                ? 0
                : std::min(per_sm / (bytes + 1024), simt::device().blocks_by_registers);
  return simt::device().called("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
}

namespace simt {

/// Records what is enqueued on a stream; replay() enqueues it again.
class Graph {
 public:
  explicit Graph(Stream& stream) : stream_(stream) {
    stream.capture = &operations_;
    device().capturing = &stream;
  }
  void end() {
    stream_.capture = nullptr;
    device().capturing = nullptr;
  }
  void replay() {
    for (const Operation& operation : operations_) stream_.enqueue(operation);
  }
  std::size_t size() const { return operations_.size(); }

 private:
  Stream& stream_;
  std::vector<Operation> operations_;
};

}  // namespace simt

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

inline void check_cuda(cudaError_t result, const char* call, SourceLocation where);

template <class Arguments>
void launch(const char* name, void (*kernel)(Arguments), int grid, int threads, int shared_bytes,
            cudaStream_t stream, std::type_identity_t<Arguments> arguments) {
  const auto where = SourceLocation::current();
  simt::Device& device = simt::device();
  check_cuda(device.called("launch"), name, where);
  const auto [state, late] = device.kernels.try_emplace(reinterpret_cast<const void*>(kernel));
  device.late_loads += late ? 1 : 0;
  check_cuda(shared_bytes > state->second.shared_bytes ? cudaErrorInvalidValue : cudaSuccess, name,
             where);
  device.launches.emplace_back(name);
  simt::stream_of(stream).enqueue([=] {
    simt::launch(grid, threads, static_cast<std::size_t>(shared_bytes), [&] { kernel(arguments); });
  });
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
