// What K/V memory follows: how many slots a tree has handed out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

class WriteChecks;

/// How many slots a tree has handed out: valid wherever the tree is moved, and 0 once it is gone.
struct SlotSource {
  std::shared_ptr<const void> tree;                     ///< keeps what it reads alive
  std::size_t (*slots_of)(const void* tree) = nullptr;  ///< reads it
  std::uint64_t tree_id = 0;                            ///< of the tree; 0: there is none
  /// Told of the tree's steps, for KvCacheOptions::check_writes; null: nobody is.
  std::shared_ptr<WriteChecks> write_checks{};

  /// One more than the largest slot index handed out.
  [[nodiscard]] std::size_t num_slots() const { return tree ? slots_of(tree.get()) : 0; }
};

/// A friend of PrefixTree and of KvCache.
struct SlotAccess {
  template <class Tree>
  [[nodiscard]] static SlotSource source(const Tree& tree) {
    return tree.slot_source();
  }
  template <class Cache, class Options>
  [[nodiscard]] static Cache cache(SlotSource source, int chunk_size, const Options& options) {
    const std::size_t num_slots = source.num_slots();
    return Cache(std::move(source), chunk_size, options, num_slots);
  }
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
