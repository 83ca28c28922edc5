// The CUDA runtime calls the library makes: checked, and owned memory, events, launches. Tests
// define CHUNKATTN_CUDA_RUNTIME_PROVIDED and bring a fake of the same names, and launch().
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>

#include "../../error.hpp"
#include "../../fwd.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"

#if !defined(CHUNKATTN_CUDA_RUNTIME_PROVIDED)
#include <cuda_runtime_api.h>
#endif

CHUNKATTN_NAMESPACE_BEGIN

template <>
struct DeviceTraits<Cuda> {
  using stream = cudaStream_t;
};

namespace detail::cuda {

/// Clears the error `ours`, which one of our calls has returned, so that it does not surface in a
/// later check. What others have left stays.
inline void forget_error(cudaError_t ours) noexcept {
  if (cudaPeekAtLastError() == ours) (void)cudaGetLastError();
}

inline void check_cuda(cudaError_t result, const char* call,
                       SourceLocation where = SourceLocation::current()) {
  if (result == cudaSuccess) [[likely]]
    return;
  forget_error(result);
  detail::fail(DeviceError(call, static_cast<int>(result), cudaGetErrorString(result), where.file,
                           where.line));
}

/// While this lives, calls of this thread that allocate, wait or ask whether something is done do
/// not end the capture of a stream, this thread's or another's. (Such calls are harmless where they
/// concern nothing that is captured, which is for whoever makes this to know.)
class OutsideCaptures {
 public:
  OutsideCaptures() noexcept
      : changed_(cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess) {}
  ~OutsideCaptures() {
    if (changed_) forget_error(cudaThreadExchangeStreamCaptureMode(&mode_));
  }
  OutsideCaptures(const OutsideCaptures&) = delete;
  OutsideCaptures& operator=(const OutsideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then the one before
  bool changed_;
};

/// The device that is current.
[[nodiscard]] inline int current_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

/// Makes a device current while this lives.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) : before_(current_device()), changed_(before_ != device) {
    if (changed_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~CurrentDevice() {
    if (changed_) forget_error(cudaSetDevice(before_));
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_;
  bool changed_;
};

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
    const OutsideCaptures outside;
    const std::string call = detail::joined({"cudaMalloc(", bytes, ")"});
    check_cuda(cudaMalloc(&memory, bytes), call.c_str());
    return memory;
  }
  void operator()(std::byte* memory) const noexcept {
    const OutsideCaptures outside;
    forget_error(cudaFree(memory));
  }
};
using DeviceMemory = OwnedMemory<OnDevice>;

/// Page-locked host memory: only from such memory is a copy asynchronous.
struct Pinned {
  static void* allocate(std::size_t bytes) {
    void* memory = nullptr;
    const OutsideCaptures outside;
    check_cuda(cudaMallocHost(&memory, bytes), "cudaMallocHost");
    return memory;
  }
  void operator()(std::byte* memory) const noexcept {
    const OutsideCaptures outside;
    forget_error(cudaFreeHost(memory));
  }
};
using PinnedMemory = OwnedMemory<Pinned>;

/// Of the device that is current when it is made; never recorded inside a capture.
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
  void wait() { check_cuda(try_wait(), "cudaEventSynchronize"); }
  cudaError_t try_wait() noexcept {
    const OutsideCaptures outside;
    return cudaEventSynchronize(event_.get());
  }
  /// Whether it has passed, or was never recorded.
  [[nodiscard]] bool has_passed() {
    const OutsideCaptures outside;
    const cudaError_t result = cudaEventQuery(event_.get());
    if (result == cudaErrorNotReady)
      forget_error(result);  // it is an answer
    else
      check_cuda(result, "cudaEventQuery");
    return result == cudaSuccess;
  }

 private:
  struct Destroy {
    using pointer = cudaEvent_t;
    void operator()(cudaEvent_t event) const noexcept { forget_error(cudaEventDestroy(event)); }
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
    forget_error(result);  // the answer; the capture goes on
    return true;
  }
  check_cuda(result, "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

/// Zeroes device memory now. The caller's streams need not wait for the default one.
inline void zero_now(std::byte* target, std::size_t bytes) {
  const OutsideCaptures outside;
  check_cuda(cudaMemset(target, 0, bytes), "cudaMemset");
  check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}
/// Copies `rows` rows of `width` bytes, which are `pitch` bytes apart in device memory, side by
/// side in the host's. A copy from pageable memory may return before it has landed, so this waits.
inline void copy_now(std::byte* target, std::size_t pitch, const void* source, std::size_t width,
                     std::size_t rows) {
  const OutsideCaptures outside;
  check_cuda(cudaMemcpy2D(target, pitch, source, width, width, rows, cudaMemcpyHostToDevice),
             "cudaMemcpy2D");
  check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

/// Copies device memory to the host's, now.
inline void copy_to_host(void* target, const void* source, std::size_t bytes) {
  const OutsideCaptures outside;
  check_cuda(cudaMemcpy(target, source, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy(to host)");
}

#if !defined(CHUNKATTN_CUDA_RUNTIME_PROVIDED)
/// Launches `kernel` on `stream` and reports what the launch itself reports. One argument, by
/// value: kernels take a struct.
template <class Arguments>
void launch(const char* name, void (*kernel)(Arguments), int grid, int threads, int shared_bytes,
            cudaStream_t stream, std::type_identity_t<Arguments> arguments) {
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))};
  check_cuda(
      cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(grid)),
                       dim3(static_cast<unsigned>(threads)), pointers,
                       static_cast<std::size_t>(shared_bytes), stream),
      name);
}
#endif

/// Loads a kernel on the current device, which its first launch would do otherwise.
template <class Arguments>
void load_kernel(void (*kernel)(Arguments)) {
  const OutsideCaptures outside;
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)),
             "cudaFuncGetAttributes");
}

[[nodiscard]] inline int device_attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

/// Allows a kernel on the current device as much dynamic shared memory as a block may have there:
/// the driver keeps one cap for the kernel, and objects of several sizes launch it. (The kernels
/// have no static shared memory.) Asks for as much of it per multiprocessor as there is: they keep
/// nothing in L1.
template <class Arguments>
void allow_shared(void (*kernel)(Arguments)) {
  const OutsideCaptures outside;
  const void* const function = reinterpret_cast<const void*>(kernel);
  const int most = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, current_device());
  check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
             "cudaFuncSetAttribute(max dynamic shared memory)");
  check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             "cudaFuncSetAttribute(shared memory carve-out)");
}

/// Blocks of a kernel that a multiprocessor of the current device holds.
template <class Arguments>
[[nodiscard]] int blocks_per_sm(void (*kernel)(Arguments), int threads, int shared_bytes) {
  int blocks = 0;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                 &blocks, reinterpret_cast<const void*>(kernel), threads,
                 static_cast<std::size_t>(shared_bytes)),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return blocks;
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
