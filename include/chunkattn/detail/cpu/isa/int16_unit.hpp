// Dot products of pairs of int16 as a unit of dot_first.hpp, for AVX2, which has none of bytes:
// queries, keys, probabilities and values of int8 K and V as 32-bit words of two.
//
//   Sᵀ   2 dims of a key times 2 dims of a query, which is 16 bits with a scale of its own
//   O    2 probabilities times 2 tokens of V. A probability is 15 bits, with a scale of its line: a
//        power of two that leaves the block's largest one all of them.
//
// K and V are widened once per block, V's rows interleaved on the way. VPMADDWD adds two products
// in 32 bits, where all sums fit: they are exact.
#ifndef CHUNKATTN_ISA_INT16_UNIT
#define CHUNKATTN_ISA_INT16_UNIT

#include "chunk_first.hpp"
#include "dot_products.hpp"
#include "dots.hpp"
#include "integers.hpp"
#include "line_state.hpp"
#include "pass.hpp"
#include "simd.hpp"

#if defined(CHUNKATTN_PASS_AVX2)
CHUNKATTN_PASS_BEGIN(DOTS)

/// Tokens or dims of one word.
inline constexpr int int16_depth = 2;

/// Rows of LineState::q_transposed: [HeadDim / 2 words], then what a query's integers count; NaN:
/// it has none.
template <int HeadDim>
struct Int16QueryRows {
  static constexpr int words = HeadDim / int16_depth;
  static constexpr int scale = words;
};

/// The queries of the first lines, once per task: transposed word by word, a vector of lines at a
/// time. Those beyond the last are padding.
template <int HeadDim, int ValueDim>
[[gnu::noinline]] void pack_int16_queries(int lines, LineState<HeadDim, ValueDim>& state) noexcept {
  using Rows = Int16QueryRows<HeadDim>;
  constexpr int width = simd::native_width;
  const std::ptrdiff_t stride = state.transposed_stride;
  for (int line = 0; line < lines; line += width) {
    alignas(64) std::uint16_t elements[to_size(width)][to_size(HeadDim)];
    float* const to = state.q_transposed + line;
    for (int l = 0; l < width; ++l) {
      const auto store = [&](int i, simd::Unsigned<width> integers) CHUNKATTN_LAMBDA {
        simd::store_upper_halves<width>(elements[l] + i,
                                        simd::bits_as<simd::Float<width>>(integers << 16));
      };
      const QueryIntegers<HeadDim> query(state.q + (line + l) * HeadDim, store);
      to[Rows::scale * stride + l] = query.scale;
    }
    transpose_words<Rows::words>(elements, sizeof elements[0], to, stride);
  }
}

/// The first `seen` rows of V, two tokens to a word: ColumnSlices, [block_tokens / 2] of each.
template <int ValueDim>
[[gnu::noinline]] void pack_int16_values(const Block<std::int8_t>& block, int seen,
                                         std::uint32_t* to) noexcept {
  using Slices = ColumnSlices<ValueDim>;
  constexpr int width = Slices::width;
  for (int t = 0; t < seen; t += int16_depth) {
    // Any row does beyond the last that is seen: its probabilities are 0.
    const std::int8_t* const rows[] = {block.v[t], block.v[t + 1]};
    for (int vector = 0; vector < Slices::vectors; ++vector) {
      __m128i bytes[2];
      for (int i = 0; i < 2; ++i)
        bytes[i] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(rows[i] + vector * width));
      const __m256i words = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(bytes[0], bytes[1]));
      const int first = Slices::first_of(vector);
      const int at = first * (block_tokens / int16_depth) +
                     t / int16_depth * Slices::vectors_of(first) + vector - first;
      __builtin_memcpy(to + at * width, &words, sizeof words);
    }
  }
}

template <int HeadDim, int ValueDim>
class Int16Unit : public IntegerUnit<HeadDim, ValueDim, Int16QueryRows<HeadDim>::scale, 15> {
  using Base = IntegerUnit<HeadDim, ValueDim, Int16QueryRows<HeadDim>::scale, 15>;

 public:
  using Rows = Int16QueryRows<HeadDim>;
  using Tile = typename Base::Tile;
  template <int W>
  using Sum = typename Base::template Sum<W>;
  static constexpr int depth = int16_depth;
  static constexpr int passes = 1;
  static constexpr bool keys_in_place = false;
  template <int Vectors>
  static constexpr int key_step = (std::min)(8, Rows::words & -Rows::words);
  static constexpr int p_words = 0;

  static void pack_queries(int lines, LineState<HeadDim, ValueDim>& state) noexcept {
    pack_int16_queries(lines, state);
  }
  CHUNKATTN_INLINE static void pack_key(const std::int8_t* from, char* to) noexcept {
    for (int i = 0; i < HeadDim; i += 8) {
      const __m128i words =
          _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i)));
      __builtin_memcpy(to + 2 * i, &words, sizeof words);
    }
  }

  template <int W, class Key>
  CHUNKATTN_INLINE static Sum<W> dot_key(Sum<W> sum, Key key, simd::Unsigned<W> query) noexcept {
    return dot_int16<W>(sum, key, query);
  }
  template <int W, class Weight>
  CHUNKATTN_INLINE static Sum<W> dot_value(Sum<W> sum, Weight weight,
                                           simd::Unsigned<W> value) noexcept {
    return dot_int16<W>(sum, weight, value);
  }

  CHUNKATTN_INLINE static void pack_values(const Block<std::int8_t>& block, int seen,
                                           std::uint32_t* to) noexcept {
    pack_int16_values<ValueDim>(block, seen, to);
  }
  /// Probabilities are [token][tile_lines], with zeros from the last token to the next multiple of
  /// 2; as words, [block_tokens / 2][tile_lines].
  [[gnu::noinline]] void pack_probabilities(const float* p, const Tile& tile,
                                            std::uint32_t* to) noexcept {
    constexpr int width = simd::native_width;
    for (int line = 0; line < tile.count; line += width) {
      const auto factor = this->choose_scale(tile, line);
      std::uint32_t* words = to + line;
      for (int t = 0; t < tile.seen; t += depth, words += tile_lines) {
        const float* const from = p + t * tile_lines + line;
        const auto both = (Base::as_integers(from, factor) & 0xffffu) |
                          Base::as_integers(from + tile_lines, factor) << 16;
        __builtin_memcpy(words, &both, sizeof both);
      }
    }
  }
};

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_INT16_UNIT
