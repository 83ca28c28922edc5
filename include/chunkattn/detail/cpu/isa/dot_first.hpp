// The chunk-first kernel through dot products of bytes: the same two products and softmax as
// chunk_first.hpp, over the same state, for int8 K and V. A tile of lines goes through the whole
// block before the next one.
//
// What has no integers (see dot_operands.hpp) is computed in fp32, for its line alone, so lines
// that do not see a token keep their bits.
#ifndef CHUNKATTN_ISA_DOT_FIRST
#define CHUNKATTN_ISA_DOT_FIRST

#include "chunk_first.hpp"
#include "dot_operands.hpp"
#include "dot_products.hpp"
#include "dot_softmax.hpp"
#include "elements.hpp"
#include "line_state.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "simd.hpp"

#if defined(CHUNKATTN_PASS_DOTS)
CHUNKATTN_PASS_BEGIN(VECTORS)

/// Whether some of `count` units, rounded up to whole vectors, is NaN.
CHUNKATTN_INLINE bool has_nan(const float* unit, int count) noexcept {
  constexpr int width = simd::native_width;
  simd::Int<width> broken{};
  for (int l = 0; l < count; l += width)
    broken |= (simd::load_int<width>(reinterpret_cast<const std::int32_t*>(unit + l)) &
               0x7fffffff) > 0x7f800000;
  return any_of<width>(broken);
}

/// Logits of queries without integers.
template <int HeadDim>
[[gnu::noinline]] inline void replace_logits(const Block<std::int8_t>& block, int count,
                                             const float* q, const float* unit, int seen,
                                             float* logits) noexcept {
  constexpr int width = simd::width_for<HeadDim>;
  for (int l = 0; l < count; ++l) {
    if ((simd::bits_as<std::uint32_t>(unit[l]) & 0x7fffffffu) <= 0x7f800000u) continue;
    for (int t = 0; t < seen; ++t) {
      simd::Float<width> sum = simd::zero<width>();
      for (int i = 0; i < HeadDim; i += width)
        sum = simd::fma(simd::load_widened<width>(block.k[t] + i),
                        simd::load<width>(q + l * HeadDim + i), sum);
      logits[t * tile_lines + l] = simd::reduce_sum<width>(sum) * block.k_scale[t];
    }
  }
}

/// Adds the values of lines whose probabilities have no unit.
template <int ValueDim>
[[gnu::noinline]] inline void add_values_in_fp32(const Block<std::int8_t>& block, int count,
                                                 int seen, const float* p, const float* unit,
                                                 float* out) noexcept {
  for (int l = 0; l < count; ++l) {
    if (unit[l] != 0) continue;
    for (int t = 0; t < seen; ++t)
      if (const float weight = p[t * tile_lines + l]; !is_hidden(weight))
        add_value<ValueDim>(weight, block.v[t], out + l * ValueDim);
  }
}

/// One block for lines [line0, line0 + num_lines), whose queries pack_dot_queries() has packed.
template <int HeadDim, int ValueDim, class Rules>
[[gnu::noinline]] void dot_first_block(const Block<std::int8_t>& block, int line0, int num_lines,
                                       LineState<HeadDim, ValueDim>& state, PrefetchCursor& ahead,
                                       Rules rules) noexcept {
  constexpr int width = simd::native_width;
  using Slices = ColumnSlices<ValueDim>;
  int seen = dot_visible(block, state, line0, num_lines, nullptr);
  if (seen == 0) return;
  // The scratch of the kernel over floats has room for all: that of widened K or V for their bytes,
  // that of the probabilities of two tiles for one.
  DotKeys<HeadDim> keys{block, reinterpret_cast<std::uint8_t*>(state.scratch)};
  auto* const v = reinterpret_cast<std::uint32_t*>(state.scratch + block_tokens * HeadDim / 4);
  float* const logits = state.p;
  DotProbabilities p;
  p.words = reinterpret_cast<std::uint32_t*>(logits + block_tokens * tile_lines);
  const DotQueries<HeadDim> queries{state.q_transposed, state.transposed_stride};
  const int seen_by_any = seen;
  bool has_values = false;  // packed: where they are needed, since K is read before

  const int steps = num_lines / tile_lines * dot_steps<HeadDim, ValueDim>(tile_lines) +
                    dot_steps<HeadDim, ValueDim>(num_lines % tile_lines);
  const int burst = burst_of(ahead.left, steps);
  for (int l = 0; l < num_lines; l += tile_lines) {
    const int begin = line0 + l;
    const int count = std::min(tile_lines, num_lines - l);
    alignas(64) std::int32_t visible[tile_lines];
    seen = dot_visible(block, state, begin, count, visible);
    if (seen == 0) continue;
    if (count > width)
      dot_logits<HeadDim, ValueDim, 2>(keys, seen, queries, begin, ahead, burst, logits);
    else
      dot_logits<HeadDim, ValueDim, 1>(keys, seen, queries, begin, ahead, burst, logits);
    const float* const unit = queries.unit() + begin;
    if (has_nan(unit, count))
      replace_logits<HeadDim>(block, count, state.q + begin * HeadDim, unit, seen, logits);
    softmax_of_tile(block, seen, count, visible, logits, begin, state, p.top, rules);
    if (!has_values) pack_dot_values<ValueDim>(block, seen_by_any, v);
    has_values = true;
    const bool special = pack_dot_probabilities(logits, count, seen, p);
    float* const out = state.out + begin * ValueDim;
    const int words = (seen + dot_depth - 1) / dot_depth;
    const auto slice = [&]<int Vectors>(std::integral_constant<int, Vectors>,
                                        int at) CHUNKATTN_LAMBDA {
      dot_values<ValueDim, Vectors>(p, v + at * (block_tokens / dot_depth), words, count,
                                    state.rescale, ahead, burst, out + at);
    };
    if constexpr (Slices::count > 1)
      for (int first = 0; first < Slices::last; first += wide_columns)
        slice(std::integral_constant<int, wide_columns>{}, first * Slices::width);
    slice(std::integral_constant<int, Slices::last_vectors>{}, Slices::last * Slices::width);
    if (special) add_values_in_fp32<ValueDim>(block, count, seen, logits, p.unit, out);
  }
}

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_DOT_FIRST
