// A model of what a step costs on a GPU, in integers and without a device. The scheduler decides by
// nothing else.
//
// A task streams L tokens of K and V for one KV head past a tile of R rows:
//     bytes = L * (k + v) * 2          flops = 2 * R * L * (k + v) (padded rows included)
// where rows of K have k elements and those of V have v,
// and takes the longer of both times, a fixed cost, and the time of its partial results. Times are
// in picoseconds of one block that has its share of the device, so that 264 of them run side by
// side on an H200.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../attention_options.hpp"
#include "../base/config.hpp"
#include "tile_layout.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// Rates and fixed costs, for so many blocks.
struct CostModel : CudaOptions::Tuning {
  std::int32_t num_blocks = 264;  ///< that run at the same time

  /// 1 KiB of device memory, for each of `streams` blocks that stream side by side.
  [[nodiscard]] constexpr std::int64_t kib_ps(std::int64_t streams) const noexcept {
    const std::int64_t share =
        ps_per_kib * std::min<std::int64_t>(streams, num_blocks) / num_blocks;
    return std::min(ps_per_kib, std::max(alone_ps_per_kib, share));
  }

  /// One task: `tokens` K/V rows of 16-bit elements past a tile of `tile_rows`, each KiB
  /// in `kib` ps.
  [[nodiscard]] constexpr std::int64_t stream_ps(std::int64_t tokens, int tile_rows, HeadDims dims,
                                                 std::int64_t kib) const noexcept {
    const std::int64_t bytes = 2 * tokens * (dims.k + dims.v);
    const std::int64_t flops = bytes * tile_rows;
    return std::max(bytes * kib / 1024, flops * ps_per_mflop / 1000000);
  }
  /// One task's time while all blocks stream.
  [[nodiscard]] constexpr std::int64_t stream_ps(std::int64_t tokens, int tile_rows,
                                                 HeadDims dims) const noexcept {
    return stream_ps(tokens, tile_rows, dims, ps_per_kib);
  }

  /// A chunk-first task: streams, and writes a partial result for each of its `rows` packed rows,
  /// each KiB in `write_kib` ps: whoever shares what it reads, that is its own.
  [[nodiscard]] constexpr std::int64_t chunk_first_ps(std::int64_t tokens, int tile_rows, int rows,
                                                      HeadDims dims, std::int64_t kib,
                                                      std::int64_t write_kib) const noexcept {
    return task_ps + stream_ps(tokens, tile_rows, dims, kib) +
           partial_bytes(rows, dims.v) * write_kib / 1024;
  }

  /// A sequence-first task until it needs partial results.
  [[nodiscard]] constexpr std::int64_t sequence_first_ps(std::int64_t tokens, int tile_rows,
                                                         HeadDims dims,
                                                         std::int64_t kib) const noexcept {
    return task_ps + stream_ps(tokens, tile_rows, dims, kib);
  }

  /// Its end: `merges` partial results for each of `rows`.
  [[nodiscard]] constexpr std::int64_t merge_all_ps(int rows, int value_dim,
                                                    int merges) const noexcept {
    return merges_in_a_row(rows, value_dim, merges) * merge_ps;
  }

  /// `rows` partial results of one KV head, written by one task and read by others.
  [[nodiscard]] constexpr std::int64_t partial_ps(std::int64_t rows, int value_dim) const noexcept {
    return 2 * partial_bytes(rows, value_dim) * ps_per_kib / 1024;
  }

 private:
  [[nodiscard]] static constexpr std::int64_t partial_bytes(std::int64_t rows,
                                                            int value_dim) noexcept {
    return rows * (value_dim + 1) * 4;
  }
};

/// The height of a tile that holds `rows` packed rows, at most 64.
[[nodiscard]] constexpr int tile_rows_for(int rows) noexcept {
  return rows > 32 ? 64 : rows > 16 ? 32 : 16;
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
