// ChunkSource: how many chunks a tree has handed out, which K/V memory follows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "check.hpp"
#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

class StepObservers;

/// How many chunks a tree has handed out, wherever the tree is moved.
struct ChunkSource {
  std::shared_ptr<const void> tree;                      ///< keeps what it reads alive
  std::size_t (*chunks_of)(const void* tree) = nullptr;  ///< reads it
  std::uint64_t tree_id = 0;                             ///< of the tree; 0: there is none
  /// Subscribers to the tree's steps, for KvCacheOptions::check_writes; null: none.
  std::shared_ptr<StepObservers> step_observers{};

  /// One more than the largest chunk index handed out; 0 without a tree.
  /// \throws InvalidArgument once the tree has ended
  [[nodiscard]] std::size_t num_chunks() const { return tree ? chunks_of(tree.get()) : 0; }
};

/// A friend of PrefixTree, of KvCache and of components with chunks of their own.
struct ChunkAccess {
  template <class Tree>
  [[nodiscard]] static ChunkSource source(const Tree& tree) {
    const auto& core = tree.core();
    const auto chunks_of = [](const void* memory) -> std::size_t {
      const auto& shared = *static_cast<const typename Tree::Shared*>(memory);
      check_argument(shared.tree.has_value(), "cache", "orphaned", "one whose tree still exists");
      return shared.tree->core.chunk_table.allocator().high_water();
    };
    return {tree.shared_, chunks_of, core.id, core.steps.observers()};
  }
  /// Of a component that has a chunk_source().
  template <class Group>
  [[nodiscard]] static ChunkSource source_of_group(const Group& group) {
    return group.chunk_source();
  }
  template <class Cache, class Options>
  [[nodiscard]] static Cache cache(ChunkSource source, int chunk_size, const Options& options) {
    const std::size_t num_chunks = source.num_chunks();
    return Cache(std::move(source), chunk_size, options, num_chunks);
  }
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
