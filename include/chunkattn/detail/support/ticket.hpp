// Ticket: what a plan, its views and a step share, so that a view knows whether it is up to date.
#pragma once

#include <atomic>
#include <cstdint>

#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Shared by a plan, its views and the step they were built for: which view is up to date. A plan
/// may end on another thread than its step, in any order; nothing else is ordered by the number.
class ViewTicket {
 public:
  /// The number of that view, 0: none.
  [[nodiscard]] std::uint64_t current() const noexcept {
    return current_.load(std::memory_order_relaxed);
  }
  /// That view is up to date from now on.
  void set(std::uint64_t number) noexcept { current_.store(number, std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> current_{0};
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
