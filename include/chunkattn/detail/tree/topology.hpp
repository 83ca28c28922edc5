// The shape of the tree: nodes, how they hang together, and the places that each of them has in
// slots. It knows neither tokens nor what is cached.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../../plan_view.hpp"
#include "../../tree_options.hpp"
#include "../base/array.hpp"
#include "../base/config.hpp"
#include "../base/to_size.hpp"
#include "chunk_table.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

using SequenceIndex = std::int32_t;

/// Never given to another sequence of the tree: a generation ends when its sequence leaves.
inline SequenceId sequence_id(SequenceIndex s, std::uint32_t generation) noexcept {
  return SequenceId{(std::uint64_t{generation} << 32) + static_cast<std::uint32_t>(s) + 1};
}

inline constexpr NodeIndex root_node = 0;

enum class NodeState : std::uint8_t {
  unused,
  hidden,     ///< generated tokens of live sequences: not found by a match
  published,  ///< in the child index
  stale       ///< from before clear(): serves its live sequences, never found again
};

/// A run of tokens on consecutive places: from offset `begin` of `first_slot` to its end, over as
/// many slots as it takes, all full but the last. A node that is split keeps its slots; the two
/// halves then share the slot that was cut.
/// What a decode step touches stands in the first cache line.
struct alignas(64) TreeNode {
  NodeIndex parent = none, first_child = none, next_sibling = none, prev_sibling = none;
  std::int32_t position = 0;  ///< path position of the first token
  std::int32_t length = 0;    ///< places taken, those of reserved tokens included
  std::int32_t begin = 0;
  SlotIndex first_slot = no_slot, last_slot = no_slot;
  std::int32_t written = 0;      ///< leading tokens whose K/V is written
  std::int32_t scheduled = 0;    ///< leading tokens that are written or that a step is to write
  SequenceIndex writer = none;   ///< who is to write those that are not written
  SequenceIndex tail_of = none;  ///< the sequence whose private tail this is
  std::int32_t live = 0;         ///< live sequences at or below
  std::int32_t held = 0;         ///< sequences at or below that left and are still in use
  NodeState state = NodeState::unused;
  bool retained = false;
  std::int32_t level = 0;                ///< of retention: the highest of those that used it
  std::int32_t pins = 0;                 ///< pins of paths through it
  std::uint32_t hash = 0;                ///< of the key, while published
  NodeIndex older = none, newer = none;  ///< neighbours in the retention list
  Namespace name_space{};

  [[nodiscard]] bool active() const noexcept { return live + held > 0; }
  [[nodiscard]] SlotUse use() const noexcept { return {active(), pins > 0}; }
  [[nodiscard]] std::int32_t end() const noexcept { return position + length; }
  /// The K/V of the first tokens is written.
  void set_written(std::int32_t count) noexcept {
    written = count;
    if (written == length) writer = none;
  }
};

class Topology {
 public:
  Topology(Slots& slot_table, ChunkGeometry geometry, TreeStats& stats)
      : chunk(geometry), slots_(slot_table), stats_(stats) {
    nodes_.push_back({});
    nodes_[root_node].state = NodeState::published;
    stats_.nodes = 1;
  }

  const ChunkGeometry chunk;

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
    for (NodeIndex i = last; i != root_node; i = node(i).parent) {
      const TreeNode& n = node(i);
      if (n.written < n.length) end = n.position + n.written;
    }
    return end;
  }

  // ---- places --------------------------------------------------------------------------------

  /// Offset behind the node's last place, in its last slot.
  [[nodiscard]] std::int32_t end_offset(const TreeNode& n) const noexcept {
    return n.length == 0 ? n.begin : chunk.offset(n.begin + n.length - 1) + 1;
  }
  /// Whether the free places behind the node's last token are its own.
  [[nodiscard]] bool owns_end(const TreeNode& n) const noexcept {
    const NodeIndex owner = slots_[n.last_slot].owner;
    return owner != none && &node(owner) == &n;
  }
  /// The slot of a place of the node's run, counted from the start of its first slot; found from
  /// the nearer end.
  [[nodiscard]] SlotIndex slot_of(const TreeNode& n, std::int32_t place) const noexcept {
    const std::int32_t index = chunk.slots_before(place);
    const std::int32_t from_end = chunk.slots_before(n.begin + n.length - 1) - index;
    if (from_end < index) {
      SlotIndex s = n.last_slot;
      for (std::int32_t i = from_end; i > 0; --i) s = slots_[s].prev;
      return s;
    }
    SlotIndex s = n.first_slot;
    for (std::int32_t i = index; i > 0; --i) s = slots_.next(s);
    return s;
  }
  /// Calls f(slot, offset, count, done) for the places [first, first + count) of a node, slot by
  /// slot; `done` counts the places before. f returns false to stop.
  template <class F>
  void for_each_run(const TreeNode& n, std::int32_t first, std::int32_t count, const F& f) const {
    if (count <= 0) return;
    SlotIndex s = slot_of(n, n.begin + first);
    std::int32_t offset = chunk.offset(n.begin + first);
    for (std::int32_t done = 0;;) {
      const std::int32_t run = std::min(count - done, chunk.size - offset);
      if (!f(s, offset, run, done)) return;
      done += run;
      if (done == count) return;
      s = slots_.next(s);
      offset = 0;
    }
  }
  /// Calls f(slot) for every slot of the node, spare ones behind its tokens included.
  template <class F>
  void for_each_slot(const TreeNode& n, const F& f) const {
    if (n.first_slot == no_slot) return;
    const SlotIndex last = last_held_slot(n);
    for (SlotIndex s = n.first_slot;; s = slots_.next(s)) {
      f(s);
      if (s == last) return;
    }
  }
  /// The last slot of the node's run, spare ones included.
  [[nodiscard]] SlotIndex last_held_slot(const TreeNode& n) const noexcept {
    SlotIndex s = n.last_slot;
    if (n.tail_of != none && s != no_slot && owns_end(n))
      while (slots_.next(s) != no_slot) s = slots_.next(s);
    return s;
  }
  /// Free places that the node can take without a new slot: behind its own end, or, while it has
  /// none, behind its parent's.
  [[nodiscard]] std::int32_t room(const TreeNode& n) const noexcept {
    if (n.first_slot == no_slot) return room_behind(n.parent);
    if (!owns_end(n)) return 0;
    std::int32_t places = chunk.size - end_offset(n);
    for (SlotIndex s = slots_.next(n.last_slot); s != no_slot; s = slots_.next(s))
      places += chunk.size;
    return places;
  }
  /// Places that a new child of `parent` could take in its last slot.
  [[nodiscard]] std::int32_t room_behind(NodeIndex parent) const noexcept {
    const TreeNode& p = node(parent);
    if (p.length == 0) return 0;
    const SlotRecord& last = slots_[p.last_slot];
    if (last.owner != parent || last.next != no_slot) return 0;
    return chunk.size - end_offset(p);
  }

  /// Appends `count` places to the node's end: its own free places first, then acquired slots.
  void extend(NodeIndex index, std::int32_t count) noexcept {
    TreeNode& n = node(index);
    if (count <= 0) return;
    stats_.stored_tokens += to_size(count);
    if (n.first_slot == no_slot) enter_first_slot(index);
    for (std::int32_t offset = end_offset(n);; offset = 0) {
      const std::int32_t take = std::min(count, chunk.size - offset);
      n.length += take;
      count -= take;
      if (count == 0) return;
      SlotIndex next = slots_.next(n.last_slot);  // a spare from a dropped reservation
      if (next == no_slot) {
        next = slots_.take(index, n.last_slot, n.use());
        slots_[n.last_slot].next = next;
      }
      n.last_slot = next;
    }
  }
  /// The same, but starts in a slot of its own.
  void extend_apart(NodeIndex index, std::int32_t count) noexcept {
    TreeNode& n = node(index);
    if (count <= 0) return;
    n.first_slot = n.last_slot = slots_.take(index, no_slot, n.use());
    extend(index, count);
  }

  /// Gives back the slots behind the node's first `keep` places, spare ones included. True if any
  /// slot was given back.
  bool release_places(NodeIndex index, std::int32_t keep) noexcept {
    return release_places(index, keep, node(index).active());
  }
  /// \param active  whether its slots count it as in use
  bool release_places(NodeIndex index, std::int32_t keep, bool active) noexcept {
    TreeNode& n = node(index);
    if (n.first_slot == no_slot) return false;
    stats_.stored_tokens -= to_size(n.length - keep);
    const std::int32_t kept_slots = keep == 0 ? 0 : chunk.slots_for(n.begin + keep);
    SlotIndex s = last_held_slot(n);
    std::int32_t held = std::max(1, chunk.slots_for(n.begin + n.length));
    for (SlotIndex i = s; i != n.last_slot; i = slots_[i].prev) ++held;
    const bool released = held > kept_slots;
    const bool owned = owns_end(n);
    const SlotUse use{active, n.pins > 0};
    for (; held > kept_slots; --held) {
      const SlotIndex prev = held > 1 ? slots_[s].prev : no_slot;
      if (held == 1 && slots_[s].owner == index) {
        // The free places of a shared first slot go back to the node before this one.
        const TreeNode& p = node(n.parent);
        slots_[s].owner = p.length > 0 && p.last_slot == s ? n.parent : none;
        slots_[s].next = no_slot;
      }
      slots_.remove_node(s, use);
      s = prev;
    }
    n.length = keep;
    if (kept_slots == 0) {
      n.first_slot = n.last_slot = no_slot;
      n.begin = 0;
    } else {
      n.last_slot = s;
      if (released || owned) {
        slots_[s].next = no_slot;
        slots_[s].owner = index;
      }
    }
    n.scheduled = std::min(n.scheduled, keep);
    if (n.written >= keep) {
      n.written = keep;
      n.writer = none;
    }
    return released;
  }
  /// Shortens a tail to `keep` places; its slots stay with it as spare ones.
  void shorten(NodeIndex index, std::int32_t keep) noexcept {
    TreeNode& n = node(index);
    stats_.stored_tokens -= to_size(n.length - keep);
    n.last_slot = keep > 0 ? slot_of(n, n.begin + keep - 1) : n.first_slot;
    n.length = keep;
    n.scheduled = std::min(n.scheduled, keep);
    if (n.written == keep) n.writer = none;
  }
  /// Gives what lies behind a node to a new, empty child of it: its spare slots, and with
  /// `claim_end` also the free places of its last slot.
  void move_spare_places(NodeIndex from, NodeIndex to, bool claim_end) noexcept {
    const TreeNode& f = node(from);
    TreeNode& t = node(to);
    if (!owns_end(f)) return;
    const SlotIndex spare = slots_.next(f.last_slot);
    if (claim_end && end_offset(f) < chunk.size) {
      t.begin = end_offset(f);
      t.first_slot = t.last_slot = f.last_slot;
      slots_[f.last_slot].owner = to;
      slots_.add_node(f.last_slot, t.use());
    } else if (spare != no_slot) {
      t.first_slot = t.last_slot = spare;
      slots_[f.last_slot].next = slots_[spare].prev = no_slot;
    }
    for (SlotIndex s = spare; s != no_slot; s = slots_.next(s)) slots_[s].owner = to;
  }

  /// Counts places that were added to the ends of nodes without extend().
  void count_places(std::size_t count) noexcept { stats_.stored_tokens += count; }
  /// Asks early for what a step writes to a node.
  void prefetch(NodeIndex n) const noexcept { CHUNKATTN_PREFETCH_WRITE(&nodes_[to_size(n)]); }
  /// The same for the token behind its last place.
  void prefetch_end(NodeIndex index) const noexcept {
    const TreeNode& n = node(index);
    if (n.last_slot != no_slot) slots_.prefetch(n.last_slot, chunk.offset(n.begin + n.length));
  }

  // ---- nodes ---------------------------------------------------------------------------------

  /// Makes room for `count` new nodes, so that add() and split() cannot fail.
  void reserve(std::size_t count) {
    if (nodes_.size() + count > nodes_.capacity())
      nodes_.reserve(std::max(2 * nodes_.capacity(), nodes_.size() + count));
  }
  /// True if `count` nodes can be made without allocating.
  [[nodiscard]] bool has_room(std::size_t count) const noexcept {
    return nodes_.capacity() - nodes_.size() >= count;
  }

  NodeIndex add(NodeIndex parent, Namespace name_space, std::int32_t level,
                NodeState state) noexcept {
    NodeIndex n = free_nodes_;
    if (n != none) {
      free_nodes_ = node(n).next_sibling;
      node(n) = TreeNode{};
    } else {
      n = static_cast<NodeIndex>(nodes_.size());
      nodes_.push_back({});
    }
    TreeNode& record = node(n);
    record.position = node(parent).end();
    record.name_space = name_space;
    record.level = level;
    record.state = node(parent).state == NodeState::stale ? NodeState::stale : state;
    link(parent, n);
    ++stats_.nodes;
    return n;
  }
  void remove(NodeIndex n) noexcept {
    unlink(n);
    node(n) = TreeNode{};
    node(n).next_sibling = free_nodes_;
    free_nodes_ = n;
    --stats_.nodes;
  }
  void move(NodeIndex child, NodeIndex parent) noexcept {
    unlink(child);
    link(parent, child);
  }

  /// Cuts a node in place after its first 0 < `keep` < length tokens and returns the upper half.
  /// The lower half keeps its index and its children. Copies nothing.
  NodeIndex split(NodeIndex lower_index, std::int32_t keep) noexcept {
    const NodeIndex parent = node(lower_index).parent;
    unlink(lower_index);
    const NodeIndex upper_index =
        add(parent, node(lower_index).name_space, node(lower_index).level, node(lower_index).state);
    TreeNode& upper = node(upper_index);
    TreeNode& lower = node(lower_index);
    upper.position = lower.position;
    upper.length = keep;
    upper.begin = lower.begin;
    upper.first_slot = lower.first_slot;
    upper.written = std::min(lower.written, keep);
    upper.scheduled = std::min(lower.scheduled, keep);
    upper.writer = upper.written < keep ? lower.writer : none;
    upper.live = lower.live;
    upper.held = lower.held;
    upper.pins = lower.pins;
    upper.state = lower.state;

    SlotIndex cut = lower.first_slot;
    std::int32_t offset = lower.begin + keep;
    for (; offset > chunk.size; offset -= chunk.size) {
      slots_[cut].owner = upper_index;
      cut = slots_.next(cut);
    }
    upper.last_slot = cut;
    if (offset == chunk.size) {
      slots_[cut].owner = upper_index;
      lower.first_slot = slots_.next(cut);
      lower.begin = 0;
    } else {
      lower.begin = offset;
      lower.first_slot = cut;
      slots_.add_node(cut, lower.use());
      ++stats_.splits_inside_slot;
    }
    lower.position += keep;
    lower.length -= keep;
    lower.written -= upper.written;
    lower.scheduled -= upper.scheduled;
    if (lower.written == lower.length) lower.writer = none;
    link(upper_index, lower_index);
    ++stats_.splits;
    return upper_index;
  }

 private:
  void enter_first_slot(NodeIndex index) noexcept {
    TreeNode& n = node(index);
    if (room_behind(n.parent) > 0) {
      const TreeNode& p = node(n.parent);
      n.first_slot = p.last_slot;
      n.begin = end_offset(p);
      slots_[n.first_slot].owner = index;
      slots_.add_node(n.first_slot, n.use());
    } else {
      n.first_slot = slots_.take(index, no_slot, n.use());
      n.begin = 0;
    }
    n.last_slot = n.first_slot;
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

  Slots& slots_;
  TreeStats& stats_;
  Array<TreeNode> nodes_;
  NodeIndex free_nodes_ = none;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
