// Blocks that the slowest tier is known to have, so that they need not be stored again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "../../detail/support/config.hpp"
#include "../tier_store.hpp"
#include "news.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// The last keys that a store was seen to have, but for those that it was seen or said to have lost
/// since. The mutex is an innermost one.
class KnownKeys final : public TierStore::Listener {
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
  /// The store is going to be asked for a key, or given it: what it says of that until saw() counts
  /// for more than what it answers. One at a time.
  void asking(const Key& key) {
    const std::lock_guard lock(mutex_);
    asked_ = key;
    was_lost_ = false;
  }
  /// What it answered.
  void saw(bool is_there) {
    const std::lock_guard lock(mutex_);
    if (!is_there) keys_.erase(asked_);
    if (!is_there || was_lost_ || keys_.contains(asked_)) return;
    order_.emplace_back(next_, asked_);
    keys_.emplace(asked_, next_++);
    if (order_.size() <= most) return;
    const auto oldest = keys_.find(order_.front().second);
    if (oldest != keys_.end() && oldest->second == order_.front().first) keys_.erase(oldest);
    order_.pop_front();
  }
  void changed(const Key& key, bool is_there) noexcept override {
    const std::lock_guard lock(mutex_);
    if (key == asked_) was_lost_ = !is_there;
    if (!is_there) keys_.erase(key);
  }

 private:
  static constexpr std::size_t most = 1 << 14;

  mutable std::mutex mutex_;
  std::unordered_map<Key, std::uint64_t, TierKeyHash> keys_;  // and when they were added
  std::deque<std::pair<std::uint64_t, Key>> order_;           // some may be known no longer
  std::uint64_t next_ = 0;
  Key asked_{};
  bool was_lost_ = false;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
