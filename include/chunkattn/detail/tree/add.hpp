// Sequences are added to an open step: their next positions, the slot of their output, their
// drafts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "../support/array.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"
#include "core.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

CHUNKATTN_FUNCTION AddOutcome TreeCore::add(StepRecord& step, SequenceIndex s,
                                            std::int32_t max_tokens, const NewDrafts& drafts) {
  look_ahead(s);
  step.entries.reserve_more(1);
  if (DecodingRun run = decoding(step); drafts.count == 0 && run.add(s, topology.geometry.size)) {
    run.store();
    step.built = false;
    return {};
  }
  return add_general(step, s, max_tokens, drafts);
}

[[gnu::noinline]] CHUNKATTN_FUNCTION AddOutcome TreeCore::add_general(StepRecord& step,
                                                                      SequenceIndex s,
                                                                      std::int32_t max_tokens,
                                                                      const NewDrafts& drafts) {
  if (!drafts.parents.empty()) reserve_joining(1);  // for add_scratch()
  SequenceRecord& record = sequences[s];
  if (record.last_step == step.number) [[unlikely]]
    fail_argument("sequence", "added twice", "each sequence at most once per step");
  const std::int32_t begin = record.cursor;
  const std::int32_t slots_end = record.size + record.reserved;
  if (begin == slots_end) return {AddResult::Reason::nothing_to_compute};
  if (step.is_void) [[unlikely]]
    return {AddResult::Reason::waits_for_step, none, step.number};
  if (record.steps > 0 && (record.superseded > 0 || steps.any_void())) [[unlikely]]
    return {AddResult::Reason::waits_for_step, none, steps.oldest_outstanding(s)};
  std::int32_t length = (std::min)(max_tokens, slots_end - begin);
  if (record.may_wait) {
    std::int32_t end = begin + length;
    const AddOutcome outcome = find_missing(s, end);
    if (end <= begin) return outcome;
    length = end - begin;
  }
  StepEntry entry;
  std::int32_t num_scratch = 0;
  if (begin + length == slots_end) {
    const DraftTree tree =
        plant_drafts(step, drafts.parents, (std::min)(max_tokens - length, drafts.count));
    entry.has_output = true;
    entry.drafts_known = drafts.known;
    entry.drafts = tree.main_branch;
    num_scratch = tree.num_scratch();
    const std::int32_t num_slots = entry.drafts + 1;
    if (num_slots > max_length - slots_end) [[unlikely]]
      fail_argument("tokens of the sequence", slots_end,
                    "at most 2^30, drafts and output included");
    if (!(num_scratch == 0 ? retention.grow_tail(record.tail, num_slots)
                           : grow_with_scratch(step, record.tail, num_slots, num_scratch)))
      return {AddResult::Reason::out_of_chunks};
    TreeNode& tail = topology.node(record.tail);
    tail.writer = s;
    record.reserved += num_slots;
    length += entry.drafts;
    if (num_scratch > 0) place_drafts(step, tree, tail, slots_end - tail.position);
  }
  entry.sequence = s;
  entry.generation = record.generation;
  entry.epoch = record.epoch;
  entry.begin = begin;
  entry.length = length;
  entry.first_row = step.num_rows;
  step.entries.push_back(entry);
  step.num_rows += length + num_scratch;
  step.built = false;
  set_scheduled(entry, true);
  record.cursor = begin + length;
  record.last_step = step.number;
  ++record.steps;
  return {};
}

CHUNKATTN_FUNCTION DraftTree TreeCore::plant_drafts(StepRecord& step,
                                                    std::span<const std::int32_t> parents,
                                                    std::int32_t count) {
  DraftTree tree{static_cast<std::int32_t>(step.entries.size()),
                 step.trees.empty() ? 0 : step.trees.back().end(), count, count};
  parents = parents.first((std::min)(parents.size(), to_size(count)));
  std::int32_t next = none;  // of a chain
  if (std::all_of(parents.begin(), parents.end(), [&](auto parent) { return parent == next++; }))
    return tree;
  step.trees.reserve_more(1);
  step.drafts.resize(to_size(tree.first));  // without those of an entry that was not added
  step.drafts.reserve_more(parents.size());
  tree.main_branch = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    const std::int32_t parent = parents[to_size(i)];
    const std::int32_t above = parent == none ? 0 : step.drafts[to_size(tree.first + parent)].depth;
    step.drafts.push_back({parent, above + 1, no_chunk, 0});
    if (above < tree.main_branch) continue;
    tree.main_branch = above + 1;
    tree.deepest = i;
  }
  return tree;
}

CHUNKATTN_FUNCTION bool TreeCore::grow_with_scratch(StepRecord& step, NodeIndex tail,
                                                    std::int32_t num_slots,
                                                    std::int32_t num_scratch) {
  const std::int32_t room = step.scratch == none ? 0 : topology.room(sequences.tail(step.scratch));
  if (!retention.acquire(
          topology.geometry.chunks_for(num_scratch - room) +
          topology.geometry.chunks_for(num_slots - topology.room(topology.node(tail))))) {
    ++stats.failed_adds;
    return false;
  }
  if (step.scratch == none) step.scratch = add_scratch();
  topology.extend(sequences[step.scratch].tail, num_scratch);
  sequences[step.scratch].reserved += num_scratch;
  topology.extend(tail, num_slots);
  chunk_table.release();
  return true;
}

CHUNKATTN_FUNCTION void TreeCore::place_drafts(StepRecord& step, const DraftTree& tree,
                                               const TreeNode& tail, std::int32_t first) noexcept {
  step.trees.push_back(tree);
  Draft* const drafts = step.drafts.begin() + tree.first;
  for (std::int32_t i = tree.deepest; i != none; i = drafts[i].parent) {
    const std::int32_t slot = tail.begin + first + drafts[i].depth - 1;
    drafts[i].chunk = topology.chunk_of(tail, slot);
    drafts[i].offset = topology.geometry.offset(slot);
  }
  const TreeNode& scratch = sequences.tail(step.scratch);
  Draft* next = drafts;
  topology.for_each_run(scratch, scratch.length - tree.num_scratch(), tree.num_scratch(),
                        [&](ChunkIndex chunk, std::int32_t offset, std::int32_t run, std::int32_t) {
                          for (const std::int32_t end = offset + run; offset < end;
                               ++offset, ++next) {
                            while (next->chunk != no_chunk) ++next;
                            next->chunk = chunk;
                            next->offset = offset;
                          }
                        });
}

/// A step goes over thousands of sequences, which do not fit in a core's cache: prefetches early
/// what those after `s` will touch.
CHUNKATTN_FUNCTION void TreeCore::look_ahead(SequenceIndex s) const noexcept {
  constexpr SequenceIndex node_lead = 14, slot_lead = 6;  // sequences are often added by index
  if (to_size(s + node_lead) >= sequences.num_indices()) return;
  const NodeIndex tail = sequences[s + node_lead].tail;
  if (tail != none) topology.prefetch(tail);
  const NodeIndex next_tail = sequences[s + slot_lead].tail;
  if (next_tail != none) topology.prefetch_end(next_tail);
}

CHUNKATTN_COLD CHUNKATTN_FUNCTION void TreeCore::take_out(StepRecord& step,
                                                          std::size_t first) noexcept {
  for (; step.entries.size() > first; step.entries.pop_back()) {
    const StepEntry& entry = step.entries.back();
    cancel_entry(entry);
    sequences[entry.sequence].last_step = 0;
    step.num_rows -= entry.length;
  }
}

CHUNKATTN_FUNCTION SequenceIndex TreeCore::add_scratch() noexcept {
  const SequenceIndex s = sequences.add();
  retention.use_path(root_node);
  sequences.add_tail(s, root_node, {});
  sequences[s].steps = 1;
  begin_leaving(s);
  return s;
}

CHUNKATTN_FUNCTION bool TreeCore::release_scratch(SequenceIndex& scratch) noexcept {
  if (scratch == none) return false;
  --sequences[scratch].steps;
  scratch = none;
  return true;
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END
