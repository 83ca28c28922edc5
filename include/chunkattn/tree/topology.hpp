// The prefix tree's storage: nodes, their places in slots, the tokens there, and the list of
// cached nodes that may be evicted. Operations on sequences are in tree_core.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../base/concepts.hpp"
#include "../base/config.hpp"
#include "../base/error.hpp"
#include "allocator.hpp"
#include "records.hpp"
#include "retention.hpp"
#include "types.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

template <TokenType Token, int ChunkSize, ChunkAllocator Allocator, RetentionPolicy Retention>
class TreeStorage {
 public:
  static constexpr std::int32_t chunk_size = ChunkSize;

  TreeStorage(Allocator allocator, TreeOptions options, Retention retention)
      : allocator_(std::move(allocator)), options_(options), retention_(std::move(retention)) {
    nodes_.emplace_back();
    nodes_[root_node].state = NodeState::published;
    stats_.nodes = 1;
  }

  [[nodiscard]] const TreeNode& node(NodeIndex n) const noexcept { return nodes_[at(n)]; }
  [[nodiscard]] SlotIndex next_slot(SlotIndex s) const noexcept { return slots_[at(s)].next; }
  [[nodiscard]] const SlotRecord& slot(SlotIndex s) const noexcept { return slots_[at(s)]; }
  [[nodiscard]] std::size_t slots_tracked() const noexcept { return slots_.size(); }
  [[nodiscard]] const Allocator& allocator() const noexcept { return allocator_; }
  [[nodiscard]] const TreeOptions& options() const noexcept { return options_; }
  [[nodiscard]] const Retention& retention() const noexcept { return retention_; }
  [[nodiscard]] const TreeStats& stats() const noexcept { return stats_; }

  [[nodiscard]] std::size_t slots_available() const noexcept {
    return static_cast<std::size_t>(allocator_.available()) + stats_.retained_slots;
  }

  /// Offset behind the node's last place, in its last slot.
  [[nodiscard]] std::int32_t end_offset(const TreeNode& n) const noexcept {
    return n.length == 0 ? n.begin : (n.begin + n.length - 1) % ChunkSize + 1;
  }

  /// Whether the free places behind the node's last token are its own.
  [[nodiscard]] bool owns_end(const TreeNode& n) const noexcept {
    const NodeIndex owner = slots_[at(n.last_slot)].owner;
    return owner != none && &node(owner) == &n;
  }

  [[nodiscard]] const Token& token_at(SlotIndex s, std::int32_t offset) const noexcept {
    return tokens_[at(s) * ChunkSize + at(offset)];
  }

  /// The slot of a place of the node's run, counted from the start of its first slot; found from
  /// the nearer end.
  [[nodiscard]] SlotIndex slot_of(const TreeNode& n, std::int32_t place) const noexcept {
    const std::int32_t index = place / ChunkSize;
    const std::int32_t from_end = (n.begin + n.length - 1) / ChunkSize - index;
    if (from_end < index) {
      SlotIndex s = n.last_slot;
      for (std::int32_t i = from_end; i > 0; --i) s = slots_[at(s)].prev;
      return s;
    }
    SlotIndex s = n.first_slot;
    for (std::int32_t i = index; i > 0; --i) s = next_slot(s);
    return s;
  }

  /// Calls f(slot, offset, count, done) for the places [first, first + count) of a node, slot by
  /// slot; `done` counts the places before. f returns false to stop.
  template <class F>
  void for_each_run(const TreeNode& n, std::int32_t first, std::int32_t count, const F& f) const {
    if (count <= 0) return;
    SlotIndex s = slot_of(n, n.begin + first);
    std::int32_t offset = (n.begin + first) % ChunkSize;
    for (std::int32_t done = 0;;) {
      const std::int32_t run = std::min<std::int32_t>(count - done, ChunkSize - offset);
      if (!f(s, offset, run, done)) return;
      done += run;
      if (done == count) return;
      s = next_slot(s);
      offset = 0;
    }
  }

  /// Leading tokens of `prompt` that the node holds.
  [[nodiscard]] std::int32_t common_length(const TreeNode& n,
                                           std::span<const Token> prompt) const noexcept {
    const auto limit =
        static_cast<std::int32_t>(std::min<std::size_t>(at(n.length), prompt.size()));
    std::int32_t common = 0;
    for_each_run(
        n, 0, limit, [&](SlotIndex s, std::int32_t offset, std::int32_t run, std::int32_t done) {
          const Token* held = &token_at(s, offset);
          const Token* asked = prompt.data() + done;
          // Whole runs usually match; find the exact place only where they do not.
          if (std::equal(held, held + run, asked)) {
            common += run;
            return true;
          }
          common += static_cast<std::int32_t>(std::mismatch(held, held + run, asked).first - held);
          return false;
        });
    return common;
  }

 protected:
  template <class Core>
  friend class TreeInspector;

  static constexpr std::size_t at(std::int32_t index) noexcept {
    return static_cast<std::size_t>(index);
  }
  TreeNode& node(NodeIndex n) noexcept { return nodes_[at(n)]; }

  // ---- nodes -------------------------------------------------------------------------------

  /// Makes room for `count` new nodes, so that new_node() and split() cannot fail.
  void reserve_nodes(std::size_t count) {
    index_.reserve(stats_.nodes + count);  // a hidden node may be published without allocating
    if (nodes_.size() + count > nodes_.capacity())
      nodes_.reserve(std::max(2 * nodes_.capacity(), nodes_.size() + count));
  }

  /// True if `count` nodes can be made without allocating.
  [[nodiscard]] bool has_nodes(std::size_t count) const noexcept {
    return nodes_.capacity() - nodes_.size() >= count && index_.has_room(stats_.nodes + count);
  }

  NodeIndex new_node(NodeIndex parent, Namespace name_space, std::int32_t priority,
                     NodeState state) noexcept {
    NodeIndex n = free_nodes_;
    if (n != none) {
      free_nodes_ = node(n).next_sibling;
      node(n) = TreeNode{};
    } else {
      n = static_cast<NodeIndex>(nodes_.size());
      nodes_.emplace_back();
    }
    TreeNode& record = node(n);
    record.position = node(parent).end();
    record.name_space = name_space;
    record.priority = priority;
    record.state = node(parent).state == NodeState::stale ? NodeState::stale : state;
    link_child(parent, n);
    ++stats_.nodes;
    return n;
  }

  void delete_node(NodeIndex n) noexcept {
    unlink_child(n);
    node(n) = TreeNode{};
    node(n).next_sibling = free_nodes_;
    free_nodes_ = n;
    --stats_.nodes;
  }

  void link_child(NodeIndex parent, NodeIndex child) noexcept {
    TreeNode& c = node(child);
    c.parent = parent;
    c.prev_sibling = none;
    c.next_sibling = node(parent).first_child;
    if (c.next_sibling != none) node(c.next_sibling).prev_sibling = child;
    node(parent).first_child = child;
  }

  void unlink_child(NodeIndex child) noexcept {
    const TreeNode& c = node(child);
    if (c.prev_sibling != none)
      node(c.prev_sibling).next_sibling = c.next_sibling;
    else
      node(c.parent).first_child = c.next_sibling;
    if (c.next_sibling != none) node(c.next_sibling).prev_sibling = c.prev_sibling;
  }

  /// Tokens that are shared or not as one: what a child is keyed by.
  [[nodiscard]] std::int32_t sharing_unit() const noexcept {
    return options_.sharing == Sharing::token ? 1 : ChunkSize;
  }

  [[nodiscard]] std::uint32_t key_hash(NodeIndex parent, const Namespace& name_space,
                                       const Token* key) const noexcept {
    std::uint64_t hash = mix_hash(static_cast<std::uint32_t>(parent), name_space.tenant);
    hash = mix_hash(hash + (name_space.is_public ? 2 : 1), name_space.adapter);
    for (std::int32_t i = 0; i < sharing_unit(); ++i)
      hash = mix_hash(hash + 1, std::hash<Token>{}(key[i]));
    return static_cast<std::uint32_t>(hash >> 32);
  }

  /// Published child of `parent` for this namespace and key; `key` has at least sharing_unit()
  /// tokens.
  [[nodiscard]] NodeIndex find_child(NodeIndex parent, const Namespace& name_space,
                                     const Token* key) const noexcept {
    const auto length = sharing_unit();
    return index_.find(key_hash(parent, name_space, key), [&](NodeIndex n) {
      const TreeNode& c = node(n);
      return c.parent == parent && c.name_space == name_space &&
             common_length(c, {key, at(length)}) == length;
    });
  }

  /// The tokens of a published node's key, which lie in one slot.
  [[nodiscard]] const Token* key_of(const TreeNode& n) const noexcept {
    return &token_at(n.first_slot, n.begin);
  }

  void publish(NodeIndex n) noexcept {
    TreeNode& record = node(n);
    record.state = NodeState::published;
    record.hash = key_hash(record.parent, record.name_space, key_of(record));
    index_.insert(record.hash, n);
  }

  void unpublish(NodeIndex n, NodeState state) noexcept {
    index_.erase(node(n).hash, n);
    node(n).state = state;
  }

  /// Cuts a node in place after its first 0 < `keep` < length tokens and returns the upper half.
  /// The lower half keeps its index, its children and its place in the retention list. Copies
  /// nothing.
  NodeIndex split(NodeIndex lower_index, std::int32_t keep) noexcept {
    const NodeIndex parent = node(lower_index).parent;
    const bool published = node(lower_index).state == NodeState::published;
    if (published) index_.erase(node(lower_index).hash, lower_index);
    unlink_child(lower_index);
    const NodeIndex upper_index = new_node(parent, node(lower_index).name_space,
                                           node(lower_index).priority, node(lower_index).state);
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
    for (; offset > ChunkSize; offset -= ChunkSize) {
      slots_[at(cut)].owner = upper_index;
      cut = next_slot(cut);
    }
    upper.last_slot = cut;
    if (offset == ChunkSize) {
      slots_[at(cut)].owner = upper_index;
      lower.first_slot = next_slot(cut);
      lower.begin = 0;
    } else {
      lower.begin = offset;
      lower.first_slot = cut;
      add_node_to_slot(cut, lower);
      ++stats_.splits_inside_slot;
    }
    lower.position += keep;
    lower.length -= keep;
    lower.written -= upper.written;
    lower.scheduled -= upper.scheduled;
    if (lower.written == lower.length) lower.writer = none;
    link_child(upper_index, lower_index);
    if (published) {
      publish(upper_index);
      if (lower.length >= sharing_unit())
        publish(lower_index);
      else  // the ragged end of a generated tail: too short to be found
        lower.state = NodeState::hidden;
    }
    if (lower.retained) link_retained_after(upper_index, lower_index);
    ++stats_.splits;
    return upper_index;
  }

  // ---- slots -------------------------------------------------------------------------------

  /// `n` takes its first place in the slot.
  void add_node_to_slot(SlotIndex s, const TreeNode& n) noexcept {
    SlotRecord& record = slots_[at(s)];
    const bool active = n.active();
    if (record.nodes == 0) {
      ++stats_.used_slots;
      if (!active) ++stats_.retained_slots;
    } else if (active && record.active == 0) {
      --stats_.retained_slots;
    }
    ++record.nodes;
    record.active += active ? 1 : 0;
    if (n.pins > 0 && record.pinned++ == 0) ++pinned_slots_;
  }

  /// `n` gave up its last place in the slot.
  void remove_node_from_slot(SlotIndex s, const TreeNode& n) noexcept {
    SlotRecord& record = slots_[at(s)];
    const bool was_retained = record.active == 0;
    if (n.pins > 0 && --record.pinned == 0) --pinned_slots_;
    --record.nodes;
    record.active -= n.active() ? 1 : 0;
    if (record.nodes == 0) {
      if (was_retained) --stats_.retained_slots;
      free_slot(s);
    } else if (!was_retained && record.active == 0) {
      ++stats_.retained_slots;
    }
  }

  void free_slot(SlotIndex s) noexcept {
    slots_[at(s)] = SlotRecord{};
    --stats_.used_slots;
    if (free_sink_) free_sink_(s);
    allocator_.free(s);
  }

  /// Tells the node's slots that it is used from now on, or no longer.
  void set_slots_active(const TreeNode& n, bool active) noexcept {
    if (n.first_slot == no_slot) return;
    for (SlotIndex s = n.first_slot;; s = next_slot(s)) {
      SlotRecord& record = slots_[at(s)];
      if (active) {
        if (record.active++ == 0) --stats_.retained_slots;
      } else {
        if (--record.active == 0) ++stats_.retained_slots;
      }
      if (s == last_held_slot(n)) return;
    }
  }

  /// The last slot of the node's run, spare ones behind its tokens included.
  [[nodiscard]] SlotIndex last_held_slot(const TreeNode& n) const noexcept {
    SlotIndex s = n.last_slot;
    if (n.tail_of != none && s != no_slot && owns_end(n))
      while (next_slot(s) != no_slot) s = next_slot(s);
    return s;
  }

  /// Takes `count` slots into scratch_, evicting what is cached where the budget is spent.
  /// False, with nothing taken and nothing evicted, when that is not enough.
  bool acquire(std::int32_t count) {
    if (at(count) > slots_available()) return false;
    struct GiveBack {
      TreeStorage& tree;
      bool keep = false;
      ~GiveBack() {
        if (!keep) tree.release_scratch();
      }
    } guard{*this};
    scratch_.clear();
    if (scratch_.capacity() < at(count)) scratch_.reserve(2 * at(count));
    while (scratch_.size() < at(count)) {
      const SlotIndex s = allocator_.allocate();
      if (s == no_slot) {
        if (!evict_one_slot()) return false;
        continue;
      }
      scratch_.push_back(s);
      grow_slot_tables(std::max(static_cast<std::size_t>(allocator_.high_water()), at(s) + 1));
    }
    std::reverse(scratch_.begin(),
                 scratch_.end());  // so that they are used in the order handed out
    guard.keep = true;
    return true;
  }

  void grow_slot_tables(std::size_t count) {
    if (count <= slots_.size()) return;
    if (count > tokens_.capacity() / ChunkSize)
      tokens_.reserve(std::max(count, 2 * slots_.size()) * ChunkSize);
    if (count > slots_.capacity()) slots_.reserve(std::max(count, 2 * slots_.size()));
    tokens_.resize(count * ChunkSize);
    slots_.resize(count);
  }

  /// Free places that the node can take without a new slot: behind its own end, or, while it has
  /// none, behind its parent's.
  [[nodiscard]] std::int32_t room(const TreeNode& n) const noexcept {
    if (n.first_slot == no_slot) return room_behind(n.parent);
    if (!owns_end(n)) return 0;
    std::int32_t places = ChunkSize - end_offset(n);
    for (SlotIndex s = next_slot(n.last_slot); s != no_slot; s = next_slot(s)) places += ChunkSize;
    return places;
  }

  /// Places that a new child of `parent` could take in its last slot.
  [[nodiscard]] std::int32_t room_behind(NodeIndex parent) const noexcept {
    const TreeNode& p = node(parent);
    if (p.length == 0) return 0;
    const SlotRecord& last = slots_[at(p.last_slot)];
    if (last.owner != parent || last.next != no_slot) return 0;
    return ChunkSize - end_offset(p);
  }

  static constexpr std::int32_t slots_for(std::int32_t places) noexcept {
    return places <= 0 ? 0 : (places + ChunkSize - 1) / ChunkSize;
  }

  /// Appends `count` places to the node's end: its own free places first, then slots of scratch_.
  void extend(NodeIndex index, std::int32_t count) noexcept {
    TreeNode& n = node(index);
    if (count <= 0) return;
    stats_.stored_tokens += at(count);
    if (n.first_slot == no_slot) {
      if (room_behind(n.parent) > 0) {
        const TreeNode& p = node(n.parent);
        n.first_slot = p.last_slot;
        n.begin = end_offset(p);
        slots_[at(n.first_slot)].owner = index;
        add_node_to_slot(n.first_slot, n);
      } else {
        n.first_slot = take_scratch(index, no_slot);
        n.begin = 0;
      }
      n.last_slot = n.first_slot;
    }
    for (std::int32_t offset = end_offset(n);; offset = 0) {
      const std::int32_t take = std::min<std::int32_t>(count, ChunkSize - offset);
      n.length += take;
      count -= take;
      if (count == 0) return;
      SlotIndex next = next_slot(n.last_slot);  // a spare from a dropped reservation
      if (next == no_slot) {
        next = take_scratch(index, n.last_slot);
        slots_[at(n.last_slot)].next = next;
      }
      n.last_slot = next;
    }
  }

  /// Gives back what acquire() took and was not needed: an eviction may have made room in a slot
  /// that is in use.
  void release_scratch() noexcept {
    while (!scratch_.empty()) {
      allocator_.free(scratch_.back());
      scratch_.pop_back();
    }
  }

  SlotIndex take_scratch(NodeIndex owner, SlotIndex prev) noexcept {
    const SlotIndex s = scratch_.back();
    scratch_.pop_back();
    slots_[at(s)] = SlotRecord{.owner = owner, .prev = prev};
    add_node_to_slot(s, node(owner));
    return s;
  }

  void store_token(const TreeNode& n, std::int32_t position, const Token& token) {
    const std::int32_t place = n.begin + position;
    tokens_[at(slot_of(n, place)) * ChunkSize + at(place % ChunkSize)] = token;
  }

  void prefetch_end(const TreeNode& n) const noexcept {
    if (n.last_slot != no_slot)
      CHUNKATTN_PREFETCH_WRITE(tokens_.data() + at(n.last_slot) * ChunkSize +
                               at((n.begin + n.length) % ChunkSize));
  }

  void store_tokens(const TreeNode& n, std::int32_t first, std::span<const Token> tokens) {
    for_each_run(n, first, static_cast<std::int32_t>(tokens.size()),
                 [&](SlotIndex s, std::int32_t offset, std::int32_t run, std::int32_t done) {
                   std::copy_n(tokens.data() + done, run,
                               tokens_.begin() + s * std::ptrdiff_t{ChunkSize} + offset);
                   return true;
                 });
  }

  /// Gives back the slots behind the node's first `keep` places, spare ones included. True if any
  /// slot was given back.
  bool release_places(NodeIndex index, std::int32_t keep) noexcept {
    TreeNode& n = node(index);
    if (n.first_slot == no_slot) return false;
    stats_.stored_tokens -= at(n.length - keep);
    const std::int32_t kept_slots = keep == 0 ? 0 : slots_for(n.begin + keep);
    SlotIndex s = last_held_slot(n);
    std::int32_t held = std::max(1, slots_for(n.begin + n.length));
    for (SlotIndex i = s; i != n.last_slot; i = slots_[at(i)].prev) ++held;
    const bool released = held > kept_slots;
    const bool owned = owns_end(n);
    for (; held > kept_slots; --held) {
      const SlotIndex prev = held > 1 ? slots_[at(s)].prev : no_slot;
      if (held == 1 && slots_[at(s)].owner == index) {
        // The free places of a shared first slot go back to the node before this one.
        const TreeNode& p = node(n.parent);
        slots_[at(s)].owner = p.length > 0 && p.last_slot == s ? n.parent : none;
        slots_[at(s)].next = no_slot;
      }
      remove_node_from_slot(s, n);
      s = prev;
    }
    n.length = keep;
    if (kept_slots == 0) {
      n.first_slot = n.last_slot = no_slot;
      n.begin = 0;
    } else {
      n.last_slot = s;
      if (released || owned) {
        slots_[at(s)].next = no_slot;
        slots_[at(s)].owner = index;
      }
    }
    n.scheduled = std::min(n.scheduled, keep);
    if (n.written >= keep) {
      n.written = keep;
      n.writer = none;
    }
    return released;
  }

  // ---- retention ---------------------------------------------------------------------------

  struct RetainedLevel {
    std::int64_t level = 0;
    NodeIndex oldest = none, newest = none;
  };

  /// Makes sure that the level of this priority has a list, so that retaining cannot fail.
  void reserve_level(std::int64_t level) {
    const auto it = find_level(level);
    if (it == levels_.end() || it->level != level) levels_.insert(it, RetainedLevel{level});
  }

  auto find_level(std::int64_t level) noexcept {
    return std::lower_bound(
        levels_.begin(), levels_.end(), level,
        [](const RetainedLevel& l, std::int64_t value) { return l.level < value; });
  }

  /// Above whatever a policy says.
  static constexpr std::int64_t pinned_level = std::numeric_limits<std::int64_t>::max();

  [[nodiscard]] std::int64_t level_of(const TreeNode& n) const noexcept {
    return n.pins > 0 ? pinned_level : retention_.level(n.priority);
  }

  /// Puts a node at the young end of its level. Children are retained before their parents, so the
  /// oldest node of the lowest level is always a leaf.
  void retain(NodeIndex index) noexcept {
    TreeNode& n = node(index);
    RetainedLevel& level = *find_level(level_of(n));
    n.retained = true;
    n.older = level.newest;
    n.newer = none;
    (n.older != none ? node(n.older).newer : level.oldest) = index;
    level.newest = index;
  }

  void unretain(NodeIndex index) noexcept {
    TreeNode& n = node(index);
    RetainedLevel& level = *find_level(level_of(n));
    (n.older != none ? node(n.older).newer : level.oldest) = n.newer;
    (n.newer != none ? node(n.newer).older : level.newest) = n.older;
    n.retained = false;
    n.older = n.newer = none;
  }

  void link_retained_after(NodeIndex index, NodeIndex older) noexcept {
    TreeNode& n = node(index);
    RetainedLevel& level = *find_level(level_of(n));
    n.retained = true;
    n.older = older;
    n.newer = node(older).newer;
    (n.newer != none ? node(n.newer).older : level.newest) = index;
    node(older).newer = index;
  }

  /// Frees one slot of the least valuable cached node, or drops a node that holds none alone.
  /// False when nothing is cached.
  bool evict_one_slot() noexcept {
    for (const RetainedLevel& level : levels_) {
      if (level.oldest == none) continue;
      const NodeIndex victim = level.oldest;
      TreeNode& n = node(victim);
      const std::size_t used = stats_.used_slots;
      std::int32_t keep = n.length - end_offset(n);
      if (n.first_slot == n.last_slot) keep = 0;
      stats_.evicted_tokens += at(n.length - keep);
      notify(CacheEvent{CacheEvent::Kind::evicted, n.name_space, n.position + keep, n.length - keep,
                        n.last_slot});
      if (keep == 0)
        remove_node(victim);
      else
        release_places(victim, keep);
      stats_.evicted_slots += used - stats_.used_slots;
      return true;
    }
    return false;
  }

  /// Takes a node that nobody uses out of the tree.
  void remove_node(NodeIndex index) noexcept {
    TreeNode& n = node(index);
    if (n.retained) unretain(index);
    if (n.pins > 0)
      for (PinRecord& pin : pins_)
        if (pin.last == index) pin.last = n.parent;
    if (n.state == NodeState::published) unpublish(index, NodeState::hidden);
    release_places(index, 0);
    delete_node(index);
  }

  void notify(const CacheEvent& event) noexcept {
    if (event_sink_) event_sink_(event);
  }

  Allocator allocator_;
  TreeOptions options_;
  Retention retention_;
  std::vector<TreeNode> nodes_;
  NodeIndex free_nodes_ = none;
  std::vector<SlotRecord> slots_;
  std::vector<Token> tokens_;  // [slot][offset]
  ChildIndex index_;
  std::vector<SequenceRecord> sequences_;
  std::vector<PendingCopy> copies_;
  std::vector<SlotIndex> scratch_;
  std::vector<RetainedLevel> levels_;  // by level, ascending
  std::vector<PinRecord> pins_;
  std::size_t pinned_slots_ = 0;
  std::function<void(const CacheEvent&)> event_sink_;
  std::function<void(SlotIndex)> free_sink_;
  TreeStats stats_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
