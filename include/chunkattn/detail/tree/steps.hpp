// Steps: what a step computes, what it keeps while it runs, and what of it counts once it has
// finished.
//
// Steps run in the order in which they were submitted. So a step may read what an earlier one in
// flight writes, and when one has finished, all before it have.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "../base/array.hpp"
#include "../base/check.hpp"
#include "../base/config.hpp"
#include "../base/write_check.hpp"
#include "copies.hpp"
#include "decoding.hpp"
#include "departures.hpp"
#include "drafts.hpp"
#include "outputs.hpp"
#include "sequences.hpp"
#include "step_record.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

class Steps {
 public:
  Steps(Topology& topology, Sequences& sequences, Copies& copies, Departures& departures,
        Drafts& drafts, Outputs& outputs, const Tokens& tokens, TreeStats& stats)
      : topology_(topology),
        sequences_(sequences),
        copies_(copies),
        departures_(departures),
        drafts_(drafts),
        outputs_(outputs),
        tokens_(tokens),
        stats_(stats) {}
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;
  ~Steps() {
    for (StepRecord* step : steps_) {
      step->invalidate_view();
      delete step;
    }
  }

  /// Steps in flight at the same time, at most.
  static constexpr int max_in_flight = 4;

  [[nodiscard]] const StepRecord& operator[](std::int32_t index) const noexcept {
    return *steps_[at(index)];
  }
  [[nodiscard]] StepRecord& operator[](std::int32_t index) noexcept { return *steps_[at(index)]; }

  // ---- an open step --------------------------------------------------------------------------

  std::int32_t begin() {
    std::int32_t index = none, outstanding = 0;
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      const StepState state = steps_[i]->state;
      if (state == StepState::open) [[unlikely]]
        fail_argument(
            "begin_step()", "a second open step",
            {"that step ", steps_[i]->number, " is submitted, finished or dropped first"});
      outstanding += state == StepState::in_flight || state == StepState::abandoned ? 1 : 0;
      if (state == StepState::free) index = static_cast<std::int32_t>(i);
    }
    check_argument(outstanding < max_in_flight, "steps in flight", outstanding,
                   "fewer than 4: finish the oldest first, or, where steps were dropped in "
                   "flight, call device_idle() when the device is idle");
    if (index == none) {
      index = static_cast<std::int32_t>(steps_.size());
      steps_.reserve(steps_.size() + 1);
      steps_.push_back(new StepRecord());
    }
    StepRecord& step = *steps_[at(index)];
    step.number = ++last_step_;
    step.state = StepState::open;
    step.built = step.is_void = false;
    step.num_rows = step.num_outputs = 0;
    step.entries.clear();
    step.trees.clear();
    step.drafts.clear();
    if (outstanding == 0) copies_.set_oldest_step(step.number);
    return index;
  }

  /// Adds the next positions of a sequence, at most `budget`, and behind its last place drafts as
  /// far as the budget goes. Either all of it happens or nothing does.
  AddOutcome add(StepRecord& step, SequenceIndex s, std::int32_t budget, const NewDrafts& drafts) {
    look_ahead(s);
    make_room(step, 1);
    if (DecodingRun run = decoding(step);
        drafts.count == 0 && run.add(s, sequences_[s].generation, topology_.chunk.size)) {
      run.store();
      step.built = false;
      return {};
    }
    return add_other(step, s, budget, drafts);
  }

  /// Adds many sequences, as far as each is the common case; make_room() comes first.
  [[nodiscard]] DecodingRun decoding(StepRecord& step) noexcept {
    const std::int32_t max_steps = step.is_void ? 0 : any_void_ ? 1 : max_in_flight;
    return {topology_, sequences_, stats_, step, max_steps};
  }
  /// Makes room for `count` more entries.
  static void make_room(StepRecord& step, std::size_t count) {
    const std::size_t size = step.entries.size();
    if (step.entries.capacity() - size < count) step.entries.reserve(2 * size + count + 8);
  }
  /// Takes the entries from `first` on out of an open step again, as if they had not been added:
  /// earlier steps of their sequences use no place behind those that were there before.
  CHUNKATTN_COLD void take_out(StepRecord& step, std::size_t first) noexcept {
    for (; step.entries.size() > first; step.entries.pop_back()) {
      const StepEntry& entry = step.entries.back();
      cancel(entry, /*keep_slots=*/false);
      sequences_[entry.sequence].last_step = 0;
      step.num_rows -= entry.length;
    }
  }

  /// The copies that the step's plan must carry.
  void carry_copies(const StepRecord& step, Array<RowCopy>& rows) {
    rows.clear();
    if (copies_.empty()) return;
    rows.reserve(copies_.all().size());
    copies_.carry(
        step.number, [&](std::uint64_t number) { return is_void(number); },
        [&](const RowCopy& copy) { rows.push_back(copy); });
  }

  void submit(StepRecord& step) {
    check_built(step);
    step.state = StepState::in_flight;
  }

  /// The handle of an open step or a step in flight is gone.
  CHUNKATTN_COLD void drop(std::int32_t index, std::uint64_t number) noexcept {
    StepRecord& step = *steps_[at(index)];
    if (step.number != number) return;
    if (step.state == StepState::open) cancel(step);
    if (step.state == StepState::in_flight) abandon(step);
  }

  // ---- the end of a step ---------------------------------------------------------------------

  /// The device has run the step: the K/V of its positions is written.
  void finish(StepRecord& step) {
    if (step.state == StepState::open) check_built(step);
    for (const StepRecord* other : steps_)
      if (other->state == StepState::in_flight && other->number < step.number) [[unlikely]]
        fail_argument(
            "step", step.number,
            {"step ", other->number, " first: steps finish in the order they were submitted"});
    if (write_checks_->any() && !step.is_void) [[unlikely]]
      write_checks_->for_each([&](WriteCheck& check) { check.check_finish(step.number); });
    resolve_abandoned(step.number);
    step.all_outputs = true;
    step.num_outputs = static_cast<std::int32_t>(step.entries.size());
    for (StepEntry* entry = step.entries.begin();; ++entry) {
      if (!step.is_void)
        entry =
            Decoding::finish(entry, step.entries.end(), sequences_.records(), topology_.nodes());
      if (entry == step.entries.end()) break;
      end_entry(step, *entry, sequences_[entry->sequence]);
      step.num_outputs -= entry->has_output ? 0 : 1;
    }
    step.outputs_given_up = sequences_.outputs_given_up();
    if (!copies_.empty()) {
      if (step.is_void)
        copies_.put_back(step.number);
      else
        copies_.complete(step.number);
    }
    ++stats_.steps;
    step.state = StepState::finished;
    resolve_abandoned(0);
    end(step, StepState::finished);
  }

  /// Who is told of steps, for KvCacheOptions::check_writes.
  [[nodiscard]] const std::shared_ptr<WriteChecks>& write_checks() const noexcept {
    return write_checks_;
  }

  /// Nothing runs any more: steps that were dropped in flight hold nothing back.
  void device_idle() noexcept {
    idle_ = last_step_;
    for (const StepRecord* step : steps_)
      if (step->state == StepState::open) --idle_;  // the last one: it has not run
    resolve_abandoned(0);
    end_outstanding();
  }
  /// Whether a step was dropped in flight and may still run, with what was planned after it.
  [[nodiscard]] bool any_void() const noexcept { return any_void_; }

  [[nodiscard]] static bool is_outstanding(const StepRecord& step) noexcept {
    return step.state == StepState::open || step.state == StepState::in_flight ||
           step.state == StepState::abandoned;
  }

  /// The handle of a finished step is gone: what was not committed is given up.
  void close(std::int32_t index, std::uint64_t number) noexcept {
    StepRecord& step = *steps_[at(index)];
    if (step.number != number || step.state != StepState::finished) return;
    outputs_.give_up(step);
    step.entries.clear();
    step.state = StepState::free;
    drafts_.close(step);
  }

 private:
  friend class TreeInspector;

  /// The same where it is not just decoding.
  [[gnu::noinline]] AddOutcome add_other(StepRecord& step, SequenceIndex s, std::int32_t budget,
                                         const NewDrafts& drafts) {
    if (!drafts.parents.empty()) drafts_.reserve();
    SequenceRecord& record = sequences_[s];
    if (record.last_step == step.number) [[unlikely]]
      fail_argument("sequence", "added twice", "each sequence at most once per step");
    const std::int32_t begin = record.cursor;
    const std::int32_t places_end = record.size + record.reserved;
    if (begin == places_end) return {HoldReason::nothing_to_compute};
    if (step.is_void) [[unlikely]]
      return {HoldReason::waits_for_step, none, step.number};
    if (record.steps > 0 && (record.superseded > 0 || any_void_ || record.steps >= max_in_flight))
        [[unlikely]]
      return {HoldReason::waits_for_step, none, oldest_step_of(s)};
    std::int32_t length = std::min(budget, places_end - begin);
    if (record.may_wait) {
      std::int32_t end = begin + length;
      const AddOutcome outcome = find_missing(s, end);
      if (end <= begin) return outcome;
      length = end - begin;
    }
    StepEntry entry;
    std::int32_t num_aside = 0;
    if (begin + length == places_end) {
      Drafts::Addition added(drafts_, step, drafts, std::min(budget - length, drafts.count));
      entry.has_output = true;
      entry.drafts_known = drafts.known;
      entry.drafts = added.trunk();
      const std::int32_t places = entry.drafts + 1;
      if (places > max_length - places_end) [[unlikely]]
        fail_argument("tokens of the sequence", places_end,
                      "at most 2^30, drafts and output included");
      if (!added.take_places() || !sequences_.grow_tail(record, places))
        return {HoldReason::out_of_chunks};
      TreeNode& tail = topology_.node(record.tail);
      tail.writer = s;
      record.reserved += places;
      length += entry.drafts;
      num_aside = added.keep(tail, places_end - tail.position);
    }
    entry.sequence = s;
    entry.generation = record.generation;
    entry.epoch = record.epoch;
    entry.begin = begin;
    entry.length = length;
    entry.first_row = step.num_rows;
    step.entries.push_back(entry);
    step.num_rows += length + num_aside;
    step.built = false;
    set_scheduled(s, {begin, length}, true);
    record.cursor = begin + length;
    record.last_step = step.number;
    ++record.steps;
    return {};
  }

  /// A step goes over thousands of sequences, which do not fit in a core's cache: prefetches early
  /// what those after `s` will touch.
  void look_ahead(SequenceIndex s) const noexcept {
    const std::size_t later = at(s) + 14;
    if (later >= sequences_.num_indices()) return;
    const NodeIndex tail = sequences_[s + 14].tail;
    if (tail != none) CHUNKATTN_PREFETCH_WRITE(&topology_.node(tail));
    const NodeIndex next_tail = sequences_[s + 6].tail;
    if (next_tail == none) return;
    const TreeNode& n = topology_.node(next_tail);
    if (n.last_slot != no_slot)
      tokens_.prefetch(n.last_slot, topology_.chunk.offset(n.begin + n.length));
  }

  /// The outstanding step with this number is void, or there is none.
  [[nodiscard]] bool is_void(std::uint64_t number) const noexcept {
    for (const StepRecord* step : steps_)
      if (step->number == number && is_outstanding(*step)) return step->is_void;
    return true;
  }
  [[nodiscard]] std::uint64_t oldest_step_of(SequenceIndex s) const noexcept {
    std::uint64_t oldest = Copies::no_step;
    for (const StepRecord* step : steps_)
      if (is_outstanding(*step) && step->number < oldest)
        for (const StepEntry& entry : step->entries)
          if (entry.sequence == s) oldest = step->number;
    return oldest;
  }

  /// Lowers `end` to the first position whose K/V is still to be written by another sequence that
  /// no step has, and says by whom. (Two sequences may each have to write what the other one reads:
  /// each goes as far as it can.)
  AddOutcome find_missing(SequenceIndex s, std::int32_t& end) noexcept {
    AddOutcome outcome;
    bool waits = false;
    sequences_.for_each_awaited(s, [&](NodeIndex index) {
      const TreeNode& n = topology_.node(index);
      waits = true;
      if (n.position >= end || n.scheduled >= std::min(n.length, end - n.position)) return;
      end = n.position + n.scheduled;
      if (sequences_[n.writer].state == SequenceState::live)
        outcome = {HoldReason::waits_for_sequence, n.writer};
      else
        outcome = {HoldReason::waits_for_step, none, oldest_step_of(n.writer)};
    });
    sequences_[s].may_wait = waits;
    return outcome;
  }

  static void check_built(const StepRecord& step) {
    check_argument(step.built || step.entries.empty(), "step", step.number,
                   "AttentionPlan::build() after the last add(): nothing has told the kernels what "
                   "to compute");
  }

  /// A step is to write those positions in the range that are the sequence's to write, or no
  /// longer is.
  CHUNKATTN_INLINE void set_scheduled(SequenceIndex s, TokenRange range, bool scheduled) noexcept {
    const auto set = [s, scheduled](TreeNode& n, std::int32_t begin, std::int32_t end) {
      if (n.writer != s) return;
      const std::int32_t limit = std::max(n.written, scheduled ? end : begin);
      n.scheduled = scheduled ? std::max(n.scheduled, limit) : std::min(n.scheduled, limit);
    };
    TreeNode& tail = sequences_.tail(s);
    if (range.begin >= tail.position) [[likely]]
      return set(tail, range.begin - tail.position,
                 std::min(range.end(), tail.end()) - tail.position);
    sequences_.for_each_node(s, range, [&](NodeIndex n, std::int32_t offset, std::int32_t length) {
      set(topology_.node(n), offset, offset + length);
    });
  }

  void mark_written(const StepEntry& entry, SequenceRecord& record) noexcept {
    record.computed = std::max(record.computed, entry.end());
    const auto mark = [&](TreeNode& n, std::int32_t offset, std::int32_t end) {
      if (n.writer == entry.sequence && n.written >= offset && n.written < end) n.set_written(end);
    };
    const std::int32_t end = std::min(entry.end(), record.size);  // known tokens
    TreeNode& tail = topology_.node(record.tail);
    if (entry.begin >= tail.position) [[likely]]
      return mark(tail, entry.begin - tail.position, end - tail.position);
    sequences_.for_each_node(entry.sequence, {entry.begin, end - entry.begin},
                             [&](NodeIndex n, std::int32_t offset, std::int32_t length) {
                               mark(topology_.node(n), offset, offset + length);
                             });
  }

  /// The step has run: what of the entry counts.
  void end_entry(StepRecord& step, StepEntry& entry, SequenceRecord& record) noexcept {
    --record.steps;
    if (step.is_void || entry.epoch != record.epoch) {
      give_up(entry, record);
      entry.has_output = false;
    } else {
      mark_written(entry, record);
    }
    departures_.end_step_of(entry.sequence);
    step.all_outputs = step.all_outputs && entry.has_output && entry.drafts == 0 &&
                       record.state == SequenceState::live &&
                       entry.output_position() == record.size;
  }
  void cancel(const StepEntry& entry, bool keep_slots) noexcept {
    SequenceRecord& record = sequences_[entry.sequence];
    --record.steps;
    take_back(entry, record);
    if (entry.has_output && entry.epoch == record.epoch)  // nothing was scheduled behind it
      sequences_.shrink_reserved(record, record.reserved - entry.drafts - 1, keep_slots);
  }
  /// The step does not run: its places come back, its copies are still to be made.
  void cancel(StepRecord& step) noexcept {
    for (const StepEntry& entry : step.entries) {
      cancel(entry, /*keep_slots=*/sequences_[entry.sequence].steps > 1);
      departures_.end_step_of(entry.sequence);
    }
    copies_.put_back(step.number);
    drafts_.release(step);
    ++stats_.cancelled_steps;
    end(step, StepState::free);
  }

  /// The step's handle was lost in flight: until a later step has finished the device may still
  /// run it, and what was planned after it rests on it.
  void abandon(StepRecord& step) noexcept {
    step.state = StepState::abandoned;
    forget_writes(step);
    step.invalidate_view();
    any_void_ = true;
    for (StepRecord* other : steps_) {
      if (other->number < step.number || other->is_void || !is_outstanding(*other)) continue;
      other->is_void = true;
      for (const StepEntry& entry : other->entries)
        set_scheduled(entry.sequence, {entry.begin, entry.length}, false);
    }
    ++stats_.abandoned_steps;
  }

  /// The entry's positions are to be computed again.
  void take_back(const StepEntry& entry, SequenceRecord& record) noexcept {
    // Superseded rows may be known tokens too, where several void steps end in any order.
    record.cursor = std::min(record.cursor, entry.begin);
    set_scheduled(entry.sequence, {entry.begin, entry.length}, false);
    if (entry.epoch != record.epoch) --record.superseded;
  }
  /// The same for an entry that others may have been scheduled behind.
  void give_up(const StepEntry& entry, SequenceRecord& record) noexcept {
    const bool counted = entry.epoch == record.epoch;
    take_back(entry, record);
    if (counted && entry.has_output) sequences_.drop_reserved(record);
  }

  /// Ends the abandoned steps before `before`, and those that an idle device ran before any step
  /// that is still to finish: outputs are given up in the order of steps.
  void resolve_abandoned(std::uint64_t before) noexcept {
    if (!any_void_) return;
    std::uint64_t idle_before = idle_ + 1;
    for (const StepRecord* step : steps_)
      if (step->state == StepState::in_flight) idle_before = std::min(idle_before, step->number);
    for (StepRecord* step : steps_) {
      if (step->state != StepState::abandoned || step->number >= std::max(before, idle_before))
        continue;
      for (const StepEntry& entry : step->entries) {
        SequenceRecord& record = sequences_[entry.sequence];
        --record.steps;
        give_up(entry, record);
        departures_.end_step_of(entry.sequence);
      }
      copies_.put_back(step->number);
      drafts_.release(*step);
      step->entries.clear();
      step->state = StepState::free;
    }
  }

  void end(StepRecord& step, StepState state) noexcept {
    forget_writes(step);
    step.invalidate_view();
    step.state = state;
    end_outstanding();
  }
  void forget_writes(const StepRecord& step) noexcept {
    if (write_checks_->any()) [[unlikely]]
      write_checks_->for_each([&](WriteCheck& check) { check.ended(step.number); });
  }
  /// A step is no longer outstanding: what only it used is given up.
  void end_outstanding() noexcept {
    std::uint64_t oldest = Copies::no_step;
    any_void_ = false;
    for (const StepRecord* step : steps_) {
      if (!is_outstanding(*step)) continue;
      oldest = std::min(oldest, step->number);
      any_void_ = any_void_ || step->is_void;
    }
    copies_.set_oldest_step(oldest);
    departures_.finish_all();
  }

  Topology& topology_;
  Sequences& sequences_;
  Copies& copies_;
  Departures& departures_;
  Drafts& drafts_;
  Outputs& outputs_;
  const Tokens& tokens_;
  TreeStats& stats_;
  std::shared_ptr<WriteChecks> write_checks_ = std::make_shared<WriteChecks>();
  Array<StepRecord*> steps_;  // owned; handles keep a record's index, plans its address
  std::uint64_t last_step_ = 0;
  std::uint64_t idle_ = 0;  ///< no device runs a step up to this one
  bool any_void_ = false;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
