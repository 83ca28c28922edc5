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

/// What the tree keeps of a policy: levels are worked out where a sequence joins. In chunks.
struct RetentionRules {
  static constexpr std::size_t no_watermark = std::numeric_limits<std::size_t>::max();

  bool retains = false;
  std::size_t high_watermark = no_watermark;
  std::size_t low_watermark = no_watermark;
  std::size_t max_pinned = 0;
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
  RetentionRules rules{R::retains, policy.high_watermark, policy.low_watermark, policy.max_pinned};
  if constexpr (requires { policy.ttl; }) {
    const std::optional<std::uint32_t> ttl = policy.ttl;
    check_argument(ttl != 0u, "ttl", 0, "at least 1, or none");
    if (R::retains) rules.ttl = ttl.value_or(0);
  }
  if (rules.low_watermark == RetentionRules::no_watermark)
    rules.low_watermark = rules.high_watermark;
  check_argument(rules.low_watermark <= rules.high_watermark, "low_watermark", rules.low_watermark,
                 {"at most high_watermark, ", rules.high_watermark});
  return rules;
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END
