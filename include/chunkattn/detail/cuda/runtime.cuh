// The CUDA runtime calls the library makes: checked, and owned memory, events. Tests define
// CHUNKATTN_CUDA_RUNTIME_PROVIDED and bring a fake of the same names.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

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
  (void)cudaGetLastError();  // a recoverable error must not surface in somebody else's check
  detail::fail(DeviceError(call, static_cast<int>(result), cudaGetErrorString(result), where.file,
                           where.line));
}

/// Device memory, freed at the end.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::size_t bytes) {
    void* memory = nullptr;
    const std::string call = detail::joined({"cudaMalloc(", bytes, ")"});
    if (bytes > 0) check_cuda(cudaMalloc(&memory, bytes), call.c_str());
    data_ = static_cast<std::byte*>(memory);
  }
  DeviceMemory(DeviceMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~DeviceMemory() {
    if (data_ != nullptr) (void)cudaFree(data_);
  }
  [[nodiscard]] std::byte* data() const noexcept { return data_; }

 private:
  std::byte* data_ = nullptr;
};

/// Page-locked host memory: only from such memory is a copy asynchronous.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  explicit PinnedMemory(std::size_t bytes) {
    void* memory = nullptr;
    if (bytes > 0) check_cuda(cudaMallocHost(&memory, bytes), "cudaMallocHost");
    data_ = static_cast<std::byte*>(memory);
  }
  PinnedMemory(PinnedMemory&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~PinnedMemory() {
    if (data_ != nullptr) (void)cudaFreeHost(data_);
  }
  [[nodiscard]] std::byte* data() const noexcept { return data_; }

 private:
  std::byte* data_ = nullptr;
};

class Event {
 public:
  Event() {
    check_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
  }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&&) = delete;
  ~Event() {
    if (event_ != nullptr) (void)cudaEventDestroy(event_);
  }
  void record(cudaStream_t stream) {
    check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord");
  }
  /// Waits on the host; returns at once when the event has passed or was never recorded.
  void wait() { check_cuda(cudaEventSynchronize(event_), "cudaEventSynchronize"); }
  /// Whether it has passed, or was never recorded.
  [[nodiscard]] bool has_passed() {
    const cudaError_t result = cudaEventQuery(event_);
    if (result != cudaErrorNotReady) check_cuda(result, "cudaEventQuery");
    (void)cudaGetLastError();  // "not ready" is an answer
    return result == cudaSuccess;
  }

 private:
  cudaEvent_t event_ = nullptr;
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
