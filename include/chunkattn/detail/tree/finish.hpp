// A step ends, whether it has run or not.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../support/config.hpp"
#include "copy.hpp"
#include "core.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

CHUNKATTN_FUNCTION void TreeCore::finish(StepRecord& step) {
  steps.check_finish(step);
  steps.announce_finish(step);
  resolve_abandoned(step.number);
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
  if (!topology.observers.empty() && !step.is_void)
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
  discard_outputs(step);
  step.state = StepState::free;
  if (release_scratch(step.scratch)) finish_all_leaving();
}

CHUNKATTN_FUNCTION void TreeCore::notify_written(SequenceIndex s, std::int32_t begin) noexcept {
  const std::int32_t end = sequences.tail(s).position;  // no prompt finds a private tail
  if (topology.observers.empty() || begin >= end) return;
  sequences.for_each_node(s, {begin, end - begin}, [&](NodeIndex n, std::int32_t, std::int32_t) {
    topology.observers.notify([=](NodeObserver& observer) { observer.on_written(n); });
  });
}

CHUNKATTN_FUNCTION void TreeCore::end_entry(StepRecord& step, StepEntry& entry,
                                            SequenceRecord& record) noexcept {
  --record.steps;
  if (step.is_void || entry.epoch != record.epoch) {
    discard_entry(entry, record);
    entry.has_output = false;
  } else {
    mark_written(entry, record);
  }
  end_step_of(entry.sequence);
  step.all_outputs = step.all_outputs && entry.has_output && entry.drafts == 0 &&
                     record.state == SequenceState::live && entry.output_position() == record.size;
}

CHUNKATTN_FUNCTION void TreeCore::cancel_step(StepRecord& step) noexcept {
  for (const StepEntry& entry : step.entries) {
    cancel_entry(entry, /*keep_chunks=*/sequences[entry.sequence].steps > 1);
    end_step_of(entry.sequence);
  }
  release_scratch(step.scratch);
  steps.close(step, StepState::free);
  finish_all_leaving();
}

CHUNKATTN_FUNCTION void TreeCore::abandon_step(StepRecord& step) noexcept {
  steps.abandon(step);
  for (StepRecord* other : steps.all()) {
    if (other->number < step.number || other->is_void || !StepTable::is_outstanding(*other))
      continue;
    other->is_void = true;
    for (const StepEntry& entry : other->entries) set_scheduled(entry, false);
  }
}

CHUNKATTN_FUNCTION void TreeCore::resolve_abandoned(std::uint64_t before) noexcept {
  if (!steps.any_void()) return;
  before = std::max(before, steps.idle_before());
  for (StepRecord* step : steps.all()) {
    if (step->state != StepState::abandoned || step->number >= before) continue;
    for (StepEntry& entry : step->entries) end_entry(*step, entry, sequences[entry.sequence]);
    release_scratch(step->scratch);
    step->state = StepState::free;
  }
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END
