// Dot products of bytes as a unit of dot_first.hpp: queries, keys, probabilities and values of int8
// K and V as 32-bit words of four bytes.
//
//   Sᵀ   4 dims of a key times 4 dims of a query. A query is 16 bits with a scale of its own, 256
//        high + low, both signed bytes: two passes, the sums shifted by 8 in between.
//   O    4 probabilities times 4 tokens of V. A probability is 16 bits without sign, with a scale
//        of its line: a power of two that leaves the block's largest one all of them.
//
// VPDPBUSD multiplies unsigned bytes by signed ones, so keys come with 128 added; SDOT and UDOT
// multiply bytes of one kind, so values do. The offset is taken back as 128 times the sum of the
// query's or the line's integers. All of this is exact modulo 2^32, and the result fits.
#ifndef CHUNKATTN_ISA_BYTE_UNIT
#define CHUNKATTN_ISA_BYTE_UNIT

#include "chunk_first.hpp"
#include "dot_products.hpp"
#include "dots.hpp"
#include "integers.hpp"
#include "line_state.hpp"
#include "pass.hpp"
#include "simd.hpp"

#if defined(CHUNKATTN_PASS_DOTS) && !defined(CHUNKATTN_PASS_AVX2)
CHUNKATTN_PASS_BEGIN(DOTS)

/// Tokens or dims of one word.
inline constexpr int byte_depth = 4;

// ---- Queries ----------------------------------------------------------------------------------

/// Rows of LineState::q_transposed: [2 terms][HeadDim / 4 words], high bytes first, then
template <int HeadDim>
struct ByteQueryRows {
  static constexpr int words = HeadDim / byte_depth;  // of each term
  /// -128 times the sum of a query's integers; not used where keys are signed;
  static constexpr int offset = 2 * words;
  /// what a query's integers count; NaN: it has none.
  static constexpr int scale = offset + 1;
  static_assert(scale < HeadDim);
};

/// The low bytes of words.
template <class Bits>
CHUNKATTN_INLINE void store_bytes(std::int8_t* to, Bits words) noexcept {
  constexpr int width = sizeof(Bits) / sizeof(std::uint32_t);
  typedef std::uint8_t Narrow __attribute__((vector_size(width)));
  const Narrow narrow = __builtin_convertvector(words & 255u, Narrow);
  __builtin_memcpy(to, &narrow, sizeof narrow);
}

/// The queries of the first lines, once per task: transposed word by word, a vector of lines at a
/// time. Those beyond the last are padding.
template <int HeadDim, int ValueDim>
[[gnu::noinline]] void pack_byte_queries(int lines, LineState<HeadDim, ValueDim>& state) noexcept {
  using Rows = ByteQueryRows<HeadDim>;
  constexpr int width = simd::native_width;
  const std::ptrdiff_t stride = state.transposed_stride;
  for (int line = 0; line < lines; line += width) {
    alignas(64) std::int8_t bytes[2][to_size(width)][to_size(HeadDim)];
    float* const to = state.q_transposed + line;
    for (int l = 0; l < width; ++l) {
      const auto split = [&](int i, auto integers) CHUNKATTN_LAMBDA {
        store_bytes(bytes[0][l] + i, (integers + 128u) >> 8);
        store_bytes(bytes[1][l] + i, integers);
      };
      const QueryIntegers<HeadDim> query(state.q + (line + l) * HeadDim, split);
      const std::uint32_t offset = 0u - 128u * query.sum;
      __builtin_memcpy(to + Rows::offset * stride + l, &offset, sizeof offset);
      to[Rows::scale * stride + l] = query.scale;
    }
    for (int term = 0; term < 2; ++term)
      transpose_words<Rows::words>(bytes[term], HeadDim, to + term * Rows::words * stride, stride);
  }
}

// ---- Values -----------------------------------------------------------------------------------

/// W bytes as the low ones of words.
template <int W>
CHUNKATTN_INLINE simd::Unsigned<W> load_bytes(const std::int8_t* from) noexcept {
#if defined(CHUNKATTN_PASS_AVX512)
  if constexpr (W == 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return simd::bits_as<simd::Unsigned<W>>(_mm512_maskz_cvtepu8_epi32(0xffff, bytes));
  }
#endif
  typedef std::uint8_t Narrow __attribute__((vector_size(W)));
  Narrow narrow;
  __builtin_memcpy(&narrow, from, sizeof narrow);
  return __builtin_convertvector(narrow, simd::Unsigned<W>);
}

/// `Vectors` vectors of words from four rows, whose bytes come in the order 0, 2, 1, 3.
template <int W, int Vectors>
CHUNKATTN_INLINE void interleave(const std::int8_t* const (&rows)[byte_depth], int column,
                                 simd::Unsigned<W> (&words)[to_size(Vectors)]) noexcept {
#if defined(CHUNKATTN_PASS_NEON)
  if constexpr (W == 4 && Vectors == 4) {
    uint8x16_t row[byte_depth];
    CHUNKATTN_UNROLLED
    for (int i = 0; i < byte_depth; ++i) row[i] = vreinterpretq_u8_s8(vld1q_s8(rows[i] + column));
    const uint8x16x2_t even = vzipq_u8(row[0], row[2]), odd = vzipq_u8(row[1], row[3]);
    CHUNKATTN_UNROLLED
    for (int i = 0; i < 2; ++i) {
      const uint16x8x2_t both =
          vzipq_u16(vreinterpretq_u16_u8(even.val[i]), vreinterpretq_u16_u8(odd.val[i]));
      words[2 * i] = simd::bits_as<simd::Unsigned<W>>(both.val[0]);
      words[2 * i + 1] = simd::bits_as<simd::Unsigned<W>>(both.val[1]);
    }
    return;
  }
#endif
#if defined(CHUNKATTN_PASS_AVX512)
  if constexpr (W == 16 && Vectors == 4) {
    // Interleaving works within 128 bits: dword 4 i + j of a row goes to dword 4 j + i.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i row[byte_depth];
    CHUNKATTN_UNROLLED
    for (int i = 0; i < byte_depth; ++i)
      row[i] = _mm512_maskz_permutexvar_epi32(0xffff, order, _mm512_loadu_si512(rows[i] + column));
    const __m512i all = _mm512_setzero_si512();
    const __m512i even[2] = {_mm512_mask_unpacklo_epi8(all, ~__mmask64{}, row[0], row[2]),
                             _mm512_mask_unpackhi_epi8(all, ~__mmask64{}, row[0], row[2])};
    const __m512i odd[2] = {_mm512_mask_unpacklo_epi8(all, ~__mmask64{}, row[1], row[3]),
                            _mm512_mask_unpackhi_epi8(all, ~__mmask64{}, row[1], row[3])};
    CHUNKATTN_UNROLLED
    for (int i = 0; i < 2; ++i) {
      words[2 * i] = simd::bits_as<simd::Unsigned<W>>(
          _mm512_mask_unpacklo_epi16(all, ~__mmask32{}, even[i], odd[i]));
      words[2 * i + 1] = simd::bits_as<simd::Unsigned<W>>(
          _mm512_mask_unpackhi_epi16(all, ~__mmask32{}, even[i], odd[i]));
    }
    return;
  }
#endif
  CHUNKATTN_UNROLLED
  for (int i = 0; i < Vectors; ++i) {
    simd::Unsigned<W> row[byte_depth];
    CHUNKATTN_UNROLLED
    for (int t = 0; t < byte_depth; ++t) row[t] = load_bytes<W>(rows[t] + column + i * W);
    words[i] = (row[0] | row[2] << 8) | (row[1] << 16 | row[3] << 24);
  }
}

/// The first `seen` rows of V as ValueByte, four tokens to a word, in the order in which
/// ByteUnit::pack_probabilities() has them: ColumnSlices, [block_tokens / 4] of each. Tokens beyond
/// the last repeat it.
template <int ValueDim>
[[gnu::noinline]] void pack_byte_values(const Block<std::int8_t>& block, int seen,
                                        std::uint32_t* to) noexcept {
  using Slices = ColumnSlices<ValueDim>;
  constexpr int width = Slices::width;
  constexpr int whole = ValueDim / (4 * width) * 4 * width;
  for (int t = 0; t < seen; t += byte_depth) {
    // Any row does beyond the last that is seen: its probabilities are 0.
    const std::int8_t* rows[byte_depth];
    CHUNKATTN_UNROLLED
    for (int i = 0; i < byte_depth; ++i) rows[i] = block.v[(std::min)(t + i, seen - 1)];
    const auto pack = [&]<int Vectors>(std::integral_constant<int, Vectors>,
                                       int begin) CHUNKATTN_LAMBDA {
      simd::Unsigned<width> words[to_size(Vectors)];
      interleave<width, Vectors>(rows, begin, words);
      CHUNKATTN_UNROLLED
      for (int i = 0; i < Vectors; ++i) {
        words[i] ^= byte_offsets<ValueByte>;
        const int vector = begin / width + i;
        const int first = Slices::first_of(vector);
        const int at = first * (block_tokens / byte_depth) +
                       t / byte_depth * Slices::vectors_of(first) + vector - first;
        __builtin_memcpy(to + at * width, &words[i], sizeof words[i]);
      }
    };
    if constexpr (whole > 0)
      for (int begin = 0; begin < whole; begin += 4 * width)
        pack(std::integral_constant<int, 4>{}, begin);
    if constexpr (whole < ValueDim)
      for (int begin = whole; begin < ValueDim; begin += width)
        pack(std::integral_constant<int, 1>{}, begin);
  }
}

// ---- The unit ---------------------------------------------------------------------------------

template <int HeadDim, int ValueDim>
class ByteUnit : public IntegerUnit<HeadDim, ValueDim, ByteQueryRows<HeadDim>::scale, 16> {
  using Base = IntegerUnit<HeadDim, ValueDim, ByteQueryRows<HeadDim>::scale, 16>;

 public:
  using Rows = ByteQueryRows<HeadDim>;
  using Tile = typename Base::Tile;
  template <int W>
  using Sum = typename Base::template Sum<W>;
  static constexpr int depth = byte_depth;
  static constexpr int passes = 2;  // high bytes, then low ones
  static constexpr bool keys_in_place = byte_offsets<KeyByte> == 0;
  template <int Vectors>
  static constexpr int key_step = (std::min)(8, Rows::words & -Rows::words) * Vectors / 2;
  /// Probabilities are words of four tokens in the order 0, 2, 1, 3: [2 passes][block_tokens / 4]
  /// [tile_lines], high bytes first; then -128 times the sum of each line's integers, not used
  /// where values are signed.
  static constexpr int p_words = block_tokens / depth * tile_lines;

  static void pack_queries(int lines, LineState<HeadDim, ValueDim>& state) noexcept {
    pack_byte_queries(lines, state);
  }
  /// A row of K as KeyByte.
  CHUNKATTN_INLINE static void pack_key(const std::int8_t* from, char* to) noexcept {
    constexpr int whole = HeadDim / 16 * 16;
    constexpr int width = simd::width_for<(std::max)(whole / 4, 4)>;
    for (int i = 0; i < whole; i += 4 * width) {
      const simd::Unsigned<width> bytes = load_words<width>(from + i) ^ byte_offsets<KeyByte>;
      __builtin_memcpy(to + i, &bytes, sizeof bytes);
    }
    if constexpr (whole < HeadDim) {
      std::uint64_t bytes;
      __builtin_memcpy(&bytes, from + whole, sizeof bytes);
      bytes ^= byte_offsets<KeyByte> * 0x100000001u;
      __builtin_memcpy(to + whole, &bytes, sizeof bytes);
    }
  }

  template <int W, class Key>
  CHUNKATTN_INLINE static Sum<W> dot_key(Sum<W> sum, Key key, simd::Unsigned<W> query) noexcept {
    return dot_bytes<KeyByte, std::int8_t, W>(sum, key, query);
  }
  template <int W, class Weight>
  CHUNKATTN_INLINE static Sum<W> dot_value(Sum<W> sum, Weight weight,
                                           simd::Unsigned<W> value) noexcept {
    return dot_bytes<std::uint8_t, ValueByte, W>(sum, weight, value);
  }

  template <int Tokens, int Vectors, class V>
  CHUNKATTN_INLINE static void move_logits(const float* queries, std::ptrdiff_t stride,
                                           V (&sums)[to_size(Tokens)][to_size(Vectors)]) noexcept {
    constexpr int width = simd::native_width;
    CHUNKATTN_UNROLLED
    for (int v = 0; v < Vectors; ++v) {
      V offset{};
      if constexpr (byte_offsets<KeyByte> != 0)
        offset = load_words<width>(queries + Rows::offset * stride + v * width);
      CHUNKATTN_UNROLLED
      for (int j = 0; j < Tokens; ++j) sums[j][v] = (sums[j][v] << 8) + offset;
    }
  }
  template <int Lines, int Vectors, class V>
  CHUNKATTN_INLINE static void move_values(const std::uint32_t* p,
                                           V (&sums)[to_size(Lines)][to_size(Vectors)]) noexcept {
    CHUNKATTN_UNROLLED
    for (int l = 0; l < Lines; ++l) {
      CHUNKATTN_UNROLLED
      for (int i = 0; i < Vectors; ++i) {
        sums[l][i] <<= 8;
        if constexpr (byte_offsets<ValueByte> != 0) sums[l][i] += p[2 * p_words + l];
      }
    }
  }

  CHUNKATTN_INLINE static void pack_values(const Block<std::int8_t>& block, int seen,
                                           std::uint32_t* to) noexcept {
    pack_byte_values<ValueDim>(block, seen, to);
  }

  /// Probabilities are [token][tile_lines], with zeros from the last token to the next multiple of
  /// 4.
  [[gnu::noinline]] void pack_probabilities(const float* p, const Tile& tile,
                                            std::uint32_t* to) noexcept {
    constexpr int width = simd::native_width;
    using Bits = simd::Unsigned<width>;
    for (int line = 0; line < tile.count; line += width) {
      const auto factor = this->choose_scale(tile, line);
      const auto integer = [&](int t) CHUNKATTN_LAMBDA {
        return Base::as_integers(p + t * tile_lines + line, factor);
      };
      std::uint32_t* words = to + line;
      Bits sum{};
      for (int t = 0; t < tile.seen; t += depth, words += tile_lines) {
        const Bits first = (integer(t) & 0xffffu) | integer(t + 1) << 16;
        const Bits second = (integer(t + 2) & 0xffffu) | integer(t + 3) << 16;
        if constexpr (byte_offsets<ValueByte> != 0)
          sum += (first & 0xffffu) + (first >> 16) + (second & 0xffffu) + (second >> 16);
        const Bits high = ((first >> 8) & 0x00ff00ffu) | (second & 0xff00ff00u);
        const Bits low = (first & 0x00ff00ffu) | ((second << 8) & 0xff00ff00u);
        __builtin_memcpy(words, &high, sizeof high);
        __builtin_memcpy(words + p_words, &low, sizeof low);
      }
      if constexpr (byte_offsets<ValueByte> != 0) {
        sum *= 0u - 128u;
        __builtin_memcpy(to + 2 * p_words + line, &sum, sizeof sum);
      }
    }
  }
};

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_BYTE_UNIT
