// The place of a thread in a tile.
#pragma once

#include "ptx.cuh"
#include "tile_layout.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// This thread's place, and its warp's share of a tile, by its WarpLayout: found again wherever it
/// is needed, because registers are for outputs.
template <class Warps>
struct WarpPlace {
  int thread = ptx::opaque(ptx::thread_index());
  int lane = thread % 32;
  int warp = thread / 32;
  int column_warp = warp % Warps::column_warps;
  int first_row = warp / Warps::column_warps % Warps::row_warps * Warps::warp_rows;
  int kv_warp = warp / (Warps::column_warps * Warps::row_warps);
  int first_token = kv_warp * Warps::warp_tokens;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
