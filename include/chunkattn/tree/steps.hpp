// Steps of the prefix tree: what a step computes, what it keeps while it runs, and what of it
// counts once it has finished.
//
// Steps run in the order in which they were submitted. So a step may read what an earlier one in
// flight writes, and when one has finished, all before it have.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../base/config.hpp"
#include "../base/error.hpp"
#include "departures.hpp"
#include "step_record.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

template <TokenType Token, int ChunkSize, ChunkAllocator Allocator, RetentionPolicy Retention>
class TreeSteps : public TreeLeaving<Token, ChunkSize, Allocator, Retention> {
  using Leaving = TreeLeaving<Token, ChunkSize, Allocator, Retention>;

 public:
  using Leaving::for_each_node, Leaving::node, Leaving::sequence;
  using Leaving::Leaving;

  /// Steps in flight at the same time, at most.
  static constexpr int max_in_flight = 4;

  [[nodiscard]] const StepRecord& step(std::int32_t index) const noexcept {
    return *steps_[at(index)];
  }
  [[nodiscard]] StepRecord& step(std::int32_t index) noexcept { return *steps_[at(index)]; }

  ~TreeSteps() {
    for (auto& step : steps_) step->invalidate_view();
  }

  /// Never given to another sequence of this tree.
  [[nodiscard]] SequenceId id_of(SequenceIndex s) const noexcept {
    const SequenceRecord& record = sequence(s);  // leaving has raised the generation already
    const std::uint32_t generation =
        record.generation - (record.state == SequenceState::leaving ? 1 : 0);
    return id_of(s, generation);
  }
  [[nodiscard]] static SequenceId id_of(SequenceIndex s, std::uint32_t generation) noexcept {
    return SequenceId{(std::uint64_t{generation} << 32) + static_cast<std::uint32_t>(s) + 1};
  }

  // ---- an open step ------------------------------------------------------------------------

  std::int32_t begin_step() {
    std::int32_t index = none, outstanding = 0;
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      const StepState state = steps_[i]->state;
      if (state == StepState::open) [[unlikely]]
        fail_argument("begin_step()", "a second open step",
                      "that step " + std::to_string(steps_[i]->number) +
                          " is submitted, finished or dropped first");
      outstanding += state == StepState::in_flight || state == StepState::abandoned ? 1 : 0;
      if (state == StepState::free) index = static_cast<std::int32_t>(i);
    }
    check_argument(outstanding < max_in_flight, "steps in flight", outstanding,
                   "fewer than 4: finish the oldest first, or, where steps were dropped in "
                   "flight, call device_idle() when the device is idle");
    if (index == none) {
      index = static_cast<std::int32_t>(steps_.size());
      steps_.push_back(std::make_unique<StepRecord>());
    }
    StepRecord& step = *steps_[at(index)];
    step.number = ++last_step_;
    step.state = StepState::open;
    step.built = step.is_void = false;
    step.num_rows = 0;
    step.entries.clear();
    oldest_step_ = std::min(oldest_step_, step.number);
    return index;
  }

  /// Adds the next positions of a sequence, at most `budget`, drafts included. Either all of it
  /// happens or nothing does.
  AddOutcome add(StepRecord& step, SequenceIndex s, std::int32_t budget,
                 std::span<const Token> drafts, std::int32_t unknown_drafts) {
    SequenceRecord& record = sequences_[at(s)];
    look_ahead(s);
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
    if (step.entries.size() == step.entries.capacity())
      step.entries.reserve(2 * step.entries.size() + 8);
    StepEntry entry;
    if (begin + length == places_end) {
      entry.has_output = true;
      entry.drafts_known = unknown_drafts == 0;
      entry.drafts =
          std::min(budget - length,
                   entry.drafts_known ? static_cast<std::int32_t>(drafts.size()) : unknown_drafts);
      const std::int32_t places = entry.drafts + 1;
      if (places > max_length - places_end) [[unlikely]]
        fail_argument("tokens of the sequence", places_end,
                      "at most 2^30, drafts and output included");
      if (!this->grow_tail(record, places)) return {HoldReason::out_of_chunks};
      TreeNode& tail = node(record.tail);
      if (entry.drafts > 0 && entry.drafts_known)
        this->store_tokens(tail, places_end - tail.position, drafts.first(at(entry.drafts)));
      tail.writer = s;
      record.reserved += places;
      length += entry.drafts;
    }
    entry.sequence = s;
    entry.generation = record.generation;
    entry.epoch = record.epoch;
    entry.begin = begin;
    entry.length = length;
    entry.first_row = step.num_rows;
    step.entries.push_back(entry);
    step.num_rows += length;
    step.built = false;
    set_scheduled(s, {begin, length}, true);
    record.cursor = begin + length;
    record.last_step = step.number;
    ++record.steps;
    return {};
  }

  /// The copies that the step's plan must carry.
  void carry_copies(const StepRecord& step, std::vector<RowCopy>& rows) {
    rows.clear();
    if (copies_.empty()) return;
    rows.reserve(copies_.size());
    for (PendingCopy& copy : copies_) {
      if (copy.step != 0 && copy.step != step.number && !is_void(copy.step)) continue;
      rows.push_back(copy.rows);
      copy.step = copy.last_step = step.number;
    }
  }

  /// The step does not run: its places come back, its copies are still to be made.
  void cancel(StepRecord& step) noexcept {
    for (const StepEntry& entry : step.entries) {
      SequenceRecord& record = sequences_[at(entry.sequence)];
      --record.steps;
      take_back(entry, record);
      if (entry.has_output && entry.epoch == record.epoch)  // nothing was scheduled behind it
        this->shrink_reserved(record, record.reserved - entry.drafts - 1);
      end_if_left(entry.sequence);
    }
    release_copies(step.number);
    ++stats_.cancelled_steps;
    end(step, StepState::free);
  }

  void submit(StepRecord& step) {
    check_built(step);
    step.state = StepState::in_flight;
  }

  // ---- a step in flight --------------------------------------------------------------------

  /// Its handle was lost: until a later step has finished the device may still run it, and what
  /// was planned after it rests on it.
  void abandon(StepRecord& step) noexcept {
    step.state = StepState::abandoned;
    step.invalidate_view();
    any_void_ = true;
    for (auto& other : steps_) {
      if (other->number < step.number || other->is_void || !is_outstanding(*other)) continue;
      other->is_void = true;
      for (const StepEntry& entry : other->entries)
        if (entry.epoch == sequence(entry.sequence).epoch)
          set_scheduled(entry.sequence, {entry.begin, entry.length}, false);
    }
    ++stats_.abandoned_steps;
  }

  /// The device has run the step: the K/V of its positions is written.
  void finish_step(StepRecord& step) {
    if (step.state == StepState::open) check_built(step);
    for (const auto& other : steps_)
      if (other->state == StepState::in_flight && other->number < step.number) [[unlikely]]
        fail_argument("step", step.number,
                      "step " + std::to_string(other->number) +
                          " first: steps finish in the order they were submitted");
    resolve_abandoned(step.number);
    for (StepEntry& entry : step.entries) {
      SequenceRecord& record = sequences_[at(entry.sequence)];
      --record.steps;
      if (step.is_void || entry.epoch != record.epoch) [[unlikely]] {
        give_up(entry, record);
        entry.has_output = false;
      } else {
        mark_written(entry, record);
      }
      if (record.state == SequenceState::leaving) [[unlikely]]
        end_if_left(entry.sequence);
    }
    if (!copies_.empty()) {
      if (step.is_void)
        release_copies(step.number);
      else
        this->erase_copies([&](const PendingCopy& copy) { return copy.step == step.number; });
    }
    ++stats_.steps;
    end(step, StepState::finished);
  }

  /// Nothing runs any more: steps that were dropped in flight hold nothing back.
  void device_idle() noexcept {
    resolve_abandoned(Leaving::no_step);
    end_outstanding();
  }

  /// The handle of an open step or a step in flight is gone.
  void drop_step(std::int32_t index, std::uint64_t number) noexcept {
    StepRecord& record = step(index);
    if (record.number != number) return;
    if (record.state == StepState::open) cancel(record);
    if (record.state == StepState::in_flight) abandon(record);
  }

  // ---- a finished step ---------------------------------------------------------------------

  /// Whether the entry's outputs can still be committed.
  [[nodiscard]] bool has_output(const StepEntry& entry) const noexcept {
    const SequenceRecord& record = sequence(entry.sequence);  // leaving raises the generation
    return entry.has_output && record.generation == entry.generation && record.epoch == entry.epoch;
  }

  /// The tokens that were sampled from the entry's rows: accepted drafts, then one more, which is
  /// the next to be computed.
  void commit(StepEntry& entry, std::span<const Token> outputs) {
    if (!has_output(entry)) [[unlikely]]
      fail_argument("row", "without output",
                    "a row of Finished::rows(): live, not superseded, not committed yet");
    SequenceRecord& record = sequences_[at(entry.sequence)];
    if (outputs.empty() || outputs.size() > at(entry.drafts) + 1) [[unlikely]]
      fail_argument("outputs.size()", outputs.size(),
                    "1 to " + std::to_string(entry.drafts + 1) + ", the row's drafts and one more");
    if (entry.output_position() != record.size) [[unlikely]]
      fail_argument(
          "row", entry.output_position(),
          "the outputs of the earlier step first, from position " + std::to_string(record.size));
    TreeNode& tail = node(record.tail);
    const auto count = static_cast<std::int32_t>(outputs.size());
    const std::int32_t first = record.size - tail.position;
    if (count > 1 && entry.drafts_known) check_drafts(tail, first, outputs.first(at(count - 1)));
    if (count == 1)
      this->store_token(tail, first, outputs[0]);
    else
      this->store_tokens(tail, first, outputs);
    entry.has_output = false;
    record.size += count;
    record.reserved -= count;
    if (count <= entry.drafts) [[unlikely]] {
      record.computed = std::min(record.computed, record.size - 1);  // a draft's, at that place
      this->drop_reserved(record);
      record.cursor = record.size - 1;
      tail.scheduled = std::min(tail.scheduled, record.cursor - tail.position);
    }
    if (tail.written == first)  // else an earlier position is still to be computed
      set_written(tail, std::min(record.computed, record.size) - tail.position);
  }

  /// What was not committed is given up; the record may be used again.
  void close(std::int32_t index, std::uint64_t number) noexcept {
    StepRecord& record = step(index);
    if (record.number != number || record.state != StepState::finished) return;
    for (const StepEntry& entry : record.entries)
      if (has_output(entry)) this->drop_reserved(sequences_[at(entry.sequence)]);
    record.entries.clear();
    record.state = StepState::free;
  }

  /// The token at a path position of an entry, or null where it is not known yet.
  [[nodiscard]] const Token* known_token(const StepEntry& entry, std::int32_t position) const {
    const SequenceRecord& record = sequence(entry.sequence);
    const bool draft = entry.drafts_known && position >= entry.output_position();
    return position < record.size || draft ? &this->token(entry.sequence, position) : nullptr;
  }

 protected:
  using Leaving::at, Leaving::copies_, Leaving::max_length, Leaving::oldest_step_;
  using Leaving::sequences_, Leaving::stats_;

  /// A step goes over thousands of sequences, which do not fit in a core's cache: asks early for
  /// what those after `s` will touch.
  void look_ahead(SequenceIndex s) const noexcept {
    const std::size_t next = at(s) + 6, later = at(s) + 14;
    if (later >= sequences_.size()) return;
    const NodeIndex tail = sequences_[later].tail;
    if (tail != none) CHUNKATTN_PREFETCH_WRITE(&node(tail));
    const NodeIndex next_tail = sequences_[next].tail;
    if (next_tail != none) this->prefetch_end(node(next_tail));
  }

  [[nodiscard]] static bool is_outstanding(const StepRecord& step) noexcept {
    return step.state == StepState::open || step.state == StepState::in_flight ||
           step.state == StepState::abandoned;
  }

  /// The outstanding step with this number is void, or there is none.
  [[nodiscard]] bool is_void(std::uint64_t number) const noexcept {
    for (const auto& step : steps_)
      if (step->number == number && is_outstanding(*step)) return step->is_void;
    return true;
  }

  [[nodiscard]] std::uint64_t oldest_step_of(SequenceIndex s) const noexcept {
    std::uint64_t oldest = Leaving::no_step;
    for (const auto& step : steps_)
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
    this->for_each_awaited(s, [&](NodeIndex index) {
      const TreeNode& n = node(index);
      waits = true;
      if (n.position >= end || n.scheduled >= std::min(n.length, end - n.position)) return;
      end = n.position + n.scheduled;
      if (sequence(n.writer).state == SequenceState::live)
        outcome = {HoldReason::waits_for_sequence, n.writer};
      else
        outcome = {HoldReason::waits_for_step, none, oldest_step_of(n.writer)};
    });
    sequences_[at(s)].may_wait = waits;
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
    TreeNode& tail = node(sequence(s).tail);
    if (range.begin >= tail.position) [[likely]]
      return set(tail, range.begin - tail.position,
                 std::min(range.end(), tail.end()) - tail.position);
    for_each_node(s, range, [&](NodeIndex n, std::int32_t offset, std::int32_t length) {
      set(node(n), offset, offset + length);
    });
  }

  static void set_written(TreeNode& n, std::int32_t written) noexcept {
    n.written = written;
    if (n.written == n.length) n.writer = none;
  }

  void mark_written(const StepEntry& entry, SequenceRecord& record) noexcept {
    record.computed = std::max(record.computed, entry.end());
    const auto mark = [&](TreeNode& n, std::int32_t offset, std::int32_t end) {
      if (n.writer == entry.sequence && n.written >= offset && n.written < end) set_written(n, end);
    };
    const std::int32_t end = std::min(entry.end(), record.size);  // known tokens
    TreeNode& tail = node(record.tail);
    if (entry.begin >= tail.position)
      mark(tail, entry.begin - tail.position, end - tail.position);
    else
      for_each_node(entry.sequence, {entry.begin, end - entry.begin},
                    [&](NodeIndex n, std::int32_t offset, std::int32_t length) {
                      mark(node(n), offset, offset + length);
                    });
  }

  /// The entry's positions are to be computed again.
  void take_back(const StepEntry& entry, SequenceRecord& record) noexcept {
    // Superseded rows may be known tokens too, where several void steps end in any order.
    record.cursor = std::min(record.cursor, entry.begin);
    if (entry.epoch != record.epoch)
      --record.superseded;
    else
      set_scheduled(entry.sequence, {entry.begin, entry.length}, false);
  }

  /// The same for an entry that others may have been scheduled behind.
  void give_up(const StepEntry& entry, SequenceRecord& record) noexcept {
    const bool counted = entry.epoch == record.epoch;
    take_back(entry, record);
    if (counted && entry.has_output) this->drop_reserved(record);
  }

  /// A sequence that left was kept as the writer for its steps.
  void end_if_left(SequenceIndex s) noexcept {
    const SequenceRecord& record = sequence(s);
    if (record.state != SequenceState::leaving || record.steps > 0) return;
    this->give_up_writing(s);
  }

  void resolve_abandoned(std::uint64_t before) noexcept {
    if (!any_void_) return;
    any_void_ = false;
    for (auto& step : steps_) {
      if (step->state == StepState::abandoned && step->number < before) {
        for (const StepEntry& entry : step->entries) {
          SequenceRecord& record = sequences_[at(entry.sequence)];
          --record.steps;
          give_up(entry, record);
          end_if_left(entry.sequence);
        }
        release_copies(step->number);
        step->entries.clear();
        step->state = StepState::free;
      }
      any_void_ = any_void_ || (step->is_void && is_outstanding(*step));
    }
  }

  void release_copies(std::uint64_t number) noexcept {
    for (PendingCopy& copy : copies_)
      if (copy.step == number) copy.step = 0;
  }

  void end(StepRecord& step, StepState state) noexcept {
    step.invalidate_view();
    step.state = state;
    end_outstanding();
  }

  /// A step is no longer outstanding: what only it used is given up.
  void end_outstanding() noexcept {
    oldest_step_ = Leaving::no_step;
    bool any_void = false;
    for (const auto& step : steps_) {
      if (!is_outstanding(*step)) continue;
      oldest_step_ = std::min(oldest_step_, step->number);
      any_void = any_void || step->is_void;
    }
    any_void_ = any_void;
    if (this->leaving_.empty()) return;
    if constexpr (!Leaving::retains) this->forget_copies();
    this->finish_leaving();
  }

  /// Accepted drafts are those that were computed.
  void check_drafts(const TreeNode& tail, std::int32_t first,
                    std::span<const Token> accepted) const {
    const std::int32_t same = this->common_at(tail, first, accepted);
    check_argument(same == static_cast<std::int32_t>(accepted.size()), "outputs", same,
                   "drafts as they were added, then one token: this many agree");
  }

  std::vector<std::unique_ptr<StepRecord>> steps_;
  std::uint64_t last_step_ = 0;
  bool any_void_ = false;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
