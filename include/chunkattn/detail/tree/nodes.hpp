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

/// A run of tokens that the same sequences have, as for_each_node() tells of it.
template <class Token>
struct NodeInfo {
  std::int32_t id = 0;              ///< of this tree, until the node is gone
  std::int32_t parent = 0;          ///< id of the node before it on the path; 0: none, it is a root
  std::int32_t position = 0;        ///< path position of the first token
  std::int32_t length = 0;          ///< tokens
  std::int32_t num_sequences = 0;   ///< live sequences that have it; 0: cached, or leaving
  bool cached = false;              ///< nobody uses it: it can be evicted
  Namespace name_space{};           ///< whose tokens these are
  std::vector<Token> first_tokens;  ///< the first of its tokens, as many as were asked for
};

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

/// Calls f(const NodeInfo&) for every node that has tokens, parents first, older siblings first.
/// Linear in the size of the tree.
///
/// \param max_tokens  how many of its tokens each node shows
template <class Tree, class F>
void for_each_node(const Tree& tree, std::int32_t max_tokens, const F& f) {
  const detail::TreeCore& core = detail::TreeAccess::core(tree);
  NodeInfo<typename Tree::token_type> info;
  detail::for_each_below_root(core, [&](NodeIndex n, int) {
    const detail::TreeNode& node = core.topology.node(n);
    const std::int32_t known = detail::known_length(core, node);
    if (known <= 0) return;  // a sequence's tail before its first token
    info.id = n;
    info.parent = node.parent;
    info.position = node.position;
    info.length = known;
    info.num_sequences = node.live;
    info.cached = node.retained;
    info.name_space = node.name_space;
    info.first_tokens.clear();
    detail::for_first_tokens(tree, node, std::min(known, std::max(max_tokens, 0)),
                             [&](const auto& token) { info.first_tokens.push_back(token); });
    f(static_cast<const NodeInfo<typename Tree::token_type>&>(info));
  });
}

CHUNKATTN_NAMESPACE_END
