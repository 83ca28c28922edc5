// Where a slot begins.
#pragma once

#include <cstdint>

#include "../../allocator.hpp"
#include "../base/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

class WriteCheck;

/// Where slot `slot` begins: at start + slot * stride, or in its slab.
template <class P>
[[nodiscard]] CHUNKATTN_HD P* slot_base(P* start, P* const* slabs, std::int32_t slab_shift,
                                        SlotIndex slot, std::int64_t stride) noexcept {
  if (slabs == nullptr) return start + slot * stride;
  const std::int32_t mask = (std::int32_t{1} << slab_shift) - 1;
  return slabs[slot >> slab_shift] + (slot & mask) * stride;
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
