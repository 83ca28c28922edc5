// The chunk-first kernel (Algorithm 1): many query lines against a block of tokens, as two small
// matrix products with an online softmax between them.
//
// Sᵀ = K·Qᵀ, tokens by lines: K is left row-major and broadcast, Q was transposed once per task,
// and maximum and sum of each line run down the tokens without a horizontal step. Then O += P·V
// with lines broadcast against V's rows. Some columns of V at a time, and K of 16 and 8 bits, are
// copied to scratch as floats.
#ifndef CHUNKATTN_ISA_CHUNK_FIRST
#define CHUNKATTN_ISA_CHUNK_FIRST

#include "line_state.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "simd.hpp"
#include "tile_logits.hpp"

CHUNKATTN_PASS_BEGIN(VECTORS)

/// Tokens of the innermost loop over V.
inline constexpr int value_step = 4;

/// The online softmax of one vector of lines: turns logits[0, count) into probabilities, updates
/// max and sum, leaves the factor for the output in `rescale`. Lane l sees the tokens below
/// visible[l] (all of them if `full`). Logits are [token][Stride]. With rules that hide keys, says
/// in `some_hidden` whether one was, for a lane with visible[l] >= 0.
template <int Stride = tile_lines, class T, class Rules = NoRules>
[[gnu::noinline]] void tile_softmax(const Block<T>& block, int count, bool full,
                                    const std::int32_t* visible, float* logits, float* max,
                                    float* sum, float* rescale, Rules rules = {},
                                    SomeHidden<Rules> some_hidden = {}) noexcept {
  constexpr int width = simd::native_width;
  using Vector = simd::Float<width>;
  const auto terms = rules.template for_rows<width>();
  const simd::Int<width> seen = simd::load_int<width>(visible);
  [[maybe_unused]] simd::Int<width> hidden{};
  const Vector lowest = simd::broadcast<width>(empty_max);
  const Vector old_max = simd::load<width>(max);
  Vector largest = old_max;
  for (int t = 0; t < count; ++t) {
    Vector s = simd::load<width>(logits + t * Stride);
    if constexpr (has_row_scales<T>) {
      s = s * simd::broadcast<width>(block.k_scale[t]);
      if constexpr (!Rules::change_logits && !Rules::hide) simd::store(logits + t * Stride, s);
    }
    if constexpr (Rules::change_logits) {
      s = terms.logit(s, block.position + t);
      if constexpr (!Rules::hide) simd::store(logits + t * Stride, s);
    }
    if constexpr (Rules::hide) {
      simd::Int<width> mask = terms.visible(block.position + t);
      if (!full) mask = mask & (simd::broadcast_int<width>(t) < seen);
      hidden = hidden | ~mask;
      s = simd::select<width>(mask, s, simd::broadcast<width>(hidden_logit));
      simd::store(logits + t * Stride, s);
    } else if (!full)
      s = simd::select<width>(simd::broadcast_int<width>(t) < seen, s, lowest);
    largest = (simd::max)(largest, s);
  }
  const Vector factor = simd::exp_nonpositive<width>(old_max - largest);
  Vector totals[width];  // of the tokens at positions 0, 1, … modulo width, as streams add them
  for (Vector& total : totals) total = simd::zero<width>();
  for (int t = 0; t < count; ++t) {
    const Vector s = simd::load<width>(logits + t * Stride);
    Vector p = simd::exp_nonpositive<width>(s - largest);
    if (!Rules::hide && !full)
      p = simd::select<width>(simd::broadcast_int<width>(t) < seen, p, simd::zero<width>());
    totals[t % width] = totals[t % width] + p;
    if constexpr (has_row_scales<T>) p = p * simd::broadcast<width>(block.v_scale[t]);
    if constexpr (Rules::hide) p = marked<width>(p, s);
    simd::store(logits + t * Stride, p);
  }
  simd::store(max, largest);
  simd::store(sum, simd::fma(simd::load<width>(sum), factor, simd::sum_as_lanes<width>(totals)));
  simd::store(rescale, factor);
  if constexpr (Rules::hide)
    if (some_hidden != nullptr) *some_hidden |= any_of<width>(hidden & (seen >= 0));
}

/// out[line] = rescale[line] * out[line] + sum over tokens of p[token][line] * V[token], for
/// `Lines` lines and `Vectors` vectors of each. Prefetches some lines of `ahead` at each step.
/// \param v    these vectors of V's rows, one after another
/// \param out  these vectors of the first line
template <int ValueDim, int Lines, int Vectors>
[[gnu::noinline]] void tile_values(const float* p, const float* v, int count, const float* rescale,
                                   float* out, PrefetchCursor& ahead, int burst) noexcept {
  constexpr int width = simd::width_for<ValueDim>;
  simd::Float<width> sums[to_size(Lines)][to_size(Vectors)];
  CHUNKATTN_UNROLLED
  for (int l = 0; l < Lines; ++l) {
    CHUNKATTN_UNROLLED
    for (int i = 0; i < Vectors; ++i) sums[l][i] = simd::zero<width>();
  }
  const auto token = [&](std::ptrdiff_t t) CHUNKATTN_LAMBDA {
    simd::Float<width> value[to_size(Vectors)];
    const float* row = v + t * (Vectors * width);
    // By a pointer that moves: row + i * width takes g++ a second register.
    CHUNKATTN_UNROLLED
    for (int i = 0; i < Vectors; ++i, row += width) value[i] = simd::load_once<width>(row);
    CHUNKATTN_UNROLLED
    for (int l = 0; l < Lines; ++l) {
      const simd::Float<width> weight = simd::broadcast<width>(p[t * tile_lines + l]);
      CHUNKATTN_UNROLLED
      for (int i = 0; i < Vectors; ++i) sums[l][i] = simd::fma(weight, value[i], sums[l][i]);
    }
  };
  PrefetchCursor cursor = ahead;
  std::ptrdiff_t t = 0;
  for (; t + value_step <= count; t += value_step) {
    cursor.advance(burst);
    CHUNKATTN_UNROLLED
    for (int u = 0; u < value_step; ++u) token(t + u);
  }
  for (; t < count; ++t) token(t);
  ahead = cursor;
  CHUNKATTN_UNROLLED
  for (int l = 0; l < Lines; ++l) {
    const simd::Float<width> factor = simd::broadcast<width>(rescale[l]);
    CHUNKATTN_UNROLLED
    for (int i = 0; i < Vectors; ++i)
      add_block_sum<width>(sums[l][i], factor, out + l * ValueDim + i * width);
  }
}

/// The lines that a block is computed for: [begin, begin + count) of the task, cut into tiles.
struct BlockLines {
  int begin;
  int count;
  int seen = 0;           ///< tokens of the block that some line sees
  bool same_view = true;  ///< every line sees all of these
  bool hidden = false;    ///< rules hide some token from some line

  [[nodiscard]] int num_tiles() const noexcept { return (count + tile_lines - 1) / tile_lines; }
};

/// How many lines of `ahead` each of `steps` steps prefetches, if `count` are to be prefetched in
/// them.
inline int burst_of(int count, int steps) noexcept {
  return (std::min)(max_burst, count / (std::max)(1, steps) + 1);
}

/// K, a part of the block at a time, against all tiles: state.p receives logits, added up
/// `as_streamed` or dim by dim.
template <int HeadDim, int ValueDim, class T>
CHUNKATTN_INLINE void block_logits(const Block<T>& block, const BlockLines& lines, bool as_streamed,
                                   LineState<HeadDim, ValueDim>& state, PrefetchCursor& ahead,
                                   int half) noexcept {
  const int num_tiles = lines.num_tiles();
  const int burst = burst_of(
      half, (lines.seen + logit_group - 1) / logit_group * (HeadDim / logit_step) * num_tiles);
  for (int begin = 0; begin < lines.seen; begin += logit_tokens) {
    const int count = (std::min)(logit_tokens, lines.seen - begin);
    const auto k = [&] {
      if constexpr (std::is_same_v<T, float>)
        return ScatteredRows{block.k + begin};
      else
        return PackedRows<HeadDim>{
            widened<HeadDim, HeadDim>(block.k + begin, count, 0, state.scratch)};
    }();
    for (int tile = 0; tile < num_tiles; ++tile) {
      const float* const q = state.q_transposed + lines.begin + tile * tile_lines;
      float* const logits = state.p + (tile * block_tokens + begin) * tile_lines;
      const auto compute = [&]<int Vectors>(std::integral_constant<int, Vectors>) CHUNKATTN_LAMBDA {
        if (as_streamed)
          tile_logits_as_streamed<HeadDim, Vectors>(k, count, q, state.transposed_stride, tile == 0,
                                                    ahead, burst, logits);
        else
          tile_logits<HeadDim, Vectors>(k, count, q, state.transposed_stride, tile == 0, ahead,
                                        burst, logits);
      };
      if (lines.count - tile * tile_lines > simd::native_width)
        compute(std::integral_constant<int, 2>{});
      else
        compute(std::integral_constant<int, 1>{});
    }
  }
}

/// Turns the logits in state.p into probabilities; notes in `lines` what the values need to know.
template <class T, class State, class Rules>
CHUNKATTN_INLINE void block_softmax(const Block<T>& block, BlockLines& lines, State& state,
                                    Rules rules) noexcept {
  constexpr int width = simd::native_width;
  for (int tile = 0; tile < lines.num_tiles(); ++tile) {
    const int first = lines.begin + tile * tile_lines;
    const int count = (std::min)(tile_lines, lines.count - tile * tile_lines);
    alignas(64) std::int32_t visible[tile_lines] = {};
    if constexpr (Rules::hide) std::fill_n(visible, tile_lines, -1);
    int least = lines.seen;
    for (int l = 0; l < count; ++l) {
      visible[l] = visible_tokens(block, state, first + l);
      least = (std::min)(least, visible[l]);
    }
    lines.same_view = lines.same_view && (Rules::hide || least == lines.seen);
    float* const p = state.p + tile * block_tokens * tile_lines;
    for (int l = 0; l < count; l += width) {
      const bool full = least == lines.seen && count - l >= width;
      SomeHidden<Rules> some_hidden{};
      if constexpr (Rules::hide) some_hidden = &lines.hidden;
      tile_softmax(block, lines.seen, full, visible + l, p + l, state.max + first + l,
                   state.sum + first + l, state.rescale + tile * tile_lines + l,
                   rules.from(first + l), some_hidden);
    }
  }
}

/// Columns [begin, begin + Vectors * width) of the outputs of `Lines` lines from `line` on. Tokens
/// that only some of them see are added line by line.
template <int Lines, int Vectors, class T, class State>
CHUNKATTN_INLINE void group_values(const Block<T>& block, const BlockLines& lines, int line,
                                   const float* v, int begin, State& state, PrefetchCursor& ahead,
                                   int burst) noexcept {
  constexpr int dim = State::value_dim;
  constexpr int num_columns = Vectors * simd::width_for<dim>;
  const float* const p =
      state.p + line / tile_lines * block_tokens * tile_lines + line % tile_lines;
  const float* const rescale = state.rescale + line;
  float* const out = state.out + (lines.begin + line) * dim + begin;
  if (lines.same_view)
    return tile_values<dim, Lines, Vectors>(p, v, lines.seen, rescale, out, ahead, burst);
  int common = lines.seen;  // tokens that all of these lines see
  for (int l = 0; l < Lines; ++l)
    common = (std::min)(common, visible_tokens(block, state, lines.begin + line + l));
  alignas(64) float sums[to_size(Lines * dim)] = {};
  tile_values<dim, Lines, Vectors>(p, v, common, rescale, sums, ahead, burst);
  for (int l = 0; l < Lines; ++l) {
    float* const sum = sums + l * dim;
    for (int t = common; t < visible_tokens(block, state, lines.begin + line + l); ++t)
      add_value<num_columns>(p[t * tile_lines + l], v + t * num_columns, sum);
    add_block_sums<num_columns>(sum, rescale[l], out + l * dim);
  }
}

/// Vectors and lines of the output tile that is held in registers.
inline constexpr int wide_columns = 2;
inline constexpr int line_group = simd::tile_accumulators / wide_columns;

/// Columns [begin, begin + Vectors * width) of all outputs: P·V, a group of lines at a time.
template <int Vectors, class T, class State>
CHUNKATTN_INLINE void column_values(const Block<T>& block, const BlockLines& lines, int begin,
                                    State& state, PrefetchCursor& ahead, int burst) noexcept {
  constexpr int dim = State::value_dim;
  // Of fp32, too: columns of rows that are a power of two apart share few sets of L1.
  const float* const v =
      widened<dim, Vectors * simd::width_for<dim>>(block.v, lines.seen, begin, state.scratch);
  int line = 0;
  const auto group = [&]<int Lines>(std::integral_constant<int, Lines>) CHUNKATTN_LAMBDA {
    group_values<Lines, Vectors>(block, lines, line, v, begin, state, ahead, burst);
    line += Lines;
  };
  while (line < lines.count) {
    const int left = (std::min)(lines.count - line, tile_lines - line % tile_lines);
    if (left >= line_group && (line_group != 6 || left != 8))  // 8 are 4 and 4, not 6 and 2
      group(std::integral_constant<int, line_group>{});
    else if (line_group > 4 && left >= 4)
      group(std::integral_constant<int, 4>{});
    else if (left >= 2)
      group(std::integral_constant<int, 2>{});
    else
      group(std::integral_constant<int, 1>{});
  }
}

/// P·V of all columns.
template <class T, class State>
CHUNKATTN_INLINE void block_values(const Block<T>& block, const BlockLines& lines, State& state,
                                   PrefetchCursor& ahead, int half) noexcept {
  constexpr int width = simd::width_for<State::value_dim>;
  constexpr int passes = State::value_dim / width / wide_columns;
  const int groups = (lines.count + line_group - 1) / line_group;
  const int burst = burst_of(half, (std::max)(1, passes) * groups * (lines.seen / value_step));
  for (int pass = 0; pass < passes; ++pass)
    column_values<wide_columns>(block, lines, pass * wide_columns * width, state, ahead, burst);
  if constexpr (State::value_dim / width % wide_columns != 0)
    column_values<1>(block, lines, passes * wide_columns * width, state, ahead, burst);
}

/// Hides values from products that not all lines may see: `nonfinite` receives them.
template <class State, class Values>
[[gnu::noinline]] void hide_values(const BlockLines& lines, const State& state,
                                   Values& nonfinite) noexcept {
  constexpr int width = simd::native_width;
  for (int t = 0; t < lines.seen; ++t) {
    simd::Int<width> hidden{};
    for (int l = 0; l < lines.count; l += width) {
      const float* const p =
          state.p + (l / tile_lines * block_tokens + t) * tile_lines + l % tile_lines;
      hidden = hidden |
               (is_hidden<width>(simd::load<width>(p)) & (simd::iota<width>() < lines.count - l));
    }
    if (any_of<width>(hidden)) nonfinite.inspect(t);
  }
}

/// One block for lines [line0, line0 + num_lines). Where logits are added up `as_streamed`, the
/// state becomes bit for bit what sequence_first_block would make of it.
template <class T, class State, class Rules>
[[gnu::noinline]] void chunk_first_block(Block<T>& block, int line0, int num_lines,
                                         bool as_streamed, State& state, PrefetchCursor& ahead,
                                         Rules rules) noexcept {
  BlockLines lines{line0, num_lines};
  for (int l = 0; l < num_lines; ++l)
    lines.seen = (std::max)(lines.seen, visible_tokens(block, state, line0 + l));
  if (lines.seen == 0) return;
  const int half = ahead.left / 2;  // of what is to be prefetched, for each product
  block_logits(block, lines, as_streamed, state, ahead, half);
  block_softmax(block, lines, state, rules);
  if constexpr (Rules::hide) {
    NonfiniteValues<State::value_dim, T> nonfinite(block);
    if (lines.hidden) hide_values(lines, state, nonfinite);
    block_values(block, lines, state, ahead, half);
    for (int l = 0; l < num_lines && !nonfinite.empty(); ++l)
      nonfinite.add(state.p + l / tile_lines * block_tokens * tile_lines + l % tile_lines,
                    tile_lines, state.out + (line0 + l) * State::value_dim);
  } else {
    block_values(block, lines, state, ahead, half);
  }
}

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_CHUNK_FIRST
