// ForkMark: whether this process is a child of fork(), which of its parent's threads has only the
// one that forked.
#pragma once

#include <atomic>

#include "config.hpp"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// Made together with threads: says later whether they are in this process. Costs a load, not the
/// system call that asks for the process's number.
class ForkMark {
 public:
  [[nodiscard]] bool is_in_child() const noexcept {
    return forks_->load(std::memory_order_relaxed) != seen_;
  }

 private:
  // Each library that has a copy of this code counts by itself, so a mark remembers by which count.
  static std::atomic<unsigned>* count() noexcept {
    static std::atomic<unsigned> forks{0};
#if defined(__unix__) || defined(__APPLE__)
    static const int registered =
        ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
    static_cast<void>(registered);  // without memory for it, children are taken for their parents
#endif
    return &forks;
  }

  std::atomic<unsigned>* forks_ = count();
  unsigned seen_ = forks_->load(std::memory_order_relaxed);
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
