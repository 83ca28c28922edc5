// Operands of dot products of pairs: queries, keys, probabilities and values of bfloat16 K and V as
// 32-bit words of two.
//
//   Sᵀ   2 dims of a key, where it lies, times 2 dims of a query
//   O    2 probabilities times 2 tokens of V, interleaved once per block
//
// A query is one bfloat16 per element: exactly, if it was given so, for sm_scale multiplies logits;
// else rounded, where that is accurate enough. A probability is the sum of one or two terms.
#ifndef CHUNKATTN_ISA_PAIR_OPERANDS
#define CHUNKATTN_ISA_PAIR_OPERANDS

#include "chunk_first.hpp"
#include "elements.hpp"
#include "line_state.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "simd.hpp"

#if defined(CHUNKATTN_PASS_PAIRS)
CHUNKATTN_PASS_BEGIN(VECTORS)

/// Tokens or dims of one word.
inline constexpr int pair_depth = 2;

// ---- Queries ----------------------------------------------------------------------------------

/// The queries of `lines` lines, which `row(line)` gives unscaled, once per task: q_transposed
/// becomes [HeadDim / 2 words][transposed_stride]. Returns whether they may be used: all of them
/// are exact, or else `rounded` is allowed. Lines beyond the last are nobody's.
template <int HeadDim, int ValueDim, class Row>
bool pack_pair_queries(int lines, LineState<HeadDim, ValueDim>& state, const Row& row,
                       bool rounded) noexcept {
  constexpr int width = simd::width_for<HeadDim>;
  using Bits = simd::Unsigned<width>;
  Bits lost{};
  for (int first = 0; first < lines; first += simd::native_width) {
    alignas(64) std::uint16_t elements[simd::native_width][HeadDim];
    for (int l = 0; l < simd::native_width; ++l) {
      const auto* const from = row(std::min(first + l, lines - 1));
      for (int i = 0; i < HeadDim; i += width) {
        const simd::Float<width> x = simd::load_widened<width>(from + i);
        const Bits bits = simd::bits_as<Bits>(x);
        const Bits size = bits & 0x7fffffffu;
        const Bits is_nan =
            (Bits)(size > 0x7f800000u);  // no line's reason to compute others in fp32
        lost |= ~is_nan & ((bits & 0xffffu) | ((Bits)(size < 0x00800000u) & size));
        simd::store_upper_halves<width>(elements[l] + i, simd::rounded_to_bfloat16<width>(x));
      }
    }
    transpose_words<HeadDim / pair_depth>(elements, sizeof elements[0], state.q_transposed + first,
                                          state.transposed_stride);
  }
  return rounded || !any_of<width>((simd::Int<width>)(lost != 0u));
}

// ---- Keys -------------------------------------------------------------------------------------

/// Rows of a block's K, a group of tokens at a time one after another: where they lie, if they do,
/// else copied. Made where the first tile of lines gets to them, a group ahead, so that they come
/// from L2 meanwhile.
template <int HeadDim>
struct PairKeys {
  static constexpr int group = simd::num_accumulators / 2;

  const Block<bfloat16>& block;
  bfloat16* memory;                                     ///< [block_tokens][HeadDim]
  int count = 0;                                        ///< tokens that there are, in groups
  const bfloat16* rows[block_tokens / group + 1] = {};  ///< of each group, the first

  /// The next group, of which some rows may be beyond the block's last.
  CHUNKATTN_INLINE void add_group() noexcept {
    const bfloat16* const* const from = block.k + count;
    bool together = true;
    for (int i = 1; i < group; ++i) together = together && from[i] == from[0] + i * HeadDim;
    rows[count / group] = from[0];
    if (!together) {
      bfloat16* const to = memory + count * HeadDim;
      for (int i = 0; i < group; ++i)
        __builtin_memcpy(static_cast<void*>(to + i * HeadDim), from[i], HeadDim * sizeof *to);
      rows[count / group] = to;
    }
    count += group;
  }
};

// ---- Values -----------------------------------------------------------------------------------

/// Where the halves of words are infinite or NaN, as a mask of these halves.
template <class Bits>
CHUNKATTN_INLINE Bits special_halves(Bits words) noexcept {
  const Bits low = (Bits)((words & 0x7f80u) == 0x7f80u) & 0xffffu;
  return low | ((Bits)((words & 0x7f800000u) == 0x7f800000u) & 0xffff0000u);
}

/// Two rows of V as words from `to` on, `Slice` columns of which are `slice_words` apart. Returns
/// whether something in them is infinite or NaN.
template <int ValueDim, int Slice>
CHUNKATTN_INLINE bool interleave_rows(const bfloat16* even, const bfloat16* odd, int slice_words,
                                      std::uint32_t* to) noexcept {
#if defined(CHUNKATTN_PASS_NEON)
  if constexpr (ValueDim % 8 == 0 && Slice % 8 == 0) {
    const uint16x8_t exponent = vdupq_n_u16(0x7f80);
    uint16x8_t special = vdupq_n_u16(0);
    for (int i = 0; i < ValueDim; i += 8) {
      uint16x8_t a, b;
      __builtin_memcpy(&a, even + i, sizeof a);
      __builtin_memcpy(&b, odd + i, sizeof b);
      special |= vceqq_u16(a & exponent, exponent) | vceqq_u16(b & exponent, exponent);
      const uint16x8x2_t words = vzipq_u16(a, b);
      __builtin_memcpy(to + i / Slice * slice_words + i % Slice, &words, sizeof words);
    }
    return vmaxvq_u16(special) != 0;
  }
#endif
#if defined(CHUNKATTN_PASS_AVX512)
  if constexpr (ValueDim % 32 == 0 && Slice == 32) {
    typedef std::uint16_t Halves __attribute__((vector_size(64)));
    const auto halves = [&]<int... I>(int first,
                                      std::integer_sequence<int, I...>) CHUNKATTN_LAMBDA {
      return Halves{static_cast<std::uint16_t>(first + I / 2 + I % 2 * 32)...};
    };
    const auto lower = (__m512i)halves(0, std::make_integer_sequence<int, 32>());
    const auto upper = (__m512i)halves(16, std::make_integer_sequence<int, 32>());
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 special = 0;
    for (int i = 0; i < ValueDim; i += 32, to += slice_words) {
      const __m512i a = _mm512_loadu_si512(even + i), b = _mm512_loadu_si512(odd + i);
      special |= _mm512_cmpeq_epi16_mask(a & exponent, exponent) |
                 _mm512_cmpeq_epi16_mask(b & exponent, exponent);
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, lower, b));
      _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(a, upper, b));
    }
    return special != 0;
  }
#endif
  constexpr int width = simd::width_for<ValueDim>;
  using Bits = simd::Unsigned<width>;
  Bits special{};
  for (int i = 0; i < ValueDim; i += width) {
    const auto low = simd::bits_as<Bits>(simd::load_widened<width>(even + i));
    const Bits words = low >> 16 | simd::bits_as<Bits>(simd::load_widened<width>(odd + i));
    special |= special_halves(words);
    __builtin_memcpy(to + i / Slice * slice_words + i % Slice, &words, sizeof words);
  }
  return any_of<width>((simd::Int<width>)special);
}

/// The first `seen` rows of V, two tokens to a word, with a row of zeros behind an odd number of
/// them: ColumnSlices, [block_tokens / 2] of each. Infinities and NaN become zeros; returns whether
/// there were some.
template <int ValueDim>
[[gnu::noinline]] bool pack_pair_values(const Block<bfloat16>& block, int seen,
                                        std::uint32_t* to) noexcept {
  using Slices = ColumnSlices<ValueDim>;
  constexpr int width = Slices::width;
  constexpr int slice = wide_columns * width;
  constexpr int depth = block_tokens / pair_depth;
  // Columns of slices of that size, and how many of another size follow: their first `wide` ones as
  // in a slice, then a vector.
  constexpr int whole = Slices::last_vectors == wide_columns ? ValueDim : Slices::last * width;
  constexpr int rest = ValueDim - whole;
  constexpr int wide = rest / slice * slice;
  bool special = false;
  for (int t = 0; t < seen; t += pair_depth) {
    const bfloat16* const even = block.v[t];
    const bfloat16* const odd = t + 1 < seen ? block.v[t + 1] : zero_row<ValueDim, bfloat16>;
    std::uint32_t* const words = to + t / pair_depth * slice;
    if constexpr (whole > 0)
      special |= interleave_rows<whole, slice>(even, odd, slice * depth, words);
    std::uint32_t* const last = to + whole * depth + t / pair_depth * rest;
    if constexpr (wide > 0)
      special |= interleave_rows<wide, slice>(even + whole, odd + whole, 0, last);
    if constexpr (wide < rest)
      special |=
          interleave_rows<width, width>(even + whole + wide, odd + whole + wide, 0, last + wide);
  }
  using Bits = simd::Unsigned<width>;
  for (int i = 0; special && i < ValueDim * depth; i += width) {
    Bits words;
    __builtin_memcpy(&words, to + i, sizeof words);
    words &= ~special_halves(words);
    __builtin_memcpy(to + i, &words, sizeof words);
  }
  return special;
}

// ---- Probabilities ----------------------------------------------------------------------------

/// The probabilities of some vectors of lines, [token][tile_lines], as words of two tokens,
/// [block_tokens / 2][Terms][tile_lines]. Terms are rounded to nearest, halves away from zero.
template <int Terms>
[[gnu::noinline]] void pack_pair_probabilities(const float* p, int lines, int seen,
                                               std::uint32_t* to) noexcept {
  constexpr int width = simd::native_width;
  using Real = simd::Float<width>;
  using Bits = simd::Unsigned<width>;
  const auto term = [&](Real& x) CHUNKATTN_LAMBDA {
    const Bits bits = (simd::bits_as<Bits>(x) + 0x8000u) & 0xffff0000u;
    x = x - simd::bits_as<Real>(bits);
    return bits;
  };
  for (int line = 0; line < lines; line += width) {
    for (int t = 0; t < seen; t += pair_depth) {
      Real even = simd::load<width>(p + t * tile_lines + line);
      Real odd =
          t + 1 < seen ? simd::load<width>(p + (t + 1) * tile_lines + line) : simd::zero<width>();
      CHUNKATTN_UNROLLED
      for (int i = 0; i < Terms; ++i) {
        const Bits low = term(even);
        const Bits words = low >> 16 | term(odd);
        __builtin_memcpy(to + (t / pair_depth * Terms + i) * tile_lines + line, &words,
                         sizeof words);
      }
    }
  }
}

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_PAIR_OPERANDS
