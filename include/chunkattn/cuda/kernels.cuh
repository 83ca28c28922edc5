// The two attention kernels. Both run the loop of tile_attention.cuh; they are cut and ended
// differently.
#pragma once

#include "tile_attention.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace cuda_detail {

/// Chunk-first phase (paper section 3.2, Algorithm 1): what several sequences share, read once for
/// all their rows; each row's partial result goes to the workspace.
template <class T, int HeadDim>
CHUNKATTN_KERNEL CHUNKATTN_LAUNCH_BOUNDS(block_threads, HeadDim <= 128 ? 2 : 1)
    chunk_first_kernel(const AttentionArguments<T> args) {
  run_phase<T, HeadDim, false>(args);
}

/// Sequence-first phase (Algorithm 2): what a sequence has for itself, streamed once, merged with
/// the partials of what it shares, normalised and written in the caller's order. With nothing
/// shared this is the whole of attention: a plain paged kernel.
template <class T, int HeadDim>
CHUNKATTN_KERNEL CHUNKATTN_LAUNCH_BOUNDS(block_threads, HeadDim <= 128 ? 2 : 1)
    sequence_first_kernel(const AttentionArguments<T> args) {
  run_phase<T, HeadDim, true>(args);
}

}  // namespace cuda_detail
CHUNKATTN_NAMESPACE_END
