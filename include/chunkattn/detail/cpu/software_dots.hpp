// Dot-product instructions in plain C++: tests run the kernels that use them on machines without
// (CHUNKATTN_SOFTWARE_DOTS), and compare bits where there are some.
#pragma once

#include <cstdint>

#include "../base/bit_cast.hpp"
#include "../base/config.hpp"
#include "../base/instruction_sets.hpp"

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

/// One lane: sum + the products of the four bytes of `a`, which are A, with those of `b`, which are
/// B; modulo 2^32. VPDPBUSD multiplies unsigned bytes by signed ones, SDOT signed, UDOT unsigned
/// ones.
template <class A, class B>
[[nodiscard]] constexpr std::uint32_t software_dot_bytes(std::uint32_t sum, std::uint32_t a,
                                                         std::uint32_t b) noexcept {
  for (int i = 0; i < 4; ++i) {
    const auto x = static_cast<A>(static_cast<std::uint8_t>(a >> 8 * i));
    const auto y = static_cast<B>(static_cast<std::uint8_t>(b >> 8 * i));
    sum += static_cast<std::uint32_t>(x * y);
  }
  return sum;
}

/// One lane of VDPBF16PS: sum + the products of the odd bfloat16 of `a` and `b`, then of the even
/// ones, each fused; denormals are zeros, before and after.
[[nodiscard]] inline float software_dot_pairs(float sum, std::uint32_t a,
                                              std::uint32_t b) noexcept {
  const auto number = [](std::uint32_t bits) {
    return detail::bit_cast<float>((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
  };
  // Products of bfloat16 are exact in double, and a sum of two floats is the same rounded first to
  // double and then to float. What is below 2^-126 even after rounding to 24 bits becomes zero.
  const auto fused = [](float x, float y, float z) {
    const double exact = static_cast<double>(x) * static_cast<double>(y) + static_cast<double>(z);
    constexpr double least = 0x1p-126 * (1 - 0x1p-25);
    const double size = exact < 0 ? -exact : exact;
    return static_cast<float>(size < least ? __builtin_copysign(0.0, exact) : exact);
  };
  sum = number(detail::bit_cast<std::uint32_t>(sum));
  sum = fused(number(a & 0xffff0000u), number(b & 0xffff0000u), sum);
  return fused(number(a << 16), number(b << 16), sum);
}

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
