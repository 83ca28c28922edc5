// Element types: float, half (IEEE binary16) and bfloat16, with exact conversions; K and V may also
// be 8-bit integers or floats with a scale per row.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "detail/support/bit_cast.hpp"
#include "detail/support/config.hpp"
#include "detail/support/cuda_types.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// IEEE 754 binary16 as stored: 1 sign, 5 exponent, 10 fraction bits. Arithmetic is done in float.
struct half {
  std::uint16_t bits = 0;  ///< as in memory
  friend constexpr bool operator==(half, half) = default;
};

/// The upper 16 bits of a float. Arithmetic is done in float.
struct bfloat16 {
  std::uint16_t bits = 0;  ///< as in memory
  friend constexpr bool operator==(bfloat16, bfloat16) = default;
};

/// An 8-bit float as OCP's OFP8 has it ("E4M3", also called e4m3fn): 1 sign, 4 exponent, 3 fraction
/// bits. There are no infinities; 0x7f and 0xff are NaN, 448 is the largest number, 2^-9 the
/// smallest subnormal. Arithmetic is done in float.
struct float8_e4m3 {
  std::uint8_t bits = 0;  ///< as in memory
  friend constexpr bool operator==(float8_e4m3, float8_e4m3) = default;
};

/// Whether T is one of CUDA's own 16-bit types, const or not. Arrays of __half are taken where
/// those of half are, arrays of __nv_bfloat16 where those of bfloat16 are.
template <class T>
inline constexpr bool is_cuda_element = std::is_same_v<std::remove_const_t<T>, __half> ||
                                        std::is_same_v<std::remove_const_t<T>, __nv_bfloat16>;

namespace detail {
/// The type of this library with the bits of T, not const.
template <class T, class Bare = std::remove_const_t<T>>
using own_element =
    std::conditional_t<std::is_same_v<Bare, __half>, half,
                       std::conditional_t<std::is_same_v<Bare, __nv_bfloat16>, bfloat16, Bare>>;
}  // namespace detail

/// What q, k, v and out may be passed as.
template <class T>
concept QoElement = std::same_as<T, float> || std::same_as<T, half> || std::same_as<T, bfloat16>;

/// Whether each row of K and V has a float scale: true of the 8-bit types.
template <class T>
inline constexpr bool has_row_scales = std::same_as<T, std::int8_t> || std::same_as<T, float8_e4m3>;

/// What K and V may be stored as on the CPU: floats of 32 or 16 bits, or 8 bits with a scale per
/// row. (CUDA: half and bfloat16.)
template <class T>
concept KvElement = QoElement<T> || has_row_scales<T>;

// The conversions below are written in integers: the same result on every compiler, with
// -ffast-math too, and usable in constant expressions. Kernels use the machine's own instructions.

/// Exact: every half is a float. NaN payloads are kept.
CHUNKATTN_HD constexpr float to_float(half value) noexcept {
  const std::uint32_t sign = (value.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (value.bits >> 10) & 0x1fu;
  std::uint32_t fraction = value.bits & 0x3ffu;
  if (exponent == 0x1fu) return detail::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
  if (exponent != 0)
    return detail::bit_cast<float>(sign | ((exponent + 112u) << 23) | (fraction << 13));
  if (fraction == 0) return detail::bit_cast<float>(sign);
  std::uint32_t shifted = 113u;  // subnormal half: normalise, every one is a normal float
  while ((fraction & 0x400u) == 0) {
    fraction <<= 1;
    --shifted;
  }
  return detail::bit_cast<float>(sign | (shifted << 23) | ((fraction & 0x3ffu) << 13));
}

/// Exact: every bfloat16 is a float.
CHUNKATTN_HD constexpr float to_float(bfloat16 value) noexcept {
  return detail::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

/// The value itself, for templates.
CHUNKATTN_HD constexpr float to_float(float value) noexcept {
  return value;
}

/// Exact: every float8_e4m3 is a half, too.
CHUNKATTN_HD constexpr float to_float(float8_e4m3 value) noexcept {
  const std::uint32_t sign = (value.bits & 0x80u) << 24;
  const std::uint32_t magnitude = value.bits & 0x7fu;
  if (magnitude == 0x7fu) return detail::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude >= 8) return detail::bit_cast<float>(sign | ((magnitude << 20) + 0x3c000000u));
  const float size = static_cast<float>(magnitude) * 0x1p-9f;  // subnormal
  return detail::bit_cast<float>(sign | detail::bit_cast<std::uint32_t>(size));
}

/// Rounds to nearest, ties to even; overflow becomes infinity, NaN stays a quiet NaN.
CHUNKATTN_HD constexpr half to_half(float value) noexcept {
  const std::uint32_t bits = detail::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return {static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  if (magnitude >= 0x47800000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // >= 65536
  if (magnitude < 0x38800000u) {  // below the smallest normal half
    if (magnitude < 0x33000000u) return {static_cast<std::uint16_t>(sign)};  // below 2^-25
    const std::uint32_t shift = 126u - (magnitude >> 23);
    const std::uint32_t fraction = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t kept = fraction >> shift;
    const std::uint32_t rest = fraction & ((1u << shift) - 1u);
    const std::uint32_t middle = 1u << (shift - 1u);
    const std::uint32_t up = (rest > middle || (rest == middle && (kept & 1u) != 0)) ? 1u : 0u;
    return {static_cast<std::uint16_t>(sign | (kept + up))};
  }
  const std::uint32_t rebased = magnitude - 0x38000000u;
  const std::uint32_t rounded = rebased + 0xfffu + ((rebased >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | (rounded >> 13))};  // a carry reaches infinity rightly
}

/// Rounds to nearest, ties to even; NaN stays a quiet NaN.
CHUNKATTN_HD constexpr bfloat16 to_bfloat16(float value) noexcept {
  const std::uint32_t bits = detail::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

/// Rounds to nearest, ties to even; what is larger than 448, infinities too, becomes 448 of its
/// sign. NaN stays NaN.
CHUNKATTN_HD constexpr float8_e4m3 to_float8_e4m3(float value) noexcept {
  const std::uint32_t bits = detail::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint8_t>(sign | 0x7fu)};
  if (magnitude >= 0x43e00000u) return {static_cast<std::uint8_t>(sign | 0x7eu)};  // from 448 on
  // Bits to drop: the last that is kept is worth 2^-9 below the smallest normal, 2^-6.
  const std::uint32_t exponent = magnitude >> 23;
  if (exponent < 117u) return {static_cast<std::uint8_t>(sign)};  // below 2^-10
  const std::uint32_t shift = exponent < 121u ? 141u - exponent : 20u;
  const std::uint32_t fraction = (magnitude & 0x7fffffu) | 0x800000u;
  const std::uint32_t rounded =
      (fraction + (1u << (shift - 1u)) - 1u + ((fraction >> shift) & 1u)) >> shift;
  // A normal's leading bit counts one exponent; a carry reaches the next one rightly.
  const std::uint32_t below = exponent < 121u ? 0u : (exponent - 121u) << 3;
  return {static_cast<std::uint8_t>(sign | (below + rounded))};
}

/// Converts a float to any float element type, rounding to nearest even.
template <class T>
  requires QoElement<T> || std::same_as<T, float8_e4m3>
CHUNKATTN_HD constexpr T from_float(float value) noexcept {
  if constexpr (std::is_same_v<T, float8_e4m3>)
    return to_float8_e4m3(value);
  else if constexpr (std::is_same_v<T, half>)
    return to_half(value);
  else if constexpr (std::is_same_v<T, bfloat16>)
    return to_bfloat16(value);
  else
    return value;
}

/// Half a unit in the last place, relative: the rounding error of storing a float as T.
template <QoElement T>
constexpr double unit_roundoff() noexcept {
  return std::is_same_v<T, half> ? 0x1p-11 : std::is_same_v<T, bfloat16> ? 0x1p-8 : 0x1p-24;
}

/// An element type that is known at run time only.
enum class ElementType : std::uint8_t { float32, half, bfloat16, int8, float8_e4m3 };

/// The ElementType of T.
template <KvElement T>
inline constexpr ElementType element_type_of =
    std::is_same_v<T, float>         ? ElementType::float32
    : std::is_same_v<T, half>        ? ElementType::half
    : std::is_same_v<T, bfloat16>    ? ElementType::bfloat16
    : std::is_same_v<T, std::int8_t> ? ElementType::int8
                                     : ElementType::float8_e4m3;

/// The name of an element type: "float", "half", "bfloat16", "int8" or "float8_e4m3".
[[nodiscard]] constexpr const char* name_of(ElementType type) noexcept {
  constexpr const char* names[] = {"float", "half", "bfloat16", "int8", "float8_e4m3"};
  const auto index = static_cast<unsigned>(type);
  return index < 5 ? names[index] : "no element type";
}

/// name_of() the ElementType of T: for messages and tables.
template <KvElement T>
constexpr const char* element_name() noexcept {
  return name_of(element_type_of<T>);
}

CHUNKATTN_NAMESPACE_END
