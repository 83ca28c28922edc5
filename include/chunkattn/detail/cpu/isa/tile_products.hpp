// The two products of the chunk-first kernel as tile operations, two tiles of lines times two tiles
// of tokens or columns at once: four results, two left and two right tiles fill the eight
// registers. What they read stands in tile_operands.hpp.
//
// Tiles are always whole: lines and tokens that are not there are columns and rows that are
// not read, or zeros.
#ifndef CHUNKATTN_ISA_TILE_PRODUCTS
#define CHUNKATTN_ISA_TILE_PRODUCTS

#include "line_tile.hpp"
#include "pass.hpp"
#include "tile_operands.hpp"
#include "tiles.hpp"

#if defined(CHUNKATTN_PASS_TILES)
CHUNKATTN_PASS_BEGIN(TILES)

/// One block, and what its tiles are made of.
struct MatrixBlock {
  int terms;                  ///< of queries and probabilities
  int stored_terms;           ///< of K and V
  int seen = 0;               ///< tokens that some line sees
  int common = block_tokens;  ///< tokens that all of them see
  bool nonfinite = false;     ///< pack_values() left out infinities or NaN
  KeyTile keys[block_tokens / tile_size] = {};
};

/// Lines that are computed at once.
using MatrixTile = LineTile<matrix_lines>;

/// logits[token][matrix_lines] = K·Qᵀ of the first `seen` tokens.
template <int HeadDim, bool TwoTiles>
[[gnu::noinline]] void matrix_logits(Tiles& tiles, const MatrixBlock& work, int seen,
                                     const float* q, std::ptrdiff_t stride, PrefetchCursor& ahead,
                                     int burst, float* logits) noexcept {
  constexpr std::ptrdiff_t row_bytes = matrix_lines * sizeof(float);
  const std::ptrdiff_t q_bytes = stride * static_cast<std::ptrdiff_t>(sizeof(float));
  PrefetchCursor cursor = ahead;
  for (int t = 0; t < seen; t += 2 * tile_size) {
    const KeyTile& first = work.keys[t / tile_size];
    const KeyTile& second = work.keys[t / tile_size + 1];
    const bool two_keys = t + tile_size < seen;
    tiles.template zero<0>();
    tiles.template zero<1>();
    tiles.template zero<2>();
    tiles.template zero<3>();
    for (int k_term = 0; k_term < work.stored_terms; ++k_term) {
      for (int i = 0; i < HeadDim; i += tile_depth) {
        tiles.template load_once<4>(first.at + k_term * first.term_bytes + 2 * i, first.stride);
        if (two_keys)
          tiles.template load_once<5>(second.at + k_term * second.term_bytes + 2 * i,
                                      second.stride);
        for (int q_term = 0; q_term < work.terms - k_term; ++q_term) {
          const float* const query = q + (q_term * HeadDim + i) / 2 * stride;
          cursor.advance(burst);
          tiles.template load<6>(query, q_bytes);
          tiles.template dot<0, 4, 6>();
          if (two_keys) tiles.template dot<2, 5, 6>();
          if constexpr (TwoTiles) {
            tiles.template load<7>(query + tile_size, q_bytes);
            tiles.template dot<1, 4, 7>();
            if (two_keys) tiles.template dot<3, 5, 7>();
          }
        }
      }
    }
    float* const to = logits + t * matrix_lines;
    tiles.template store<0>(to, row_bytes);
    if constexpr (TwoTiles) tiles.template store<1>(to + tile_size, row_bytes);
    if (two_keys) {
      tiles.template store<2>(to + tile_size * matrix_lines, row_bytes);
      if constexpr (TwoTiles)
        tiles.template store<3>(to + tile_size * matrix_lines + tile_size, row_bytes);
    }
  }
  ahead = cursor;
}

/// 32 columns of the outputs of one or two tiles of lines, rows ValueDim floats apart: += P·V over
/// `steps` times 32 tokens.
template <int ValueDim, bool TwoTiles>
[[gnu::noinline]] void matrix_values(Tiles& tiles, const MatrixBlock& work, int steps,
                                     const float* p, const float* v, PrefetchCursor& ahead,
                                     int burst, float* first, float* second) noexcept {
  constexpr int tile = tile_size * tile_size;
  constexpr std::ptrdiff_t tile_bytes = tile_size * sizeof(float);
  constexpr std::ptrdiff_t row_bytes = ValueDim * sizeof(float);
  PrefetchCursor cursor = ahead;
  tiles.template load<0>(first, row_bytes);
  tiles.template load<1>(first + tile_size, row_bytes);
  if constexpr (TwoTiles) {
    tiles.template load<2>(second, row_bytes);
    tiles.template load<3>(second + tile_size, row_bytes);
  }
  for (int step = 0; step < steps; ++step) {
    for (int v_term = 0; v_term < work.stored_terms; ++v_term) {
      const float* const value = v + (v_term * 2 + step) * 2 * tile;
      tiles.template load<6>(value, tile_bytes);
      tiles.template load<7>(value + tile, tile_bytes);
      for (int p_term = 0; p_term < work.terms - v_term; ++p_term) {
        const float* const weight = p + (p_term * 2 + step) * 2 * tile;
        cursor.advance(burst);
        tiles.template load<4>(weight, tile_bytes);
        tiles.template dot<0, 4, 6>();
        tiles.template dot<1, 4, 7>();
        if constexpr (TwoTiles) {
          tiles.template load<5>(weight + tile, tile_bytes);
          tiles.template dot<2, 5, 6>();
          tiles.template dot<3, 5, 7>();
        }
      }
    }
  }
  tiles.template store<0>(first, row_bytes);
  tiles.template store<1>(first + tile_size, row_bytes);
  if constexpr (TwoTiles) {
    tiles.template store<2>(second, row_bytes);
    tiles.template store<3>(second + tile_size, row_bytes);
  }
  ahead = cursor;
}

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_TILE_PRODUCTS
