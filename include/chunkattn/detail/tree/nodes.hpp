// The nodes of a prefix tree, for programs that show or record what is shared.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../../tree_options.hpp"
#include "../base/array.hpp"
#include "../base/config.hpp"
#include "core.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Tokens of a node that are known; behind them lie places that steps have reserved.
inline std::int32_t known_length(const TreeCore& core, const TreeNode& node) {
  if (node.tail_of == none) return node.length;
  const SequenceRecord& sequence = core.sequences[node.tail_of];
  return sequence.state == SequenceState::live
             ? std::min(node.length, sequence.size - node.position)
             : node.length;
}

/// Calls f(token) for the first `count` tokens of a node, `count` at most known_length().
template <class Tree, class F>
void for_first_tokens(const Tree& tree, const TreeNode& node, std::int32_t count, const F& f) {
  TreeAccess::core(tree).topology.for_each_run(
      node, 0, count, [&](SlotIndex slot, std::int32_t offset, std::int32_t run, std::int32_t) {
        for (std::int32_t i = 0; i < run; ++i) f(TreeAccess::token_at(tree, slot, offset + i));
        return true;
      });
}

/// Calls f(node, depth) for every node below the root, parents first, older siblings first.
template <class F>
void for_each_below_root(const TreeCore& core, const F& f) {
  struct Visit {
    NodeIndex node;
    int depth;
  };
  Array<Visit> stack;
  const auto push_children = [&](NodeIndex n, int depth) {
    // The youngest child is linked first, so the oldest comes to lie on top of the stack.
    for (NodeIndex c = core.topology.node(n).first_child; c != none;
         c = core.topology.node(c).next_sibling)
      stack.push_back({c, depth});
  };
  push_children(root_node, 0);
  while (!stack.empty()) {
    const auto [n, depth] = stack.back();
    stack.pop_back();
    f(n, depth);
    push_children(n, depth + 1);
  }
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END
