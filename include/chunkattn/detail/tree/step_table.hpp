// StepTable: what the tree keeps of each step, which sequences it computes, how far it has come.
// What that means for sequences is in add.hpp and finish.hpp.
//
// Steps run in the order in which they were submitted. So a step may read what an earlier one in
// flight writes, and when one has finished, all before it have.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "../../plan_view.hpp"
#include "../../tree_options.hpp"
#include "../support/array.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"
#include "../support/step_observers.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// The rows of one sequence in a step: path positions [begin, begin + length).
struct StepEntry {
  SequenceIndex sequence = none;
  std::uint32_t generation = 0;  ///< of the sequence, when it was added
  std::uint32_t epoch = 0;       ///< the same
  std::int32_t begin = 0;
  std::int32_t length = 0;
  std::int32_t drafts = 0;      ///< of these, the last ones: guesses; the main branch of a tree
  std::int32_t first_row = 0;   ///< in the caller's order
  ChunkIndex chunk = no_chunk;  ///< Decoding: where the K/V of the one row goes; else no_chunk
  std::int32_t offset = 0;      ///< in that chunk, never the last slot
  bool has_output = false;    ///< it reaches the end of the sequence: there is something to sample
  bool drafts_known = false;  ///< the drafts' tokens are stored, to be compared with the outputs

  [[nodiscard]] SequenceId id() const noexcept { return sequence_id(sequence, generation); }
  [[nodiscard]] std::int32_t end() const noexcept { return begin + length; }
  /// Where the first output goes.
  [[nodiscard]] std::int32_t output_position() const noexcept { return end() - drafts; }
};

/// A draft of a tree. The *main branch* of a tree is the first of its longest branches: it stands
/// on the sequence's own slots, like drafts that are a chain. The others have scratch slots, see
/// TreeCore::grow_with_scratch().
struct Draft {
  std::int32_t parent = none;   ///< the draft before it; none: the path's last token
  std::int32_t depth = 0;       ///< of how many drafts the branch is that ends with it
  ChunkIndex chunk = no_chunk;  ///< where its K/V goes, and its token
  std::int32_t offset = 0;
};
/// The drafts of an entry that are no chain: `count` of StepRecord::drafts.
struct DraftTree {
  std::int32_t entry = 0;  ///< its index
  std::int32_t first = 0;
  std::int32_t count = 0;
  std::int32_t main_branch = 0;  ///< drafts of it
  std::int32_t deepest = none;   ///< the last of these

  [[nodiscard]] std::int32_t end() const noexcept { return first + count; }
  [[nodiscard]] std::int32_t num_scratch() const noexcept { return count - main_branch; }
};

/// Drafts that are to be added after a sequence's last token.
struct NewDrafts {
  std::int32_t count = 0;
  bool known = true;                        ///< their tokens are given, and stored by the caller
  std::span<const std::int32_t> parents{};  ///< of `count` drafts, or more; empty: a chain
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

/// What became of a sequence that was to be added to a step.
struct AddOutcome {
  AddResult::Reason reason = AddResult::Reason::none;
  SequenceIndex waits_for = none;  ///< AddResult::Reason::waits_for_sequence
  std::uint64_t step = 0;          ///< AddResult::Reason::waits_for_step
};

enum class StepState : std::uint8_t {
  free,
  open,       ///< sequences are added, the plan is built, kernels may run
  in_flight,  ///< submitted to a device
  abandoned,  ///< dropped in flight: the device may still run it
  finished    ///< outputs are to be committed
};

struct StepRecord {
  std::uint64_t number = 0;  ///< counted from 1
  StepState state = StepState::free;
  bool built = false;    ///< a plan was built for it
  bool is_void = false;  ///< it was abandoned, or rests on one that was: nothing of it counts
  std::int32_t num_rows = 0;
  std::int32_t num_outputs = 0;  ///< once it has finished: entries whose output is to come
  /// Once it has finished: each entry has one output to come, which can be committed, until
  /// SequenceTable::discarded_outputs() is another number.
  bool all_outputs = false;
  std::uint64_t discarded_outputs = 0;
  Array<StepEntry> entries;
  Array<DraftTree> trees;              ///< by entry, of those that have one
  Array<Draft> drafts;                 ///< of all trees
  SequenceIndex scratch = none;        ///< has the slots of drafts that are not on a main branch
  std::shared_ptr<ViewTicket> ticket;  ///< of the plan that was built for it
  std::uint64_t ticket_number = 0;

  ~StepRecord() { invalidate_view(); }

  /// The drafts of an entry in the caller's order, where they are no chain; else nothing.
  [[nodiscard]] std::span<const Draft> tree_of(const StepEntry& entry) const noexcept {
    if (entry.drafts == 0 || trees.empty()) [[likely]]
      return {};
    return find_tree(static_cast<std::int32_t>(&entry - entries.begin()));
  }

  void invalidate_view() noexcept {
    if (ticket && ticket->current() == ticket_number) ticket->set(0);
    ticket.reset();
  }

 private:
  [[nodiscard, gnu::noinline]] std::span<const Draft> find_tree(std::int32_t entry) const noexcept {
    const DraftTree* const tree =
        std::lower_bound(trees.begin(), trees.end(), entry,
                         [](const DraftTree& t, std::int32_t value) { return t.entry < value; });
    if (tree == trees.end() || tree->entry != entry) return {};
    return {drafts.begin() + tree->first, to_size(tree->count)};
  }
};

/// The steps of a tree: those that are not over, and records that the next ones take.
class StepTable {
 public:
  explicit StepTable(TreeStats& stats) : stats_(stats) {}

  /// Steps in flight at the same time, at most.
  static constexpr int max_in_flight = 4;
  static constexpr std::uint64_t no_step = (std::numeric_limits<std::uint64_t>::max)();

  [[nodiscard]] StepRecord& operator[](std::int32_t index) noexcept {
    return *steps_[to_size(index)];
  }
  /// All records, those of steps that are over included.
  [[nodiscard]] const std::vector<std::unique_ptr<StepRecord>>& all() const noexcept {
    return steps_;
  }

  [[nodiscard]] static bool is_outstanding(const StepRecord& step) noexcept {
    return step.state == StepState::open || step.state == StepState::in_flight ||
           step.state == StepState::abandoned;
  }
  /// Whether a step was dropped in flight and may still run, with what was planned after it.
  [[nodiscard]] bool any_void() const noexcept { return any_void_; }
  /// The outstanding step with this number is void, or there is none.
  [[nodiscard]] bool is_void(std::uint64_t number) const noexcept {
    for (const auto& step : steps_)
      if (step->number == number && is_outstanding(*step)) return step->is_void;
    return true;
  }
  /// The oldest step that may still run, of those that have the sequence where it is one; no_step:
  /// none does.
  [[nodiscard]] std::uint64_t oldest_outstanding(SequenceIndex s = none) const noexcept {
    const auto has = [s](const StepEntry& entry) { return entry.sequence == s; };
    std::uint64_t oldest = no_step;
    for (const auto& step : steps_)
      if (is_outstanding(*step) && step->number < oldest &&
          (s == none || std::any_of(step->entries.begin(), step->entries.end(), has)))
        oldest = step->number;
    return oldest;
  }
  /// Steps below this that were dropped in flight have run, or never will: device_idle() was called
  /// after them, and no step before them is still to finish.
  [[nodiscard]] std::uint64_t idle_before() const noexcept {
    std::uint64_t before = idle_ + 1;
    for (const auto& step : steps_)
      if (step->state == StepState::in_flight) before = (std::min)(before, step->number);
    return before;
  }

  /// A new step; its index. Throws InvalidArgument while another one is open or 4 are in flight.
  std::int32_t open() {
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
      steps_.push_back(std::make_unique<StepRecord>());
    }
    StepRecord& step = *steps_[to_size(index)];
    step.number = ++last_step_;
    step.state = StepState::open;
    step.built = step.is_void = false;
    step.num_rows = step.num_outputs = 0;
    step.entries.clear();
    step.trees.clear();
    step.drafts.clear();
    return index;
  }

  void submit(StepRecord& step) {
    check_built(step);
    step.state = StepState::in_flight;
  }

  /// Throws InvalidArgument unless the step can finish now. Asks those who observe steps, too.
  void check_finish(const StepRecord& step) const {
    if (step.state == StepState::open) check_built(step);
    for (const auto& other : steps_)
      if (other->state == StepState::in_flight && other->number < step.number) [[unlikely]]
        fail_argument(
            "step", step.number,
            {"step ", other->number, " first: steps finish in the order they were submitted"});
    if (observers_->any() && !step.is_void) [[unlikely]]
      observers_->for_each([&](StepObserver& o) { o.on_finish(step.number); });
  }
  /// The step's handle was lost in flight.
  void abandon(StepRecord& step) noexcept {
    step.state = StepState::abandoned;
    forget_writes(step);
    step.invalidate_view();
    any_void_ = true;
    ++stats_.abandoned_steps;
  }
  /// The step has finished, or is free again without having run.
  void close(StepRecord& step, StepState state) noexcept {
    forget_writes(step);
    step.invalidate_view();
    step.state = state;
    ++(state == StepState::finished ? stats_.steps : stats_.cancelled_steps);
    count_void();
  }
  /// No device runs any step.
  void device_idle() noexcept {
    idle_ = last_step_;
    for (const auto& step : steps_)
      if (step->state == StepState::open) --idle_;  // the last one: it has not run
  }
  /// Brings any_void() up to date where steps have ended.
  void count_void() noexcept {
    any_void_ = false;
    for (const auto& step : steps_)
      any_void_ = any_void_ || (is_outstanding(*step) && step->is_void);
  }

  /// Subscribers to steps, for KvCacheOptions::check_writes.
  [[nodiscard]] const std::shared_ptr<StepObservers>& observers() const noexcept {
    return observers_;
  }

 private:
  static void check_built(const StepRecord& step) {
    check_argument(step.built || step.entries.empty(), "step", step.number,
                   "AttentionPlan::build() after the last add(): the kernels have no plan of what "
                   "to compute");
  }

  void forget_writes(const StepRecord& step) noexcept {
    if (observers_->any()) [[unlikely]]
      observers_->for_each([&](StepObserver& o) { o.on_ended(step.number); });
  }

  TreeStats& stats_;
  std::shared_ptr<StepObservers> observers_ = std::make_shared<StepObservers>();
  std::vector<std::unique_ptr<StepRecord>> steps_;  // handles keep an index, plans an address
  std::uint64_t last_step_ = 0;
  std::uint64_t idle_ = 0;  ///< no device runs a step up to this one
  bool any_void_ = false;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
