// TreeInspector: the invariants of a tree, with all that is kept incrementally counted again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../../allocator.hpp"
#include "../../detail/support/array.hpp"
#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/tree/core.hpp"
#include "../../error.hpp"
#include "../../plan_view.hpp"
#include "../../tree_options.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Reads the records of a tree. Throws Error that names the first difference.
class TreeInspector {
 public:
  explicit TreeInspector(const TreeCore& tree)
      : tree_(tree),
        topology_(tree.topology),
        chunks_(tree.chunk_table),
        prefixes_(tree.prefixes),
        retention_(tree.retention),
        sequences_(tree.sequences),
        stats_(tree.stats),
        chunk_size_(to_size(topology_.geometry.size)) {}

  void check() const {
    check_storage();
    check_sequences();
  }

 private:
  struct Totals {
    std::size_t nodes = 0, num_slots = 0, published = 0, retained = 0;
  };

  /// The key of the retention list that a node belongs to.
  [[nodiscard]] std::int64_t list_key_of(const TreeNode& n) const noexcept {
    if (n.pins > 0) return RetainedList::key_of_pinned;
    return retention_.order_ ? retention_.order_->key_of(n)
                             : n.level * RetainedList::keys_per_level;
  }

  void check_storage() const {
    Array<ChunkRecord> counted(chunks_.size());
    Array<std::uint8_t> taken(chunks_.size() * chunk_size_);
    Totals totals;
    for (std::size_t i = 0; i < topology_.num_indices(); ++i) {
      const auto index = static_cast<NodeIndex>(i);
      const TreeNode& n = topology_.node(index);
      if (n.state == NodeState::free) continue;
      ++totals.nodes;
      if (index == root_node) continue;
      check_node(n, index);
      totals.num_slots += to_size(n.length);
      totals.published += n.state == NodeState::published ? 1 : 0;
      totals.retained += n.retained ? 1 : 0;
      topology_.for_each_run(
          n, 0, n.length, [&](ChunkIndex s, std::int32_t offset, std::int32_t run, std::int32_t) {
            for (std::int32_t o = offset; o < offset + run; ++o)
              expect(taken[to_size(s) * chunk_size_ + to_size(o)]++ == 0, "a slot has one token",
                     s);
          });
      topology_.for_each_chunk(n, [&](ChunkIndex s) {
        NodeIndex& last = counted[to_size(s)].owner;
        if (last == none || topology_.node(last).position < n.position) last = index;
        ++counted[to_size(s)].nodes;
        counted[to_size(s)].active += n.active() ? 1 : 0;
        counted[to_size(s)].pinned += n.pins > 0 ? 1 : 0;
      });
    }
    check_totals(totals);
    check_chunks(counted);
    check_pins();
  }

  // A node beside its parent.
  void check_node(const TreeNode& n, NodeIndex index) const {
    const TreeNode& parent = topology_.node(n.parent);
    expect(parent.state != NodeState::free, "a node's parent exists", index);
    expect(n.position == parent.end(), "a node continues its parent", index);
    expect(n.written >= 0 && n.written <= n.length, "written tokens lie within the node", index);
    expect(n.scheduled >= n.written || n.written == n.length, "written was scheduled", index);
    expect(n.scheduled >= 0 && n.scheduled <= n.length, "scheduled tokens lie within the node",
           index);
    expect(n.writer == none || n.length == 0 || n.written < n.length,
           "what is written has no writer", index);
    expect(n.tail_of == none || sequences_[n.tail_of].tail == index, "a sequence's tail", index);
    expect(n.live <= parent.live && n.held <= parent.held, "counts grow towards the root", index);
    expect(n.retained == (!n.active()), "exactly the unused nodes are retained", index);
    expect(!n.retained || (n.state == NodeState::published && n.length > 0 &&
                           n.written == n.length && is_valued_more(parent_or_self(n), n)),
           "a retained node is published, written, and valued no more than its parent", index);
    expect(n.tail_of != none || n.length > 0, "only tails are empty", index);
    if (n.state != NodeState::published) return;
    expect(parent.state == NodeState::published, "a published node has a published parent", index);
    expect(prefixes_.find_equal(n) == index, "published children differ in their key", index);
  }

  void check_totals(const Totals& counted) const {
    topology_.observers.notify([&](const NodeObserver& observer) {
      expect(observer.is_consistent(), "an observer keeps what the tree says", root_node);
    });
    std::size_t listed = 0;
    Array<const void*> passed(topology_.num_indices());
    for (const auto& list : retention_.lists_) {
      NodeIndex last = none;
      for (NodeIndex n = list.oldest; n != none; last = n, n = topology_.node(n).newer) {
        passed[to_size(n)] = &list;
        expect(passed[to_size(topology_.node(n).parent)] != &list,
               "children go before their parents", n);
        expect(topology_.node(n).older == last, "retained nodes are linked both ways", n);
        expect(list_key_of(topology_.node(n)) == list.key, "a retained node's list", n);
        ++listed;
      }
      expect(list.oldest == none || list.is_queued, "a list with nodes is queued", list.oldest);
      expect(list.newest == last, "the newest retained node ends its list", last);
      expect(list.hand == none || passed[to_size(list.hand)] == &list, "a hand is in its list", 0);
    }
    expect_equal(counted.nodes, stats_.nodes, "number of nodes");
    expect_equal(counted.num_slots, stats_.stored_tokens, "stored tokens");
    expect_equal(counted.published, prefixes_.num_published(), "published nodes");
    expect_equal(counted.retained, listed, "retained nodes");
    expect(retention_.order() == nullptr || retention_.order()->is_consistent(),
           "what the order of eviction counts", 0);
  }

  void check_chunks(const Array<ChunkRecord>& counted) const {
    std::size_t used = 0, cached = 0, pinned = 0;
    for (std::size_t s = 0; s < chunks_.size(); ++s) {
      const auto index = static_cast<ChunkIndex>(s);
      expect(counted[s].nodes == chunks_[index].nodes, "nodes per chunk", index);
      expect(counted[s].nodes == 0 || chunks_[index].owner == counted[s].owner,
             "the last node in a chunk owns what is after it", index);
      expect(counted[s].active == chunks_[index].active, "active nodes per chunk", index);
      expect(counted[s].pinned == chunks_[index].pinned, "pinned nodes per chunk", index);
      pinned += counted[s].pinned > 0;
      used += counted[s].nodes > 0;
      cached += counted[s].nodes > 0 && counted[s].active == 0;
    }
    expect_equal(used, stats_.used_chunks, "used chunks");
    expect_equal(cached, stats_.retained_chunks, "retained chunks");
    expect_equal(pinned, chunks_.num_pinned(), "pinned chunks");
    if (chunks_.allocator().capacity() < max_pool_chunks)
      expect_equal(used + chunks_.allocator().available(), chunks_.allocator().capacity(),
                   "used and free chunks add up to the budget");
  }

  void check_pins() const {
    Array<std::int32_t> pins(topology_.num_indices());
    for (const NodeIndex last : retention_.pins_)
      for (NodeIndex n = last; n != none && n != root_node; n = topology_.node(n).parent)
        ++pins[to_size(n)];
    for (std::size_t i = 0; i < pins.size(); ++i)
      expect(topology_.node(static_cast<NodeIndex>(i)).pins == pins[i],
             "pins of paths through a node", static_cast<std::int64_t>(i));
  }

  void check_sequences() const {
    check_steps_and_copies();
    Array<TreeNode> counted(topology_.num_indices());
    std::size_t live = 0, leaving = 0;
    for (std::size_t i = 0; i < sequences_.num_indices(); ++i) {
      const SequenceRecord& record = sequences_[static_cast<SequenceIndex>(i)];
      if (record.state == SequenceState::free) continue;
      (record.state == SequenceState::live ? live : leaving) += 1;
      check_path(record, static_cast<SequenceIndex>(i), counted);
    }
    for (std::size_t i = 0; i < counted.size(); ++i) {
      const auto n = static_cast<NodeIndex>(i);
      if (topology_.node(n).state == NodeState::free) continue;
      expect(topology_.node(n).live == counted[i].live && topology_.node(n).held == counted[i].held,
             "sequences per node", n);
      expect(has_own_writer(n), "a node's writer has it on its path, live or kept for a step", n);
    }
    expect_equal(live, stats_.live_sequences, "live sequences");
    expect_equal(leaving, stats_.leaving_sequences, "leaving sequences");
  }

  // What outstanding steps and pending copies count on sequences and chunks.
  void check_steps_and_copies() const {
    Array<std::int32_t> copies_of(sequences_.num_indices()), copies(chunks_.size());
    Array<std::int32_t> steps(sequences_.num_indices()), superseded(steps.size());
    for (const auto& step : tree_.steps.all()) {
      if (step->state == StepState::free)
        expect(step->scratch == none, "a step that is over has no drafts", 0);
      if (step->scratch != none) ++steps[to_size(step->scratch)];
      if (!StepTable::is_outstanding(*step)) continue;
      for (const StepEntry& entry : step->entries) {
        ++steps[to_size(entry.sequence)];
        superseded[to_size(entry.sequence)] +=
            entry.epoch != sequences_[entry.sequence].epoch ? 1 : 0;
      }
    }
    for (const PendingCopy& copy : tree_.pending_copies) {
      ++copies[to_size(copy.rows.target_chunk)];
      ++copies_of[to_size(copy.source)];
      ++copies_of[to_size(copy.target)];
      expect(chunks_[copy.rows.source_chunk].nodes > 0 && chunks_[copy.rows.target_chunk].nodes > 0,
             "a pending copy is between chunks in use", copy.rows.target_chunk);
      const TreeNode& n = topology_.node(sequences_.node_of(copy.target, copy.position));
      const std::int32_t slot = n.begin + copy.position - n.position;
      expect(topology_.chunk_of(n, slot) == copy.rows.target_chunk &&
                 topology_.geometry.offset(slot) == copy.rows.target_begin,
             "a pending copy goes to its path position", copy.rows.target_chunk);
    }
    for (std::size_t i = 0; i < chunks_.size(); ++i)
      expect(chunks_[static_cast<ChunkIndex>(i)].pending_copies == copies[i],
             "pending copies into a chunk", static_cast<std::int64_t>(i));
    for (std::size_t i = 0; i < sequences_.num_indices(); ++i) {
      const SequenceRecord& record = sequences_[static_cast<SequenceIndex>(i)];
      if (record.state == SequenceState::free) continue;
      expect(record.copies == copies_of[i], "pending copies from or to a sequence",
             static_cast<std::int64_t>(i));
      expect(record.steps == steps[i] && record.superseded == superseded[i],
             "outstanding steps of a sequence", static_cast<std::int64_t>(i));
      expect(record.state == SequenceState::live || record.steps > 0 || record.copies > 0,
             "who has left is still there for a step or a copy", static_cast<std::int64_t>(i));
    }
    check_scheduled();
  }

  // What is scheduled of a live writer's tokens is what outstanding steps are to write, and drafts
  // of finished ones that are neither accepted nor rejected yet.
  void check_scheduled() const {
    Array<std::int32_t> scheduled(topology_.num_indices());
    for (const auto& step : tree_.steps.all()) {
      if (step->state == StepState::free || step->is_void) continue;
      for (const StepEntry& entry : step->entries) {
        if (entry.epoch != sequences_[entry.sequence].epoch) continue;
        if (step->state == StepState::finished && !tree_.has_output(entry)) continue;
        sequences_.for_each_node(entry.sequence, {entry.begin, entry.length},
                                 [&](NodeIndex n, std::int32_t offset, std::int32_t length) {
                                   std::int32_t& end = scheduled[to_size(n)];
                                   if (topology_.node(n).writer == entry.sequence)
                                     end = (std::max)(end, offset + length);
                                 });
      }
    }
    for (std::size_t i = 1; i < scheduled.size(); ++i) {
      const TreeNode& n = topology_.node(static_cast<NodeIndex>(i));
      if (n.writer != none && sequences_[n.writer].state == SequenceState::live)
        expect(n.scheduled == (std::max)(n.written, scheduled[i]), "what is scheduled is in a step",
               static_cast<std::int64_t>(i));
    }
  }

  // A sequence's tail and its path; counts it on the nodes.
  void check_path(const SequenceRecord& record, SequenceIndex s, Array<TreeNode>& counted) const {
    const bool is_live = record.state == SequenceState::live;
    const TreeNode& tail = topology_.node(record.tail);
    expect(!is_live || (tail.tail_of == s && tail.first_child == none),
           "a live sequence has a tail of its own", s);
    expect(!is_live || tail.length == 0 || topology_.owns_end(tail),
           "a live tail owns the slots after its tokens", s);
    expect(tail.end() == record.size + record.reserved, "the path holds exactly the sequence", s);
    expect(record.cursor <= record.size + record.reserved, "what is computed has a slot", s);
    std::int32_t covered = 0;
    for (NodeIndex index = record.tail; index != none; index = topology_.node(index).parent) {
      const TreeNode& n = topology_.node(index);
      (is_live ? counted[to_size(index)].live : counted[to_size(index)].held) += 1;
      covered += n.length;
      if (is_live && index != root_node && n.written < n.length)
        expect(n.writer != none, "pending K/V has a writer", index);
    }
    expect(covered == tail.end(), "the path has no gaps", s);
  }

  [[nodiscard]] bool has_own_writer(NodeIndex index) const noexcept {
    const TreeNode& n = topology_.node(index);
    if (n.writer == none) return true;
    const SequenceRecord& writer = sequences_[n.writer];
    const bool is_writing = writer.state == SequenceState::live ||
                            (writer.state == SequenceState::leaving && writer.steps > 0);
    NodeIndex i = is_writing ? writer.tail : none;
    while (i != none && i != index) i = topology_.node(i).parent;
    return i == index;
  }

  static void expect(bool ok, const char* what, std::int64_t index) {
    if (!ok) [[unlikely]]
      fail(Error(joined({"prefix tree invariant broken: ", what, " (at ", index, ")"})));
  }
  static void expect_equal(std::size_t counted, std::size_t kept, const char* what) {
    expect(counted == kept, what, static_cast<std::int64_t>(counted));
  }
  /// Whether a parent has at least the level of its child; within a level, groups are no order.
  [[nodiscard]] static bool is_valued_more(const TreeNode& parent, const TreeNode& child) noexcept {
    return parent.pins > 0 || (child.pins == 0 && parent.level >= child.level);
  }
  [[nodiscard]] const TreeNode& parent_or_self(const TreeNode& n) const noexcept {
    return n.parent == root_node ? n : topology_.node(n.parent);
  }

  const TreeCore& tree_;
  const Topology& topology_;
  const ChunkTable& chunks_;
  const Prefixes& prefixes_;
  const Retention& retention_;
  const SequenceTable& sequences_;
  const TreeStats& stats_;
  std::size_t chunk_size_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
