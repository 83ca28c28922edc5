// EvictedPaths: follows what a tree evicts, by the hashes of paths, and puts it on record.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/tree/core.hpp"
#include "../../detail/tree/node_observer.hpp"
#include "../../tree_options.hpp"
#include "eviction_record.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// The hash of a path, token by token. One step can be taken back, so that a path that loses its
/// last tokens need not be hashed again from its start. Where a namespace begins its fields are
/// mixed in with a secret: nobody can find two paths of different namespaces with one hash.
class PathHash {
 public:
  explicit PathHash(std::uint64_t secret) : secret_(secret) {}

  /// The path goes on in this namespace, or begins in it.
  [[nodiscard]] std::uint64_t enter(std::uint64_t path, const Namespace& space) const noexcept {
    std::uint64_t hash = scramble(path ^ secret_);
    hash = scramble(hash ^ space.tenant);
    return scramble((hash ^ space.adapter) + (space.is_public ? 2 : 1) * secret_);
  }
  /// The path has one token more, whose hash is `token`.
  [[nodiscard]] static std::uint64_t add(std::uint64_t path, std::uint64_t token) noexcept {
    path = (path ^ token) * factor;
    return path ^ (path >> 32);
  }
  /// The path before its last token.
  [[nodiscard]] static std::uint64_t take_back(std::uint64_t path, std::uint64_t token) noexcept {
    path ^= path >> 32;
    return path * inverse ^ token;
  }
  /// What Tokens::hash() of one token starts from.
  static constexpr std::uint64_t token_seed = 0x2545f4914f6cdd1du;

 private:
  static constexpr std::uint64_t factor = 0x9e3779b97f4a7c15u;
  static constexpr std::uint64_t inverse = 0xf1de83e19937733du;
  static_assert(factor * inverse == 1);

  [[nodiscard]] static std::uint64_t scramble(std::uint64_t x) noexcept {
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdu;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53u;
    return x ^ (x >> 33);
  }

  std::uint64_t secret_;
};

/// Observes a tree from now on, until its owner removes it. Records whole units of sharing, of each
/// path the last ones first: a path's beginning is known at least as long as its end.
class EvictedPaths final : public NodeObserver {
 public:
  /// \param capacity  units that the record has
  EvictedPaths(TreeCore& core, std::size_t capacity, std::uint64_t secret)
      : hash(secret), record_(capacity), core_(core) {
    reserve(core.topology.capacity());
    core.topology.observers.add(*this);
  }
  EvictedPaths(const EvictedPaths&) = delete;
  EvictedPaths& operator=(const EvictedPaths&) = delete;

  const PathHash hash;
  [[nodiscard]] const EvictionRecord& record() const noexcept { return record_; }

  void reserve(std::size_t num_nodes) override {
    ends_.resize((std::max)(num_nodes, ends_.size()));
    unknown_.reserve(num_nodes);
  }
  void on_split(NodeIndex lower, NodeIndex upper) noexcept override {
    PathEnd& all = ends_[to_size(lower)];
    ends_[to_size(upper)] = {0, unknown, all.is_recorded};
    if (all.length == node(lower).length + node(upper).length) all.length = node(lower).length;
  }
  void on_release(NodeIndex index, std::int32_t keep) noexcept override {
    const TreeNode& n = node(index);
    PathEnd& known = ends_[to_size(index)];
    if (known.is_recorded) {
      if (keep == 0) known = {};
    } else if (n.state == NodeState::published) {
      record(index, keep, n.active() ? EvictionCause::not_retained : core_.retention.cause());
    }
  }
  void on_merge(NodeIndex, NodeIndex) noexcept override {}  // the duplicate was private
  /// All that prompts can find, children first.
  void on_clear() noexcept override {
    for (NodeIndex i = first_leaf(root_node); i != root_node;) {
      const TreeNode& n = node(i);
      if (n.state == NodeState::published) {
        record(i, 0, EvictionCause::clear);
        ends_[to_size(i)] = {0, unknown, true};
      }
      i = n.next_sibling != none ? first_leaf(n.next_sibling) : n.parent;
    }
  }
  [[nodiscard]] bool is_consistent() const override {
    for (std::size_t i = 1; i < core_.topology.num_indices(); ++i) {
      const auto index = static_cast<NodeIndex>(i);
      const TreeNode& n = node(index);
      if (n.state != NodeState::published) continue;
      if (ends_[i].is_recorded) return false;
      if (ends_[i].length == n.length && ends_[i].hash != hashed(index)) return false;
    }
    return true;
  }

 private:
  static constexpr std::int32_t unknown = -1;
  /// The path's hash after the first `length` tokens of a node.
  struct PathEnd {
    std::uint64_t hash = 0;
    std::int32_t length = unknown;
    bool is_recorded = false;  ///< by clear(): it may still be there
  };

  [[nodiscard]] const TreeNode& node(NodeIndex n) const noexcept { return core_.topology.node(n); }
  [[nodiscard]] NodeIndex first_leaf(NodeIndex n) const noexcept {
    while (node(n).first_child != none) n = node(n).first_child;
    return n;
  }

  /// The hash of a token of a node.
  [[nodiscard]] std::uint64_t token_hash(const TreeNode& n, std::int32_t i) const noexcept {
    const std::int32_t slot = n.begin + i;
    return core_.prefixes.tokens().hash(PathHash::token_seed, core_.topology.chunk_of(n, slot),
                                        core_.topology.geometry.offset(slot), 1);
  }
  /// The hash of the path to the end of a node, from that of the path before it.
  [[nodiscard]] std::uint64_t hash_after(NodeIndex index, std::uint64_t before) const noexcept {
    const TreeNode& n = node(index);
    if (n.parent == root_node || node(n.parent).name_space != n.name_space)
      before = hash.enter(before, n.name_space);
    core_.topology.for_each_run(n, 0, n.length, [&](ChunkIndex chunk, auto offset, auto run, auto) {
      for (std::int32_t i = 0; i < run; ++i)
        before = PathHash::add(
            before, core_.prefixes.tokens().hash(PathHash::token_seed, chunk, offset + i, 1));
    });
    return before;
  }
  /// The same for tests, of the whole path.
  [[nodiscard]] std::uint64_t hashed(NodeIndex n) const noexcept {
    return n == root_node ? 0 : hash_after(n, hashed(node(n).parent));
  }
  /// The hash of the path to the end of a node, which is known afterwards, as all above it are.
  std::uint64_t end_hash(NodeIndex last) noexcept {
    unknown_.clear();
    for (; last != root_node && ends_[to_size(last)].length != node(last).length;
         last = node(last).parent)
      unknown_.push_back(last);
    std::uint64_t path = last == root_node ? 0 : ends_[to_size(last)].hash;
    for (; !unknown_.empty(); unknown_.pop_back()) {
      const NodeIndex n = unknown_.back();
      path = hash_after(n, path);
      ends_[to_size(n)] = {path, node(n).length};
    }
    return path;
  }
  /// The tokens of a node after the first `keep` go. Those that are written could be found.
  void record(NodeIndex index, std::int32_t keep, EvictionCause cause) noexcept {
    const TreeNode& n = node(index);
    if (n.written <= keep) return;
    const std::int32_t unit = core_.prefixes.unit();
    std::uint64_t path = end_hash(index);
    for (std::int32_t i = n.length; i > keep; --i) {
      if (i <= n.written && i % unit == 0) record_.add(path, n.name_space, cause);
      path = PathHash::take_back(path, token_hash(n, i - 1));
    }
    ends_[to_size(index)] = {path, keep};
  }

  EvictionRecord record_;
  TreeCore& core_;
  Array<PathEnd> ends_;       // of each node
  Array<NodeIndex> unknown_;  // on the way up
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
