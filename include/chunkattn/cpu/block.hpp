// What the kernels work on: blocks of tokens as arrays of row addresses, and the state of the query
// lines of one task.
//
// A *line* is one query head of one row: line = (row - first row) * group + head within the group.
// The lines of a segment are contiguous, so grouped-query heads are simply more lines.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>

#include "../attention/state.hpp"
#include "../base/config.hpp"
#include "../kv/view.hpp"
#include "../plan/view.hpp"
#include "schedule.hpp"
#include "simd.hpp"
#include "walk.hpp"

CHUNKATTN_ISA_NAMESPACE_BEGIN
namespace cpu {

/// A block of one KV head: the addresses of its K and V rows.
template <class T>
struct Block {
  static constexpr int padding = 16;  // K addresses beyond `count` repeat the last

  int count;
  int position;
  const T* k[block_tokens + padding];
  const T* v[block_tokens];
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
  void append(const KvView<T>& kv, const SlotRun& run, int kv_head, int at) noexcept {
    const T* k_row = kv.k_row(run.slot, kv_head, run.begin);
    const T* v_row = kv.v_row(run.slot, kv_head, run.begin);
    for (int i = 0; i < run.count; ++i) {
      k[at + i] = k_row + i * kv.stride_token;
      v[at + i] = v_row + i * kv.stride_token;
    }
    if constexpr (has_row_scales<T>) {
      const float* k_row_scale = kv.k_row_scale(run.slot, kv_head, run.begin);
      const float* v_row_scale = kv.v_row_scale(run.slot, kv_head, run.begin);
      for (int i = 0; i < run.count; ++i) {
        k_scale[at + i] = k_row_scale[i];
        v_scale[at + i] = v_row_scale[i];
      }
    }
  }

  // Repeats the last K address, so that a kernel may read whole groups of tokens.
  void pad() noexcept {
    for (int i = 0; i < padding; ++i) {
      k[count + i] = k[count - 1];
      if constexpr (has_row_scales<T>) k_scale[count + i] = 0;
    }
  }
};

/// Lines of a tile of the chunk-first kernel.
inline constexpr int tile_lines = 2 * simd::native_width;

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

/// The memory of one worker, for the lines of one task: queries, running softmax, outputs, and the
/// kernels' scratch. Everything is 64-byte aligned.
template <int HeadDim>
class LineState {
 public:
  static constexpr int partial_stride = HeadDim + 16;

  float* q = nullptr;              ///< [lines][HeadDim], scaled by sm_scale
  float* q_transposed = nullptr;   ///< [HeadDim][transposed_stride], the same
  float* out = nullptr;            ///< [lines][HeadDim], unnormalised
  float* merged = nullptr;         ///< [lines][partial_stride], see PartialResults
  float* max = nullptr;            ///< [lines]
  float* sum = nullptr;            ///< [lines]
  std::int32_t* kv_len = nullptr;  ///< [lines] positions seen
  float* p = nullptr;              ///< [tiles][block_tokens][tile_lines], probabilities
  float* rescale = nullptr;        ///< [lines] factors of the current block
  float* scratch = nullptr;        ///< [block_tokens][HeadDim], widened K or V
  float* spare = nullptr;          ///< [HeadDim] a line that nobody reads
  std::ptrdiff_t transposed_stride = 0;

  /// Makes room for `lines` lines; keeps memory that is large enough.
  void reserve(int lines) {
    if (lines <= capacity_) return;
    constexpr std::size_t dim = HeadDim;
    const auto n = static_cast<std::size_t>((lines + tile_lines - 1) / tile_lines * tile_lines +
                                            tile_lines);  // tiles may begin at any line
    // An odd number of cache lines, so that a column does not fall into few cache sets.
    const std::size_t stride = (n / 16 | 1) * 16 + 16 * (n % 16 != 0 ? 2 : 0);
    const std::size_t sizes[] = {
        n * dim, dim * stride + n,  n * dim, n, n, n, n * block_tokens, n, block_tokens * dim,
        dim,     n * partial_stride};
    std::size_t total = 0;
    for (std::size_t size : sizes) total += rounded(size);
    memory_.reset(static_cast<float*>(::operator new(total * sizeof(float), std::align_val_t{64})));
    std::fill_n(memory_.get(), total, 0.0f);
    float* at = memory_.get();
    const auto take = [&](std::size_t size) {
      float* const result = at;
      at += rounded(size);
      return result;
    };
    q = take(sizes[0]);
    q_transposed = take(sizes[1]);
    out = take(sizes[2]);
    max = take(sizes[3]);
    sum = take(sizes[4]);
    kv_len = reinterpret_cast<std::int32_t*>(take(sizes[5]));
    p = take(sizes[6]);
    rescale = take(sizes[7]);
    scratch = take(sizes[8]);
    spare = take(sizes[9]);
    merged = take(sizes[10]);
    transposed_stride = static_cast<std::ptrdiff_t>(stride);
    capacity_ = lines;
  }

  [[nodiscard]] float* merged_line(int line) noexcept {
    return merged + static_cast<std::ptrdiff_t>(line) * partial_stride;
  }

  /// Empty states for lines [begin, end).
  void clear(int begin, int end) noexcept {
    std::fill(max + begin, max + end, empty_max);
    std::fill(sum + begin, sum + end, 0.0f);
    std::fill(out + begin * HeadDim, out + end * HeadDim, 0.0f);
  }

 private:
  static constexpr std::size_t rounded(std::size_t size) { return (size + 15) / 16 * 16; }
  struct Release {
    void operator()(float* memory) const noexcept {
      ::operator delete(memory, std::align_val_t{64});
    }
  };
  std::unique_ptr<float, Release> memory_;
  int capacity_ = 0;
};

/// Number of the block's tokens that `line` sees.
template <class T, int HeadDim>
CHUNKATTN_INLINE int visible_tokens(const Block<T>& block, const LineState<HeadDim>& state,
                                    int line) noexcept {
  return std::clamp(state.kv_len[line] - block.position, 0, block.count);
}

/// out += p * value, `Columns` elements of one line and token. Tokens that only some lines of a
/// group see are added line by line: a probability of 0 would not do, because 0 x NaN is NaN.
template <int Columns, class T>
CHUNKATTN_INLINE void add_value(float p, const T* value, float* out) noexcept {
  constexpr int width = simd::width_for<Columns>;
  for (int i = 0; i < Columns; i += width)
    simd::store(out + i, simd::fma(simd::broadcast<width>(p), simd::load_widened<width>(value + i),
                                   simd::load<width>(out + i)));
}

}  // namespace cpu
CHUNKATTN_ISA_NAMESPACE_END
