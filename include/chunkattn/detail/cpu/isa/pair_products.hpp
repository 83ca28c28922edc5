// The two products of the chunk-first kernel as dot products of pairs of bfloat16. As in its loops
// over floats, a few tokens × vectors of lines, or lines × vectors of columns, stay in registers;
// what they read stands in pair_operands.hpp.
#ifndef CHUNKATTN_ISA_PAIR_PRODUCTS
#define CHUNKATTN_ISA_PAIR_PRODUCTS

#include "chunk_first.hpp"
#include "line_state.hpp"
#include "pair_operands.hpp"
#include "pairs.hpp"
#include "pass.hpp"
#include "simd.hpp"

#if defined(CHUNKATTN_PASS_PAIRS)
CHUNKATTN_PASS_BEGIN(PAIRS)

/// Words of a key between two bursts of prefetches, for so many vectors of lines: with one, twice
/// as many tokens go through a step, and there are fewer steps in which as much is to be
/// prefetched.
template <int Vectors>
inline constexpr int pair_step = 2 * Vectors;
/// And words of V.
inline constexpr int pair_value_step = 8;

/// Bursts in the products of a block with `count` lines of a tile.
template <int HeadDim, int ValueDim>
constexpr int pair_steps(int count) noexcept {
  if (count == 0) return 0;
  constexpr int words = HeadDim / pair_depth;
  constexpr int group = simd::num_accumulators / 2;
  const int keys = count > simd::native_width ? block_tokens / group * (words / pair_step<2>)
                                              : block_tokens / (2 * group) * (words / pair_step<1>);
  const int values = (count + line_group - 1) / line_group * ColumnSlices<ValueDim>::count *
                     (block_tokens / pair_depth / pair_value_step);
  return keys + values;
}

/// Adds groups of keys until there are `count`; rows of K a group further, and of V as far, go from
/// L2 to L1.
template <int HeadDim, int ValueDim>
CHUNKATTN_INLINE void add_ahead(PairKeys<HeadDim>& keys, int count) noexcept {
  constexpr int group = PairKeys<HeadDim>::group;
  constexpr int line = 64 / sizeof(bfloat16);
  const int last = keys.block.count - 1;
  while (keys.count < count) {
    for (int i = 0; i < group; ++i) {
      const bfloat16* const k = keys.block.k[std::min(keys.count + i, last)];
      const bfloat16* const v = keys.block.v[std::min(keys.count + i, last)];
      for (int at = 0; at < HeadDim; at += line) prefetch_near(k + at);
      for (int at = 0; at < ValueDim; at += line) prefetch_near(v + at);
    }
    keys.add_group();
  }
}

/// logits[token][line], times `scale`, of `count` tokens, rounded up to whole groups, and Vectors
/// vectors of lines from `q` on. Prefetches some lines of `ahead` at each step. Returns whether one
/// of them is not finite.
template <int HeadDim, int ValueDim, int Vectors>
[[gnu::noinline]] bool pair_logits(PairKeys<HeadDim>& keys, int count, const float* q,
                                   std::ptrdiff_t stride, float scale, PrefetchCursor& ahead,
                                   int burst, float* logits) noexcept {
  constexpr int width = simd::native_width;
  constexpr int group = simd::num_accumulators / Vectors;
  constexpr int words = HeadDim / pair_depth;
  constexpr int step = pair_step<Vectors>;
  constexpr int part = PairKeys<HeadDim>::group;
  using Bits = simd::Unsigned<width>;
  using Real = simd::Float<width>;
  PrefetchCursor lines = ahead;
  Bits largest{};
  for (int t = 0; t < count; t += group) {
    add_ahead<HeadDim, ValueDim>(keys, std::min(t + 2 * group, count));
    // Groups beyond the last are nobody's.
    const bfloat16* rows[group / part];
    CHUNKATTN_UNROLLED
    for (int i = 0; i < group / part; ++i)
      rows[i] = keys.rows[t + i * part < keys.count ? t / part + i : t / part];
    Real sums[group][Vectors];
    CHUNKATTN_UNROLLED
    for (int j = 0; j < group; ++j) {
      CHUNKATTN_UNROLLED
      for (int v = 0; v < Vectors; ++v) sums[j][v] = Real{};
    }
    const float* column = q;
    for (int outer = 0; outer < words; outer += step) {
      lines.advance(burst);
      for (int i = outer; i < outer + step; ++i, column += stride) {
        Bits query[Vectors];
        CHUNKATTN_UNROLLED
        for (int v = 0; v < Vectors; ++v)
          __builtin_memcpy(&query[v], column + v * width, sizeof query[v]);
        CHUNKATTN_UNROLLED
        for (int j = 0; j < group; ++j) {
          std::uint32_t word;
          __builtin_memcpy(&word, rows[j / part] + (j % part) * HeadDim + i * pair_depth,
                           sizeof word);
          const auto key = simd::spread<width>(word);
          CHUNKATTN_UNROLLED
          for (int v = 0; v < Vectors; ++v)
            sums[j][v] = dot_pairs<width>(sums[j][v], query[v], key);
        }
      }
    }
    CHUNKATTN_UNROLLED
    for (int j = 0; j < group; ++j) {
      CHUNKATTN_UNROLLED
      for (int v = 0; v < Vectors; ++v) {
        const Real s = sums[j][v] * scale;
        const Bits size = simd::bits_as<Bits>(s) & 0x7fffffffu;
        largest = largest > size ? largest : size;
        simd::store(logits + (t + j) * tile_lines + v * width, s);
      }
    }
  }
  ahead = lines;
  return any_of<width>((simd::Int<width>)(largest >= 0x7f800000u));
}

/// Columns of the outputs of `count` lines, from `out` on and ValueDim apart: rescaled, += P·V over
/// `words` times 2 tokens. `v`: Vectors vectors of columns of each.
template <int ValueDim, int Vectors, int Terms>
[[gnu::noinline]] void pair_values(const std::uint32_t* p, const std::uint32_t* v, int words,
                                   int count, const float* rescale, PrefetchCursor& ahead,
                                   int burst, float* out) noexcept {
  constexpr int width = simd::width_for<ValueDim>;
  constexpr int lines_at_once = lines_of<Vectors>;
  using Bits = simd::Unsigned<width>;
  using Real = simd::Float<width>;
  PrefetchCursor lines = ahead;
  for (int line = 0; line < count; line += lines_at_once) {
    Real sums[lines_at_once][Vectors];
    CHUNKATTN_UNROLLED
    for (int l = 0; l < lines_at_once; ++l) {
      CHUNKATTN_UNROLLED
      for (int i = 0; i < Vectors; ++i) sums[l][i] = Real{};
    }
    const std::uint32_t* weights = p + line;
    const std::uint32_t* values = v;
    for (int word = 0; word < words; ++word) {
      if (word % pair_value_step == 0) lines.advance(burst);
      Bits value[Vectors];
      CHUNKATTN_UNROLLED
      for (int i = 0; i < Vectors; ++i)
        __builtin_memcpy(&value[i], values + i * width, sizeof value[i]);
      CHUNKATTN_UNROLLED
      for (int term = 0; term < Terms; ++term) {
        CHUNKATTN_UNROLLED
        for (int l = 0; l < lines_at_once; ++l) {
          const auto weight = simd::spread<width>(weights[term * tile_lines + l]);
          CHUNKATTN_UNROLLED
          for (int i = 0; i < Vectors; ++i)
            sums[l][i] = dot_pairs<width>(sums[l][i], value[i], weight);
        }
      }
      values += Vectors * width;
      weights += Terms * tile_lines;
    }
    CHUNKATTN_UNROLLED
    for (int l = 0; l < lines_at_once; ++l) {
      if (line + l >= count) break;
      const Real factor = simd::broadcast<width>(rescale[line + l]);
      CHUNKATTN_UNROLLED
      for (int i = 0; i < Vectors; ++i)
        add_block_sum<width>(sums[l][i], factor, out + (line + l) * ValueDim + i * width);
    }
  }
  ahead = lines;
}

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_PAIR_PRODUCTS
