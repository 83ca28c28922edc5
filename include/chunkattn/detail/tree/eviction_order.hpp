// EvictionOrder: the hook by which a component chooses what is evicted next, where a policy wants
// more than levels and ages (cache/policy.hpp).
#pragma once

#include <cstdint>

#include "../retention/retained_lists.hpp"
#include "../support/config.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Lists of cached nodes other than one per level, and which leaf of them goes. Pinned nodes have a
/// list of their own, which Retention keeps.
class EvictionOrder {
 public:
  virtual ~EvictionOrder() = default;

  /// The key of the list that a node that is not pinned belongs to.
  [[nodiscard]] virtual std::int64_t key_of(const TreeNode& n) const noexcept = 0;
  /// That list.
  [[nodiscard]] virtual RetainedList& list_of(const TreeNode& n) noexcept = 0;
  /// A node that is not pinned gets into its list, or out of it. Returns list_of().
  [[nodiscard]] virtual RetainedList& on_listed(const TreeNode& n) noexcept = 0;
  [[nodiscard]] virtual RetainedList& on_unlisted(const TreeNode& n) noexcept = 0;

  /// A node is used no longer; it is about to be listed.
  virtual void on_unused(TreeNode& n) noexcept = 0;
  /// A node that was cached is used again; it was taken out of its list.
  virtual void on_used(NodeIndex n) noexcept = 0;
  /// The slots of a victim after the first `keep` are about to be evicted.
  virtual void on_evict(const TreeNode& n, std::int32_t keep) noexcept = 0;
  /// Pins come or go.
  virtual void on_pins() noexcept = 0;
  /// Until it is false again, nothing happens but evictions.
  virtual void set_evicts_many(bool many) noexcept = 0;

  /// The leaf that is evicted next; none where nothing is cached.
  [[nodiscard]] virtual NodeIndex victim() noexcept = 0;
  /// One that goes because its tenant has more than may be; or none.
  [[nodiscard]] virtual NodeIndex victim_above_quota() noexcept = 0;
  /// For tests: whether what it counts is what is counted again.
  [[nodiscard]] virtual bool is_consistent() const = 0;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
