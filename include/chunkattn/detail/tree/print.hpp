// Pictures of a prefix tree for people: an indented text and a Graphviz graph.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "../../plan_view.hpp"
#include "../base/config.hpp"
#include "core.hpp"
#include "nodes.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

struct DefaultTokenText {
  template <class Token>
  std::string operator()(const Token& token) const {
    if constexpr (std::is_integral_v<Token>)
      return std::to_string(token);
    else
      return "?";
  }
};

/// What both pictures say of a node.
struct NodeText {
  std::string range, tokens, where, state;
};

template <class Tree, class TokenText>
NodeText describe(const Tree& tree, NodeIndex index, std::int32_t max_tokens,
                  const TokenText& token_text) {
  const TreeCore& core = TreeAccess::core(tree);
  const TreeNode& n = core.topology.node(index);
  NodeText text;
  text.range = std::to_string(n.position) + ".." + std::to_string(n.end());
  const std::int32_t known = known_length(core, n);
  const std::int32_t shown = std::max(0, std::min(known, max_tokens));
  for_first_tokens(tree, n, shown, [&](const auto& token) {
    if (!text.tokens.empty()) text.tokens += ' ';
    text.tokens += token_text(token);
  });
  if (known > shown) text.tokens += shown > 0 ? " ..." : "...";
  if (n.length > known) text.tokens += " +" + std::to_string(n.length - known) + " reserved";
  std::int32_t count = 0;
  core.topology.for_each_run(
      n, 0, n.length, [&](SlotIndex slot, std::int32_t offset, std::int32_t run, std::int32_t) {
        if (++count > 3) return false;
        if (count > 1) text.where += ' ';
        text.where += std::to_string(slot) + "[" + std::to_string(offset) + ":" +
                      std::to_string(offset + run) + "]";
        return true;
      });
  if (count > 3) text.where += " ...";
  if (n.retained)
    text.state = "cached";
  else if (n.live == 0)
    text.state = "leaving";
  else
    text.state = std::to_string(n.live) + (n.live == 1 ? " sequence" : " sequences");
  if (n.written < n.length) text.state += ", " + std::to_string(n.written) + " written";
  if (n.pins > 0) text.state += ", pinned";
  if (n.tail_of != none) text.state += ", tail of #" + std::to_string(n.tail_of);
  if (n.name_space.is_public) text.state += ", public";
  if (n.name_space.tenant != 0) text.state += ", tenant " + std::to_string(n.name_space.tenant);
  if (n.name_space.adapter != 0) text.state += ", adapter " + std::to_string(n.name_space.adapter);
  return text;
}

inline std::string quoted_for_dot(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (c == '\n')
      out += "\\n";
    else
      out += c;
  }
  return out;
}

}  // namespace detail

/// The tree as indented text, one line per node: path positions, slots as slot[begin:end], who uses
/// it, and its first `max_tokens` tokens as `token_text(token)` writes them (integers as numbers).
/// Linear in the size of the tree.
template <class Tree, class TokenText = detail::DefaultTokenText>
[[nodiscard]] std::string to_text(const Tree& tree, std::int32_t max_tokens = 8,
                                  const TokenText& token_text = {}) {
  const detail::TreeCore& core = detail::TreeAccess::core(tree);
  const TreeStats stats = tree.stats();
  std::string out = std::to_string(stats.live_sequences) + " sequences, " +
                    std::to_string(stats.nodes - 1) + " nodes, " +
                    std::to_string(stats.used_slots) + " slots (" +
                    std::to_string(stats.retained_slots) + " cached)\n";
  detail::for_each_below_root(core, [&](NodeIndex n, int depth) {
    const detail::NodeText text = detail::describe(tree, n, max_tokens, token_text);
    out.append(static_cast<std::size_t>(2 * depth), ' ');
    out += "- " + text.range + "  " + text.where + "  (" + text.state + ")";
    if (!text.tokens.empty()) out += "  " + text.tokens;
    out += '\n';
  });
  return out;
}

/// The tree as a Graphviz graph (`dot -Tsvg`): cached nodes dashed, private tails rounded.
template <class Tree, class TokenText = detail::DefaultTokenText>
[[nodiscard]] std::string to_dot(const Tree& tree, std::int32_t max_tokens = 8,
                                 const TokenText& token_text = {}) {
  const detail::TreeCore& core = detail::TreeAccess::core(tree);
  std::string out =
      "digraph prefix_tree {\n  rankdir=LR;\n  node [shape=box, fontname=monospace];\n"
      "  n0 [label=root, shape=point];\n";
  detail::for_each_below_root(core, [&](NodeIndex n, int) {
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

CHUNKATTN_NAMESPACE_END
