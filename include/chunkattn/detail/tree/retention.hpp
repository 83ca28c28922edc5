// What is kept of paths that nobody uses: retention by level, eviction, pins.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "../../tree_options.hpp"
#include "../base/check.hpp"
#include "../base/config.hpp"
#include "../base/pin_table.hpp"
#include "../base/retained_lists.hpp"
#include "../base/retention_rules.hpp"
#include "../base/reuse_model.hpp"
#include "../base/tenant_shares.hpp"
#include "../base/to_size.hpp"
#include "chunk_table.hpp"
#include "prefixes.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

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
        stats_(stats),
        model_(rules.learns ? std::make_unique<ReuseModel>() : nullptr),
        shares_(rules.shares ? std::make_unique<TenantShares>() : nullptr),
        judges_(rules.learns || rules.shares) {
    lists_.reserve(RetainedList::key_of_pinned, 1);
  }

  [[nodiscard]] const RetentionRules& rules() const noexcept { return rules_; }
  [[nodiscard]] const TenantShares* shares() const noexcept { return shares_.get(); }

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
    prefixes_.news.evicted(n, 0);
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
    if (n.retained) {
      unretain(index);
      if (model_) [[unlikely]] {
        if (index == victim_) victim_ = none;
        n.set_reuse(used_again(n.reuse(), chunks_of(n.length)));
      }
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
  void reserve_level(std::int64_t level, std::uint64_t tenant, const TenantTerms& terms) {
    if (shares_) [[unlikely]] {
      shares_->reserve(tenant, terms);
      lists_.reserve(level * RetainedList::keys_per_level, num_groups());  // of what is public
      level += RetainedList::keys_of(shares_->index_of({.tenant = tenant})) >> 5;
    }
    lists_.reserve(level * RetainedList::keys_per_level, num_groups());
    if (model_) model_->ghosts.reserve(ghosts_per_chunk * stats_.used_chunks);
  }

  /// Frees one chunk of the least valuable cached node, or drops a node that holds none alone.
  /// False when nothing is cached.
  bool evict_one_chunk() noexcept {
    return evict_one_chunk(shares_ ? lists_of_richest() : lists_.begin());
  }
  /// Evicts down to the low watermark where the high one is passed.
  void keep_to_watermarks() noexcept {
    if (shares_) keep_to_quotas();
    if (!rules_.retains || stats_.used_chunks <= rules_.budget.high_watermark) return;
    evicts_many_ = true;
    while (stats_.used_chunks > rules_.budget.low_watermark && evict_one_chunk()) {
    }
    evicts_many_ = false;
    weighed_ = nullptr;
  }

  /// Evicts what nobody used for the policy's ttl. Returns its tokens.
  std::size_t expire(std::uint64_t now) {
    check_argument(now >= time_, "now", now, {"at least ", time_, ", as it was told before"});
    // Until now nobody was older than the ttl, so that ages fit in the 32 bits of a node.
    const std::uint64_t passed = std::min<std::uint64_t>(now - time_, rules_.ttl);
    const std::uint64_t before = stats_.evicted_tokens;
    for (bool again = rules_.ttl > 0; std::exchange(again, false);)  // parents after their children
      for (const RetainedList& list : lists_)
        while (list.key != RetainedList::key_of_pinned && has_expired(list.oldest, passed))
          again = evict_end_of(list.oldest);
    time_ = now;
    return static_cast<std::size_t>(stats_.evicted_tokens - before);
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
    return pins_.add(match.last);
  }
  void reserve_pin() { pins_.reserve(); }
  void unpin(std::int32_t pin, std::uint32_t generation) noexcept {
    if (PinRecord* const record = pins_.find(pin, generation)) unpin(*record);
  }
  void unpin_all() noexcept {
    for (PinRecord& pin : pins_)
      if (pin.last != none) unpin(pin);
  }
  [[nodiscard]] std::uint32_t pin_generation(std::int32_t pin) const noexcept {
    return pins_[pin].generation;
  }
  /// Tokens that the pin still holds: fewer than at first where even pinned chunks were evicted.
  [[nodiscard]] std::int32_t pinned_length(std::int32_t pin,
                                           std::uint32_t generation) const noexcept {
    const PinRecord& record = pins_[pin];
    const bool holds = record.generation == generation && record.last != none;
    return holds ? topology_.node(record.last).end() : 0;
  }

  // ---- learning ------------------------------------------------------------------------------

  [[nodiscard]] bool learns() const noexcept { return model_ != nullptr; }
  /// A sequence has joined; of its tokens from `position` on, which were new to the tree, what was
  /// evicted before is used again, and is told apart from what follows. key(position): as
  /// Prefixes::ghost_key() says of its tokens, 0 where there are too few.
  template <class Key>
  void recall(NodeIndex tail, std::int32_t position, const Key& key) noexcept {
    NodeIndex n = none;
    for (NodeIndex i = tail; i != root_node && topology_.node(i).position >= position;
         i = topology_.node(i).parent)
      n = i;
    if (n == none || topology_.node(n).state != NodeState::published) return;
    ReuseRecord run;
    for (std::int32_t end = topology_.node(n).end(); position < end;) {
      const Ghost ghost = model_->ghosts.take(key(position));
      ReuseRecord piece;
      if (ghost.key != 0) piece = used_again(ghost.reuse, 1);
      const std::int32_t above = position - topology_.node(n).position;
      if (above > 0 && piece.group != run.group && prefixes_.has_nodes(1))
        split(n, above);  // the upper part keeps the record so far
      if (topology_.node(n).position == position) topology_.node(n).set_reuse(run = piece);
      if (ghost.key == 0) return;
      position += static_cast<std::int32_t>(ghost.length);
    }
  }

 private:
  friend class TreeInspector;

  /// Evicted chunks that are remembered for each that is in use, where the policy learns.
  static constexpr std::size_t ghosts_per_chunk = 4;

  [[nodiscard]] std::size_t num_groups() const noexcept {
    return model_ ? std::size_t{ReuseModel::num_groups} : 1;
  }
  [[nodiscard]] std::int64_t first_key_of(const TreeNode& n) const noexcept {
    const std::int64_t key = n.level * RetainedList::keys_per_level;
    return shares_ ? key + RetainedList::keys_of(shares_->index_of(n.name_space)) : key;
  }
  [[nodiscard]] std::int64_t key_of(const TreeNode& n) const noexcept {
    return n.pins > 0 ? RetainedList::key_of_pinned : first_key_of(n) + n.group;
  }
  /// The one that the node is in, or gets into.
  [[nodiscard]] RetainedList& list_of(const TreeNode& n) noexcept {
    if (n.pins > 0) return lists_.back();
    return shares_ ? list_of_tenant(n) : lists_.at(first_key_of(n), n.group);
  }
  /// Whether a parent has at least the level of its child; within a level, groups are no order.
  [[nodiscard]] static bool is_valued_more(const TreeNode& parent, const TreeNode& child) noexcept {
    return parent.pins > 0 || (child.pins == 0 && parent.level >= child.level);
  }

  /// Nobody uses the node any more: what of it is written stays as cache, if anything may.
  void keep_or_remove(NodeIndex index, std::int32_t keep_end) noexcept {
    TreeNode& n = topology_.node(index);
    std::int32_t keep = 0;
    if (n.state == NodeState::published && n.position < keep_end)
      keep = std::min(n.written, keep_end - n.position);
    if (prefixes_.unit() > 1) keep -= keep % prefixes_.unit();
    if (keep == 0) return remove(index, /*active=*/true);
    prefixes_.news.evicted(n, keep);
    topology_.set_active(n, false);
    if (keep < n.length) topology_.release_places(index, keep);
    if (model_) [[unlikely]]
      fell_out_of_use(n);
    retain(index);
  }

  [[nodiscard]] bool has_expired(NodeIndex n, std::uint64_t passed) const noexcept {
    return n != none && topology_.node(n).first_child == none &&
           (static_cast<std::uint32_t>(time_) - topology_.node(n).since) + passed >= rules_.ttl;
  }
  /// Puts a node at the young end of its level. Children are retained before their parents, so the
  /// oldest node of the lowest level is always a leaf.
  void retain(NodeIndex index) noexcept {
    TreeNode& n = topology_.node(index);
    RetainedList& list = list_of(n);
    if (shares_ && n.pins == 0) shares_->add(shares_->index_of(n.name_space), n.length);
    if (rules_.ttl > 0) n.since = static_cast<std::uint32_t>(time_);
    n.retained = true;
    n.older = list.newest;
    n.newer = none;
    (n.older != none ? topology_.node(n.older).newer : list.oldest) = index;
    list.newest = index;
  }
  CHUNKATTN_INLINE void unretain(NodeIndex index) noexcept {
    TreeNode& n = topology_.node(index);
    RetainedList& list = list_of(n);
    if (shares_ && n.pins == 0) shares_->remove(shares_->index_of(n.name_space), n.length);
    if (list.hand == index) list.hand = n.newer;
    (n.older != none ? topology_.node(n.older).newer : list.oldest) = n.newer;
    (n.newer != none ? topology_.node(n.newer).older : list.newest) = n.older;
    n.retained = false;
    n.older = n.newer = none;
  }
  void link_retained_after(NodeIndex index, NodeIndex older) noexcept {
    TreeNode& n = topology_.node(index);
    RetainedList& list = list_of(n);
    n.retained = true;
    n.older = older;
    n.newer = topology_.node(older).newer;
    (n.newer != none ? topology_.node(n.newer).older : list.newest) = index;
    topology_.node(older).newer = index;
  }

  /// evict_one_chunk() of the first list that has any, from this one on.
  bool evict_one_chunk(const RetainedList* from) noexcept {
    while (from != lists_.end() && from->oldest == none) ++from;
    if (from == lists_.end()) return false;
    return evict_end_of(model_ ? least_valuable(*from) : from->next());
  }
  /// Frees the last chunk of a leaf that is retained, or drops it if it has none alone. True.
  bool evict_end_of(NodeIndex victim) noexcept {
    TreeNode& n = topology_.node(victim);
    const std::size_t used = stats_.used_chunks;
    std::int32_t keep = n.length - topology_.end_offset(n);
    if (n.first_chunk == n.last_chunk) keep = 0;
    stats_.evicted_tokens += to_size(n.length - keep);
    prefixes_.news.evicted(n, keep);
    if (judges_) [[unlikely]]
      account_for(n, keep);
    if (keep == 0)
      remove(victim);
    else
      topology_.release_places(victim, keep, /*active=*/false);
    stats_.evicted_chunks += used - stats_.used_chunks;
    return true;
  }

  /// The places of a victim behind the first `keep` are about to be evicted.
  [[gnu::noinline]] void account_for(const TreeNode& n, std::int32_t keep) noexcept {
    if (evicts_many_ && keep == 0 && n.newer != none) ask_ahead(topology_.node(n.newer));
    if (model_) remember(n, keep);
    if (shares_ && keep > 0 && n.pins == 0)
      shares_->remove(shares_->index_of(n.name_space), n.length - keep);
  }
  /// Asks for what will be read when a node's turn in its list comes. Of the one behind it the
  /// record is there since the last time.
  void ask_ahead(const TreeNode& next) const noexcept {
    const TreeNode& p = topology_.node(next.parent);
    if (model_ && p.length > 0) chunks_.prefetch(p.last_chunk, topology_.end_offset(p) - 1);
    if (next.newer == none) return;
    const TreeNode& n = topology_.node(next.newer);
    if (n.newer != none) topology_.prefetch_whole(n.newer);
    prefixes_.prefetch_removal(n, /*tokens=*/model_ != nullptr);
  }

  // ---- tenants -------------------------------------------------------------------------------

  [[nodiscard]] RetainedList* lists_of(std::int32_t tenant) noexcept {
    return lists_.find_first(RetainedList::least_key_of(tenant), shares_->first_list(tenant));
  }
  /// Most tenants have one level.
  [[gnu::noinline]] RetainedList& list_of_tenant(const TreeNode& n) noexcept {
    const std::int32_t tenant = shares_->index_of(n.name_space);
    const std::int64_t key = n.level * RetainedList::keys_per_level + RetainedList::keys_of(tenant);
    RetainedList* const first = lists_of(tenant);
    return first->key == key ? first[n.group] : lists_.at(key, n.group);
  }
  /// The lists of who has most for his weight. What is public and goes on is passed over, until the
  /// list's hand comes round again; where many are, the richest tenant pays.
  [[gnu::noinline]] const RetainedList* lists_of_richest() noexcept {
    const std::int32_t richest = shares_->richest();
    if (richest >= 0 && !shares_->has_more(TenantShares::everybody, richest))
      return lists_of(richest);
    RetainedList* list = lists_.begin();
    while (list != lists_.end() && list->oldest == none) ++list;
    if (richest < 0) {  // all is public, so that the oldest of a level is a leaf
      for (RetainedList* l = list; l != lists_.end() && l->is_of_level(l->key, list->key); ++l)
        if (std::exchange(l->hand, none) != none) weighed_ = nullptr;
      return list;
    }
    for (int passed = 0; passed < 8; ++passed) {
      const NodeIndex n = list->next();
      if (topology_.node(n).first_child == none) return list;
      weighed_ = nullptr;
      list->hand = topology_.node(n).newer;
    }
    return lists_of(richest);
  }
  [[gnu::noinline]] void keep_to_quotas() noexcept {
    for (std::int32_t tenant; (tenant = shares_->above_quota()) >= 0;)
      evict_one_chunk(lists_of(tenant));
  }

  // ---- learning ------------------------------------------------------------------------------

  [[nodiscard]] std::uint32_t chunks_of(std::int32_t length) const noexcept {
    return static_cast<std::uint32_t>(std::max(1, topology_.geometry.chunks_for(length)));
  }
  /// Chunks of tokens that were new to the tree so far.
  [[nodiscard]] std::uint32_t now() const noexcept {
    const std::uint64_t tokens = stats_.prompt_tokens - stats_.cached_tokens -
                                 stats_.pending_tokens + stats_.preempted_tokens -
                                 stats_.preempted_cached_tokens + stats_.published_tokens;
    return static_cast<std::uint32_t>(tokens >> topology_.geometry.shift);
  }
  [[gnu::noinline]] void fell_out_of_use(TreeNode& n) noexcept {
    if (ReuseModel::gap_of(n.group) == 0)  // as what it continues
      n.group = ReuseModel::group_of(n.uses, ReuseModel::gap_of(topology_.node(n.parent).group));
    n.since = now();
    model_->fell_out_of_use(n.group, chunks_of(n.length), stats_.used_chunks);
  }
  [[gnu::noinline]] ReuseRecord used_again(const ReuseRecord& before,
                                           std::uint32_t chunks) noexcept {
    return model_->used_again(before, now() - before.since, chunks, stats_.used_chunks);
  }
  /// The leaf that is worth least of those that are the oldest of their group, in the level of the
  /// first list that has any. The oldest of all is one: what is below a node is older than it.
  [[gnu::noinline]] NodeIndex least_valuable(const RetainedList& first) noexcept {
    if (victim_ != none && RetainedList::is_of_level(first.key, key_of(topology_.node(victim_))))
      return victim_;
    victim_ = first.next();
    if (first.key == RetainedList::key_of_pinned) return victim_;
    const RetainedList* const lists = &first - (first.key & (RetainedList::keys_per_level - 1));
    Candidates& candidates = model_->candidates;
    if (weighed_ != lists) candidates.renew_all(ReuseModel::num_groups);
    for (int group; (group = candidates.next_stale()) >= 0;) weigh(lists, to_size(group));
    if (const int group = candidates.least(); group >= 0) victim_ = lists[group].next();
    if (evicts_many_) weighed_ = lists;
    return victim_;
  }
  void weigh(const RetainedList* lists, std::size_t group) noexcept {
    if (lists[group].oldest == none) return model_->candidates.drop(group);
    const TreeNode& n = topology_.node(lists[group].next());
    if (n.first_child != none) return model_->candidates.drop(group);
    const std::uint32_t age = now() - n.since;
    model_->candidates.set(group, model_->value(n.group, age), age);
  }
  void remember(const TreeNode& n, std::int32_t keep) noexcept {
    if (keep == 0) {
      victim_ = none;
      model_->candidates.renew(n.group);
      model_->candidates.renew(topology_.node(n.parent).group);  // it may be a leaf from now on
    }
    const ChunkIndex above = chunks_[n.last_chunk].prev;  // the next to go, perhaps
    if (keep > 0 && above != no_chunk) chunks_.prefetch(above, 0);
    model_->ghosts.add(
        {prefixes_.ghost_key(n, keep), static_cast<std::uint32_t>(n.length - keep), n.reuse()});
  }

  void unpin(PinRecord& pin) noexcept {
    // Bottom-up: a parent must stay younger than its children.
    for (NodeIndex n = pin.last; n != root_node; n = topology_.node(n).parent) change_pins(n, -1);
    pins_.remove(pin);
  }
  /// Moves the node to the young end even where it stays pinned: a parent must stay younger than
  /// the child that was moved just before it.
  void change_pins(NodeIndex index, std::int32_t by) noexcept {
    TreeNode& n = topology_.node(index);
    const bool retained = n.retained, was_pinned = n.pins > 0;
    victim_ = none;
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
  RetainedLists lists_;
  PinTable pins_;
  std::unique_ptr<ReuseModel> model_;      // where the policy learns
  std::unique_ptr<TenantShares> shares_;   // where it tells tenants apart
  std::uint64_t time_ = 0;                 // by the caller's clock
  NodeIndex victim_ = none;                // is evicted from its end, until it is gone or used
  const RetainedList* weighed_ = nullptr;  // by the candidates, of a level; none: not up to date
  const bool judges_;                      // evictions are judged by more than age
  bool evicts_many_ = false;               // and nothing else happens between
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
