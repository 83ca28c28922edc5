// CachePolicy: eviction that learns from reuse, and that gives tenants shares of the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "../detail/support/array.hpp"
#include "../detail/support/check.hpp"
#include "../detail/support/config.hpp"
#include "../detail/tree/core.hpp"
#include "../detail/tree/retention.hpp"
#include "../detail/tree/token_tree.hpp"
#include "../tree_options.hpp"
#include "detail/cache_order.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// What TokenTree calls for a CachePolicy, where it is made and where prompts join; by its name
/// `Policy::Hooks`. Internal, as EvictionOrder is: policies of users derive from CachePolicy.
struct CacheHooks {
  /// The order of a policy that learns or tells tenants apart; of others none.
  static std::unique_ptr<EvictionOrder> make_order(const RetentionOptions& policy, TreeCore& core) {
    check_argument(!policy.learns || policy.ttl == 0, "ttl", policy.ttl, "0 with learns");
    if (!policy.learns && !policy.fair) return nullptr;
    return std::make_unique<CacheOrder>(core, policy.learns, policy.fair);
  }
  /// Before a prompt joins at a level: makes sure that nothing fails afterwards.
  /// \throws InvalidArgument for a weight or quota out of range
  template <class Policy>
  static void inserting(const Policy& policy, TreeCore& core, const InsertOptions& options,
                        int level) {
    const std::uint64_t tenant = options.name_space.tenant;
    const TenantTerms terms = terms_of(policy, tenant, core.topology.geometry.shift);
    if (auto* const order = static_cast<CacheOrder*>(core.retention.order()))
      order->reserve(level, tenant, terms);
  }
  /// A prompt has joined, with `begin` tokens that the tree had: finds what was evicted of the
  /// rest.
  template <class Tree>
  static void inserted(Tree& tree, std::span<const typename Tree::token_type> prompt,
                       const InsertOptions& options, std::int32_t begin,
                       SequenceIndex joined) noexcept {
    auto* const order = static_cast<CacheOrder*>(tree.core.retention.order());
    if (order != nullptr && order->learns()) [[unlikely]]
      recall(*order, tree, prompt, options, begin, joined);
  }

 private:
  /// What a policy grants a tenant.
  template <class Policy>
  [[nodiscard]] static TenantTerms terms_of(const Policy& policy, std::uint64_t tenant,
                                            std::int32_t chunk_shift) {
    TenantTerms terms;
    if constexpr (requires { policy.weight(tenant); })
      terms.weight = checked_answer<std::uint32_t>("weight(tenant)", policy.weight(tenant), 1,
                                                   1u << 20, "1 to 2^20");
    if constexpr (requires { policy.quota(tenant); }) {
      const auto chunks = checked_answer<std::uint64_t>("quota(tenant)", policy.quota(tenant), 0,
                                                        terms.quota, "at least 0");
      if (chunks < terms.quota >> chunk_shift) terms.quota = chunks << chunk_shift;
    }
    return terms;
  }
  template <class Tree>
  [[gnu::noinline]] static void recall(CacheOrder& order, Tree& tree,
                                       std::span<const typename Tree::token_type> prompt,
                                       const InsertOptions& options, std::int32_t begin,
                                       SequenceIndex joined) noexcept {
    using Store = TokenStore<typename Tree::token_type, Tree::chunk_size>;
    constexpr std::int32_t few = GhostKey::num_tokens;
    const std::int32_t public_end = tree.public_length(prompt, options);
    const auto key = [&](std::int32_t p) -> std::uint32_t {
      if (p + few > static_cast<std::int32_t>(prompt.size()) || (p > 0 && p < few)) return 0;
      std::uint64_t hash = GhostKey::seed(p, TreeCore::space_at(options, p, public_end));
      if (p > 0) hash = Store::hash(hash, prompt.subspan(to_size(p - few), to_size(few)));
      return GhostKey::finish(Store::hash(hash, prompt.subspan(to_size(p), to_size(few))));
    };
    order.recall(tree.core.retention, tree.core.sequences[joined].tail, begin, key);
  }
};

}  // namespace detail

/// The policy of a tree whose options say `learns` or `fair`. A policy of your own may derive from
/// it, with `weight(tenant)` from 1 to 2^20 (1 if it has none) and `quota(tenant)` in chunks' worth
/// of tokens (no limit): both are asked once with each insert(), and may answer otherwise than
/// before, as RetentionPolicy says of `level(priority)`.
struct CachePolicy : RetentionOptions {
  using Hooks = detail::CacheHooks;  ///< what a tree calls
};

CHUNKATTN_NAMESPACE_END
