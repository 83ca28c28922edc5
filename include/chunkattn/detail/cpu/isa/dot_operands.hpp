// Operands of dot products of bytes: queries, keys, probabilities and values of int8 K and V as
// 32-bit words of four bytes.
//
//   Sᵀ   4 dims of a key times 4 dims of a query. A query is 16 bits in units of its own, q = 256
//        high + low, both signed bytes: two passes, the sums shifted by 8 in between.
//   O    4 probabilities times 4 tokens of V. A probability is 16 bits without sign, in units of
//        its line: a power of two that leaves the block's largest one all of them.
//
// VPDPBUSD multiplies unsigned bytes by signed ones, so keys come with 128 added; SDOT and UDOT
// multiply bytes of one kind, so values do. The offset is taken back as 128 times the sum of the
// query's or the line's integers. All of this is exact modulo 2^32, and the result fits.
//
// A query that holds an infinity or NaN, or nothing but numbers too small for a unit, has no
// integers: its unit is NaN, and its logits are computed in fp32. Likewise the values of a line
// whose probabilities are not all finite and positive: its unit is 0.
#ifndef CHUNKATTN_ISA_DOT_OPERANDS
#define CHUNKATTN_ISA_DOT_OPERANDS

#include "chunk_first.hpp"
#include "dots.hpp"
#include "line_state.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "simd.hpp"

#if defined(CHUNKATTN_PASS_DOTS)
CHUNKATTN_PASS_BEGIN(VECTORS)

/// Tokens or dims of one word.
inline constexpr int dot_depth = 4;

// ---- Queries ----------------------------------------------------------------------------------

/// The queries of a task from some line on. All of it stands in LineState::q_transposed, in rows
/// of `stride`.
template <int HeadDim>
struct DotQueries {
  static constexpr int words = HeadDim / dot_depth;  // of each term
  static_assert(2 * words + 2 <= HeadDim);

  float* memory;
  std::ptrdiff_t stride;

  /// [2 terms][words], high bytes first.
  [[nodiscard]] CHUNKATTN_INLINE float* word(int term, int i) const noexcept {
    return memory + (term * words + i) * stride;
  }
  /// -128 times the sum of a query's integers; not used where keys are signed.
  [[nodiscard]] CHUNKATTN_INLINE float* offset() const noexcept {
    return memory + 2 * words * stride;
  }
  /// What a query's integers count; NaN: it has none.
  [[nodiscard]] CHUNKATTN_INLINE float* unit() const noexcept {
    return memory + (2 * words + 1) * stride;
  }
};

/// The largest integer of a query: low bytes are signed, too.
inline constexpr float largest_query = 127 * 256 + 127;

/// One query as bytes: `high` and `low` receive HeadDim of them.
template <int HeadDim>
struct QueryBytes {
  std::uint32_t sum;
  float unit;

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
    constexpr std::uint32_t least = 0x0d800000u;  // 2^-100: units are normal numbers
    constexpr std::uint32_t infinity = 0x7f800000u;
    const bool has_unit = top == 0 || (top >= least && top < infinity);
    const float largest = simd::bits_as<float>(top);
    unit = has_unit ? largest / largest_query : simd::bits_as<float>(0x7fc00000u);
    const float factor = has_unit && top > 0 ? largest_query / largest : 0.0f;
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
/// time. Those behind the last are nobody's.
template <int HeadDim, int ValueDim>
[[gnu::noinline]] void pack_dot_queries(int lines, LineState<HeadDim, ValueDim>& state) noexcept {
  constexpr int width = simd::native_width;
  const DotQueries<HeadDim> to{state.q_transposed, state.transposed_stride};
  for (int line = 0; line < lines; line += width) {
    alignas(64) std::int8_t bytes[2][width][HeadDim];
    for (int l = 0; l < width; ++l) {
      const QueryBytes<HeadDim> query(state.q + (line + l) * HeadDim, bytes[0][l], bytes[1][l]);
      const std::uint32_t offset = 0u - 128u * query.sum;
      __builtin_memcpy(to.offset() + line + l, &offset, sizeof offset);
      to.unit()[line + l] = query.unit;
    }
    for (int term = 0; term < 2; ++term)
      transpose_words<to.words>(bytes[term], HeadDim, to.word(term, 0) + line, to.stride);
  }
}

// ---- Keys -------------------------------------------------------------------------------------

/// Rows of a block's K one after another, as KeyByte: packed where the first tile of lines gets to
/// them, a group of tokens ahead, so that they come from L2 meanwhile.
template <int HeadDim>
struct DotKeys {
  static constexpr int group = simd::num_accumulators / 2;

  const Block<std::int8_t>& block;
  std::uint8_t* memory;  ///< [block_tokens][HeadDim]
  int count = 0;         ///< packed so far, in groups

  /// Packs the next group, of which some rows may be beyond the block's last.
  CHUNKATTN_INLINE void pack_group() noexcept {
    constexpr int whole = HeadDim / 16 * 16;
    constexpr int width = simd::width_for<std::max(whole / 4, 4)>;
    std::uint8_t* to = memory + count * HeadDim;
    for (int t = count; t < count + group; ++t, to += HeadDim) {
      const std::int8_t* const from = block.k[t];
      for (int i = 0; i < whole; i += 4 * width) {
        simd::Unsigned<width> bytes;
        __builtin_memcpy(&bytes, from + i, sizeof bytes);
        bytes ^= byte_offsets<KeyByte>;
        __builtin_memcpy(to + i, &bytes, sizeof bytes);
      }
      if constexpr (whole < HeadDim) {
        std::uint64_t bytes;
        __builtin_memcpy(&bytes, from + whole, sizeof bytes);
        bytes ^= byte_offsets<KeyByte> * 0x100000001u;
        __builtin_memcpy(to + whole, &bytes, sizeof bytes);
      }
    }
    count += group;
  }
};

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
CHUNKATTN_INLINE void interleave(const std::int8_t* const (&rows)[dot_depth], int column,
                                 simd::Unsigned<W> (&words)[Vectors]) noexcept {
#if defined(CHUNKATTN_PASS_NEON)
  if constexpr (W == 4 && Vectors == 4) {
    uint8x16_t row[dot_depth];
    CHUNKATTN_UNROLLED
    for (int i = 0; i < dot_depth; ++i) row[i] = vreinterpretq_u8_s8(vld1q_s8(rows[i] + column));
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
    __m512i row[dot_depth];
    CHUNKATTN_UNROLLED
    for (int i = 0; i < dot_depth; ++i)
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
    simd::Unsigned<W> row[dot_depth];
    CHUNKATTN_UNROLLED
    for (int t = 0; t < dot_depth; ++t) row[t] = load_bytes<W>(rows[t] + column + i * W);
    words[i] = (row[0] | row[2] << 8) | (row[1] << 16 | row[3] << 24);
  }
}

/// The first `seen` rows of V as ValueByte, four tokens to a word, in the order in which
/// pack_dot_probabilities() has them: ColumnSlices, [block_tokens / 4] of each. Tokens behind the
/// last repeat it.
template <int ValueDim>
[[gnu::noinline]] void pack_dot_values(const Block<std::int8_t>& block, int seen,
                                       std::uint32_t* to) noexcept {
  using Slices = ColumnSlices<ValueDim>;
  constexpr int width = Slices::width;
  constexpr int whole = ValueDim / (4 * width) * 4 * width;
  for (int t = 0; t < seen; t += dot_depth) {
    // Any row does beyond the last that is seen: its probabilities are 0.
    const std::int8_t* rows[dot_depth];
    CHUNKATTN_UNROLLED
    for (int i = 0; i < dot_depth; ++i) rows[i] = block.v[std::min(t + i, seen - 1)];
    const auto pack = [&]<int Vectors>(std::integral_constant<int, Vectors>,
                                       int begin) CHUNKATTN_LAMBDA {
      simd::Unsigned<width> words[Vectors];
      interleave<width, Vectors>(rows, begin, words);
      CHUNKATTN_UNROLLED
      for (int i = 0; i < Vectors; ++i) {
        words[i] ^= byte_offsets<ValueByte>;
        const int vector = begin / width + i;
        const int first = Slices::first_of(vector);
        const int at = first * (block_tokens / dot_depth) +
                       t / dot_depth * Slices::vectors_of(first) + vector - first;
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

// ---- Probabilities ----------------------------------------------------------------------------

/// Probabilities as words of four tokens, in the order 0, 2, 1, 3: [2 terms][block_tokens / 4]
/// [tile_lines], high bytes first.
struct DotProbabilities {
  static constexpr int term_words = block_tokens / dot_depth * tile_lines;

  std::uint32_t* words;
  /// -128 times the sum of each line's integers, behind the words; not used where values are
  /// signed.
  [[nodiscard]] CHUNKATTN_INLINE std::uint32_t* offset() const noexcept {
    return words + 2 * term_words;
  }
  alignas(64) std::uint32_t top[tile_lines];  ///< bits of each line's largest one
  alignas(64) float unit[tile_lines];         ///< what its integers count
};

/// Packs those of some vectors of lines, [token][tile_lines], whose `top` is known and that are
/// zeros from token `seen` to the next multiple of 4. Returns whether a line has a unit of 0, for
/// it has a probability that is not a finite positive number.
[[gnu::noinline]] inline bool pack_dot_probabilities(const float* p, int lines, int seen,
                                                     DotProbabilities& to) noexcept {
  constexpr int width = simd::native_width;
  using Real = simd::Float<width>;
  using Bits = simd::Unsigned<width>;
  bool special = false;
  for (int line = 0; line < lines; line += width) {
    Bits top;
    __builtin_memcpy(&top, to.top + line, sizeof top);
    const Bits regular = (Bits)(top < 0x7f800000u);
    special = special || any_of<width>((simd::Int<width>)(~regular) &
                                       (simd::Int<width>)(simd::iota<width>() < lines - line));
    // The largest is 2^15 units or more and rounds to less than 2^16; no unit is subnormal.
    Bits exponent = regular & ((top + 0x80u) >> 23);
    exponent = exponent > 16u ? exponent : Bits{} + 16u;
    const Real factor = simd::bits_as<Real>((269u - exponent) << 23);
    simd::store(to.unit + line, simd::bits_as<Real>(regular & ((exponent - 15u) << 23)));
    // Adding 2^23 rounds to an integer and leaves it in the low bits.
    const auto integer = [&](int t) CHUNKATTN_LAMBDA {
      return simd::bits_as<Bits>(simd::fma(simd::load<width>(p + t * tile_lines + line), factor,
                                           simd::broadcast<width>(0x1p23f)));
    };
    std::uint32_t* words = to.words + line;
    Bits sum{};
    for (int t = 0; t < seen; t += dot_depth, words += tile_lines) {
      const Bits first = (integer(t) & 0xffffu) | integer(t + 1) << 16;
      const Bits second = (integer(t + 2) & 0xffffu) | integer(t + 3) << 16;
      if constexpr (byte_offsets<ValueByte> != 0)
        sum += (first & 0xffffu) + (first >> 16) + (second & 0xffffu) + (second >> 16);
      const Bits high = ((first >> 8) & 0x00ff00ffu) | (second & 0xff00ff00u);
      const Bits low = (first & 0x00ff00ffu) | ((second << 8) & 0xff00ff00u);
      __builtin_memcpy(words, &high, sizeof high);
      __builtin_memcpy(words + DotProbabilities::term_words, &low, sizeof low);
    }
    if constexpr (byte_offsets<ValueByte> != 0) {
      sum *= 0u - 128u;
      __builtin_memcpy(to.offset() + line, &sum, sizeof sum);
    }
  }
  return special;
}

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_DOT_OPERANDS
