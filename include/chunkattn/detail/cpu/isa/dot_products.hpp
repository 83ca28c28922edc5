// The two products of the chunk-first kernel as dot products of bytes. As in its loops over floats,
// a few tokens × vectors of lines, or lines × vectors of columns, stay in registers; what they read
// stands in dot_operands.hpp.
#ifndef CHUNKATTN_ISA_DOT_PRODUCTS
#define CHUNKATTN_ISA_DOT_PRODUCTS

#include "chunk_first.hpp"
#include "dot_operands.hpp"
#include "dots.hpp"
#include "line_state.hpp"
#include "pass.hpp"
#include "simd.hpp"

#if defined(CHUNKATTN_PASS_DOTS)
CHUNKATTN_PASS_BEGIN(DOTS)

/// Words of a key between two bursts of prefetches, for so many vectors of lines: with one, twice
/// as many tokens go through a step, and there are fewer steps in which as much is to be
/// prefetched.
template <int HeadDim, int Vectors>
inline constexpr int dot_step =
    std::min(8, (HeadDim / dot_depth) & -(HeadDim / dot_depth)) * Vectors / 2;
/// And words of V.
inline constexpr int dot_value_step = 8;

/// Bursts in the products of a block with `count` lines of a tile.
template <int HeadDim, int ValueDim>
constexpr int dot_steps(int count) noexcept {
  if (count == 0) return 0;
  constexpr int words = HeadDim / dot_depth;
  constexpr int group = simd::num_accumulators / 2;
  const int keys = count > simd::native_width
                       ? block_tokens / group * (words / dot_step<HeadDim, 2>)
                       : block_tokens / (2 * group) * (words / dot_step<HeadDim, 1>);
  const int values = (count + line_group - 1) / line_group * ColumnSlices<ValueDim>::count *
                     (block_tokens / dot_depth / dot_value_step);
  return 2 * (keys + values);
}

template <int W>
CHUNKATTN_INLINE simd::Unsigned<W> load_words(const void* from) noexcept {
  simd::Unsigned<W> words;
  __builtin_memcpy(&words, from, sizeof words);
  return words;
}

/// Packs keys until there are `count`; rows of V that far on go from L2 to L1.
template <int HeadDim, int ValueDim>
CHUNKATTN_INLINE void pack_ahead(DotKeys<HeadDim>& keys, int count) noexcept {
  constexpr int group = DotKeys<HeadDim>::group;
  while (keys.count < count) {
    for (int i = 0; i < group; ++i) {
      const int token = std::min(keys.count + i, keys.block.count - 1);
      for (int at = 0; at < ValueDim; at += 64) prefetch_near(keys.block.v[token] + at);
    }
    keys.pack_group();
  }
}

/// logits[token][line] of `count` tokens, rounded up to whole groups, and Vectors vectors of lines
/// from `line` on. Prefetches some lines of `ahead` at each step.
template <int HeadDim, int ValueDim, int Vectors>
[[gnu::noinline]] void dot_logits(DotKeys<HeadDim>& keys, int count, DotQueries<HeadDim> queries,
                                  int line, PrefetchCursor& ahead, int burst,
                                  float* logits) noexcept {
  constexpr int width = simd::native_width;
  constexpr int group = simd::num_accumulators / Vectors;
  constexpr int words = DotQueries<HeadDim>::words;
  constexpr int step = dot_step<HeadDim, Vectors>;
  using Bits = simd::Unsigned<width>;
  PrefetchCursor lines = ahead;
  const float* const k_scale = keys.block.k_scale;
  const std::uint8_t* k = keys.memory;
  for (int t = 0; t < count; t += group, k += group * HeadDim) {
    pack_ahead<HeadDim, ValueDim>(keys, std::min(t + 2 * group, count));
    Bits sums[group][Vectors];
    CHUNKATTN_UNROLLED
    for (int j = 0; j < group; ++j) {
      CHUNKATTN_UNROLLED
      for (int v = 0; v < Vectors; ++v) sums[j][v] = Bits{};
    }
    for (int term = 0; term < 2; ++term) {
      if (term == 1 && byte_offsets<KeyByte> == 0) {
        CHUNKATTN_UNROLLED
        for (int j = 0; j < group; ++j) {
          CHUNKATTN_UNROLLED
          for (int v = 0; v < Vectors; ++v) sums[j][v] <<= 8;
        }
      } else if (term == 1) {
        Bits offset[Vectors];
        CHUNKATTN_UNROLLED
        for (int v = 0; v < Vectors; ++v)
          offset[v] = load_words<width>(queries.offset() + line + v * width);
        CHUNKATTN_UNROLLED
        for (int j = 0; j < group; ++j) {
          CHUNKATTN_UNROLLED
          for (int v = 0; v < Vectors; ++v) sums[j][v] = (sums[j][v] << 8) + offset[v];
        }
      }
      const float* column = queries.word(term, 0) + line;
      const std::uint8_t* at = k;
      for (int outer = 0; outer < words; outer += step) {
        lines.advance(burst);
        for (int i = 0; i < step; ++i, at += dot_depth, column += queries.stride) {
          Bits query[Vectors];
          CHUNKATTN_UNROLLED
          for (int v = 0; v < Vectors; ++v) query[v] = load_words<width>(column + v * width);
          CHUNKATTN_UNROLLED
          for (int j = 0; j < group; ++j) {
            std::uint32_t word;
            __builtin_memcpy(&word, at + j * HeadDim, sizeof word);
            const auto key = simd::spread<width>(word);
            CHUNKATTN_UNROLLED
            for (int v = 0; v < Vectors; ++v)
              sums[j][v] = dot_bytes<KeyByte, std::int8_t, width>(sums[j][v], key, query[v]);
          }
        }
      }
    }
    CHUNKATTN_UNROLLED
    for (int v = 0; v < Vectors; ++v) {
      const simd::Float<width> unit = simd::load<width>(queries.unit() + line + v * width);
      CHUNKATTN_UNROLLED
      for (int j = 0; j < group; ++j) {
        const auto sum = __builtin_convertvector(simd::bits_as<simd::Int<width>>(sums[j][v]),
                                                 simd::Float<width>);
        simd::store(logits + (t + j) * tile_lines + v * width,
                    sum * unit * simd::broadcast<width>(k_scale[t + j]));
      }
    }
  }
  ahead = lines;
}

/// Columns of the outputs of `count` lines, from `out` on and ValueDim apart: rescaled, += P·V over
/// `words` times 4 tokens. `v`: Vectors vectors of columns of each.
template <int ValueDim, int Vectors>
[[gnu::noinline]] void dot_values(const DotProbabilities& p, const std::uint32_t* v, int words,
                                  int count, const float* rescale, PrefetchCursor& ahead, int burst,
                                  float* out) noexcept {
  constexpr int width = simd::width_for<ValueDim>;
  constexpr int lines_at_once = lines_of<Vectors>;
  using Bits = simd::Unsigned<width>;
  using Real = simd::Float<width>;
  PrefetchCursor lines = ahead;
  for (int line = 0; line < count; line += lines_at_once) {
    Bits sums[lines_at_once][Vectors];
    CHUNKATTN_UNROLLED
    for (int l = 0; l < lines_at_once; ++l) {
      CHUNKATTN_UNROLLED
      for (int i = 0; i < Vectors; ++i) sums[l][i] = Bits{};
    }
    for (int term = 0; term < 2; ++term) {
      if (term == 1) {
        CHUNKATTN_UNROLLED
        for (int l = 0; l < lines_at_once; ++l) {
          CHUNKATTN_UNROLLED
          for (int i = 0; i < Vectors; ++i) {
            sums[l][i] <<= 8;
            if constexpr (byte_offsets<ValueByte> != 0) sums[l][i] += p.offset()[line + l];
          }
        }
      }
      const std::uint32_t* weights = p.words + term * DotProbabilities::term_words + line;
      const std::uint32_t* values = v;
      for (int word = 0; word < words; ++word) {
        if (word % dot_value_step == 0) lines.advance(burst);
        Bits value[Vectors];
        CHUNKATTN_UNROLLED
        for (int i = 0; i < Vectors; ++i)
          __builtin_memcpy(&value[i], values + i * width, sizeof value[i]);
        CHUNKATTN_UNROLLED
        for (int l = 0; l < lines_at_once; ++l) {
          const auto weight = simd::spread<width>(weights[l]);
          CHUNKATTN_UNROLLED
          for (int i = 0; i < Vectors; ++i)
            sums[l][i] = dot_bytes<std::uint8_t, ValueByte, width>(sums[l][i], weight, value[i]);
        }
        values += Vectors * width;
        weights += tile_lines;
      }
    }
    CHUNKATTN_UNROLLED
    for (int l = 0; l < lines_at_once; ++l) {
      if (line + l >= count) break;
      const Real factor = simd::broadcast<width>(rescale[line + l]);
      const Real unit = simd::broadcast<width>(p.unit[line + l]);
      CHUNKATTN_UNROLLED
      for (int i = 0; i < Vectors; ++i) {
        float* const to = out + (line + l) * ValueDim + i * width;
        const auto sum = __builtin_convertvector(simd::bits_as<simd::Int<width>>(sums[l][i]), Real);
        simd::store(to, simd::fma(sum, unit, simd::load<width>(to) * factor));
      }
    }
  }
  ahead = lines;
}

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_DOT_PRODUCTS
