// Logits of a tile of the chunk-first kernel: Sᵀ = K·Qᵀ of some tokens with some vectors of lines.
//
// There are two orders of summation. The first takes dim after dim. The second gives bit for bit
// what the streaming kernel computes: for Reduce::batch_invariant, where bits may not depend on
// whether a block was read for one line or for many.
#ifndef CHUNKATTN_ISA_TILE_LOGITS
#define CHUNKATTN_ISA_TILE_LOGITS

#include "elements.hpp"
#include "line_state.hpp"
#include "pass.hpp"
#include "simd.hpp"

CHUNKATTN_PASS_BEGIN(VECTORS)

/// Tokens and dims of the innermost loops over Q.
inline constexpr int logit_group = simd::tile_accumulators / 2;
inline constexpr int logit_step = 8;
/// Tokens at the end, rounded up: no more than the block has room for.
inline constexpr int last_group = block_tokens % logit_group == 0 ? logit_group : 4;
/// Tokens whose logits are computed at once: their K, as floats, and Q of a tile fit the L1 cache.
inline constexpr int logit_tokens = 32 / logit_group * logit_group;

/// fp32 rows of K: read where they lie.
struct ScatteredRows {
  static constexpr bool packed = false;
  const float* const* rows;
  CHUNKATTN_INLINE const float* operator[](std::ptrdiff_t t) const noexcept { return rows[t]; }
};

/// Rows of K that were copied to scratch by widened(): in L1 already.
template <int Columns>
struct PackedRows {
  static constexpr bool packed = true;
  const float* scratch;
  CHUNKATTN_INLINE const float* operator[](std::ptrdiff_t t) const noexcept {
    return scratch + t * Columns;
  }
};

/// Copies columns [begin, begin + Columns) of `count` rows of Dim elements to scratch as floats,
/// one row after another. Returns scratch.
template <int Dim, int Columns, class T>
CHUNKATTN_INLINE const float* widened(const T* const* rows, int count, int begin,
                                      float* scratch) noexcept {
  constexpr int width = simd::width_for<Dim>;
  for (int t = 0; t < count; ++t) {
    CHUNKATTN_WIDENING
    for (int i = 0; i < Columns / width; ++i) {
      simd::store(scratch + t * Columns + i * width,
                  simd::load_widened<width>(rows[t] + begin + i * width));
    }
  }
  return scratch;
}

/// logits[token][lane] of one tile: Vectors * native_width lines from q_transposed on, tokens
/// [0, count), the last ones rounded up to last_group. `cold`: the rows of K are not in L1 yet.
/// Prefetches some lines of `ahead` at each step.
template <int HeadDim, int Vectors, class Rows>
[[gnu::noinline]] void tile_logits(Rows k, int count, const float* q_transposed,
                                   std::ptrdiff_t stride, bool cold, PrefetchCursor& ahead,
                                   int burst, float* logits) noexcept {
  constexpr int width = simd::native_width;
  constexpr int parities = Vectors == 1 ? 2 : 1;  // enough chains of additions in flight
  constexpr int step = logit_step;
  PrefetchCursor cursor = ahead;
  int t = 0;
  const auto tokens = [&]<int Group>(std::integral_constant<int, Group>) CHUNKATTN_LAMBDA {
    simd::Float<width> sums[to_size(Group)][2];
    CHUNKATTN_UNROLLED
    for (int j = 0; j < Group; ++j) {
      sums[j][0] = simd::zero<width>();
      sums[j][1] = simd::zero<width>();
    }
    const float* rows[to_size(Group)];
    CHUNKATTN_UNROLLED
    for (int j = 0; j < Group; ++j) rows[j] = k[t + j];
    const float* column = q_transposed;
    for (int outer = 0; outer < HeadDim; outer += step) {
      cursor.advance(burst);
      if (!Rows::packed && cold && outer % 16 == 0) {
        CHUNKATTN_UNROLLED
        for (int j = 0; j < Group; ++j) prefetch_near(k[t + Group + j] + outer);
      }
      for (int i = outer; i < outer + step; i += parities) {
        CHUNKATTN_UNROLLED
        for (int parity = 0; parity < parities; ++parity) {
          simd::Float<width> query[to_size(Vectors)];
          CHUNKATTN_UNROLLED
          for (int v = 0; v < Vectors; ++v) query[v] = simd::load_once<width>(column + v * width);
          column += stride;
          CHUNKATTN_UNROLLED
          for (int j = 0; j < Group; ++j) {
            const simd::Float<width> key = simd::broadcast<width>(rows[j][i + parity]);
            CHUNKATTN_UNROLLED
            for (int v = 0; v < Vectors; ++v)
              sums[j][v + parity] = simd::fma(key, query[v], sums[j][v + parity]);
          }
        }
      }
    }
    CHUNKATTN_UNROLLED
    for (int j = 0; j < Group; ++j) {
      float* const to = logits + (t + j) * tile_lines;
      if constexpr (Vectors == 1) {
        simd::store(to, sums[j][0] + sums[j][1]);
      } else {
        CHUNKATTN_UNROLLED
        for (int v = 0; v < Vectors; ++v) simd::store(to + v * width, sums[j][v]);
      }
    }
    t += Group;
  };
  if constexpr (last_group != logit_group)
    while (count - t >= logit_group) tokens(std::integral_constant<int, logit_group>{});
  while (t < count) tokens(std::integral_constant<int, last_group>{});
  ahead = cursor;
}

/// The same in the order of a streamed dot product: one sum for each lane of its vectors, and these
/// are added by halves. Here a vector holds as many lines, so those sums are computed one after the
/// other: a few tokens and vectors of lines at once, or lanes where registers are many.
template <int HeadDim, int Vectors, class Rows>
[[gnu::noinline]] void tile_logits_as_streamed(Rows k, int count, const float* q_transposed,
                                               std::ptrdiff_t stride, bool cold,
                                               PrefetchCursor& ahead, int burst,
                                               float* logits) noexcept {
  constexpr int width = simd::native_width;
  constexpr int lanes = simd::width_for<HeadDim>;  // of a streamed vector
  // K is an operand in memory of AVX-512, else it should be loaded once for two vectors.
  constexpr int vectors = width == 16 ? 1 : Vectors;
  constexpr int together = width == 16 ? 4 : 1;  // lanes
  constexpr int group = simd::num_accumulators / (together * vectors);
  constexpr int turns = lanes / together;
  constexpr int columns = HeadDim / turns;
  constexpr int bursts =
      (std::max)(1, columns * group / (logit_step * logit_group) * vectors / Vectors);
  using Sums = simd::Float<width>[to_size(group)][to_size(vectors)];
  PrefetchCursor cursor = ahead;
  for (int t = 0; t < count; t += group) {
    const float* rows[to_size(group)];
    CHUNKATTN_UNROLLED
    for (int j = 0; j < group; ++j) rows[j] = k[t + j];
    for (int vector = 0; vector < Vectors; vector += vectors) {
      Sums parts[to_size(turns)];  // every turns-th lane
      for (int turn = 0; turn < turns; ++turn) {
        CHUNKATTN_UNROLLED
        for (int n = 0; n < bursts; ++n) cursor.advance(burst);
        if (!Rows::packed && cold && vector == 0) {
          for (int c = (turn * columns + 15) / 16 * 16; c < (turn + 1) * columns; c += 16) {
            CHUNKATTN_UNROLLED
            for (int j = 0; j < group; ++j) prefetch_near(k[t + group + j] + c);
          }
        }
        Sums sums[to_size(together)];
        CHUNKATTN_UNROLLED
        for (int c = 0; c < together; ++c) {
          CHUNKATTN_UNROLLED
          for (int j = 0; j < group; ++j) {
            CHUNKATTN_UNROLLED
            for (int v = 0; v < vectors; ++v) sums[c][j][v] = simd::zero<width>();
          }
        }
        const float* column = q_transposed + turn * stride + vector * width;
        for (int i = turn; i < HeadDim; i += lanes, column += lanes * stride) {
          CHUNKATTN_UNROLLED
          for (int c = 0; c < together; ++c) {
            simd::Float<width> query[to_size(vectors)];
            CHUNKATTN_UNROLLED
            for (int v = 0; v < vectors; ++v)
              query[v] = simd::load_once<width>(column + c * turns * stride + v * width);
            CHUNKATTN_UNROLLED
            for (int j = 0; j < group; ++j) {
              const simd::Float<width> key = simd::broadcast<width>(rows[j][i + c * turns]);
              CHUNKATTN_UNROLLED
              for (int v = 0; v < vectors; ++v)
                sums[c][j][v] = simd::fma(key, query[v], sums[c][j][v]);
            }
          }
        }
        CHUNKATTN_UNROLLED
        for (int j = 0; j < group; ++j) {
          CHUNKATTN_UNROLLED
          for (int v = 0; v < vectors; ++v) {
            if constexpr (together == 4)
              parts[turn][j][v] = (sums[0][j][v] + sums[2][j][v]) + (sums[1][j][v] + sums[3][j][v]);
            else
              parts[turn][j][v] = sums[0][j][v];
          }
        }
      }
      for (int half = turns / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) {
          CHUNKATTN_UNROLLED
          for (int j = 0; j < group; ++j) {
            CHUNKATTN_UNROLLED
            for (int v = 0; v < vectors; ++v)
              parts[i][j][v] = parts[i][j][v] + parts[i + half][j][v];
          }
        }
      CHUNKATTN_UNROLLED
      for (int j = 0; j < group; ++j) {
        CHUNKATTN_UNROLLED
        for (int v = 0; v < vectors; ++v)
          simd::store(logits + (t + j) * tile_lines + (vector + v) * width, parts[0][j][v]);
      }
    }
  }
  ahead = cursor;
}

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_TILE_LOGITS
