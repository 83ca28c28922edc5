// std::bit_cast that device code may call without nvcc's experimental flags.
#pragma once

#include <cstdint>

#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// The bits of `from` as a To of the same size.
template <class To, class From>
[[nodiscard]] CHUNKATTN_HD constexpr To bit_cast(const From& from) noexcept {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

/// By the bits, which -ffast-math leaves alone.
inline bool is_finite(float x) noexcept {
  return (bit_cast<std::uint32_t>(x) & 0x7f800000u) != 0x7f800000u;
}

/// The same.
inline bool is_positive_finite(float x) noexcept {
  return bit_cast<std::uint32_t>(x) - 1 < 0x7f800000u - 1;
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
