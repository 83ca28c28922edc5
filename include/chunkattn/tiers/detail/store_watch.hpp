// StoreWatch: which records a store gets and loses.
#pragma once

#include <functional>
#include <mutex>
#include <utility>

#include "../../detail/support/config.hpp"
#include "../tier_store.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// Makes one order of what a store says by itself, on any thread, and of what it answers to one
/// that asks it. What it says of a record while it is asked for that one counts for more than its
/// answer: it is not known which came last.
class StoreWatch final : public TierStore::Subscriber {
 public:
  using Key = TierStore::Key;
  /// Does not throw, nor call the store or the watch.
  using Report = std::function<void(const Key&, bool is_stored)>;

  explicit StoreWatch(Report report) : report_(std::move(report)) {}

  /// The store is going to be asked for a record, or given it. One at a time.
  void asking(const Key& key) {
    const std::lock_guard lock(mutex_);
    asked_ = key;
    has_changed_ = false;
  }
  /// What it answered.
  void saw(bool is_stored) {
    const std::lock_guard lock(mutex_);
    if (!has_changed_) report_(asked_, is_stored);
  }
  void changed(const Key& key, bool is_stored) noexcept override {
    const std::lock_guard lock(mutex_);
    if (key == asked_) has_changed_ = true;
    report_(key, is_stored);
  }

 private:
  const Report report_;
  std::mutex mutex_;
  Key asked_{};
  bool has_changed_ = false;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
