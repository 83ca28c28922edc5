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

/// The drafts of an entry that is being added: which of them stand on the main branch, which have
/// scratch slots. Until keep() nothing has happened.
class DraftPlacement {
 public:
  /// \param count  of the drafts, how many the step has rows for
  DraftPlacement(StepRecord& step, const NewDrafts& added, std::int32_t count)
      : step_(step), main_branch_(count), before_(step.drafts.size()) {
    if (added.parents.empty() || count == 0) return;
    const auto parents = added.parents.first(to_size(count));
    std::int32_t next = -1;  // of a chain
    for (const std::int32_t parent : parents) is_tree_ = is_tree_ || parent != next++;
    if (is_tree_) plant(parents);
  }
  DraftPlacement(const DraftPlacement&) = delete;
  DraftPlacement& operator=(const DraftPlacement&) = delete;
  ~DraftPlacement() {
    if (is_tree_) step_.drafts.resize(before_);
  }

  /// Drafts that stand on the sequence's own slots.
  [[nodiscard]] std::int32_t main_branch() const noexcept { return main_branch_; }
  /// Drafts that have scratch slots; 0 where they are a chain.
  [[nodiscard]] std::int32_t num_scratch() const noexcept {
    return is_tree_ ? static_cast<std::int32_t>(step_.drafts.size() - before_) - main_branch_ : 0;
  }
  /// The step's next entry has the drafts, its main branch from slot `first` of the tail on, the
  /// others on the last scratch slots.
  void keep(const Topology& topology, const TreeNode& tail, std::int32_t first,
            const TreeNode& scratch) noexcept {
    const std::span<Draft> drafts{step_.drafts.begin() + before_, step_.drafts.size() - before_};
    step_.trees.push_back({static_cast<std::int32_t>(step_.entries.size()),
                           static_cast<std::int32_t>(before_),
                           static_cast<std::int32_t>(drafts.size())});
    std::int32_t num_scratch = static_cast<std::int32_t>(drafts.size());
    for (std::int32_t i = deepest_; i != none; i = drafts[to_size(i)].parent, --num_scratch) {
      const std::int32_t slot = tail.begin + first + drafts[to_size(i)].depth - 1;
      drafts[to_size(i)].chunk = topology.chunk_of(tail, slot);
      drafts[to_size(i)].offset = topology.geometry.offset(slot);
    }
    Draft* next = drafts.data();
    topology.for_each_run(
        scratch, scratch.length - num_scratch, num_scratch,
        [&](ChunkIndex chunk, std::int32_t offset, std::int32_t run, std::int32_t) {
          for (const std::int32_t end = offset + run; offset < end; ++offset, ++next) {
            while (next->chunk != no_chunk) ++next;
            next->chunk = chunk;
            next->offset = offset;
          }
        });
    is_tree_ = false;
  }

 private:
  void plant(std::span<const std::int32_t> parents) {
    step_.trees.reserve_more(1);
    step_.drafts.reserve_more(parents.size());
    main_branch_ = 0;
    for (std::size_t i = 0; i < parents.size(); ++i) {
      const std::int32_t parent = parents[i];
      const std::int32_t depth =
          parent == none ? 1 : step_.drafts[before_ + to_size(parent)].depth + 1;
      step_.drafts.push_back({parent, depth, no_chunk, 0});
      if (depth <= main_branch_) continue;
      main_branch_ = depth;
      deepest_ = static_cast<std::int32_t>(i);
    }
  }

  StepRecord& step_;
  std::int32_t main_branch_, deepest_ = none;
  std::size_t before_;  // drafts of other entries
  bool is_tree_ = false;
};

/// Takes slots beside all paths for one step, and gives them back unless keep() is called. They
/// are slots of a sequence that only the step knows of, and that has left already. So what leaves
/// late, and discards its slots when no step and no copy uses them, has one mechanism.
class ScratchSlots {
 public:
  /// \param scratch  that sequence; none: the step has no scratch slots yet
  ScratchSlots(TreeCore& core, SequenceIndex& scratch) : core_(core), scratch_(scratch) {}
  ScratchSlots(const ScratchSlots&) = delete;
  ScratchSlots& operator=(const ScratchSlots&) = delete;
  ~ScratchSlots() {
    if (taken_ > 0) {
      SequenceRecord& record = core_.sequences[scratch_];
      core_.sequences.shrink_reserved(record, record.reserved - taken_,
                                      /*keep_chunks=*/false);
    }
    if (is_first_ && core_.release_scratch(scratch_)) core_.finish_all_leaving();
  }

  /// `count` more; false where the budget is spent. TreeCore::reserve_joining() comes first.
  bool take(std::int32_t count) {
    if (count == 0) return true;
    is_first_ = scratch_ == none;
    if (is_first_) scratch_ = core_.add_scratch();
    SequenceRecord& record = core_.sequences[scratch_];
    if (!core_.retention.grow_tail(record.tail, count)) return false;
    record.reserved += count;
    taken_ = count;
    return true;
  }
  void keep() noexcept {
    taken_ = 0;
    is_first_ = false;
  }

 private:
  TreeCore& core_;
  SequenceIndex& scratch_;
  std::int32_t taken_ = 0;
  bool is_first_ = false;
};

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
  if (!drafts.parents.empty()) reserve_joining(1);  // for ScratchSlots
  SequenceRecord& record = sequences[s];
  if (record.last_step == step.number) [[unlikely]]
    fail_argument("sequence", "added twice", "each sequence at most once per step");
  const std::int32_t begin = record.cursor;
  const std::int32_t slots_end = record.size + record.reserved;
  if (begin == slots_end) return {AddResult::Reason::nothing_to_compute};
  if (step.is_void) [[unlikely]]
    return {AddResult::Reason::waits_for_step, none, step.number};
  if (record.steps > 0 && (record.superseded > 0 || steps.any_void() ||
                           record.steps >= StepTable::max_in_flight)) [[unlikely]]
    return {AddResult::Reason::waits_for_step, none, steps.oldest_step_of(s)};
  std::int32_t length = std::min(max_tokens, slots_end - begin);
  if (record.may_wait) {
    std::int32_t end = begin + length;
    const AddOutcome outcome = find_missing(s, end);
    if (end <= begin) return outcome;
    length = end - begin;
  }
  StepEntry entry;
  std::int32_t num_scratch = 0;
  if (begin + length == slots_end) {
    DraftPlacement tree(step, drafts, std::min(max_tokens - length, drafts.count));
    ScratchSlots scratch(*this, step.scratch);
    entry.has_output = true;
    entry.drafts_known = drafts.known;
    entry.drafts = tree.main_branch();
    num_scratch = tree.num_scratch();
    const std::int32_t num_slots = entry.drafts + 1;
    if (num_slots > max_length - slots_end) [[unlikely]]
      fail_argument("tokens of the sequence", slots_end,
                    "at most 2^30, drafts and output included");
    if (!scratch.take(num_scratch) || !retention.grow_tail(record.tail, num_slots))
      return {AddResult::Reason::out_of_chunks};
    TreeNode& tail = topology.node(record.tail);
    tail.writer = s;
    record.reserved += num_slots;
    length += entry.drafts;
    if (num_scratch > 0) {
      tree.keep(topology, tail, slots_end - tail.position, sequences.tail(step.scratch));
      scratch.keep();
    }
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
    cancel_entry(entry, /*keep_chunks=*/false);
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
