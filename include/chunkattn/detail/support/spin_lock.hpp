// A spin lock for merges that take a microsecond (the paper's rule for CPUs).
#pragma once

#include <atomic>

#include "config.hpp"

// Tests define this as a yield while the lock is held, so that threads collide more often.
#if !defined(CHUNKATTN_SPIN_LOCK_HOOK)
#define CHUNKATTN_SPIN_LOCK_HOOK() static_cast<void>(0)
#endif

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Tells the processor that this thread is only waiting.
CHUNKATTN_INLINE void spin_pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/// Test-and-test-and-set. Not fair, not recursive; one cache line, so that neighbours in an array
/// do not disturb each other.
class alignas(64) SpinLock {
 public:
  /// Spins until the lock is taken.
  void lock() noexcept {
    while (taken_.exchange(true, std::memory_order_acquire))
      while (taken_.load(std::memory_order_relaxed)) spin_pause();
  }
  /// Releases the lock.
  void unlock() noexcept { taken_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> taken_{false};
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
