// What a tree and its handles have in common: the tree proper, and the handles that were dropped by
// other threads than the one that uses the tree.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include "../../error.hpp"
#include "../../tree_options.hpp"
#include "../base/array.hpp"
#include "../base/check.hpp"
#include "../base/config.hpp"
#include "core.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// \param length  places that the operation's sequences would have in all
[[noreturn]] CHUNKATTN_COLD inline void fail_out_of_chunks(const TreeCore& core, std::size_t asked,
                                                           std::size_t length) {
  const auto chunk = static_cast<std::size_t>(core.topology.chunk.size);
  fail(OutOfChunks(asked, core.slot_table.num_available(), core.slot_table.allocator().capacity(),
                   (length + chunk - 1) / chunk));
}

inline std::size_t to_size(std::int32_t n) noexcept {
  return static_cast<std::size_t>(n);
}

/// Tells the threads of a process apart, those that have ended too (whose ids and addresses are
/// used again).
inline std::uint64_t thread_number() noexcept {
  static std::atomic<std::uint64_t> threads{0};
  thread_local std::uint64_t number = 0;
  if (number == 0) [[unlikely]]
    number = threads.fetch_add(1, std::memory_order_relaxed) + 1;
  return number;
}

/// Kept alive by the tree and by every handle; `tree` is empty once the tree is gone.
///
/// A handle may be dropped by any thread. On the thread that last called the tree it acts at once.
/// On another one it is put on a list, and acts at the next call of the tree that enters: insert
/// and its variants, begin_step, finished, leave, pin, clear, device_idle, and setting a sink. So
/// the tree itself is only ever touched by the thread that calls it.
template <class Tree>
class SharedTree {
 public:
  /// What a dropped handle asks for.
  enum class Drop : std::uint8_t { sequence, step, finished, pin };

  template <class... Arguments>
  explicit SharedTree(Arguments&&... arguments)
      : tree(std::in_place, std::forward<Arguments>(arguments)...), owner_(thread_number()) {}

  std::optional<Tree> tree;

  /// The calling thread uses the tree: settles what other threads dropped meanwhile.
  void enter() {
    owner_.store(thread_number(), std::memory_order_relaxed);
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

  template <Drop What>
  void drop(std::int32_t index, std::uint64_t generation) noexcept {
    if (owner_.load(std::memory_order_relaxed) == thread_number()) [[likely]] {
      act(What, index, generation);
      return;
    }
    const std::lock_guard guard(mutex_);
    dropped_.push_back({What, index, generation});
    any_dropped_.store(true, std::memory_order_release);
  }

 private:
  struct Dropped {
    Drop what;
    std::int32_t index;
    std::uint64_t generation;
  };

  CHUNKATTN_COLD void settle() {
    const std::lock_guard guard(mutex_);
    // In an order that does not depend on which thread came first.
    std::sort(dropped_.begin(), dropped_.end(), [](const Dropped& a, const Dropped& b) {
      return a.what != b.what ? a.what < b.what : a.index < b.index;
    });
    for (const Dropped& dropped : dropped_) act(dropped.what, dropped.index, dropped.generation);
    dropped_.clear();
    any_dropped_.store(false, std::memory_order_relaxed);
  }

  CHUNKATTN_INLINE void act(Drop what, std::int32_t index, std::uint64_t generation) noexcept {
    --handles_;
    if (!tree) return;
    TreeCore& core = tree->core;
    const auto generation32 = static_cast<std::uint32_t>(generation);
    switch (what) {
      case Drop::sequence:
        if (core.sequences.is_live(index, generation32)) core.departures.leave(index);
        break;
      case Drop::step:
        core.steps.drop(index, generation);
        break;
      case Drop::finished:
        core.steps.close(index, generation);
        break;
      case Drop::pin:
        core.prefixes.unpin(index, generation32);
        break;
    }
  }

  std::atomic<std::uint64_t> owner_;
  std::atomic<bool> any_dropped_{false};
  std::size_t handles_ = 0, room_ = 0;
  std::mutex mutex_;
  Array<Dropped> dropped_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
