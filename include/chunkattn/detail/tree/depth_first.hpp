// The nodes of a tree in depth-first order, for what reads all of it.
#pragma once

#include "../support/array.hpp"
#include "../support/config.hpp"
#include "core.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

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
