// Retention: what stays cached of paths that no sequence uses; eviction, pins. EvictionOrder is the
// hook by which a component chooses what is evicted next, where a policy wants more than levels and
// ages (cache/policy.hpp).
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string_view>
#include <utility>

#include "../../tree_options.hpp"
#include "../support/array.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"
#include "chunk_table.hpp"
#include "prefixes.hpp"
#include "retained_lists.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// What a policy answered, checked. Its next answer may be another one, so it is asked once for
/// each decision, before anything changes, and the answer is carried.
template <std::integral To, class Answer>
[[nodiscard]] To checked_answer(std::string_view question, const Answer& answer, To least, To most,
                                const char* expected) {
  const auto number = +answer;
  static_assert(std::integral<decltype(number)>, "a policy answers with whole numbers");
  check_argument(std::cmp_greater_equal(number, least) && std::cmp_less_equal(number, most),
                 question, number, expected);
  return static_cast<To>(number);
}

/// Options with both watermarks.
/// \throws InvalidArgument where they cross, or the high one is missing
[[nodiscard]] inline RetentionOptions checked_options(RetentionOptions options) {
  constexpr std::size_t unset = RetentionOptions::no_watermark;
  check_argument(options.low_watermark == unset || options.high_watermark != unset, "low_watermark",
                 options.low_watermark, "none without high_watermark");
  if (options.low_watermark == unset) options.low_watermark = options.high_watermark;
  check_argument(options.low_watermark <= options.high_watermark, "low_watermark",
                 options.low_watermark, {"at most high_watermark, ", options.high_watermark});
  return options;
}
/// Of a policy without the order that learning and shares need.
inline void check_plain(const RetentionOptions& options) {
  constexpr const char* expected =
      "false, or a tree with CachePolicy of chunkattn/cache/policy.hpp";
  check_argument(!options.learns, "learns", true, expected);
  check_argument(!options.fair, "fair", true, expected);
}

/// Lists of cached nodes other than one per level, and which leaf of them goes. Pinned nodes have a
/// list of their own, which Retention keeps.
class EvictionOrder {
 public:
  virtual ~EvictionOrder() = default;

  /// The key of the list that a node that is not pinned belongs to.
  [[nodiscard]] virtual std::int64_t key_of(const TreeNode& n) const noexcept = 0;
  /// That list.
  [[nodiscard]] virtual RetainedList& list_of(const TreeNode& n) noexcept = 0;
  /// A node that is not pinned gets into its list, or out of it. Returns list_of().
  [[nodiscard]] virtual RetainedList& on_listed(const TreeNode& n) noexcept = 0;
  [[nodiscard]] virtual RetainedList& on_unlisted(const TreeNode& n) noexcept = 0;

  /// A node is used no longer; it is about to be listed.
  virtual void on_unused(TreeNode& n) noexcept = 0;
  /// A node that was cached is used again; it was taken out of its list.
  virtual void on_used(NodeIndex n) noexcept = 0;
  /// The slots of a victim after the first `keep` are about to be evicted.
  virtual void on_evict(const TreeNode& n, std::int32_t keep) noexcept = 0;
  /// Pins come or go.
  virtual void on_pins() noexcept = 0;
  /// Until it is false again, nothing happens but evictions.
  virtual void set_evicts_many(bool many) noexcept = 0;

  /// The leaf that is evicted next; none where nothing is cached.
  [[nodiscard]] virtual NodeIndex victim() noexcept = 0;
  /// One that goes because its tenant has more than may be; or none.
  [[nodiscard]] virtual NodeIndex victim_above_quota() noexcept = 0;
  /// For tests: whether what it counts is what is counted again.
  [[nodiscard]] virtual bool is_consistent() const = 0;
};

/// Which paths are used, and what is kept of those that are not. What needs chunks asks here, since
/// here is what can be evicted for them.
class Retention {
 public:
  Retention(Topology& topology, ChunkTable& chunk_table, Prefixes& prefixes,
            const RetentionOptions& options, TreeStats& stats)
      : topology_(topology),
        chunks_(chunk_table),
        prefixes_(prefixes),
        options_(checked_options(options)),
        stats_(stats),
        keeps_to_peak_(options.retains &&
                       options.high_watermark == RetentionOptions::no_watermark &&
                       chunk_table.allocator().capacity() >= max_pool_chunks) {
    lists_.reserve(RetainedList::key_of_pinned, 1);
  }

  [[nodiscard]] const RetentionOptions& options() const noexcept { return options_; }
  [[nodiscard]] EvictionOrder* order() const noexcept { return order_.get(); }
  void set_order(std::unique_ptr<EvictionOrder> order) noexcept { order_ = std::move(order); }
  /// For an order.
  [[nodiscard]] RetainedLists& lists() noexcept { return lists_; }

  // ---- nodes and chunks -----------------------------------------------------------------------

  /// Topology::split(); both halves keep their place in the index and in the retention list.
  NodeIndex split(NodeIndex lower, std::int32_t keep) noexcept {
    const NodeIndex upper = prefixes_.split(lower, keep);
    if (topology_.node(lower).retained) link(list_of(topology_.node(upper)), upper, lower);
    return upper;
  }

  /// Takes a node out of the tree that nothing below it and no sequence needs.
  void remove(NodeIndex index) noexcept {
    TreeNode& n = topology_.node(index);
    if (n.retained) unretain(index);
    if (n.pins > 0) std::replace(pins_.begin(), pins_.end(), index, n.parent);
    topology_.release_slots(index, 0);  // observers still see whether prompts found it
    if (n.state == NodeState::published) prefixes_.unpublish(index, NodeState::unpublished);
    topology_.remove(index);
  }

  /// `count` chunks, evicting what is cached where the budget is spent; see ChunkTable::acquire().
  bool acquire(std::int32_t count) {
    if (keeps_to_peak_ && count > 0) evict_to_peak(to_size(count));
    return chunks_.acquire(count, [this] { return evict_one_chunk(); });
  }

  /// `count` more slots at the end of a live tail; false, and nothing changed, where the budget is
  /// spent.
  bool grow_tail(NodeIndex index, std::int32_t count) {
    TreeNode& tail = topology_.node(index);
    if (tail.length > 0 && count <= topology_.geometry.size - topology_.end_offset(tail)) {
      tail.length += count;  // a tail that holds tokens owns the slots after them
      stats_.stored_tokens += to_size(count);
      return true;
    }
    if (!acquire(topology_.geometry.chunks_for(count - topology_.room(tail)))) {
      ++stats_.failed_adds;
      return false;
    }
    topology_.extend(index, count);
    chunks_.release();
    return true;
  }

  // ---- use of paths --------------------------------------------------------------------------

  /// A node that was only cached, if that, is in use.
  void activate(NodeIndex index) noexcept {
    TreeNode& n = topology_.node(index);
    if (n.retained) {
      unretain(index);
      if (order_) [[unlikely]]
        order_->on_used(index);
    }
    topology_.set_active(n, true);
  }
  /// The path to `last` has one more live sequence.
  void use_path(NodeIndex last) noexcept {
    for (NodeIndex n = last; n != none; n = topology_.node(n).parent) {
      if (!topology_.node(n).active()) activate(n);
      ++topology_.node(n).live;
    }
  }
  /// Undoes one use of a path by a live or held sequence, keeping or removing what is unused.
  void drop_path(NodeIndex last, std::int32_t TreeNode::* count) noexcept {
    const std::int32_t keep_end = options_.retains ? topology_.written_end(last) : 0;
    for (NodeIndex n = last; n != none;) {
      TreeNode& record = topology_.node(n);
      const NodeIndex parent = record.parent;
      if (record.live + record.held > 1 || n == root_node)
        --(record.*count);
      else
        keep_or_remove(n, keep_end);
      n = parent;
    }
  }

  // ---- eviction ------------------------------------------------------------------------------

  /// Makes sure that the level has a list, so that retaining cannot fail. An order has done so for
  /// its own lists.
  void reserve_level(std::int64_t level) {
    if (!order_) lists_.reserve(level * RetainedList::keys_per_level, 1);
  }

  /// Why what is being evicted goes, for observers.
  [[nodiscard]] EvictionCause cause() const noexcept { return cause_; }
  /// Frees one chunk of the least valuable cached node, or drops a node that holds none alone.
  /// False when nothing is cached.
  bool evict_one_chunk(EvictionCause cause = EvictionCause::space) noexcept {
    const NodeIndex victim = order_ ? order_->victim() : lists_.lowest().oldest;
    if (victim != none) evict_end_of(victim, cause);
    return victim != none;
  }
  /// Evicts down to the low watermark where the high one is passed, but nothing that is pinned.
  void keep_to_watermarks() noexcept {
    if (order_) [[unlikely]]
      for (NodeIndex n; (n = order_->victim_above_quota()) != none;)
        evict_end_of(n, EvictionCause::quota);
    if (!options_.retains || stats_.used_chunks <= options_.high_watermark) return;
    if (order_) order_->set_evicts_many(true);
    while (stats_.used_chunks > options_.low_watermark &&
           evict_unpinned_chunk(EvictionCause::watermark)) {
    }
    if (order_) order_->set_evicts_many(false);
  }

  /// Evicts until at most `chunks` chunks are used, or nothing but pinned ones is cached. Returns
  /// the chunks that were freed.
  std::size_t trim(std::size_t chunks) noexcept {
    const std::size_t before = stats_.evicted_chunks;
    while (stats_.used_chunks > chunks && evict_unpinned_chunk(EvictionCause::trim)) {
    }
    // Afterwards an unlimited pool grows again only as live sequences need it.
    live_peak_ = (std::min)(live_peak_, (std::max)(chunks, stats_.used_chunks));
    return stats_.evicted_chunks - before;
  }

  /// Evicts what was unused for the policy's ttl. Returns its tokens.
  std::size_t expire(std::uint64_t now) {
    check_argument(now >= time_, "now", now, {"at least ", time_, ", the last one"});
    // Until now no node was older than the ttl, so that ages fit in the 32 bits of a node.
    const std::uint64_t passed = (std::min<std::uint64_t>)(now - time_, options_.ttl);
    const std::uint64_t before = stats_.evicted_tokens;
    // Parents go after their children.
    for (bool again = options_.ttl > 0; std::exchange(again, false);)
      for (const RetainedList& list : lists_)
        while (list.key != RetainedList::key_of_pinned && has_expired(list.oldest, passed)) {
          evict_end_of(list.oldest, EvictionCause::ttl);
          again = true;
        }
    time_ = now;
    return stats_.evicted_tokens - before;
  }

  // ---- pins ----------------------------------------------------------------------------------

  /// Pins the path of a match, counted; the pin's index, or none where more than max_pinned chunks
  /// would be pinned.
  std::int32_t pin(PathMatch match) {
    prefixes_.reserve_nodes(1);
    pins_.reserve_more(1);
    free_pins_.reserve(pins_.capacity());
    const std::size_t unpinned = prefixes_.count_unpinned_chunks(match);
    if (chunks_.num_pinned() + unpinned > options_.max_pinned) return none;
    if (match.used < topology_.node(match.last).length) match.last = split(match.last, match.used);
    for (NodeIndex n = match.last; n != root_node; n = topology_.node(n).parent) change_pins(n, 1);
    if (free_pins_.empty()) {
      free_pins_.push_back(static_cast<std::int32_t>(pins_.size()));
      pins_.push_back(none);
    }
    const std::int32_t pin = free_pins_.back();
    free_pins_.pop_back();
    pins_[to_size(pin)] = match.last;
    notify_pin(match.last);
    return pin;
  }
  /// The pin's handle is gone.
  void unpin(std::int32_t pin) noexcept {
    end_pin(pins_[to_size(pin)]);
    free_pins_.push_back(pin);
  }
  /// Ends all pins; each keeps its index until unpin().
  void unpin_all() noexcept {
    for (NodeIndex& last : pins_) end_pin(last);
  }
  /// The last node of a pinned path; none: it is not pinned any more.
  [[nodiscard]] NodeIndex pinned(std::int32_t pin) const noexcept { return pins_[to_size(pin)]; }

 private:
  friend class TreeInspector;

  /// Before live sequences take `count` chunks from a pool without a limit: evicts until use stays
  /// within their highest use so far, and what is pinned.
  void evict_to_peak(std::size_t count) noexcept {
    const std::size_t live = stats_.used_chunks - stats_.retained_chunks;
    live_peak_ = (std::max)(live_peak_, live + count);
    while (stats_.used_chunks + count > live_peak_ + chunks_.num_pinned() && evict_one_chunk()) {
    }
  }

  /// As evict_one_chunk(); false, too, where only pinned nodes are left.
  bool evict_unpinned_chunk(EvictionCause cause) noexcept {
    return lists_.lowest().key != RetainedList::key_of_pinned && evict_one_chunk(cause);
  }

  /// The one that the node is in, or gets into.
  [[nodiscard]] RetainedList& list_of(const TreeNode& n) noexcept {
    if (n.pins > 0) return lists_.back();
    return order_ ? order_->list_of(n) : lists_.at(n.level * RetainedList::keys_per_level, 0);
  }

  /// The last sequence that uses the node goes: keeps its written tokens as cache, or removes it.
  void keep_or_remove(NodeIndex index, std::int32_t keep_end) noexcept {
    TreeNode& n = topology_.node(index);
    std::int32_t keep = 0;
    if (n.state == NodeState::published && n.position < keep_end)
      keep = (std::min)(n.written, keep_end - n.position);
    keep -= keep % prefixes_.unit();
    if (keep == 0) return remove(index);
    if (keep < n.length) topology_.release_slots(index, keep);
    n.live = n.held = 0;
    topology_.set_active(n, false);
    if (order_) [[unlikely]]
      order_->on_unused(n);
    retain(index);
  }

  [[nodiscard]] bool has_expired(NodeIndex n, std::uint64_t passed) const noexcept {
    return n != none && topology_.node(n).first_child == none &&
           (static_cast<std::uint32_t>(time_) - topology_.node(n).reuse.since) + passed >=
               options_.ttl;
  }
  /// Puts a node at the young end of its level. Children are retained before their parents, so the
  /// oldest node of the lowest level is always a leaf.
  void retain(NodeIndex index) noexcept {
    TreeNode& n = topology_.node(index);
    RetainedList& list = order_ && n.pins == 0 ? order_->on_listed(n) : list_of(n);
    if (list.oldest == none) lists_.queue(list);
    if (options_.ttl > 0) n.reuse.since = static_cast<std::uint32_t>(time_);
    link(list, index, list.newest);
  }
  CHUNKATTN_INLINE void unretain(NodeIndex index) noexcept {
    TreeNode& n = topology_.node(index);
    RetainedList& list = order_ && n.pins == 0 ? order_->on_unlisted(n) : list_of(n);
    if (list.hand == index) list.hand = n.newer;
    (n.older != none ? topology_.node(n.older).newer : list.oldest) = n.newer;
    (n.newer != none ? topology_.node(n.newer).older : list.newest) = n.older;
    n.retained = false;
  }
  /// Puts a node into its list, after `older`, or first where that is none.
  void link(RetainedList& list, NodeIndex index, NodeIndex older) noexcept {
    TreeNode& n = topology_.node(index);
    NodeIndex& next = older != none ? topology_.node(older).newer : list.oldest;
    n.retained = true;
    n.older = older;
    n.newer = std::exchange(next, index);
    (n.newer != none ? topology_.node(n.newer).older : list.newest) = index;
  }

  /// Frees the last chunk of a leaf that is retained, or drops it if it has none alone.
  void evict_end_of(NodeIndex victim, EvictionCause cause) noexcept {
    TreeNode& n = topology_.node(victim);
    cause_ = cause;
    const std::size_t used = stats_.used_chunks;
    std::int32_t keep = n.length - topology_.end_offset(n);
    if (n.first_chunk == n.last_chunk) keep = 0;
    stats_.evicted_tokens += to_size(n.length - keep);
    if (order_) [[unlikely]]
      order_->on_evict(n, keep);
    if (keep == 0)
      remove(victim);
    else
      topology_.release_slots(victim, keep);
    stats_.evicted_chunks += used - stats_.used_chunks;
  }

  void end_pin(NodeIndex& last) noexcept {
    if (last == none) return;
    // Bottom-up: a parent must stay younger than its children.
    for (NodeIndex n = last; n != root_node; n = topology_.node(n).parent) change_pins(n, -1);
    notify_pin(last);
    last = none;
  }
  void notify_pin(NodeIndex last) const noexcept {
    topology_.observers.notify([=](NodeObserver& observer) { observer.on_pin(last); });
  }
  /// Moves the node to the young end even where it stays pinned: a parent must stay younger than
  /// the child that was moved just before it.
  void change_pins(NodeIndex index, std::int32_t by) noexcept {
    TreeNode& n = topology_.node(index);
    const bool retained = n.retained, was_pinned = n.pins > 0;
    if (order_) order_->on_pins();
    if (retained) unretain(index);
    n.pins += by;
    if (was_pinned != (n.pins > 0))
      topology_.for_each_chunk(n, [&](ChunkIndex s) { chunks_.count_pin(s, was_pinned ? -1 : 1); });
    if (retained) retain(index);
  }

  Topology& topology_;
  ChunkTable& chunks_;
  Prefixes& prefixes_;
  const RetentionOptions options_;
  TreeStats& stats_;
  RetainedLists lists_;
  Array<NodeIndex> pins_;                 // the last node of each pinned path; none: of no path
  Array<std::int32_t> free_pins_;         // indices of pins without a handle
  std::unique_ptr<EvictionOrder> order_;  // of a component's policy; else by level and age
  std::uint64_t time_ = 0;                // by the caller's clock
  EvictionCause cause_ = EvictionCause::space;
  const bool keeps_to_peak_;   // the pool has no limit, and the policy sets none
  std::size_t live_peak_ = 0;  // chunks that live sequences have had at once
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
