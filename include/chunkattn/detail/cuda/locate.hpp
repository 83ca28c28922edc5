// Where a path position lies: the same function for host and device.
#pragma once

#include "../../plan_view.hpp"
#include "../base/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// The place of path position `position` on the path that ends with `segment`; no_chunk if the path
/// has no such place.
[[nodiscard]] CHUNKATTN_HD inline WriteTarget locate(const Segment* segments, const Piece* pieces,
                                                     std::int32_t segment,
                                                     std::int32_t position) noexcept {
  while (segment >= 0 && position < segments[segment].position) segment = segments[segment].parent;
  if (segment < 0) return {no_chunk, 0};
  const Segment& s = segments[segment];
  if (position >= s.position + s.length) return {no_chunk, 0};
  std::int32_t low = s.piece_begin;
  std::int32_t high = s.piece_begin + s.num_pieces - 1;
  while (low < high) {
    const std::int32_t middle = (low + high) / 2;
    if (position >= pieces[middle].position + pieces[middle].length)
      low = middle + 1;
    else
      high = middle;
  }
  return {pieces[low].chunk, pieces[low].begin + position - pieces[low].position};
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
