// The life of steps in the engine simulation: opened, filled, built, run, submitted, finished or
// dropped at every point, and what is committed when.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/engine_sim_drafts.hpp"

namespace test {

template <class Retention, int ChunkSize>
class EngineSimSteps : public EngineSimDrafts<Retention, ChunkSize> {
  using Base = EngineSimDrafts<Retention, ChunkSize>;

 public:
  using Base::Base;

 protected:
  using Base::below, Base::one_in, Base::count, Base::expect, Base::expect_refused, Base::log;
  using Base::drop_handle, Base::had_none_, Base::spare;
  using Base::text, Base::name, Base::tree_, Base::live_, Base::steps_, Base::finished_;
  using typename Base::Dropped;
  using typename Base::Entry, typename Base::State, typename Base::SimStep;
  using typename Base::Live, typename Base::LivePtr, typename Base::Finished;
  using typename Base::SimDraft;

  static constexpr std::size_t max_in_flight = 4;

  [[nodiscard]] SimStep* open_step() {
    return !steps_.empty() && steps_.back()->state == State::open && !steps_.back()->dropped
               ? steps_.back().get()
               : nullptr;
  }
  [[nodiscard]] bool any_void() const {
    return std::any_of(steps_.begin(), steps_.end(), [](const auto& s) { return s->is_void; });
  }
  [[nodiscard]] bool is_outstanding(std::uint64_t number) const {
    return std::any_of(steps_.begin(), steps_.end(),
                       [&](const auto& s) { return s->number == number; });
  }

  // ---- open ----------------------------------------------------------------------------------

  /// Null where no further step can begin.
  SimStep* begin_step() {
    this->entering();
    if (open_step() != nullptr || steps_.size() >= max_in_flight) {
      expect_refused([&] { (void)tree_->begin_step(); }, "at most 4 steps, one of them open");
      count("begin_step refused");
      return nullptr;
    }
    auto step = std::make_unique<SimStep>();
    this->insist("begin_step", [&] { step->open.emplace(tree_->begin_step()); });
    step->number = step->open->number();
    log("begin step " + text(step->number));
    steps_.push_back(std::move(step));
    return steps_.back().get();
  }

  std::size_t any_budget() { return one_in(2) ? 1 + below(6) : std::size_t{1000}; }

  /// All live sequences, one of them twice, in one call: it is refused, or one is held, and nothing
  /// has changed.
  void add_refused(SimStep& step) {
    std::vector<decltype(&live_[0]->handle)> handles;
    for (const LivePtr& live : live_)
      if (live->tokens.size() <= this->options_.max_length) handles.push_back(&live->handle);
    if (handles.empty()) return;
    handles.push_back(handles[below(handles.size())]);
    const std::size_t available = tree_->chunks_available();
    try {
      const AddResult held = step.open->add(handles, any_budget());
      expect(!held && held.blocked_index() + 1 < handles.size(), "all of a batch or nothing");
      count("batch held");
    } catch (const InvalidArgument& error) {
      expect(std::string(error.what()).find("once per step") != std::string::npos,
             "a batch says what is wrong");
      count("batch refused");
    }
    log("add a batch: refused");
    expect(step.open->num_rows() == step.num_rows, "nothing of a refused batch is in the step");
    expect(tree_->chunks_available() >= available, "a refused batch takes no chunk");
    for (const LivePtr& live : live_) this->check_sequence(*live);
  }

  /// Adds any sequence, with or without drafts.
  void add_any(SimStep& step) {
    if (one_in(6)) add_refused(step);
    const LivePtr live = this->any_live();
    const std::size_t drafts = one_in(4) ? 1 + below(5) : 0;
    std::vector<std::int32_t> parents;
    if (one_in(2))
      for (std::size_t i = 0; i < drafts; ++i)
        parents.push_back(static_cast<std::int32_t>(below(i + 1)) - 1);
    (void)add(step, live, any_budget(), drafts, one_in(4), parents);
  }

  /// \param parents  of the drafts, where they are no chain
  AddResult::Reason add(SimStep& step, const LivePtr& live, std::size_t max_tokens,
                        std::size_t num_drafts, bool unknown,
                        const std::vector<std::int32_t>& parents = {}) {
    if (live->tokens.size() > this->options_.max_length)
      return AddResult::Reason::nothing_to_compute;
    if (live->last_step == step.number) {
      expect_refused([&] { (void)step.open->add(live->handle); }, "once per step");
      return AddResult::Reason::nothing_to_compute;
    }
    const std::size_t begin = live->handle.num_scheduled(), end = live->tokens.size();
    std::size_t length = std::min(max_tokens, end - begin);
    bool reaches = begin + length == end;
    std::vector<SimToken> drafts;
    for (std::size_t i = 0; i < num_drafts; ++i) drafts.push_back(this->any_token());
    std::size_t kept = reaches ? std::min(num_drafts, max_tokens - length) : 0;
    std::vector<SimDraft> tree;
    if (!parents.empty()) tree = this->planted(*live, std::span(drafts).first(kept), parents);
    std::size_t aside = tree.size();
    std::vector<SimToken> trunk(drafts);
    if (!tree.empty()) {
      trunk.clear();
      for (const SimDraft& draft : tree)
        if (draft.on_trunk) trunk.push_back(draft.token);
      aside -= trunk.size();
      kept = trunk.size();
    }
    const auto chunks = [](std::size_t places) { return (places + ChunkSize - 1) / ChunkSize; };
    const std::size_t needed =
        live->handle.chunks_needed(kept + 1) + chunks(step.aside + aside) - chunks(step.aside);
    const std::size_t available = tree_->chunks_available();
    const bool pending = live->handle.num_pending() > 0;
    const bool held =
        step.is_void || (live->steps > 0 && (live->superseded > 0 || any_void() ||
                                             live->steps >= static_cast<int>(max_in_flight)));
    chunkattn::Drafts<SimToken> added{.parents = parents};
    if (unknown)
      added.count = num_drafts;
    else
      added.tokens = drafts;
    const std::uint64_t failed = tree_->stats().failed_adds;
    AddResult result;
    this->insist("add", [&] { result = step.open->add(live->handle, max_tokens, added); });
    const AddResult::Reason reason = result.reason();
    log("add " + name(*live) + " [" + text(begin) + ", " + text(begin + length) + ") of " +
        text(end) + ", " + text(kept) + " drafts, " + text(aside) +
        " aside: " + text(static_cast<int>(reason)));
    if (begin == end) {
      expect(reason == AddResult::Reason::nothing_to_compute, "nothing to compute");
    } else if (held) {
      expect(reason == AddResult::Reason::waits_for_step, "what was given up is waited for");
      count("add waits for a step");
    } else if (pending && (reason == AddResult::Reason::waits_for_sequence ||
                           reason == AddResult::Reason::waits_for_step)) {
      count(reason == AddResult::Reason::waits_for_step ? "add waits for the step of one that left"
                                                        : "add waits for a sequence");
    } else {
      expect(reason == AddResult::Reason::none || reason == AddResult::Reason::out_of_chunks,
             "a step waits for nobody");
      const bool fits =
          !reaches || needed <= available || (pending && result && !result.row().has_output);
      // What is evicted for drafts aside may make room behind the sequence besides.
      expect((reason == AddResult::Reason::none) == fits || (aside > 0 && result) || had_none_,
             "a step takes what fits");
      expect(tree_->stats().failed_adds == failed + (result ? 0 : 1), "failed adds are counted");
      if (reason == AddResult::Reason::out_of_chunks) count("add failed");
    }
    expect(static_cast<bool>(result) == (reason == AddResult::Reason::none), "a reason, or added");
    if (reason == AddResult::Reason::waits_for_step)
      expect(is_outstanding(result.step()), "waits for an outstanding step");
    if (reason == AddResult::Reason::waits_for_sequence)
      expect(result.waits_for() != SequenceId::none && result.waits_for() != live->id,
             "waits for another sequence");
    waits_for_ = result.waits_for();
    if (!result) {
      expect(live->handle.num_scheduled() == begin, "what is not added is not scheduled");
      this->check_sequence(*live);
      return reason;
    }
    const ScheduledSequence& row = result.row();
    if (pending && static_cast<std::size_t>(row.num_rows) < length) {
      length = static_cast<std::size_t>(row.num_rows);
      kept = aside = 0;
      tree.clear();
      reaches = false;
      count("add up to what another is to write");
    }
    length += kept;
    expect(row.sequence == live->id && row.position == static_cast<std::int32_t>(begin) &&
               row.index == static_cast<std::int32_t>(step.entries.size()) &&
               row.first_row == step.num_rows &&
               row.num_rows == static_cast<std::int32_t>(length + aside) &&
               row.num_drafts == static_cast<std::int32_t>(kept + aside) &&
               row.has_output == reaches,
           "the rows that were added");
    expect(available - tree_->chunks_available() <= (reaches ? needed : 0), "chunks as promised");
    if (!tree.empty()) count(unknown ? "add with a tree of unknown drafts" : "add with a tree");
    step.entries.push_back({live, row.position, static_cast<std::int32_t>(length),
                            static_cast<std::int32_t>(kept), row.first_row, reaches, !unknown,
                            live->drops, std::move(tree)});
    step.num_rows += row.num_rows;
    step.aside += aside;
    step.built = step.executed = false;
    expect(step.open->num_rows() == step.num_rows, "rows of a step");
    if (reaches) {
      for (std::size_t i = 0; i < kept; ++i) this->push_token(*live, trunk[i]);
      this->push_token(*live, this->any_token());
      count(kept > 0 ? unknown ? "add with unknown drafts" : "add with drafts" : "add to the end");
      if (begin > live->known) count("add behind an output to come");
    } else {
      count("add of a part");
    }
    ++live->steps;
    live->last_step = step.number;
    expect(live->handle.num_scheduled() == begin + length, "what is added is scheduled");
    this->check_sequence(*live);
    return reason;
  }

  void build(SimStep& step) {
    AttentionPlan& plan = plans_[below(plans_.size())];
    build(step, plan);
  }
  void build(SimStep& step, AttentionPlan& plan) {
    const std::uint64_t rebuilds = plan.num_rebuilds();
    const auto before = step.view;
    this->insist("build", [&] { step.view = plan.build(*step.open); });
    if (before) expect(!before.is_current(), "a step has one view");
    step.built = true;
    step.executed = false;
    log("build step " + text(step.number));
    expect(static_cast<bool>(step.view) == !step.entries.empty(), "a view of what was added");
    if (step.entries.empty()) return;
    count(plan.num_rebuilds() == rebuilds ? "plan advanced" : "plan rebuilt");
    this->record(step);
  }

  // ---- on the device -------------------------------------------------------------------------

  /// The device comes to the end of this step. What was dropped in flight runs now, breaks, or was
  /// never there.
  void run_device(std::uint64_t number) {
    for (const auto& step : steps_) {
      if (step->number > number || step->executed) continue;
      if (step->state == State::open && step->number < number) continue;
      if (step->state != State::abandoned) {
        log("run step " + text(step->number));
        this->execute(*step);
        continue;
      }
      const std::size_t fate = below(4);
      log("dropped step " + text(step->number) +
          (fate < 2   ? " runs"
           : fate < 3 ? " breaks"
                      : " is lost"));
      if (fate < 3) {
        count("dropped step ran late");
        this->execute(*step, /*broken=*/fate == 2);
      } else {
        this->device_lost_ = step->executed = true;
      }
    }
  }

  void submit(SimStep& step) {
    if (!step.built && !step.entries.empty()) {
      expect_refused([&] { (void)std::move(*step.open).submit(); }, "build before submitting");
      this->entering();
      expect_refused([&] { (void)std::move(*step.open).finish(); }, "build before finishing");
      count("submitted before it was built");
      return;
    }
    spare([&] { step.in_flight.emplace(std::move(*step.open).submit()); });
    check_consumed(*step.open);
    step.open.reset();
    step.state = State::in_flight;
    log("submit step " + text(step.number));
    if (step.view) expect(step.view.is_current(), "a view stays current in flight");
    count("step submitted");
  }

  /// False where an earlier step has to finish first.
  bool finish(SimStep& step) {
    this->entering();  // what was dropped elsewhere is settled first
    bool first = true;
    for (const auto& other : steps_)
      first = first && (other->number >= step.number || other->state != State::in_flight);
    const auto finished = [&] {
      return step.open ? std::move(*step.open).finish() : std::move(*step.in_flight).finish();
    };
    if (!first) {
      expect_refused([&] { (void)finished(); }, "steps finish in order");
      count("finished out of order");
      return false;
    }
    run_device(step.number);
    this->check_unfreed(step);
    log("finish step " + text(step.number) + (step.is_void ? ", void" : ""));
    this->insist("finished", [&] { step.finished.emplace(finished()); });
    expect(!step.view.is_current() || step.entries.empty(), "a view ends with its step");
    step.open.reset();
    step.in_flight.reset();
    resolve_abandoned(step.number);
    for (Entry& entry : step.entries) {
      Live& live = *entry.live;
      if (step.is_void || entry.superseded()) {
        give_up(entry);
        entry.has_output = false;
        count(step.is_void ? "rows of a void step" : "rows behind a draft that was wrong");
        continue;
      }
      --live.steps;
      live.computed = std::max(live.computed, static_cast<std::size_t>(entry.end()));
      entry.rows.assign(live.hash.begin() + entry.begin,
                        live.hash.begin() + entry.output_position());
      if (!live.gone) this->mark_done(live, live.computed);
    }
    step.state = State::finished;
    take(steps_, finished_, step);
    resolve_abandoned(0);
    for (const Entry& entry : finished_.back()->entries)
      if (!entry.live->gone && entry.live->handle.is_live()) this->check_sequence(*entry.live);
    (void)rows(*finished_.back());
    count("step finished");
    return true;
  }

  void device_idle() {
    this->entering();
    if (!steps_.empty()) run_device(steps_.back()->number - (open_step() != nullptr ? 1 : 0));
    log("device idle");
    spare([&] { tree_->device_idle(); });
    idle_ = steps_.empty() ? 0 : steps_.back()->number - (open_step() != nullptr ? 1 : 0);
    resolve_abandoned(0);
    count("device idle");
  }

  // ---- dropped -------------------------------------------------------------------------------

  /// Drops an open step or one in flight, here or on another thread.
  void drop(SimStep& step, bool elsewhere) {
    log((step.open ? "cancel step " : "abandon step ") + text(step.number) +
        (elsewhere ? " elsewhere" : ""));
    if (step.open)
      count(step.executed ? "cancelled after it ran"
            : step.built  ? "cancelled after it was built"
                          : "cancelled");
    else
      count(step.executed ? "abandoned after it ran" : "abandoned before it ran");
    const bool was_open = step.open.has_value();
    const auto effect = [this, &step, was_open] {
      if (was_open)
        cancelled(step);
      else
        abandoned(step);
    };
    if (elsewhere) count("step dropped on another thread");
    const auto view = step.view;
    step.dropped = true;
    const bool at_once = was_open ? drop_handle(Dropped::step, step.open, elsewhere, effect)
                                  : drop_handle(Dropped::step, step.in_flight, elsewhere, effect);
    if (at_once && view) expect(!view.is_current(), "a view ends with its step");
    if (at_once && !was_open) this->check_views();
  }
  /// Nothing can be done with a step that has become another object.
  template <class Step>
  void check_consumed(Step& step) {
    if (!one_in(8)) return;
    if constexpr (requires { step.num_rows(); }) {
      expect_refused([&] { (void)step.num_rows(); }, "a step that was moved from");
      expect_refused([&] { (void)step.num_sequences(); }, "a step that was moved from");
      expect_refused([&] { (void)std::move(step).submit(); }, "a step that was moved from");
      if (!live_.empty()) {
        const LivePtr live = this->any_live();
        expect_refused([&] { (void)step.add(live->handle); }, "a step that was moved from");
        expect_refused([&] { (void)step.add(std::span(&live->handle, 1)); },
                       "a step that was moved from");
        this->check_sequence(*live);
      }
      expect_refused([&] { (void)plans_[0].build(step); }, "a step that was moved from");
    }
    if constexpr (requires { std::move(step).finish(); })
      expect_refused([&] { (void)std::move(step).finish(); }, "a step that was moved from");
    if constexpr (requires { step.rows(); }) {
      expect_refused([&] { (void)step.rows(); }, "a finished step that was moved from");
      const std::vector<SimToken> outputs(1);
      expect_refused([&] { step.commit(ScheduledSequence{}, outputs); },
                     "a finished step that was moved from");
      expect_refused([&] { step.commit(outputs); }, "a finished step that was moved from");
    }
    count("step that was moved from refused");
  }

  void cancelled(SimStep& step) {
    for (const Entry& entry : step.entries) {
      Live& live = *entry.live;
      --live.steps;
      if (entry.superseded())
        --live.superseded;
      else if (entry.has_output)
        this->cut(live, live.tokens.size() - static_cast<std::size_t>(entry.drafts) - 1);
    }
    std::vector<std::unique_ptr<SimStep>> gone;
    take(steps_, gone, step);
  }

  void abandoned(SimStep& step) {
    step.state = State::abandoned;
    for (const auto& other : steps_) other->is_void |= other->number >= step.number;
  }

  // ---- finished ------------------------------------------------------------------------------

  /// The rows whose outputs can be committed, as the tree says and the model expects.
  std::vector<ScheduledSequence> rows(const SimStep& step) {
    std::vector<ScheduledSequence> all;
    for (const ScheduledSequence row : step.finished->rows()) all.push_back(row);
    expect(step.finished->rows().size() == all.size(), "rows are as many as there are");
    std::size_t next = 0;
    for (const Entry& entry : step.entries) {
      if (!entry.has_output || entry.superseded() || entry.live->gone) continue;
      expect(next < all.size(), "every output that counts is asked for");
      const ScheduledSequence& row = all[next++];
      expect(row.sequence == entry.live->id && row.first_row == entry.first_row &&
                 row.num_rows == entry.num_rows() && row.num_drafts == entry.num_drafts() &&
                 row.output_row() == entry.first_row + entry.length - 1 - entry.drafts,
             "rows with outputs, in the order of add()");
    }
    expect(next == all.size(), "no other output is asked for");
    return all;
  }

  /// All rows at once, where no row has drafts and no earlier output is to come. False: another
  /// case.
  bool commit_all(SimStep& step) {
    std::vector<SimToken> outputs;
    const std::vector<ScheduledSequence> all = rows(step);
    bool in_order = true;
    for (const ScheduledSequence& row : all) {
      const Entry& entry = step.entries[static_cast<std::size_t>(row.index)];
      const auto first = static_cast<std::size_t>(entry.output_position());
      in_order = in_order && first == entry.live->known;
      if (entry.num_drafts() > 0) return false;
      outputs.push_back(entry.live->tokens[first]);
    }
    if (!in_order) {
      expect_refused([&] { step.finished->commit(outputs); }, "outputs of all rows in order");
      count("commit of all out of order");
      return false;
    }
    log("commit all " + text(outputs.size()));
    this->insist("commit", [&] { step.finished->commit(outputs); });
    for (const ScheduledSequence& row : all) {
      Entry& entry = step.entries[static_cast<std::size_t>(row.index)];
      entry.has_output = false;
      ++entry.live->known;
      this->mark_done(*entry.live, entry.live->computed);
      if (entry.live->handle.is_live()) this->check_sequence(*entry.live);
    }
    count("outputs committed at once");
    return true;
  }

  void commit_some(SimStep& step, std::size_t skip_one_in) {
    if (one_in(skip_one_in == 0 ? 2 : 6) && commit_all(step)) return;
    for (const ScheduledSequence& row : rows(step))
      if (skip_one_in == 0 || !one_in(skip_one_in)) {
        Entry& entry = step.entries[static_cast<std::size_t>(row.index)];
        if (entry.has_output && !entry.superseded()) commit(step, row, entry);
      }
  }

  void commit(SimStep& step, const ScheduledSequence& row, Entry& entry) {
    if (!entry.tree.empty()) return this->commit_branch(step, row, entry);
    Live& live = *entry.live;
    const auto first = static_cast<std::size_t>(entry.output_position());
    const auto drafts = static_cast<std::size_t>(entry.drafts);
    const std::size_t accepted = drafts > 0 && one_in(2) ? below(drafts + 1) : drafts;
    std::vector<SimToken> outputs(
        live.tokens.begin() + static_cast<std::ptrdiff_t>(first),
        live.tokens.begin() + static_cast<std::ptrdiff_t>(first + drafts + 1));
    if (one_in(20)) {
      auto many = outputs;
      many.push_back(0);
      expect_refused([&] { step.finished->commit(row, many); }, "no more than drafts and one");
    }
    if (accepted > 0 && entry.drafts_known && one_in(4) && first == live.known) {
      auto wrong = outputs;
      wrong[below(accepted)] += 1;
      wrong.resize(accepted + 1);
      expect_refused([&] { step.finished->commit(row, wrong); }, "accepted drafts are the drafts");
      count("commit of other drafts refused");
    }
    outputs.resize(accepted + 1);
    if (accepted < drafts) outputs.back() = this->any_token();
    log("commit " + text(outputs.size()) + " of " + text(drafts + 1) + " to " + name(live));
    if (first != live.known) {
      expect_refused([&] { step.finished->commit(row, outputs); }, "outputs in order");
      count("commit out of order");
      return;
    }
    this->insist("commit", [&] {
      if (outputs.size() == 1)
        step.finished->commit(row, outputs[0]);
      else
        step.finished->commit(row, outputs);
    });
    entry.has_output = false;
    if (accepted == drafts) {
      live.known += drafts + 1;
      count(drafts > 0 ? "all drafts right" : "output committed");
    } else {
      this->cut(live, first + accepted);
      this->push_token(live, outputs.back());
      live.places.resize(std::min(live.places.size(), live.tokens.size()));
      live.known = live.tokens.size();
      ++live.drops;
      live.superseded = live.steps;
      count(accepted > 0 ? "some drafts right" : "all drafts wrong");
      if (live.steps > 0) count("draft wrong under later steps");
    }
    this->mark_done(live, live.computed);
    expect_refused([&] { step.finished->commit(row, outputs); }, "outputs are committed once");
    if (live.handle.is_live()) this->check_sequence(live);
  }

  /// What was not committed is given up.
  void close(SimStep& step, bool elsewhere) {
    log("close step " + text(step.number) + (elsewhere ? " elsewhere" : ""));
    std::vector<std::unique_ptr<SimStep>> taken;
    take(finished_, taken, step);
    auto effect = [this, entries = std::move(step.entries)] {
      for (const Entry& entry : entries)
        if (entry.has_output && !entry.superseded() && !entry.live->gone) {
          this->give_up_outputs(*entry.live);
          count("output given up");
          if (entry.live->steps > 0) count("output given up under later steps");
        }
    };
    if (elsewhere) count("finished step dropped on another thread");
    drop_handle(Dropped::finished, step.finished, elsewhere, std::move(effect));
  }

  SequenceId waits_for_{};  // whom the sequence that was not added waits for
  std::vector<AttentionPlan> plans_ = std::vector<AttentionPlan>(4);

 private:
  static void take(std::vector<std::unique_ptr<SimStep>>& from,
                   std::vector<std::unique_ptr<SimStep>>& to, const SimStep& step) {
    for (std::size_t i = 0; i < from.size(); ++i)
      if (from[i].get() == &step) {
        to.push_back(std::move(from[i]));
        from.erase(from.begin() + static_cast<std::ptrdiff_t>(i));
        return;
      }
  }

  void give_up(const Entry& entry) {
    Live& live = *entry.live;
    --live.steps;
    if (entry.superseded())
      --live.superseded;
    else if (entry.has_output)
      this->give_up_outputs(live);
  }

  void resolve_abandoned(std::uint64_t before) {
    std::vector<SimStep*> resolved;
    std::uint64_t idle_before = idle_ + 1;
    for (const auto& step : steps_)
      if (step->state == State::in_flight) idle_before = std::min(idle_before, step->number);
    for (const auto& step : steps_)
      if (step->state == State::abandoned && step->number < std::max(before, idle_before))
        resolved.push_back(step.get());
    std::vector<std::unique_ptr<SimStep>> gone;
    for (SimStep* step : resolved) {
      for (const Entry& entry : step->entries) give_up(entry);
      take(steps_, gone, *step);
      count("abandoned step resolved");
    }
  }

  std::uint64_t idle_ = 0;  // the device runs no step up to this one
};

}  // namespace test
