// Topology: the shape of the tree. Nodes, how they hang together, and the slots that each of them
// has in chunks. It knows neither tokens nor what is cached.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../../tree_options.hpp"
#include "../support/array.hpp"
#include "../support/config.hpp"
#include "chunk_table.hpp"
#include "node_observer.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Never given to another sequence of the tree: a generation ends when its sequence leaves.
inline SequenceId sequence_id(SequenceIndex s, std::uint32_t generation) noexcept {
  return SequenceId{(std::uint64_t{generation} << 32) + static_cast<std::uint32_t>(s) + 1};
}

inline constexpr NodeIndex root_node = 0;

enum class NodeState : std::uint8_t {
  free,
  unpublished,  ///< generated tokens of live sequences: not found by a match
  published,    ///< in the child index
  stale         ///< from before clear(): serves its live sequences, never found again
};

/// How a node was used, for a policy that learns.
struct ReuseRecord {
  /// When it fell out of use, in chunks of tokens that were new to the tree.
  std::uint32_t since = 0;
  std::uint8_t uses = 0;   ///< how often it was used again, at most 255
  std::uint8_t group = 0;  ///< of those that are valued alike: ReuseModel::group_of() (cache/)
};

/// A run of tokens on consecutive slots: from offset `begin` of `first_chunk` to its end, over as
/// many chunks as it takes, all full but the last. A node that is split keeps its chunks; the two
/// halves then share the chunk that was cut.
/// What a decode step touches stands in the first cache line.
struct alignas(64) TreeNode {
  NodeIndex parent = none, first_child = none, next_sibling = none, prev_sibling = none;
  std::int32_t position = 0;  ///< path position of the first token
  std::int32_t length = 0;    ///< slots taken, those of reserved tokens included
  std::int32_t begin = 0;     ///< offset of the first slot, in first_chunk
  ChunkIndex first_chunk = no_chunk, last_chunk = no_chunk;
  std::int32_t written = 0;      ///< leading tokens whose K/V is written
  std::int32_t scheduled = 0;    ///< leading tokens that are written or that a step is to write
  SequenceIndex writer = none;   ///< who is to write those that are not written
  SequenceIndex tail_of = none;  ///< the sequence whose private tail this is
  std::int32_t live = 0;         ///< live sequences at or below
  std::int32_t held = 0;         ///< sequences at or below that left and are still in use
  NodeState state = NodeState::free;
  bool retained = false;
  std::int32_t level = 0;                ///< of retention: the highest of those that used it
  std::int32_t pins = 0;                 ///< pins of paths through it
  std::uint32_t hash = 0;                ///< of the key, while published
  NodeIndex older = none, newer = none;  ///< neighbours in the retention list
  Namespace name_space{};
  /// Told apart by it from others that had or get its index; never 0.
  std::uint32_t generation = 0;
  ReuseRecord reuse;  ///< with a ttl `since` is by the caller's clock

  [[nodiscard]] bool active() const noexcept { return live + held > 0; }
  [[nodiscard]] ChunkUse use() const noexcept { return {active(), pins > 0}; }
  [[nodiscard]] std::int32_t end() const noexcept { return position + length; }
  /// The K/V of the first tokens is written.
  void set_written(std::int32_t count) noexcept {
    written = count;
    if (written == length) writer = none;
  }
};

static_assert(sizeof(TreeNode) == 128, "two cache lines per node");

class Topology {
 public:
  Topology(ChunkTable& chunk_table, ChunkGeometry of_chunks, TreeStats& stats)
      : geometry(of_chunks), chunks_(chunk_table), stats_(stats) {
    nodes_.push_back({});
    nodes_[root_node].state = NodeState::published;
    nodes_[root_node].generation = 1;
    stats_.nodes = 1;
  }

  const ChunkGeometry geometry;
  NodeObservers observers;

  [[nodiscard]] TreeNode& node(NodeIndex n) noexcept { return nodes_[to_size(n)]; }
  [[nodiscard]] const TreeNode& node(NodeIndex n) const noexcept { return nodes_[to_size(n)]; }
  /// [num_indices()] until one is added.
  [[nodiscard]] TreeNode* nodes() noexcept { return nodes_.data(); }
  /// Indices of nodes are below this.
  [[nodiscard]] std::size_t num_indices() const noexcept { return nodes_.size(); }
  /// Nodes that there are.
  [[nodiscard]] std::size_t num_nodes() const noexcept { return stats_.nodes; }
  /// The first path position whose K/V is not written, on the path to `last`.
  [[nodiscard]] std::int32_t written_end(NodeIndex last) const noexcept {
    std::int32_t end = node(last).end();
    for (NodeIndex i = last; i != root_node; i = node(i).parent)
      if (const TreeNode& n = node(i); n.written < n.length) end = n.position + n.written;
    return end;
  }

  // ---- slots --------------------------------------------------------------------------------

  /// Offset after the node's last slot, in its last chunk.
  [[nodiscard]] std::int32_t end_offset(const TreeNode& n) const noexcept {
    return n.length == 0 ? n.begin : geometry.offset(n.begin + n.length - 1) + 1;
  }
  /// Whether the free slots after the node's last token are its own.
  [[nodiscard]] bool owns_end(const TreeNode& n) const noexcept {
    const NodeIndex owner = chunks_[n.last_chunk].owner;
    return owner != none && &node(owner) == &n;
  }
  /// The chunk of a slot of the node's run, counted from the start of its first chunk; found from
  /// the nearer end.
  [[nodiscard]] ChunkIndex chunk_of(const TreeNode& n, std::int32_t slot) const noexcept {
    const std::int32_t index = geometry.chunks_before(slot);
    const std::int32_t from_end = geometry.chunks_before(n.begin + n.length - 1) - index;
    if (from_end < index) {
      ChunkIndex s = n.last_chunk;
      for (std::int32_t i = from_end; i > 0; --i) s = chunks_[s].prev;
      return s;
    }
    ChunkIndex s = n.first_chunk;
    for (std::int32_t i = index; i > 0; --i) s = chunks_.next(s);
    return s;
  }
  /// Calls f(chunk, offset, count, done) for the slots [first, first + count) of a node, chunk by
  /// chunk; `done` counts the slots before.
  template <class F>
  void for_each_run(const TreeNode& n, std::int32_t first, std::int32_t count, const F& f) const {
    if (count <= 0) return;
    ChunkIndex s = chunk_of(n, n.begin + first);
    std::int32_t offset = geometry.offset(n.begin + first);
    for (std::int32_t done = 0;;) {
      const std::int32_t run = (std::min)(count - done, geometry.size - offset);
      f(s, offset, run, done);
      done += run;
      if (done == count) return;
      s = chunks_.next(s);
      offset = 0;
    }
  }
  /// Calls f(node, first) for the nodes that have tokens in a chunk, the last one first: `first` is
  /// the first of these tokens.
  template <class F>
  void for_each_node_in(ChunkIndex s, const F& f) const {
    NodeIndex index = chunks_[s].owner;
    for (std::int32_t left = chunks_[s].nodes; left > 0; --left) {
      const TreeNode& n = node(index);
      std::int32_t before = 0;  // chunks of the node
      if (s == n.last_chunk)
        before = geometry.chunks_before(n.begin + (std::max)(n.length, 1) - 1);
      else
        for (ChunkIndex c = s; c != n.first_chunk; c = chunks_[c].prev) ++before;
      const std::int32_t first = (std::max)(before * geometry.size - n.begin, 0);
      if (first < n.length) f(index, first);
      if (left > 1) index = ancestor_in(s, index);
    }
  }
  /// Calls f(chunk of a, offset, chunk of b, offset, count, done) for the first `count` slots of
  /// both, by runs that are within a chunk of each.
  template <class F>
  void for_each_common_run(const TreeNode& a, const TreeNode& b, std::int32_t count,
                           const F& f) const {
    ChunkIndex in_b = b.first_chunk;
    std::int32_t at_b = b.begin;
    for_each_run(a, 0, count, [&](ChunkIndex in_a, std::int32_t at, std::int32_t run, auto first) {
      for (std::int32_t part, done = 0; done < run; done += part, at_b += part) {
        if (at_b == geometry.size) in_b = chunks_.next(in_b), at_b = 0;
        part = (std::min)(run - done, geometry.size - at_b);
        f(in_a, at + done, in_b, at_b, part, first + done);
      }
    });
  }
  /// Calls f(chunk) for every chunk of the node, spare ones after its tokens included.
  template <class F>
  void for_each_chunk(const TreeNode& n, const F& f) const {
    if (n.first_chunk == no_chunk) return;
    const ChunkIndex last = last_held_chunk(n);
    for (ChunkIndex s = n.first_chunk;; s = chunks_.next(s)) {
      f(s);
      if (s == last) return;
    }
  }
  /// All chunks of the node are used by it from now on, or no longer.
  void set_active(const TreeNode& n, bool active) noexcept {
    if (n.first_chunk != no_chunk) chunks_.set_active(n.first_chunk, last_held_chunk(n), active);
  }
  /// The last chunk of the node's run, spare ones included.
  [[nodiscard]] ChunkIndex last_held_chunk(const TreeNode& n) const noexcept {
    ChunkIndex s = n.last_chunk;
    if (n.tail_of != none && s != no_chunk && owns_end(n))
      while (chunks_.next(s) != no_chunk) s = chunks_.next(s);
    return s;
  }
  /// Free slots that the node can take without a new chunk: after its own end, or, while it has
  /// none, after its parent's.
  [[nodiscard]] std::int32_t room(const TreeNode& n) const noexcept {
    if (n.first_chunk == no_chunk) return room_after(n.parent);
    if (!owns_end(n)) return 0;
    std::int32_t num_slots = geometry.size - end_offset(n);
    for (ChunkIndex s = chunks_.next(n.last_chunk); s != no_chunk; s = chunks_.next(s))
      num_slots += geometry.size;
    return num_slots;
  }
  /// Slots that a new child of `parent` could take in its last chunk.
  [[nodiscard]] std::int32_t room_after(NodeIndex parent) const noexcept {
    const TreeNode& p = node(parent);
    if (p.length == 0) return 0;
    const ChunkRecord& last = chunks_[p.last_chunk];
    if (last.owner != parent || last.next != no_chunk) return 0;
    return geometry.size - end_offset(p);
  }

  /// Appends `count` slots to the node's end: its own free slots first, then acquired chunks.
  void extend(NodeIndex index, std::int32_t count) noexcept {
    TreeNode& n = node(index);
    if (count <= 0) return;
    stats_.stored_tokens += to_size(count);
    if (n.first_chunk == no_chunk) enter_first_chunk(index);
    for (std::int32_t offset = end_offset(n);; offset = 0) {
      const std::int32_t take = (std::min)(count, geometry.size - offset);
      n.length += take;
      count -= take;
      if (count == 0) return;
      ChunkIndex next = chunks_.next(n.last_chunk);  // a spare from a dropped reservation
      if (next == no_chunk) {
        next = chunks_.take(index, n.last_chunk, n.use());
        chunks_[n.last_chunk].next = next;
      }
      n.last_chunk = next;
    }
  }
  /// The same, but starts in a chunk of its own.
  void extend_apart(NodeIndex index, std::int32_t count) noexcept {
    TreeNode& n = node(index);
    if (count <= 0) return;
    n.first_chunk = n.last_chunk = chunks_.take(index, no_chunk, n.use());
    extend(index, count);
  }

  /// Gives back the chunks after the node's first `keep` slots, spare ones included. True if any
  /// chunk was given back.
  bool release_slots(NodeIndex index, std::int32_t keep) noexcept {
    TreeNode& n = node(index);
    if (n.first_chunk == no_chunk) return false;
    observers.notify_last_first([=](NodeObserver& observer) { observer.on_release(index, keep); });
    const std::int32_t kept_chunks = keep == 0 ? 0 : geometry.chunks_for(n.begin + keep);
    ChunkIndex s = last_held_chunk(n);
    std::int32_t held = (std::max)(1, geometry.chunks_for(n.begin + n.length));
    for (ChunkIndex i = s; i != n.last_chunk; i = chunks_[i].prev) ++held;
    const bool released = held > kept_chunks;
    const bool owned = owns_end(n);
    const ChunkUse use = n.use();
    for (; held > kept_chunks; --held) {
      const ChunkIndex prev = held > 1 ? chunks_[s].prev : no_chunk;
      if (held == 1 && chunks_[s].owner == index) {
        // The free slots of a shared first chunk go back to the node before this one in it.
        chunks_[s].owner = chunks_[s].nodes > 1 ? ancestor_in(s, index) : none;
        chunks_[s].next = no_chunk;
      }
      if (chunks_.remove_node(s, use))
        observers.notify([=](NodeObserver& observer) { observer.on_free(s); });
      s = prev;
    }
    cut(n, keep);
    if (kept_chunks == 0) {
      n.first_chunk = n.last_chunk = no_chunk;
      n.begin = 0;
    } else {
      n.last_chunk = s;
      if (released || owned) {
        chunks_[s].next = no_chunk;
        chunks_[s].owner = index;
      }
    }
    return released;
  }
  /// Shortens a tail to `keep` slots; its chunks stay with it as spare ones.
  void shorten(NodeIndex index, std::int32_t keep) noexcept {
    TreeNode& n = node(index);
    n.last_chunk = keep > 0 ? chunk_of(n, n.begin + keep - 1) : n.first_chunk;
    cut(n, keep);
  }
  /// Gives what lies after a node to a new, empty child of it: its spare chunks, and with
  /// `claim_end` also the free slots of its last chunk.
  void move_spare_slots(NodeIndex from, NodeIndex to, bool claim_end) noexcept {
    const TreeNode& f = node(from);
    TreeNode& t = node(to);
    if (!owns_end(f)) return;
    const ChunkIndex spare = chunks_.next(f.last_chunk);
    if (claim_end && end_offset(f) < geometry.size) {
      t.begin = end_offset(f);
      t.first_chunk = t.last_chunk = f.last_chunk;
      chunks_[f.last_chunk].owner = to;
      chunks_.add_node(f.last_chunk, t.use());
    } else if (spare != no_chunk) {
      t.first_chunk = t.last_chunk = spare;
      chunks_[f.last_chunk].next = chunks_[spare].prev = no_chunk;
    }
    for (ChunkIndex s = spare; s != no_chunk; s = chunks_.next(s)) chunks_[s].owner = to;
  }

  /// Counts slots that were added to the ends of nodes without extend().
  void count_slots(std::size_t count) noexcept { stats_.stored_tokens += count; }
  /// Asks early for what a step writes to a node.
  void prefetch(NodeIndex n) const noexcept { CHUNKATTN_PREFETCH_WRITE(&nodes_[to_size(n)]); }
  /// The same for the token after its last slot.
  void prefetch_end(NodeIndex index) const noexcept {
    const TreeNode& n = node(index);
    if (n.last_chunk != no_chunk)
      chunks_.prefetch(n.last_chunk, geometry.offset(n.begin + n.length));
  }

  // ---- nodes ---------------------------------------------------------------------------------

  /// Makes room for `count` new nodes, so that add() and split() cannot fail.
  void reserve(std::size_t count) {
    if (nodes_.size() + count > nodes_.capacity())
      grow((std::max)(2 * nodes_.capacity(), nodes_.size() + count));
  }
  /// Room for nodes that an observer needs to begin with.
  [[nodiscard]] std::size_t capacity() const noexcept { return nodes_.capacity(); }
  /// True if `count` nodes can be made without allocating.
  [[nodiscard]] bool has_room(std::size_t count) const noexcept {
    return nodes_.capacity() - nodes_.size() >= count;
  }

  NodeIndex add(NodeIndex parent, Namespace name_space, std::int32_t level,
                NodeState state) noexcept {
    NodeIndex n = free_nodes_;
    if (n != none) {
      free_nodes_ = node(n).next_sibling;
      node(n).next_sibling = none;
    } else {
      n = static_cast<NodeIndex>(nodes_.size());
      nodes_.push_back({});
    }
    TreeNode& record = node(n);
    record.position = node(parent).end();
    record.name_space = name_space;
    ++record.generation;
    record.level = level;
    record.state = node(parent).state == NodeState::stale ? NodeState::stale : state;
    link(parent, n);
    ++stats_.nodes;
    return n;
  }
  void remove(NodeIndex n) noexcept {
    unlink(n);
    const std::uint32_t generation = node(n).generation;
    node(n) = TreeNode{};
    node(n).generation = generation;
    node(n).next_sibling = free_nodes_;
    free_nodes_ = n;
    --stats_.nodes;
  }
  void move(NodeIndex child, NodeIndex parent) noexcept {
    unlink(child);
    link(parent, child);
  }

  /// Cuts a node in place after its first 0 < `keep` < length tokens and returns the new parent,
  /// which has these. The rest keeps the node's index and its children. Copies nothing. Called by
  /// Retention::split(), through Prefixes::split(), which keep both in their lists.
  NodeIndex split(NodeIndex lower_index, std::int32_t keep) noexcept {
    const NodeIndex parent = node(lower_index).parent;
    unlink(lower_index);
    const NodeIndex upper_index =
        add(parent, node(lower_index).name_space, node(lower_index).level, node(lower_index).state);
    TreeNode& upper = node(upper_index);
    TreeNode& lower = node(lower_index);
    upper.length = keep;
    upper.begin = lower.begin;
    upper.first_chunk = lower.first_chunk;
    upper.written = (std::min)(lower.written, keep);
    upper.scheduled = (std::min)(lower.scheduled, keep);
    upper.writer = upper.written < keep ? lower.writer : none;
    upper.live = lower.live;
    upper.held = lower.held;
    upper.pins = lower.pins;
    upper.reuse = lower.reuse;

    ChunkIndex cut = lower.first_chunk;
    std::int32_t offset = lower.begin + keep;
    for (; offset > geometry.size; offset -= geometry.size) {
      chunks_[cut].owner = upper_index;
      cut = chunks_.next(cut);
    }
    upper.last_chunk = cut;
    if (offset == geometry.size) {
      chunks_[cut].owner = upper_index;
      lower.first_chunk = chunks_.next(cut);
      lower.begin = 0;
    } else {
      lower.begin = offset;
      lower.first_chunk = cut;
      chunks_.add_node(cut, lower.use());
      ++stats_.splits_inside_chunk;
    }
    lower.position += keep;
    lower.length -= keep;
    lower.written -= upper.written;
    lower.scheduled -= upper.scheduled;
    if (lower.written == lower.length) lower.writer = none;
    link(upper_index, lower_index);
    observers.notify([=](NodeObserver& observer) { observer.on_split(lower_index, upper_index); });
    ++stats_.splits;
    return upper_index;
  }

 private:
  [[gnu::noinline]] void grow(std::size_t capacity) {
    observers.notify([=](NodeObserver& observer) { observer.reserve(capacity); });
    nodes_.reserve(capacity);
  }
  void cut(TreeNode& n, std::int32_t keep) noexcept {
    stats_.stored_tokens -= to_size(n.length - keep);
    n.length = keep;
    n.scheduled = (std::min)(n.scheduled, keep);
    if (n.written >= keep) n.set_written(keep);
  }
  void enter_first_chunk(NodeIndex index) noexcept {
    TreeNode& n = node(index);
    if (room_after(n.parent) > 0) {
      const TreeNode& p = node(n.parent);
      n.first_chunk = p.last_chunk;
      n.begin = end_offset(p);
      chunks_[n.first_chunk].owner = index;
      chunks_.add_node(n.first_chunk, n.use());
    } else {
      n.first_chunk = chunks_.take(index, no_chunk, n.use());
      n.begin = 0;
    }
    n.last_chunk = n.first_chunk;
  }

  /// The node before another one in its first chunk, which has one. Where a merge has moved paths
  /// it is not the parent.
  [[nodiscard]] NodeIndex ancestor_in(ChunkIndex s, NodeIndex below) const noexcept {
    NodeIndex n = node(below).parent;
    while (node(n).last_chunk != s) n = node(n).parent;
    return n;
  }

  void link(NodeIndex parent, NodeIndex child) noexcept {
    TreeNode& c = node(child);
    c.parent = parent;
    c.prev_sibling = none;
    c.next_sibling = node(parent).first_child;
    if (c.next_sibling != none) node(c.next_sibling).prev_sibling = child;
    node(parent).first_child = child;
  }
  void unlink(NodeIndex child) noexcept {
    const TreeNode& c = node(child);
    if (c.prev_sibling != none)
      node(c.prev_sibling).next_sibling = c.next_sibling;
    else
      node(c.parent).first_child = c.next_sibling;
    if (c.next_sibling != none) node(c.next_sibling).prev_sibling = c.prev_sibling;
  }

  ChunkTable& chunks_;
  TreeStats& stats_;
  Array<TreeNode> nodes_;
  NodeIndex free_nodes_ = none;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
