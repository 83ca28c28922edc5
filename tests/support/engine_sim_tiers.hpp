// Tiers below the engine simulation's tree: what is evicted goes to stores that fail, lose and
// confuse records, and sequences get K/V from there that must be theirs, row by row. An observer
// follows them; where nothing goes wrong it must know what they hold.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/tiers/tiers.hpp"
#include "tests/support/engine_sim_handles.hpp"
#include "tests/support/faulty_tier.hpp"
#include "tests/support/tier_observer.hpp"

namespace test {

template <class Retention, int ChunkSize>
class EngineSimTiers : public EngineSimHandles<Retention, ChunkSize> {
  using Base = EngineSimHandles<Retention, ChunkSize>;

 public:
  EngineSimTiers(Choices& choices, const SimOptions& options, Counters& counters)
      : Base(choices, options, counters) {
    if (one_in(2)) open_tiers();
  }

 protected:
  using Base::below, Base::one_in, Base::count, Base::expect, Base::log;
  using Base::memory_, Base::tree_, Base::live_, Base::text, Base::name;
  using typename Base::Live, typename Base::LivePtr, typename Base::Tree;

  /// Something happens between the tree and its tiers.
  void use_tiers() {
    if (!tiers_) return;
    if (!live_.empty() && one_in(16)) remember_prompt(*this->any_live());
    switch (below(10)) {
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
        if (one_in(2)) compare_stores();
        return;
      case 6:
      case 7:
        return come_back();
      default:
        for (std::size_t n = below(8); n > 0 && tiers_->work();) --n;
    }
  }
  /// The tree forgot everything: the weights are others.
  void change_weights() {
    if (!tiers_) return;
    is_closed_ = true;
  }
  void end_tiers() {
    loads_.clear();
    tiers_.reset();
  }
  [[nodiscard]] bool has_tiers() const { return tiers_.has_value(); }

 private:
  using Below = Tiers<Tree, ShadowCache>;
  struct Loading {
    LivePtr live;
    typename Below::Load load;
  };

  void open_tiers() {
    this->sink_allocates_ = true;
    auto faulty = std::make_shared<FaultyTier>();
    const std::size_t rate = one_in(2) ? 0 : 2 + below(20);
    faulty->next = [this, rate](std::uint64_t& where) {
      if (rate == 0 || !one_in(rate)) return TierFault::none;
      where = below(std::size_t{1} << 30);
      const auto fault = static_cast<TierFault>(below(static_cast<std::size_t>(TierFault::count)));
      count("tier fault");
      return fault;
    };
    std::vector<std::shared_ptr<TierStore>> stores;
    if (one_in(2)) stores.push_back(std::make_shared<MemoryTier>(200 + below(20000)));
    if (rate == 0) exact_ = {stores.size(), faulty};
    if (one_in(2)) faulty->max_records = 1 + below(60);
    stores.push_back(std::move(faulty));
    if (one_in(4)) stores.push_back(std::make_shared<MemoryTier>(100000));
    typename Below::Options options;
    options.model = model();
    if (one_in(2)) options.block_tokens = static_cast<std::int32_t>(1 + below(2 * ChunkSize));
    options.write_through = one_in(3);
    options.max_prefetched = 1;
    options.max_wait_seconds = 1e9;  // whoever gives up is drawn
    options.threads = false;
    options.max_queued_bytes = 16 * (1 + below(1000));
    if (!one_in(4))
      options.observer = observer_ = std::make_shared<RecordingObserver<Below>>();
    else
      exact_ = {};
    tiers_.emplace(*tree_, cache_, std::move(stores), std::move(options));
  }
  /// What the observer knows of a store in which nothing goes wrong is what is there.
  void compare_stores() {
    if (observer_ == nullptr) return;
    tiers_->flush();
    if (loads_.empty()) expect(observer_->num_expected() == 0, "nothing is expected any more");
    if (!exact_.store) return;
    if (observer_->num_lost() > 0) count("left a tier");
    std::size_t there = 0;
    exact_.store->for_each([&](const TierStore::Key& key, const std::vector<std::byte>&) {
      expect(observer_->knows(key), "what is stored was expected");
      expect(observer_->has(exact_.tier, key), "an observer knows what is stored");
      ++there;
    });
    expect(observer_->num_stored(exact_.tier) == there, "an observer knows what is lost");
    count("observer of tiers compared");
  }
  /// Somebody else may come with it, or the same again.
  void remember_prompt(const Live& live) {
    std::vector<SimToken> prompt = live.tokens;
    prompt.resize(std::min(live.known, this->options_.max_prompt));
    const InsertOptions how{.name_space = live.name_space, .public_length = live.public_end};
    auto& past = this->past_prompts_;
    const std::size_t at = past.size() < 12 ? past.size() : below(past.size());
    if (at == past.size()) past.emplace_back();
    past_options_.resize(past.size());
    past[at] = std::move(prompt);
    past_options_[at] = how;
  }
  /// Somebody takes all chunks, and goes: whatever nobody uses is evicted.
  void evict_all() {
    if (this->options_.budget == max_pool_chunks) return;
    this->settle();
    const std::size_t size = ChunkSize * tree_->chunks_available();
    if (size > 0) (void)tree_->try_insert(std::vector<SimToken>(size, SimToken{200}));
    log("all chunks are taken and given back");
  }
  /// A prompt comes again as it was, perhaps after it was evicted, and is loaded as far as it is
  /// below.
  void come_back() {
    if (past_options_.empty() || live_.size() >= this->options_.max_live) return;
    if (one_in(2)) evict_all();
    const std::size_t at = below(past_options_.size());
    const std::vector<SimToken> prompt = this->past_prompts_[at];
    const std::uint64_t last = this->last_uid_;
    this->insert(prompt, past_options_[at]);
    if (this->last_uid_ == last) return;
    start_load(live_.back());
    for (std::size_t n = 1 + below(6); n > 0 && !loads_.empty(); --n) {
      for (std::size_t jobs = below(16); jobs > 0 && tiers_->work();) --jobs;
      poll_load(loads_.size() - 1);
    }
    count("came back");
  }
  [[nodiscard]] std::string model() const { return "weights " + text(this->weights_); }

  void start_load() {
    if (!live_.empty()) start_load(one_in(2) ? live_.back() : this->any_live());
  }
  void start_load(const LivePtr& live) {
    if (is_closed_ && one_in(4)) {
      tiers_->reopen(model());
      is_closed_ = false;
    }
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
      if (loaded > 0) count_load(*live);
    }
    if (is_over || one_in(20)) loads_.erase(loads_.begin() + static_cast<std::ptrdiff_t>(at));
  }
  void count_load(const Live& live) {
    if (this->num_checkpoints() > 0) count("loaded beside checkpoints");
    if (this->options_.fair) count("loaded where tenants have shares");
    if (live.public_end > 0) count("loaded with a public prefix");
    if (!exact_.store) count("loaded where tiers fail");
  }
  [[nodiscard]] static std::size_t to_size(std::int32_t n) { return static_cast<std::size_t>(n); }

  ShadowCache cache_{&this->memory_};
  std::optional<Below> tiers_;
  std::shared_ptr<RecordingObserver<Below>> observer_;  // null: nobody follows
  struct {
    std::size_t tier = 0;
    std::shared_ptr<FaultyTier> store;  // null: something goes wrong in it, or nobody follows
  } exact_;
  std::vector<Loading> loads_;
  std::vector<InsertOptions> past_options_;  // of past_prompts_
  bool is_closed_ = false;  // clear() was called, and nobody said what weights there are now
};

}  // namespace test
