// Floats as elements of 8 bits.
#pragma once

#include <cmath>
#include <concepts>
#include <cstdint>

#include "../../element.hpp"
#include "../support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// The value that a row's largest magnitude is stored as.
template <class T>
inline constexpr float largest_stored = std::same_as<T, std::int8_t> ? 127.0f : 448.0f;

/// The element of a row that is nearest to x, ties to even.
CHUNKATTN_HD inline void store_nearest(float x, std::int8_t& to) noexcept {
  to = static_cast<std::int8_t>(static_cast<std::int32_t>(std::nearbyint(x)));
}
CHUNKATTN_HD inline void store_nearest(float x, float8_e4m3& to) noexcept {
  to = to_float8_e4m3(x);
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END
