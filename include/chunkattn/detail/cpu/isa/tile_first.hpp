// The chunk-first kernel through tiles: the same two products and softmax as chunk_first.hpp, over
// the same state, for K and V of 16 and 8 bits.
//
// 32 lines at a time: Sᵀ of the whole block, its softmax, and then O += P·V, accumulated in the
// rows of state.out themselves. Tiles are always whole: lines and tokens that are not there are
// columns and rows that are not read, or zeros. A tile product lets a NaN or an infinity spread
// along its row and column, so whatever is not a number is put right by vectors afterwards, and
// lines that do not see it keep their bits.
#ifndef CHUNKATTN_ISA_TILE_FIRST
#define CHUNKATTN_ISA_TILE_FIRST

#include "chunk_first.hpp"
#include "line_state.hpp"
#include "line_tile.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "simd.hpp"
#include "tile_operands.hpp"
#include "tile_products.hpp"
#include "tiles.hpp"

#if defined(CHUNKATTN_PASS_TILES)
CHUNKATTN_PASS_BEGIN(VECTORS)

/// Whether a line sees a logit that is not finite.
inline bool has_nonfinite(const MatrixTile& tile, const float* logits) noexcept {
  constexpr int width = simd::native_width;
  simd::Int<width> found{};
  for (int l = 0; l < tile.count; l += width) {
    const simd::Int<width> visible = simd::load_int<width>(tile.visible + l);
    for (int t = 0; t < tile.seen; ++t)
      found |= is_nonfinite<width>(simd::load<width>(logits + t * matrix_lines + l)) &
               (simd::broadcast_int<width>(t) < visible);
  }
  return any_of<width>(found);
}

/// Turns logits into probabilities and rescales the outputs of lines whose maximum has changed.
template <int HeadDim, int ValueDim, class T, class Rules>
CHUNKATTN_INLINE void matrix_softmax(const Block<T>& block, const MatrixTile& tile,
                                     LineState<HeadDim, ValueDim>& state, float* logits,
                                     Rules rules) noexcept {
  constexpr int width = simd::native_width;
  bool rescaled = false;
  for (int l = 0; l < tile.count; l += width) {
    bool full = tile.count - l >= width;
    for (int i = 0; i < width; ++i) full = full && tile.visible[l + i] == tile.seen;
    const int line = tile.begin + l;
    tile_softmax<matrix_lines>(block, tile.seen, full, tile.visible + l, logits + l,
                               state.max + line, state.sum + line, state.rescale + l,
                               rules.from(line));
    rescaled = rescaled ||
               any_of<width>(simd::load<width>(state.rescale + l) != simd::broadcast<width>(1.0f));
  }
  for (int l = 0; rescaled && l < tile.count; ++l) {
    if (state.rescale[l] == 1.0f) continue;
    float* const out = state.out + (tile.begin + l) * ValueDim;
    const simd::Float<width> factor = simd::broadcast<width>(state.rescale[l]);
    for (int i = 0; i < ValueDim; i += width)
      simd::store(out + i, simd::load<width>(out + i) * factor);
  }
}

/// O += P·V of some lines, 32 columns at a time, for which `values(column)` gives V.
template <int ValueDim, class State, class Values>
CHUNKATTN_INLINE void add_values(Tiles& tiles, const MatrixBlock& work, const MatrixTile& tile,
                                 const TileScratch<ValueDim>& scratch, State& state,
                                 PrefetchCursor& ahead, int burst, Values&& values) noexcept {
  const bool two_tiles = tile.count > tile_size;
  const int rest = tile.count % tile_size;  // lines of a last tile that is not full
  const int steps = (tile.seen + tile_depth - 1) / tile_depth;
  float* first = state.out + tile.begin * ValueDim;
  float* second = first + tile_size * ValueDim;
  float* const last = first + (tile.count - rest) * ValueDim;
  if (rest > 0) {  // the rows after these lines are other lines'
    std::copy_n(last, rest * ValueDim, scratch.out);
    (two_tiles ? second : first) = scratch.out;
  }
  for (int i = 0; i < ValueDim; i += tile_depth) {
    const float* const v = values(i);
    if (two_tiles)
      matrix_values<ValueDim, true>(tiles, work, steps, scratch.p, v, ahead, burst, first + i,
                                    second + i);
    else
      matrix_values<ValueDim, false>(tiles, work, steps, scratch.p, v, ahead, burst, first + i,
                                     nullptr);
  }
  if (rest > 0) std::copy_n(scratch.out, rest * ValueDim, last);
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
    work.seen = (std::max)(work.seen, visible);
    work.common = (std::min)(work.common, visible);
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
    work.nonfinite |= pack_values(block, column, work.common, work.seen, terms, ahead, burst, to);
    return to;
  };
  if (groups > 1)
    for (int i = 0; i < ValueDim; i += tile_depth) pack(i, scratch.v + i / tile_depth * slice);
  const auto values = [&](int i) {
    return groups > 1 ? scratch.v + i / tile_depth * slice : pack(i, scratch.v);
  };

  for (int l = 0; l < num_lines; l += matrix_lines) {
    const MatrixTile tile(block, state, line0 + l, (std::min)(matrix_lines, num_lines - l));
    if (tile.seen == 0) continue;
    const float* const q = state.q_transposed + tile.begin;
    const bool two_tiles = tile.count > tile_size;
    if (two_tiles)
      matrix_logits<HeadDim, true>(tiles, work, tile.seen, q, state.transposed_stride, ahead, burst,
                                   scratch.logits);
    else
      matrix_logits<HeadDim, false>(tiles, work, tile.seen, q, state.transposed_stride, ahead,
                                    burst, scratch.logits);
    if (has_nonfinite(tile, scratch.logits))
      recompute_nonfinite_logits<HeadDim>(block, tile, state.q + tile.begin * HeadDim,
                                          scratch.logits);
    matrix_softmax(block, tile, state, scratch.logits, rules);
    pack_probabilities(scratch.logits, tile.visible, two_tiles ? matrix_lines : tile_size,
                       tile.seen, terms, scratch.p);
    add_values(tiles, work, tile, scratch, state, ahead, burst, values);
    if (work.nonfinite)
      add_nonfinite_values<ValueDim>(block, tile, work.common, scratch.logits,
                                     state.out + tile.begin * ValueDim);
  }
}

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_TILE_FIRST
