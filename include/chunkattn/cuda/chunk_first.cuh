// Chunk-first phase (paper section 3.2, Algorithm 1): what several sequences share, read once for
// all their rows; each row's partial result goes to the workspace.
#pragma once

#include "tile_attention.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace cuda_detail {

template <class T, int HeadDim>
CHUNKATTN_KERNEL CHUNKATTN_LAUNCH_BOUNDS(block_threads, HeadDim <= 128 ? 2 : 1)
    chunk_first_kernel(const AttentionArguments<T> args) {
  run_phase<T, HeadDim, false>(args);
}

}  // namespace cuda_detail
CHUNKATTN_NAMESPACE_END
