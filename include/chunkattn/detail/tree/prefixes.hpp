// The paths that prompts can find, and what of them is kept when nobody uses it: publishing,
// splitting, retention, eviction, pins.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>

#include "../../tree_options.hpp"
#include "../base/array.hpp"
#include "../base/config.hpp"
#include "retention_rules.hpp"
#include "slots.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Tokens [begin, begin + length) of a path, from the root to a place in `last`.
struct Match {
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
      if (entry.node != none) place(entry);
  }

  void insert(std::uint32_t hash, NodeIndex node) noexcept {
    place({hash, node});
    ++size_;
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
    --size_;
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

  [[nodiscard]] std::size_t size() const noexcept { return size_; }

 private:
  struct Entry {
    std::uint32_t hash = 0;
    NodeIndex node = none;
  };

  void place(Entry entry) noexcept {
    const std::size_t mask = table_.size() - 1;
    std::size_t i = entry.hash & mask;
    while (table_[i].node != none) i = (i + 1) & mask;
    table_[i] = entry;
  }

  Array<Entry> table_;  // power of two, at most half full
  std::size_t size_ = 0;
};

class Prefixes {
 public:
  Prefixes(Topology& topology, Slots& slot_table, const Tokens& tokens, TreeOptions options,
           RetentionRules rules, TreeStats& stats)
      : topology_(topology),
        slots_(slot_table),
        tokens_(tokens),
        rules_(rules),
        unit_(options.sharing == Sharing::token ? 1 : topology.chunk.size),
        stats_(stats) {
    reserve_level(pinned_level);
  }

  /// Tokens that are shared or not as one: what a child is keyed by.
  [[nodiscard]] std::int32_t unit() const noexcept { return unit_; }
  [[nodiscard]] const RetentionRules& rules() const noexcept { return rules_; }

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
  [[nodiscard]] NodeIndex find_twin(const TreeNode& n) const {
    return find_child(n.parent, n.name_space, key_hash(n), [&](const TreeNode& c) {
      return tokens_.common(c.first_slot, c.begin, n.first_slot, n.begin, unit_) == unit_;
    });
  }

  void publish(NodeIndex n) noexcept {
    TreeNode& record = topology_.node(n);
    record.state = NodeState::published;
    record.hash = key_hash(record);
    index_.insert(record.hash, n);
  }
  void unpublish(NodeIndex n, NodeState state) noexcept {
    index_.erase(topology_.node(n).hash, n);
    topology_.node(n).state = state;
  }
  [[nodiscard]] std::size_t num_published() const noexcept { return index_.size(); }

  /// Leading tokens of `n` from `first` on that are those of `other` from its start, at most
  /// `count`.
  [[nodiscard]] std::int32_t common_length(const TreeNode& n, const TreeNode& other,
                                           std::int32_t count) const noexcept {
    std::int32_t common = 0;
    topology_.for_each_run(
        other, 0, std::min(count, n.length),
        [&](SlotIndex slot, std::int32_t offset, std::int32_t run, std::int32_t first) {
          topology_.for_each_run(
              n, first, run,
              [&](SlotIndex s, std::int32_t o, std::int32_t part, std::int32_t done) {
                const std::int32_t same = tokens_.common(s, o, slot, offset + done, part);
                common += same;
                return same == part;
              });
          return common == first + run;
        });
    return common;
  }

  // ---- nodes ---------------------------------------------------------------------------------

  /// Makes room for `count` new nodes, so that adding, splitting and publishing cannot fail.
  void reserve_nodes(std::size_t count) {
    index_.reserve(stats_.nodes + count);
    topology_.reserve(count);
  }
  /// True if `count` nodes can be made without allocating.
  [[nodiscard]] bool has_nodes(std::size_t count) const noexcept {
    return topology_.has_room(count) && index_.has_room(stats_.nodes + count);
  }

  /// Topology::split(); both halves keep their place in the index and in the retention list.
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
        lower.state = NodeState::hidden;
    }
    if (lower.retained) link_retained_after(upper_index, lower_index);
    return upper_index;
  }

  /// Takes a node that nobody uses out of the tree.
  /// \param active  whether its slots still count it as in use
  void remove(NodeIndex index, bool active = false) noexcept {
    TreeNode& n = topology_.node(index);
    if (n.retained) unretain(index);
    if (n.pins > 0)
      for (PinRecord& pin : pins_)
        if (pin.last == index) pin.last = n.parent;
    if (n.state == NodeState::published) unpublish(index, NodeState::hidden);
    topology_.release_places(index, 0, active);
    topology_.remove(index);
  }

  /// `count` slots, evicting what is cached where the budget is spent; see Slots::acquire().
  bool acquire(std::int32_t count) {
    return slots_.acquire(count, [this] { return evict_one_slot(); });
  }
  /// Gives back what was acquired and not needed.
  void release() noexcept { slots_.release(); }

  // ---- use of paths --------------------------------------------------------------------------

  /// A node that was only cached, if that, is in use.
  void activate(NodeIndex index) noexcept {
    TreeNode& n = topology_.node(index);
    if (n.retained) unretain(index);
    topology_.for_each_slot(n, [&](SlotIndex s) { slots_.set_active(s, true); });
  }
  /// The path to `last` has one more live sequence.
  void use_path(NodeIndex last) noexcept {
    for (NodeIndex n = last; n != none; n = topology_.node(n).parent) {
      if (!topology_.node(n).active()) activate(n);
      ++topology_.node(n).live;
    }
  }
  /// Undoes one use of a path by a live or held sequence, keeping or removing what nobody uses.
  void drop_path(NodeIndex last, std::int32_t TreeNode::* count) noexcept {
    const std::int32_t keep_end = rules_.retains ? written_end(last) : 0;
    for (NodeIndex n = last; n != none;) {
      TreeNode& record = topology_.node(n);
      const NodeIndex parent = record.parent;
      --(record.*count);
      if (!record.active() && n != root_node) keep_or_remove(n, keep_end);
      n = parent;
    }
  }
  /// Takes out a node that one sequence held, which goes on without it.
  void drop_duplicate(NodeIndex index) noexcept {
    topology_.node(index).held = 0;
    remove(index, /*active=*/true);
  }
  /// The first path position whose K/V is not written.
  [[nodiscard]] std::int32_t written_end(NodeIndex last) const noexcept {
    std::int32_t end = topology_.node(last).end();
    for (NodeIndex i = last; i != root_node; i = topology_.node(i).parent) {
      const TreeNode& n = topology_.node(i);
      if (n.written < n.length) end = n.position + n.written;
    }
    return end;
  }

  /// Calls f(node, tokens of it that matched) for the nodes of a match, last first.
  template <class F>
  void for_each_matched(const Match& match, const F& f) const {
    std::int32_t used = match.used;
    for (NodeIndex i = match.last; i != root_node;) {
      f(i, used);
      i = topology_.node(i).parent;
      used = topology_.node(i).length;
    }
  }
  /// Slots of a match for which is_counted(record), each once.
  template <class IsCounted>
  [[nodiscard]] std::size_t count_slots(const Match& match, const IsCounted& is_counted) const {
    std::size_t count = 0;
    for_each_matched(match, [&](NodeIndex i, std::int32_t used) {
      topology_.for_each_run(
          topology_.node(i), 0, used, [&](SlotIndex s, std::int32_t, std::int32_t, std::int32_t) {
            // A slot of several nodes of the path is counted with the last of them.
            if (is_counted(slots_[s]) && (slots_[s].nodes == 1 || !starts_below(match, i, s)))
              ++count;
            return true;
          });
    });
    return count;
  }

  // ---- eviction ------------------------------------------------------------------------------

  /// Makes sure that the level has a list, so that retaining cannot fail.
  void reserve_level(std::int64_t level) {
    const auto it = find_level(level);
    if (it == levels_.end() || it->level != level) levels_.insert(it, RetainedLevel{level});
  }

  /// Frees one slot of the least valuable cached node, or drops a node that holds none alone.
  /// False when nothing is cached.
  bool evict_one_slot() noexcept {
    for (const RetainedLevel& level : levels_) {
      if (level.oldest == none) continue;
      const NodeIndex victim = level.oldest;
      const TreeNode& n = topology_.node(victim);
      const std::size_t used = stats_.used_slots;
      std::int32_t keep = n.length - topology_.end_offset(n);
      if (n.first_slot == n.last_slot) keep = 0;
      stats_.evicted_tokens += at(n.length - keep);
      if (event_sink_)
        event_sink_({CacheEvent::Kind::evicted, n.name_space, n.position + keep, n.length - keep,
                     n.last_slot});
      if (keep == 0)
        remove(victim);
      else
        topology_.release_places(victim, keep);
      stats_.evicted_slots += used - stats_.used_slots;
      return true;
    }
    return false;
  }
  /// Evicts down to the low watermark where the high one is passed.
  void keep_to_watermarks() noexcept {
    if (!rules_.retains || stats_.used_slots <= rules_.budget.high_watermark) return;
    while (stats_.used_slots > rules_.budget.low_watermark && evict_one_slot()) {
    }
  }

  // ---- pins ----------------------------------------------------------------------------------

  /// Pins the path of a match, counted; the pin's index, or none where more than max_pinned slots
  /// would be pinned. reserve_pin() and reserve_nodes(1) come first.
  std::int32_t pin(Match match) noexcept {
    const std::size_t unpinned =
        count_slots(match, [](const SlotRecord& slot) { return slot.pinned == 0; });
    if (slots_.num_pinned() + unpinned > rules_.budget.max_pinned) return none;
    if (match.used < topology_.node(match.last).length) match.last = split(match.last, match.used);
    for (NodeIndex n = match.last; n != root_node; n = topology_.node(n).parent) change_pins(n, 1);
    std::int32_t pin = free_pin();
    if (pin == none) {
      pin = static_cast<std::int32_t>(pins_.size());
      pins_.push_back({});
    }
    pins_[at(pin)].last = match.last;
    return pin;
  }
  void reserve_pin() {
    if (free_pin() == none && pins_.size() == pins_.capacity()) pins_.reserve(2 * pins_.size() + 8);
  }
  void unpin(std::int32_t pin, std::uint32_t generation) noexcept {
    PinRecord& record = pins_[at(pin)];
    if (record.generation != generation || record.last == none) return;
    // Bottom-up: a parent must stay younger than its children.
    for (NodeIndex n = record.last; n != root_node; n = topology_.node(n).parent)
      change_pins(n, -1);
    record.last = none;
    ++record.generation;
  }
  void unpin_all() noexcept {
    for (std::size_t i = 0; i < pins_.size(); ++i)
      unpin(static_cast<std::int32_t>(i), pins_[i].generation);
  }
  [[nodiscard]] std::uint32_t pin_generation(std::int32_t pin) const noexcept {
    return pins_[at(pin)].generation;
  }
  /// Tokens that the pin still holds: fewer than at first where even pinned chunks were evicted.
  [[nodiscard]] std::int32_t pinned_length(std::int32_t pin,
                                           std::uint32_t generation) const noexcept {
    const PinRecord& record = pins_[at(pin)];
    const bool holds = record.generation == generation && record.last != none;
    return holds ? topology_.node(record.last).end() : 0;
  }

  void set_event_sink(std::function<void(const CacheEvent&)> sink) {
    event_sink_ = std::move(sink);
  }
  void notify_cleared() noexcept {
    if (event_sink_) event_sink_({.kind = CacheEvent::Kind::cleared});
  }

 private:
  friend class TreeInspector;

  /// Whether a node of the match below `n` begins in this slot.
  [[nodiscard]] bool starts_below(const Match& match, NodeIndex n, SlotIndex slot) const noexcept {
    for (NodeIndex i = match.last; i != n; i = topology_.node(i).parent)
      if (topology_.node(i).first_slot == slot) return true;
    return false;
  }

  /// Above whatever a policy says.
  static constexpr std::int64_t pinned_level = std::numeric_limits<std::int64_t>::max();

  struct RetainedLevel {
    std::int64_t level = 0;
    NodeIndex oldest = none, newest = none;
  };

  [[nodiscard]] std::uint32_t key_hash(
      const TreeNode& n) const noexcept {  // a key lies in one slot
    return finish_hash(
        tokens_.hash(hash_seed(n.parent, n.name_space), n.first_slot, n.begin, unit_));
  }

  [[nodiscard]] static std::int64_t level_of(const TreeNode& n) noexcept {
    return n.pins > 0 ? pinned_level : n.level;
  }
  RetainedLevel* find_level(std::int64_t level) noexcept {
    return std::lower_bound(
        levels_.begin(), levels_.end(), level,
        [](const RetainedLevel& l, std::int64_t value) { return l.level < value; });
  }

  /// Nobody uses the node any more: what of it is written stays as cache, if anything may.
  void keep_or_remove(NodeIndex index, std::int32_t keep_end) noexcept {
    TreeNode& n = topology_.node(index);
    std::int32_t keep = 0;
    if (n.state == NodeState::published && n.position < keep_end)
      keep = std::min(n.written, keep_end - n.position);
    if (unit_ > 1) keep -= keep % unit_;
    if (keep == 0) return remove(index, /*active=*/true);
    topology_.for_each_slot(n, [&](SlotIndex s) { slots_.set_active(s, false); });
    if (keep < n.length) topology_.release_places(index, keep);
    retain(index);
    if (event_sink_)
      event_sink_({CacheEvent::Kind::stored, n.name_space, n.position, n.length, n.first_slot});
  }

  /// Puts a node at the young end of its level. Children are retained before their parents, so the
  /// oldest node of the lowest level is always a leaf.
  void retain(NodeIndex index) noexcept {
    TreeNode& n = topology_.node(index);
    RetainedLevel& level = *find_level(level_of(n));
    n.retained = true;
    n.older = level.newest;
    n.newer = none;
    (n.older != none ? topology_.node(n.older).newer : level.oldest) = index;
    level.newest = index;
  }
  void unretain(NodeIndex index) noexcept {
    TreeNode& n = topology_.node(index);
    RetainedLevel& level = *find_level(level_of(n));
    (n.older != none ? topology_.node(n.older).newer : level.oldest) = n.newer;
    (n.newer != none ? topology_.node(n.newer).older : level.newest) = n.older;
    n.retained = false;
    n.older = n.newer = none;
  }
  void link_retained_after(NodeIndex index, NodeIndex older) noexcept {
    TreeNode& n = topology_.node(index);
    RetainedLevel& level = *find_level(level_of(n));
    n.retained = true;
    n.older = older;
    n.newer = topology_.node(older).newer;
    (n.newer != none ? topology_.node(n.newer).older : level.newest) = index;
    topology_.node(older).newer = index;
  }

  [[nodiscard]] std::int32_t free_pin() const noexcept {
    for (std::size_t i = 0; i < pins_.size(); ++i)
      if (pins_[i].last == none) return static_cast<std::int32_t>(i);
    return none;
  }
  /// Moves the node to the young end even where it stays pinned: a parent must stay younger than
  /// the child that was moved just before it.
  void change_pins(NodeIndex index, std::int32_t by) noexcept {
    TreeNode& n = topology_.node(index);
    const bool retained = n.retained, was_pinned = n.pins > 0;
    if (retained) unretain(index);
    n.pins += by;
    if (was_pinned != (n.pins > 0))
      topology_.for_each_slot(n, [&](SlotIndex s) { slots_.count_pin(s, was_pinned ? -1 : 1); });
    if (retained) retain(index);
  }

  Topology& topology_;
  Slots& slots_;
  const Tokens& tokens_;
  RetentionRules rules_;
  std::int32_t unit_;
  TreeStats& stats_;
  ChildIndex index_;
  Array<RetainedLevel> levels_;  // by level, ascending
  Array<PinRecord> pins_;
  std::function<void(const CacheEvent&)> event_sink_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
