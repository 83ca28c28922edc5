// The chunk-first kernel through dot products of words: the same two products and softmax as
// chunk_first.hpp, over the same state. A tile of lines goes through the whole block before the
// next one. A *unit* (dot_products.hpp) gives the operands:
//
//   repair_logits()        computes in fp32 what its products do not give, for its line alone
//   top()                  where the softmax leaves the bits of each line's largest probability
//   pack_values()          V as words, once per block
//   pack_probabilities()   P as words
//   repair_values()        adds to the outputs what its products leave out, to the lines that see
//   it
//
// So lines that do not see a token keep their bits, whatever it holds.
#ifndef CHUNKATTN_ISA_DOT_FIRST
#define CHUNKATTN_ISA_DOT_FIRST

#include "chunk_first.hpp"
#include "dot_products.hpp"
#include "dot_softmax.hpp"
#include "line_state.hpp"
#include "line_tile.hpp"
#include "pass.hpp"
#include "simd.hpp"

#if defined(CHUNKATTN_PASS_DOTS)
CHUNKATTN_PASS_BEGIN(DOTS)

/// One block for lines [line0, line0 + num_lines), whose queries the unit has packed.
template <class Unit, class State, class Rules>
[[gnu::noinline]] void dot_first_block(Unit&& unit, const Block<typename Unit::Element>& block,
                                       int line0, int num_lines, State& state,
                                       PrefetchCursor& ahead, Rules rules) noexcept {
  const int seen = seen_tokens(block, state, line0, num_lines, nullptr);
  if (seen == 0) return;
  DotOperands<Unit> operands(block, state);
  bool has_values = false;  // packed: where they are needed, since K is read before
  const int burst = burst_of(ahead.left, num_lines / tile_lines * dot_steps<Unit>(tile_lines) +
                                             dot_steps<Unit>(num_lines % tile_lines));
  for (int l = 0; l < num_lines; l += tile_lines) {
    const LineTile<tile_lines> tile(block, state, line0 + l, (std::min)(tile_lines, num_lines - l));
    if (tile.seen == 0) continue;
    const bool broken = tile.count > simd::native_width
                            ? dot_logits<2>(unit, operands, tile, ahead, burst)
                            : dot_logits<1>(unit, operands, tile, ahead, burst);
    unit.repair_logits(operands, tile, broken);
    softmax_of_tile(block, tile, operands.logits, state, unit.top(), rules);
    if (!has_values) unit.pack_values(block, seen, operands.v);
    has_values = true;
    unit.pack_probabilities(operands.logits, tile, operands.p);
    float* const out = state.out + tile.begin * Unit::value_dim;
    if (unit.terms == 1)
      dot_columns<1>(unit, operands, tile, ahead, burst, out);
    else if constexpr (Unit::max_terms == 2)
      dot_columns<2>(unit, operands, tile, ahead, burst, out);
    unit.repair_values(operands, tile, out);
  }
}

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_DOT_FIRST
