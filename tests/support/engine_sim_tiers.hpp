// Tiers below the engine simulation's tree: what is evicted goes to stores that fail, lose and
// confuse records, and sequences get K/V from there that must be theirs, row by row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/experimental/tiers.hpp"
#include "tests/support/engine_sim_handles.hpp"
#include "tests/support/faulty_tier.hpp"

namespace test {

template <class Retention, int ChunkSize>
class EngineSimTiers : public EngineSimHandles<Retention, ChunkSize> {
  using Base = EngineSimHandles<Retention, ChunkSize>;

 public:
  EngineSimTiers(Choices& choices, const SimOptions& options, Counters& counters)
      : Base(choices, options, counters) {
    if (one_in(3)) open_tiers();
  }

 protected:
  using Base::below, Base::one_in, Base::count, Base::expect, Base::log;
  using Base::memory_, Base::tree_, Base::live_, Base::text, Base::name;
  using typename Base::LivePtr, typename Base::Tree;
  using EventSink = std::function<void(const CacheEvent&, std::span<const SimToken>)>;

  /// Something happens between the tree and its tiers.
  void use_tiers() {
    if (!tiers_) return;
    if (!live_.empty() && one_in(16)) {
      const LivePtr live = this->any_live();
      std::vector<SimToken> prompt = live->tokens;
      prompt.resize(std::min(live->known, this->options_.max_prompt));
      auto& past = this->past_prompts_;
      past.size() < 12 ? past.push_back(std::move(prompt))
                       : std::swap(past[below(past.size())], prompt);
    }
    switch (below(8)) {
      case 0:
      case 1:
      case 2:
        return start_load();
      case 3:
      case 4:
        return poll_load();
      case 5:
        (void)tiers_->advance(below(4));
        if (one_in(16)) tiers_->store_all();
        return;
      default:
        for (std::size_t n = below(8); n > 0 && tiers_->work();) --n;
    }
  }
  /// The tree forgot everything: the weights are others.
  void change_weights() {
    if (tiers_) is_closed_ = true;
  }
  void end_tiers() {
    loads_.clear();
    tiers_.reset();
  }
  [[nodiscard]] bool has_tiers() const { return tiers_.has_value(); }
  /// Who hears of the tree's events beside the tiers.
  EventSink heard_;

 private:
  using Below = Tiers<Tree, ShadowCache>;
  struct Loading {
    LivePtr live;
    typename Below::Load load;
  };

  void open_tiers() {
    this->sink_allocates_ = true;
    auto faulty = std::make_shared<FaultyTier>();
    const std::size_t rate = 2 + below(20);
    faulty->next = [this, rate](std::uint64_t& where) {
      if (!one_in(rate)) return TierFault::none;
      where = below(std::size_t{1} << 30);
      const auto fault = static_cast<TierFault>(below(static_cast<std::size_t>(TierFault::count)));
      count("tier fault");
      return fault;
    };
    std::vector<std::shared_ptr<TierStore>> stores;
    if (one_in(2)) stores.push_back(std::make_shared<MemoryTier>(200 + below(20000)));
    stores.push_back(std::move(faulty));
    if (one_in(4)) stores.push_back(std::make_shared<MemoryTier>(100000));
    typename Below::Options options;
    options.model = model();
    if (one_in(2)) options.block_tokens = static_cast<std::int32_t>(1 + below(2 * ChunkSize));
    options.write_through = one_in(3);
    options.max_ahead = 1;
    options.max_wait_seconds = 1e9;  // whoever gives up is drawn
    options.threads = false;
    options.max_queued_bytes = 16 * (1 + below(1000));
    options.event_sink = [this](const CacheEvent& event, std::span<const SimToken> tokens) {
      if (heard_) heard_(event, tokens);
    };
    tiers_.emplace(*tree_, cache_, std::move(stores), std::move(options));
  }
  [[nodiscard]] std::string model() const { return "weights " + text(this->weights_); }

  void start_load() {
    if (live_.empty()) return;
    if (is_closed_ && one_in(4)) {
      tiers_->reopen(model());
      is_closed_ = false;
    }
    const LivePtr live = one_in(2) ? live_.back() : this->any_live();
    auto load = tiers_->load(live->handle, !one_in(4));
    if (!load) return;
    expect(!is_closed_, "nothing is loaded that may be of other weights");
    log("load from below for " + name(*live));
    loads_.push_back({live, std::move(load)});
    if (loads_.size() > 4) loads_.erase(loads_.begin());  // given up
    if (one_in(3)) return;
    for (std::size_t n = below(16); n > 0 && tiers_->work();) --n;
    poll_load(loads_.size() - 1);
  }
  void poll_load() {
    if (!loads_.empty()) poll_load(below(loads_.size()));
  }
  void poll_load(std::size_t at) {
    auto& [live, load] = loads_[at];
    bool is_over = true;
    if (live->handle.is_live()) {
      if (one_in(2)) (void)tiers_->work();
      const std::size_t begin = to_size(live->handle.loadable().begin);
      const std::uint64_t before = tiers_->stats().loaded_tokens;
      is_over = !load.poll(live->handle);
      const auto loaded = static_cast<std::size_t>(tiers_->stats().loaded_tokens - before);
      if (loaded > 0)
        log("loaded " + text(loaded) + " from " + text(begin) + " on for " + name(*live));
      for (std::size_t p = begin; p < begin + loaded; ++p) {
        expect(memory_.row(live->places[p]) == live->hash[p], "what is loaded is its own");
        this->check_unwritten(live->places[p]);
        live->done[p] = 1;
      }
      this->check_sequence(*live);
      count("loaded from a tier", loaded);
    }
    if (is_over || one_in(20)) loads_.erase(loads_.begin() + static_cast<std::ptrdiff_t>(at));
  }
  [[nodiscard]] static std::size_t to_size(std::int32_t n) { return static_cast<std::size_t>(n); }

  ShadowCache cache_{&this->memory_};
  std::optional<Below> tiers_;
  std::vector<Loading> loads_;
  bool is_closed_ = false;  // clear() was called, and nobody said what weights there are now
};

}  // namespace test
