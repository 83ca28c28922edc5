// RunningTotal: where a long task leaves its running outputs now and then. An fp32 output that
// takes one addition per KV tile may lose half a unit in its last place each time, and equal values
// all lose the same way; registers have no room for what is lost. So after a window of tiles it
// goes to a total in device memory, which takes few additions and keeps what they round away, and
// begins anew.
#pragma once

#include <cstdint>

#include "../support/array.hpp"
#include "exact_sum.cuh"
#include "merge.cuh"
#include "tile_layout.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// How a warp adds up values. Apart from outputs, but where ptxas would spill then (sm_100a): there
/// each step of 16 tokens is an addition to outputs, which tensor cores truncate twice.
template <HeadDims Dims, class Warps, bool HidesKeys>
struct ValueSums {
  static constexpr bool apart = !(Dims.stored == 1 && Warps::warp_tokens == 64 && HidesKeys);
  static constexpr int window_tiles = apart ? Warps::window_tiles : 8;  ///< of K/V, to a total
};

/// The total of a thread: of the outputs that it holds of `Groups` x 16 rows and `Columns` columns,
/// and of its softmax sums. Nobody else reads it.
template <HeadDims Dims, int Groups, int Columns>
class RunningTotal {
  static constexpr int halves = 2 * Groups;
  static constexpr int values = Columns / 4 + 1;  // of a half: outputs, then the sum
  static constexpr int per_half = 3 * values + 2;
  static_assert(halves * per_half <= total_values(Dims));

 public:
  /// \param row_index  of the thread's rows, every eighth (RowTable)
  CHUNKATTN_DEVICE RunningTotal(float* totals, const std::int32_t* row_index)
      : row_index_(row_index),
        memory_(totals + block() * (total_values(Dims) * block_threads) +
                ptx::opaque(ptx::thread_index())) {}

  /// Adds the running outputs and sums, which are relative to `max`, no less than that of the
  /// windows before. These begin anew, or, the last time, become the total. It is done in memory,
  /// where a loop over them takes no registers beside theirs.
  /// \param first   nothing was added before
  /// \param scale2  of `max`, in base 2
  CHUNKATTN_DEVICE void add(bool first, bool last, const float (&max)[to_size(halves)],
                            float scale2, float (&sum)[to_size(halves)],
                            float (&out)[to_size(Groups)][to_size(Columns / 8)][4]) const {
    CHUNKATTN_UNROLL
    for (int half = 0; half < halves; ++half) {
      if (!is_used(half)) continue;
      at(half, new_max) = max[half];
      at(half, values - 1) = sum[half];
      CHUNKATTN_UNROLL
      for (int i = 0; i < values - 1; ++i) at(half, i) = out[half / 2][i / 2][half % 2 * 2 + i % 2];
    }
    CHUNKATTN_UNROLL_BY(1)
    for (int half = 0; half < halves; ++half)
      if (is_used(half)) add_half(half, first, last, scale2);
    CHUNKATTN_UNROLL
    for (int half = 0; half < halves; ++half) {
      if (!is_used(half)) continue;
      sum[half] = at(half, values - 1);
      CHUNKATTN_UNROLL
      for (int i = 0; i < values - 1; ++i) out[half / 2][i / 2][half % 2 * 2 + i % 2] = at(half, i);
    }
  }

 private:
  static constexpr int new_max = 3 * values;
  static constexpr int old_max = new_max + 1;

  // Of these two ways each takes one register less than the other for some architecture, where
  // ptxas 13.0 has none left.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  CHUNKATTN_DEVICE static std::int64_t block() { return ptx::block_index(); }
#else
  CHUNKATTN_DEVICE static int block() { return ptx::opaque(ptx::block_index()); }
#endif
  // Others have no results.
  CHUNKATTN_DEVICE bool is_used(int half) const { return row_index_[half * 8] >= 0; }
  CHUNKATTN_DEVICE float& at(int half, int i) const {
    return memory_[(half * per_half + i) * block_threads];
  }

  CHUNKATTN_DEVICE void add_half(int half, bool first, bool last, float scale2) const {
    const float max = at(half, new_max);
    const float before = first ? max : at(half, old_max);
    // One that has not moved has the factor 1, infinity too.
    const float factor = ptx::exp2(max > before ? (before - max) * scale2 : 0.0f);
    at(half, old_max) = max;
    CHUNKATTN_UNROLL_BY(8)
    for (int i = 0; i < values; ++i) {
      ExactSum total;
      if (!first) total = {at(half, values + i), at(half, 2 * values + i)};
      total.add(factor, at(half, i), 1.0f);
      at(half, values + i) = total.sum;
      at(half, 2 * values + i) = total.lost;
      at(half, i) = last ? total.value() : 0.0f;
    }
  }

  const std::int32_t* row_index_;
  float* memory_;  // [halves][per_half][block_threads]: new, totals, what these have lost, maxima
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
