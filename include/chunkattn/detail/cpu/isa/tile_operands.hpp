// Operands of tiles: queries, keys, probabilities and values as bfloat16 in the order in which a
// tile holds them.
//
// A float is the sum of up to two *terms*, each a bfloat16: the float rounded, and what that
// leaves, rounded. bfloat16 and the integers of 8-bit rows are one term, halves two, exactly;
// queries and probabilities in two terms are off by 2^-17. Tiles multiply *pairs*: a row of the
// left tile holds 32 consecutive elements as they lie, a row of the right one 16 columns of two
// rows, interleaved.
//
//   left, 16 rows m          right, 16 rows k = pairs           result, 16 rows m
//   Sᵀ   tokens × 32 dims    pairs of dims × 16 lines           tokens × 16 lines
//   O    lines × 32 tokens   pairs of tokens × 16 dims          lines × 16 dims
#ifndef CHUNKATTN_ISA_TILE_OPERANDS
#define CHUNKATTN_ISA_TILE_OPERANDS

#include "elements.hpp"
#include "line_state.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "simd.hpp"
#include "tiles.hpp"

#if defined(CHUNKATTN_PASS_TILES)
CHUNKATTN_PASS_BEGIN(VECTORS)

/// Tokens of one tile product of P and V, dims of one of K and Q.
inline constexpr int tile_depth = 2 * tile_size;

// ---- Terms ------------------------------------------------------------------------------------

/// How many terms K and V of T have where queries and probabilities have `terms`.
template <class T>
constexpr int stored_terms(int terms) noexcept {
  return std::is_same_v<T, half> ? terms : 1;
}

/// Splits off the next term of x.
template <int W>
CHUNKATTN_INLINE simd::Float<W> take_term(simd::Float<W>& x) noexcept {
  const simd::Float<W> term = simd::rounded_to_bfloat16<W>(x);
  x = x - term;
  return term;
}

/// A half as two terms, exactly: what rounding to nearest leaves of its 11 bits fits a bfloat16. Of
/// a NaN the second term at least is one.
template <int W>
struct HalfTerms {
  simd::Float<W> first, second;

  CHUNKATTN_INLINE explicit HalfTerms(simd::Float<W> x) noexcept
      : first(simd::bits_as<simd::Float<W>>((simd::bits_as<simd::Unsigned<W>>(x) + 0x8000u) &
                                            0xffff0000u)),
        second(x - first) {}
};

/// Pairs of bfloat16 as W floats' worth of bits: the even ones in the lower halves.
template <int W>
CHUNKATTN_INLINE simd::Float<W> paired(simd::Float<W> even, simd::Float<W> odd) noexcept {
  using Bits = simd::Unsigned<W>;
  return simd::bits_as<simd::Float<W>>((simd::bits_as<Bits>(even) >> 16) |
                                       (simd::bits_as<Bits>(odd) & 0xffff0000u));
}

// ---- Queries ----------------------------------------------------------------------------------

/// The queries of the first lines as right tiles, once per task: q_transposed becomes
/// [term][HeadDim / 2 pairs][transposed_stride], so that a block may begin at any line. Lines
/// beyond the last are padding.
template <int HeadDim, int ValueDim>
[[gnu::noinline]] void pack_queries(int lines, int terms,
                                    LineState<HeadDim, ValueDim>& state) noexcept {
  constexpr int width = simd::native_width;
  for (int line = 0; line < lines; line += width) {
    alignas(64) std::uint16_t elements[2][to_size(width)][to_size(HeadDim)];
    for (int l = 0; l < width; ++l) {
      for (int i = 0; i < HeadDim; i += width) {
        simd::Float<width> x = simd::load<width>(state.q + (line + l) * HeadDim + i);
        for (int term = 0; term < terms; ++term)
          simd::store_upper_halves<width>(elements[term][l] + i, take_term<width>(x));
      }
    }
    for (int term = 0; term < terms; ++term)
      transpose_words<HeadDim / 2>(
          elements[term], sizeof elements[0][0],
          state.q_transposed + term * HeadDim / 2 * state.transposed_stride + line,
          state.transposed_stride);
  }
}

// ---- Keys -------------------------------------------------------------------------------------

/// 16 rows of K as a left tile reads them, `stride` bytes apart, and the distance in bytes from one
/// term to the next.
struct KeyTile {
  const char* at;
  std::ptrdiff_t stride;
  std::ptrdiff_t term_bytes;
};

/// Whether the rows t .. t + 15 of a block lie at one distance in memory; its bytes, else 0.
template <class T>
CHUNKATTN_INLINE std::ptrdiff_t common_stride(const Block<T>& block, int t) noexcept {
  if (t + tile_size > block.count) return 0;
  const std::ptrdiff_t stride = block.k[t + 1] - block.k[t];
  for (int i = 1; i < tile_size; ++i)
    if (block.k[t + i] - block.k[t + i - 1] != stride) return 0;
  return stride * static_cast<std::ptrdiff_t>(sizeof(T));
}

/// The rows t .. t + 15 of K, of which tokens below `seen` are looked at: bfloat16 where it lies,
/// if that is one piece of memory, anything else in `scratch`, [term][block_tokens][HeadDim].
template <int HeadDim, class T>
KeyTile key_tile(const Block<T>& block, int t, int seen, int terms, float* scratch) noexcept {
  constexpr int width = simd::native_width;
  constexpr std::ptrdiff_t row_bytes = 2 * HeadDim;
  constexpr std::ptrdiff_t term_bytes = block_tokens * row_bytes;
  if constexpr (std::is_same_v<T, bfloat16>)
    if (const std::ptrdiff_t stride = common_stride(block, t))
      return {reinterpret_cast<const char*>(block.k[t]), stride, 0};
  char* const to = reinterpret_cast<char*>(scratch) + t * row_bytes;
  for (int i = 0; i < tile_size; ++i) {
    char* const row = to + i * row_bytes;
    if (t + i >= seen) {
      for (int term = 0; term < stored_terms<T>(terms); ++term)
        std::fill_n(row + term * term_bytes, row_bytes, char{});
      continue;
    }
    if constexpr (std::is_same_v<T, bfloat16>) {
      __builtin_memcpy(row, block.k[t + i], row_bytes);
    } else {
      for (int at = 0; at < HeadDim; at += width) {
        simd::Float<width> x = simd::load_widened<width>(block.k[t + i] + at);
        if (stored_terms<T>(terms) == 2) {
          const HalfTerms<width> of_x(x);
          simd::store_upper_halves<width>(row + 2 * at, of_x.first);
          simd::store_upper_halves<width>(row + term_bytes + 2 * at, of_x.second);
        } else {
          simd::store_upper_halves<width>(row + 2 * at, take_term<width>(x));
        }
      }
    }
  }
  return {to, row_bytes, term_bytes};
}

// ---- Values -----------------------------------------------------------------------------------

/// 32 columns of V from `begin` on as right tiles, [term][2 steps of 32 tokens][2 halves of the
/// columns][16 pairs of tokens][16 columns]. Tokens from `seen` on are zeros. So are infinities and
/// NaN of tokens from `common` on, which not all lines see: their probability of 0 would make NaN.
/// Returns whether there was one.
template <class T>
[[gnu::noinline]] bool pack_values(const Block<T>& block, int begin, int common, int seen,
                                   int terms, PrefetchCursor& ahead, int burst,
                                   float* to) noexcept {
  constexpr int width = simd::native_width;
  constexpr int tile = tile_size * tile_size;
  simd::Int<width> nonfinite{};
  PrefetchCursor cursor = ahead;
  const auto pack = [&](int t, auto&& row) CHUNKATTN_LAMBDA {
    float* const tiles = to + t / tile_depth * 2 * tile + t % tile_depth / 2 * tile_size;
    cursor.advance(burst);
    for (int column = 0; column < tile_depth; column += width) {
      simd::Float<width> even = row(t, begin + column), odd = row(t + 1, begin + column);
      float* const at = tiles + column / tile_size * tile + column % tile_size;
      if (stored_terms<T>(terms) == 2) {
        const HalfTerms<width> a(even), b(odd);
        simd::store(at, paired<width>(a.first, b.first));
        simd::store(at + 4 * tile, paired<width>(a.second, b.second));
      } else if constexpr (std::is_same_v<T, half>) {
        simd::store(at, paired<width>(take_term<width>(even), take_term<width>(odd)));
      } else {
        simd::store(at, paired<width>(even, odd));
      }
    }
  };
  int t = 0;
  for (; t + 2 <= common; t += 2)
    pack(t, [&](int i, int column)
                CHUNKATTN_LAMBDA { return simd::load_widened<width>(block.v[i] + column); });
  const int end = (seen + tile_depth - 1) / tile_depth * tile_depth;
  for (; t < end; t += 2)
    pack(t, [&](int i, int column) CHUNKATTN_LAMBDA {
      if (i >= seen) return simd::zero<width>();
      const simd::Float<width> x = simd::load_widened<width>(block.v[i] + column);
      if (i < common) return x;
      const simd::Int<width> hide = is_nonfinite<width>(x);
      nonfinite = nonfinite | hide;
      return simd::select<width>(hide, simd::zero<width>(), x);
    });
  ahead = cursor;
  return any_of<width>(nonfinite);
}

// ---- Probabilities ----------------------------------------------------------------------------

/// The probabilities of up to 32 lines, [token][matrix_lines], as left tiles, [term][2 steps of 32
/// tokens][2 tiles of lines][16 lines][16 pairs of tokens]: paired, then transposed in registers.
/// Line l has zeros from token visible[l] on.
[[gnu::noinline]] inline void pack_probabilities(const float* p, const std::int32_t* visible,
                                                 int lines, int seen, int terms,
                                                 float* to) noexcept {
  constexpr int width = simd::native_width;
  constexpr int tile = tile_size * tile_size;
  for (int line = 0; line < lines; line += width) {
    const simd::Int<width> sees = simd::load_int<width>(visible + line);
    for (int t = 0; t < (seen + tile_depth - 1) / tile_depth * tile_depth; t += 2 * width) {
      simd::Float<width> pairs[2][width];
      CHUNKATTN_UNROLLED
      for (int i = 0; i < width; ++i) {
        const auto masked = [&](int token) CHUNKATTN_LAMBDA {
          return simd::select<width>(simd::broadcast_int<width>(token) < sees,
                                     simd::load<width>(p + token * matrix_lines + line),
                                     simd::zero<width>());
        };
        simd::Float<width> even = masked(t + 2 * i), odd = masked(t + 2 * i + 1);
        const simd::Float<width> a = take_term<width>(even);
        pairs[0][i] = paired<width>(a, take_term<width>(odd));
        if (terms == 2)
          pairs[1][i] = paired<width>(simd::rounded_to_bfloat16<width>(even),
                                      simd::rounded_to_bfloat16<width>(odd));
      }
      float* const tiles = to + (t / tile_depth * 2 + line / tile_size) * tile +
                           line % tile_size * tile_size + t % tile_depth / 2;
      for (int term = 0; term < terms; ++term) {
        simd::transpose<width>(pairs[term]);
        CHUNKATTN_UNROLLED
        for (int l = 0; l < width; ++l)
          simd::store(tiles + term * 4 * tile + l * tile_size, pairs[term][l]);
      }
    }
  }
}

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_TILE_OPERANDS
