// Dot products of pairs of bfloat16 as a unit of dot_first.hpp: queries, keys, probabilities and
// values of bfloat16 K and V as 32-bit words of two.
//
//   Sᵀ   2 dims of a key, where it lies, times 2 dims of a query
//   O    2 probabilities times 2 tokens of V, interleaved once per block
//
// A query is one bfloat16 per element: exactly, if it was given so, for sm_scale multiplies logits;
// else rounded, where that is accurate enough. A probability is the sum of one or two terms.
//
// Infinities and NaN of V are left out of the product and added to the lines that see them; logits
// that are not finite are computed again in fp32, for their line alone.
#ifndef CHUNKATTN_ISA_PAIR_UNIT
#define CHUNKATTN_ISA_PAIR_UNIT

#include "chunk_first.hpp"
#include "dot_products.hpp"
#include "dots.hpp"
#include "elements.hpp"
#include "line_state.hpp"
#include "line_tile.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "simd.hpp"

#if defined(CHUNKATTN_PASS_PAIRS)
CHUNKATTN_PASS_BEGIN(DOTS)

/// Tokens or dims of one word.
inline constexpr int pair_depth = 2;

// ---- Queries ----------------------------------------------------------------------------------

/// Whether a query is bfloat16 by value. Denormals are not: they would count as zeros. NaN is: it
/// is no reason to compute other lines in fp32.
template <int HeadDim, class X>
CHUNKATTN_INLINE bool is_pair_query(const X* query) noexcept {
  constexpr int width = simd::width_for<HeadDim>;
  using Bits = simd::Unsigned<width>;
  Bits lost{};
  for (int i = 0; i < HeadDim; i += width) {
    const auto bits = simd::bits_as<Bits>(simd::load_widened<width>(query + i));
    const Bits size = bits & 0x7fffffffu;
    const Bits is_nan = simd::bits_as<Bits>(size > 0x7f800000u);
    lost |= ~is_nan & ((bits & 0xffffu) | (simd::bits_as<Bits>(size < 0x00800000u) & size));
  }
  return !any_of<width>(lost != 0u);
}

/// The queries of `lines` lines, which `row(line)` gives unscaled, once per task: q_transposed
/// becomes [HeadDim / 2 words][transposed_stride]. Lines beyond the last are padding.
template <int HeadDim, int ValueDim, class Row>
void pack_pair_queries(int lines, LineState<HeadDim, ValueDim>& state, const Row& row) noexcept {
  constexpr int width = simd::width_for<HeadDim>;
  for (int first = 0; first < lines; first += simd::native_width) {
    alignas(64) std::uint16_t elements[simd::native_width][to_size(HeadDim)];
    for (int l = 0; l < simd::native_width; ++l) {
      const auto* const from = row((std::min)(first + l, lines - 1));
      for (int i = 0; i < HeadDim; i += width)
        simd::store_upper_halves<width>(
            elements[l] + i, simd::rounded_to_bfloat16<width>(simd::load_widened<width>(from + i)));
    }
    transpose_words<HeadDim / pair_depth>(elements, sizeof elements[0], state.q_transposed + first,
                                          state.transposed_stride);
  }
}

// ---- Values -----------------------------------------------------------------------------------

/// Where the halves of words are infinite or NaN, as a mask of these halves.
template <class Bits>
CHUNKATTN_INLINE Bits nonfinite_halves(Bits words) noexcept {
  const Bits low = simd::bits_as<Bits>((words & 0x7f80u) == 0x7f80u) & 0xffffu;
  return low | (simd::bits_as<Bits>((words & 0x7f800000u) == 0x7f800000u) & 0xffff0000u);
}

/// Two rows of V as words from `to` on, `Slice` columns of which are `slice_words` apart. Returns
/// whether something in them is infinite or NaN.
template <int ValueDim, int Slice>
CHUNKATTN_INLINE bool interleave_rows(const bfloat16* even, const bfloat16* odd, int slice_words,
                                      std::uint32_t* to) noexcept {
#if defined(CHUNKATTN_PASS_NEON)
  if constexpr (ValueDim % 8 == 0 && Slice % 8 == 0) {
    const uint16x8_t exponent = vdupq_n_u16(0x7f80);
    uint16x8_t nonfinite = vdupq_n_u16(0);
    for (int i = 0; i < ValueDim; i += 8) {
      uint16x8_t a, b;
      __builtin_memcpy(&a, even + i, sizeof a);
      __builtin_memcpy(&b, odd + i, sizeof b);
      nonfinite |= vceqq_u16(a & exponent, exponent) | vceqq_u16(b & exponent, exponent);
      const uint16x8x2_t words = vzipq_u16(a, b);
      __builtin_memcpy(to + i / Slice * slice_words + i % Slice, &words, sizeof words);
    }
    return vmaxvq_u16(nonfinite) != 0;
  }
#endif
#if defined(CHUNKATTN_PASS_AVX512)
  if constexpr (ValueDim % 32 == 0 && Slice == 32) {
    typedef std::uint16_t Halves __attribute__((vector_size(64)));
    const auto halves = [&]<int... I>(int first,
                                      std::integer_sequence<int, I...>) CHUNKATTN_LAMBDA {
      return Halves{static_cast<std::uint16_t>(first + I / 2 + I % 2 * 32)...};
    };
    const auto lower = simd::bits_as<__m512i>(halves(0, std::make_integer_sequence<int, 32>()));
    const auto upper = simd::bits_as<__m512i>(halves(16, std::make_integer_sequence<int, 32>()));
    const __m512i exponent = _mm512_set1_epi16(0x7f80);
    __mmask32 nonfinite = 0;
    for (int i = 0; i < ValueDim; i += 32, to += slice_words) {
      const __m512i a = _mm512_loadu_si512(even + i), b = _mm512_loadu_si512(odd + i);
      nonfinite |= _mm512_cmpeq_epi16_mask(a & exponent, exponent) |
                   _mm512_cmpeq_epi16_mask(b & exponent, exponent);
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, lower, b));
      _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi16(a, upper, b));
    }
    return nonfinite != 0;
  }
#endif
  constexpr int width = simd::width_for<ValueDim>;
  using Bits = simd::Unsigned<width>;
  Bits nonfinite{};
  for (int i = 0; i < ValueDim; i += width) {
    const auto low = simd::bits_as<Bits>(simd::load_widened<width>(even + i));
    const Bits words = low >> 16 | simd::bits_as<Bits>(simd::load_widened<width>(odd + i));
    nonfinite |= nonfinite_halves(words);
    __builtin_memcpy(to + i / Slice * slice_words + i % Slice, &words, sizeof words);
  }
  return any_of<width>(simd::bits_as<simd::Int<width>>(nonfinite));
}

/// The first `seen` rows of V, two tokens to a word, with a row of zeros after an odd number of
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
  bool nonfinite = false;
  for (int t = 0; t < seen; t += pair_depth) {
    const bfloat16* const even = block.v[t];
    const bfloat16* const odd = t + 1 < seen ? block.v[t + 1] : zero_row<ValueDim, bfloat16>;
    std::uint32_t* const words = to + t / pair_depth * slice;
    if constexpr (whole > 0)
      nonfinite |= interleave_rows<whole, slice>(even, odd, slice * depth, words);
    std::uint32_t* const last = to + whole * depth + t / pair_depth * rest;
    if constexpr (wide > 0)
      nonfinite |= interleave_rows<wide, slice>(even + whole, odd + whole, 0, last);
    if constexpr (wide < rest)
      nonfinite |=
          interleave_rows<width, width>(even + whole + wide, odd + whole + wide, 0, last + wide);
  }
  using Bits = simd::Unsigned<width>;
  for (int i = 0; nonfinite && i < ValueDim * depth; i += width) {
    Bits words;
    __builtin_memcpy(&words, to + i, sizeof words);
    words &= ~nonfinite_halves(words);
    __builtin_memcpy(to + i, &words, sizeof words);
  }
  return nonfinite;
}

// ---- Probabilities ----------------------------------------------------------------------------

/// The probabilities of some vectors of lines, [token][tile_lines], with zeros after an odd number
/// of tokens, as words of two tokens, [block_tokens / 2][Terms][tile_lines]. Terms are rounded to
/// nearest, halves away from zero.
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
      Real odd = simd::load<width>(p + (t + 1) * tile_lines + line);
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

// ---- The unit ---------------------------------------------------------------------------------

template <int HeadDim, int ValueDim>
struct PairUnit {
  using Element = bfloat16;
  using Operands = DotOperands<PairUnit>;
  using Tile = LineTile<tile_lines>;
  static constexpr int head_dim = HeadDim, value_dim = ValueDim;
  static constexpr int depth = pair_depth;
  static constexpr int passes = 1;
  static constexpr int max_terms = 2;
  static constexpr bool checked_logits = true;
  static constexpr bool keys_in_place = true;
  template <int Vectors>
  static constexpr int key_step = 2 * Vectors;
  static constexpr int p_words = 0;  // terms stand beside each other
  template <int W>
  using Sum = simd::Float<W>;

  float sm_scale;
  int terms;               ///< of probabilities
  bool nonfinite = false;  ///< V of the block holds infinities or NaN

  /// Whether all queries of a row block and KV head are bfloat16 by value.
  template <class Call>
  static bool holds_queries(const Call& call, const RowBlock& block, int kv_head) noexcept {
    for (int row = block.row_begin; row < block.row_end; ++row) {
      for (int l = 0; l < call.group; ++l)
        if (!is_pair_query<HeadDim>(call.query(row, kv_head * call.group + l))) return false;
    }
    return true;
  }
  CHUNKATTN_INLINE static void pack_key(const bfloat16* from, char* to) noexcept {
    __builtin_memcpy(to, from, HeadDim * sizeof *from);
  }

  template <int W, class Key>
  CHUNKATTN_INLINE static Sum<W> dot_key(Sum<W> sum, Key key, simd::Unsigned<W> query) noexcept {
    return dot_pairs<W>(sum, query, key);
  }
  template <int W, class Weight>
  CHUNKATTN_INLINE static Sum<W> dot_value(Sum<W> sum, Weight weight,
                                           simd::Unsigned<W> value) noexcept {
    return dot_pairs<W>(sum, value, weight);
  }

  CHUNKATTN_INLINE float query_factor(const float*, std::ptrdiff_t) const noexcept {
    return sm_scale;
  }
  template <class V>
  CHUNKATTN_INLINE static V logit(V sum, float factor, const Block<bfloat16>&, int) noexcept {
    return sum * factor;
  }
  CHUNKATTN_INLINE static float value_factor(int) noexcept { return 1.0f; }
  template <int W>
  CHUNKATTN_INLINE static void add_values(Sum<W> sum, simd::Float<W>, simd::Float<W> rescaling,
                                          float* out) noexcept {
    add_block_sum<W>(sum, rescaling, out);
  }

  CHUNKATTN_INLINE static void repair_logits(Operands& operands, const Tile& tile,
                                             bool broken) noexcept {
    if (broken)
      recompute_nonfinite_logits<HeadDim>(operands.block, tile,
                                          operands.state.q + tile.begin * HeadDim, operands.logits);
  }

  CHUNKATTN_INLINE static std::uint32_t* top() noexcept { return nullptr; }

  CHUNKATTN_INLINE void pack_values(const Block<bfloat16>& block, int seen,
                                    std::uint32_t* to) noexcept {
    nonfinite = pack_pair_values<ValueDim>(block, seen, to);
  }
  CHUNKATTN_INLINE void pack_probabilities(const float* p, const Tile& tile,
                                           std::uint32_t* to) const noexcept {
    if (terms == 1)
      pack_pair_probabilities<1>(p, tile.count, tile.seen, to);
    else
      pack_pair_probabilities<2>(p, tile.count, tile.seen, to);
  }
  CHUNKATTN_INLINE void repair_values(const Operands& operands, const Tile& tile,
                                      float* out) const noexcept {
    if (nonfinite) add_nonfinite_values<ValueDim>(operands.block, tile, 0, operands.logits, out);
  }
};

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_PAIR_UNIT
