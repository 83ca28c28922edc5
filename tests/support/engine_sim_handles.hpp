// Objects that were moved from, and threads that take turns at calling the tree, in the engine
// simulation.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "tests/support/engine_sim_checkpoints.hpp"

namespace test {

template <class Retention, int ChunkSize>
class EngineSimHandles : public EngineSimCheckpoints<Retention, ChunkSize> {
  using Base = EngineSimCheckpoints<Retention, ChunkSize>;

 public:
  using Base::Base;

 protected:
  using Base::below, Base::one_in, Base::count, Base::expect, Base::expect_refused, Base::log;
  using Base::finished_, Base::pins_, Base::memory_, Base::options_;
  using Base::text, Base::name, Base::tree_, Base::live_, Base::steps_;
  using typename Base::Live, typename Base::LivePtr, typename Base::SimStep, typename Base::State;
  using typename Base::Sequence, typename Base::Tree;

  // ---- moved-from ----------------------------------------------------------------------------

  /// Moves some object away and back. What is left in between is refused, and harms nobody.
  void move_something() {
    switch (below(6)) {
      case 0:
        return move_sequence();
      case 1:
        return move_step();
      case 2:
        return move_view();
      case 3:
        return move_plan();
      case 4:
        return move_pin();
      default:
        return move_tree();
    }
  }

  template <class T>
  static void move_to_itself(T& object) {
    T& same = object;
    object = std::move(same);
  }

  void move_sequence() {
    if (live_.empty()) return;
    const LivePtr live = this->any_live();
    Sequence moved = std::move(live->handle);
    Sequence& empty = live->handle;
    const std::vector<SimToken> tokens(1);
    ShadowCache cache{&memory_};
    const auto refused = [](const auto& f) { expect_refused(f, "a sequence that was moved from"); };
    expect(!empty.is_live(), "a sequence that was moved from is not live");
    refused([&] { (void)empty.size(); });
    refused([&] { (void)empty.id(); });
    refused([&] { (void)empty.num_written(); });
    refused([&] { (void)empty.num_reserved(); });
    refused([&] { (void)empty.tokens(); });
    refused([&] { (void)empty.options(); });
    refused([&] { (void)empty.weights_epoch(); });
    refused([&] { (void)empty.chunks_needed(1); });
    refused([&] { (void)empty.try_append(tokens); });
    refused([&] { (void)empty.try_fork(); });
    refused([&] { empty.truncate(1); });
    refused([&] { (void)empty.take_over(); });
    refused([&] { (void)empty.loadable(); });
    refused([&] { empty.mark_loaded({0, 1}); });
    refused([&] { empty.leave(); });
    refused([&] { (void)swap_out(empty, cache); });
    if (SimStep* open = this->open_step()) {
      refused([&] { (void)open->open->add(empty); });
      refused([&] { (void)open->open->add(std::span(&empty, 1)); });
      expect(open->open->num_rows() == open->num_rows, "nothing was added");
    }
    move_to_itself(moved);
    empty = std::move(moved);
    this->check_sequence(*live);
    count("sequence moved");
  }

  void move_step() {
    const auto moves = [&](auto& handle) {
      auto moved = std::move(*handle);
      this->check_consumed(*handle);
      move_to_itself(moved);
      *handle = std::move(moved);
    };
    if (!finished_.empty() && one_in(3)) {
      SimStep& step = *finished_[below(finished_.size())];
      moves(step.finished);
      (void)this->rows(step);
      return count("finished step moved");
    }
    for (const auto& step : steps_) {
      if (step->dropped || step->state == State::abandoned || !one_in(2)) continue;
      const bool current = step->view && step->view.is_current();
      step->open ? moves(step->open) : moves(step->in_flight);
      expect((step->view && step->view.is_current()) == current, "a view follows its step");
      return count(step->open ? "open step moved" : "step in flight moved");
    }
  }

  void move_view() {
    for (const auto& step : steps_) {
      if (!step->view || !step->view.is_current()) continue;
      auto moved = std::move(step->view);
      this->check_views();
      step->view = std::move(moved);
      this->check_views();
      return count("view moved");
    }
  }

  void move_plan() {
    AttentionPlan& plan = this->plans_[below(this->plans_.size())];
    std::vector<bool> current;
    for (const auto& step : steps_) current.push_back(step->view && step->view.is_current());
    const auto are_current = [&] {
      for (std::size_t i = 0; i < steps_.size(); ++i)
        expect((steps_[i]->view && steps_[i]->view.is_current()) == current[i],
               "views follow their plan");
      this->check_views();
    };
    AttentionPlan moved = std::move(plan);
    are_current();
    SimStep* open = this->open_step();
    const bool used = open != nullptr && open->built && !open->executed && one_in(2);
    if (used) this->build(*open, plan);
    plan = std::move(moved);
    if (!used) {
      are_current();
    } else {
      if (open->view) expect(!open->view.is_current(), "a view ends with its plan");
      this->build(*open, plan);
      count("plan used after it was moved from");
    }
    count("plan moved");
  }

  void move_pin() {
    if (pins_.empty()) return;
    auto& pin = pins_[below(pins_.size())].handle;
    const std::size_t size = pin.size();
    typename Tree::Pin moved = std::move(pin);
    expect(!pin && pin.size() == 0, "a pin that was moved from pins nothing");
    move_to_itself(moved);
    pin = std::move(moved);
    expect(pin.size() == size, "a pin that is moved stays");
    count("pin moved");
  }

  void move_tree() {
    Tree moved = std::move(*tree_);
    Tree& empty = *tree_;
    const std::vector<SimToken> prompt(1);
    AdmissionQueue<Tree> waiting;
    waiting.push({prompt});
    const auto refused = [](const auto& f) { expect_refused(f, "a tree that was moved from"); };
    refused([&] { (void)empty.stats(); });
    refused([&] { (void)empty.insert(prompt); });
    refused([&] { (void)empty.try_insert(prompt); });
    refused([&] { (void)waiting.admit(empty); });
    refused([&] { waiting.rank(empty); });
    refused([&] { (void)empty.match_prefix(prompt); });
    refused([&] { (void)empty.chunks_available(); });
    refused([&] { (void)empty.begin_step(); });
    refused([&] { (void)empty.pin(prompt); });
    refused([&] { empty.device_idle(); });
    refused([&] { empty.clear(); });
    refused([&] { check_invariants(empty); });
    refused([&] { Checkpoints<Tree>(empty, {.max_count = 1}); });
    refused([&] { Annotations<Tree, int>{empty}; });
    for (const LivePtr& live : live_) expect(live->handle.is_live(), "handles follow the tree");
    this->check_views();
    move_to_itself(moved);
    if (one_in(2)) {  // over another one, whose handles are orphaned
      ShadowMemory memory;
      memory.chunk_size = ChunkSize;
      Tree other(ShadowAllocator{{.max_chunks = 4}, &memory}, options_.tree,
                 options_.template policy<Retention>(this->tenants_));
      const Sequence orphan = other.insert(prompt);
      other = std::move(moved);
      expect(!orphan.is_live(), "a tree that is assigned over is gone");
      moved = std::move(other);
    }
    empty = std::move(moved);
    count("tree moved");
  }

  // ---- threads -------------------------------------------------------------------------------

  /// Another thread calls the tree, which is its own until this one calls it: some handles it drops
  /// before it calls, some after.
  void on_another_thread() {
    std::vector<LivePtr> before, after;
    for (auto* group : {&before, &after})
      for (std::size_t n = below(3); n > 0 && !live_.empty(); --n) {
        group->push_back(this->any_live());
        this->remember(*group->back());
        this->forget(group->back());
      }
    this->push_requests();
    std::optional<std::pair<std::uint64_t, Sequence>> joining;
    std::exception_ptr error;
    std::thread([&] {
      try {
        for (const LivePtr& live : before) live->handle = Sequence();
        expect(!tree_->pin({}), "nothing is pinned");  // a call that changes the tree in any case
        joining = this->waiting_.admit(*tree_);
        for (const LivePtr& live : after) live->handle = Sequence();
      } catch (...) {
        error = std::current_exception();
      }
    }).join();
    if (error) std::rethrow_exception(error);
    log("on another thread: " + text(before.size()) + " leave, " +
        (joining ? "one is" : "nobody is") + " admitted, " + text(after.size()) + " leave");
    for (const LivePtr& live : before) live->gone = true;  // sequences come first
    this->entering();
    this->owned_ = false;
    for (const LivePtr& live : after) live->gone = true;
    if (joining) count("admitted on another thread");
    if (!after.empty()) count("left on the thread that called the tree");
    if (joining) this->admitted(std::move(*joining));
  }

  /// Two threads call the tree under one lock and drop under it what they hold; a third one drops
  /// what it is given, without the lock. What comes of it depends on their timing. So it stands at
  /// the end of a run, and asks for what holds in any case: nobody else's sequence is touched, and
  /// of theirs nothing is left.
  void crowd() {
    using Handle = std::variant<Sequence, typename Tree::InFlight, typename Tree::Pin>;
    std::mutex tree_lock, given_lock;
    std::vector<Handle> given;
    std::exception_ptr error;
    bool done = false;  // under given_lock, as the list
    std::uint64_t joined = 0, dropped = 0, steps = 0;
    const auto give = [&](Handle handle) {
      const std::lock_guard guard(given_lock);
      given.push_back(std::move(handle));
    };
    const auto calls = [&](std::uint64_t seed) {
      RandomChoices choices(seed);
      std::vector<Sequence> own;
      AttentionPlan plan;
      const auto any = [&]() -> Sequence& {
        std::swap(own[choices.below(own.size())], own.back());
        return own.back();
      };
      for (int i = 0; i < 40; ++i) {
        const std::lock_guard guard(tree_lock);
        const std::size_t kind = choices.below(8);
        if (own.empty() || kind < 2) {
          std::vector<SimToken> prompt(1 + choices.below(options_.max_prompt));
          for (SimToken& token : prompt)
            token = static_cast<SimToken>(choices.below(options_.letters));
          if (auto s = tree_->try_insert(prompt)) own.push_back(std::move(*s));
          if (choices.below(4) == 0) give(tree_->pin(prompt));
          ++joined;
        } else if (kind == 2) {
          if (auto s = any().try_fork()) own.push_back(std::move(*s));
        } else if (kind < 5) {
          any();
          if (kind == 3) give(std::move(own.back()));
          own.pop_back();
        } else {
          tree_->device_idle();
          std::optional<typename Tree::Step> step;
          try {
            step.emplace(tree_->begin_step());
          } catch (const InvalidArgument&) {
            continue;  // four are in flight, not dropped yet
          }
          for (Sequence& s : own) (void)step->add(s, 3);
          if (choices.below(2) == 0) continue;
          (void)plan.build(*step);
          give(std::move(*step).submit());
          ++steps;
        }
      }
      const std::lock_guard guard(tree_lock);
      own.clear();
    };
    const auto guarded = [&](const auto& f) {
      try {
        f();
      } catch (...) {
        const std::lock_guard guard(given_lock);
        error = std::current_exception();
      }
    };
    const std::uint64_t seed = below(1u << 30);
    std::thread dropper([&] {
      for (bool last = false; !last;) {
        std::vector<Handle> taken;
        {
          const std::lock_guard guard(given_lock);
          taken.swap(given);
          last = done;
        }
        dropped += taken.size();
        if (taken.empty()) std::this_thread::yield();
      }
    });
    std::thread one([&] { guarded([&] { calls(seed); }); });
    std::thread two([&] { guarded([&] { calls(seed + 1); }); });
    one.join();
    two.join();
    {
      const std::lock_guard guard(given_lock);
      done = true;
    }
    dropper.join();
    if (error) std::rethrow_exception(error);
    this->device_idle();
    check_invariants(*tree_);
    this->check_all_sequences();
    expect(tree_->stats().leaving_sequences == 0 ||
               !chunkattn::detail::TreeAccess::core(*tree_).pending_copies.empty(),
           "nobody of the crowd is left");
    count("crowd of threads");
    count("crowd: joined", joined);
    count("crowd: dropped without the lock", dropped);
    count("crowd: steps dropped in flight", steps);
  }
};

}  // namespace test
