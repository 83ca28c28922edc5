// What is kept of paths that nobody uses: retention by level, eviction, pins.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "../../tree_options.hpp"
#include "../base/array.hpp"
#include "../base/check.hpp"
#include "../base/config.hpp"
#include "../base/to_size.hpp"
#include "chunk_table.hpp"
#include "prefixes.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// The numbers of a policy, in chunks.
struct RetentionBudget {
  std::size_t high_watermark = std::numeric_limits<std::size_t>::max();
  std::size_t low_watermark = std::numeric_limits<std::size_t>::max();
  std::size_t max_pinned = 0;
};

/// What the tree keeps of a policy: levels are worked out where a sequence joins.
struct RetentionRules {
  bool retains = false;
  RetentionBudget budget{};
};

/// Throws InvalidArgument for watermarks that cross.
template <RetentionPolicy R>
[[nodiscard]] RetentionRules rules_of(const R& policy) {
  RetentionRules rules{R::retains,
                       {policy.high_watermark, policy.low_watermark, policy.max_pinned}};
  if (rules.budget.low_watermark == RetentionBudget{}.low_watermark)
    rules.budget.low_watermark = rules.budget.high_watermark;
  check_argument(rules.budget.low_watermark <= rules.budget.high_watermark, "low_watermark",
                 rules.budget.low_watermark,
                 {"at most high_watermark, ", rules.budget.high_watermark});
  return rules;
}

/// A pinned path, from the root to `last`; none: the record is free.
struct PinRecord {
  NodeIndex last = none;
  std::uint32_t generation = 0;
};

/// Which paths are used, and what is kept of those that are not. What needs chunks asks here, since
/// here is what can be evicted for them.
class Retention {
 public:
  Retention(Topology& topology, ChunkTable& chunk_table, Prefixes& prefixes, RetentionRules rules,
            TreeStats& stats)
      : topology_(topology),
        chunks_(chunk_table),
        prefixes_(prefixes),
        rules_(rules),
        stats_(stats) {
    reserve_level(pinned_level);
  }

  [[nodiscard]] const RetentionRules& rules() const noexcept { return rules_; }

  // ---- nodes and chunks -----------------------------------------------------------------------

  /// Topology::split(); both halves keep their place in the index and in the retention list.
  NodeIndex split(NodeIndex lower, std::int32_t keep) noexcept {
    const NodeIndex upper = prefixes_.split(lower, keep);
    if (topology_.node(lower).retained) link_retained_after(upper, lower);
    return upper;
  }

  /// Takes a node that nobody uses out of the tree.
  /// \param active  whether its chunks still count it as in use
  void remove(NodeIndex index, bool active = false) noexcept {
    TreeNode& n = topology_.node(index);
    if (n.retained) unretain(index);
    if (n.pins > 0)
      for (PinRecord& pin : pins_)
        if (pin.last == index) pin.last = n.parent;
    prefixes_.news.evicted(index, 0);
    if (n.state == NodeState::published) prefixes_.unpublish(index, NodeState::hidden);
    topology_.release_places(index, 0, active);
    topology_.remove(index);
  }

  /// `count` chunks, evicting what is cached where the budget is spent; see ChunkTable::acquire().
  bool acquire(std::int32_t count) {
    return chunks_.acquire(count, [this] { return evict_one_chunk(); });
  }
  /// Gives back what was acquired and not needed.
  void release() noexcept { chunks_.release(); }

  /// `count` more places at the end of a live tail; false, and nothing changed, where the budget is
  /// spent.
  bool grow_tail(NodeIndex index, std::int32_t count) {
    TreeNode& tail = topology_.node(index);
    if (tail.length > 0 && count <= topology_.geometry.size - topology_.end_offset(tail)) {
      tail.length += count;  // a tail that holds tokens owns the places behind them
      stats_.stored_tokens += to_size(count);
      return true;
    }
    if (!acquire(topology_.geometry.chunks_for(count - topology_.room(tail)))) {
      ++stats_.failed_adds;
      return false;
    }
    topology_.extend(index, count);
    release();
    return true;
  }
  /// Publishes a node of generated tokens, of which the first `count` can be found.
  void publish_generated(NodeIndex index, std::int32_t count) noexcept {
    stats_.published_tokens += to_size(count);
    prefixes_.publish(index);
    prefixes_.news.stored(index);
  }

  // ---- use of paths --------------------------------------------------------------------------

  /// A node that was only cached, if that, is in use.
  void activate(NodeIndex index) noexcept {
    TreeNode& n = topology_.node(index);
    if (n.retained) unretain(index);
    topology_.for_each_chunk(n, [&](ChunkIndex s) { chunks_.set_active(s, true); });
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
    const std::int32_t keep_end = rules_.retains ? topology_.written_end(last) : 0;
    for (NodeIndex n = last; n != none;) {
      TreeNode& record = topology_.node(n);
      const NodeIndex parent = record.parent;
      --(record.*count);
      if (!record.active() && n != root_node) keep_or_remove(n, keep_end);
      n = parent;
    }
  }
  /// Takes out a node that one sequence held, which goes on in an equal one.
  void drop_duplicate(NodeIndex index) noexcept {
    stats_.merged_tokens += to_size(topology_.node(index).length);
    topology_.node(index).held = 0;
    remove(index, /*active=*/true);
  }

  // ---- eviction ------------------------------------------------------------------------------

  /// Makes sure that the level has a list, so that retaining cannot fail.
  void reserve_level(std::int64_t level) {
    const auto it = find_level(level);
    if (it == levels_.end() || it->level != level) levels_.insert(it, RetainedLevel{level});
  }

  /// Frees one chunk of the least valuable cached node, or drops a node that holds none alone.
  /// False when nothing is cached.
  bool evict_one_chunk() noexcept {
    for (const RetainedLevel& level : levels_) {
      if (level.oldest == none) continue;
      const NodeIndex victim = level.oldest;
      const TreeNode& n = topology_.node(victim);
      const std::size_t used = stats_.used_chunks;
      std::int32_t keep = n.length - topology_.end_offset(n);
      if (n.first_chunk == n.last_chunk) keep = 0;
      stats_.evicted_tokens += to_size(n.length - keep);
      prefixes_.news.evicted(victim, keep);
      if (keep == 0)
        remove(victim);
      else
        topology_.release_places(victim, keep);
      stats_.evicted_chunks += used - stats_.used_chunks;
      return true;
    }
    return false;
  }
  /// Evicts down to the low watermark where the high one is passed.
  void keep_to_watermarks() noexcept {
    if (!rules_.retains || stats_.used_chunks <= rules_.budget.high_watermark) return;
    while (stats_.used_chunks > rules_.budget.low_watermark && evict_one_chunk()) {
    }
  }

  // ---- pins ----------------------------------------------------------------------------------

  /// Pins the path of a match, counted; the pin's index, or none where more than max_pinned chunks
  /// would be pinned. reserve_pin() and reserve_nodes(1) come first.
  std::int32_t pin(Match match) noexcept {
    const std::size_t unpinned =
        prefixes_.count_chunks(match, [](const ChunkRecord& chunk) { return chunk.pinned == 0; });
    if (chunks_.num_pinned() + unpinned > rules_.budget.max_pinned) return none;
    if (match.used < topology_.node(match.last).length) match.last = split(match.last, match.used);
    for (NodeIndex n = match.last; n != root_node; n = topology_.node(n).parent) change_pins(n, 1);
    std::int32_t pin = free_pin();
    if (pin == none) {
      pin = static_cast<std::int32_t>(pins_.size());
      pins_.push_back({});
    }
    pins_[to_size(pin)].last = match.last;
    return pin;
  }
  void reserve_pin() {
    if (free_pin() == none && pins_.size() == pins_.capacity()) pins_.reserve(2 * pins_.size() + 8);
  }
  void unpin(std::int32_t pin, std::uint32_t generation) noexcept {
    PinRecord& record = pins_[to_size(pin)];
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
    return pins_[to_size(pin)].generation;
  }
  /// Tokens that the pin still holds: fewer than at first where even pinned chunks were evicted.
  [[nodiscard]] std::int32_t pinned_length(std::int32_t pin,
                                           std::uint32_t generation) const noexcept {
    const PinRecord& record = pins_[to_size(pin)];
    const bool holds = record.generation == generation && record.last != none;
    return holds ? topology_.node(record.last).end() : 0;
  }

 private:
  friend class TreeInspector;

  /// Above whatever a policy says.
  static constexpr std::int64_t pinned_level = std::numeric_limits<std::int64_t>::max();

  struct RetainedLevel {
    std::int64_t level = 0;
    NodeIndex oldest = none, newest = none;
  };

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
    if (prefixes_.unit() > 1) keep -= keep % prefixes_.unit();
    if (keep == 0) return remove(index, /*active=*/true);
    prefixes_.news.evicted(index, keep);
    topology_.for_each_chunk(n, [&](ChunkIndex s) { chunks_.set_active(s, false); });
    if (keep < n.length) topology_.release_places(index, keep);
    retain(index);
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
      topology_.for_each_chunk(n, [&](ChunkIndex s) { chunks_.count_pin(s, was_pinned ? -1 : 1); });
    if (retained) retain(index);
  }

  Topology& topology_;
  ChunkTable& chunks_;
  Prefixes& prefixes_;
  const RetentionRules rules_;
  TreeStats& stats_;
  Array<RetainedLevel> levels_;  // by level, ascending
  Array<PinRecord> pins_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
