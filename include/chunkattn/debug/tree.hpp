// A tree from within: its nodes, for programs that show what is shared; pictures, for people; its
// invariants, for tests. Each call is linear in the size of the tree.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../detail/support/config.hpp"
#include "../detail/tree/core.hpp"
#include "../detail/tree/depth_first.hpp"
#include "../tree_options.hpp"
#include "detail/node_text.hpp"
#include "detail/tree_inspector.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Checks every invariant of a PrefixTree by counting again; throws an Error that names the first
/// one that is broken.
template <class Tree>
void check_invariants(const Tree& tree) {
  detail::TreeInspector(detail::TreeAccess::core(tree)).check();
}

/// A node of a tree: consecutive tokens that the same sequences have.
template <class Token>
struct NodeInfo {
  std::int32_t id = 0;              ///< of this tree, until the node is gone
  std::int32_t parent = 0;          ///< id of the node before it on the path; 0: none, it is a root
  std::int32_t position = 0;        ///< path position of the first token
  std::int32_t length = 0;          ///< tokens
  std::int32_t num_sequences = 0;   ///< live sequences that have it; 0: cached, or leaving
  bool cached = false;              ///< used by no sequence: it can be evicted
  Namespace name_space{};           ///< whose tokens these are
  std::vector<Token> first_tokens;  ///< the first of its tokens, as many as were asked for
};

/// Calls f(const NodeInfo<Token>&) for every node of a PrefixTree that has tokens, parents first,
/// older siblings first.
///
/// \param max_tokens  how many of its tokens each node shows
template <class Tree, class F>
void for_each_node(const Tree& tree, std::int32_t max_tokens, const F& f) {
  const detail::TreeCore& core = detail::TreeAccess::core(tree);
  NodeInfo<typename Tree::token_type> info;
  detail::for_each_below_root(core, [&](detail::NodeIndex n, int) {
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
    detail::for_first_tokens(tree, node, (std::min)(known, (std::max)(max_tokens, 0)),
                             [&](const auto& token) { info.first_tokens.push_back(token); });
    f(std::as_const(info));
  });
}

/// The tree as indented text, a line for each node: path positions, chunks as index[begin:end], the
/// number of sequences that use it, and its first `max_tokens` tokens as `token_text(token)` writes
/// them (integers as numbers).
template <class Tree, class TokenText>
[[nodiscard]] std::string to_text(const Tree& tree, std::int32_t max_tokens,
                                  const TokenText& token_text) {
  const detail::TreeCore& core = detail::TreeAccess::core(tree);
  const TreeStats stats = tree.stats();
  std::string out = std::to_string(stats.live_sequences) + " sequences, " +
                    std::to_string(stats.nodes - 1) + " nodes, " +
                    std::to_string(stats.used_chunks) + " chunks (" +
                    std::to_string(stats.retained_chunks) + " cached)\n";
  detail::for_each_below_root(core, [&](detail::NodeIndex n, int depth) {
    const detail::NodeText text = detail::describe(tree, n, max_tokens, token_text);
    out.append(static_cast<std::size_t>(2 * depth), ' ');
    out += "- " + text.range + "  " + text.where + "  (" + text.state + ")";
    if (!text.tokens.empty()) out += "  " + text.tokens;
    out += '\n';
  });
  return out;
}

/// The tree as indented text, with tokens that are integers as numbers, others as `?`.
template <class Tree>
[[nodiscard]] std::string to_text(const Tree& tree, std::int32_t max_tokens = 8) {
  return to_text(tree, max_tokens, detail::DefaultTokenText{});
}

/// The tree as a Graphviz graph (`dot -Tsvg`), with the text of to_text() in each node: cached
/// nodes are dashed, private tails rounded.
template <class Tree, class TokenText>
[[nodiscard]] std::string to_dot(const Tree& tree, std::int32_t max_tokens,
                                 const TokenText& token_text) {
  const detail::TreeCore& core = detail::TreeAccess::core(tree);
  std::string out =
      "digraph prefix_tree {\n  rankdir=LR;\n  node [shape=box, fontname=monospace];\n"
      "  n0 [label=root, shape=point];\n";
  detail::for_each_below_root(core, [&](detail::NodeIndex n, int) {
    const detail::NodeText text = detail::describe(tree, n, max_tokens, token_text);
    const std::string name = "n" + std::to_string(n);
    out += "  " + name + " [label=\"" + text.range + "\\n" + detail::quoted_for_dot(text.where) +
           "\\n" + detail::quoted_for_dot(text.state);
    if (!text.tokens.empty()) out += "\\n" + detail::quoted_for_dot(text.tokens);
    out += '"';
    if (core.topology.node(n).retained) out += ", style=dashed";
    if (core.topology.node(n).tail_of != detail::none) out += ", style=rounded";
    out += "];\n  n" + std::to_string(core.topology.node(n).parent) + " -> " + name + ";\n";
  });
  return out + "}\n";
}

/// The tree as a Graphviz graph, with tokens as in to_text().
template <class Tree>
[[nodiscard]] std::string to_dot(const Tree& tree, std::int32_t max_tokens = 8) {
  return to_dot(tree, max_tokens, detail::DefaultTokenText{});
}

CHUNKATTN_NAMESPACE_END
