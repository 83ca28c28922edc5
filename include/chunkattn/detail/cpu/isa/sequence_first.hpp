// The sequence-first kernel (Algorithm 2): K and V of a few query lines streamed once, at the speed
// of memory. Private chunks are its work, and segments shared by so few lines that a matrix product
// would not pay.
#ifndef CHUNKATTN_ISA_SEQUENCE_FIRST
#define CHUNKATTN_ISA_SEQUENCE_FIRST

#include "elements.hpp"
#include "line_state.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "simd.hpp"

CHUNKATTN_PASS_BEGIN(VECTORS)

/// The most lines that it takes at once.
inline constexpr int stream_lines = 4;
/// Logits of a line: whole groups of tokens are computed.
inline constexpr int padded_block_tokens = block_tokens + 16;

/// Prefetches `Total` cache lines in the course of `Steps` steps, before number `step` of them.
template <int Total, int Steps>
CHUNKATTN_INLINE void prefetch_some(PrefetchCursor& cursor, int step) noexcept {
  constexpr int bursts = Total > max_burst && Steps % 2 == 0 ? 2 : 1;
  if (step % (Steps / bursts) == 0) cursor.advance(Total / bursts);
}

/// q·k of `Lines` lines with the block's first `count` tokens, to logits[line][token]. A whole
/// number of token groups is computed. Rows are read one after the other, as they lie in memory,
/// and for each another is prefetched.
template <int HeadDim, int Lines, class T>
[[gnu::noinline]] void stream_logits(const Block<T>& block, int count, const float* const* queries,
                                     float (*logits)[padded_block_tokens],
                                     PrefetchCursor& ahead) noexcept {
  constexpr int width = simd::width_for<HeadDim>;
  constexpr int group = simd::num_accumulators / Lines;
  // Tokens at once: enough sums to keep the multiply-adds busy, and q is loaded once for them.
  constexpr int together = simd::native_width != 8 ? 1 : Lines == 4 ? 2 : 4;
  constexpr int vectors = HeadDim / width;
  constexpr int unrolled = vectors % 8 == 0 ? 8 : vectors % 4 == 0 ? 4 : 1;
  constexpr int step_lines = (std::max)(1, cache_lines_per_row<HeadDim, T> * unrolled / vectors);
  const float* q[to_size(Lines)];
  std::copy_n(queries, Lines, q);
  PrefetchCursor cursor = ahead;
  for (int t = 0; t < count; t += group) {
    simd::Float<width> sums[simd::num_accumulators];
    CHUNKATTN_WIDENING
    for (int j = 0; j < group; j += together) {
      simd::Float<width> sum[to_size(together)][to_size(Lines)];
      CHUNKATTN_UNROLLED
      for (int r = 0; r < together; ++r) {
        CHUNKATTN_UNROLLED
        for (int l = 0; l < Lines; ++l) sum[r][l] = simd::zero<width>();
      }
      for (int i = 0; i < HeadDim; i += unrolled * width) {
        CHUNKATTN_UNROLLED
        for (int u = 0; u < unrolled; ++u) {
          const int at = i + u * width;
          simd::Float<width> key[to_size(together)];
          CHUNKATTN_UNROLLED
          for (int r = 0; r < together; ++r) {
            prefetch_some<step_lines, unrolled>(cursor, u);
            key[r] = simd::load_widened<width>(block.k[t + j + r] + at);
          }
          CHUNKATTN_UNROLLED
          for (int l = 0; l < Lines; ++l) {
            const simd::Float<width> query = simd::load_once<width>(q[l] + at);
            CHUNKATTN_UNROLLED
            for (int r = 0; r < together; ++r) sum[r][l] = simd::fma(key[r], query, sum[r][l]);
          }
        }
      }
      CHUNKATTN_UNROLLED
      for (int r = 0; r < together; ++r) {
        CHUNKATTN_UNROLLED
        for (int l = 0; l < Lines; ++l) sums[l * group + j + r] = sum[r][l];
      }
    }
    float reduced[simd::num_accumulators];
    CHUNKATTN_UNROLLED
    for (int g = 0; g < simd::num_accumulators / width; ++g) {
      simd::Float<width> part[to_size(width)];
      CHUNKATTN_UNROLLED
      for (int i = 0; i < width; ++i) part[i] = sums[g * width + i];
      simd::store(reduced + g * width, simd::sum_lanes<width>(part));
    }
    CHUNKATTN_UNROLLED
    for (int l = 0; l < Lines; ++l) {
      for (int j = 0; j < group; ++j) logits[l][t + j] = reduced[l * group + j];
    }
  }
  ahead = cursor;
}

template <int N>
using Count = std::integral_constant<int, N>;

/// out[line] = rescale[line] * out[line] + sum over the first `count` tokens of p[line][token] *
/// V[token].
template <int ValueDim, int Lines, class T>
[[gnu::noinline]] void stream_values(const Block<T>& block, int count,
                                     const float (*p)[padded_block_tokens], const float* rescale,
                                     float* const* out, PrefetchCursor& ahead) noexcept {
  constexpr int width = simd::width_for<ValueDim>;
  constexpr int vectors = ValueDim / width;
  // AVX2 has registers for 12 sums of four lines, 3 vectors of V and a weight.
  constexpr bool four_in_avx2 = simd::native_width == 8 && Lines == 4;
  // Vectors of a line held at once.
  constexpr int wide = four_in_avx2 ? 3 : simd::num_accumulators / Lines;
  PrefetchCursor cursor = ahead;
  constexpr int passes = (vectors + wide - 1) / wide;
  // Evenly in all passes, or memory is idle in most of them.
  constexpr int burst = (cache_lines_per_row<ValueDim, T> + passes - 1) / passes;
  const auto pass = [&]<int N>(Count<N>, int begin) CHUNKATTN_LAMBDA {
    simd::Float<width> sums[to_size(Lines)][to_size(N)];
    CHUNKATTN_UNROLLED
    for (int l = 0; l < Lines; ++l) {
      CHUNKATTN_UNROLLED
      for (int i = 0; i < N; ++i) sums[l][i] = simd::zero<width>();
    }
    for (int t = 0; t < count; ++t) {
      const T* const row = block.v[t] + begin;
      constexpr int held = four_in_avx2 ? N : 1;  // vectors of V
      CHUNKATTN_UNROLLED
      for (int i = 0; i < N; i += held) {
        simd::Float<width> value[to_size(held)];
        CHUNKATTN_UNROLLED
        for (int k = 0; k < held; ++k) {
          prefetch_some<burst, N>(cursor, i + k);
          value[k] = simd::load_widened<width>(row + (i + k) * width);
        }
        CHUNKATTN_UNROLLED
        for (int l = 0; l < Lines; ++l) {
          const simd::Float<width> weight = simd::broadcast<width>(p[l][t]);
          CHUNKATTN_UNROLLED
          for (int k = 0; k < held; ++k)
            sums[l][i + k] = simd::fma(weight, value[k], sums[l][i + k]);
        }
      }
    }
    CHUNKATTN_UNROLLED
    for (int l = 0; l < Lines; ++l) {
      const simd::Float<width> factor = simd::broadcast<width>(rescale[l]);
      CHUNKATTN_UNROLLED
      for (int i = 0; i < N; ++i)
        add_block_sum<width>(sums[l][i], factor, out[l] + begin + i * width);
    }
  };
  constexpr int whole = vectors / wide;
  constexpr int rest = vectors % wide;
  if constexpr (whole > 0)
    for (int i = 0; i < whole; ++i) pass(Count<wide>{}, i * wide * width);
  if constexpr (rest > 0) pass(Count<rest>{}, whole * wide * width);
  ahead = cursor;
}

/// The lines that a stream computes at once: of the task [first, first + used), then padding, which
/// repeats the last of them and leaves its outputs in the state's spare ones.
struct StreamLines {
  int first;
  int used;
  int count;                  ///< 1, 2 or 4, with the padding
  int seen = 0;               ///< tokens of the block that some line sees
  int common = block_tokens;  ///< … that all see
  int visible[stream_lines];  ///< … that each sees
  const float* q[stream_lines];
  float* out[stream_lines];
  float rescale[stream_lines];  ///< factors of the outputs

  template <class T, int HeadDim, int ValueDim>
  StreamLines(const Block<T>& block, int first_line, int lines,
              const LineState<HeadDim, ValueDim>& state) noexcept
      : first(first_line), used(lines), count(lines > 2 ? 4 : lines) {
    for (int l = 0; l < count; ++l) {
      q[l] = state.q + line(l) * HeadDim;
      out[l] = l < used ? state.out + line(l) * ValueDim : state.spare;
      visible[l] = visible_tokens(block, state, line(l));
      seen = (std::max)(seen, visible[l]);
      common = (std::min)(common, visible[l]);
    }
  }

  /// Number l of these, as a line of the task.
  [[nodiscard]] int line(int l) const noexcept { return first + (std::min)(l, used - 1); }
  /// f(Count<n>) for n = count: what is unrolled is compiled for each, all else for any of them.
  template <class F>
  CHUNKATTN_INLINE void with_count(const F& f) const {
    if (count == 4) return f(Count<4>{});
    if (count == 2) return f(Count<2>{});
    f(Count<1>{});
  }
};

/// Turns the logits of the tokens that some line sees into probabilities.
template <class T, class State, class Rules>
[[gnu::noinline]] void stream_softmax(const Block<T>& block, StreamLines& lines,
                                      float (*logits)[padded_block_tokens], State& state,
                                      Rules rules) noexcept {
  constexpr int width = simd::native_width;
  const int count = lines.seen;
  for (int l = 0; l < lines.count; ++l) {
    // Tokens that this line does not see: a logit that loses, then a probability of exactly 0.
    const int line = lines.line(l);
    const int visible = lines.visible[l];
    const auto terms = rules.from(line).template for_keys<width>();
    simd::Float<width> largest = simd::broadcast<width>(empty_max);
    for (int t = 0; t < count; t += width) {
      simd::Float<width> s = simd::load<width>(logits[l] + t);
      if constexpr (has_row_scales<T>) s = s * simd::load<width>(block.k_scale + t);
      if constexpr (Rules::change_logits) s = terms.logit(s, block.position + t);
      simd::Int<width> mask = simd::iota<width>() + t < visible;
      if constexpr (Rules::hide) mask = mask & terms.visible(block.position + t);
      s = simd::select<width>(mask, s,
                              simd::broadcast<width>(Rules::hide ? hidden_logit : empty_max));
      simd::store(logits[l] + t, s);
      largest = (simd::max)(largest, s);
    }
    const float old_max = state.max[line];
    const float new_max = (std::max)(old_max, simd::reduce_max<width>(largest));
    simd::Float<width> sum = simd::zero<width>();
    for (int t = 0; t < count; t += width) {
      const simd::Float<width> s = simd::load<width>(logits[l] + t);
      const simd::Float<width> e =
          simd::exp_nonpositive<width>(s - simd::broadcast<width>(new_max));
      simd::Float<width> p = e;
      if constexpr (!Rules::hide)
        p = simd::select<width>(simd::iota<width>() + t < visible, e, simd::zero<width>());
      sum = sum + p;
      if constexpr (has_row_scales<T>) p = p * simd::load<width>(block.v_scale + t);
      if constexpr (Rules::hide) p = marked<width>(p, s);
      simd::store(logits[l] + t, p);
    }
    lines.rescale[l] = 1.0f;
    if (l >= lines.used) continue;
    if (new_max > old_max)
      lines.rescale[l] = simd::exp_nonpositive<4>(simd::broadcast<4>(old_max - new_max))[0];
    state.max[line] = new_max;
    state.sum[line] =
        simd::fma(simd::broadcast<4>(state.sum[line]), simd::broadcast<4>(lines.rescale[l]),
                  simd::broadcast<4>(simd::reduce_sum<width>(sum)))[0];
  }
}

/// P·V of a stream where rules may hide keys from some of its lines.
template <int ValueDim, class T>
CHUNKATTN_INLINE void stream_visible_values(Block<T>& block, const StreamLines& lines,
                                            const float (*p)[padded_block_tokens],
                                            PrefetchCursor& ahead) noexcept {
  NonfiniteValues<ValueDim, T> nonfinite(block);
  for (int t = 0; t < lines.seen; ++t) {
    bool hidden = false;
    for (int l = 0; l < lines.used; ++l) hidden = hidden || is_hidden(p[l][t]);
    if (hidden) nonfinite.inspect(t);
  }
  lines.with_count([&]<int N>(Count<N>) CHUNKATTN_LAMBDA {
    stream_values<ValueDim, N>(block, lines.seen, p, lines.rescale, lines.out, ahead);
  });
  for (int l = 0; l < lines.used; ++l) nonfinite.add(p[l], 1, lines.out[l]);
}

/// One block for lines [first, first + used), at most stream_lines.
template <int HeadDim, int ValueDim, class T, class Rules>
[[gnu::noinline]] void stream_block(Block<T>& block, int first, int used,
                                    LineState<HeadDim, ValueDim>& state, PrefetchCursor& ahead,
                                    Rules rules) noexcept {
  alignas(64) float logits[stream_lines][padded_block_tokens];
  StreamLines lines(block, first, used, state);
  const int count = lines.seen, common = lines.common;
  if (count == 0) return;
  lines.with_count([&]<int N>(Count<N>) CHUNKATTN_LAMBDA {
    stream_logits<HeadDim, N>(block, count, lines.q, logits, ahead);
  });
  stream_softmax(block, lines, logits, state, rules);
  if constexpr (Rules::hide) return stream_visible_values<ValueDim>(block, lines, logits, ahead);
  // Tokens that only some lines see are added line by line, to sums of their own.
  alignas(64) float sums[stream_lines][to_size(ValueDim)];
  float* to[stream_lines];
  for (int l = 0; l < lines.count; ++l) {
    to[l] = lines.out[l];
    if (common == count) continue;
    to[l] = sums[l];
    std::fill_n(sums[l], ValueDim, 0.0f);
  }
  lines.with_count([&]<int N>(Count<N>) CHUNKATTN_LAMBDA {
    stream_values<ValueDim, N>(block, common, logits, lines.rescale, to, ahead);
  });
  if (common == count) return;
  for (int l = 0; l < used; ++l) {
    for (int t = common; t < lines.visible[l]; ++t)
      add_value<ValueDim>(logits[l][t], block.v[t], to[l]);
    add_block_sums<ValueDim>(sums[l], lines.rescale[l], lines.out[l]);
  }
}

/// One block for lines [line0, line0 + num_lines), a few at a time.
template <class T, class State, class Rules>
void sequence_first_block(Block<T>& block, int line0, int num_lines, State& state,
                          PrefetchCursor& ahead, Rules rules) noexcept {
  for (int line = 0; line < num_lines; line += stream_lines)
    stream_block(block, line0 + line, (std::min)(stream_lines, num_lines - line), state, ahead,
                 rules);
}

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_SEQUENCE_FIRST
