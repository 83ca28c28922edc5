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

/// The maximum of a row that has seen nothing, of q k and scaled in base 2. Finite, so that
/// differences are ordinary numbers.
inline constexpr float empty_max = -1.0e30f;
inline constexpr float empty_max2 = -1.0e30f;
inline constexpr float lowest_max2 = -3.0e38f;

/// Beyond this a scaled logit is rounded by more than 2^-8.
inline constexpr float far_max2 = 65536.0f;

/// What the attention kernel is given. T: half or bfloat16.
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

struct alignas(8) Float2 {
  float v[2];
};

struct alignas(16) Float4 {
  float v[4];
};

/// Logits, maxima and lse of the kernels are in base 2: one instruction instead of two.
struct Base2 {
  CHUNKATTN_DEVICE static float exp(float x) { return ptx::exp2(x); }
  CHUNKATTN_DEVICE static float log(float x) { return ptx::log2(x); }
};

/// Four columns of one row's result, while the parts of its softmax come together.
struct RowResult {
  SoftmaxState state{empty_max2, 0.0f};
  float o[4] = {0.0f, 0.0f, 0.0f, 0.0f};  ///< weighted values, not normalised

  /// Adds a part with the weighted values `v`, which count for nothing where it is empty.
  CHUNKATTN_DEVICE void add(SoftmaxState part, const Float4& v) {
    if (part.empty()) return;
    const MergedState merged = merge_states<Base2>(state, part);
    for (int j = 0; j < 4; ++j) o[j] = merged.weight_a * o[j] + merged.weight_b * v.v[j];
    state = merged.state;
  }
};

/// What the warps of a block left of one row. The accumulators stand in shared memory as
/// [kv_warps][row_warps][column_warps][16][warp_columns] floats, not normalised, their maxima and
/// sums in `stats` [warp][16].
template <int HeadDim, int TileRows>
CHUNKATTN_DEVICE void add_warps(const unsigned char* shared, int row, int column,
                                RowResult& result) {
  using Layout = SharedLayout<HeadDim>;
  using Warps = WarpLayout<HeadDim, TileRows>;
  const SoftmaxState* stats = reinterpret_cast<const SoftmaxState*>(shared + Layout::stats);
  const float* accumulators = reinterpret_cast<const float*>(shared + Layout::stages);
  for (int w = 0; w < Warps::kv_warps; ++w) {
    const int warp =
        (w * Warps::row_warps + row / 16) * Warps::column_warps + column / Warps::warp_columns;
    const int warp_row = warp * 16 + row % 16;
    const float* values =
        accumulators + warp_row * Warps::warp_columns +
        accumulator_column(Warps::warp_columns, row, column % Warps::warp_columns);
    result.add(stats[warp_row], *reinterpret_cast<const Float4*>(values));
  }
}

/// Adds the partial results that a task merges, in path order. They are read a few at a time: one
/// after the other, each read would wait for the one before.
template <int HeadDim>
CHUNKATTN_DEVICE void add_partials(const PlanMemory& plan, const Task& task, int row_partial,
                                   int column, RowResult& result) {
  constexpr int at_once = 4;
  const Merge* merges = plan.merges + task.merge_begin;
  for (int first = 0; first < task.merge_count; first += at_once) {
    float lse[at_once];
    Float4 values[at_once];
    CHUNKATTN_UNROLL
    for (int i = 0; i < at_once; ++i) {
      const int p = first + i < task.merge_count ? first + i : first;
      const std::int64_t index = merges[p].partial_base + row_partial;
      lse[i] = ptx::load(plan.partial_lse + index);
      values[i] =
          ptx::load(reinterpret_cast<const Float4*>(plan.partial_out + index * HeadDim + column));
    }
    CHUNKATTN_UNROLL
    for (int i = 0; i < at_once; ++i) {
      const bool none =
          first + i >= task.merge_count || lse[i] <= empty_max2;  // a NaN is something
      result.add({lse[i], none ? 0.0f : 1.0f}, values[i]);
    }
  }
}

/// Reduces and writes the rows of a task.
///
/// Final: adds the partials task.merge_* in path order and writes q-typed output rows.
/// Otherwise: writes one normalised fp32 partial per row.
template <class T, int HeadDim, int TileRows, bool Final>
CHUNKATTN_DEVICE void write_rows(const AttentionArguments<T>& args, const Task& task,
                                 const unsigned char* shared, bool streamed) {
  using Layout = SharedLayout<HeadDim>;
  const int* row_index = reinterpret_cast<const int*>(shared + Layout::row_index);
  const int* row_partial = reinterpret_cast<const int*>(shared + Layout::row_partial);
  constexpr int vectors = HeadDim / 4;

  for (int i = ptx::thread_index(); i < task.row_count * vectors; i += block_threads) {
    const int row = i / vectors;
    const int column = i % vectors * 4;
    RowResult result;
    if constexpr (Final) add_partials<HeadDim>(args.plan, task, row_partial[row], column, result);
    if (streamed) add_warps<HeadDim, TileRows>(shared, row, column, result);
    const float scale = normaliser(result.state);
    float(&o)[4] = result.o;
    for (int j = 0; j < 4; ++j) o[j] *= scale;
    const float lse2 = log_sum_exp<Base2>(result.state);

    if constexpr (Final) {
      const std::int64_t line = row_index[row];
      Packed4<T> packed;
      packed.words[0] = ptx::pack<T>(o[0], o[1]);
      packed.words[1] = ptx::pack<T>(o[2], o[3]);
      *reinterpret_cast<Packed4<T>*>(args.out + line * HeadDim + column) = packed;
      if (column == 0 && args.lse != nullptr) args.lse[line] = lse2 * 0.6931471805599453f;
    } else {
      const std::int64_t index = task.partial_base + row_partial[row];
      ptx::store(reinterpret_cast<Float4*>(args.plan.partial_out + index * HeadDim + column),
                 Float4{{o[0], o[1], o[2], o[3]}});
      if (column == 0)
        ptx::store(args.plan.partial_lse + index, result.state.empty() ? empty_max2 : lse2);
    }
  }
}

}  // namespace cuda_detail
CHUNKATTN_NAMESPACE_END
