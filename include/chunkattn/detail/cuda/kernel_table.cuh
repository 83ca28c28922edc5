// The kernels of one element type, chosen and loaded once.
//
// nvcc gives every translation unit its own copy of a kernel template's host side, so attributes
// set in one and a launch from another may mean two different kernels. Therefore an object takes
// their addresses where it is constructed, readies them there, on its device and outside of any
// capture (a kernel is otherwise loaded by its first launch), and launches nothing else.
#pragma once

#include "kernels.cuh"
#include "launch.cuh"
#include "write.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// Host addresses of the kernels for K/V of T.
template <class T, int HeadDim, int ValueDim>
struct KernelTable {
  void (*attention)(AttentionArguments<T>) = &attention_kernel<T, HeadDim, ValueDim>;
  void (*write)(WriteArguments<T, T>) = &write_kernel<T, T>;
  void (*write_floats)(WriteArguments<T, float>) = &write_kernel<T, float>;
  void (*copy_rows)(CopyArguments<T>) = &copy_rows_kernel<T>;

  /// Loads all of them on the current device and allows the attention kernel `shared_bytes`.
  /// \return blocks of the attention kernel that a multiprocessor holds, 0: none
  [[nodiscard]] int load(int shared_bytes) const {
    load_kernel(write);
    load_kernel(write_floats);
    load_kernel(copy_rows);
    allow_shared(attention, shared_bytes);
    return blocks_per_sm(attention, block_threads, shared_bytes);
  }
};

/// Host address of the attention kernel of a variant. Not inlined, so that all translation units
/// that call it for one variant get the same.
template <class T, int HeadDim, int ValueDim, class V>
[[gnu::noinline]] auto attention_kernel_address() {
  return &attention_kernel<T, HeadDim, ValueDim, V>;
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
