// Checkpoints of recurrent layers in the engine simulation: states are hashes of the path before
// them, saved anywhere, and must be what a sequence finds when it starts at one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "chunkattn/cache/checkpoints.hpp"
#include "tests/support/engine_sim_ops.hpp"

namespace test {

template <class Retention, int ChunkSize>
class EngineSimCheckpoints : public EngineSimOps<Retention, ChunkSize> {
  using Base = EngineSimOps<Retention, ChunkSize>;

 public:
  using Base::Base;

 protected:
  using Base::below, Base::one_in, Base::count, Base::expect, Base::expect_refused, Base::log;
  using Base::text, Base::name, Base::tree_, Base::options_;
  using typename Base::Live, typename Base::LivePtr, typename Base::Sequence, typename Base::Tree;

  void checkpoint() {
    if (options_.max_checkpoints == 0) return;
    if (!kept_ || one_in(60)) {  // of a tree that has nodes
      kept_.reset();
      check_states();
      kept_.emplace(*tree_, typename Checkpoints<Tree>::Options{options_.max_checkpoints,
                                                                options_.max_checkpoints_per_path});
      count("checkpoints from now on");
    }
    const LivePtr live = this->any_live();
    switch (below(5)) {
      case 0:
      case 1:
        start(*live);
        break;
      case 2:
        look();
        break;
      default:
        save(*live);
    }
    check_states();
  }
  /// As many states live as are said to be kept.
  void check_states() {
    std::erase_if(states_, [](const auto& state) { return state.expired(); });
    expect(states_.size() == num_checkpoints(), "states live as long as their checkpoints");
    expect(states_.size() <= options_.max_checkpoints, "checkpoints have a budget");
  }
  [[nodiscard]] std::size_t num_checkpoints() const { return kept_ ? kept_->stats().count : 0; }

 private:
  struct Recurrent {
    std::uint64_t hash;  // of the path
  };

  [[nodiscard]] bool is_known(std::uint64_t hash) const {
    return std::ranges::any_of(states_, [&](const auto& state) {
      const auto alive = state.lock();
      return alive && alive->hash == hash;
    });
  }

  void save(Live& live) {
    const std::size_t written = live.handle.num_written();
    std::size_t position = 1 + below(live.known);
    const std::size_t next = kept_->next(live.handle);
    expect(next == Sequence::whole || (next > live.handle.num_scheduled() && next < live.known),
           "a checkpoint is wanted ahead, before the last token");
    if (next != Sequence::whole && one_in(2)) position = next;
    const auto state = std::make_shared<const Recurrent>(Recurrent{live.hash[position - 1]});
    if (position > written) {
      expect_refused([&] { (void)kept_->save(live.handle, position, state); },
                     "no state of what is not there");
      return count("checkpoint refused");
    }
    bool kept = false;
    const std::size_t before = num_checkpoints();
    this->insist("save a checkpoint", [&] { kept = kept_->save(live.handle, position, state); });
    log("checkpoint of " + name(live) + " at " + text(position) + (kept ? "" : ", not kept"));
    expect(kept == (state.use_count() > 1), "what is kept is held");
    expect(kept || num_checkpoints() == before, "what is not kept costs no other");
    expect(kept || live.weights != this->weights_ || is_known(live.hash[position - 1]),
           "one is kept unless there is one");
    if (kept) states_.push_back(state);
    if (kept && kept_->next(live.handle) != next) count("checkpoint where one was wanted");
    count(kept ? "checkpoint" : "checkpoint that was there");
  }

  void start(Live& live) {
    const std::size_t cursor = live.handle.num_scheduled();
    if (live.steps > 0 || live.reserved() > 0) {
      expect_refused([&] { (void)kept_->resume(live.handle); }, "not within a step");
      return;
    }
    const std::size_t expected = nearest(live, std::min(cursor, live.handle.num_written()));
    typename Checkpoints<Tree>::Checkpoint found;
    this->spare([&] { found = kept_->resume(live.handle); });
    log("start " + name(live) + " at " + text(found.position) + " of " + text(cursor));
    expect(found.position == expected, "the nearest checkpoint of the path");
    expect((found.position > 0) == (found.state != nullptr), "a position with a state");
    expect(live.handle.num_scheduled() == found.position, "what is behind it is computed");
    if (found.position == 0) return count("start without a checkpoint");
    const auto* state = static_cast<const Recurrent*>(found.state.get());
    expect(state->hash == live.hash[found.position - 1], "the state of these very tokens");
    count(found.position < cursor ? "start at a checkpoint before what is cached"
                                  : "start at a checkpoint");
  }
  /// Found by going over all that there are.
  [[nodiscard]] std::size_t nearest(const Live& live, std::size_t end) const {
    const auto& core = chunkattn::detail::TreeAccess::core(*tree_);
    const chunkattn::detail::CheckpointTable& all = table();
    std::size_t best = 0;
    for (std::int32_t i = all.oldest(); i != chunkattn::detail::none; i = all[i].newer) {
      const chunkattn::detail::CheckpointRecord& record = all[i];
      const auto position = static_cast<std::size_t>(record.position);
      if (position > end || position <= best) continue;
      auto n = core.sequences[index_of(live)].tail;
      while (n != chunkattn::detail::root_node && n != record.node)
        n = core.topology.node(n).parent;
      if (n == record.node) best = position;
    }
    return best;
  }
  [[nodiscard]] const chunkattn::detail::CheckpointTable& table() const {
    const chunkattn::detail::CheckpointTable* table = nullptr;
    chunkattn::detail::TreeAccess::core(*tree_).topology.observers.notify([&](auto& observer) {
      if (auto* nodes = dynamic_cast<const chunkattn::detail::NodeCheckpoints*>(&observer))
        table = &nodes->table();
    });
    return *table;
  }
  [[nodiscard]] static std::int32_t index_of(const Live& live) {
    return static_cast<std::int32_t>((static_cast<std::uint64_t>(live.id) - 1) & 0xffffffffu);
  }

  /// What a match says is there for the prompt's own tokens.
  void look() {
    const std::vector<SimToken> prompt = this->random_prompt();
    const InsertOptions o = this->random_options(prompt.size());
    const std::size_t found = kept_->find(prompt, o);
    expect(found <= tree_->match_prefix(prompt, o).cached, "it is not behind what is cached");
    if (found == 0) return;
    const Live model = this->model_of(prompt, o);
    expect(is_known(model.hash[found - 1]), "a match finds a state of its tokens");
    count("match with a checkpoint");
  }

  std::optional<Checkpoints<Tree>> kept_;
  std::vector<std::weak_ptr<const Recurrent>> states_;
};

}  // namespace test
