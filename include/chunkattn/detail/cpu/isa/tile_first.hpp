// The chunk-first kernel through tiles: the same two products and softmax as chunk_first.hpp, over
// the same state, for K and V of 16 and 8 bits.
//
// 32 lines at a time: Sᵀ of the whole block, its softmax, and then O += P·V, accumulated in the
// rows of state.out themselves. Tiles are always whole: lines and tokens that are not there are
// columns and rows that nobody looks at, or zeros. A tile product lets a NaN or an infinity spread
// along its row and column, so whatever is not a number is put right by vectors afterwards, and
// lines that do not see it keep their bits.
#ifndef CHUNKATTN_ISA_TILE_FIRST
#define CHUNKATTN_ISA_TILE_FIRST

#include "chunk_first.hpp"
#include "line_state.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "simd.hpp"
#include "tile_operands.hpp"
#include "tile_products.hpp"
#include "tiles.hpp"

#if defined(CHUNKATTN_PASS_TILES)
CHUNKATTN_PASS_BEGIN(VECTORS)

/// Logits of one vector of lines that became NaN are computed again, in fp32: with infinities the
/// terms of a product give NaN where the product is an infinity.
template <int HeadDim, class T>
CHUNKATTN_INLINE void repair_logits(const Block<T>& block, int seen, const float* q,
                                    const std::int32_t* visible, float* logits) noexcept {
  constexpr int width = simd::native_width;
  const simd::Int<width> sees = simd::load_int<width>(visible);
  simd::Int<width> broken{};
  for (int t = 0; t < seen; ++t) {
    const simd::Float<width> s = simd::load<width>(logits + t * matrix_lines);
    broken = broken | ((simd::Int<width>)(s != s) & (simd::broadcast_int<width>(t) < sees));
  }
  for (int l = 0; l < width; ++l) {
    if (broken[l] == 0) continue;
    for (int t = 0; t < visible[l]; ++t) {
      simd::Float<width> sum = simd::zero<width>();
      for (int i = 0; i < HeadDim; i += width)
        sum = simd::fma(simd::load_widened<width>(block.k[t] + i),
                        simd::load<width>(q + l * HeadDim + i), sum);
      logits[t * matrix_lines + l] = simd::reduce_sum<width>(sum);
    }
  }
}

/// Turns logits into probabilities and rescales the outputs of lines whose maximum moved.
template <int HeadDim, int ValueDim, class T, class Rules>
CHUNKATTN_INLINE void matrix_softmax(const Block<T>& block, MatrixLines& lines,
                                     LineState<HeadDim, ValueDim>& state, float* logits,
                                     Rules rules) noexcept {
  constexpr int width = simd::native_width;
  bool moved = false;
  for (int l = 0; l < lines.count; l += width) {
    bool full = lines.count - l >= width;
    for (int i = 0; i < width; ++i) full = full && lines.visible[l + i] == lines.seen;
    const int line = lines.begin + l;
    repair_logits<HeadDim>(block, lines.seen, state.q + line * HeadDim, lines.visible + l,
                           logits + l);
    tile_softmax<matrix_lines>(block, lines.seen, full, lines.visible + l, logits + l,
                               state.max + line, state.sum + line, lines.rescale + l,
                               rules.from(line));
    moved = moved || any_of<width>((simd::Int<width>)(simd::load<width>(lines.rescale + l) !=
                                                      simd::broadcast<width>(1.0f)));
  }
  for (int l = 0; moved && l < lines.count; ++l) {
    if (lines.rescale[l] == 1.0f) continue;
    float* const out = state.out + (lines.begin + l) * ValueDim;
    const simd::Float<width> factor = simd::broadcast<width>(lines.rescale[l]);
    for (int i = 0; i < ValueDim; i += width)
      simd::store(out + i, simd::load<width>(out + i) * factor);
  }
}

/// Adds the infinities and NaN that pack_values() left out, to the lines that see them.
template <class T, class State>
[[gnu::noinline]] void add_special_values(const Block<T>& block, int common,
                                          const MatrixLines& lines, const float* p,
                                          State& state) noexcept {
  constexpr int width = simd::native_width;
  constexpr int dim = State::value_dim;
  for (int l = 0; l < lines.count; ++l) {
    float* const out = state.out + (lines.begin + l) * dim;
    for (int t = common; t < lines.visible[l]; ++t) {
      if (is_hidden(p[t * matrix_lines + l])) continue;
      const simd::Float<width> weight = simd::broadcast<width>(p[t * matrix_lines + l]);
      for (int i = 0; i < dim; i += width) {
        const simd::Float<width> x = simd::load_widened<width>(block.v[t] + i);
        const simd::Float<width> old = simd::load<width>(out + i);
        simd::store(out + i, simd::select<width>(is_special<width>(x), old + weight * x, old));
      }
    }
  }
}

/// O += P·V of some lines, 32 columns at a time, for which `values(column)` gives V.
template <int ValueDim, class State, class Values>
CHUNKATTN_INLINE void add_values(Tiles& tiles, const MatrixBlock& work, const MatrixLines& lines,
                                 const TileScratch<ValueDim>& scratch, State& state,
                                 PrefetchCursor& ahead, int burst, Values&& values) noexcept {
  const bool two_tiles = lines.count > tile_size;
  const int rest = lines.count % tile_size;  // lines of a last tile that is not full
  float* first = state.out + lines.begin * ValueDim;
  float* second = first + tile_size * ValueDim;
  float* const last = first + (lines.count - rest) * ValueDim;
  if (rest > 0) {  // the rows behind these lines are other lines'
    std::copy_n(last, rest * ValueDim, scratch.out);
    (two_tiles ? second : first) = scratch.out;
  }
  for (int i = 0; i < ValueDim; i += tile_depth) {
    const float* const v = values(i);
    if (two_tiles)
      matrix_values<ValueDim, true>(tiles, work, lines.steps(), scratch.p, v, ahead, burst,
                                    first + i, second + i);
    else
      matrix_values<ValueDim, false>(tiles, work, lines.steps(), scratch.p, v, ahead, burst,
                                     first + i, nullptr);
  }
  if (rest > 0) std::copy_n(scratch.out, rest * ValueDim, last);
}

/// Lines [begin, begin + count) of a block and what each sees of it.
template <class T, class State>
MatrixLines matrix_lines_of(const Block<T>& block, int begin, int count,
                            const State& state) noexcept {
  MatrixLines lines{begin, count};
  for (int l = 0; l < count; ++l) {
    lines.visible[l] = visible_tokens(block, state, begin + l);
    lines.seen = std::max(lines.seen, lines.visible[l]);
  }
  return lines;
}

/// One block for lines [line0, line0 + num_lines), whose queries pack_queries() has packed.
template <int HeadDim, int ValueDim, class T, class Rules>
void tile_first_block(const Block<T>& block, int line0, int num_lines, int terms,
                      LineState<HeadDim, ValueDim>& state, Tiles& tiles, PrefetchCursor& ahead,
                      Rules rules) noexcept {
  constexpr int slice = 2 * block_tokens * tile_size;  // of V: two terms of 32 columns
  const TileScratch<ValueDim> scratch(state.tile_scratch);
  MatrixBlock work{terms, stored_terms<T>(terms)};
  for (int l = 0; l < num_lines; ++l) {
    const int visible = visible_tokens(block, state, line0 + l);
    work.seen = std::max(work.seen, visible);
    work.common = std::min(work.common, visible);
  }
  if (work.seen == 0) return;
  if constexpr (Rules::hide) work.common = 0;  // not known yet
  for (int t = 0; t < work.seen; t += tile_size)
    work.keys[t / tile_size] = key_tile<HeadDim>(block, t, work.seen, terms, state.scratch);

  // Prefetching goes on evenly while V is packed and while tiles multiply: a step for each pair of
  // rows, and for each product of 32 elements.
  const int groups = (num_lines + matrix_lines - 1) / matrix_lines;
  const int products = terms + work.stored_terms - 1;        // 1, 2 or 3 pairs of terms
  constexpr int slices = (HeadDim + ValueDim) / tile_depth;  // of K and V
  const int steps = (work.seen + tile_depth - 1) / tile_depth * slices * products * groups +
                    (work.seen + 1) / 2 * (ValueDim / tile_depth);
  const int burst = burst_of(ahead.left, steps);

  // V is packed once: for several times 32 lines all of it before, else column by column where it
  // is needed.
  const auto pack = [&](int column, float* to) {
    work.special |= pack_values(block, column, work.common, work.seen, terms, ahead, burst, to);
    return to;
  };
  if (groups > 1)
    for (int i = 0; i < ValueDim; i += tile_depth) pack(i, scratch.v + i / tile_depth * slice);
  const auto values = [&](int i) {
    return groups > 1 ? scratch.v + i / tile_depth * slice : pack(i, scratch.v);
  };

  for (int l = 0; l < num_lines; l += matrix_lines) {
    MatrixLines lines =
        matrix_lines_of(block, line0 + l, std::min(matrix_lines, num_lines - l), state);
    if (lines.seen == 0) continue;
    const float* const q = state.q_transposed + lines.begin;
    const bool two_tiles = lines.count > tile_size;
    if (two_tiles)
      matrix_logits<HeadDim, true>(tiles, work, lines.seen, q, state.transposed_stride, ahead,
                                   burst, scratch.logits);
    else
      matrix_logits<HeadDim, false>(tiles, work, lines.seen, q, state.transposed_stride, ahead,
                                    burst, scratch.logits);
    matrix_softmax(block, lines, state, scratch.logits, rules);
    pack_probabilities(scratch.logits, lines.visible, two_tiles ? matrix_lines : tile_size,
                       lines.seen, terms, scratch.p);
    add_values(tiles, work, lines, scratch, state, ahead, burst, values);
    if (work.special) add_special_values(block, work.common, lines, scratch.logits, state);
  }
}

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_TILE_FIRST
