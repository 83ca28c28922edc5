// What a tree and its handles have in common: the core, and the handles that were dropped by other
// threads than the one that uses the tree.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "config.hpp"
#include "error.hpp"
#include "tree_types.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Its address tells threads apart, more cheaply than their ids do.
inline thread_local char thread_tag = 0;

/// Kept alive by the tree and by every handle; `core` is empty once the tree is gone.
///
/// A handle may be dropped by any thread. On the thread that last called the tree it acts at once.
/// On another one it is put on a list, and acts when next a sequence joins, a step begins or finishes,
/// or the cache is cleared: the tree itself is only ever touched by the thread that calls it.
template <class Core>
class SharedTree {
 public:
  /// What a dropped handle asks for.
  enum class Drop : std::uint8_t { sequence, step, finished, pin };

  template <class... Arguments>
  explicit SharedTree(Arguments&&... arguments)
      : core(std::in_place, std::forward<Arguments>(arguments)...), owner_(&thread_tag) {}

  std::optional<Core> core;

  /// The calling thread uses the tree: settles what other threads dropped meanwhile.
  void enter() {
    owner_.store(&thread_tag, std::memory_order_relaxed);
    if (any_dropped_.load(std::memory_order_acquire)) settle();
  }

  /// Makes sure that one more handle can be dropped without allocating.
  void expect_handle() {
    if (handles_ < room_) return;
    const std::lock_guard guard(mutex_);
    dropped_.reserve(2 * handles_ + 16);
    room_ = dropped_.capacity();
  }
  /// A handle was made.
  void count_handle() noexcept { ++handles_; }

  void drop(Drop what, std::int32_t index, std::uint64_t generation) noexcept {
    if (owner_.load(std::memory_order_relaxed) == &thread_tag) {
      act({what, index, generation});
      return;
    }
    const std::lock_guard guard(mutex_);
    dropped_.push_back({what, index, generation});
    any_dropped_.store(true, std::memory_order_release);
  }

 private:
  struct Dropped {
    Drop what;
    std::int32_t index;
    std::uint64_t generation;
  };

  void settle() {
    const std::lock_guard guard(mutex_);
    // In an order that does not depend on which thread came first.
    std::sort(dropped_.begin(), dropped_.end(), [](const Dropped& a, const Dropped& b) {
      return std::pair(a.what, a.index) < std::pair(b.what, b.index);
    });
    for (const Dropped& dropped : dropped_) act(dropped);
    dropped_.clear();
    any_dropped_.store(false, std::memory_order_relaxed);
  }

  void act(const Dropped& dropped) noexcept {
    --handles_;
    if (!core) return;
    const auto generation32 = static_cast<std::uint32_t>(dropped.generation);
    switch (dropped.what) {
      case Drop::sequence:
        if (core->is_live(dropped.index, generation32)) core->leave(dropped.index);
        break;
      case Drop::step:
        core->drop_step(dropped.index, dropped.generation);
        break;
      case Drop::finished:
        core->close(dropped.index, dropped.generation);
        break;
      case Drop::pin:
        core->unpin(dropped.index, generation32);
        break;
    }
  }

  std::atomic<const char*> owner_;
  std::atomic<bool> any_dropped_{false};
  std::size_t handles_ = 0, room_ = 0;
  std::mutex mutex_;
  std::vector<Dropped> dropped_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
