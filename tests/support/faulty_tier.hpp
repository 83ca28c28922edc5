// A tier with chosen faults: it fails, is slow, is full, loses, damages and
// confuses records, or says nothing of what it loses. If nothing is to go wrong it is a tier of a
// few records.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "chunkattn/tiers/tier_store.hpp"

namespace test {

/// What goes wrong in one call.
enum class TierFault : std::uint8_t {
  none,
  fails,      // throws
  full,       // put: keeps nothing
  loses,      // put: says that it kept it
  missing,    // get: has nothing
  slow,       // takes `delay`, or until it is cancelled
  truncated,  // get: a part of the record
  longer,     // get: more than the record
  flipped,    // get: one bit of it is another
  other,      // get: some other record
  empty,      // get: no bytes
  count
};

class FaultyTier final : public chunkattn::TierStore {
 public:
  /// What goes wrong in the next call, and a number that says where.
  std::function<TierFault(std::uint64_t& where)> next = [](std::uint64_t&) {
    return TierFault::none;
  };
  std::chrono::microseconds delay{0};
  std::size_t max_records = std::numeric_limits<std::size_t>::max();
  /// Whether it says what it gets and loses.
  bool notifies = true;
  std::atomic<int> gets = 0, cancelled_gets = 0;

  bool put(const Key& key, const Record& record, const std::atomic<bool>& cancelled) override {
    std::uint64_t where = 0;
    switch (fault(where, cancelled)) {
      case TierFault::full:
        return false;
      case TierFault::loses:
        return true;
      default:
        break;
    }
    const std::lock_guard lock(mutex_);
    records_[key.text()] = {key, record};
    report(key, true);
    while (records_.size() > max_records) {
      const Key gone = records_.begin()->second.first;
      records_.erase(records_.begin());
      report(gone, false);
    }
    return true;
  }
  Record get(const Key& key, const std::atomic<bool>& cancelled) override {
    ++gets;
    std::uint64_t where = 0;
    const TierFault kind = fault(where, cancelled);
    if (cancelled) ++cancelled_gets;
    const std::lock_guard lock(mutex_);
    const auto found = records_.find(key.text());
    if (kind == TierFault::missing || records_.empty()) return nullptr;
    if (kind == TierFault::other) {
      auto any = records_.begin();
      std::advance(any, static_cast<std::ptrdiff_t>(where % records_.size()));
      return any->second.second;
    }
    if (found == records_.end()) return nullptr;
    std::vector<std::byte> bytes = *found->second.second;
    switch (kind) {
      case TierFault::truncated:
        bytes.resize(where % bytes.size());
        break;
      case TierFault::longer:
        bytes.resize(bytes.size() + 1 + where % 100);
        break;
      case TierFault::flipped:
        bytes[(where >> 3) % bytes.size()] ^= static_cast<std::byte>(1u << (where & 7));
        break;
      case TierFault::empty:
        bytes.clear();
        break;
      default:
        return found->second.second;
    }
    return std::make_shared<const std::vector<std::byte>>(std::move(bytes));
  }
  bool contains(const Key& key) override {
    const std::lock_guard lock(mutex_);
    return records_.contains(key.text());
  }
  void erase(const Key& key) override {
    const std::lock_guard lock(mutex_);
    records_.erase(key.text());
    report(key, false);
  }
  void lose_all() {
    const std::lock_guard lock(mutex_);
    for (const auto& [text, one] : std::exchange(records_, {})) report(one.first, false);
  }
  [[nodiscard]] std::size_t size() const {
    const std::lock_guard lock(mutex_);
    return records_.size();
  }
  /// Calls f(key, record) for each.
  template <class F>
  void for_each(const F& f) const {
    const std::lock_guard lock(mutex_);
    for (const auto& [text, one] : records_) f(one.first, *one.second);
  }

 private:
  void report(const Key& key, bool is_there) {
    if (notifies) notify(key, is_there);
  }
  TierFault fault(std::uint64_t& where, const std::atomic<bool>& cancelled) {
    const TierFault kind = next(where);
    if (kind == TierFault::fails) throw std::runtime_error("the tier broke");
    if (kind == TierFault::slow)
      for (const auto end = std::chrono::steady_clock::now() + delay;
           !cancelled && std::chrono::steady_clock::now() < end;)
        std::this_thread::sleep_for(std::chrono::microseconds(200));
    return kind;
  }

  mutable std::mutex mutex_;
  std::map<std::string, std::pair<Key, Record>> records_;
};

}  // namespace test
