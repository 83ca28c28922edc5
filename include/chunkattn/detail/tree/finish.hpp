// A step ends, whether it has run or not; the outputs of one that has run become known tokens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "../support/check.hpp"
#include "../support/config.hpp"
#include "core.hpp"
#include "write.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

CHUNKATTN_FUNCTION void TreeCore::finish(StepRecord& step) {
  steps.check_finish(step);
  resolve_abandoned(step.number);
  notify_step_end(step, !step.is_void);
  step.all_outputs = true;
  step.num_outputs = static_cast<std::int32_t>(step.entries.size());
  for (StepEntry* entry = step.entries.begin();; ++entry) {
    if (!step.is_void)
      entry = mark_decoded(entry, step.entries.end(), sequences.records(), topology.nodes());
    if (entry == step.entries.end()) break;
    end_entry(step, *entry, sequences[entry->sequence]);
    step.num_outputs -= entry->has_output ? 0 : 1;
  }
  step.discarded_outputs = sequences.discarded_outputs();
  if (!pending_copies.empty() && !step.is_void)
    erase_copies([&](const PendingCopy& copy) { return copy.step == step.number; });
  if (topology.observers.follow_writes() && !step.is_void) [[unlikely]]
    for (const StepEntry& entry : step.entries) notify_written(entry.sequence, entry.begin);
  step.state = StepState::finished;  // no longer in flight, for idle_before()
  resolve_abandoned(0);
  steps.close(step, StepState::finished);
  finish_all_leaving();
}

CHUNKATTN_FUNCTION void TreeCore::device_idle() noexcept {
  steps.device_idle();
  resolve_abandoned(0);
  steps.count_void();
  finish_all_leaving();
}

CHUNKATTN_FUNCTION void TreeCore::drop_step(std::int32_t index) noexcept {
  StepRecord& step = steps[index];
  if (step.state == StepState::finished) return close_step(step);
  if (step.state == StepState::open) return cancel_step(step);
  abandon_step(step);
}

CHUNKATTN_FUNCTION void TreeCore::close_step(StepRecord& step) noexcept {
  if (step.num_outputs > 0)
    for (const StepEntry& entry : step.entries)
      if (has_output(entry)) sequences.drop_reserved(sequences[entry.sequence]);
  step.state = StepState::free;
  if (release_scratch(step.scratch)) finish_all_leaving();
}

CHUNKATTN_FUNCTION void TreeCore::notify_written(SequenceIndex s, std::int32_t begin) noexcept {
  const std::int32_t end = sequences.tail(s).position;  // no prompt finds a private tail
  if (!topology.observers.follow_writes() || begin >= end) return;
  sequences.for_each_node(s, {begin, end - begin}, [&](NodeIndex n, std::int32_t, std::int32_t) {
    topology.observers.notify([=](NodeObserver& observer) { observer.on_written(n); });
  });
}

CHUNKATTN_FUNCTION void TreeCore::end_entry(StepRecord& step, StepEntry& entry,
                                            SequenceRecord& record) noexcept {
  --record.steps;
  if (step.is_void || entry.epoch != record.epoch) {
    if (take_back(entry, record)) sequences.drop_reserved(record);  // and what came after it
    entry.has_output = false;
  } else {
    mark_written(entry, record);
  }
  end_step_of(entry.sequence);
  step.all_outputs = step.all_outputs && entry.has_output && record.state == SequenceState::live &&
                     entry.output_position() == record.size;
}

CHUNKATTN_COLD CHUNKATTN_FUNCTION void TreeCore::cancel_step(StepRecord& step) noexcept {
  notify_step_end(step, /*has_run=*/false);
  for (const StepEntry& entry : step.entries) {
    cancel_entry(entry);
    end_step_of(entry.sequence);
  }
  release_scratch(step.scratch);
  steps.close(step, StepState::free);
  finish_all_leaving();
}

CHUNKATTN_COLD CHUNKATTN_FUNCTION void TreeCore::abandon_step(StepRecord& step) noexcept {
  steps.abandon(step);
  for (const auto& other : steps.all()) {
    if (other->number < step.number || other->is_void || !StepTable::is_outstanding(*other))
      continue;
    other->is_void = true;
    for (const StepEntry& entry : other->entries) set_scheduled(entry, false);
  }
  topology.observers.notify([](NodeObserver& observer) { observer.on_void(); });
}

CHUNKATTN_COLD CHUNKATTN_FUNCTION void TreeCore::end_abandoned(std::uint64_t before) noexcept {
  before = (std::max)(before, steps.idle_before());
  for (const auto& step : steps.all()) {
    if (step->state != StepState::abandoned || step->number >= before) continue;
    notify_step_end(*step, /*has_run=*/false);
    for (StepEntry& entry : step->entries) end_entry(*step, entry, sequences[entry.sequence]);
    release_scratch(step->scratch);
    step->state = StepState::free;
  }
}

// ---- outputs ----------------------------------------------------------------------------------

CHUNKATTN_FUNCTION std::size_t TreeCore::count_outputs(const StepRecord& step) const {
  if (has_all_outputs(step)) return step.entries.size();
  std::size_t outputs = 0;
  for (const StepEntry& entry : step.entries) {
    if (!has_output(entry)) continue;
    check_output_order(entry);
    ++outputs;
  }
  return outputs;
}

CHUNKATTN_FUNCTION void TreeCore::check_outputs(const StepEntry& entry, std::size_t count) const {
  check_output(entry);
  if (count != 1 && entry.drafts == 0) [[unlikely]]
    fail_argument("outputs.size()", count, "1: the row has no drafts");
  if (count < 1 || count > to_size(entry.drafts) + 1) [[unlikely]]
    fail_argument("outputs.size()", count,
                  {"1 to ", entry.drafts + 1, ", the row's drafts and one more"});
  check_output_order(entry);
}

CHUNKATTN_FUNCTION void TreeCore::check_output(const StepEntry& entry) const {
  if (!has_output(entry)) [[unlikely]]
    fail_argument("row", "without output",
                  "a row of Finished::rows(): live, not superseded, not committed yet");
}

CHUNKATTN_FUNCTION void TreeCore::check_output_order(const StepEntry& entry) const {
  const SequenceRecord& record = sequences[entry.sequence];
  if (entry.output_position() != record.size) [[unlikely]]
    fail_argument(
        "position of the row's output", entry.output_position(),
        {record.size, ": commit the outputs of the earlier step first, or drop its Finished"});
}

CHUNKATTN_FUNCTION std::int32_t TreeCore::depth_of(const StepEntry& entry,
                                                   std::span<const Draft> tree, std::int32_t leaf) {
  const std::int32_t count = tree.empty() ? entry.drafts : static_cast<std::int32_t>(tree.size());
  if (leaf != none && count == 0) [[unlikely]]
    fail_argument("leaf", leaf, "-1: the row has no drafts");
  if (leaf < none || leaf >= count) [[unlikely]]
    fail_argument("leaf", leaf, {"-1, none, or one of the row's drafts, below ", count});
  if (leaf == none) return 0;
  return tree.empty() ? leaf + 1 : tree[to_size(leaf)].depth;
}

CHUNKATTN_FUNCTION bool TreeCore::move_branch(const StepRecord& step, const StepEntry& entry,
                                              std::span<const Draft> tree,
                                              std::int32_t leaf) noexcept {
  const SequenceIndex s = entry.sequence;
  const TreeNode& tail = sequences.tail(s);
  bool any = false;
  for (std::int32_t i = leaf; i != none; i = tree[to_size(i)].parent) {
    const Draft& draft = tree[to_size(i)];
    const std::int32_t position = entry.output_position() + draft.depth - 1;
    const std::int32_t slot = tail.begin + position - tail.position;
    const ChunkIndex chunk = topology.chunk_of(tail, slot);
    const std::int32_t offset = topology.geometry.offset(slot);
    if (chunk == draft.chunk) continue;  // of the main branch: the others have chunks beside
    request_copy({{draft.chunk, draft.offset, chunk, offset, 1}, step.scratch, s, position});
    any = true;
  }
  return any;
}

CHUNKATTN_FUNCTION void TreeCore::commit_general(StepEntry& entry, SequenceRecord& record,
                                                 std::int32_t count, bool on_main_branch) noexcept {
  TreeNode& tail = topology.node(record.tail);
  const std::int32_t first = record.size - tail.position;
  entry.has_output = false;
  record.size += count;
  record.reserved -= count;
  if (count <= entry.drafts || !on_main_branch) [[unlikely]] {
    record.computed = (std::min)(record.computed, record.size - 1);  // a draft's, at that slot
    sequences.drop_reserved(record);
    record.cursor = record.size - 1;
    tail.scheduled = (std::min)(tail.scheduled, record.cursor - tail.position);
  }
  if (tail.written == first)  // else an earlier position is still to be computed
    tail.set_written((std::min)(record.computed, record.size) - tail.position);
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END
