// How a device rounds: floats of 16 bits, the canonical NaN, what approximations may be off by.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace ptxrun {

inline constexpr std::uint32_t canonical_nan = 0x7fffffffu;

/// Results that are NaN have one pattern.
inline float canonical(float x) {
  return x != x ? std::bit_cast<float>(canonical_nan) : x;
}

/// Subnormals become zero of the same sign.
inline float flushed(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}

/// To nearest even. NaN becomes 0x7fff, what is too large infinity.
inline std::uint32_t half_of(float f) {
  const auto x = std::bit_cast<std::uint32_t>(f);
  const std::uint32_t sign = x >> 16 & 0x8000u, magnitude = x & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u)  // subnormal: a multiple of 2^-24
    return sign |
           static_cast<std::uint32_t>(std::nearbyint(std::bit_cast<float>(magnitude) * 0x1p24f));
  return sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
}
inline std::uint32_t bfloat16_of(float f) {
  const auto x = std::bit_cast<std::uint32_t>(f);
  return f != f ? 0x7fffu : (x + 0x7fffu + (x >> 16 & 1)) >> 16;
}

inline float from_half(std::uint32_t bits) {
  const float magnitude = std::bit_cast<float>((bits & 0x7fffu) << 13) * 0x1p112f;
  const std::uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | special |
                              (bits & 0x8000u) << 16);
}
inline float from_bfloat16(std::uint32_t bits) {
  return std::bit_cast<float>(bits << 16);
}

/// Towards zero, as tensor cores leave a sum of eight products and an accumulator (Fasi, Higham,
/// Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021).
inline float towards_zero(double x) {
  const float rounded = static_cast<float>(x);
  const std::uint32_t away = std::fabs(double{rounded}) > std::fabs(x) ? 1 : 0;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(rounded) - away);
}

}  // namespace ptxrun
