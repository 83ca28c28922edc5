// Results and Outputs: the end of a step, whether it has run or not, and the outputs that are
// committed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "../support/check.hpp"
#include "../support/config.hpp"
#include "../support/to_size.hpp"
#include "departures.hpp"
#include "pending.hpp"
#include "prefixes.hpp"
#include "sequence_table.hpp"
#include "step_table.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// The outputs of finished steps: which can be committed, and what a sequence is once they are.
class Outputs {
 public:
  Outputs(Topology& topology, SequenceTable& sequences, Copies& copies)
      : topology_(topology), sequences_(sequences), copies_(copies) {}

  /// Whether the entry's outputs can still be committed.
  [[nodiscard]] bool has_output(const StepEntry& entry) const noexcept {
    const SequenceRecord& record = sequences_[entry.sequence];  // leaving raises the generation
    return entry.has_output && record.generation == entry.generation && record.epoch == entry.epoch;
  }
  /// How many entries has_output(). Throws InvalidArgument where one of them cannot be committed
  /// yet.
  [[nodiscard]] std::size_t count(const StepRecord& step) const {
    if (has_all(step)) return step.entries.size();
    std::size_t outputs = 0;
    for (const StepEntry& entry : step.entries) {
      if (!has_output(entry)) continue;
      check_order(entry);
      ++outputs;
    }
    return outputs;
  }
  /// Throws InvalidArgument unless the entry's outputs can be committed now, `count` of them.
  void check(const StepEntry& entry, std::size_t count) const {
    check(entry);
    if (count != 1 && entry.drafts == 0) [[unlikely]]
      fail_argument("outputs.size()", count, "1: the row has no drafts");
    if (count < 1 || count > to_size(entry.drafts) + 1) [[unlikely]]
      fail_argument("outputs.size()", count,
                    {"1 to ", entry.drafts + 1, ", the row's drafts and one more"});
    check_order(entry);
  }
  /// Throws InvalidArgument unless outputs of the entry can be committed at some time.
  void check(const StepEntry& entry) const {
    if (!has_output(entry)) [[unlikely]]
      fail_argument("row", "without output",
                    "a row of Finished::rows(): live, not superseded, not committed yet");
  }

  // ---- drafts that were accepted -------------------------------------------------------------

  /// How many drafts the branch has that ends with draft `leaf` of the entry; none: 0. Throws
  /// InvalidArgument where there is no such draft.
  static std::int32_t depth_of(const StepEntry& entry, std::span<const Draft> tree,
                               std::int32_t leaf) {
    const std::int32_t count = tree.empty() ? entry.drafts : static_cast<std::int32_t>(tree.size());
    if (leaf != none && count == 0) [[unlikely]]
      fail_argument("leaf", leaf, "-1: the row has no drafts");
    if (leaf < none || leaf >= count) [[unlikely]]
      fail_argument("leaf", leaf, {"-1, none, or one of the row's drafts, below ", count});
    if (leaf == none) return 0;
    return tree.empty() ? leaf + 1 : tree[to_size(leaf)].depth;
  }
  /// Makes room, so that move() cannot fail.
  void reserve_moves(std::int32_t count) { copies_.reserve(to_size(count)); }
  /// Asks for copies of what an accepted branch has in scratch slots to those after the known
  /// tokens. Returns whether there is any.
  bool move(const StepRecord& step, const StepEntry& entry, std::span<const Draft> tree,
            std::int32_t leaf) noexcept {
    const SequenceIndex s = entry.sequence;
    const TreeNode& tail = sequences_.tail(s);
    bool any = false;
    for (std::int32_t i = leaf; i != none; i = tree[to_size(i)].parent) {
      const Draft& draft = tree[to_size(i)];
      const std::int32_t position = entry.output_position() + draft.depth - 1;
      const std::int32_t slot = tail.begin + position - tail.position;
      const ChunkIndex chunk = topology_.chunk_of(tail, slot);
      const std::int32_t offset = topology_.geometry.offset(slot);
      if (chunk == draft.chunk && offset == draft.offset) continue;  // of the main branch
      copies_.request(step.scratch, s, {draft.chunk, draft.offset, chunk, offset, 1}, position);
      any = true;
    }
    return any;
  }

  // ---- commit --------------------------------------------------------------------------------

  /// The tokens that were stored from the entry's output position on are known: accepted drafts,
  /// then one more, which is the next to be computed.
  /// \param on_main_branch  the accepted drafts stand at these slots
  void commit(StepRecord& step, StepEntry& entry, std::int32_t count,
              bool on_main_branch = true) noexcept {
    SequenceRecord& record = sequences_[entry.sequence];
    --step.num_outputs;
    if (count == 1 && is_plain(entry, record)) return commit_plain(entry, record);
    TreeNode& tail = topology_.node(record.tail);
    const std::int32_t first = record.size - tail.position;
    entry.has_output = false;
    record.size += count;
    record.reserved -= count;
    if (count <= entry.drafts || !on_main_branch) [[unlikely]] {
      record.computed = std::min(record.computed, record.size - 1);  // a draft's, at that slot
      sequences_.drop_reserved(record);
      record.cursor = record.size - 1;
      tail.scheduled = std::min(tail.scheduled, record.cursor - tail.position);
    }
    if (tail.written == first)  // else an earlier position is still to be computed
      tail.set_written(std::min(record.computed, record.size) - tail.position);
  }
  /// One output of each entry that has one, all of which count() has checked.
  /// \param store  as for commit_plain()
  template <class Store>
  void commit_all(StepRecord& step, Store store) {
    const bool all = has_all(step);
    StepEntry* const end = step.entries.end();
    for (StepEntry* entry = step.entries.begin();; ++entry) {
      if (all) {
        StepEntry* const first = entry;
        entry = commit_plain(first, end, sequences_.records(), store);
        step.num_outputs -= static_cast<std::int32_t>(entry - first);
      }
      if (entry == end) break;
      if (!all && !has_output(*entry)) continue;
      store(*entry);
      commit(step, *entry, 1);
    }
  }
  /// Those that were not committed are not any more.
  void discard(const StepRecord& step) noexcept {
    if (step.num_outputs == 0) return;
    for (const StepEntry& entry : step.entries)
      if (has_output(entry)) sequences_.drop_reserved(sequences_[entry.sequence]);
  }

 private:
  /// Whether nothing has come between the end of the step, when each of its entries had one output
  /// to come, and this.
  [[nodiscard]] bool has_all(const StepRecord& step) const noexcept {
    return step.all_outputs && to_size(step.num_outputs) == step.entries.size() &&
           step.discarded_outputs == sequences_.discarded_outputs();
  }
  void check_order(const StepEntry& entry) const {
    const SequenceRecord& record = sequences_[entry.sequence];
    if (entry.output_position() != record.size) [[unlikely]]
      fail_argument(
          "position of the row's output", entry.output_position(),
          {record.size, ": commit the outputs of the earlier step first, or drop its Finished"});
  }

  /// Whether an output of the entry, which can be committed, only makes its sequence longer.
  [[nodiscard]] CHUNKATTN_INLINE static bool is_plain(const StepEntry& entry,
                                                      const SequenceRecord& record) noexcept {
    return entry.chunk != no_chunk && record.computed == record.size;
  }
  /// Commits it; its token stands after that of the row, in the same chunk.
  CHUNKATTN_INLINE static void commit_plain(StepEntry& entry, SequenceRecord& record) noexcept {
    entry.has_output = false;
    record.size += 1;
    record.reserved -= 1;
  }
  /// Stores and commits one output of each entry, from `entry` on as far as it is plain. Returns
  /// the first that is not, or `end`.
  /// \param store  store(entry) stores the next output; store.ahead(entry) asks early for its place
  template <class Store>
  __attribute__((noinline)) static StepEntry* commit_plain(StepEntry* entry, StepEntry* end,
                                                           SequenceRecord* records, Store& store) {
    Store next = store;  // in registers
    for (; entry != end; ++entry) {
      SequenceRecord& record = records[entry->sequence];
      if (!is_plain(*entry, record)) [[unlikely]]
        break;
      if (end - entry > 16) next.ahead(entry[16]);
      next(*entry);
      commit_plain(*entry, record);
    }
    store = next;
    return entry;
  }

  Topology& topology_;
  SequenceTable& sequences_;
  Copies& copies_;
};

/// The ends of steps.
class Results {
 public:
  Results(SequenceTable& sequences, StepTable& steps, Copies& copies, Writers& writers,
          Departures& departures, Outputs& outputs, const NodeObservers& observers)
      : sequences_(sequences),
        steps_(steps),
        copies_(copies),
        writers_(writers),
        departures_(departures),
        outputs_(outputs),
        observers_(observers) {}

  /// The device has run the step: the K/V of its positions is written.
  void finish(StepRecord& step) {
    steps_.check_finish(step);
    resolve_abandoned(step.number);
    step.all_outputs = true;
    step.num_outputs = static_cast<std::int32_t>(step.entries.size());
    for (StepEntry* entry = step.entries.begin();; ++entry) {
      if (!step.is_void) entry = writers_.mark_decoded(entry, step.entries.end());
      if (entry == step.entries.end()) break;
      end_entry(step, *entry, sequences_[entry->sequence]);
      step.num_outputs -= entry->has_output ? 0 : 1;
    }
    step.discarded_outputs = sequences_.discarded_outputs();
    if (!copies_.empty() && !step.is_void) copies_.complete(step.number);
    if (!observers_.empty() && !step.is_void)
      for (const StepEntry& entry : step.entries) notify_written(entry.sequence, entry.begin);
    step.state = StepState::finished;
    resolve_abandoned(0);
    steps_.end(step, StepState::finished);
    departures_.finish_all();
  }
  /// Nothing runs any more: steps that were dropped in flight hold nothing back.
  void device_idle() noexcept {
    steps_.device_idle();
    resolve_abandoned(0);
    steps_.count_void();
    departures_.finish_all();
  }

  /// K/V of the sequence from this position on may be new: notifies the observers of nodes.
  void notify_written(SequenceIndex s, std::int32_t begin) noexcept {
    const std::int32_t end = sequences_.tail(s).position;  // private tails are found by nobody
    if (observers_.empty() || begin >= end) return;
    sequences_.for_each_node(s, {begin, end - begin}, [&](NodeIndex n, std::int32_t, std::int32_t) {
      observers_.notify([=](NodeObserver& observer) { observer.on_written(n); });
    });
  }

  /// The handle of an open step or a step in flight is gone.
  CHUNKATTN_COLD void drop(std::int32_t index, std::uint64_t number) noexcept {
    StepRecord& step = steps_[index];
    if (step.number != number) return;
    if (step.state == StepState::open) cancel(step);
    if (step.state == StepState::in_flight) abandon(step);
  }
  /// The handle of a finished step is gone: what was not committed is discarded.
  void close(std::int32_t index, std::uint64_t number) noexcept {
    StepRecord& step = steps_[index];
    if (step.number != number || step.state != StepState::finished) return;
    outputs_.discard(step);
    step.entries.clear();
    step.state = StepState::free;
    if (departures_.release_scratch(step.scratch)) departures_.finish_all();
  }

 private:
  /// The step has run: what of the entry counts.
  void end_entry(StepRecord& step, StepEntry& entry, SequenceRecord& record) noexcept {
    --record.steps;
    if (step.is_void || entry.epoch != record.epoch) {
      writers_.discard(entry, record);
      entry.has_output = false;
    } else {
      writers_.mark_written(entry, record);
    }
    writers_.end_step_of(entry.sequence);
    step.all_outputs = step.all_outputs && entry.has_output && entry.drafts == 0 &&
                       record.state == SequenceState::live &&
                       entry.output_position() == record.size;
  }
  /// The step does not run: its slots come back, its copies are still to be made.
  void cancel(StepRecord& step) noexcept {
    for (const StepEntry& entry : step.entries) {
      writers_.cancel(entry, /*keep_chunks=*/sequences_[entry.sequence].steps > 1);
      writers_.end_step_of(entry.sequence);
    }
    departures_.release_scratch(step.scratch);
    steps_.end(step, StepState::free);
    departures_.finish_all();
  }

  /// The step's handle was lost in flight: until a later step has finished the device may still
  /// run it, and what was planned after it rests on it.
  void abandon(StepRecord& step) noexcept {
    steps_.abandon(step);
    for (StepRecord* other : steps_.all()) {
      if (other->number < step.number || other->is_void || !StepTable::is_outstanding(*other))
        continue;
      other->is_void = true;
      for (const StepEntry& entry : other->entries) writers_.unschedule(entry);
    }
  }

  /// Ends the abandoned steps before `before`, and those that an idle device ran before any step
  /// that is still to finish: outputs are discarded in the order of steps.
  void resolve_abandoned(std::uint64_t before) noexcept {
    if (!steps_.any_void()) return;
    before = std::max(before, steps_.idle_before());
    for (StepRecord* step : steps_.all()) {
      if (step->state != StepState::abandoned || step->number >= before) continue;
      for (const StepEntry& entry : step->entries) {
        SequenceRecord& record = sequences_[entry.sequence];
        --record.steps;
        writers_.discard(entry, record);
        writers_.end_step_of(entry.sequence);
      }
      departures_.release_scratch(step->scratch);
      step->entries.clear();
      step->state = StepState::free;
    }
  }

  SequenceTable& sequences_;
  StepTable& steps_;
  Copies& copies_;
  Writers& writers_;
  Departures& departures_;
  Outputs& outputs_;
  const NodeObservers& observers_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
