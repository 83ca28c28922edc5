// Trees of one chunk size, for a C++ source file of its own: see tree.ipp.
#pragma once

#include <memory>
#include <utility>

#include "../detail/support/config.hpp"
#include "detail/handles.hpp"
#include "detail/tree_of.hpp"

/// Compiles the trees of a chunk size. Outside of any namespace.
#define CHUNKATTN_C_TREE(ChunkSize)                                                     \
  template <>                                                                           \
  std::unique_ptr<chunkattn_tree> chunkattn::detail::c::make_tree<ChunkSize>(           \
      const chunkattn::PoolAllocator& allocator, const chunkattn::TreeOptions& options, \
      chunkattn::detail::c::RunTimePolicy policy) {                                     \
    using Tree = chunkattn::detail::c::TreeOfSize<ChunkSize>;                           \
    return std::make_unique<chunkattn::detail::c::TreeOf<Tree>>(allocator, options,     \
                                                                std::move(policy));     \
  }

#define CHUNKATTN_C_DECLARE_TREE(ChunkSize)                                   \
  template <>                                                                 \
  std::unique_ptr<chunkattn_tree> chunkattn::detail::c::make_tree<ChunkSize>( \
      const chunkattn::PoolAllocator&, const chunkattn::TreeOptions&,         \
      chunkattn::detail::c::RunTimePolicy);
