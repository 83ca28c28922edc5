// The CUDA runtime calls the library makes: checked, and owned memory, events. Tests define
// CHUNKATTN_CUDA_RUNTIME_PROVIDED and bring a fake of the same names.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "../../error.hpp"
#include "../base/check.hpp"
#include "../base/config.hpp"

#if !defined(CHUNKATTN_CUDA_RUNTIME_PROVIDED)
#include <cuda_runtime_api.h>
#endif

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

inline void check_cuda(cudaError_t result, const char* call,
                       SourceLocation where = SourceLocation::current()) {
  if (result == cudaSuccess) [[likely]]
    return;
  (void)cudaGetLastError();  // a recoverable error must not surface in a later check
  detail::fail(DeviceError(call, static_cast<int>(result), cudaGetErrorString(result), where.file,
                           where.line));
}

/// Memory that `Kind` allocates, and frees at the end.
template <class Kind>
class OwnedMemory {
 public:
  OwnedMemory() = default;
  explicit OwnedMemory(std::size_t bytes) {
    if (bytes > 0) data_.reset(static_cast<std::byte*>(Kind::allocate(bytes)));
  }
  [[nodiscard]] std::byte* data() const noexcept { return data_.get(); }

 private:
  std::unique_ptr<std::byte, Kind> data_;
};

struct OnDevice {
  static void* allocate(std::size_t bytes) {
    void* memory = nullptr;
    const std::string call = detail::joined({"cudaMalloc(", bytes, ")"});
    check_cuda(cudaMalloc(&memory, bytes), call.c_str());
    return memory;
  }
  void operator()(std::byte* memory) const noexcept { (void)cudaFree(memory); }
};
using DeviceMemory = OwnedMemory<OnDevice>;

/// Page-locked host memory: only from such memory is a copy asynchronous.
struct Pinned {
  static void* allocate(std::size_t bytes) {
    void* memory = nullptr;
    check_cuda(cudaMallocHost(&memory, bytes), "cudaMallocHost");
    return memory;
  }
  void operator()(std::byte* memory) const noexcept { (void)cudaFreeHost(memory); }
};
using PinnedMemory = OwnedMemory<Pinned>;

class Event {
 public:
  Event() {
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    event_.reset(event);
  }
  void record(cudaStream_t stream) {
    check_cuda(cudaEventRecord(event_.get(), stream), "cudaEventRecord");
  }
  /// Waits on the host; returns at once when the event has passed or was never recorded.
  void wait() { check_cuda(cudaEventSynchronize(event_.get()), "cudaEventSynchronize"); }
  /// Whether it has passed, or was never recorded.
  [[nodiscard]] bool has_passed() {
    const cudaError_t result = cudaEventQuery(event_.get());
    if (result != cudaErrorNotReady) check_cuda(result, "cudaEventQuery");
    (void)cudaGetLastError();  // "not ready" is an answer
    return result == cudaSuccess;
  }

 private:
  struct Destroy {
    using pointer = cudaEvent_t;
    void operator()(cudaEvent_t event) const noexcept { (void)cudaEventDestroy(event); }
  };
  std::unique_ptr<cudaEvent_t, Destroy> event_;
};

[[nodiscard]] inline bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status == cudaStreamCaptureStatusActive;
}

/// Whether `stream` is capturing or, for the default stream, any stream that waits for it: then
/// nothing may be allocated.
[[nodiscard]] inline bool is_capture_near(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t result = cudaStreamIsCapturing(stream, &status);
  if (result == cudaErrorStreamCaptureImplicit) {
    (void)cudaGetLastError();  // the answer; the capture goes on
    return true;
  }
  check_cuda(result, "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
