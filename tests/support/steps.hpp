// Short ways to name tokens and run steps of a tree in tests, and the text of a refusal.
#pragma once

#include <cstddef>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "support/refused.hpp"

namespace test {

inline constexpr std::size_t no_limit = std::numeric_limits<std::size_t>::max();

/// n tokens, counting up from `first`.
inline std::vector<int> iota(int first, std::size_t n) {
  std::vector<int> tokens(n);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

/// All that the sequence may load is loaded, as if it came from elsewhere.
template <class Sequence>
void load(Sequence& sequence) {
  for (auto range = sequence.loadable(); !range.empty(); range = sequence.loadable())
    sequence.mark_loaded(range);
}

/// Runs one step over those sequences of `batch` that have something to compute, and says that it
/// has finished.
template <class Tree, class Batch>
typename Tree::Finished run_step(Tree& tree, chunkattn::AttentionPlan& plan, Batch& batch,
                                 std::size_t max_tokens = no_limit) {
  auto step = tree.begin_step();
  for (auto& sequence : batch) static_cast<void>(step.add(sequence, max_tokens));
  static_cast<void>(plan.build(step));
  return std::move(step).finish();
}

/// The same; every output is token_of(row).
template <class Tree, class Batch, class TokenOf>
void decode(Tree& tree, chunkattn::AttentionPlan& plan, Batch& batch, const TokenOf& token_of) {
  auto done = run_step(tree, plan, batch);
  for (const auto row : done.rows()) done.commit(row, token_of(row));
}

}  // namespace test
