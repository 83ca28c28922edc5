// Additions: adding a sequence's next positions, the place of its output and its drafts to an open
// step.
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
#include "retention.hpp"
#include "sequence_table.hpp"
#include "step_table.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// The common case of a step: one row, for the last token of a sequence whose private tail
/// continues in the chunk that it has. It touches the sequence's record, the first cache line of
/// its tail and its entry in the step, nothing else. Whatever is not that case is refused, and
/// Additions knows the rest. Until store() it alone changes the step, which has room for the
/// entries.
///
/// Engines decode thousands of sequences in every step, so an instruction here is one for each of
/// them: loops over a step's entries hold in locals what they would otherwise read again.
class DecodingRun {
 public:
  /// \param max_steps  outstanding steps, this one included, that a sequence may be in
  DecodingRun(Topology& topology, SequenceTable& sequences, StepRecord& step,
              std::int32_t max_steps) noexcept
      : topology_(topology),
        step_(step),
        records_(sequences.records()),
        nodes_(topology.nodes()),
        next_(step.entries.end()),
        row_(step.num_rows),
        step_number_(step.number),
        max_steps_(max_steps) {}

  /// Adds the last token of a sequence. False, with nothing changed, where more is to be asked or
  /// done, or where the handle's generation is over.
  CHUNKATTN_INLINE bool add(SequenceIndex s, std::uint32_t generation,
                            std::int32_t chunk_size) noexcept {
    SequenceRecord& record = records_[s];
    const std::int32_t begin = record.cursor;
    if (record.generation != generation || record.size + record.reserved != begin + 1 ||
        record.last_step == step_number_ || record.steps >= max_steps_ ||
        (record.superseded | std::uint8_t{record.may_wait}) != 0) [[unlikely]]
      return false;
    TreeNode& tail = nodes_[record.tail];
    const std::int32_t in_tail = begin - tail.position;
    if (tail.scheduled != in_tail || tail.writer != s || in_tail < 0 || begin >= max_length - 2)
        [[unlikely]]
      return false;
    const std::int32_t offset = (tail.begin + in_tail) & (chunk_size - 1);
    if (offset == chunk_size - 1) [[unlikely]]
      return false;
    tail.length += 1;  // the output's slot
    tail.scheduled = in_tail + 1;
    record.reserved += 1;
    record.cursor = begin + 1;
    record.steps += 1;
    record.last_step = step_number_;
    StepEntry& entry = *next_++;
    entry.sequence = s;
    entry.generation = generation;
    entry.epoch = record.epoch;
    entry.begin = begin;
    entry.length = 1;
    entry.drafts = 0;
    entry.first_row = row_++;
    entry.chunk = tail.last_chunk;
    entry.offset = offset;
    entry.has_output = entry.drafts_known = true;
    return true;
  }
  /// Writes to the step what add() did.
  void store() noexcept {
    const auto count = static_cast<std::size_t>(next_ - step_.entries.end());
    step_.entries.take(count);
    step_.num_rows = row_;
    topology_.count_slots(count);
  }

 private:
  Topology& topology_;
  StepRecord& step_;
  SequenceRecord* records_;
  TreeNode* nodes_;
  StepEntry* next_;
  std::int32_t row_;
  std::uint64_t step_number_;
  std::int32_t max_steps_;
};

/// Drafts that are to be added after a sequence's last token.
struct NewDrafts {
  std::int32_t count = 0;
  bool known = true;                        ///< their tokens are given, and stored by the caller
  std::span<const std::int32_t> parents{};  ///< [count], see Step::add(); empty: a chain
};

/// Throws InvalidArgument unless each parent stands before its child.
inline void check_parents(std::span<const std::int32_t> parents, std::size_t num_drafts) {
  if (parents.size() != num_drafts) [[unlikely]]
    fail_argument("parents.size()", parents.size(),
                  {"one for each of the ", num_drafts, " drafts"});
  for (std::size_t i = 0; i < parents.size(); ++i)
    if (parents[i] < -1 || parents[i] >= static_cast<std::int32_t>(i)) [[unlikely]]
      fail_argument(joined({"parents[", i, "]"}), parents[i],
                    {"-1, the sequence's last token, or an earlier draft, below ", i});
}

/// The drafts of an entry that is being added: which of them stand on the main branch, which have
/// scratch slots. Until keep() nothing has happened.
class NewTree {
 public:
  /// \param count  of the drafts, how many the step has rows for
  NewTree(StepRecord& step, const NewDrafts& added, std::int32_t count)
      : step_(step), main_branch_(count), before_(step.drafts.size()) {
    if (added.parents.empty() || count == 0) return;
    const auto parents = added.parents.first(to_size(count));
    std::int32_t next = -1;  // of a chain
    for (const std::int32_t parent : parents) is_tree_ = is_tree_ || parent != next++;
    if (is_tree_) plant(parents);
  }
  NewTree(const NewTree&) = delete;
  NewTree& operator=(const NewTree&) = delete;
  ~NewTree() {
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
    place(drafts, deepest_, topology, tail, first, scratch);
    is_tree_ = false;
  }

 private:
  void plant(std::span<const std::int32_t> parents) {
    if (step_.trees.size() == step_.trees.capacity())
      step_.trees.reserve(2 * step_.trees.size() + 8);
    if (step_.drafts.capacity() - before_ < parents.size())
      step_.drafts.reserve(2 * (before_ + parents.size()));
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
  /// Gives every draft its place: those of the main branch, which ends with `deepest`, after
  /// `first` of the tail, the others the last scratch slots.
  static void place(std::span<Draft> drafts, std::int32_t deepest, const Topology& topology,
                    const TreeNode& tail, std::int32_t first, const TreeNode& scratch) noexcept {
    std::int32_t num_scratch = static_cast<std::int32_t>(drafts.size());
    for (std::int32_t i = deepest; i != none; i = drafts[to_size(i)].parent, --num_scratch) {
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
          return true;
        });
  }

  StepRecord& step_;
  std::int32_t main_branch_, deepest_ = none;
  std::size_t before_;  // drafts of other entries
  bool is_tree_ = false;
};

class Additions {
 public:
  Additions(Topology& topology, Retention& retention, SequenceTable& sequences,
            const StepTable& steps, Writers& writers, Departures& departures)
      : topology_(topology),
        retention_(retention),
        sequences_(sequences),
        steps_(steps),
        writers_(writers),
        departures_(departures) {}

  /// Adds the next positions of a sequence, at most `max_tokens`, and after its last slot drafts
  /// as far as `max_tokens` allows. Either all of it happens or nothing does.
  AddOutcome add(StepRecord& step, SequenceIndex s, std::int32_t max_tokens,
                 const NewDrafts& drafts) {
    look_ahead(s);
    make_room(step, 1);
    if (DecodingRun run = decoding(step);
        drafts.count == 0 && run.add(s, sequences_[s].generation, topology_.geometry.size)) {
      run.store();
      step.built = false;
      return {};
    }
    return add_other(step, s, max_tokens, drafts);
  }

  /// Adds many sequences, as far as each is the common case; make_room() comes first.
  [[nodiscard]] DecodingRun decoding(StepRecord& step) noexcept {
    const std::int32_t max_steps = step.is_void        ? 0
                                   : steps_.any_void() ? 1
                                                       : StepTable::max_in_flight;
    return {topology_, sequences_, step, max_steps};
  }
  /// Makes room for `count` more entries.
  static void make_room(StepRecord& step, std::size_t count) {
    const std::size_t size = step.entries.size();
    if (step.entries.capacity() - size < count) step.entries.reserve(2 * size + count + 8);
  }
  /// Takes the entries from `first` on out of an open step again, as if they had not been added:
  /// earlier steps of their sequences use no slot after those that were there before.
  CHUNKATTN_COLD void take_out(StepRecord& step, std::size_t first) noexcept {
    for (; step.entries.size() > first; step.entries.pop_back()) {
      const StepEntry& entry = step.entries.back();
      writers_.cancel(entry, /*keep_chunks=*/false);
      sequences_[entry.sequence].last_step = 0;
      step.num_rows -= entry.length;
    }
  }

 private:
  /// The same where it is not just decoding.
  [[gnu::noinline]] AddOutcome add_other(StepRecord& step, SequenceIndex s, std::int32_t max_tokens,
                                         const NewDrafts& drafts) {
    if (!drafts.parents.empty()) departures_.reserve_scratch();
    SequenceRecord& record = sequences_[s];
    if (record.last_step == step.number) [[unlikely]]
      fail_argument("sequence", "added twice", "each sequence at most once per step");
    const std::int32_t begin = record.cursor;
    const std::int32_t slots_end = record.size + record.reserved;
    if (begin == slots_end) return {AddResult::Reason::nothing_to_compute};
    if (step.is_void) [[unlikely]]
      return {AddResult::Reason::waits_for_step, none, step.number};
    if (record.steps > 0 && (record.superseded > 0 || steps_.any_void() ||
                             record.steps >= StepTable::max_in_flight)) [[unlikely]]
      return {AddResult::Reason::waits_for_step, none, steps_.oldest_step_of(s)};
    std::int32_t length = std::min(max_tokens, slots_end - begin);
    if (record.may_wait) {
      std::int32_t end = begin + length;
      const AddOutcome outcome = writers_.find_missing(s, end);
      if (end <= begin) return outcome;
      length = end - begin;
    }
    StepEntry entry;
    std::int32_t num_scratch = 0;
    if (begin + length == slots_end) {
      NewTree tree(step, drafts, std::min(max_tokens - length, drafts.count));
      ScratchSlots scratch(departures_, step.scratch);
      entry.has_output = true;
      entry.drafts_known = drafts.known;
      entry.drafts = tree.main_branch();
      num_scratch = tree.num_scratch();
      const std::int32_t num_slots = entry.drafts + 1;
      if (num_slots > max_length - slots_end) [[unlikely]]
        fail_argument("tokens of the sequence", slots_end,
                      "at most 2^30, drafts and output included");
      if (!scratch.take(num_scratch) || !retention_.grow_tail(record.tail, num_slots))
        return {AddResult::Reason::out_of_chunks};
      TreeNode& tail = topology_.node(record.tail);
      tail.writer = s;
      record.reserved += num_slots;
      length += entry.drafts;
      if (num_scratch > 0) {
        tree.keep(topology_, tail, slots_end - tail.position, sequences_.tail(step.scratch));
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
    writers_.schedule(entry);
    record.cursor = begin + length;
    record.last_step = step.number;
    ++record.steps;
    return {};
  }

  /// A step goes over thousands of sequences, which do not fit in a core's cache: prefetches early
  /// what those after `s` will touch.
  void look_ahead(SequenceIndex s) const noexcept {
    const std::size_t later = to_size(s) + 14;
    if (later >= sequences_.num_indices()) return;
    const NodeIndex tail = sequences_[s + 14].tail;
    if (tail != none) topology_.prefetch(tail);
    const NodeIndex next_tail = sequences_[s + 6].tail;
    if (next_tail != none) topology_.prefetch_end(next_tail);
  }

  Topology& topology_;
  Retention& retention_;
  SequenceTable& sequences_;
  const StepTable& steps_;
  Writers& writers_;
  Departures& departures_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
