// Prefixes: the paths that prompts can find. A key (parent, namespace, first tokens) leads to the
// node that continues a path with it, by one hash table for the whole tree.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../../tree_options.hpp"
#include "../support/array.hpp"
#include "../support/config.hpp"
#include "chunk_table.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// The first `length` tokens of a prompt, which end in node `last`.
struct PathMatch {
  NodeIndex last = root_node;  ///< deepest node reached
  std::int32_t used = 0;       ///< tokens of it that matched
  std::int32_t length = 0;     ///< tokens matched in all
};

inline std::uint64_t mix_hash(std::uint64_t hash, std::uint64_t value) noexcept {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

/// Open-addressing table of published nodes by the hash of (parent, namespace, key tokens). A hash
/// only proposes a node; the caller compares.
class ChildIndex {
 public:
  [[nodiscard]] bool has_room(std::size_t count) const noexcept {
    return 2 * count + 2 <= table_.size();
  }

  /// Makes room for `count` entries in all; inserting them then cannot fail.
  void reserve(std::size_t count) {
    if (has_room(count)) return;
    const std::size_t wanted = 2 * count + 2;
    std::size_t capacity = table_.empty() ? 64 : table_.size();
    while (capacity < wanted) capacity *= 2;
    Array<Entry> grown(capacity);
    table_.swap(grown);
    for (const Entry& entry : grown)
      if (entry.node != none) insert(entry.hash, entry.node);
  }

  void insert(std::uint32_t hash, NodeIndex node) noexcept {
    const std::size_t mask = table_.size() - 1;
    std::size_t i = hash & mask;
    while (table_[i].node != none) i = (i + 1) & mask;
    table_[i] = {hash, node};
  }

  void erase(std::uint32_t hash, NodeIndex node) noexcept {
    const std::size_t mask = table_.size() - 1;
    std::size_t hole = hash & mask;
    while (table_[hole].node != node) hole = (hole + 1) & mask;
    // Shift later entries of the probe run back, so that no tombstones are needed.
    for (std::size_t i = (hole + 1) & mask; table_[i].node != none; i = (i + 1) & mask) {
      const std::size_t home = table_[i].hash & mask;
      if (((i - home) & mask) >= ((i - hole) & mask)) {
        table_[hole] = table_[i];
        hole = i;
      }
    }
    table_[hole] = {};
  }

  /// The first node with this hash that `same(node)` confirms, or none.
  template <class Same>
  [[nodiscard]] NodeIndex find(std::uint32_t hash, const Same& same) const {
    if (table_.empty()) return none;
    const std::size_t mask = table_.size() - 1;
    for (std::size_t i = hash & mask; table_[i].node != none; i = (i + 1) & mask)
      if (table_[i].hash == hash && same(table_[i].node)) return table_[i].node;
    return none;
  }

  /// For tests: the number of entries, counted.
  [[nodiscard]] std::size_t count() const noexcept {
    return to_size(std::count_if(table_.begin(), table_.end(),
                                 [](const Entry& entry) { return entry.node != none; }));
  }
  /// Asks early for what erasing an entry with this hash writes.
  void prefetch(std::uint32_t hash) const noexcept {
    CHUNKATTN_PREFETCH_WRITE(&table_[hash & (table_.size() - 1)]);
  }

 private:
  struct Entry {
    std::uint32_t hash = 0;
    NodeIndex node = none;
  };

  Array<Entry> table_;  // power of two, at most half full
};

/// Finds published nodes, publishes and hides them.
class Prefixes {
 public:
  Prefixes(Topology& topology, const ChunkTable& chunk_table, const Tokens& tokens, Sharing sharing)
      : topology_(topology),
        chunks_(chunk_table),
        tokens_(tokens),
        unit_(sharing == Sharing::token ? 1 : topology.geometry.size) {}

  [[nodiscard]] const Tokens& tokens() const noexcept { return tokens_; }
  /// Tokens that are shared or not as one: what a child is keyed by.
  [[nodiscard]] std::int32_t unit() const noexcept { return unit_; }

  // ---- finding and publishing ----------------------------------------------------------------

  /// What the hash of a key starts from.
  [[nodiscard]] static std::uint64_t hash_seed(NodeIndex parent, const Namespace& space) noexcept {
    const std::uint64_t hash = mix_hash(static_cast<std::uint32_t>(parent), space.tenant);
    return mix_hash(hash + (space.is_public ? 2 : 1), space.adapter);
  }
  [[nodiscard]] static std::uint32_t finish_hash(std::uint64_t hash) noexcept {
    return static_cast<std::uint32_t>(hash >> 32);
  }
  /// Published child of `parent` in this namespace whose key `same_key(node)` confirms.
  template <class SameKey>
  [[nodiscard]] NodeIndex find_child(NodeIndex parent, const Namespace& space, std::uint32_t hash,
                                     const SameKey& same_key) const {
    return index_.find(hash, [&](NodeIndex n) {
      const TreeNode& c = topology_.node(n);
      return c.parent == parent && c.name_space == space && same_key(c);
    });
  }
  /// The published child of n's parent that has n's key, or none.
  [[nodiscard]] NodeIndex find_equal(const TreeNode& n) const {
    return find_child(n.parent, n.name_space, key_hash(n), [&](const TreeNode& c) {
      return tokens_.common(c.first_chunk, c.begin, n.first_chunk, n.begin, unit_) == unit_;
    });
  }

  void publish(NodeIndex n) noexcept {
    TreeNode& record = topology_.node(n);
    record.state = NodeState::published;
    record.hash = key_hash(record);
    index_.insert(record.hash, n);
    ++num_publications_;
  }
  void unpublish(NodeIndex n, NodeState state) noexcept {
    index_.erase(topology_.node(n).hash, n);
    topology_.node(n).state = state;
  }
  /// Asks early for what unpublish() writes.
  void prefetch(const TreeNode& n) const noexcept { index_.prefetch(n.hash); }
  /// For tests: nodes that are found, counted.
  [[nodiscard]] std::size_t num_published() const noexcept { return index_.count(); }
  /// Changes whenever a match may have become longer.
  [[nodiscard]] std::uint64_t num_publications() const noexcept { return num_publications_; }

  /// Leading tokens of two nodes that are equal, at most `count`.
  [[nodiscard]] std::int32_t common_length(const TreeNode& n, const TreeNode& other,
                                           std::int32_t count) const noexcept {
    std::int32_t common = 0;
    topology_.for_each_common_run(
        n, other, (std::min)(count, n.length),
        [&](ChunkIndex a, auto at_a, ChunkIndex b, auto at_b, std::int32_t run, auto done) {
          if (common == done) common += tokens_.common(a, at_a, b, at_b, run);
        });
    return common;
  }

  // ---- nodes ---------------------------------------------------------------------------------

  /// Makes room for `count` new nodes, so that adding, splitting and publishing cannot fail.
  void reserve_nodes(std::size_t count) {
    index_.reserve(topology_.num_nodes() + count);
    topology_.reserve(count);
  }
  /// True if `count` nodes can be made without allocating.
  [[nodiscard]] bool has_nodes(std::size_t count) const noexcept {
    return topology_.has_room(count) && index_.has_room(topology_.num_nodes() + count);
  }

  /// Topology::split(); both halves keep their place in the index. See Retention::split().
  NodeIndex split(NodeIndex lower_index, std::int32_t keep) noexcept {
    const bool published = topology_.node(lower_index).state == NodeState::published;
    if (published) index_.erase(topology_.node(lower_index).hash, lower_index);
    const NodeIndex upper_index = topology_.split(lower_index, keep);
    TreeNode& lower = topology_.node(lower_index);
    if (published) {
      publish(upper_index);
      if (lower.length >= unit_)
        publish(lower_index);
      else  // the ragged end of a generated tail: too short to be found
        lower.state = NodeState::unpublished;
    }
    return upper_index;
  }

  // ---- matches -------------------------------------------------------------------------------

  /// Chunks of a match that no pin covers, each once.
  [[nodiscard]] std::size_t count_unpinned_chunks(const PathMatch& match) const noexcept {
    return count_chunks(match, &ChunkRecord::pinned, [](const TreeNode& n) { return n.pins > 0; });
  }
  /// Chunks of a match that nothing but cache holds, each once.
  [[nodiscard]] std::size_t count_unused_chunks(const PathMatch& match) const noexcept {
    return count_chunks(match, &ChunkRecord::active, [](const TreeNode& n) { return n.active(); });
  }

 private:
  /// Chunks of a match of whose nodes `holders` counts none, each once; holds(n): a node is one of
  /// them, and so are those above it. From the ends of nodes alone, since what lies between has no
  /// other node.
  template <class Holds>
  [[nodiscard]] std::size_t count_chunks(const PathMatch& match,
                                         std::int32_t ChunkRecord::* holders,
                                         const Holds& holds) const noexcept {
    std::size_t count = 0;
    std::int32_t used = match.used;
    for (NodeIndex i = match.last; i != root_node; used = topology_.node(i).length) {
      const TreeNode& n = topology_.node(i);
      if (holds(n)) break;
      const std::int32_t spans = topology_.geometry.chunks_for(n.begin + used);
      const ChunkIndex last = topology_.chunk_of(n, n.begin + used - 1);
      const ChunkRecord& chunk = chunks_[last];
      if (chunk.*holders == 0 && (chunk.nodes == 1 || !starts_below(match, i, last))) ++count;
      if (spans > 1 && chunks_[n.first_chunk].*holders == 0) ++count;
      count += to_size((std::max)(0, spans - 2));  // what lies between is its own
      i = n.parent;
    }
    return count;
  }
  /// Whether a node of the match below `n` begins in this chunk.
  [[nodiscard]] bool starts_below(const PathMatch& match, NodeIndex n,
                                  ChunkIndex chunk) const noexcept {
    for (NodeIndex i = match.last; i != n; i = topology_.node(i).parent)
      if (topology_.node(i).first_chunk == chunk) return true;
    return false;
  }

  [[nodiscard]] std::uint32_t key_hash(
      const TreeNode& n) const noexcept {  // a key lies in one chunk
    return finish_hash(
        tokens_.hash(hash_seed(n.parent, n.name_space), n.first_chunk, n.begin, unit_));
  }

  Topology& topology_;
  const ChunkTable& chunks_;
  const Tokens& tokens_;
  const std::int32_t unit_;
  ChildIndex index_;
  std::uint64_t num_publications_ = 0;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
