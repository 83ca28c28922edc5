// What Python's objects stand for: the library's types with their parameters filled in.
#pragma once

#include <chunkattn/any_attention.hpp>
#include <chunkattn/attention_plan.hpp>
#include <chunkattn/prefix_tree.hpp>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace binding {

/// Lru or Priority, as is known at run time.
struct Retention {
  static constexpr bool retains = true;
  std::size_t high_watermark = std::numeric_limits<std::size_t>::max();
  std::size_t low_watermark = std::numeric_limits<std::size_t>::max();
  std::size_t max_pinned = 0;
  bool learns = false;
  bool by_priority = false;
  [[nodiscard]] int level(int priority) const noexcept { return by_priority ? priority : 0; }
};

using Token = std::int32_t;
using Tree = chunkattn::PrefixTree<Token, 64, chunkattn::PoolAllocator, Retention>;

}  // namespace binding
