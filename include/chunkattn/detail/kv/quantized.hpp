// K and V in 8 bits: signed integers or floats (e4m3) with one float scale per (token, head), so
// that k_i = k_scale * q_i. Half the bytes of fp16; the scale is applied to the logit and to the
// probability, so the 8 bits go through the kernels exactly.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "../../element.hpp"
#include "../base/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// What a row's largest magnitude is stored as.
template <class T>
inline constexpr float largest_stored = std::same_as<T, std::int8_t> ? 127.0f : 448.0f;

/// The element of a row that is nearest to x, ties to even.
inline void store_nearest(float x, std::int8_t& to) noexcept {
  to = static_cast<std::int8_t>(static_cast<std::int32_t>(std::nearbyint(x)));
}
inline void store_nearest(float x, float8_e4m3& to) noexcept {
  to = to_float8_e4m3(x);
}

}  // namespace detail

/// Stores `count` floats in 8 bits and returns their scale: largest magnitude / 127 of
/// std::int8_t, / 448 of float8_e4m3, but no subnormal. The error of an element is at most half of
/// the scale in integers; in floats 2^-4 of the element, or 2^-10 of the scale where that is more.
/// A row of zeros has scale 0; a row with a NaN or an infinity has scale NaN and zeros, which
/// reaches the outputs as NaN.
template <class T>
  requires has_row_scales<T>
inline float quantize_row(const float* from, int count, T* to) noexcept {
  std::uint32_t largest = 0;  // magnitudes compare as their bits do, those of infinity and NaN too
  for (int i = 0; i < count; ++i) {
    const std::uint32_t size = std::bit_cast<std::uint32_t>(from[i]) & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  if (largest == 0 || largest >= 0x7f800000u) {
    for (int i = 0; i < count; ++i) to[i] = T{};
    return largest == 0 ? 0.0f : std::bit_cast<float>(0x7fc00000u);
  }
  constexpr float most = detail::largest_stored<T>;
  constexpr float smallest = most * 0x1p-126f;  // below, 1 / scale would be no number
  const float reach =
      std::bit_cast<float>(largest) > smallest ? std::bit_cast<float>(largest) : smallest;
  const float inverse = most / reach;
  for (int i = 0; i < count; ++i) detail::store_nearest(from[i] * inverse, to[i]);
  return reach / most;
}

CHUNKATTN_NAMESPACE_END
