// The nodes of the tree that are on the paths of a step's rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "../support/array.hpp"
#include "../support/config.hpp"
#include "../tree/step_reader.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// The part of the prefix tree on which a step's rows are. Keeps its memory.
class StepNodes {
 public:
  struct Node {
    std::uint64_t mark = 0;
    std::int32_t first_child = none, last_child = none, next_sibling = none;
    std::int32_t entry = none;  // of the step, if this is its sequence's tail
  };

  /// Marks the nodes on the rows' paths and links them to their marked children, in the order of
  /// the first row below.
  void link(const StepReader& step) {
    ++mark_;
    const auto touch = [&](NodeIndex n) -> Node& {
      if (nodes_.size() <= to_size(n)) nodes_.resize(2 * to_size(n) + 64);
      Node& node = nodes_[to_size(n)];
      if (node.mark != mark_) {
        node = Node{};
        node.mark = mark_;
      }
      return node;
    };
    touch(root_node);
    const std::span<const StepEntry> entries = step.entries();
    for (std::size_t e = 0; e < entries.size(); ++e) {
      NodeIndex child = step.tail_of(entries[e]);
      touch(child).entry = static_cast<std::int32_t>(e);
      while (child != root_node) {
        const NodeIndex parent = step.node(child).parent;
        const bool known = to_size(parent) < nodes_.size() && nodes_[to_size(parent)].mark == mark_;
        Node& node = touch(parent);
        if (node.first_child == none)
          node.first_child = child;
        else
          nodes_[to_size(node.last_child)].next_sibling = child;
        node.last_child = child;
        if (known) break;
        child = parent;
      }
    }
  }

  /// A node that the last link() marked.
  [[nodiscard]] const Node& operator[](NodeIndex n) const noexcept { return nodes_[to_size(n)]; }

 private:
  std::uint64_t mark_ = 0;
  Array<Node> nodes_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
