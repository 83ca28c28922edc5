// The address at which a chunk begins.
#pragma once

#include <cstdint>

#include "../../allocator.hpp"
#include "../support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

class WriteCheck;

/// Where chunk `chunk` begins: at start + chunk * stride, or in its slab.
template <class P>
[[nodiscard]] CHUNKATTN_HD P* chunk_base(P* start, P* const* slabs, std::int32_t slab_shift,
                                         ChunkIndex chunk, std::int64_t stride) noexcept {
  if (slabs == nullptr) return start + chunk * stride;
  const std::int32_t mask = (std::int32_t{1} << slab_shift) - 1;
  return slabs[chunk >> slab_shift] + (chunk & mask) * stride;
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
