// KnownKeys: blocks that a tier is known to have. Those of the slowest need not be stored again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_map>

#include "../../detail/support/config.hpp"
#include "../tier_store.hpp"
#include "hash.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// The last keys that came, but for those that were lost since. For several threads.
class KnownKeys {
 public:
  using Key = TierStore::Key;

  [[nodiscard]] bool has(const Key& key) const {
    const std::lock_guard lock(mutex_);
    return keys_.contains(key);
  }
  void clear() {
    const std::lock_guard lock(mutex_);
    keys_.clear();
    order_.clear();
  }
  void add(const Key& key) {
    const std::lock_guard lock(mutex_);
    if (keys_.contains(key)) return;
    order_.emplace_back(next_, key);
    keys_.emplace(key, next_++);
    if (order_.size() <= most) return;
    const auto oldest = keys_.find(order_.front().second);
    if (oldest != keys_.end() && oldest->second == order_.front().first) keys_.erase(oldest);
    order_.pop_front();
  }
  void remove(const Key& key) noexcept {
    const std::lock_guard lock(mutex_);
    keys_.erase(key);
  }

 private:
  static constexpr std::size_t most = 1 << 14;

  mutable std::mutex mutex_;
  std::unordered_map<Key, std::uint64_t, TierKeyHash> keys_;  // and when they were added
  std::deque<std::pair<std::uint64_t, Key>> order_;           // some may be known no longer
  std::uint64_t next_ = 0;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
