// Loops over page ids, which are most of what a plan costs: in blocks, which compilers turn into
// vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

inline constexpr std::int32_t page_block = 16;

/// How many leading ids are the same in both.
inline std::int32_t equal_pages(const std::int32_t* a, const std::int32_t* b,
                                std::int32_t count) noexcept {
  std::int32_t i = 0;
  for (std::int32_t step = 16 * page_block; step > 1; step /= 16)
    while (count - i >= step && std::memcmp(a + i, b + i, to_size(step) * sizeof(*a)) == 0)
      i += step;
  while (i < count && a[i] == b[i]) ++i;
  return i;
}

inline constexpr std::uint32_t sign_bit = 0x80000000;

/// Has the sign bit if an id is not from 0 to last.
CHUNKATTN_INLINE std::uint32_t outside(std::int32_t id, std::int32_t last) noexcept {
  const auto bits = static_cast<std::uint32_t>(id);
  return bits | (static_cast<std::uint32_t>(last) - bits);
}

/// Index of the first id that is not from 0 to last, or `count`. (The bits of a block are or-ed, so
/// that only one in `page_block` is a branch.)
inline std::int32_t find_outside(const std::int32_t* ids, std::int32_t count,
                                 std::int32_t last) noexcept {
  std::int32_t i = 0;
  for (; count - i >= page_block; i += page_block) {
    std::uint32_t found = 0;
    for (std::int32_t t = 0; t < page_block; ++t) found |= outside(ids[i + t], last);
    if ((found & sign_bit) != 0) break;
  }
  while (i < count && (outside(ids[i], last) & sign_bit) == 0) ++i;
  return i;
}

/// 0 if an id is one more than the one before it.
CHUNKATTN_INLINE std::uint32_t gap_before(const std::int32_t* id) noexcept {
  return static_cast<std::uint32_t>(id[0]) - static_cast<std::uint32_t>(id[-1]) - 1;
}

/// Whether `page_block` ids are each one more than the one before it; there is one before the
/// first.
CHUNKATTN_INLINE bool block_goes_on(const std::int32_t* ids) noexcept {
  std::uint32_t gaps = 0;
  for (std::int32_t t = 0; t < page_block; ++t) gaps |= gap_before(ids + t);
  return gaps == 0;
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
