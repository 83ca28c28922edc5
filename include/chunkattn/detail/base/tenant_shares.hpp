// Who has how much of a cache, against what he is to have: for policies that tell tenants apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "../../tree_options.hpp"
#include "array.hpp"
#include "config.hpp"
#include "to_size.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// What a policy grants a tenant.
struct TenantTerms {
  std::uint32_t weight = 1;
  std::uint64_t quota = std::numeric_limits<std::uint64_t>::max();  ///< tokens
};

/// Cached tokens by tenant. Tenants are named by their index, in the order in which they came; 0
/// stands for what is public.
class TenantShares {
 public:
  static constexpr std::int32_t everybody = 0;

  TenantShares() { tenants_.push_back({}); }

  /// Makes room for a tenant, which has these terms from now on.
  void reserve(std::uint64_t tenant, const TenantTerms& terms) {
    if (const std::int32_t known = find(tenant); known >= 0) {
      Tenant& t = tenants_[to_size(known)];
      if (t.terms.weight != terms.weight || t.terms.quota != terms.quota) {
        t.terms = terms;
        if (t.at >= 0) settle(t.at);
      }
      return;
    }
    const std::size_t count = tenants_.size() + 1;
    if (heap_.capacity() < count) heap_.reserve(2 * count);
    if (over_.capacity() < count) over_.reserve(2 * count);
    if (tenants_.capacity() < count) tenants_.reserve(2 * count);
    if (2 * count > table_.size()) rehash(4 * count);
    tenants_.push_back({.id = tenant, .terms = terms});
    place(static_cast<std::int32_t>(tenants_.size() - 1));
  }
  /// Of whom reserve() has heard.
  [[nodiscard]] std::int32_t index_of(const Namespace& space) const noexcept {
    return space.is_public ? everybody : find(space.tenant);
  }

  void add(std::int32_t i, std::int32_t tokens) noexcept {
    Tenant& t = tenants_[to_size(i)];
    t.tokens += static_cast<std::uint64_t>(tokens);
    if (i == everybody) return;
    if (t.tokens > t.terms.quota && !t.is_over) {
      t.is_over = true;
      over_.push_back(i);
    }
    if (t.at < 0) {
      t.at = static_cast<std::int32_t>(heap_.size());
      heap_.push_back(i);
    }
    settle(t.at);
  }
  void remove(std::int32_t i, std::int32_t tokens) noexcept {
    Tenant& t = tenants_[to_size(i)];
    t.tokens -= static_cast<std::uint64_t>(tokens);
    if (i == everybody) return;
    if (t.tokens > 0) return settle(t.at);
    const std::int32_t hole = std::exchange(t.at, -1), last = heap_.back();
    heap_.pop_back();
    if (last == i) return;
    put(hole, last);
    settle(hole);
  }
  [[nodiscard]] std::uint64_t tokens(std::int32_t i) const noexcept {
    return tenants_[to_size(i)].tokens;
  }

  [[nodiscard]] std::size_t size() const noexcept { return tenants_.size(); }
  /// For tests: whether each stands where it is looked for.
  [[nodiscard]] bool is_ordered() const noexcept {
    std::size_t with_any = 0;
    for (std::size_t i = 1; i < tenants_.size(); ++i) with_any += tenants_[i].tokens > 0 ? 1 : 0;
    for (std::size_t at = 0; at < heap_.size(); ++at)
      if (tenants_[to_size(heap_[at])].at != static_cast<std::int32_t>(at) ||
          (at > 0 && has_more(heap_[at], heap_[(at - 1) / 2])))
        return false;
    return with_any == heap_.size();
  }

  /// Who has most for his weight, of all but everybody; -1: nobody has any.
  [[nodiscard]] std::int32_t richest() const noexcept { return heap_.empty() ? -1 : heap_[0]; }
  [[nodiscard]] bool has_more(std::int32_t a, std::int32_t b) const noexcept {
    const Tenant &x = tenants_[to_size(a)], &y = tenants_[to_size(b)];
    return x.tokens * y.terms.weight > y.tokens * x.terms.weight;
  }
  /// Somebody above his quota; -1: nobody is.
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
  struct Tenant {
    std::uint64_t id = 0;
    TenantTerms terms{};
    std::uint64_t tokens = 0;
    std::int32_t at = -1;  ///< in the heap, or not
    bool is_over = false;  ///< on the list of those that may be above their quota
  };

  [[nodiscard]] std::size_t home(std::uint64_t tenant) const noexcept {
    return static_cast<std::size_t>((tenant * 0x9e3779b97f4a7c15u) >> 32) & (table_.size() - 1);
  }
  [[nodiscard]] std::int32_t find(std::uint64_t tenant) const noexcept {
    if (table_.empty()) return -1;
    std::size_t i = home(tenant);
    while (table_[i] >= 0 && tenants_[to_size(table_[i])].id != tenant)
      i = (i + 1) & (table_.size() - 1);
    return table_[i];
  }
  void place(std::int32_t index) noexcept {
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
    for (std::size_t i = 1; i < tenants_.size(); ++i) place(static_cast<std::int32_t>(i));
  }

  void put(std::int32_t at, std::int32_t index) noexcept {
    heap_[to_size(at)] = index;
    tenants_[to_size(index)].at = at;
  }
  /// Moves what stands there to its place in the heap.
  void settle(std::int32_t at) noexcept {
    const std::int32_t moved = heap_[to_size(at)], size = static_cast<std::int32_t>(heap_.size());
    while (at > 0 && has_more(moved, heap_[to_size((at - 1) / 2)])) {
      put(at, heap_[to_size((at - 1) / 2)]);
      at = (at - 1) / 2;
    }
    for (std::int32_t child; (child = 2 * at + 1) < size; at = child) {
      if (child + 1 < size && has_more(heap_[to_size(child + 1)], heap_[to_size(child)])) ++child;
      if (!has_more(heap_[to_size(child)], moved)) break;
      put(at, heap_[to_size(child)]);
    }
    put(at, moved);
  }

  Array<Tenant> tenants_;
  Array<std::int32_t> table_;  // a power of two, at most half full: indices by tenant, -1: none
  Array<std::int32_t> heap_;   // of those that have any, the richest first
  Array<std::int32_t> over_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
