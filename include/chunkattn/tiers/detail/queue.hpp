// TierQueue: stores to tiers and loads from them, in the background. A thread for each tier, or
// none, where the owner calls work(). A store is called by its own tier's thread only, so that one
// which hangs holds up no other.
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

#include "../../detail/support/config.hpp"
#include "../../transfer/companion.hpp"
#include "../tier_store.hpp"
#include "known.hpp"
#include "load.hpp"
#include "record.hpp"
#include "store_watch.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// \tparam Token  of the tree: only where there are tiers is any of this compiled
template <class Token>
class TierQueue {
 public:
  using Clock = std::chrono::steady_clock;
  struct Counts {
    std::uint64_t stored = 0, stored_bytes = 0, put_failed = 0, loaded = 0, refused = 0, missed = 0,
                  not_worth = 0;
  };

  using Report = std::function<void(std::size_t tier, const TierStore::Key&, bool is_stored)>;

  // Delegates, so that threads that run already are joined if another one does not start.
  /// \param max_bytes     that are being offloaded; each tier may have its share of them on its own
  /// \param hang_seconds  after a call has taken so long, flush() does not wait for its tier
  /// \param report        gets what tiers get and lose, as Tiers::Observer::changed() does
  TierQueue(std::vector<std::shared_ptr<TierStore>> stores, TierCodec codec, std::size_t prefetch,
            std::size_t max_bytes, double hang_seconds, bool threads, const Report& report)
      : TierQueue(std::move(stores), codec, prefetch, max_bytes, hang_seconds, report) {
    if (threads)
      for (std::size_t t = 0; t < tiers_.size(); ++t)
        tiers_[t].thread = std::thread([this, t] { run(t); });
  }
  TierQueue(const TierQueue&) = delete;
  TierQueue& operator=(const TierQueue&) = delete;
  /// What was not put yet is discarded: flush() first.
  ~TierQueue() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      for (Tier& tier : tiers_) tier.cancelled = true;
    }
    for (Tier& tier : tiers_) tier.wakes.notify_all();
    for (Tier& tier : tiers_)
      if (tier.thread.joinable()) tier.thread.join();
  }

  // ---- offload ------------------------------------------------------------------------------

  struct Put {
    TierStore::Key key;
    std::vector<std::byte> head, tokens, raw;
    std::shared_ptr<void> expected;  // what the observer gave for it
    bool replaces = false;           // what a tier has of it has fewer rows
  };
  /// Whether the slowest tier is known to have a block.
  [[nodiscard]] bool knows(const TierStore::Key& key) const {
    return tiers_.back().known->has(key);
  }
  /// The fastest tier that is known to have it, or one more than the last.
  [[nodiscard]] std::size_t tier_of(const TierStore::Key& key) const {
    const auto has = [&](const Tier& tier) { return tier.known->has(key); };
    return to_size(std::find_if(tiers_.begin(), tiers_.end(), has) - tiers_.begin());
  }
  [[nodiscard]] std::size_t num_tiers() const noexcept { return tiers_.size(); }
  void forget() {
    for (const Tier& tier : tiers_) tier.known->clear();
  }
  /// Whether a tier takes a block of so many bytes.
  [[nodiscard]] bool has_room(std::size_t bytes) const {
    const std::lock_guard lock(mutex_);
    return std::any_of(tiers_.begin(), tiers_.end(),
                       [&](const Tier& tier) { return has_room(tier, bytes); });
  }
  /// To each tier that has room for it.
  void put(Put&& block) {
    const std::size_t bytes = block.raw.size();
    auto item = std::make_shared<Item>();
    item->block = std::move(block);
    item->bytes = bytes;
    const std::lock_guard lock(mutex_);
    for (Tier& tier : tiers_) {
      if (has_room(tier, bytes))
        push(tier, item);
      else
        ++tier.counts.put_failed;
    }
  }
  [[nodiscard]] bool is_busy() const {
    const std::lock_guard lock(mutex_);
    return !std::all_of(tiers_.begin(), tiers_.end(), &TierQueue::is_idle);
  }
  /// Waits until all is put, but for a tier that hangs; without threads does it.
  void flush() { wait_for(&TierQueue::is_idle); }
  /// Waits until each tier that does not hang has room for a block of so many bytes.
  void wait_for_room(std::size_t bytes) {
    wait_for([&](const Tier& tier) { return has_room(tier, bytes); });
  }

  // ---- load ---------------------------------------------------------------------------------

  void start(const std::shared_ptr<TierLoad>& load) {
    const std::lock_guard lock(mutex_);
    ask_next(load, 0, /*first=*/false);
  }
  /// The blocks that have come, in order: at most `prefetch`. `is_over`: no more will.
  std::deque<TierLoad::Ready> take(const std::shared_ptr<TierLoad>& load, bool& is_over) {
    const std::lock_guard lock(mutex_);
    auto taken = std::exchange(load->ready, {});
    if (std::exchange(load->is_stalled, false)) ask_next(load, 0, /*first=*/false);
    is_over = load->is_over;
    return taken;
  }
  /// It is awaited no longer: it came too late, or its sequence is gone.
  void cancel(const std::shared_ptr<TierLoad>& load, bool too_late) {
    const std::lock_guard lock(mutex_);
    load->ready.clear();
    if (load->is_over || load->is_stalled) return;
    if (too_late) suspect(tiers_[load->tier]);
    leave(load);
    end(*load);
  }
  /// It has waited for this part of its time. A tier that had its share of that and has not
  /// answered is passed over: the next one is asked.
  void pass_over(const std::shared_ptr<TierLoad>& load, double part) {
    const std::lock_guard lock(mutex_);
    const std::size_t next = load->tier + 1;
    if (load->is_over || load->is_stalled || !tiers_[load->tier].is_working ||
        next == tiers_.size() ||
        part * static_cast<double>(tiers_.size()) < static_cast<double>(next))
      return;
    suspect(tiers_[load->tier]);
    leave(load);
    ask_next(load, next, /*first=*/false);
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
  TierQueue(std::vector<std::shared_ptr<TierStore>> stores, TierCodec codec, std::size_t prefetch,
            std::size_t max_bytes, double hang_seconds, const Report& report)
      : codec_(codec),
        max_prefetched_(prefetch),
        max_bytes_(max_bytes / stores.size()),
        hang_(hang_seconds),
        tiers_(stores.size()) {
    for (std::size_t t = 0; t < stores.size(); ++t) {
      Tier& tier = tiers_[t];
      tier.store = std::move(stores[t]);
      // The watch may outlive the queue, within a call of the store.
      tier.watch = std::make_shared<StoreWatch>(
          [report, t, known = tier.known](const TierStore::Key& key, bool is_stored) {
            if (is_stored) guarded([&] { return known->add(key), true; }, false);
            if (!is_stored) known->remove(key);
            if (report) report(t, key, is_stored);
          });
      tier.store->subscribe(tier.watch);
    }
  }

  struct Item {
    Put block;
    std::once_flag made;
    TierStore::Record record;  // once it is made
    std::size_t bytes = 0;
  };
  struct Tier {
    std::shared_ptr<TierStore> store;
    std::shared_ptr<KnownKeys> known = std::make_shared<KnownKeys>();
    std::shared_ptr<StoreWatch> watch;
    std::thread thread;
    std::condition_variable wakes;
    std::deque<std::shared_ptr<TierLoad>> loads;
    std::shared_ptr<TierLoad> running;  // that waits for the call of now
    std::deque<std::shared_ptr<Item>> puts;
    std::size_t num_puts = 0, put_bytes = 0;  // also of the one of now
    bool is_working = false;
    Clock::time_point since{};  // when it began that
    std::atomic<bool> cancelled = false;
    double seconds = 0;  // that a block takes, lately
    bool is_measured = false;
    std::uint64_t asked = 0;  // while it was not worth it
    bool is_suspect = false;  // somebody cancelled waiting for what it does now
    bool is_late = false;     // as for the last block that it was asked for
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
    std::size_t next = 0;
    Tier& tier = tiers_[t];
    {
      const std::lock_guard lock(mutex_);
      if (!tier.loads.empty()) {
        load = tier.running = std::move(tier.loads.front());
        tier.loads.pop_front();
        next = load->next;
      } else if (!tier.puts.empty()) {
        item = std::move(tier.puts.front());
        tier.puts.pop_front();
      } else {
        return false;
      }
      tier.is_working = true;
      tier.since = Clock::now();
      tier.cancelled = stopping_;
    }
    const bool found = load ? get(load, next, t) : (put_one(*item, t), false);
    const std::lock_guard lock(mutex_);
    tier.is_working = tier.is_suspect = false;
    if (item) {
      --tier.num_puts;
      tier.put_bytes -= item->bytes;
    } else if (std::exchange(tier.running, nullptr) == load) {  // else it did not wait so long
      ask_next(load, found ? 0 : t + 1, /*first=*/true);
    }
    came_.notify_all();
    return true;
  }
  [[nodiscard]] static bool is_idle(const Tier& tier) noexcept { return tier.num_puts == 0; }
  [[nodiscard]] bool has_room(const Tier& tier, std::size_t bytes) const noexcept {
    return tier.num_puts == 0 || tier.put_bytes + bytes <= max_bytes_;
  }
  template <class F>
  void wait_for(const F& is_done) {
    if (!has_threads()) {
      while (work()) {
      }
      return;
    }
    const auto done = [&](const Tier& tier) {
      return is_done(tier) || (tier.is_working && Clock::now() - tier.since > hang_);
    };
    for (std::unique_lock lock(mutex_); !std::all_of(tiers_.begin(), tiers_.end(), done);)
      came_.wait_for(lock, std::chrono::milliseconds(50));
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

  // ---- offload ------------------------------------------------------------------------------

  /// \pre mutex_ is held
  void push(Tier& tier, const std::shared_ptr<Item>& item) {
    tier.puts.push_back(item);
    ++tier.num_puts;
    tier.put_bytes += item->bytes;
    tier.wakes.notify_one();
  }
  /// The item's record, which the first tier that needs it makes. Null: it cannot be stored.
  const TierStore::Record& record_of(Item& item) const {
    std::call_once(item.made, [&] {
      if (item.record) return;
      const Put& block = item.block;
      item.record =
          guarded([&] { return make_tier_record({block.head, block.tokens}, block.raw, codec_); },
                  TierStore::Record());
      item.block.raw = {};
    });
    return item.record;
  }
  void put_one(Item& item, std::size_t t) {
    Tier& tier = tiers_[t];
    const TierStore::Key key = item.block.key;
    const TierStore::Record& record = record_of(item);
    const bool had = record && !item.block.replaces && look_for(tier, key);
    bool kept = had;
    if (record && !had) {
      tier.watch->asking(key);
      kept = guarded([&] { return tier.store->put(key, record, tier.cancelled); }, false);
      if (kept) tier.watch->saw(true);
    }
    const std::lock_guard lock(mutex_);
    if (!kept) ++tier.counts.put_failed;
    if (kept && !had) {
      ++tier.counts.stored;
      tier.counts.stored_bytes += record->size();
    }
  }

  static bool look_for(Tier& tier, const TierStore::Key& key) {
    tier.watch->asking(key);
    bool answered = false;
    const bool had = guarded(
        [&] {
          const bool has = tier.store->contains(key);
          answered = true;
          return has;
        },
        false);
    if (answered) tier.watch->saw(had);
    return had;
  }

  // ---- load ---------------------------------------------------------------------------------

  // All of these but get(): \pre mutex_ is held

  /// Where the load's next block is looked for: in the first tier from `t` on that is worth it.
  /// \param first  before all others that wait there
  void ask_next(const std::shared_ptr<TierLoad>& load, std::size_t t, bool first) {
    if (load->next == load->keys.size() || stopping_) return end(*load);
    if (load->ready.size() >= max_prefetched_) {
      load->is_stalled = true;
      return;
    }
    while (t < tiers_.size() && !is_worth(tiers_[t])) ++t;
    if (t == tiers_.size()) return end(*load);
    load->tier = t;
    auto& loads = tiers_[t].loads;
    if (!guarded([&] { return loads.insert(first ? loads.begin() : loads.end(), load), true; },
                 false))
      return end(*load);  // for want of memory
    tiers_[t].wakes.notify_one();
  }
  /// It is not asked until it has done what it does now.
  static void suspect(Tier& tier) noexcept { tier.is_suspect = tier.is_working; }
  /// The load waits no longer for the tier where it is.
  void leave(const std::shared_ptr<TierLoad>& load) noexcept {
    Tier& tier = tiers_[load->tier];
    if (tier.running == load) {
      tier.running = nullptr;
      tier.cancelled = true;
    }
    std::erase(tier.loads, load);
  }
  void end(TierLoad& load) {
    load.is_over = true;
    came_.notify_all();
  }
  bool is_worth(Tier& tier) const {
    const double compute = compute_seconds_;
    const bool is_fast = !tier.is_late && (compute == 0 || tier.seconds <= compute);
    // Else it may have become faster.
    if (!tier.is_suspect && (is_fast || ++tier.asked % 64 == 0)) return true;
    ++tier.counts.not_worth;
    return false;
  }
  /// The load's block number `next` from tier `t`, if that has it and the load still waits for it.
  bool get(const std::shared_ptr<TierLoad>& load, std::size_t next, std::size_t t) {
    Tier& tier = tiers_[t];
    const TierStore::Key key = load->keys[next];
    const std::size_t block = load->first + next;
    const TierContent content = load->content(block);
    const auto start = Clock::now();
    bool failed = false;
    tier.watch->asking(key);
    bool answered = false;
    const TierStore::Record record = guarded(
        [&] {
          const std::size_t most =
              tier_record_bytes(content, codec_) + codec_.companions.most_bytes();
          auto found = tier.store->get_at_most(key, most, tier.cancelled);
          answered = found || !tier.cancelled;
          return found;
        },
        TierStore::Record());
    TierLoad::Ready ready{block, {}};
    const bool good =
        record &&
        guarded([&] { return read_tier_record(*record, content, codec_, ready.raw); }, false);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (record && !good) failed = guarded([&] { return tier.store->erase(key), true; }, true);
    if (answered) tier.watch->saw(good);
    const std::lock_guard lock(mutex_);
    if (answered || tier.is_suspect) tier.is_late = !answered;
    if (good || seconds > tier.seconds)
      tier.seconds += (seconds - tier.seconds) * (good && !tier.is_measured ? 1.0 : 0.2);
    tier.is_measured = tier.is_measured || good;
    if (failed) ++tier.counts.refused;
    if (!record) ++tier.counts.missed;
    if (!good) return false;
    ++tier.counts.loaded;
    guarded([&] { return promote(*load, key, record, t), true; }, false);
    if (tier.running != load) return false;
    if (!guarded([&] { return load->ready.push_back(std::move(ready)), true; }, false))
      return false;
    ++load->next;
    return true;
  }
  /// What was found goes to the tiers above, which are faster, where these have room.
  void promote(const TierLoad& load, const TierStore::Key& key, const TierStore::Record& record,
               std::size_t found) {
    for (std::size_t t = 0; t < found; ++t) {
      if (!has_room(tiers_[t], record->size())) continue;
      auto item = std::make_shared<Item>();
      item->block.key = key;
      item->block.expected = load.expected;
      item->record = record;
      item->bytes = record->size();
      push(tiers_[t], item);
    }
  }

  const TierCodec codec_;
  const std::size_t max_prefetched_, max_bytes_;  // bytes: of each tier
  const std::chrono::duration<double> hang_;
  std::vector<Tier> tiers_;
  std::atomic<double> compute_seconds_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable came_;  // or was put
  bool stopping_ = false;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
