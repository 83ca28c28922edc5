// The engine simulation as a whole: the choice of operations, runs of steps, the cache as a whole,
// and the end.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/engine_sim_events.hpp"
#include "tests/support/engine_sim_hostile.hpp"
#include "tests/support/engine_sim_tiers.hpp"

namespace test {

template <class Retention, int ChunkSize>
class EngineSim : public EngineSimTiers<Retention, ChunkSize> {
  using Base = EngineSimTiers<Retention, ChunkSize>;
  using Base::below, Base::one_in, Base::count, Base::expect, Base::expect_refused, Base::log;
  using Base::finished_, Base::pins_;
  using Base::text, Base::name, Base::tree_, Base::live_, Base::steps_, Base::options_;
  using typename Base::Live, typename Base::LivePtr, typename Base::SimStep, typename Base::State;
  using typename Base::Sequence, typename Base::Tree;

 public:
  EngineSim(Choices& choices, const SimOptions& options, Counters& counters)
      : Base(choices, options, counters), wire_(choices, counters), hostile_(choices, counters) {
    if (!one_in(4)) connect_wire();
  }
  EngineSim(const EngineSim&) = delete;
  EngineSim& operator=(const EngineSim&) = delete;
  ~EngineSim() {
    this->end_tiers();  // what they say goes to wire_
  }

  /// One random operation; throws std::logic_error at the first difference.
  void operate() {
    if (!wire_.connected() && one_in(100)) connect_events();
    const TreeStats before = tree_->stats();
    this->begin_values();
    choose();
    if (one_in(3)) this->use_tiers();
    if (this->any_void()) this->check_views();
    count_events(before);
    check_invariants(*tree_);
    mirror_events();
  }

  void check_all() {
    check_invariants(*tree_);
    this->check_all_sequences();
    this->check_views();
    this->check_states();
    for (const auto& pin : pins_) check_pin(pin);
  }

  /// Lets everybody leave; then nothing may be left but cache, and after clear() nothing at all.
  void end() {
    if (one_in(4)) return die_with_handles();
    if (SimStep* open = this->open_step()) this->drop(*open, false);
    const bool drop_steps = one_in(2);
    while (SimStep* step = in_flight_step(true))
      drop_steps ? this->drop(*step, false) : (void)this->finish(*step);
    while (!finished_.empty()) this->close(*finished_.back(), false);
    this->device_idle();
    if (one_in(2)) this->crowd();
    while (!live_.empty()) this->leave();
    this->device_idle();
    pins_.clear();
    check_invariants(*tree_);
    TreeStats stats = tree_->stats();
    expect(stats.live_sequences == 0, "nobody is left");
    check_counters(stats);
    if (chunkattn::detail::TreeAccess::core(*tree_).pending_copies.empty()) {  // else what is to be
                                                                               // copied waits
      expect(stats.leaving_sequences == 0, "nobody waits");
      expect(stats.used_chunks == stats.retained_chunks, "only cache is left");
    }
    expect(Retention{}.retains || stats.used_chunks == 0, "without retention nothing is left");
    tree_->clear();
    check_invariants(*tree_);
    this->check_states();
    stats = tree_->stats();
    expect(stats.used_chunks == 0 && stats.nodes == 1 && stats.leaving_sequences == 0,
           "clear() forgets everything");
    this->check_no_values();
    expect(options_.budget == max_pool_chunks || tree_->chunks_available() == options_.budget,
           "every chunk is back");
    nothing_grows();
  }

 private:
  /// What came has gone.
  void check_counters(const TreeStats& stats) {
    expect(stats.inserts + stats.forks == stats.leaves, "who joined has left");
    expect(stats.forks == stats.forks_copied + stats.forks_shared, "forks copy or share");
    expect(stats.clears == this->weights_, "calls of clear() are counted");
    const auto step = tree_->begin_step();
    expect(step.number() - 1 == stats.steps + stats.cancelled_steps + stats.abandoned_steps,
           "steps finished or were dropped");
  }
  /// The same work over and over takes no further memory, however many sequences, steps and pins
  /// came and went before.
  void nothing_grows() {
    const std::vector<SimToken> prompt{0, 1, 0, 1};
    std::uint64_t before = 0;
    for (int i = 0; i < 4000; ++i) {
      if (i == 100) before = heap.allocations;
      Sequence s = tree_->insert(prompt);
      const Sequence twin = s.fork();
      auto step = tree_->begin_step();
      (void)step.add(s);
      const auto pin = tree_->pin(prompt);
      if (i % 2 == 0) s.leave();
      if (i % 4 == 0) continue;
      tree_->clear();
    }
    tree_->clear();
    expect(this->sink_allocates_ || heap.allocations == before, "what has gone takes no memory");
    expect(tree_->stats().used_chunks == 0, "what has gone takes no chunk");
  }

  void connect_events() {
    this->settle();  // this is no call of the tree
    connect_wire();
  }
  void connect_wire() {
    wire_.connect(*tree_);
    hostile_.connect(*tree_);
  }
  /// The tree's events arrive at a mirror.
  void mirror_events() {
    if (!wire_.connected()) return;
    wire_.deliver();
    hostile_.deliver();
    if (one_in(16)) wire_.compare(*tree_);
    if (!wire_.is_current()) return;
    InsertOptions options{.name_space = this->random_namespace()};
    const std::vector<SimToken> prompt = this->random_prompt();
    if (one_in(4)) options.public_length = below(prompt.size() + 1);
    (void)wire_.check_match(*tree_, prompt, options);
  }

  void choose() {
    const std::size_t kind = below(118);
    if (live_.empty() || (kind < 10 && live_.size() < options_.max_live)) {
      one_in(12) ? this->admit() : this->insert();
    } else if (kind < 20) {
      live_.size() > options_.max_live / 2 || one_in(3) ? this->leave() : this->insert();
    } else if (kind < 26) {
      live_.size() >= options_.max_live ? this->leave() : one_in(8) ? this->family() : this->fork();
    } else if (kind < 31) {
      this->append();
    } else if (kind < 33) {
      this->truncate();
    } else if (kind < 36) {
      this->load();
    } else if (kind < 38) {
      one_in(4) ? this->regenerate() : this->take_over();
    } else if (kind < 40) {
      one_in(2) && live_.size() < options_.max_live ? this->resume() : this->swap_out();
    } else if (kind < 43) {
      pin();
    } else if (kind == 43) {
      rare();
    } else if (kind < 47) {
      whole_step();
    } else if (kind < 100) {
      part_of_a_step();
    } else if (kind < 102) {
      this->move_something();
    } else if (kind < 110) {
      this->checkpoint();
    } else {
      std::vector<SimToken> prompt = this->random_prompt();
      InsertOptions o = this->random_options(prompt.size());
      if (one_in(2)) {  // as a live one begins
        const Live& like = *this->any_live();
        prompt.assign(like.tokens.begin(),
                      like.tokens.begin() + static_cast<std::ptrdiff_t>(1 + below(like.known)));
        o = {.name_space = like.name_space, .public_length = like.public_end};
      }
      this->annotate(prompt, this->model_of(prompt, o), o);
    }
  }

  void rare() {
    switch (below(20)) {
      case 18:
      case 19:
        return this->change_terms();
      case 16:
        return connect_events();
      case 17:
        return expire();
      case 0:
        return clear();
      case 1:
      case 2:
        return this->device_idle();
      case 3:
      case 4:
      case 5:
      case 6:
        return everybody();
      case 7:
      case 8:
        return burst();
      case 9:
      case 10:
      case 11:
        return this->on_another_thread();
      default:
        return check_all();
    }
  }

  // ---- steps ---------------------------------------------------------------------------------

  [[nodiscard]] SimStep* in_flight_step(bool oldest) {
    std::vector<SimStep*> all;
    for (const auto& step : steps_)
      if (step->state == State::in_flight && !step->dropped) all.push_back(step.get());
    return all.empty() ? nullptr : oldest ? all.front() : all[below(all.size())];
  }

  /// One move in the life of some step.
  void part_of_a_step() {
    const std::size_t kind = below(100);
    SimStep* open = this->open_step();
    if (kind < 45) {
      if (open == nullptr) open = this->begin_step();
      if (open == nullptr) return;
      if (!open->executed && (!open->built || one_in(6)) &&
          (open->entries.size() < 3 || one_in(2))) {
        for (std::size_t n = 1 + below(4); n > 0 && !live_.empty(); --n) this->add_any(*open);
      } else if (!open->built || one_in(8)) {
        this->build(*open);
      } else if (!open->executed && one_in(4)) {
        this->run_device(open->number);
      } else if (open->executed || one_in(4)) {
        if (in_flight_step(true) != nullptr && !one_in(4))
          (void)this->finish(*in_flight_step(true));
        if (this->finish(*open)) this->commit_some(*finished_.back(), 12);
      } else {
        this->submit(*open);
      }
    } else if (kind < 60) {  // the device comes further
      for (const auto& step : steps_)
        if (!step->executed && step->state == State::in_flight)
          return this->run_device(step->number);
    } else if (kind < 78) {
      if (SimStep* step = in_flight_step(!one_in(12))) (void)this->finish(*step);
    } else if (kind < 81) {
      if (SimStep* step = in_flight_step(false)) this->drop(*step, one_in(8));
    } else if (kind < 83) {
      if (open != nullptr) this->drop(*open, one_in(8));
    } else if (kind < 96) {
      if (!finished_.empty()) this->commit_some(*finished_[below(finished_.size())], 8);
      while (finished_.size() > 5) this->close(*finished_.front(), one_in(8));
    } else if (!finished_.empty()) {
      this->close(*finished_[below(finished_.size())], one_in(8));
    } else if (open != nullptr) {
      this->submit(*open);
    }
  }

  /// A step from its beginning to its end, some of it still in flight.
  void whole_step() {
    SimStep* step = this->open_step();
    if (step == nullptr) step = this->begin_step();
    if (step == nullptr) {
      step = in_flight_step(true);
      step != nullptr ? (void)this->finish(*step) : this->device_idle();
      return;
    }
    if (!step->executed)
      for (std::size_t n = 1 + below(8); n > 0; --n) this->add_any(*step);
    if (!step->built) this->build(*step);
    if (one_in(2)) return this->submit(*step);
    while (SimStep* before = in_flight_step(true)) (void)this->finish(*before);
    if (this->finish(*step)) this->commit_some(*finished_.back(), 25);
    while (finished_.size() > 2) this->close(*finished_.front(), false);
  }

  /// No step is outstanding, no output to come.
  void drain() {
    if (SimStep* open = this->open_step()) {
      if (one_in(2) || (!open->built && !open->entries.empty()))
        this->drop(*open, false);
      else
        this->submit(*open);
    }
    while (SimStep* step = in_flight_step(true))
      if (this->finish(*step)) this->commit_some(*finished_.back(), 0);
    while (!finished_.empty()) this->close(*finished_.front(), false);
    this->device_idle();
    expect(steps_.empty(), "nothing is outstanding");
  }

  /// With nothing in flight, everybody can be computed: nobody waits for ever.
  void everybody() {
    drain();
    log("everybody");
    const auto has_work = [&](const LivePtr& live) {
      return live->handle.num_uncomputed() > 0 && live->tokens.size() <= options_.max_length;
    };
    while (std::any_of(live_.begin(), live_.end(), has_work)) {
      SimStep* step = this->begin_step();
      expect(step != nullptr, "a step can begin");
      bool fits = true;
      std::vector<LivePtr> order(live_);
      for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[below(i)]);
      for (const LivePtr& live : order) fits = add_with_writers(*step, live, 0) && fits;
      expect(step->num_rows > 0 || !fits, "somebody can go on");
      this->build(*step);
      (void)this->finish(*step);
      this->close(*finished_.back(), false);
      if (!fits) return count("everybody, but out of chunks");
    }
    for (const LivePtr& live : live_) {
      if (live->tokens.size() > options_.max_length) continue;
      expect(live->handle.num_uncomputed() == 0, "all is computed");
      expect(live->handle.num_written() == live->known ||
                 !chunkattn::detail::TreeAccess::core(*tree_).pending_copies.empty(),
             "all is written");
    }
    count("everybody");
  }

  /// Adds a sequence behind those that it waits for. False where the budget is spent.
  bool add_with_writers(SimStep& step, const LivePtr& live, std::size_t depth) {
    if (live->handle.num_uncomputed() == 0 || live->last_step == step.number) return true;
    expect(depth <= live_.size(), "nobody waits for himself");
    for (std::size_t tries = 0; tries < 100; ++tries) {
      if (live->tokens.size() > options_.max_length) return false;
      const AddResult::Reason reason = this->add(step, live, 1000, 0, false);
      if (reason == AddResult::Reason::none) return true;
      if (reason == AddResult::Reason::out_of_chunks) return false;
      expect(reason == AddResult::Reason::waits_for_sequence, "only a sequence is waited for");
      const LivePtr writer = this->find_live(this->waits_for_);
      expect(writer != nullptr, "who is waited for is live");
      if (writer->last_step == step.number) return true;  // it went as far as it could
      expect(writer->handle.num_uncomputed() > 0, "who is waited for has something to compute");
      if (!add_with_writers(step, writer, depth + 1)) return false;
    }
    expect(false, "waiting comes to an end");
    return false;
  }

  /// Decode steps of the same sequences in the same order: the plan advances and is rebuilt only
  /// where the tree changed, or where a tail got its first place.
  void burst() {
    drain();
    std::vector<LivePtr> chosen;
    for (std::size_t n = 1 + below(6); n > 0; --n) {
      const LivePtr live = this->any_live();
      if (std::find(chosen.begin(), chosen.end(), live) == chosen.end() &&
          live->handle.num_uncomputed() == 1 && live->handle.num_pending() == 0 &&
          live->known + 20 < options_.max_length)
        chosen.push_back(live);
    }
    AttentionPlan& plan = this->plans_[below(this->plans_.size())];
    std::uint64_t version = 0;
    for (std::size_t n = 1 + below(14), i = 0; i < n && !chosen.empty(); ++i) {
      SimStep* step = this->begin_step();
      bool first_place = false, all = true;
      for (const LivePtr& live : chosen) {
        all = all && this->add(*step, live, 1, 0, false) == AddResult::Reason::none;
        const auto& tail = this->tail_of(*live);
        first_place |= tail.length <= 2;
      }
      if (!all) {
        this->drop(*step, false);
        return;
      }
      const std::uint64_t rebuilds = plan.num_rebuilds();
      const bool same = i > 0 && version == tree_->version();
      this->build(*step, plan);
      expect(!same || first_place || plan.num_rebuilds() == rebuilds,
             "no rebuild while nothing changes");
      version = tree_->version();
      (void)this->finish(*step);
      this->commit_some(*finished_.back(), 0);
      this->close(*finished_.back(), false);
      count("decode step");
    }
  }
  /// The node of the sequence's private tail.
  const detail::TreeNode& tail_of(const Live& live) const {
    const auto& core = chunkattn::detail::TreeAccess::core(*tree_);
    const auto index =
        static_cast<std::int32_t>((static_cast<std::uint64_t>(live.id) - 1) & 0xffffffffu);
    return core.topology.node(core.sequences[index].tail);
  }

  // ---- the cache as a whole ------------------------------------------------------------------

  void pin() {
    if (!pins_.empty() && (pins_.size() > 6 || one_in(3))) {
      std::swap(pins_[below(pins_.size())], pins_.back());
      auto handle = std::move(pins_.back().handle);
      pins_.pop_back();
      const bool elsewhere = one_in(6);
      this->drop_handle(Base::Dropped::pin, handle, elsewhere, [] {});
      return count(elsewhere ? "unpin on another thread" : "unpin");
    }
    std::vector<SimToken> tokens = this->random_prompt();
    InsertOptions o{.name_space = this->random_namespace()};
    if (one_in(4)) o.public_length = below(tokens.size() + 1);
    this->settle();
    const auto found = tree_->match_prefix(tokens, o);
    const std::size_t written = found.cached - found.cached % this->unit();
    typename Tree::Pin handle;
    this->insist("pin", [&] { handle = tree_->pin(tokens, o); });
    log("pin " + text(handle.size()) + " of " + text(written));
    expect(handle.size() == written || handle.size() == 0, "all that is written is pinned");
    expect(static_cast<bool>(handle) == (handle.size() > 0), "a pin that holds nothing is empty");
    if (written == 0) return;
    const std::size_t chunks = written / ChunkSize + written + 1;
    if (!handle) expect(chunks > options_.retention.max_pinned || !pins_.empty(), "pins fit");
    count(handle ? found.pending > 0 ? "pin of a part" : "pin" : "pin refused");
    if (handle) pins_.push_back({std::move(handle), std::move(tokens), o, written});
  }
  void check_pin(const typename Base::Pinned& pin) {
    expect(pin.handle.size() <= pin.size, "a pin does not grow");
    expect(tree_->match_prefix(pin.tokens, pin.options).cached >= pin.handle.size(),
           "what is pinned is there");
  }

  /// Some time goes by; after the policy's ttl nothing is cached but what is pinned.
  void expire() {
    this->entering();
    time_ += below(2 * options_.ttl);
    const std::uint64_t unused = time_ - expired_;
    const std::size_t tokens = tree_->expire(time_);
    expired_ = time_;
    log("expire at " + text(time_) + ": " + text(tokens));
    if (tokens == 0) return;
    this->forget_cache();
    count("expired");
    if (unused >= options_.ttl && pins_.empty())
      expect(tree_->stats().retained_chunks == 0, "what was cached for so long has gone");
  }

  void clear() {
    log("clear");
    this->entering();
    this->spare([&] { tree_->clear(); });
    ++this->weights_;  // K/V from before must never be found
    this->change_weights();
    for (const auto& pin : pins_) expect(pin.handle.size() == 0, "clear() ends pins");
    if (one_in(2)) pins_.clear();
    for (const LivePtr& live : live_) live->findable = 0;
    this->forget_cache();
    const auto found = tree_->match_prefix(this->random_prompt(), {});
    expect(found.cached + found.pending == 0, "nothing is found after clear()");
    count("clear");
  }

  /// The tree goes first: its handles are harmless.
  void die_with_handles() {
    this->log("the tree is destroyed first");
    this->end_tiers();
    tree_.reset();
    for (const LivePtr& live : live_) {
      expect(!live->handle.is_live(), "an orphan is not live");
      expect_refused([&] { (void)live->handle.size(); }, "an orphan says so");
    }
    for (auto& step : steps_) {
      if (step->view) expect(!step->view.is_current(), "a view ends with the tree");
      if (step->open)
        expect_refused([&] { (void)std::move(*step->open).submit(); }, "an orphaned step");
      if (step->in_flight)
        expect_refused([&] { (void)std::move(*step->in_flight).finish(); }, "an orphaned step");
    }
    for (auto& step : finished_)
      expect_refused([&] { (void)step->finished->rows(); }, "an orphaned step");
    for (const auto& pin : pins_) expect(pin.handle.size() == 0, "an orphaned pin");
    this->check_orphans();
    count("tree destroyed first");
  }

  void count_events(const TreeStats& before) {
    const TreeStats now = tree_->stats();
    const auto more = [&](const char* what, std::uint64_t a, std::uint64_t b) {
      if (b > a) count(what, b - a);
    };
    more("split inside a chunk", before.splits_inside_chunk, now.splits_inside_chunk);
    more("split between chunks", before.splits - before.splits_inside_chunk,
         now.splits - now.splits_inside_chunk);
    more("fork copied its tail", before.forks_copied, now.forks_copied);
    more("fork shared its tail", before.forks_shared, now.forks_shared);
    more("hand-over", before.reassigned_nodes, now.reassigned_nodes);
    more("merged tokens", before.merged_tokens, now.merged_tokens);
    more("published tokens", before.published_tokens, now.published_tokens);
    more("evicted chunks", before.evicted_chunks, now.evicted_chunks);
    more("evicted tokens", before.evicted_tokens, now.evicted_tokens);
  }

  EventWire<Tree> wire_;
  HostileWire<Tree> hostile_;
  std::uint64_t time_ = 0, expired_ = 0;
};

}  // namespace test
