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

#include "../config.hpp"
#include "block.hpp"
#include "simd.hpp"

CHUNKATTN_ISA_NAMESPACE_BEGIN
namespace cpu {

/// Widens the rows of one operand of a block into `state.widened`.
template <int HeadDim, class T>
CHUNKATTN_INLINE void widen_rows(const T* const* rows, int count, float* widened) noexcept {
  constexpr int width = simd::width_for<HeadDim>;
  for (int t = 0; t < count; ++t)
    simd::repeat<HeadDim / width>([&](auto i) CHUNKATTN_LAMBDA {
      simd::store(widened + t * HeadDim + i * width,
                  simd::load_widened<width>(rows[t] + i * width));
    });
}

/// logits[token][lane] of one tile: Vectors * native_width lines from q_transposed on, tokens
/// [0, count) rounded up to whole groups. With `ahead`, asks for those rows too (count of them).
template <int HeadDim, int Vectors, class T>
[[gnu::noinline]] void tile_logits(const float* const* k, int count, const float* q_transposed,
                                   std::ptrdiff_t stride, bool near, const T* const* ahead,
                                   float* logits) noexcept {
  constexpr int width = simd::native_width;
  constexpr int group = simd::num_accumulators / 2;  // tokens at once
  constexpr int parities = Vectors == 1 ? 2 : 1;     // enough chains of additions in flight
  constexpr int line_elements = 64 / static_cast<int>(sizeof(T));
  constexpr int step = HeadDim % line_elements == 0 ? line_elements : 8;
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
      if (ahead != nullptr) {
        simd::repeat<group>([&](auto j) CHUNKATTN_LAMBDA {
          simd::prefetch(ahead[std::min(t + j, count - 1)] + outer);
        });
      }
      if (near) {
        for (int at = 0; at < step; at += 16)
          simd::repeat<group>(
              [&](auto j) CHUNKATTN_LAMBDA { simd::prefetch_near(k[t + group + j] + outer + at); });
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
/// `Vectors` vectors of each. `ahead` is advanced by `ahead_lines` every second token. `near`:
/// these columns of V are not in L1 yet.
template <int HeadDim, int Lines, int Vectors, class T>
[[gnu::noinline]] void tile_values(const float* p, const float* const* v, int count, int begin,
                                   const float* rescale, float* out,
                                   RowPrefetcher<HeadDim, T>& ahead, int ahead_lines,
                                   bool near) noexcept {
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
    const float* const row = v[t] + begin;
    simd::repeat<Vectors>([&](auto i)
                              CHUNKATTN_LAMBDA { value[i] = simd::load<width>(row + i * width); });
    simd::repeat<Lines>([&](auto l) CHUNKATTN_LAMBDA {
      const simd::Float<width> weight = simd::broadcast<width>(p[t * tile_lines + l]);
      simd::repeat<Vectors>(
          [&](auto i) CHUNKATTN_LAMBDA { sums[l][i] = simd::fma(weight, value[i], sums[l][i]); });
    });
  };
  RowPrefetcher<HeadDim, T> rows = ahead;
  int t = 0;
  if (near) {
    constexpr int distance = 8;
    for (; t + distance + 2 <= count; t += 2) {
      rows.advance(ahead_lines);
      simd::repeat<2>([&](auto u) CHUNKATTN_LAMBDA {
        for (int at = 0; at < Vectors * width; at += 16)
          simd::prefetch_near(v[t + distance + u] + begin + at);
      });
      token(t);
      token(t + 1);
    }
  }
  for (; t + 2 <= count; t += 2) {
    rows.advance(ahead_lines);
    token(t);
    token(t + 1);
  }
  if (t < count) token(t);
  ahead = rows;
  simd::repeat<Lines>([&](auto l) CHUNKATTN_LAMBDA {
    simd::repeat<Vectors>(
        [&](auto i) CHUNKATTN_LAMBDA { simd::store(to + l * HeadDim + i * width, sums[l][i]); });
  });
}

/// One block for lines [line0, line0 + num_lines).
template <int HeadDim, class T>
void chunk_first_block(const Block<T>& block, const Block<T>& next, int line0, int num_lines,
                       LineState<HeadDim>& state) noexcept {
  constexpr int width = simd::native_width;
  constexpr bool widen = !std::is_same_v<T, float>;
  const int num_tiles = (num_lines + tile_lines - 1) / tile_lines;
  const float* const* k;
  if constexpr (widen) {
    widen_rows<HeadDim>(block.k, block.count, state.widened);
    k = state.widened_rows;
  } else {
    k = block.k;
  }

  int seen_by_any = 0;
  bool moved_any = false;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int first = line0 + tile * tile_lines;
    const int lines = std::min(tile_lines, num_lines - tile * tile_lines);
    alignas(64) std::int32_t visible[tile_lines] = {};
    int least = block.count;
    int count = 0;
    for (int l = 0; l < lines; ++l) {
      visible[l] = visible_tokens(block, state, first + l);
      least = std::min(least, visible[l]);
      count = std::max(count, visible[l]);
    }
    seen_by_any = std::max(seen_by_any, count);
    float* const p = state.p + tile * block_tokens * tile_lines;
    if (count == 0) {  // nothing for these lines, but other tiles' values pass reads p
      std::fill_n(p, block.count * tile_lines, 0.0f);
      std::fill_n(state.rescale + tile * tile_lines, tile_lines, 1.0f);
      continue;
    }
    const T* const* const ahead = tile == 0 ? block.v : nullptr;
    const float* const q = state.q_transposed + first;
    if (lines > width)
      tile_logits<HeadDim, 2>(k, count, q, state.transposed_stride, tile == 0, ahead, p);
    else
      tile_logits<HeadDim, 1>(k, count, q, state.transposed_stride, tile == 0, ahead, p);
    for (int l = 0; l < lines; l += width) {
      const bool full = least == count && lines - l >= width;
      moved_any |= tile_softmax(block, count, full, visible + l, p + l, state.max + first + l,
                                state.sum + first + l, state.rescale + tile * tile_lines + l);
    }
    for (int t = count; t < block.count; ++t) std::fill_n(p + t * tile_lines, tile_lines, 0.0f);
  }

  const float* const* v;
  if constexpr (widen) {
    widen_rows<HeadDim>(block.v, seen_by_any, state.widened);
    v = state.widened_rows;
  } else {
    v = block.v;
  }
  constexpr int wide = 2;
  constexpr int line_group = simd::num_accumulators / wide;
  constexpr int vector_width = simd::width_for<HeadDim>;
  constexpr int passes = HeadDim / vector_width / wide;
  const int groups = (num_lines + line_group - 1) / line_group;
  RowPrefetcher<HeadDim, T> ahead(next.k, next.count);
  const int steps = std::max(1, passes) * groups * (seen_by_any / 2) + 1;
  const int ahead_lines = (next.count * ahead.row_lines + steps - 1) / steps;
  const auto columns = [&]<int Vectors>(std::integral_constant<int, Vectors>,
                                        int begin) CHUNKATTN_LAMBDA {
    int line = 0;
    while (line < num_lines) {
      const int tile = line / tile_lines;
      const float* const p = state.p + tile * block_tokens * tile_lines + line % tile_lines;
      const float* const rescale = moved_any ? state.rescale + line : nullptr;
      float* const out = state.out + (line0 + line) * HeadDim;
      const auto lines = [&]<int Lines>(std::integral_constant<int, Lines>) CHUNKATTN_LAMBDA {
        tile_values<HeadDim, Lines, Vectors>(p, v, seen_by_any, begin, rescale, out, ahead,
                                             ahead_lines, line == 0);
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
