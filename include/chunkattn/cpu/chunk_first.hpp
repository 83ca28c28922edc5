// The chunk-first kernel (Algorithm 1): many query lines against a block of tokens, as two small
// matrix products with an online softmax between them.
//
// Sᵀ = K·Qᵀ, tokens by lines: K is left row-major and broadcast, Q was transposed once per task,
// and maximum and sum of each line run down the tokens without a horizontal step. Then O += P·V
// with lines broadcast against V's rows. 16-bit K and V are widened once per block into scratch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../base/config.hpp"
#include "block.hpp"
#include "prefetch.hpp"
#include "simd.hpp"

CHUNKATTN_ISA_NAMESPACE_BEGIN
namespace cpu {

/// Tokens whose logits are computed at once: their K, as floats, and Q of a tile fit the L1 cache.
inline constexpr int logit_tokens = 32;
/// Tokens and dims of the innermost loops over Q.
inline constexpr int logit_group = simd::num_accumulators / 2;
inline constexpr int logit_step = 8;
/// Tokens of the innermost loop over V.
inline constexpr int value_step = 4;

/// fp32 rows of K or V: read where they lie.
struct ScatteredRows {
  static constexpr bool packed = false;
  const float* const* rows;
  CHUNKATTN_INLINE const float* operator[](int t) const noexcept { return rows[t]; }
};

/// Rows that were widened into scratch, one after another: in L1 already.
template <int Columns>
struct PackedRows {
  static constexpr bool packed = true;
  const float* scratch;
  CHUNKATTN_INLINE const float* operator[](int t) const noexcept { return scratch + t * Columns; }
};

/// Columns [begin, begin + Columns) of `count` rows as floats.
template <int HeadDim, int Columns, class T>
CHUNKATTN_INLINE auto widened(const T* const* rows, int count, int begin, float* scratch) noexcept {
  constexpr int width = simd::width_for<HeadDim>;
  for (int t = 0; t < count; ++t)
    simd::repeat<Columns / width>([&](auto i) CHUNKATTN_LAMBDA {
      simd::store(scratch + t * Columns + i * width,
                  simd::load_widened<width>(rows[t] + begin + i * width));
    });
  return PackedRows<Columns>{scratch};
}

/// logits[token][lane] of one tile: Vectors * native_width lines from q_transposed on, tokens
/// [0, count) rounded up to whole groups. `near`: the rows of K are not in L1 yet. Asks for some
/// lines of `ahead` at each step.
template <int HeadDim, int Vectors, class Rows>
[[gnu::noinline]] void tile_logits(Rows k, int count, const float* q_transposed,
                                   std::ptrdiff_t stride, bool near, LineCursor& ahead, int burst,
                                   float* logits) noexcept {
  constexpr int width = simd::native_width;
  constexpr int group = logit_group;
  constexpr int parities = Vectors == 1 ? 2 : 1;  // enough chains of additions in flight
  constexpr int step = logit_step;
  LineCursor lines = ahead;
  for (int t = 0; t < count; t += group) {
    simd::Float<width> sums[group][2];
    simd::repeat<group>([&](auto j) CHUNKATTN_LAMBDA {
      sums[j][0] = simd::zero<width>();
      sums[j][1] = simd::zero<width>();
    });
    const float* rows[group];
    simd::repeat<group>([&](auto j) CHUNKATTN_LAMBDA { rows[j] = k[t + j]; });
    const float* column = q_transposed;
    for (int outer = 0; outer < HeadDim; outer += step) {
      lines.advance(burst);
      if (!Rows::packed && near && outer % 16 == 0) {
        simd::repeat<group>(
            [&](auto j) CHUNKATTN_LAMBDA { simd::prefetch_near(k[t + group + j] + outer); });
      }
      for (int i = outer; i < outer + step; i += parities) {
        simd::repeat<parities>([&](auto parity) CHUNKATTN_LAMBDA {
          simd::Float<width> query[Vectors];
          simd::repeat<Vectors>(
              [&](auto v) CHUNKATTN_LAMBDA { query[v] = simd::load<width>(column + v * width); });
          column += stride;
          simd::repeat<group>([&](auto j) CHUNKATTN_LAMBDA {
            const simd::Float<width> key = simd::broadcast<width>(rows[j][i + parity]);
            simd::repeat<Vectors>([&](auto v) CHUNKATTN_LAMBDA {
              sums[j][v + parity] = simd::fma(key, query[v], sums[j][v + parity]);
            });
          });
        });
      }
    }
    simd::repeat<group>([&](auto j) CHUNKATTN_LAMBDA {
      float* const to = logits + (t + j) * tile_lines;
      if constexpr (Vectors == 1) {
        simd::store(to, sums[j][0] + sums[j][1]);
      } else {
        simd::repeat<Vectors>([&](auto v)
                                  CHUNKATTN_LAMBDA { simd::store(to + v * width, sums[j][v]); });
      }
    });
  }
  ahead = lines;
}

/// The online softmax of one vector of lines: turns logits[0, count) into probabilities, moves max
/// and sum, leaves the factor for the output in `rescale`. Returns whether some maximum moved.
/// Lane l sees the tokens below visible[l] (all of them if `full`).
template <class T>
[[gnu::noinline]] bool tile_softmax(const Block<T>& block, int count, bool full,
                                    const std::int32_t* visible, float* logits, float* max,
                                    float* sum, float* rescale) noexcept {
  constexpr int width = simd::native_width;
  using Vector = simd::Float<width>;
  const simd::Int<width> seen = simd::load_int<width>(visible);
  const Vector lowest = simd::broadcast<width>(empty_max);
  const Vector old_max = simd::load<width>(max);
  Vector largest = old_max;
  for (int t = 0; t < count; ++t) {
    Vector s = simd::load<width>(logits + t * tile_lines);
    if constexpr (std::is_same_v<T, std::int8_t>) {
      s = s * simd::broadcast<width>(block.k_scale[t]);
      simd::store(logits + t * tile_lines, s);
    }
    if (!full) s = simd::select<width>(simd::broadcast_int<width>(t) < seen, s, lowest);
    largest = simd::max(largest, s);
  }
  const Vector factor = simd::exp_nonpositive<width>(old_max - largest);
  Vector total = simd::zero<width>();
  for (int t = 0; t < count; ++t) {
    const Vector s = simd::load<width>(logits + t * tile_lines);
    Vector p = simd::exp_nonpositive<width>(s - largest);
    if (!full)
      p = simd::select<width>(simd::broadcast_int<width>(t) < seen, p, simd::zero<width>());
    total = total + p;
    if constexpr (std::is_same_v<T, std::int8_t>) p = p * simd::broadcast<width>(block.v_scale[t]);
    simd::store(logits + t * tile_lines, p);
  }
  simd::store(max, largest);
  simd::store(sum, simd::fma(simd::load<width>(sum), factor, total));
  simd::store(rescale, factor);
  const simd::Int<width> moved = largest > old_max;
  std::int32_t any = 0;
  for (int i = 0; i < width; ++i) any |= moved[i];
  return any != 0;
}

/// out[line] (rescaled) += sum over tokens of p[token][line] * V[token], for `Lines` lines and
/// `Vectors` vectors of each. `near`: these columns of V are not in L1 yet. Asks for some lines of
/// `ahead` at each step.
template <int HeadDim, int Lines, int Vectors, class Rows>
[[gnu::noinline]] void tile_values(const float* p, Rows v, int count, int begin,
                                   const float* rescale, float* out, bool near, LineCursor& ahead,
                                   int burst) noexcept {
  constexpr int width = simd::width_for<HeadDim>;
  simd::Float<width> sums[Lines][Vectors];
  float* const to = out + begin;
  simd::repeat<Lines>([&](auto l) CHUNKATTN_LAMBDA {
    simd::repeat<Vectors>([&](auto i) CHUNKATTN_LAMBDA {
      sums[l][i] = simd::load<width>(to + l * HeadDim + i * width);
    });
  });
  if (rescale != nullptr) {
    simd::repeat<Lines>([&](auto l) CHUNKATTN_LAMBDA {
      const simd::Float<width> factor = simd::broadcast<width>(rescale[l]);
      simd::repeat<Vectors>([&](auto i) CHUNKATTN_LAMBDA { sums[l][i] = sums[l][i] * factor; });
    });
  }
  const auto token = [&](int t) CHUNKATTN_LAMBDA {
    simd::Float<width> value[Vectors];
    const float* const row = v[t] + (Rows::packed ? 0 : begin);
    simd::repeat<Vectors>([&](auto i)
                              CHUNKATTN_LAMBDA { value[i] = simd::load<width>(row + i * width); });
    simd::repeat<Lines>([&](auto l) CHUNKATTN_LAMBDA {
      const simd::Float<width> weight = simd::broadcast<width>(p[t * tile_lines + l]);
      simd::repeat<Vectors>(
          [&](auto i) CHUNKATTN_LAMBDA { sums[l][i] = simd::fma(weight, value[i], sums[l][i]); });
    });
  };
  LineCursor lines = ahead;
  int t = 0;
  const auto tokens = [&](bool prefetch_value) CHUNKATTN_LAMBDA {
    lines.advance(burst);
    simd::repeat<value_step>([&](auto u) CHUNKATTN_LAMBDA {
      if (prefetch_value)
        for (int at = 0; at < Vectors * width; at += 16)
          simd::prefetch_near(v[t + value_step + u] + begin + at);
      token(t + u);
    });
    t += value_step;
  };
  if (!Rows::packed && near)
    while (t + 2 * value_step <= count) tokens(true);
  while (t + value_step <= count) tokens(false);
  for (; t < count; ++t) token(t);
  ahead = lines;
  simd::repeat<Lines>([&](auto l) CHUNKATTN_LAMBDA {
    simd::repeat<Vectors>(
        [&](auto i) CHUNKATTN_LAMBDA { simd::store(to + l * HeadDim + i * width, sums[l][i]); });
  });
}

/// One block for lines [line0, line0 + num_lines).
template <int HeadDim, class T>
void chunk_first_block(const Block<T>& block, int line0, int num_lines, LineState<HeadDim>& state,
                       LineCursor& ahead) noexcept {
  constexpr int width = simd::native_width;
  constexpr bool widen = !std::is_same_v<T, float>;
  const int num_tiles = (num_lines + tile_lines - 1) / tile_lines;

  // K, a part of the block at a time, against all tiles.
  int seen_by_any = 0;
  for (int l = 0; l < num_lines; ++l)
    seen_by_any = std::max(seen_by_any, visible_tokens(block, state, line0 + l));
  if (seen_by_any == 0) return;
  // Half of the lines are asked for during each product, a few at each of its steps.
  const auto burst = [half = ahead.left / 2](int steps) {
    return std::min(max_burst, half / std::max(1, steps) + 1);
  };
  const int logit_burst =
      burst((seen_by_any + logit_group - 1) / logit_group * (HeadDim / logit_step) * num_tiles);
  for (int begin = 0; begin < seen_by_any; begin += logit_tokens) {
    const int count = std::min(logit_tokens, seen_by_any - begin);
    const auto k = [&] {
      if constexpr (widen)
        return widened<HeadDim, HeadDim>(block.k + begin, count, 0, state.scratch);
      else
        return ScatteredRows{block.k + begin};
    }();
    for (int tile = 0; tile < num_tiles; ++tile) {
      const float* const q = state.q_transposed + line0 + tile * tile_lines;
      float* const logits = state.p + (tile * block_tokens + begin) * tile_lines;
      if (num_lines - tile * tile_lines > width)
        tile_logits<HeadDim, 2>(k, count, q, state.transposed_stride, tile == 0, ahead, logit_burst,
                                logits);
      else
        tile_logits<HeadDim, 1>(k, count, q, state.transposed_stride, tile == 0, ahead, logit_burst,
                                logits);
    }
  }

  bool moved_any = false;
  bool same_view = true;  // every line sees the same tokens
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int first = line0 + tile * tile_lines;
    const int lines = std::min(tile_lines, num_lines - tile * tile_lines);
    alignas(64) std::int32_t visible[tile_lines] = {};
    int least = seen_by_any;
    for (int l = 0; l < lines; ++l) {
      visible[l] = visible_tokens(block, state, first + l);
      least = std::min(least, visible[l]);
    }
    same_view = same_view && least == seen_by_any;
    float* const p = state.p + tile * block_tokens * tile_lines;
    for (int l = 0; l < lines; l += width) {
      const bool full = least == seen_by_any && lines - l >= width;
      moved_any |= tile_softmax(block, seen_by_any, full, visible + l, p + l, state.max + first + l,
                                state.sum + first + l, state.rescale + tile * tile_lines + l);
    }
  }

  constexpr int wide = 2;
  constexpr int line_group = simd::num_accumulators / wide;
  constexpr int vector_width = simd::width_for<HeadDim>;
  constexpr int passes = HeadDim / vector_width / wide;
  const int groups = (num_lines + line_group - 1) / line_group;
  const int value_burst = burst(std::max(1, passes) * groups * (seen_by_any / value_step));
  const auto columns = [&]<int Vectors>(std::integral_constant<int, Vectors>,
                                        int begin) CHUNKATTN_LAMBDA {
    constexpr int num_columns = Vectors * vector_width;
    const auto v = [&] {
      if constexpr (widen)
        return widened<HeadDim, num_columns>(block.v, seen_by_any, begin, state.scratch);
      else
        return ScatteredRows{block.v};
    }();
    int line = 0;
    while (line < num_lines) {
      const int tile = line / tile_lines;
      const float* const p = state.p + tile * block_tokens * tile_lines + line % tile_lines;
      const float* const rescale = moved_any ? state.rescale + line : nullptr;
      float* const out = state.out + (line0 + line) * HeadDim;
      const auto lines = [&]<int Lines>(std::integral_constant<int, Lines>) CHUNKATTN_LAMBDA {
        int common = seen_by_any;  // tokens that all of these lines see
        if (!same_view)
          for (int l = 0; l < Lines; ++l)
            common = std::min(common, visible_tokens(block, state, line0 + line + l));
        tile_values<HeadDim, Lines, Vectors>(p, v, common, begin, rescale, out, line == 0, ahead,
                                             value_burst);
        if (!same_view)
          for (int l = 0; l < Lines; ++l)
            for (int t = common; t < visible_tokens(block, state, line0 + line + l); ++t)
              add_value<num_columns>(p[t * tile_lines + l], v[t] + (widen ? 0 : begin),
                                     out + l * HeadDim + begin);
        line += Lines;
      };
      const int left = num_lines - line;
      if (left >= line_group)
        lines(std::integral_constant<int, line_group>{});
      else if (line_group > 4 && left >= 4)
        lines(std::integral_constant<int, 4>{});
      else if (left >= 2)
        lines(std::integral_constant<int, 2>{});
      else
        lines(std::integral_constant<int, 1>{});
    }
  };
  for (int pass = 0; pass < passes; ++pass)
    columns(std::integral_constant<int, wide>{}, pass * wide * vector_width);
  if constexpr (HeadDim / vector_width % wide != 0)
    columns(std::integral_constant<int, 1>{}, passes * wide * vector_width);
}

}  // namespace cpu
CHUNKATTN_ISA_NAMESPACE_END
