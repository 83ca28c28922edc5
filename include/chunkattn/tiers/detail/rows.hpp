// Rows of companions in the record of a block: for each companion a bit for each token that says
// whether it has a row, then these rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../transfer/companion.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// The companions of a tree's K/V, as far as records are concerned.
struct TierRowShapes {
  std::size_t block = 0;            ///< tokens
  std::vector<std::size_t> widths;  ///< bytes of a row of each

  [[nodiscard]] std::size_t mask_bytes() const noexcept { return (block + 7) / 8; }
  /// Of all rows of a block, at most.
  [[nodiscard]] std::size_t most_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const std::size_t width : widths) bytes += mask_bytes() + block * width;
    return bytes;
  }
};

/// Adds the rows of one companion to those of a block that begins at a position.
inline void put_tier_rows(const TierRowShapes& shapes, const CompanionRows& rows,
                          std::int32_t begin, std::vector<std::byte>& to) {
  const std::size_t mask = to.size();
  to.resize(mask + shapes.mask_bytes());
  rows.for_each([&](std::int32_t position, const std::byte*) {
    const std::size_t i = to_size(position - begin);
    to[mask + i / 8] |= std::byte{1} << (i % 8);
  });
  to.insert(to.end(), rows.bytes.begin(), rows.bytes.end());
}
/// Calls f(companion, token of the block, its row) for all rows of a block. False if they are not
/// what they are to be, perhaps after some calls.
template <class F>
bool for_each_tier_row_of(const TierRowShapes& shapes, std::span<const std::byte> bytes,
                          const F& f) {
  for (std::size_t c = 0; c < shapes.widths.size(); ++c) {
    if (bytes.size() < shapes.mask_bytes()) return false;
    const std::span<const std::byte> mask = bytes.first(shapes.mask_bytes());
    bytes = bytes.subspan(mask.size());
    for (std::size_t i = 0; i < 8 * mask.size(); ++i) {
      if ((mask[i / 8] >> (i % 8) & std::byte{1}) == std::byte{0}) continue;
      if (i >= shapes.block || bytes.size() < shapes.widths[c]) return false;
      f(c, i, bytes.data());
      bytes = bytes.subspan(shapes.widths[c]);
    }
  }
  return bytes.empty();
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
