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
//
// A query that holds an infinity or NaN, or nothing but numbers too small for a scale, has no
// integers: its scale is NaN, and its logits are computed in fp32. Likewise the values of a line
// whose probabilities are not all finite and positive: its scale is 0.
#ifndef CHUNKATTN_ISA_BYTE_UNIT
#define CHUNKATTN_ISA_BYTE_UNIT

#include "chunk_first.hpp"
#include "dot_products.hpp"
#include "dots.hpp"
#include "elements.hpp"
#include "line_state.hpp"
#include "line_tile.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "simd.hpp"

#if defined(CHUNKATTN_PASS_DOTS)
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

/// The largest integer of a query: low bytes are signed, too.
inline constexpr float largest_query = 127 * 256 + 127;

/// One query as bytes: `high` and `low` receive HeadDim of them.
template <int HeadDim>
struct QueryBytes {
  std::uint32_t sum;
  float scale;

  CHUNKATTN_INLINE QueryBytes(const float* q, std::int8_t* high, std::int8_t* low) noexcept {
    constexpr int width = simd::width_for<HeadDim>;
    using Bits = simd::Unsigned<width>;
    Bits sizes{};
    for (int i = 0; i < HeadDim; i += width) {
      const Bits size = simd::bits_as<Bits>(simd::load<width>(q + i)) & 0x7fffffffu;
      sizes = sizes > size ? sizes : size;
    }
    std::uint32_t top = 0;
    for (int i = 0; i < width; ++i) top = std::max(top, sizes[i]);
    constexpr std::uint32_t least = 0x0d800000u;  // 2^-100: scales are normal numbers
    constexpr std::uint32_t infinity = 0x7f800000u;
    const bool has_scale = top == 0 || (top >= least && top < infinity);
    const float largest = simd::bits_as<float>(top);
    scale = has_scale ? largest / largest_query : simd::bits_as<float>(0x7fc00000u);
    const float factor = has_scale && top > 0 ? largest_query / largest : 0.0f;
    Bits total{};
    for (int i = 0; i < HeadDim; i += width) {
      // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
      simd::Float<width> x = simd::load<width>(q + i) * simd::broadcast<width>(factor);
      if (factor == 0) x = simd::zero<width>();
      const Bits integer = simd::bits_as<Bits>(x + simd::broadcast<width>(0x1.8p23f)) - 0x4b400000u;
      store(high + i, (integer + 128u) >> 8);
      store(low + i, integer);
      total += integer;
    }
    sum = 0;
    for (int i = 0; i < width; ++i) sum += total[i];
  }

 private:
  template <class Bits>
  CHUNKATTN_INLINE static void store(std::int8_t* to, Bits bits) noexcept {
    constexpr int width = sizeof(Bits) / sizeof(std::uint32_t);
    typedef std::uint8_t Narrow __attribute__((vector_size(width)));
    const Narrow narrow = __builtin_convertvector(bits & 255u, Narrow);
    __builtin_memcpy(to, &narrow, sizeof narrow);
  }
};

/// The queries of the first lines, once per task: transposed word by word, a vector of lines at a
/// time. Those beyond the last are padding.
template <int HeadDim, int ValueDim>
[[gnu::noinline]] void pack_byte_queries(int lines, LineState<HeadDim, ValueDim>& state) noexcept {
  using Rows = ByteQueryRows<HeadDim>;
  constexpr int width = simd::native_width;
  const std::ptrdiff_t stride = state.transposed_stride;
  for (int line = 0; line < lines; line += width) {
    alignas(64) std::int8_t bytes[2][width][HeadDim];
    float* const to = state.q_transposed + line;
    for (int l = 0; l < width; ++l) {
      const QueryBytes<HeadDim> query(state.q + (line + l) * HeadDim, bytes[0][l], bytes[1][l]);
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
    return (simd::Unsigned<W>)_mm512_maskz_cvtepu8_epi32(0xffff, bytes);
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
                                 simd::Unsigned<W> (&words)[Vectors]) noexcept {
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
      words[2 * i] = (simd::Unsigned<W>)both.val[0];
      words[2 * i + 1] = (simd::Unsigned<W>)both.val[1];
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
      words[2 * i] =
          (simd::Unsigned<W>)_mm512_mask_unpacklo_epi16(all, ~__mmask32{}, even[i], odd[i]);
      words[2 * i + 1] =
          (simd::Unsigned<W>)_mm512_mask_unpackhi_epi16(all, ~__mmask32{}, even[i], odd[i]);
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
    for (int i = 0; i < byte_depth; ++i) rows[i] = block.v[std::min(t + i, seen - 1)];
    const auto pack = [&]<int Vectors>(std::integral_constant<int, Vectors>,
                                       int begin) CHUNKATTN_LAMBDA {
      simd::Unsigned<width> words[Vectors];
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
class ByteUnit {
 public:
  using Element = std::int8_t;
  using Operands = DotOperands<ByteUnit>;
  using Rows = ByteQueryRows<HeadDim>;
  using Tile = LineTile<tile_lines>;
  static constexpr int head_dim = HeadDim, value_dim = ValueDim;
  static constexpr int depth = byte_depth;
  static constexpr int passes = 2;  // high bytes, then low ones
  static constexpr int terms = 1, max_terms = 1;
  static constexpr bool checked_logits = false;
  static constexpr bool keys_in_place = byte_offsets<KeyByte> == 0;
  template <int Vectors>
  static constexpr int key_step = std::min(8, Rows::words & -Rows::words) * Vectors / 2;
  /// Probabilities are words of four tokens in the order 0, 2, 1, 3: [2 passes][block_tokens / 4]
  /// [tile_lines], high bytes first; then -128 times the sum of each line's integers, not used
  /// where values are signed.
  static constexpr int p_words = block_tokens / depth * tile_lines;
  template <int W>
  using Sum = simd::Unsigned<W>;

  /// A row of K as KeyByte.
  CHUNKATTN_INLINE static void pack_key(const std::int8_t* from, char* to) noexcept {
    constexpr int whole = HeadDim / 16 * 16;
    constexpr int width = simd::width_for<std::max(whole / 4, 4)>;
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

  template <class V, int Tokens, int Vectors>
  CHUNKATTN_INLINE static void move_logits(const float* queries, std::ptrdiff_t stride,
                                           V (&sums)[Tokens][Vectors]) noexcept {
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
  template <class V, int Lines, int Vectors>
  CHUNKATTN_INLINE static void move_values(const std::uint32_t* p,
                                           V (&sums)[Lines][Vectors]) noexcept {
    CHUNKATTN_UNROLLED
    for (int l = 0; l < Lines; ++l) {
      CHUNKATTN_UNROLLED
      for (int i = 0; i < Vectors; ++i) {
        sums[l][i] <<= 8;
        if constexpr (byte_offsets<ValueByte> != 0) sums[l][i] += p[2 * p_words + l];
      }
    }
  }

  CHUNKATTN_INLINE static auto query_factor(const float* queries, std::ptrdiff_t stride) noexcept {
    return simd::load<simd::native_width>(queries + Rows::scale * stride);
  }
  template <class V, class Real>
  CHUNKATTN_INLINE static Real logit(V sum, Real factor, const Block<std::int8_t>& block,
                                     int token) noexcept {
    constexpr int width = simd::native_width;
    return as_real<width>(simd::bits_as<simd::Int<width>>(sum)) * factor *
           simd::broadcast<width>(block.k_scale[token]);
  }
  CHUNKATTN_INLINE float value_factor(int line) const noexcept { return scale_[line]; }
  template <int W>
  CHUNKATTN_INLINE static void add_values(Sum<W> sum, simd::Float<W> factor,
                                          simd::Float<W> rescaling, float* out) noexcept {
    const auto block_sum = as_real<W>(simd::bits_as<simd::Int<W>>(sum));
    simd::store(out, simd::fma(block_sum, factor, simd::load<W>(out) * rescaling));
  }

  /// Logits of queries without integers.
  CHUNKATTN_INLINE void repair_logits(Operands& operands, const Tile& tile, bool) const noexcept {
    constexpr int width = simd::native_width;
    const float* const scale =
        operands.state.q_transposed + tile.begin + Rows::scale * operands.state.transposed_stride;
    simd::Int<width> broken{};
    for (int l = 0; l < tile.count; l += width)
      broken |= (simd::load_int<width>(reinterpret_cast<const std::int32_t*>(scale + l)) &
                 0x7fffffff) > 0x7f800000;
    if (any_of<width>(broken)) replace_logits(operands, tile, scale);
  }

  CHUNKATTN_INLINE std::uint32_t* top() noexcept { return top_; }

  CHUNKATTN_INLINE static void pack_values(const Block<std::int8_t>& block, int seen,
                                           std::uint32_t* to) noexcept {
    pack_byte_values<ValueDim>(block, seen, to);
  }

  /// Probabilities are [token][tile_lines], with zeros from the last token to the next multiple of
  /// 4.
  [[gnu::noinline]] void pack_probabilities(const float* p, const Tile& tile,
                                            std::uint32_t* to) noexcept {
    constexpr int width = simd::native_width;
    using Real = simd::Float<width>;
    using Bits = simd::Unsigned<width>;
    some_unscaled_ = false;
    for (int line = 0; line < tile.count; line += width) {
      const Bits top = load_words<width>(top_ + line);
      const Bits regular = (Bits)(top < 0x7f800000u);
      some_unscaled_ = some_unscaled_ ||
                       any_of<width>((simd::Int<width>)(~regular) &
                                     (simd::Int<width>)(simd::iota<width>() < tile.count - line));
      // The largest integer is 2^15 or more and rounds to less than 2^16; no scale is subnormal.
      Bits exponent = regular & ((top + 0x80u) >> 23);
      exponent = exponent > 16u ? exponent : Bits{} + 16u;
      const Real factor = simd::bits_as<Real>((269u - exponent) << 23);
      simd::store(scale_ + line, simd::bits_as<Real>(regular & ((exponent - 15u) << 23)));
      // Adding 2^23 rounds to an integer and leaves it in the low bits.
      const auto integer = [&](int t) CHUNKATTN_LAMBDA {
        return simd::bits_as<Bits>(simd::fma(simd::load<width>(p + t * tile_lines + line), factor,
                                             simd::broadcast<width>(0x1p23f)));
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

  /// The values of lines whose probabilities have no scale.
  CHUNKATTN_INLINE void repair_values(const Operands& operands, const Tile& tile,
                                      float* out) const noexcept {
    if (some_unscaled_) add_values_in_fp32(operands, tile, out);
  }

 private:
  [[gnu::noinline]] static void replace_logits(Operands& operands, const Tile& tile,
                                               const float* scale) noexcept {
    const Block<std::int8_t>& block = operands.block;
    for (int l = 0; l < tile.count; ++l) {
      if ((simd::bits_as<std::uint32_t>(scale[l]) & 0x7fffffffu) <= 0x7f800000u) continue;
      float* const logits = operands.logits + l;
      logits_in_fp32<HeadDim>(block, tile.seen, operands.state.q + (tile.begin + l) * HeadDim,
                              logits, tile_lines);
      for (int t = 0; t < tile.seen; ++t) logits[t * tile_lines] *= block.k_scale[t];
    }
  }
  [[gnu::noinline]] void add_values_in_fp32(const Operands& operands, const Tile& tile,
                                            float* out) const noexcept {
    for (int l = 0; l < tile.count; ++l) {
      if (scale_[l] != 0) continue;
      for (int t = 0; t < tile.seen; ++t)
        if (const float weight = operands.logits[t * tile_lines + l]; !is_hidden(weight))
          add_value<ValueDim>(weight, operands.block.v[t], out + l * ValueDim);
    }
  }

  alignas(64) std::uint32_t top_[tile_lines];  // bits of each line's largest probability
  alignas(64) float scale_[tile_lines];        // what its integers count; 0: it has none
  bool some_unscaled_ = false;
};

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_BYTE_UNIT
