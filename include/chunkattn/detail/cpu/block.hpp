// Blocks of tokens as arrays of row addresses, and the query lines of one task: what the kernels
// work on.
//
// A *line* is one query head of one row: line = (row - first row) * group + head within the group.
// The lines of a segment are contiguous, so grouped-query heads are simply more lines.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../kv_view.hpp"
#include "../../plan_view.hpp"
#include "../support/config.hpp"
#include "../support/instruction_sets.hpp"
#include "schedule.hpp"
#include "walk.hpp"

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

/// A block of one KV head: the addresses of its K and V rows.
template <class T>
struct Block {
  static constexpr int padding = 16;  // addresses beyond `count` repeat the last

  int count;
  int position;
  const T* k[block_tokens + padding];
  const T* v[block_tokens + padding];
  float k_scale[block_tokens + padding];  // 8-bit elements only
  float v_scale[block_tokens];

  Block(const BlockSpan& span, const KvView<T>& kv, int kv_head) noexcept
      : count(span.count), position(span.position) {
    int filled = 0;
    for (int r = 0; r < span.num_runs; ++r) {
      append(kv, span.runs[r], kv_head, filled);
      filled += span.runs[r].count;
    }
    pad();
  }

 private:
  // The K and V rows of a run, from `at` on.
  void append(const KvView<T>& kv, const ChunkRun& run, int kv_head, int at) noexcept {
    const T* k_row = kv.k_row(run.chunk, kv_head, run.begin);
    const T* v_row = kv.v_row(run.chunk, kv_head, run.begin);
    const std::int64_t v_stride = kv.token_stride_of_v();
    std::int64_t k_offset = 0, v_offset = 0;  // added up: 64-bit products are slow in vectors
    for (int i = 0; i < run.count; ++i, k_offset += kv.stride_token, v_offset += v_stride) {
      k[at + i] = k_row + k_offset;
      v[at + i] = v_row + v_offset;
    }
    if constexpr (has_row_scales<T>) {
      if (kv.scales != KvScales::per_row) [[unlikely]]
        return append_shared_scales(kv, run, kv_head, at);
      const float* k_row_scale = kv.k_row_scale(run.chunk, kv_head, run.begin);
      const float* v_row_scale = kv.v_row_scale(run.chunk, kv_head, run.begin);
      for (int i = 0; i < run.count; ++i) {
        k_scale[at + i] = k_row_scale[i];
        v_scale[at + i] = v_row_scale[i];
      }
    }
  }

  [[gnu::noinline]] void append_shared_scales(const KvView<T>& kv, const ChunkRun& run, int kv_head,
                                              int at) noexcept
    requires has_row_scales<T>
  {
    std::fill_n(k_scale + at, run.count, *kv.k_scale_of(run.chunk, kv_head, run.begin));
    std::fill_n(v_scale + at, run.count, *kv.v_scale_of(run.chunk, kv_head, run.begin));
  }

  // Repeats the last addresses, so that a kernel may read whole groups of tokens.
  void pad() noexcept {
    for (int i = 0; i < padding; ++i) {
      k[count + i] = k[count - 1];
      v[count + i] = v[count - 1];
      if constexpr (has_row_scales<T>) k_scale[count + i] = 0;
    }
  }
};

/// The rows and KV heads of a task. Its lines are [head][row][query head of the group].
struct TaskLines {
  int row_begin;
  int row_end;
  int head_begin;
  int head_end;
  int group;

  [[nodiscard]] int per_head() const noexcept { return (row_end - row_begin) * group; }
  [[nodiscard]] int count() const noexcept { return (head_end - head_begin) * per_head(); }
  /// The first line of a head and row.
  [[nodiscard]] int line(int head, int row) const noexcept {
    return (head - head_begin) * per_head() + (row - row_begin) * group;
  }
};

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
