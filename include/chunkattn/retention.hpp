// What happens to chunks that no live sequence uses: forgotten, or kept until the budget needs
// them.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "detail/base/check.hpp"
#include "detail/base/config.hpp"
#include "error.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// A retention policy. `retains` is a constant; `level(priority)` orders what is evicted: lower
/// levels first, within a level the least recently used first, always leaves before their parents.
template <class R>
concept RetentionPolicy = requires(const R& policy, int priority) {
  { R::retains } -> std::convertible_to<bool>;
  { policy.level(priority) } noexcept -> std::convertible_to<int>;
  { policy.high_watermark } -> std::convertible_to<std::size_t>;
  { policy.low_watermark } -> std::convertible_to<std::size_t>;
  { policy.max_pinned } -> std::convertible_to<std::size_t>;
};

/// Budget of the cache, in slots. When more than `high_watermark` are in use after a sequence has
/// left, cached ones are evicted down to `low_watermark`; without it, only when a slot is needed.
struct RetentionBudget {
  /// Slots in use above which a leaving sequence starts eviction.
  std::size_t high_watermark = std::numeric_limits<std::size_t>::max();
  /// Slots in use at which that eviction stops; unless set, the high one.
  std::size_t low_watermark = std::numeric_limits<std::size_t>::max();
  /// At most this many slots are pinned by PrefixTree::pin().
  std::size_t max_pinned = 0;
};

/// The paper's rule: the cache holds only sequences in decoding.
struct NoRetention : RetentionBudget {
  static constexpr bool retains = false;  ///< what nobody uses is freed at once
  /// One level.
  [[nodiscard]] constexpr int level(int) const noexcept { return 0; }
};

/// Least recently used goes first.
struct Lru : RetentionBudget {
  static constexpr bool retains = true;  ///< what nobody uses stays until its slot is needed
  /// One level.
  [[nodiscard]] constexpr int level(int) const noexcept { return 0; }
};

/// Lowest InsertOptions::priority goes first, then the least recently used.
struct Priority : RetentionBudget {
  static constexpr bool retains = true;  ///< what nobody uses stays until its slot is needed
  /// A level for each priority.
  [[nodiscard]] constexpr int level(int priority) const noexcept { return priority; }
};

static_assert(RetentionPolicy<NoRetention> && RetentionPolicy<Lru> && RetentionPolicy<Priority>);

CHUNKATTN_NAMESPACE_END
