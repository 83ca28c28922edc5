// CacheOrder: what is evicted next where a policy learns from reuse, where tenants have shares of
// the cache, or both.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/tree/chunk_table.hpp"
#include "../../detail/tree/core.hpp"
#include "../../detail/tree/prefixes.hpp"
#include "../../detail/tree/retained_lists.hpp"
#include "../../detail/tree/retention.hpp"
#include "../../detail/tree/topology.hpp"
#include "../../tree_options.hpp"
#include "reuse_model.hpp"
#include "tenant_shares.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Keys of evicted tokens: a hash of their position, their namespace and a few tokens on both
/// sides.
struct GhostKey {
  static constexpr std::int32_t num_tokens = 4;  ///< on each side

  [[nodiscard]] static std::uint64_t seed(std::int32_t position, const Namespace& space) noexcept {
    return Prefixes::hash_seed(position, space);
  }
  /// Never 0, which is no key.
  [[nodiscard]] static std::uint32_t finish(std::uint64_t hash) noexcept {
    return (std::max)(Prefixes::finish_hash(hash), 1u);
  }
  /// That of the tokens from slot `first` of a node on; 0 where they do not stand together.
  [[nodiscard]] static std::uint32_t of(const Topology& topology, const Tokens& tokens,
                                        const TreeNode& n, std::int32_t first) noexcept {
    const ChunkGeometry& g = topology.geometry;
    const std::int32_t position = n.position + first, slot = n.begin + first;
    const TreeNode& p = first > 0 ? n : topology.node(n.parent);
    const std::int32_t before = first > 0 ? slot : p.begin + p.length;
    if (g.size < num_tokens || n.length - first < num_tokens ||
        g.offset(slot) > g.size - num_tokens)
      return 0;
    std::uint64_t hash = seed(position, n.name_space);
    if (position > 0) {
      const std::int32_t begin = before - num_tokens;  // within a chunk, and a node
      if (begin < p.begin || g.chunks_before(begin) != g.chunks_before(before - 1)) return 0;
      hash = tokens.hash(hash, topology.chunk_of(p, begin), g.offset(begin), num_tokens);
    }
    return finish(tokens.hash(hash, topology.chunk_of(n, slot), g.offset(slot), num_tokens));
  }
};

/// Lists of nodes by tenant, level and, where the policy learns, groups with a similar past.
class CacheOrder final : public EvictionOrder {
 public:
  CacheOrder(TreeCore& core, bool learns, bool shares)
      : topology_(core.topology),
        chunks_(core.chunk_table),
        prefixes_(core.prefixes),
        lists_(core.retention.lists()),
        stats_(core.stats),
        model_(learns ? std::make_unique<ReuseModel>() : nullptr),
        shares_(shares ? std::make_unique<TenantShares>() : nullptr) {}

  /// A sequence of this level and tenant is to join: makes sure that nothing fails afterwards.
  void reserve(std::int64_t level, std::uint64_t tenant, const TenantTerms& terms) {
    if (shares_) {
      if (shares_->is_full(tenant)) shares_->forget_unused(used_tenants());
      shares_->reserve(tenant, terms);
      lists_.reserve(level * RetainedList::keys_per_level, num_groups());  // of what is public
      level += keys_of(shares_->index_of({.tenant = tenant})) / RetainedList::keys_per_level;
    }
    lists_.reserve(level * RetainedList::keys_per_level, num_groups());
    if (model_) model_->ghosts.reserve(ghosts_per_chunk * stats_.used_chunks);
  }
  [[nodiscard]] bool shares() const noexcept { return shares_ != nullptr; }
  /// For tests: records of tenants, and of lists.
  [[nodiscard]] std::size_t num_tenants() const noexcept { return shares_ ? shares_->size() : 0; }
  [[nodiscard]] std::size_t num_lists() const noexcept {
    return static_cast<std::size_t>(lists_.end() - lists_.begin());
  }
  [[nodiscard]] bool learns() const noexcept { return model_ != nullptr; }

  [[nodiscard]] std::int64_t key_of(const TreeNode& n) const noexcept override {
    return first_key_of(n) + n.reuse.group;
  }
  [[nodiscard]] RetainedList& list_of(const TreeNode& n) noexcept override {
    return shares_ ? list_of_tenant(n) : lists_.at(first_key_of(n), n.reuse.group);
  }
  [[nodiscard]] RetainedList& on_listed(const TreeNode& n) noexcept override {
    if (shares_) shares_->add(shares_->index_of(n.name_space), n.length);
    return CacheOrder::list_of(n);
  }
  [[nodiscard]] RetainedList& on_unlisted(const TreeNode& n) noexcept override {
    if (shares_) shares_->remove(shares_->index_of(n.name_space), n.length);
    return CacheOrder::list_of(n);
  }

  void on_unused(TreeNode& n) noexcept override {
    if (!model_) return;
    if (ReuseModel::gap_of(n.reuse.group) == 0)  // as its parent
      n.reuse.group = ReuseModel::group_of(
          n.reuse.uses, ReuseModel::gap_of(topology_.node(n.parent).reuse.group));
    n.reuse.since = now();
    model_->fell_out_of_use(n.reuse.group, chunks_of(n.length), stats_.used_chunks);
  }
  void on_used(NodeIndex index) noexcept override {
    if (!model_) return;
    if (index == victim_) victim_ = none;
    TreeNode& n = topology_.node(index);
    n.reuse = used_again(n.reuse, chunks_of(n.length));
  }
  void on_evict(const TreeNode& n, std::int32_t keep) noexcept override {
    if (evicts_many_ && keep == 0 && n.newer != none) prefetch_victims(topology_.node(n.newer));
    if (model_) remember(n, keep);
    if (shares_ && keep > 0 && n.pins == 0)
      shares_->remove(shares_->index_of(n.name_space), n.length - keep);
  }
  void on_pins() noexcept override { victim_ = none; }
  void set_evicts_many(bool many) noexcept override {
    evicts_many_ = many;
    if (!many) weighed_ = nullptr;
  }

  [[nodiscard]] NodeIndex victim() noexcept override {
    return victim_from(shares_ ? lists_of_largest() : &lists_.lowest());
  }
  [[nodiscard]] NodeIndex victim_above_quota() noexcept override {
    const std::int32_t tenant = shares_ ? shares_->above_quota() : none;
    return tenant < 0 ? none : victim_from(lists_of(tenant));
  }
  [[nodiscard]] bool is_consistent() const override {
    if (!shares_) return true;
    Array<std::uint64_t> tokens(shares_->size());
    for (std::size_t i = 1; i < topology_.num_indices(); ++i)
      if (const TreeNode& n = topology_.node(static_cast<NodeIndex>(i)); n.retained && n.pins == 0)
        tokens[to_size(shares_->index_of(n.name_space))] += to_size(n.length);
    for (std::size_t i = 0; i < tokens.size(); ++i)
      if (shares_->tokens(static_cast<std::int32_t>(i)) != tokens[i]) return false;
    return shares_->is_ordered();
  }

  /// A sequence has joined; of its tokens from `position` on, which were new to the tree, what was
  /// evicted before is used again, and is told apart from what follows. key(position): that of its
  /// tokens, 0 where there are too few.
  template <class Key>
  void recall(Retention& retention, NodeIndex tail, std::int32_t position,
              const Key& key) noexcept {
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
        retention.split(n, above);  // the upper part keeps the record so far
      if (topology_.node(n).position == position) topology_.node(n).reuse = run = piece;
      if (ghost.key == 0) return;
      position += static_cast<std::int32_t>(ghost.length);
    }
  }

 private:
  /// Evicted chunks that are remembered for each that is in use, where the policy learns.
  static constexpr std::size_t ghosts_per_chunk = 4;

  /// Keys of a tenant's lists come after those of the tenant before: levels are of 32 bits.
  [[nodiscard]] static constexpr std::int64_t keys_of(std::int32_t tenant) noexcept {
    return std::int64_t{tenant} << 40;
  }
  [[nodiscard]] static constexpr bool is_of_level(std::int64_t a, std::int64_t b) noexcept {
    constexpr auto group_bits = RetainedList::keys_per_level - 1;  // levels may be negative
    return (a | group_bits) == (b | group_bits);
  }
  /// Of a list that is not empty: the node that eviction looks at next.
  [[nodiscard]] static NodeIndex next_candidate(const RetainedList& list) noexcept {
    return list.hand >= 0 ? list.hand : list.oldest;
  }

  [[nodiscard]] std::size_t num_groups() const noexcept {
    return model_ ? std::size_t{ReuseModel::num_groups} : 1;
  }
  [[nodiscard]] std::int64_t first_key_of(const TreeNode& n) const noexcept {
    const std::int64_t key = n.level * RetainedList::keys_per_level;
    return shares_ ? key + keys_of(shares_->index_of(n.name_space)) : key;
  }
  /// Of the first list that has any, from this one on.
  [[nodiscard]] NodeIndex victim_from(const RetainedList* from) noexcept {
    while (from != lists_.end() && from->oldest == none) ++from;
    if (from == lists_.end()) return none;
    return model_ ? least_valuable(*from) : next_candidate(*from);
  }
  /// Prefetches what will be read when a node's turn in its list comes. Of the one after it the
  /// record is there since the last time.
  void prefetch_victims(const TreeNode& next) const noexcept {
    const TreeNode& p = topology_.node(next.parent);
    if (model_ && p.length > 0) chunks_.prefetch(p.last_chunk, topology_.end_offset(p) - 1);
    if (next.newer == none) return;
    const TreeNode& n = topology_.node(next.newer);
    for (const NodeIndex other : {n.newer, n.parent, n.next_sibling, n.prev_sibling}) {
      if (other == none) continue;
      topology_.prefetch(other);
      CHUNKATTN_PREFETCH_WRITE(&topology_.node(other).older);
    }
    for (const ChunkIndex chunk : {n.first_chunk, n.last_chunk})
      CHUNKATTN_PREFETCH_WRITE(&chunks_[chunk]);
    prefixes_.prefetch(n);
    if (!model_) return;  // else also tokens of ghosts' keys
    chunks_.prefetch(n.first_chunk, n.begin);
    if (n.first_chunk == n.last_chunk) return;
    chunks_.prefetch(n.first_chunk, topology_.geometry.size - 1);
    chunks_.prefetch(n.last_chunk, 0);
  }

  // ---- tenants -------------------------------------------------------------------------------

  /// Which tenants have any node, by index.
  [[nodiscard]] Array<char> used_tenants() const {
    Array<char> is_used(shares_->size());
    for (std::size_t i = 1; i < topology_.num_indices(); ++i)
      if (const TreeNode& n = topology_.node(static_cast<NodeIndex>(i)); n.state != NodeState::free)
        if (const std::int32_t tenant = shares_->index_of(n.name_space); tenant >= 0)
          is_used[to_size(tenant)] = 1;  // scratch slots of drafts are of no tenant
    return is_used;
  }
  [[nodiscard]] RetainedList* lists_of(std::int32_t tenant) noexcept {
    return lists_.find_first(keys_of(tenant) - keys_of(1) / 2, shares_->first_list(tenant));
  }
  /// Most tenants have one level.
  [[gnu::noinline]] RetainedList& list_of_tenant(const TreeNode& n) noexcept {
    const std::int32_t tenant = shares_->index_of(n.name_space);
    const std::int64_t key = n.level * RetainedList::keys_per_level + keys_of(tenant);
    RetainedList* const first = lists_of(tenant);
    return first->key == key ? first[n.reuse.group] : lists_.at(key, n.reuse.group);
  }
  /// The lists of the tenant with the largest share by its weight. Public nodes with children are
  /// passed over, until the list's hand comes round again; where many are, the tenant pays.
  [[gnu::noinline]] const RetainedList* lists_of_largest() noexcept {
    const std::int32_t largest = shares_->largest();
    if (largest >= 0 && !shares_->has_more(TenantShares::everybody, largest))
      return lists_of(largest);
    RetainedList* const list = &lists_.lowest();
    if (largest < 0) {  // all is public, so that the oldest of a level is a leaf
      for (RetainedList* l = list; l != lists_.end() && is_of_level(l->key, list->key); ++l)
        if (std::exchange(l->hand, none) != none) weighed_ = nullptr;
      return list;
    }
    for (int passed = 0; passed < 8; ++passed) {
      const NodeIndex n = next_candidate(*list);
      if (topology_.node(n).first_child == none) return list;
      weighed_ = nullptr;
      list->hand = topology_.node(n).newer;
    }
    return lists_of(largest);
  }

  // ---- learning ------------------------------------------------------------------------------

  [[nodiscard]] std::uint32_t chunks_of(std::int32_t length) const noexcept {
    return static_cast<std::uint32_t>((std::max)(1, topology_.geometry.chunks_for(length)));
  }
  /// Chunks of tokens that were new to the tree so far.
  [[nodiscard]] std::uint32_t now() const noexcept {
    const std::uint64_t tokens = stats_.prompt_tokens - stats_.cached_tokens -
                                 stats_.pending_tokens + stats_.preempted_tokens -
                                 stats_.preempted_cached_tokens + stats_.published_tokens;
    return static_cast<std::uint32_t>(tokens >> topology_.geometry.shift);
  }
  ReuseRecord used_again(const ReuseRecord& before, std::uint32_t chunks) noexcept {
    return model_->used_again(before, now() - before.since, chunks, stats_.used_chunks);
  }
  /// The leaf that is worth least of those that are the oldest of their group, in the level of the
  /// first list that has any. The oldest of all is one: what is below a node is older than it.
  [[gnu::noinline]] NodeIndex least_valuable(const RetainedList& first) noexcept {
    if (victim_ != none && is_of_level(first, topology_.node(victim_))) return victim_;
    victim_ = next_candidate(first);
    if (first.key == RetainedList::key_of_pinned) return victim_;
    const RetainedList* const lists = &first - (first.key & (RetainedList::keys_per_level - 1));
    Candidates& candidates = model_->candidates;
    if (weighed_ != lists) candidates.renew_all(ReuseModel::num_groups);
    for (int group; (group = candidates.next_stale()) >= 0;) weigh(lists, to_size(group));
    if (const int group = candidates.least(); group >= 0) victim_ = next_candidate(lists[group]);
    if (evicts_many_) weighed_ = lists;
    return victim_;
  }
  [[nodiscard]] bool is_of_level(const RetainedList& list, const TreeNode& n) const noexcept {
    const std::int64_t key = n.pins > 0 ? RetainedList::key_of_pinned : key_of(n);
    return is_of_level(list.key, key);
  }
  void weigh(const RetainedList* lists, std::size_t group) noexcept {
    if (lists[group].oldest == none) return model_->candidates.drop(group);
    const TreeNode& n = topology_.node(next_candidate(lists[group]));
    if (n.first_child != none) return model_->candidates.drop(group);
    const std::uint32_t age = now() - n.reuse.since;
    model_->candidates.set(group, model_->value(n.reuse.group, age), age);
  }
  void remember(const TreeNode& n, std::int32_t keep) noexcept {
    if (keep == 0) {
      victim_ = none;
      model_->candidates.renew(n.reuse.group);
      // It may be a leaf from now on.
      model_->candidates.renew(topology_.node(n.parent).reuse.group);
    }
    const ChunkIndex above = chunks_[n.last_chunk].prev;  // the next to go, perhaps
    if (keep > 0 && above != no_chunk) chunks_.prefetch(above, 0);
    model_->ghosts.add({GhostKey::of(topology_, prefixes_.tokens(), n, keep),
                        static_cast<std::uint32_t>(n.length - keep), n.reuse});
  }

  Topology& topology_;
  ChunkTable& chunks_;
  Prefixes& prefixes_;
  RetainedLists& lists_;
  const TreeStats& stats_;
  std::unique_ptr<ReuseModel> model_;      // where the policy learns
  std::unique_ptr<TenantShares> shares_;   // where it tells tenants apart
  NodeIndex victim_ = none;                // is evicted from its end, until it is gone or used
  const RetainedList* weighed_ = nullptr;  // by the candidates, of a level; none: not up to date
  bool evicts_many_ = false;               // and nothing else happens between
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
