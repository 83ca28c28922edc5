// ScoreOrder: evicts the cached leaf of the lowest score, as a policy's own function says. Leaves
// are in a heap, each with the score that it had when it became a leaf that is only cached.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/tree/core.hpp"
#include "../../detail/tree/node_observer.hpp"
#include "../../detail/tree/retention.hpp"
#include "../../tree_options.hpp"
#include "../cached_leaf.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// \tparam Policy  has score(const CachedLeaf&)
template <class Policy>
class ScoreOrder final : public EvictionOrder, public NodeObserver {
  using Score = std::remove_cvref_t<decltype(std::declval<const Policy&>().score(CachedLeaf{}))>;
  static_assert(std::totally_ordered<Score>, "score() returns what can be compared by <");
  static_assert(std::is_nothrow_copy_assignable_v<Score> && std::default_initializable<Score>,
                "score() returns what can be copied without fail, as a number or a pair of them");
  static_assert(noexcept(std::declval<const Policy&>().score(CachedLeaf{})),
                "score() must be noexcept: the tree asks where nothing may fail");

 public:
  ScoreOrder(const Policy& policy, TreeCore& core)
      : policy_(policy),
        topology_(core.topology),
        sequences_(core.sequences),
        lists_(core.retention.lists()) {
    lists_.reserve(0, 1);
    reserve(topology_.capacity());
    core.topology.observers.add(*this);
  }

  // ---- as EvictionOrder: all nodes in one list, the leaves of it in the heap ------------------

  [[nodiscard]] std::int64_t key_of(const TreeNode&) const noexcept override { return 0; }
  [[nodiscard]] RetainedList& list_of(const TreeNode&) noexcept override { return lists_.at(0, 0); }
  [[nodiscard]] RetainedList& on_listed(const TreeNode& n) noexcept override {
    if (n.first_child == none) weigh(index_of(n));
    return lists_.at(0, 0);
  }
  [[nodiscard]] RetainedList& on_unlisted(const TreeNode& n) noexcept override {
    take_out(index_of(n));
    return lists_.at(0, 0);
  }
  void on_unused(TreeNode&) noexcept override {}
  void on_used(NodeIndex) noexcept override {}
  void on_evict(const TreeNode& n, std::int32_t keep) noexcept override {
    settle();
    changed_ = keep > 0 ? index_of(n) : n.parent;
  }
  void on_pins() noexcept override {}
  void set_evicts_many(bool) noexcept override {}
  [[nodiscard]] NodeIndex victim() noexcept override {
    settle();
    return heap_.empty() ? lists_.lowest().oldest : heap_[0];
  }
  [[nodiscard]] NodeIndex victim_above_quota() noexcept override { return none; }

  // ---- as NodeObserver: how often nodes were used ---------------------------------------------

  void reserve(std::size_t num_nodes) override {
    heap_.reserve(num_nodes);
    if (records_.size() < num_nodes) records_.resize(num_nodes);
  }
  void on_split(NodeIndex lower, NodeIndex upper) noexcept override {
    record(upper).uses = uses_of(lower);
    record(upper).generation = topology_.node(upper).generation;
  }
  void on_release(NodeIndex, std::int32_t) noexcept override {}
  void on_merge(NodeIndex duplicate, NodeIndex target) noexcept override {
    Uses& to = uses_of(target);
    const Uses& from = uses_of(duplicate);
    to = {to.count + from.count, (std::min)(to.first, from.first), (std::max)(to.last, from.last)};
  }
  void on_clear() noexcept override {}
  void on_leave(SequenceIndex s) noexcept override {
    ++time_;
    for (NodeIndex n = sequences_[s].tail; n != root_node; n = topology_.node(n).parent) {
      Uses& uses = uses_of(n);
      uses = {uses.count + 1, (std::min)(uses.first, time_), time_};
    }
  }

  [[nodiscard]] bool is_consistent() const override {
    for (std::size_t i = 0; i < heap_.size(); ++i) {
      if (record(heap_[i]).place != static_cast<std::int32_t>(i)) return false;
      if (i > 0 && goes_before(heap_[i], heap_[(i - 1) / 2])) return false;
    }
    for (std::size_t i = 1; i < topology_.num_indices(); ++i) {
      const auto n = static_cast<NodeIndex>(i);
      const TreeNode& node = topology_.node(n);
      const bool may_go = node.retained && node.pins == 0 && node.first_child == none;
      if (n != changed_ && may_go != (record(n).place != none)) return false;
    }
    return true;
  }

 private:
  struct Uses {
    std::uint64_t count = 0, first = (std::numeric_limits<std::uint64_t>::max)(), last = 0;
  };
  struct Record {
    Uses uses;
    std::uint32_t generation = 0;  ///< of the node that has these
    std::uint64_t number = 0;      ///< of two with equal scores, the lower one goes first
    Score score{};
    std::int32_t place = none;  ///< in the heap
  };

  [[nodiscard]] Record& record(NodeIndex n) noexcept { return records_[to_size(n)]; }
  [[nodiscard]] const Record& record(NodeIndex n) const noexcept { return records_[to_size(n)]; }
  /// Those of a node, not of another that had its index.
  [[nodiscard]] Uses& uses_of(NodeIndex n) noexcept {
    Record& r = record(n);
    const std::uint32_t generation = topology_.node(n).generation;
    if (std::exchange(r.generation, generation) != generation) r.uses = {};
    return r.uses;
  }
  [[nodiscard]] NodeIndex index_of(const TreeNode& n) noexcept {
    return static_cast<NodeIndex>(&n - topology_.nodes());
  }

  /// The end of a path was evicted: what is its end now has another score.
  void settle() noexcept {
    const NodeIndex n = std::exchange(changed_, none);
    if (n == none) return;
    const TreeNode& node = topology_.node(n);
    if (node.retained && node.pins == 0 && node.first_child == none) weigh(n);
  }
  /// Asks for the score of a leaf and puts it into its place.
  void weigh(NodeIndex n) noexcept {
    const TreeNode& node = topology_.node(n);
    Record& r = record(n);
    const Uses& uses = uses_of(n);
    r.score = policy_.score(CachedLeaf{.last_use = uses.last,
                                       .first_use = uses.first,
                                       .uses = uses.count,
                                       .position = node.position,
                                       .length = node.length,
                                       .priority = node.level,
                                       .name_space = node.name_space});
    if (r.place == none) {
      r.number = ++last_number_;
      heap_.push_back(n);
      r.place = static_cast<std::int32_t>(heap_.size()) - 1;
    }
    move(to_size(r.place));
  }
  void take_out(NodeIndex n) noexcept {
    const std::int32_t place = std::exchange(record(n).place, none);
    if (place == none) return;
    const NodeIndex last = heap_.back();
    heap_.pop_back();
    if (last == n) return;
    put(to_size(place), last);
    move(to_size(place));
  }

  [[nodiscard]] bool goes_before(NodeIndex a, NodeIndex b) const noexcept {
    const Record &x = record(a), &y = record(b);
    if (x.score < y.score) return true;
    return !(y.score < x.score) && x.number < y.number;
  }
  void put(std::size_t place, NodeIndex n) noexcept {
    heap_[place] = n;
    record(n).place = static_cast<std::int32_t>(place);
  }
  /// Up or down, to where the score of the node at this place belongs.
  void move(std::size_t place) noexcept {
    const NodeIndex n = heap_[place];
    for (; place > 0 && goes_before(n, heap_[(place - 1) / 2]); place = (place - 1) / 2)
      put(place, heap_[(place - 1) / 2]);
    for (std::size_t child; (child = 2 * place + 1) < heap_.size(); place = child) {
      if (child + 1 < heap_.size() && goes_before(heap_[child + 1], heap_[child])) ++child;
      if (!goes_before(heap_[child], n)) break;
      put(place, heap_[child]);
    }
    put(place, n);
  }

  const Policy& policy_;
  Topology& topology_;
  const SequenceTable& sequences_;
  RetainedLists& lists_;
  Array<NodeIndex> heap_;
  std::vector<Record> records_;  // by node; a Score need not be trivially copyable
  NodeIndex changed_ = none;
  std::uint64_t time_ = 0, last_number_ = 0;
};

/// What TokenTree calls for a ScoredPolicy, by its name `Policy::Hooks`.
struct ScoreHooks {
  template <class Policy>
  static std::unique_ptr<EvictionOrder> make_order(const Policy& policy, TreeCore& core) {
    check_plain(policy);
    return std::make_unique<ScoreOrder<Policy>>(policy, core);
  }
  template <class Policy>
  static void inserting(const Policy&, TreeCore&, const InsertOptions&, int) noexcept {}
  template <class Tree>
  static void inserted(Tree&, std::span<const typename Tree::token_type>, const InsertOptions&,
                       std::int32_t, SequenceIndex) noexcept {}
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
