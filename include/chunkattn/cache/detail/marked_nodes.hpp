// MarkedNodes: the nodes of a tree that have something, and all above them, so that a walk down
// passes no others.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/tree/topology.hpp"
#include "../../plan_view.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Each marked node is in the list of its parent's. The root is always marked.
class MarkedNodes {
 public:
  explicit MarkedNodes(const Topology& topology) : topology_(topology) {}

  /// Nodes are below `num_nodes` from now on.
  void reserve(std::size_t num_nodes) {
    if (links_.size() < num_nodes) links_.resize(num_nodes);
  }
  [[nodiscard]] bool has(NodeIndex n) const noexcept {
    return n == root_node || links(n).is_linked;
  }
  [[nodiscard]] NodeIndex first_child(NodeIndex n) const noexcept { return links(n).first; }
  [[nodiscard]] NodeIndex next_sibling(NodeIndex n) const noexcept { return links(n).next; }

  /// Marks a node, and those above it.
  void mark(NodeIndex n) noexcept {
    for (; !has(n); n = topology_.node(n).parent) link(n, topology_.node(n).parent);
  }
  /// Unmarks it alone, whose parent is or was this one.
  void unmark(NodeIndex n, NodeIndex parent) noexcept {
    const Links& l = links(n);
    (l.prev != none ? links(l.prev).next : links(parent).first) = l.next;
    if (l.next != none) links(l.next).prev = l.prev;
    links(n).is_linked = false;
  }
  /// The marked node after `n` in depth-first order of those below `top`, parents first, or none.
  [[nodiscard]] NodeIndex next_below(NodeIndex n, NodeIndex top) const noexcept {
    NodeIndex next = first_child(n);
    for (; next == none && n != top; n = topology_.node(n).parent) next = next_sibling(n);
    return next;
  }

 private:
  struct Links {
    NodeIndex first = none;  ///< of its children
    NodeIndex next = none, prev = none;
    bool is_linked = false;
  };

  [[nodiscard]] Links& links(NodeIndex n) noexcept { return links_[to_size(n)]; }
  [[nodiscard]] const Links& links(NodeIndex n) const noexcept { return links_[to_size(n)]; }
  void link(NodeIndex n, NodeIndex parent) noexcept {
    const NodeIndex next = links(parent).first;
    links(n).next = next;
    links(n).prev = none;
    links(n).is_linked = true;
    if (next != none) links(next).prev = n;
    links(parent).first = n;
  }

  const Topology& topology_;
  Array<Links> links_;  // by node
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
