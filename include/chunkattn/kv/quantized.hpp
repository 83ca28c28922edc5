// K and V in 8 bits: signed integers with one float scale per (token, head), so that
// k_i = k_scale * q_i. Half the bytes of fp16; the scale is applied to the logit and to the
// probability, so the integers go through the kernels exactly.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "../base/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Stores `count` floats as 8-bit integers and returns their scale, largest magnitude / 127 but no
/// subnormal, so that the error of an element is at most half of it. A row of zeros has scale 0; a
/// row with a NaN or an infinity has scale NaN and zeros, which reaches the outputs as NaN.
inline float quantize_row(const float* from, int count, std::int8_t* to) noexcept {
  std::uint32_t largest = 0;  // magnitudes compare as their bits do, those of infinity and NaN too
  for (int i = 0; i < count; ++i) {
    const std::uint32_t size = std::bit_cast<std::uint32_t>(from[i]) & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  if (largest == 0 || largest >= 0x7f800000u) {
    for (int i = 0; i < count; ++i) to[i] = 0;
    return largest == 0 ? 0.0f : std::bit_cast<float>(0x7fc00000u);
  }
  constexpr float smallest = 127 * 0x1p-126f;  // below, 1 / scale would be no number
  const float reach =
      std::bit_cast<float>(largest) > smallest ? std::bit_cast<float>(largest) : smallest;
  const float inverse = 127.0f / reach;
  for (int i = 0; i < count; ++i)
    to[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(std::nearbyint(from[i] * inverse)));
  return reach / 127.0f;
}

CHUNKATTN_NAMESPACE_END
