// ScoredPolicy: eviction by a function of your own.
#pragma once

#include "../detail/support/config.hpp"
#include "../tree_options.hpp"
#include "cached_leaf.hpp"
#include "detail/score_order.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// A retention policy whose victims you choose. Derive from it and say what a cached leaf is worth;
/// the leaf of the lowest score goes first, in O(log n):
///
///     struct LeastOftenUsed : ScoredPolicy {
///       std::pair<std::uint64_t, std::uint64_t> score(const CachedLeaf& leaf) const noexcept {
///         return {leaf.uses, leaf.last_use};
///       }
///     };
///     PrefixTree<int, 64, PoolAllocator, LeastOftenUsed> tree;
///
/// score() is noexcept, returns anything that < orders totally (a number, a pair, a tuple), and is
/// asked when tokens become such a leaf, or a shorter one: while they are one the answer stays. Of
/// equal scores, what became a leaf first goes first. It must not call the tree. Leaves go from
/// their ends, a chunk at a time; pinned ones when nothing else is cached. Of the options,
/// `by_priority` has no effect, and `learns` and `fair` are refused.
struct ScoredPolicy : RetentionOptions {
  /// CachedLeaf::priority is the highest of those that had the tokens.
  [[nodiscard]] constexpr int level(int priority) const noexcept { return priority; }

  using Hooks = detail::ScoreHooks;  ///< what a tree calls
};

CHUNKATTN_NAMESPACE_END
