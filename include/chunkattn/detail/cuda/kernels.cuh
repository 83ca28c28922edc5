// The attention kernel: both phases of the paper in one launch.
#pragma once

#include "run_tasks.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// Chunk-first tasks (paper section 3.2, Algorithm 1): what several sequences share, read once for
/// all their rows; each row's partial result goes to the workspace. Then sequence-first ones
/// (Algorithm 2): what a sequence has for itself, streamed once, merged with the partials of what
/// it shares, normalised and written in the caller's order. With nothing shared this is a plain
/// paged kernel.
///
/// V: the variant (variants.hpp). Compiled only for those that run() is called with. (Two numbers,
/// not HeadDims: nvcc 13.0 cannot write the host side of a kernel with an argument of a class.)
template <class T, int HeadDim, int ValueDim, class V = Plain>
CHUNKATTN_KERNEL CHUNKATTN_LAUNCH_BOUNDS(block_threads, wanted_blocks(HeadDims{HeadDim, ValueDim}))
    attention_kernel(const AttentionArguments<T, V> args) {
  run_tasks<T, HeadDims{HeadDim, ValueDim, static_cast<int>(sizeof(stored_element<T, V>))}>(args);
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
