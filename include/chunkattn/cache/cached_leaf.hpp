// CachedLeaf: what is known of cached tokens when a policy decides what goes first.
#pragma once

#include <cstdint>

#include "../detail/support/config.hpp"
#include "../tree_options.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// What a policy's score() is told of cached tokens: the last ones of a path, which no sequence
/// uses and nothing that is cached continues. Times count the sequences that have left the tree.
struct CachedLeaf {
  std::uint64_t last_use = 0;   ///< when the last sequence that had them left
  std::uint64_t first_use = 0;  ///< when the first one did
  std::uint64_t uses = 0;       ///< sequences that had them
  std::int32_t position = 0;    ///< tokens before them in their prompts
  std::int32_t length = 0;      ///< how many they are
  std::int32_t priority = 0;    ///< the highest InsertOptions::priority of these sequences
  Namespace name_space{};       ///< whose they are
};

CHUNKATTN_NAMESPACE_END
