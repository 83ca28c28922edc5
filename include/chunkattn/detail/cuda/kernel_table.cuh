// The kernels that a program launches, known before main().
//
// A call that launches a kernel registers it by naming it here, so an object loads where it is
// constructed, on its device and outside of any capture, what the program's calls will launch (a
// kernel is otherwise loaded by its first launch), and kernels that no call launches are not
// compiled. nvcc gives every translation unit its own copy of a kernel template's host side:
// attributes set in one and a launch from another may mean two different kernels. Therefore all
// launch the one address that is registered.
#pragma once

#include <algorithm>
#include <limits>

#include "run_tasks.cuh"
#include "runtime.cuh"
#include "write_quantized.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// One that objects of some head dimensions launch.
struct UsedKernel {
  const void* address;
  /// Loads it on the current device. Returns how many of its blocks, each with `shared_bytes`, a
  /// multiprocessor holds, where that matters.
  int (*load)(int shared_bytes);
  const UsedKernel* next;
};

/// Those of ChunkAttention<Cuda, HeadDim, ValueDim>.
template <int HeadDim, int ValueDim>
struct UsedKernels {
  static inline constinit const UsedKernel* first = nullptr;
};

/// `Kernel` as one of them. Naming `one` is what registers it.
template <int HeadDim, int ValueDim, class Kernel>
struct Used : UsedKernel {
  decltype(Kernel::pointer()) pointer;

  Used()
      : UsedKernel{nullptr,
                   [](int shared_bytes) { return Kernel::load(one.pointer, shared_bytes); },
                   UsedKernels<HeadDim, ValueDim>::first},
        pointer(Kernel::pointer()) {
    address = reinterpret_cast<const void*>(pointer);
    UsedKernels<HeadDim, ValueDim>::first = this;
  }
  static const Used one;
};
template <int HeadDim, int ValueDim, class Kernel>
inline const Used<HeadDim, ValueDim, Kernel> Used<HeadDim, ValueDim, Kernel>::one;

template <class T, int HeadDim, int ValueDim, class V = NoVariant>
struct AttentionKernel {
  /// Not inlined, so that all translation units that call it for one variant get the same.
  [[gnu::noinline]] static auto pointer() { return &attention_kernel<T, HeadDim, ValueDim, V>; }
  static int load(void (*kernel)(AttentionArguments<T, V>), int shared_bytes) {
    allow_shared(kernel);
    load_kernel(kernel);
    return blocks_per_sm(kernel, block_threads, shared_bytes);
  }
};

/// One of few blocks, each of little shared memory.
struct SmallKernel {
  template <class Arguments>
  static int load(void (*kernel)(Arguments), int) {
    load_kernel(kernel);
    return (std::numeric_limits<int>::max)();
  }
};
template <class T, class Source>
struct WriteKernel : SmallKernel {
  static auto pointer() {
    if constexpr (has_row_scales<T>)
      return &write_quantized_kernel<T, Source>;
    else
      return &write_kernel<T>;
  }
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
