// What a tree keeps of a retention policy, whose type only the tree's own type has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "../../tree_options.hpp"
#include "check.hpp"
#include "config.hpp"
#include "tenant_shares.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// The numbers of a policy, in chunks.
struct RetentionBudget {
  std::size_t high_watermark = std::numeric_limits<std::size_t>::max();
  std::size_t low_watermark = std::numeric_limits<std::size_t>::max();
  std::size_t max_pinned = 0;
};

/// What the tree keeps of a policy: levels are worked out where a sequence joins.
struct RetentionRules {
  bool retains = false;
  RetentionBudget budget{};
  bool learns = false;
  bool shares = false;    ///< tenants are told apart
  std::uint32_t ttl = 0;  ///< by the caller's clock; 0: for ever
};

/// Throws InvalidArgument for watermarks that cross.
template <RetentionPolicy R>
[[nodiscard]] RetentionRules rules_of(const R& policy) {
  RetentionRules rules{R::retains,
                       {policy.high_watermark, policy.low_watermark, policy.max_pinned}};
  if constexpr (requires { policy.learns; }) rules.learns = R::retains && policy.learns;
  if constexpr (requires { policy.ttl; }) rules.ttl = R::retains ? policy.ttl : 0;
  check_argument(rules.ttl == 0 || !rules.learns, "ttl", rules.ttl, "0 for a policy that learns");
  if constexpr (requires { policy.fair; }) rules.shares = R::retains && policy.fair;
  if (rules.budget.low_watermark == RetentionBudget{}.low_watermark)
    rules.budget.low_watermark = rules.budget.high_watermark;
  check_argument(rules.budget.low_watermark <= rules.budget.high_watermark, "low_watermark",
                 rules.budget.low_watermark,
                 {"at most high_watermark, ", rules.budget.high_watermark});
  return rules;
}

/// What a policy grants a tenant. Throws InvalidArgument for a weight out of range.
template <RetentionPolicy R>
[[nodiscard]] TenantTerms terms_of(const R& policy, std::uint64_t tenant,
                                   std::int32_t chunk_shift) {
  TenantTerms terms;
  if constexpr (requires { policy.weight(tenant); }) terms.weight = policy.weight(tenant);
  check_argument(terms.weight >= 1 && terms.weight <= 1u << 20, "weight(tenant)", terms.weight,
                 "1 to 2^20");
  std::size_t chunks = terms.quota;
  if constexpr (requires { policy.quota(tenant); }) chunks = policy.quota(tenant);
  if (chunks < terms.quota >> chunk_shift) terms.quota = std::uint64_t{chunks} << chunk_shift;
  return terms;
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END
