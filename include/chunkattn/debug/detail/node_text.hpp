// NodeText: what the pictures of a tree say of a node.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "../../detail/support/config.hpp"
#include "../../detail/tree/core.hpp"
#include "../../plan_view.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Tokens of a node that are known; after them lie slots that steps have reserved.
inline std::int32_t known_length(const TreeCore& core, const TreeNode& node) {
  if (node.tail_of == none) return node.length;
  const SequenceRecord& sequence = core.sequences[node.tail_of];
  return sequence.state == SequenceState::live
             ? (std::min)(node.length, sequence.size - node.position)
             : node.length;
}

/// Calls f(token) for the first `count` tokens of a node, `count` at most known_length().
template <class Tree, class F>
void for_first_tokens(const Tree& tree, const TreeNode& node, std::int32_t count, const F& f) {
  TreeAccess::core(tree).topology.for_each_run(
      node, 0, count, [&](ChunkIndex chunk, std::int32_t offset, std::int32_t run, std::int32_t) {
        for (std::int32_t i = 0; i < run; ++i)
          f(TreeAccess::tree(tree).token_at(chunk, offset + i));
      });
}

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
  const std::int32_t shown = (std::max)(0, (std::min)(known, max_tokens));
  for_first_tokens(tree, n, shown, [&](const auto& token) {
    if (!text.tokens.empty()) text.tokens += ' ';
    text.tokens += token_text(token);
  });
  if (known > shown) text.tokens += shown > 0 ? " ..." : "...";
  if (n.length > known) text.tokens += " +" + std::to_string(n.length - known) + " reserved";
  std::int32_t count = 0;
  core.topology.for_each_run(
      n, 0, n.length, [&](ChunkIndex chunk, std::int32_t offset, std::int32_t run, std::int32_t) {
        if (++count > 3) return;
        if (count > 1) text.where += ' ';
        text.where += std::to_string(chunk) + "[" + std::to_string(offset) + ":" +
                      std::to_string(offset + run) + "]";
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

CHUNKATTN_NAMESPACE_END
