// A fake of the CUDA runtime calls the library makes, for tests without a GPU: include it before
// cuda.cuh, after emulator.hpp.
//
// Streams are queues that run only when somebody waits for them: copies and kernels happen as late
// as is legal, so a pinned buffer that is written again too early, or a plan that is used before
// its upload, gives wrong results; the former is also noticed by itself. Device memory starts as
// NaN bytes. Captured graphs replay what they recorded; what a capture forbids ends it. There are
// two devices, each of which refuses streams, events and addresses of the other. Any call can be
// told to fail.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunkattn/error.hpp"
#include "simt/driver.hpp"
#include "simt/emulator.hpp"
#include "simt/executor.hpp"

#define CHUNKATTN_CUDA_RUNTIME_PROVIDED 1
#define CUDART_VERSION 13000

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
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
inline constexpr unsigned cudaEventDisableTiming = 2;

struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void* devicePointer;
};

using cudaStream_t = simt::Stream*;
using cudaEvent_t = simt::Event*;

inline cudaError_t cudaGetLastError() {
  return std::exchange(simt::device().last_error, cudaSuccess);
}
inline cudaError_t cudaPeekAtLastError() {
  return simt::device().last_error;
}
inline const char* cudaGetErrorString(cudaError_t) {
  return "fake";
}
inline cudaError_t cudaDriverGetVersion(int* version) {
  *version = simt::device().driver_version;
  return simt::device().called("cudaDriverGetVersion");
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = simt::device().count;
  const cudaError_t result = simt::device().called("cudaGetDeviceCount");
  return result != cudaSuccess
             ? result
             : simt::device().result(*count > 0 ? cudaSuccess : cudaErrorNoDevice);
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = simt::device().current;
  return simt::device().called("cudaGetDevice");
}
inline cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= simt::device().count)
    return simt::device().result(cudaErrorInvalidDevice);
  const cudaError_t result = simt::device().called("cudaSetDevice");
  if (result == cudaSuccess) simt::device().current = device;
  return result;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, simt::device().capture_mode);
  return cudaSuccess;  // nothing but the argument can be wrong
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
  const cudaError_t result = simt::device().unsafe("cudaMalloc");
  return result != cudaSuccess ? result : simt::device().allocate(out, bytes, cudaMemoryTypeDevice);
}
inline cudaError_t cudaMallocHost(void** out, std::size_t bytes) {
  const cudaError_t result = simt::device().unsafe("cudaMallocHost");
  return result != cudaSuccess ? result : simt::device().allocate(out, bytes, cudaMemoryTypeHost);
}
// Neither waits for what is under way, as neither promises to.
inline cudaError_t cudaFree(void* pointer) {
  const cudaError_t result = simt::device().unsafe("cudaFree");
  if (result == cudaSuccess) simt::device().release(pointer);
  return result;
}
inline cudaError_t cudaFreeHost(void* pointer) {
  const cudaError_t result = simt::device().unsafe("cudaFreeHost");
  if (result == cudaSuccess) simt::device().release(pointer);
  return result;
}
// A memset, and a copy from memory that is not pinned, may return before the device has done it,
// and streams need not wait for the default stream it is done on: whoever depends on it
// synchronises.
inline cudaError_t cudaMemset(void* target, int value, std::size_t bytes) {
  const cudaError_t result = simt::device().on_default_stream("cudaMemset");
  if (result == cudaSuccess)
    simt::stream_of(nullptr).enqueue([=] { std::memset(target, value, bytes); });
  return result;
}
inline cudaError_t cudaMemcpy2D(void* target, std::size_t target_pitch, const void* source,
                                std::size_t source_pitch, std::size_t width, std::size_t height,
                                cudaMemcpyKind kind) {
  simt::Device& device = simt::device();
  const cudaError_t result = device.on_default_stream("cudaMemcpy");
  if (result != cudaSuccess) return result;
  const auto* first = static_cast<const unsigned char*>(source);
  auto* to = static_cast<unsigned char*>(target);
  std::vector<unsigned char> staged;
  const bool to_host = kind == cudaMemcpyDeviceToHost;
  if (to_host) simt::stream_of(nullptr).drain();
  for (std::size_t row = 0; row < height; ++row)
    staged.insert(staged.end(), first + row * source_pitch, first + row * source_pitch + width);
  const simt::Device::Range* range = device.find(target);
  if (!to_host && (range == nullptr || range->device != device.current ||
                   device.has_foreign(staged.data(), staged.size(), range->device)))
    return device.result(cudaErrorInvalidValue);
  simt::stream_of(nullptr).enqueue([=, staged = std::move(staged)] {
    for (std::size_t row = 0; row < height; ++row)
      std::memcpy(to + row * target_pitch, staged.data() + row * width, width);
  });
  if (to_host) simt::stream_of(nullptr).drain();
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* target, const void* source, std::size_t bytes,
                              cudaMemcpyKind kind) {
  return cudaMemcpy2D(target, bytes, source, bytes, bytes, 1, kind);
}
inline cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t bytes,
                                   cudaMemcpyKind, cudaStream_t stream) {
  const cudaError_t result = simt::device().called("cudaMemcpyAsync");
  if (result != cudaSuccess) return result;
  const simt::Device::Range* to = simt::device().find(target);
  const simt::Device::Range* from = simt::device().find(source);
  if (to == nullptr || from == nullptr || from->type != cudaMemoryTypeHost ||
      to->device != simt::stream_of(stream).device)
    return simt::device().result(cudaErrorInvalidValue);
  const auto* first = static_cast<const unsigned char*>(source);
  simt::stream_of(stream).enqueue([=, then = std::vector<unsigned char>(first, first + bytes)] {
    if (simt::device().find(source) == nullptr || std::memcmp(then.data(), source, bytes) != 0) {
      ++simt::device().early_reuses;  // changed, or freed
      return;
    }
    std::memcpy(target, source, bytes);
  });
  return cudaSuccess;
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  const cudaError_t result = simt::device().called("cudaEventCreateWithFlags");
  if (result != cudaSuccess) return result;
  *event = new simt::Event;
  (*event)->device = simt::device().current;
  return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;  // waits for nobody
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const cudaError_t result = simt::device().called("cudaEventRecord");
  if (result != cudaSuccess) return result;
  if (event->device != simt::stream_of(stream).device)
    return simt::device().result(cudaErrorInvalidResourceHandle);
  event->stream = &simt::stream_of(stream);
  event->captured = event->stream->capture != nullptr;
  const std::uint64_t number = ++event->recorded;
  event->stream->enqueue([passed = event->passed, number] { *passed = number; });
  return cudaSuccess;
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  const cudaError_t result = simt::device().unsafe("cudaEventQuery");
  if (result != cudaSuccess) return result;
  if (event->captured) return simt::device().result(cudaErrorCapturedEvent);
  return simt::device().result(event->is_under_way() ? cudaErrorNotReady : cudaSuccess);
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  const cudaError_t result = simt::device().unsafe("cudaEventSynchronize");
  if (result != cudaSuccess) return result;
  if (event->captured) return simt::device().result(cudaErrorCapturedEvent);
  while (event->is_under_way()) {  // no further than it must
    const simt::Operation operation = std::move(event->stream->queue.front());
    event->stream->queue.pop_front();
    operation();
  }
  return cudaSuccess;
}
inline cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  const cudaError_t result = simt::device().called("cudaStreamGetDevice");
  if (result != cudaSuccess) return result;
  if (simt::device().driver_version < 12080)  // its first
    return simt::device().result(cudaErrorCallRequiresNewerDriver);
  *device = simt::stream_of(stream).device;
  return cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = simt::stream_of(stream).capture != nullptr ? cudaStreamCaptureStatusActive
                                                       : cudaStreamCaptureStatusNone;
  const simt::Stream* capturing = simt::device().capturing;
  if (stream == nullptr && capturing != nullptr && capturing->blocking)
    return simt::device().result(cudaErrorStreamCaptureImplicit);
  return simt::device().called("cudaStreamIsCapturing");
}
inline cudaError_t cudaDeviceSynchronize() {
  const cudaError_t result = simt::device().called("cudaDeviceSynchronize");
  if (result != cudaSuccess) return result;
  if (simt::device().capturing != nullptr)  // whatever the thread has said
    return simt::device().break_capture(cudaErrorStreamCaptureUnsupported);
  for (simt::Stream* stream : simt::all_streams()) stream->drain();
  return cudaSuccess;
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new simt::Stream;
  (*stream)->device = simt::device().current;
  return simt::device().called("cudaStreamCreate");
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  stream->drain();
  delete stream;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const cudaError_t result = stream == nullptr
                                 ? simt::device().on_default_stream("cudaStreamSynchronize")
                                 : simt::device().unsafe("cudaStreamSynchronize");
  if (result == cudaSuccess) simt::stream_of(stream).drain();
  return result;
}
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                            const void* pointer) {
  const simt::Device::Range* range = simt::device().find(pointer);
  *attributes = {range != nullptr ? range->type : cudaMemoryTypeUnregistered,
                 range != nullptr ? range->device : 0,
                 range != nullptr ? const_cast<void*>(pointer) : nullptr};
  return simt::device().called("cudaPointerGetAttributes");
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* kernel) {
  const cudaError_t result = simt::device().unsafe("cudaFuncGetAttributes");
  if (result == cudaSuccess) (void)simt::device().kernels[{simt::device().current, kernel}];
  return result;
}
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute which, int value) {
  simt::Device& device = simt::device();
  const cudaError_t result = device.unsafe("cudaFuncSetAttribute");
  if (result != cudaSuccess) return result;
  simt::KernelState& state = device.kernels[{device.current, kernel}];
  if (which == cudaFuncAttributePreferredSharedMemoryCarveout)
    state.max_carveout = value == cudaSharedmemCarveoutMaxShared;
  else if (value > device.shared_per_block)
    return device.result(cudaErrorInvalidValue);
  else
    state.shared_bytes = value;
  return cudaSuccess;
}
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel,
                                                                 int, std::size_t shared_bytes) {
  simt::Device& device = simt::device();
  const simt::KernelState& state = device.kernels[{device.current, kernel}];
  const auto bytes = static_cast<int>(shared_bytes);
  // Without the carve-out set the driver may keep half of the memory as L1.
  const int per_sm = device.shared_per_sm / (state.max_carveout ? 1 : 2);
  *blocks = bytes > state.shared_bytes
                ? 0
                : std::min(per_sm / (bytes + 1024), device.blocks_by_registers);
  return device.called("cudaOccupancyMaxActiveBlocksPerMultiprocessor");
}

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

inline void check_cuda(cudaError_t result, const char* call, SourceLocation where);

template <class Arguments>
void launch(const char* name, void (*kernel)(Arguments), int grid, int threads, int shared_bytes,
            cudaStream_t stream, std::type_identity_t<Arguments> arguments) {
  const auto where = SourceLocation::current();
  simt::Device& device = simt::device();
  check_cuda(device.called("launch"), name, where);
  simt::Stream& target = simt::stream_of(stream);
  check_cuda(device.result(target.device != device.current ? cudaErrorInvalidResourceHandle
                           : device.has_foreign(&arguments, sizeof arguments, device.current)
                               ? cudaErrorIllegalAddress
                               : cudaSuccess),
             name, where);
  const auto [state, late] =
      device.kernels.try_emplace({device.current, reinterpret_cast<const void*>(kernel)});
  device.late_loads += late ? 1 : 0;
  check_cuda(device.result(shared_bytes > state->second.shared_bytes ? cudaErrorInvalidValue
                                                                     : cudaSuccess),
             name, where);
  device.launches.emplace_back(name);
  target.enqueue([=] {
    const bool alone = simt::device().gathered == nullptr;
    const auto bytes = static_cast<std::size_t>(shared_bytes);
    if (alone && simt::executed_elsewhere<Arguments>(kernel, grid, threads, bytes, arguments))
      return;
    simt::Launch launched{grid, threads, bytes, [=] { kernel(arguments); }};
    if (alone)
      simt::launch_together({launched});
    else
      simt::device().gathered->push_back(std::move(launched));
  });
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
