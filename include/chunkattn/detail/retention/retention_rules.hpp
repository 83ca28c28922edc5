// RetentionRules: the numbers of a retention policy, without its type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "../../tree_options.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// The numbers of a policy, in chunks.
struct RetentionBudget {
  std::size_t high_watermark = std::numeric_limits<std::size_t>::max();
  std::size_t low_watermark = std::numeric_limits<std::size_t>::max();
  std::size_t max_pinned = 0;

  /// Whether no watermark is set.
  [[nodiscard]] constexpr bool is_default() const noexcept {
    return high_watermark == RetentionBudget{}.high_watermark;
  }
};

/// What the tree keeps of a policy: levels are worked out where a sequence joins.
struct RetentionRules {
  bool retains = false;
  RetentionBudget budget{};
  std::uint32_t ttl = 0;  ///< by the caller's clock; 0: for ever
};

/// Throws InvalidArgument for watermarks that cross.
template <RetentionPolicy R>
[[nodiscard]] RetentionRules rules_of(const R& policy) {
  static_assert(
      requires { typename R::Hooks; } ||
          !(
              requires { policy.learns; } || requires { policy.fair; }),
      "PrefixTree: a policy that learns or is fair must be, or derive from, CachePolicy of "
      "chunkattn/cache/policy.hpp");
  RetentionRules rules{R::retains,
                       {policy.high_watermark, policy.low_watermark, policy.max_pinned}};
  if constexpr (requires { policy.ttl; }) rules.ttl = R::retains ? policy.ttl : 0;
  if (rules.budget.low_watermark == RetentionBudget{}.low_watermark)
    rules.budget.low_watermark = rules.budget.high_watermark;
  check_argument(rules.budget.low_watermark <= rules.budget.high_watermark, "low_watermark",
                 rules.budget.low_watermark,
                 {"at most high_watermark, ", rules.budget.high_watermark});
  return rules;
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END
