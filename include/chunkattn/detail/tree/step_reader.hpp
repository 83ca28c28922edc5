// StepReader: all that a plan sees of a step and of its tree.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "../../plan_view.hpp"
#include "../support/array.hpp"
#include "../support/config.hpp"
#include "core.hpp"
#include "handles.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// An open step, for its plan: which rows it computes, which nodes they read, and where their K/V
/// go. The plan learns nothing else of the tree.
class StepReader {
 public:
  StepReader(TreeCore& core, StepRecord& step) noexcept : core_(core), step_(step) {}

  // ---- the step ------------------------------------------------------------------------------

  [[nodiscard]] std::span<const StepEntry> entries() const noexcept { return step_.entries; }
  [[nodiscard]] std::int32_t num_rows() const noexcept { return step_.num_rows; }
  /// Whether drafts of any entry are a tree.
  [[nodiscard]] bool has_trees() const noexcept { return !step_.trees.empty(); }
  /// The drafts of an entry in the caller's order, where they are no chain; else nothing.
  [[nodiscard]] std::span<const Draft> tree_of(const StepEntry& entry) const noexcept {
    return step_.tree_of(entry);
  }
  /// Whether the entry's rows are not superseded: else its path may have become shorter.
  [[nodiscard]] bool counts(const StepEntry& entry) const noexcept {
    return entry.epoch == core_.sequences[entry.sequence].epoch;
  }

  // ---- the tree ------------------------------------------------------------------------------

  [[nodiscard]] std::uint64_t tree_id() const noexcept { return core_.id; }
  /// PrefixTree::version().
  [[nodiscard]] std::uint64_t version() const noexcept { return core_.sequences.version(); }
  [[nodiscard]] std::int32_t chunk_size() const noexcept { return core_.topology.geometry.size; }
  /// The node that the entry's path ends with; the path goes up from it to root_node.
  [[nodiscard]] NodeIndex tail_of(const StepEntry& entry) const noexcept {
    return core_.sequences[entry.sequence].tail;
  }
  [[nodiscard]] const TreeNode& node(NodeIndex n) const noexcept { return core_.topology.node(n); }
  /// Whether the free slots after the node's last one are its own.
  [[nodiscard]] bool owns_end(NodeIndex n) const noexcept {
    return core_.topology.owns_end(node(n));
  }
  /// The chunk after this one in the run of a node.
  [[nodiscard]] ChunkIndex next_chunk(ChunkIndex s) const noexcept {
    return core_.chunk_table.next(s);
  }
  /// Calls f(chunk, offset, count, done) for the node's first `count` slots, chunk by chunk;
  /// `done` counts the slots before.
  template <class F>
  void for_each_run(NodeIndex n, std::int32_t count, const F& f) const {
    core_.topology.for_each_run(node(n), 0, count, f);
  }
  /// Calls f(row, chunk, offset, count) for where the K/V of the entry's first `num_rows` rows go,
  /// rows counted from its first. Positions that are written, or another sequence's to write, are
  /// left out.
  template <class F>
  void for_each_write(const StepEntry& entry, std::int32_t num_rows, const F& f) const {
    const TreeNode& tail = node(tail_of(entry));
    if (num_rows == 1 && entry.begin >= tail.position) {  // decode
      const std::int32_t first = entry.begin - tail.position, slot = tail.begin + first;
      if (tail.writer == entry.sequence && first >= tail.written && first < tail.length)
        f(0, core_.topology.chunk_of(tail, slot), core_.topology.geometry.offset(slot), 1);
      return;
    }
    core_.sequences.for_each_node(
        entry.sequence, {entry.begin, num_rows},
        [&](NodeIndex index, std::int32_t offset, std::int32_t length) {
          const TreeNode& n = node(index);
          if (n.writer != entry.sequence) return;
          const std::int32_t first = (std::max)(offset, n.written);
          const std::int32_t row = n.position + first - entry.begin;
          core_.topology.for_each_run(n, first, offset + length - first,
                                      [&](ChunkIndex chunk, std::int32_t slot, std::int32_t run,
                                          std::int32_t done) { f(row + done, chunk, slot, run); });
        });
  }

  // ---- the plan ------------------------------------------------------------------------------

  /// The step is to get a plan: another plan's view of it is out of date, since it may lack copies.
  void start_plan() noexcept {
    step_.invalidate_view();
    step_.built = false;
  }
  /// The row copies that the plan must carry.
  void carry_copies(Array<RowCopy>& rows) { core_.carry_copies(step_.number, rows); }
  /// The step's plan is there; the view is current until the ticket is taken back.
  /// \param number  the ticket's, of this view
  void finish_plan(PlanView& view, const std::shared_ptr<ViewTicket>& ticket,
                   std::uint64_t number) {
    view.tree_id = core_.id;
    view.step_number = step_.number;
    if (auto& observers = *core_.steps.observers(); observers.any()) [[unlikely]]
      observers.for_each([&](StepObserver& o) {
        o.on_built(view.step_number, view.writes_anything(), view.tree_id);
      });
    ticket->set(number);
    step_.ticket_number = number;
    step_.ticket = ticket;
    step_.built = true;
  }

 private:
  TreeCore& core_;
  StepRecord& step_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
