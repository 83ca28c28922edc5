// WaitableNumber: a number that threads sleep for, where std::atomic's own wait can miss a change.
#pragma once

#if defined(_WIN32)
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// libstdc++ of GCC 12, where there is no futex, compares before it takes the lock under which it
/// sleeps: what is changed and notified in between is slept through.
class WaitableNumber : public std::atomic<std::uint32_t> {
 public:
  using atomic::atomic;

  /// Returns when it is not `seen`, or sooner.
  void wait(std::uint32_t seen, std::memory_order order) noexcept {
    std::unique_lock lock(mutex_);
    if (load(order) == seen) changed_.wait(lock);
  }
  /// Call it after each change.
  void notify_all() noexcept {
    // Who has compared, but does not sleep yet, has the lock.
    mutex_.lock();
    mutex_.unlock();
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
#endif
