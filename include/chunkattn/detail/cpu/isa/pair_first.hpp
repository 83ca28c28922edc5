// The chunk-first kernel through dot products of pairs: the same two products and softmax as
// chunk_first.hpp, over the same state, for bfloat16 K and V. A tile of lines goes through the
// whole block before the next one.
//
// Infinities and NaN of V are left out of the product and added to the lines that see them; logits
// that are not finite are computed again in fp32, for their line alone. So lines that do not see a
// token keep their bits.
#ifndef CHUNKATTN_ISA_PAIR_FIRST
#define CHUNKATTN_ISA_PAIR_FIRST

#include "chunk_first.hpp"
#include "dot_softmax.hpp"
#include "line_state.hpp"
#include "pair_operands.hpp"
#include "pair_products.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "simd.hpp"

#if defined(CHUNKATTN_PASS_PAIRS)
CHUNKATTN_PASS_BEGIN(VECTORS)

/// A tile of lines, and how many tokens of a block each of them sees, and the most.
struct PairTile {
  int begin;
  int count;
  int seen;
  alignas(64) std::int32_t visible[tile_lines];

  template <class State>
  CHUNKATTN_INLINE PairTile(const Block<bfloat16>& block, const State& state, int begin_,
                            int count_) noexcept
      : begin(begin_), count(count_), seen(dot_visible(block, state, begin, count, visible)) {}
};

/// Logits of lines of which one that they see is not finite, in fp32: a dot product may have
/// overflowed, or made NaN of an infinity.
template <int HeadDim>
[[gnu::noinline]] void repair_pair_logits(const Block<bfloat16>& block, const PairTile& tile,
                                          const float* q, float* logits) noexcept {
  constexpr int width = simd::width_for<HeadDim>;
  for (int l = 0; l < tile.count; ++l) {
    bool broken = false;
    for (int t = 0; t < tile.visible[l]; ++t)
      broken = broken || (simd::bits_as<std::uint32_t>(logits[t * tile_lines + l]) & 0x7f800000u) ==
                             0x7f800000u;
    for (int t = 0; broken && t < tile.visible[l]; ++t) {
      simd::Float<width> sum = simd::zero<width>();
      for (int i = 0; i < HeadDim; i += width)
        sum = simd::fma(simd::load_widened<width>(block.k[t] + i),
                        simd::load<width>(q + l * HeadDim + i), sum);
      logits[t * tile_lines + l] = simd::reduce_sum<width>(sum);
    }
  }
}

/// Adds the infinities and NaN that pack_pair_values() left out, to the lines that see them.
template <int ValueDim>
[[gnu::noinline]] void add_pair_specials(const Block<bfloat16>& block, const PairTile& tile,
                                         const float* p, float* out) noexcept {
  constexpr int width = simd::width_for<ValueDim>;
  for (int l = 0; l < tile.count; ++l, out += ValueDim) {
    for (int t = 0; t < tile.visible[l]; ++t) {
      const float weight = p[t * tile_lines + l];
      if (is_hidden(weight)) continue;
      for (int i = 0; i < ValueDim; i += width) {
        const simd::Float<width> x = simd::load_widened<width>(block.v[t] + i);
        const simd::Float<width> old = simd::load<width>(out + i);
        simd::store(out + i, simd::select<width>(is_special<width>(x), old + weight * x, old));
      }
    }
  }
}

/// P·V of all columns of a tile.
template <int ValueDim, int Terms>
CHUNKATTN_INLINE void pair_columns(const PairTile& tile, const float* logits, std::uint32_t* p,
                                   const std::uint32_t* v, const float* rescale,
                                   PrefetchCursor& ahead, int burst, float* out) noexcept {
  using Slices = ColumnSlices<ValueDim>;
  constexpr int depth = block_tokens / pair_depth;
  const int words = (tile.seen + pair_depth - 1) / pair_depth;
  pack_pair_probabilities<Terms>(logits, tile.count, tile.seen, p);
  const auto slice = [&]<int Vectors>(std::integral_constant<int, Vectors>,
                                      int at) CHUNKATTN_LAMBDA {
    pair_values<ValueDim, Vectors, Terms>(p, v + at * depth, words, tile.count, rescale, ahead,
                                          burst, out + at);
  };
  if constexpr (Slices::count > 1)
    for (int first = 0; first < Slices::last; first += wide_columns)
      slice(std::integral_constant<int, wide_columns>{}, first * Slices::width);
  slice(std::integral_constant<int, Slices::last_vectors>{}, Slices::last * Slices::width);
}

/// One block for lines [line0, line0 + num_lines), whose queries pack_pair_queries() has packed;
/// `scale` is their sm_scale. Probabilities have `terms` terms.
template <int HeadDim, int ValueDim, class Rules>
[[gnu::noinline]] void pair_first_block(const Block<bfloat16>& block, int line0, int num_lines,
                                        float scale, int terms, LineState<HeadDim, ValueDim>& state,
                                        PrefetchCursor& ahead, Rules rules) noexcept {
  const int seen = dot_visible(block, state, line0, num_lines, nullptr);
  if (seen == 0) return;
  // The scratch of the kernel over floats has room for all: that of widened K or V for their
  // words, that of the probabilities of two tiles for one.
  PairKeys<HeadDim> keys{block, reinterpret_cast<bfloat16*>(state.scratch)};
  auto* const v = reinterpret_cast<std::uint32_t*>(state.scratch + block_tokens * HeadDim / 2);
  float* const logits = state.p;
  auto* const p = reinterpret_cast<std::uint32_t*>(logits + block_tokens * tile_lines);
  bool has_values = false;  // packed: where they are needed, since K is read before
  bool special = false;

  const int steps = num_lines / tile_lines * pair_steps<HeadDim, ValueDim>(tile_lines) +
                    pair_steps<HeadDim, ValueDim>(num_lines % tile_lines);
  const int burst = burst_of(ahead.left, steps);
  for (int l = 0; l < num_lines; l += tile_lines) {
    PairTile tile(block, state, line0 + l, std::min(tile_lines, num_lines - l));
    if (tile.seen == 0) continue;
    const float* const q = state.q_transposed + tile.begin;
    const bool broken =
        tile.count > simd::native_width
            ? pair_logits<HeadDim, ValueDim, 2>(keys, tile.seen, q, state.transposed_stride, scale,
                                                ahead, burst, logits)
            : pair_logits<HeadDim, ValueDim, 1>(keys, tile.seen, q, state.transposed_stride, scale,
                                                ahead, burst, logits);
    if (broken) repair_pair_logits<HeadDim>(block, tile, state.q + tile.begin * HeadDim, logits);
    softmax_of_tile(block, tile.seen, tile.count, tile.visible, logits, tile.begin, state, nullptr,
                    rules);
    if (!has_values) special = pack_pair_values<ValueDim>(block, seen, v);
    has_values = true;
    float* const out = state.out + tile.begin * ValueDim;
    if (terms == 1)
      pair_columns<ValueDim, 1>(tile, logits, p, v, state.rescale, ahead, burst, out);
    else
      pair_columns<ValueDim, 2>(tile, logits, p, v, state.rescale, ahead, burst, out);
    if (special) add_pair_specials<ValueDim>(block, tile, logits, out);
  }
}

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_PAIR_FIRST
