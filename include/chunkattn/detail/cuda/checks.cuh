// Checks of a call's arguments by the driver: where memory is, and which device a stream belongs
// to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "../base/check.hpp"
#include "runtime.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// Checks of one object's calls. Refuses by InvalidArgument.
class CallChecks {
 public:
  /// \param pointers  ask the driver about addresses, once about each
  /// \param streams   watch that two streams are not used at the same time
  CallChecks(int device, bool pointers, bool streams)
      : device_(device), pointers_(pointers), streams_(streams) {
    known_.reserve(most_known);
#if CUDART_VERSION >= 12080  // whose cudaStreamGetDevice may be newer than the driver
    int version = 0;
    check_cuda(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
    knows_devices_ = version >= 12080;
#endif
  }

  [[nodiscard]] int device() const noexcept { return device_; }

  /// `pointer` is memory that the device can read, at a multiple of `alignment`.
  void pointer(const char* name, const void* pointer, std::size_t alignment = 16) {
    detail::check_argument(pointer != nullptr, name, pointer, "device memory");
    detail::check_argument(reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0, name,
                           pointer, {"an address that is a multiple of ", alignment});
    if (!pointers_) return;
    const auto at = std::lower_bound(known_.begin(), known_.end(), pointer, std::less<>());
    if (at != known_.end() && *at == pointer) return;
    cudaPointerAttributes attributes{};
    check_cuda(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
    detail::check_argument(
        attributes.type != cudaMemoryTypeUnregistered && attributes.devicePointer != nullptr, name,
        pointer, "device memory, this is host memory");
    detail::check_argument(attributes.type != cudaMemoryTypeDevice || attributes.device == device_,
                           name, attributes.device, {"memory of device ", device_});
    // More than a model of 128 layers with buffers of their own uses: they are not of one.
    if (known_.size() == most_known)
      known_.assign(1, pointer);
    else
      known_.insert(at, pointer);
  }

  /// `stream` is of the device (older drivers cannot tell), and what was enqueued on another has
  /// finished.
  void stream(cudaStream_t stream) {
    if (known_stream_ && stream == stream_) return;
#if CUDART_VERSION >= 12080
    if (knows_devices_) {
      int device = 0;
      check_cuda(cudaStreamGetDevice(stream, &device), "cudaStreamGetDevice");
      detail::check_argument(device == device_, "stream", device, {"a stream of device ", device_});
    }
#endif
    // What is captured runs later, and nothing may be asked meanwhile.
    if (streams_ && known_stream_ && !is_capturing(stream))
      detail::check_argument(last_work_.has_passed(), "stream", static_cast<const void*>(stream),
                             {"the stream of the calls before, ", static_cast<const void*>(stream_),
                              ", until it has finished their work"});
    stream_ = stream;
    known_stream_ = true;
  }

  /// Something was enqueued on `stream`.
  void enqueued(cudaStream_t stream) {
    // An event inside a capture belongs to the graph and does not tell when that runs.
    if (streams_ && !is_capturing(stream)) last_work_.record(stream);
  }

 private:
  static constexpr std::size_t most_known = 1536;

  int device_;
  bool pointers_, streams_;
  bool knows_devices_ = false;      // the driver, of streams
  std::vector<const void*> known_;  // sorted addresses that the driver was asked about
  cudaStream_t stream_ = nullptr;
  bool known_stream_ = false;
  Event last_work_;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
