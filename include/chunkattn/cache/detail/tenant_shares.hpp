// TenantShares: cached tokens by tenant, against the weights and quotas that a policy grants.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../tree_options.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// What a policy grants a tenant.
struct TenantTerms {
  std::uint32_t weight = 1;
  std::uint64_t quota = (std::numeric_limits<std::uint64_t>::max)();  ///< tokens
};

/// Cached tokens by tenant. Tenants are named by the index of their record; 0 stands for what is
/// public.
class TenantShares {
 public:
  static constexpr std::int32_t everybody = 0;

  TenantShares() { tenants_.push_back({}); }

  /// Makes room for a tenant, which has these terms from now on.
  void reserve(std::uint64_t tenant, const TenantTerms& terms) {
    if (const std::int32_t known = find(tenant); known >= 0) {
      Tenant& t = tenants_[to_size(known)];
      t.terms = terms;
      if (t.at >= 0) restore(t.at, share_of(known));
      return check_quota(known);
    }
    const std::size_t count = tenants_.size() + 1;
    if (free_ >= 0) {
      const std::int32_t i = std::exchange(free_, tenants_[to_size(free_)].next_free);
      tenants_[to_size(i)] = {.id = tenant, .terms = terms};
      return insert(i);
    }
    if (heap_.capacity() < count) heap_.reserve(2 * count);
    if (over_.capacity() < count) over_.reserve(2 * count);
    if (tenants_.capacity() < count) tenants_.reserve(2 * count);
    if (2 * count > table_.size()) rehash(4 * count);
    tenants_.push_back({.id = tenant, .terms = terms});
    insert(static_cast<std::int32_t>(tenants_.size() - 1));
  }
  /// Whether reserve() would need memory for this tenant. Then forget_unused() comes first, which
  /// keeps the records to a few times what there is use for.
  [[nodiscard]] bool is_full(std::uint64_t tenant) const noexcept {
    return free_ < 0 && tenants_.size() == tenants_.capacity() && find(tenant) < 0;
  }
  /// Forgets the tenants of which no node is left.
  /// \param is_used  [size()], of a tenant with any
  void forget_unused(const Array<char>& is_used) {
    std::size_t num_free = 0;
    for (std::size_t i = 1; i < size(); ++i) num_free += !is_used[i];
    // So that the next time comes after as many new tenants as there are now.
    if (2 * num_free < size()) tenants_.reserve(2 * size());
    over_.erase_if([&](std::int32_t i) { return !is_used[to_size(i)]; });
    for (std::int32_t& entry : table_) entry = -1;
    for (std::size_t i = size() - 1; i > 0; --i) {
      const auto index = static_cast<std::int32_t>(i);
      if (is_used[i])
        insert(index);
      else
        tenants_[i] = {.next_free = std::exchange(free_, index)};
    }
  }
  /// Of one that reserve() was called for, and that has not been forgotten.
  [[nodiscard]] std::int32_t index_of(const Namespace& space) const noexcept {
    return space.is_public ? everybody : find(space.tenant);
  }

  void add(std::int32_t i, std::int32_t tokens) noexcept {
    Tenant& t = tenants_[to_size(i)];
    t.tokens += static_cast<std::uint64_t>(tokens);
    if (i == everybody) return;
    check_quota(i);
    if (t.at < 0) {
      t.at = static_cast<std::int32_t>(heap_.size());
      heap_.push_back({});
    }
    rise(t.at, share_of(i));
  }
  void remove(std::int32_t i, std::int32_t tokens) noexcept {
    Tenant& t = tenants_[to_size(i)];
    t.tokens -= static_cast<std::uint64_t>(tokens);
    if (i == everybody) return;
    if (t.tokens > 0) return sink(t.at, share_of(i));
    const std::int32_t hole = std::exchange(t.at, -1);
    const Share last = heap_.back();
    heap_.pop_back();
    if (last.tenant != i) restore(hole, last);
  }
  [[nodiscard]] std::uint64_t tokens(std::int32_t i) const noexcept {
    return tenants_[to_size(i)].tokens;
  }

  [[nodiscard]] std::size_t size() const noexcept { return tenants_.size(); }
  /// For tests: whether each stands where it is looked for.
  [[nodiscard]] bool is_ordered() const noexcept {
    std::size_t with_any = 0;
    for (std::size_t i = 1; i < tenants_.size(); ++i) with_any += tenants_[i].tokens > 0;
    for (std::size_t at = 0; at < heap_.size(); ++at)
      if (const Tenant& t = tenants_[to_size(heap_[at].tenant)];
          t.at != static_cast<std::int32_t>(at) || t.tokens != heap_[at].tokens ||
          t.terms.weight != heap_[at].weight ||
          (at > 0 && has_more(heap_[at], heap_[(at - 1) / 2])))
        return false;
    return with_any == heap_.size();
  }

  /// Where the tenant's lists begin, as whoever keeps them says.
  [[nodiscard]] std::size_t& first_list(std::int32_t i) noexcept {
    return tenants_[to_size(i)].lists;
  }

  /// The one with most tokens by its weight, of all but everybody; -1: none has any.
  [[nodiscard]] std::int32_t largest() const noexcept {
    return heap_.empty() ? -1 : heap_[0].tenant;
  }
  [[nodiscard]] bool has_more(std::int32_t a, std::int32_t b) const noexcept {
    return has_more(share_of(a), share_of(b));
  }
  /// One above its quota; -1: none is.
  [[nodiscard]] std::int32_t above_quota() noexcept {
    while (!over_.empty()) {
      Tenant& t = tenants_[to_size(over_.back())];
      if (t.tokens > t.terms.quota) return over_.back();
      t.is_over = false;
      over_.pop_back();
    }
    return -1;
  }

 private:
  /// What is compared, side by side.
  struct Share {
    std::uint64_t tokens = 0;
    std::uint32_t weight = 1;
    std::int32_t tenant = -1;
  };
  struct Tenant {
    std::uint64_t id = 0;
    TenantTerms terms{};
    std::uint64_t tokens = 0;
    std::size_t lists = 0;        ///< see first_list()
    std::int32_t at = -1;         ///< in the heap, or not
    bool is_over = false;         ///< on the list of those that may be above their quota
    std::int32_t next_free = -1;  ///< of records without a tenant
  };

  [[nodiscard]] std::size_t home(std::uint64_t tenant) const noexcept {
    return ((tenant * 0x9e3779b97f4a7c15u) >> 32) & (table_.size() - 1);
  }
  [[nodiscard]] std::int32_t find(std::uint64_t tenant) const noexcept {
    if (table_.empty()) return -1;
    std::size_t i = home(tenant);
    while (table_[i] >= 0 && tenants_[to_size(table_[i])].id != tenant)
      i = (i + 1) & (table_.size() - 1);
    return table_[i];
  }
  void insert(std::int32_t index) noexcept {
    std::size_t i = home(tenants_[to_size(index)].id);
    while (table_[i] >= 0) i = (i + 1) & (table_.size() - 1);
    table_[i] = index;
  }
  void rehash(std::size_t least) {
    std::size_t size = 16;
    while (size < least) size *= 2;
    Array<std::int32_t> grown;
    grown.resize(size, -1);
    table_.swap(grown);
    for (std::size_t i = 1; i < tenants_.size(); ++i) insert(static_cast<std::int32_t>(i));
  }

  /// After a tenant got more tokens, or another quota.
  void check_quota(std::int32_t i) noexcept {
    Tenant& t = tenants_[to_size(i)];
    if (t.tokens <= t.terms.quota || t.is_over) return;
    t.is_over = true;
    over_.push_back(i);
  }

  [[nodiscard]] Share share_of(std::int32_t i) const noexcept {
    const Tenant& t = tenants_[to_size(i)];
    return {t.tokens, t.terms.weight, i};
  }
  [[nodiscard]] static bool has_more(const Share& a, const Share& b) noexcept {
    return a.tokens * b.weight > b.tokens * a.weight;
  }
  void put(std::int32_t at, const Share& share) noexcept {
    heap_[to_size(at)] = share;
    tenants_[to_size(share.tenant)].at = at;
  }
  /// Puts a share in the place of one that was less, or of none at the end.
  void rise(std::int32_t at, const Share& share) noexcept {
    for (; at > 0 && has_more(share, heap_[to_size((at - 1) / 2)]); at = (at - 1) / 2)
      put(at, heap_[to_size((at - 1) / 2)]);
    put(at, share);
  }
  /// The same in the place of one that was more.
  void sink(std::int32_t at, const Share& share) noexcept {
    const auto size = static_cast<std::int32_t>(heap_.size());
    for (std::int32_t child; (child = 2 * at + 1) < size; at = child) {
      const std::int32_t other = (std::min)(child + 1, size - 1);  // no branch: unpredictable
      child += static_cast<std::int32_t>(has_more(heap_[to_size(other)], heap_[to_size(child)]));
      if (!has_more(heap_[to_size(child)], share)) break;
      put(at, heap_[to_size(child)]);
    }
    put(at, share);
  }
  void restore(std::int32_t at, const Share& share) noexcept {
    if (at > 0 && has_more(share, heap_[to_size((at - 1) / 2)])) return rise(at, share);
    sink(at, share);
  }

  Array<Tenant> tenants_;
  Array<std::int32_t> table_;  // a power of two, at most half full: indices by tenant, -1: none
  Array<Share> heap_;          // of those that have any, the largest share first
  Array<std::int32_t> over_;
  std::int32_t free_ = -1;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
