// What the tree keeps of a retention policy, and of pins.
#pragma once

#include <cstdint>

#include "../../tree_options.hpp"
#include "../base/check.hpp"
#include "../base/config.hpp"
#include "slots.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// What the tree keeps of a policy: levels are worked out where a sequence joins.
struct RetentionRules {
  bool retains = false;
  RetentionBudget budget{};
};

/// Throws InvalidArgument for watermarks that cross.
template <RetentionPolicy R>
[[nodiscard]] RetentionRules rules_of(const R& policy) {
  RetentionRules rules{R::retains,
                       {policy.high_watermark, policy.low_watermark, policy.max_pinned}};
  if (rules.budget.low_watermark == RetentionBudget{}.low_watermark)
    rules.budget.low_watermark = rules.budget.high_watermark;
  check_argument(rules.budget.low_watermark <= rules.budget.high_watermark, "low_watermark",
                 rules.budget.low_watermark,
                 {"at most high_watermark, ", rules.budget.high_watermark});
  return rules;
}

/// A pinned path, from the root to `last`; none: the record is free.
struct PinRecord {
  NodeIndex last = none;
  std::uint32_t generation = 0;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
