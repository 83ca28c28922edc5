// Loops over page ids, which are most of what a plan costs: in blocks, which compilers turn into
// vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "../../detail/support/config.hpp"
#include "../../detail/support/to_size.hpp"

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

/// Index of the first id for which bits(id, index) has one of `mask`, or `count`. (The bits of a
/// block are or-ed, so that only one in `page_block` is a branch.)
template <class F>
CHUNKATTN_INLINE std::int32_t find_page(const std::int32_t* ids, std::int32_t count,
                                        std::uint32_t mask, const F& bits) noexcept {
  const auto bits_at = [&](std::int32_t i) CHUNKATTN_LAMBDA {
    return bits(static_cast<std::uint32_t>(ids[i]), static_cast<std::uint32_t>(i));
  };
  std::int32_t i = 0;
  for (; count - i >= page_block; i += page_block) {
    std::uint32_t found = 0;
    for (std::int32_t t = 0; t < page_block; ++t) found |= bits_at(i + t);
    if ((found & mask) != 0) break;
  }
  while (i < count && (bits_at(i) & mask) == 0) ++i;
  return i;
}
inline constexpr std::uint32_t sign_bit = 0x80000000;

/// Index of the first id that is not from 0 to last, or `count`.
inline std::int32_t find_outside(const std::int32_t* ids, std::int32_t count,
                                 std::int32_t last) noexcept {
  return find_page(ids, count, sign_bit, [last](std::uint32_t id, std::uint32_t) {
    return id | (static_cast<std::uint32_t>(last) - id);
  });
}

/// How many leading ids are each one more than the one before; count > 0.
CHUNKATTN_INLINE std::int32_t consecutive_pages(const std::int32_t* ids,
                                                std::int32_t count) noexcept {
  const auto first = static_cast<std::uint32_t>(ids[0]);
  if (count == 1 || static_cast<std::uint32_t>(ids[1]) != first + 1) return 1;
  return find_page(ids, count, ~std::uint32_t{0},
                   [first](std::uint32_t id, std::uint32_t i) { return id - first - i; });
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
