// What the CUDA scheduler takes a step to cost, in integers and without a device.
//
// A task streams L tokens of K and V for one KV head past a tile of R rows:
//     bytes = L * (k + v) * stored     flops = 2 * R * L * (k + v) (padded rows included)
// where rows of K have k elements and those of V have v, of so many bytes in memory,
// and takes the longer of both times, a fixed cost, and the time of its partial results. Times are
// in picoseconds of one block, of which 264 run side by side on an H200.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../../attention_options.hpp"
#include "../support/config.hpp"
#include "tile_layout.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// Heads of the layers that a schedule serves.
struct Geometry {
  std::int32_t num_qo_heads = 0;  ///< query heads
  std::int32_t num_kv_heads = 0;  ///< heads of K and of V
  std::int32_t head_dim = 0;      ///< elements per head of K
  std::int32_t value_dim = 0;     ///< elements per head of V; 0: head_dim
  std::int32_t stored_bytes = 2;  ///< of an element of K and V
  /// Query heads that read the same K and V.
  [[nodiscard]] constexpr std::int32_t group() const noexcept {
    return num_qo_heads / num_kv_heads;
  }
  /// Elements of K and of V.
  [[nodiscard]] constexpr detail::cuda::HeadDims dims() const noexcept {
    return {head_dim, value_dim != 0 ? value_dim : head_dim, stored_bytes};
  }
};

/// How much room a schedule has.
struct ScheduleCapacity {
  std::size_t tasks = 0;
  std::size_t merges = 0;
  std::size_t partials = 0;  ///< rows x query heads
};

/// Rates and fixed costs, for so many blocks.
struct CostModel : CudaOptions::Tuning {
  std::int32_t num_blocks = 264;  ///< that run at the same time
  /// Most rows of a tile: 128 where the kernel and its shared memory have room for such.
  std::int32_t most_tile_rows = usual_tile_rows;
  /// CudaOptions::Reduce::batch_invariant, for which nothing here is asked.
  bool batch_invariant = false;

  /// One task: `tokens` K/V rows past a tile of `tile_rows`, each KiB in `kib` ps.
  [[nodiscard]] constexpr std::int64_t stream_ps(std::int64_t tokens, int tile_rows, HeadDims dims,
                                                 std::int64_t kib) const noexcept {
    const std::int64_t bytes = dims.stored * tokens * (dims.k + dims.v);
    const std::int64_t flops = 2 * tokens * (dims.k + dims.v) * tile_rows;
    return std::max(bytes * kib / 1024, flops * ps_per_mflop / 1000000);
  }
  /// `rows` partial results of one KV head, written by one task and read by others.
  [[nodiscard]] constexpr std::int64_t partial_ps(std::int64_t rows, int value_dim) const noexcept {
    return 2 * rows * (value_dim + 1) * 4 * ps_per_kib / 1024;
  }
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
