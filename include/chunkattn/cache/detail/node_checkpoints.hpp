// NodeCheckpoints: which nodes of a tree have checkpoints, where a sequence wants one, and what
// becomes of them as nodes change. A checkpoint goes where its tokens go, and with them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "../../detail/support/config.hpp"
#include "../../detail/tree/core.hpp"
#include "../../detail/tree/node_observer.hpp"
#include "../../detail/tree/sequence_table.hpp"
#include "../../detail/tree/topology.hpp"
#include "../../events/detail/resume_points.hpp"
#include "../../plan_view.hpp"
#include "checkpoint_table.hpp"
#include "marked_nodes.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Observes the tree from now on, until its owner removes it.
class NodeCheckpoints final : public NodeObserver, public ResumePoints {
 public:
  NodeCheckpoints(TreeCore& tree, std::size_t max_count, std::int32_t max_per_path)
      : ResumePoints(1),
        topology_(tree.topology),
        sequences_(tree.sequences),
        max_count_(max_count),
        max_per_path_(max_per_path),
        marked_(topology_) {
    reserve(topology_.capacity());
    topology_.observers.add(*this);
  }
  NodeCheckpoints(const NodeCheckpoints&) = delete;
  NodeCheckpoints& operator=(const NodeCheckpoints&) = delete;

  [[nodiscard]] const CheckpointTable& table() const noexcept { return table_; }
  /// Those that were dropped for others' sake.
  [[nodiscard]] std::uint64_t num_evicted() const noexcept { return num_evicted_; }

  /// The last one of the path to `last` that is not after `position`, or none.
  [[nodiscard]] std::int32_t nearest(NodeIndex last, std::int32_t position) const noexcept {
    for (NodeIndex n = last; n != root_node; n = topology_.node(n).parent)
      if (const std::int32_t i = table_.nearest(n, position); i != none) return i;
    return none;
  }
  /// What is computed of a sequence begins with the nearest one whose tokens can be read, or, where
  /// there is none, with its first token.
  /// \param readable  leading tokens whose K/V is there
  std::int32_t resume(SequenceIndex s, std::int32_t readable) noexcept {
    SequenceRecord& record = sequences_[s];
    const std::int32_t i = nearest(record.tail, (std::min)(record.cursor, readable));
    record.cursor = i == none ? 0 : table_[i].position;
    if (i != none) table_.touch(i);
    return i;
  }
  /// The first position after what is scheduled at which one is wanted, or none: where the path
  /// left another or another left it, of these the last ones, and before the last token.
  [[nodiscard]] std::int32_t next(SequenceIndex s) const noexcept {
    const SequenceRecord& record = sequences_[s];
    const std::int32_t end = record.size - 1;
    if (record.cursor >= end) return none;
    NodeIndex n = record.tail;
    if (topology_.node(n).state == NodeState::stale) return none;
    std::int32_t next = none, left = (std::max)(1, max_per_path_ - 1);
    if (!table_.has(sequences_.node_of(s, end - 1), end)) next = end;
    for (; left > 0 && topology_.node(n).position > record.cursor; n = topology_.node(n).parent) {
      const std::int32_t position = topology_.node(n).position;
      if (position >= end) continue;
      if (!table_.has(topology_.node(n).parent, position)) next = position;
      --left;
    }
    return next;
  }
  /// False where there is one, or where no prompt could find it.
  bool save(SequenceIndex s, std::int32_t position, std::shared_ptr<const void>&& state) {
    const NodeIndex n = sequences_.node_of(s, position - 1);
    if (topology_.node(n).state == NodeState::stale) return false;
    if (const std::int32_t i = table_.nearest(n, position);
        i != none && table_[i].position == position) {
      table_.touch(i);
      return false;
    }
    table_.reserve();
    while (table_.size() >= max_count_) evict(table_.oldest());
    table_.add(n, position, std::move(state));
    tell_at(n, position, /*is_kept=*/true);
    marked_.mark(n);
    limit_below(n);
    return true;
  }

  /// All states end, whoever still knows of this. The tree may be gone.
  void end() noexcept { table_ = {}; }

  // ---- for those who follow them ---------------------------------------------------------------

  /// The token before each is kept.
  void tell_kept(ResumeWatch& to, NodeIndex n, std::int32_t first,
                 std::int32_t count) const override {
    if (table_.size() == 0) return;  // maybe for good: nodes have come that it knows nothing of
    const std::int32_t begin = topology_.node(n).position + first;
    for (std::int32_t i = table_.nearest(n, begin + count); i != none; i = table_[i].before)
      if (const std::int32_t token = table_[i].position - 1; token >= begin)
        to.on_kept(*this, n, first + token - begin, 1, true);
  }

  // ---- changes of nodes ----------------------------------------------------------------------

  void reserve(std::size_t num_nodes) override {
    table_.reserve_nodes(num_nodes);
    marked_.reserve(num_nodes);
  }
  void on_split(NodeIndex lower, NodeIndex upper) noexcept override {
    if (!marked_.has(lower)) return;
    marked_.unmark(lower, topology_.node(upper).parent);
    table_.move(lower, upper, topology_.node(upper).end());
    marked_.mark(has_any(lower) ? lower : upper);
  }
  void on_release(NodeIndex n, std::int32_t keep) noexcept override {
    const std::int32_t end = topology_.node(n).position + keep;
    for (std::int32_t i; (i = table_.last_of(n)) != none && table_[i].position > end;) drop(i);
  }
  void on_merge(NodeIndex duplicate, NodeIndex target) noexcept override {
    if (!marked_.has(duplicate)) return;
    const NodeIndex rest = marked_.first_child(duplicate);
    if (rest != none) {
      marked_.unmark(rest, duplicate);
      marked_.mark(rest);
    }
    if (is_watched())
      for (std::int32_t i = table_.last_of(duplicate); i != none; i = table_[i].before)
        tell_at(target, table_[i].position, /*is_kept=*/true);
    table_.move(duplicate, target, topology_.node(target).end());
    if (has_any(target)) marked_.mark(target);
    unmark(duplicate);
    limit_below(target, duplicate);
  }
  void on_clear() noexcept override {
    while (table_.size() > 0) drop(table_.oldest());
  }

  [[nodiscard]] bool is_consistent() const override {
    std::size_t listed = 0, used = 0, marked = 0, linked = 0;
    for (std::int32_t i = table_.oldest(); i != none; i = table_[i].newer) ++used;
    for (std::size_t k = 1; k < topology_.num_indices(); ++k) {
      const auto index = static_cast<NodeIndex>(k);
      const TreeNode& n = topology_.node(index);
      std::int32_t end = n.position + n.written;
      for (std::int32_t i = table_.last_of(index); i != none; i = table_[i].before, ++listed) {
        const bool is_its_own = table_[i].node == index && table_[i].state != nullptr;
        const bool is_after_tokens = table_[i].position > n.position && table_[i].position <= end;
        const bool can_be_found =
            n.state == NodeState::published || n.state == NodeState::unpublished;
        if (!is_its_own || !is_after_tokens || !can_be_found) return false;
        end = table_[i].position - 1;  // the last one comes first
      }
      if (n.state != NodeState::free && count(index) > max_per_path_) return false;
      if (marked_.has(index) != has_any(index)) return false;
      marked += marked_.has(index);
    }
    for (NodeIndex n = marked_.next_below(root_node, root_node); n != none; ++linked)
      n = marked_.next_below(n, root_node);
    return marked == linked && listed == table_.size() && used == table_.size() &&
           table_.size() <= max_count_;
  }

 private:
  /// Of the path to `last`.
  [[nodiscard]] std::int32_t count(NodeIndex last) const noexcept {
    std::int32_t all = 0;
    for (NodeIndex n = last; n != root_node; n = topology_.node(n).parent)
      for (std::int32_t i = table_.last_of(n); i != none; i = table_[i].before) ++all;
    return all;
  }

  /// Whether it or a node below it has one.
  [[nodiscard]] bool has_any(NodeIndex n) const noexcept {
    return table_.last_of(n) != none || marked_.first_child(n) != none;
  }
  /// A node has none any more, and perhaps no node below it.
  void unmark(NodeIndex n) noexcept {
    while (n != root_node && marked_.has(n) && !has_any(n)) {
      const NodeIndex parent = topology_.node(n).parent;
      marked_.unmark(n, parent);
      n = parent;
    }
  }
  void tell_at(NodeIndex n, std::int32_t position, bool is_kept) const noexcept {
    tell(n, position - 1 - topology_.node(n).position, 1, is_kept);
  }
  void drop(std::int32_t i) noexcept {
    const NodeIndex n = table_[i].node;
    tell_at(n, table_[i].position, /*is_kept=*/false);
    const std::shared_ptr<const void> state = table_.drop(i);
    unmark(n);
  }
  void evict(std::int32_t i) noexcept {
    ++num_evicted_;
    drop(i);
  }

  /// Leaves no path through `top` more than it may have.
  /// \param gone  a node that is about to be dropped: no path continues there
  void limit_below(NodeIndex top, NodeIndex gone = none) noexcept {
    for (NodeIndex n = top, next; n != none; n = next) {
      next = marked_.next_below(n, top);  // not of the path to `n`, so that it stays marked
      if (marked_.first_child(n) == none) limit(n, gone);
    }
  }
  /// The same for the path to `last`. One where paths part is kept rather than one within a path,
  /// then what was used last.
  void limit(NodeIndex last, NodeIndex gone) noexcept {
    while (true) {
      std::int32_t count = 0, victim = none;
      for (NodeIndex n = last; n != root_node; n = topology_.node(n).parent)
        for (std::int32_t i = table_.last_of(n); i != none; i = table_[i].before, ++count)
          if (i != table_.newest() && (victim == none || is_worth_less(i, victim, gone)))
            victim = i;
      if (count <= max_per_path_) return;
      evict(victim);
    }
  }
  [[nodiscard]] bool is_worth_less(std::int32_t a, std::int32_t b, NodeIndex gone) const noexcept {
    const bool at_fork = parts_at(table_[a], gone), other_at_fork = parts_at(table_[b], gone);
    return at_fork != other_at_fork ? !at_fork : table_[a].used < table_[b].used;
  }
  /// Whether paths part at a checkpoint.
  [[nodiscard]] bool parts_at(const CheckpointRecord& checkpoint, NodeIndex gone) const noexcept {
    const TreeNode& n = topology_.node(checkpoint.node);
    if (checkpoint.position != n.end()) return false;
    int paths = 0;
    for (NodeIndex c = n.first_child; c != none && paths < 2; c = topology_.node(c).next_sibling)
      paths += c != gone;
    return paths == 2;
  }

  Topology& topology_;
  SequenceTable& sequences_;
  const std::size_t max_count_;
  const std::int32_t max_per_path_;
  CheckpointTable table_;
  MarkedNodes marked_;  // that have any
  std::uint64_t num_evicted_ = 0;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
