// Changes of what is cached: pins, eviction, clear().
#pragma once

#include <cstddef>
#include <cstdint>

#include "../support/config.hpp"
#include "core.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

CHUNKATTN_FUNCTION std::int32_t TreeCore::pin(const PathMatch& match) {
  prefixes.reserve_nodes(1);
  retention.reserve_pin();
  return retention.pin(match);
}

CHUNKATTN_FUNCTION void TreeCore::unpin(std::int32_t pin, std::uint32_t generation) noexcept {
  retention.unpin(pin, generation);
}

CHUNKATTN_FUNCTION std::size_t TreeCore::trim(std::size_t chunks) noexcept {
  return retention.trim(chunks);
}

CHUNKATTN_FUNCTION std::size_t TreeCore::expire(std::uint64_t now) {
  return retention.expire(now);
}

CHUNKATTN_FUNCTION void TreeCore::clear() noexcept {
  topology.observers.notify([](NodeObserver& observer) { observer.on_clear(); });
  retention.unpin_all();
  retention.trim(0);
  for (std::size_t i = 1; i < topology.num_indices(); ++i) {
    const auto n = static_cast<NodeIndex>(i);
    if (topology.node(n).state == NodeState::published)
      prefixes.unpublish(n, NodeState::stale);
    else if (topology.node(n).state == NodeState::unpublished)
      topology.node(n).state = NodeState::stale;
  }
  ++stats.clears;
  forget_copies();
  finish_all_leaving();
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END
