// The end of a task: the warps' results of each row become one, partial results of other tasks join
// them, and the row is written, normalised. Always in the same order, so always the same bits.
#pragma once

#include "../attention/state.hpp"
#include "../kv/view.hpp"
#include "device_plan.hpp"
#include "ptx.cuh"
#include "tile_layout.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace cuda_detail {

/// The maximum (base 2, scaled) of a row that has seen nothing. Finite, so that differences are
/// ordinary numbers under fast-math; a masked logit is lower still.
inline constexpr float empty_max2 = -1.0e30f;
inline constexpr float masked_logit2 = -3.0e38f;

/// What both attention kernels are given. T: half or bfloat16.
template <class T>
struct AttentionArguments {
  PlanMemory plan;
  KvView<T> kv;
  const T* q;  ///< [num_rows][num_qo_heads][head_dim], the caller's order
  T* out;      ///< as q
  float* lse;  ///< [num_rows][num_qo_heads], natural log; may be null
  std::int32_t num_kv_heads;
  std::int32_t group;       ///< query heads per KV head
  std::int32_t num_stages;  ///< cp.async stages, 2..4
  float scale2;             ///< sm_scale * log2(e)
};

template <class T>
struct alignas(8) Packed4 {
  std::uint32_t words[2];
};

struct alignas(16) Float4 {
  float v[4];
};

/// Reduces and writes the rows of a task. The accumulators stand in shared memory as
/// [kv_warps][row_warps][column_warps][16][warp_columns] floats, not normalised, their maxima and
/// sums in `stats` [warp][16].
///
/// Final: adds the partials task.merge_* in path order and writes q-typed output rows.
/// Otherwise: writes one normalised fp32 partial per row.
template <class T, int HeadDim, int TileRows, bool Final>
CHUNKATTN_DEVICE void write_rows(const AttentionArguments<T>& args, const Task& task,
                                 const unsigned char* shared, bool streamed) {
  using Layout = SharedLayout<HeadDim>;
  using Warps = WarpLayout<HeadDim, TileRows>;
  const SoftmaxState* stats = reinterpret_cast<const SoftmaxState*>(shared + Layout::stats);
  const float* accumulators = reinterpret_cast<const float*>(shared + Layout::stages);
  const int* row_index = reinterpret_cast<const int*>(shared + Layout::row_index);
  const int* row_partial = reinterpret_cast<const int*>(shared + Layout::row_partial);
  constexpr int vectors = HeadDim / 4;
  const int num_merges = Final ? task.merge_count : 0;
  const std::int32_t* merges = args.plan.merges + task.merge_begin;

  for (int i = ptx::thread_index(); i < task.row_count * vectors; i += block_threads) {
    const int row = i / vectors;
    const int column = i % vectors * 4;
    const int row_warp = row / 16;
    const int column_warp = column / Warps::warp_columns;
    const int partial = row_partial[row];

    // Two passes over the few sources: the largest maximum, then the weighted sum.
    float max = empty_max2;
    if (streamed) {
      for (int w = 0; w < Warps::kv_warps; ++w) {
        const SoftmaxState state =
            stats[((w * Warps::row_warps + row_warp) * Warps::column_warps + column_warp) * 16 +
                  row % 16];
        max = state.max > max ? state.max : max;
      }
    }
    for (int p = 0; p < num_merges; ++p) {
      const float lse = args.plan.partial_lse[merges[p] + partial];
      max = lse > max ? lse : max;
    }
    float sum = 0.0f;
    float o[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int p = 0; p < num_merges; ++p) {
      const std::int64_t index = merges[p] + partial;
      const float lse = args.plan.partial_lse[index];
      if (lse <= empty_max2) continue;
      const float weight = ptx::exp2(lse - max);
      const Float4 value =
          *reinterpret_cast<const Float4*>(args.plan.partial_out + index * HeadDim + column);
      sum += weight;
      for (int j = 0; j < 4; ++j) o[j] += weight * value.v[j];
    }
    if (streamed) {
      for (int w = 0; w < Warps::kv_warps; ++w) {
        const int warp = (w * Warps::row_warps + row_warp) * Warps::column_warps + column_warp;
        const SoftmaxState state = stats[warp * 16 + row % 16];
        if (state.empty()) continue;
        const float weight = ptx::exp2(state.max - max);
        const Float4 value = *reinterpret_cast<const Float4*>(
            accumulators + (warp * 16 + row % 16) * Warps::warp_columns +
            column % Warps::warp_columns);
        sum += weight * state.sum;
        for (int j = 0; j < 4; ++j) o[j] += weight * value.v[j];
      }
    }
    const bool empty = sum == 0.0f;
    const float scale = empty ? 0.0f : 1.0f / sum;
    for (int j = 0; j < 4; ++j) o[j] *= scale;

    if constexpr (Final) {
      const std::int64_t line = row_index[row];
      Packed4<T> packed;
      packed.words[0] = ptx::pack<T>(o[0], o[1]);
      packed.words[1] = ptx::pack<T>(o[2], o[3]);
      *reinterpret_cast<Packed4<T>*>(args.out + line * HeadDim + column) = packed;
      if (column == 0 && args.lse != nullptr)
        args.lse[line] = empty ? empty_lse() : (max + ptx::log2(sum)) * 0.6931471805599453f;
    } else {
      const std::int64_t index = task.partial_base + partial;
      *reinterpret_cast<Float4*>(args.plan.partial_out + index * HeadDim + column) =
          Float4{{o[0], o[1], o[2], o[3]}};
      if (column == 0) args.plan.partial_lse[index] = empty ? empty_max2 : max + ptx::log2(sum);
    }
  }
}

}  // namespace cuda_detail
CHUNKATTN_NAMESPACE_END
