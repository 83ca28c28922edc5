// What goes to tiers and comes from them, in the background: a thread for each tier, or none, where
// the owner calls work().
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "../../experimental/tier_store.hpp"
#include "../base/config.hpp"
#include "tier_known.hpp"
#include "tier_news.hpp"
#include "tier_record.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// Blocks of a prompt on their way up, in order. What is not marked is as it was made, or the
/// tree's thread's.
struct TierLoad {
  std::array<std::vector<std::byte>, 2> heads;  ///< of blocks that are private; of public ones
  std::vector<std::byte> tokens;                ///< of the prompt
  std::size_t block_bytes = 0;                  ///< of a block's tokens
  std::size_t first = 0, public_blocks = 0;
  std::vector<TierStore::Key> keys;  ///< from block `first` on
  TierNews::Hold hold;               ///< of the last of them, so of all
  std::atomic<bool> cancelled = false;
  std::uint64_t sequence = 0, weights = 0;        ///< whose it is
  std::size_t limit = 0;                          ///< positions that are loaded, at most
  std::chrono::steady_clock::time_point since{};  ///< when something came

  // Under the queue's mutex:
  struct Ready {
    std::size_t block = 0;
    std::vector<std::byte> raw;
  };
  std::deque<Ready> ready;
  std::size_t next = 0;  ///< of keys
  std::size_t tier = 0;  ///< where it is, or waits
  bool is_stalled = false, is_over = false;

  [[nodiscard]] TierContent content(std::size_t block) const {
    return {heads[block < public_blocks ? 1 : 0],
            std::span(tokens).first((block + 1) * block_bytes)};
  }
};

/// \tparam Token  of the tree: only where there are tiers is any of this compiled
template <class Token>
class TierQueue {
 public:
  using Clock = std::chrono::steady_clock;
  struct Counts {
    std::uint64_t stored = 0, stored_bytes = 0, put_failed = 0, loaded = 0, refused = 0, missed = 0,
                  not_worth = 0;
  };

  // Delegates, so that threads that run already are joined if another one does not start.
  /// \param news  who is told of what is found and what is not; null: nobody
  TierQueue(std::vector<std::shared_ptr<TierStore>> stores, TierCodec codec, std::size_t max_ahead,
            bool threads, std::shared_ptr<TierNews> news)
      : TierQueue(std::move(stores), codec, max_ahead, std::move(news)) {
    if (threads)
      for (std::size_t t = 0; t < tiers_.size(); ++t)
        tiers_[t].thread = std::thread([this, t] { run(t); });
  }
  TierQueue(const TierQueue&) = delete;
  TierQueue& operator=(const TierQueue&) = delete;
  /// What was not put yet is given up: flush() first.
  ~TierQueue() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = stopped_ = true;
      for (Tier& tier : tiers_)
        if (tier.running) tier.running->cancelled = true;
    }
    for (Tier& tier : tiers_) tier.wakes.notify_all();
    for (Tier& tier : tiers_)
      if (tier.thread.joinable()) tier.thread.join();
  }

  // ---- down ----------------------------------------------------------------------------------

  struct Put {
    TierStore::Key key;
    std::vector<std::byte> head, tokens, raw;
    TierNews::Hold hold;
  };
  /// Bytes that are on their way down.
  [[nodiscard]] std::size_t queued_bytes() const noexcept { return queued_bytes_; }
  [[nodiscard]] bool knows(const TierStore::Key& key) const { return known_->has(key); }
  void forget() { known_->clear(); }
  void put(Put&& block) {
    const std::size_t bytes = block.raw.size();
    auto item = std::make_shared<Item>();
    item->block = std::move(block);
    item->bytes = bytes;
    const std::lock_guard lock(mutex_);
    push(0, std::move(item));
    queued_bytes_ += bytes;
  }
  [[nodiscard]] bool is_busy() const {
    const std::lock_guard lock(mutex_);
    return queued_items_ > 0;
  }
  /// Waits until all is put; without threads does it.
  void flush() {
    if (!has_threads()) {
      while (work()) {
      }
      return;
    }
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return queued_items_ == 0; });
  }

  // ---- up ------------------------------------------------------------------------------------

  void start(std::shared_ptr<TierLoad> load) {
    const std::lock_guard lock(mutex_);
    load->tier = 0;
    tiers_[0].loads.push_back(std::move(load));
    tiers_[0].wakes.notify_one();
  }
  /// At most `most` blocks that have come, in order. `is_over`: no more will.
  std::vector<TierLoad::Ready> take(const std::shared_ptr<TierLoad>& load, std::size_t most,
                                    bool& is_over) {
    std::vector<TierLoad::Ready> taken;
    const std::lock_guard lock(mutex_);
    for (; !load->ready.empty() && taken.size() < most; load->ready.pop_front())
      taken.push_back(std::move(load->ready.front()));
    if (std::exchange(load->is_stalled, false)) {
      tiers_[load->tier].loads.push_back(load);
      tiers_[load->tier].wakes.notify_one();
    }
    is_over = load->is_over && load->ready.empty();
    return taken;
  }
  /// Nobody waits for it any longer: it came too late, or its sequence is gone.
  void cancel(TierLoad& load, bool too_late) {
    const std::lock_guard lock(mutex_);
    load.cancelled = true;
    load.ready.clear();
    if (too_late && !load.is_over) tiers_[load.tier].is_suspect = true;
  }
  /// Waits until something has come, or until then; without threads does one job.
  void wait(const TierLoad& load, std::chrono::duration<double> limit) {
    if (!has_threads()) {
      (void)work();
      return;
    }
    std::unique_lock lock(mutex_);
    came_.wait_for(lock, limit, [&] { return load.is_over || !load.ready.empty(); });
  }
  /// Seconds that computing a block takes: a tier that takes longer is not asked. 0: unknown.
  void set_compute_seconds(double seconds) noexcept { compute_seconds_ = seconds; }

  // ---- both ----------------------------------------------------------------------------------

  /// One job, where there are no threads. False: there was none.
  bool work() {
    for (std::size_t t = 0; t < tiers_.size(); ++t)
      if (work(t)) return true;
    return false;
  }
  [[nodiscard]] bool has_threads() const noexcept { return tiers_[0].thread.joinable(); }
  [[nodiscard]] std::vector<Counts> counts() const {
    const std::lock_guard lock(mutex_);
    std::vector<Counts> all;
    for (const Tier& tier : tiers_) all.push_back(tier.counts);
    return all;
  }

 private:
  TierQueue(std::vector<std::shared_ptr<TierStore>> stores, TierCodec codec, std::size_t max_ahead,
            std::shared_ptr<TierNews> news)
      : codec_(codec), max_ahead_(max_ahead), news_(std::move(news)), tiers_(stores.size()) {
    for (std::size_t t = 0; t < stores.size(); ++t) tiers_[t].store = std::move(stores[t]);
    tiers_.back().store->listen(known_);
  }

  struct Item {
    Put block;
    TierStore::Record record;  // once it is made
    std::size_t bytes = 0;
    std::size_t tiers_left = 1;
    bool counted = true;
  };
  struct Tier {
    std::shared_ptr<TierStore> store;
    std::thread thread;
    std::condition_variable wakes;
    std::deque<std::shared_ptr<TierLoad>> loads;
    std::shared_ptr<TierLoad> running;
    std::deque<std::shared_ptr<Item>> puts;
    double seconds = 0;  // that a block takes, lately
    bool is_measured = false;
    std::uint64_t asked = 0;  // while it was not worth it
    bool is_suspect = false;  // somebody gave up waiting for what it does now
    Counts counts;
  };

  void run(std::size_t t) {
    for (std::unique_lock lock(mutex_);;) {
      Tier& tier = tiers_[t];
      tier.wakes.wait(lock, [&] { return stopping_ || !tier.loads.empty() || !tier.puts.empty(); });
      if (stopping_) return;
      lock.unlock();
      (void)work(t);
      lock.lock();
    }
  }
  bool work(std::size_t t) {
    std::shared_ptr<TierLoad> load;
    std::shared_ptr<Item> item;
    Tier& tier = tiers_[t];
    {
      const std::lock_guard lock(mutex_);
      if (!tier.loads.empty()) {
        load = tier.running = std::move(tier.loads.front());
        tier.loads.pop_front();
      } else if (!tier.puts.empty()) {
        item = std::move(tier.puts.front());
        tier.puts.pop_front();
      } else {
        return false;
      }
    }
    // Only for want of memory is it not done.
    const bool done =
        guarded([&] { return load ? advance(load, t) : put_one(item, t), true; }, false);
    const std::lock_guard lock(mutex_);
    if (!done && load) end(*load);
    tier.running = nullptr;
    tier.is_suspect = false;
    return true;
  }

  /// f(), or `otherwise` if it throws.
  template <class F, class R>
  static R guarded(const F& f, R otherwise) {
#if CHUNKATTN_EXCEPTIONS
    try {
      return f();
    } catch (...) {
      return otherwise;
    }
#else
    (void)otherwise;
    return f();
#endif
  }

  // ---- down ----

  /// \pre mutex_ is held
  void push(std::size_t t, std::shared_ptr<Item> item) {
    tiers_[t].puts.push_back(std::move(item));
    ++queued_items_;
    tiers_[t].wakes.notify_one();
  }
  void put_one(const std::shared_ptr<Item>& item, std::size_t t) {
    Tier& tier = tiers_[t];
    const TierStore::Key key = item->block.key;
    if (!item->record) {
      item->record = guarded(
          [&] {
            return make_tier_record({item->block.head, item->block.tokens}, item->block.raw,
                                    codec_);
          },
          TierStore::Record());
      item->block.raw = {};
      if (item->record && t + 1 < tiers_.size()) {
        const std::lock_guard lock(mutex_);
        for (std::size_t below = t + 1; below < tiers_.size(); ++below)
          item->tiers_left += guarded([&] { return push(below, item), 1u; }, 0u);
      }
    }
    bool had = false, kept = false;
    const bool is_last = t + 1 == tiers_.size();
    if (is_last) known_->asking(key);
    if (item->record) {
      had = look_for(tier, t, key);
      kept = had;
    }
    if (item->record && !had) {
      TierNews::Watch watch(news_.get(), t, key);
      kept = guarded([&] { return tier.store->put(key, item->record, stopped_); }, false);
      if (kept) watch.saw(true);
    }
    if (is_last && kept) guarded([&] { return known_->saw(true), true; }, false);
    const std::lock_guard lock(mutex_);
    if (!kept) ++tier.counts.put_failed;
    if (kept && !had) {
      ++tier.counts.stored;
      tier.counts.stored_bytes += item->record->size();
    }
    if (--item->tiers_left == 0 && item->counted) queued_bytes_ -= item->bytes;
    if (--queued_items_ == 0) idle_.notify_all();
  }

  bool look_for(Tier& tier, std::size_t t, const TierStore::Key& key) {
    TierNews::Watch watch(news_.get(), t, key);
    bool answered = false;
    const bool had = guarded(
        [&] {
          const bool has = tier.store->contains(key);
          answered = true;
          return has;
        },
        false);
    if (answered) watch.saw(had);
    return had;
  }

  // ---- up ----

  /// As many blocks as are here or above; then it goes to the tier below.
  void advance(const std::shared_ptr<TierLoad>& load, std::size_t last) {
    for (std::unique_lock lock(mutex_);;) {
      if (load->cancelled || stopping_ || load->next == load->keys.size()) return end(*load);
      if (load->ready.size() >= max_ahead_) {
        load->tier = last;
        load->is_stalled = true;
        return;
      }
      bool found = false;
      for (std::size_t t = 0; t <= last && !found; ++t) {
        if (!is_worth(tiers_[t])) continue;
        load->tier = t;
        lock.unlock();
        found = get(*load, t);
        lock.lock();
      }
      if (found) continue;
      if (load->cancelled || last + 1 == tiers_.size()) return end(*load);
      load->tier = last + 1;
      tiers_[last + 1].loads.push_back(load);
      tiers_[last + 1].wakes.notify_one();
      return;
    }
  }
  void end(TierLoad& load) {
    load.is_over = true;
    came_.notify_all();
  }
  bool is_worth(Tier& tier) const {
    const double compute = compute_seconds_;
    if (!tier.is_suspect && (compute == 0 || tier.seconds <= compute)) return true;
    if (!tier.is_suspect && ++tier.asked % 64 == 0) return true;  // it may have become faster
    ++tier.counts.not_worth;
    return false;
  }
  /// The load's next block from tier `t`, if that has it.
  bool get(TierLoad& load, std::size_t t) {
    Tier& tier = tiers_[t];
    const TierStore::Key key = load.keys[load.next];
    const std::size_t block = load.first + load.next;
    const TierContent content = load.content(block);
    const auto start = Clock::now();
    bool failed = false;
    const bool is_last = t + 1 == tiers_.size();
    if (is_last) known_->asking(key);
    TierNews::Watch watch(news_.get(), t, key);
    bool answered = false;
    const TierStore::Record record = guarded(
        [&] {
          auto found =
              tier.store->get_at_most(key, tier_record_bytes(content, codec_), load.cancelled);
          answered = found || !load.cancelled;
          return found;
        },
        TierStore::Record());
    TierLoad::Ready ready{block, {}};
    const bool good =
        record &&
        guarded([&] { return read_tier_record(*record, content, codec_, ready.raw); }, false);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (record && !good) failed = guarded([&] { return tier.store->erase(key), true; }, true);
    if (answered) watch.saw(good);
    if (answered && is_last) guarded([&] { return known_->saw(good), true; }, false);
    const std::lock_guard lock(mutex_);
    tier.is_suspect = false;
    if (good || seconds > tier.seconds)
      tier.seconds += (seconds - tier.seconds) * (good && !tier.is_measured ? 1.0 : 0.2);
    tier.is_measured = tier.is_measured || good;
    if (failed) ++tier.counts.refused;
    if (!record) ++tier.counts.missed;
    if (!good) return false;
    ++tier.counts.loaded;
    promote(key, record, t);
    if (!load.cancelled) load.ready.push_back(std::move(ready));
    ++load.next;
    came_.notify_all();
    return true;
  }
  /// What was found goes to the tiers above, which are faster. \pre mutex_ is held
  void promote(const TierStore::Key& key, const TierStore::Record& record, std::size_t found) {
    for (std::size_t t = 0; t < found; ++t) {
      auto item = std::make_shared<Item>();
      item->block.key = key;
      item->block.hold = TierNews::hold(news_, key);
      item->record = record;
      item->counted = false;
      push(t, std::move(item));
    }
  }

  const TierCodec codec_;
  const std::size_t max_ahead_;
  const std::shared_ptr<TierNews> news_;
  const std::shared_ptr<KnownKeys> known_ = std::make_shared<KnownKeys>();  // of the last tier
  std::vector<Tier> tiers_;
  std::atomic<std::size_t> queued_bytes_ = 0;
  std::atomic<double> compute_seconds_ = 0;
  std::atomic<bool> stopped_ = false;

  mutable std::mutex mutex_;
  std::condition_variable idle_, came_;
  std::size_t queued_items_ = 0;
  bool stopping_ = false;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
