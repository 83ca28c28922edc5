// Dot-product instructions in plain C++: tests run the kernels that use them on machines without
// (CHUNKATTN_SOFTWARE_DOTS; this is included before the library), and compare bits where there are
// some.
#pragma once

#include <cstdint>

#include "chunkattn/detail/support/bit_cast.hpp"
#include "chunkattn/detail/support/config.hpp"
#include "chunkattn/detail/support/instruction_sets.hpp"

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

/// One lane of VPMADDWD, added to `sum`: the products of the two int16 of `a` with those of `b`;
/// modulo 2^32.
[[nodiscard]] constexpr std::uint32_t software_dot_int16(std::uint32_t sum, std::uint32_t a,
                                                         std::uint32_t b) noexcept {
  for (int i = 0; i < 2; ++i) {
    const auto x = static_cast<std::int16_t>(static_cast<std::uint16_t>(a >> 16 * i));
    const auto y = static_cast<std::int16_t>(static_cast<std::uint16_t>(b >> 16 * i));
    sum += static_cast<std::uint32_t>(x * y);
  }
  return sum;
}

/// A float of these bits; denormals are zeros.
[[nodiscard]] inline float without_denormals(std::uint32_t bits) noexcept {
  return detail::bit_cast<float>((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
}

/// a * b + c of no denormals, rounded once, no denormal. The product of bfloat16 is exact in
/// double, and rounding a sum of floats first to double and then to float is the same as rounding
/// it once. What is below 2^-126 even after rounding to 24 bits becomes zero.
[[nodiscard]] inline float fused(float a, float b, float c) noexcept {
  const double exact = static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c);
  constexpr double least = 0x1p-126 * (1 - 0x1p-25);
  const double size = exact < 0 ? -exact : exact;
  return static_cast<float>(size < least ? __builtin_copysign(0.0, exact) : exact);
}

/// One lane of VDPBF16PS: sum + the products of the odd bfloat16 of `a` and `b`, then of the even
/// ones, each fused; denormals are zeros, before and after.
[[nodiscard]] inline float software_dot_pairs(float sum, std::uint32_t a,
                                              std::uint32_t b) noexcept {
  sum = without_denormals(detail::bit_cast<std::uint32_t>(sum));
  sum = fused(without_denormals(a & 0xffff0000u), without_denormals(b & 0xffff0000u), sum);
  return fused(without_denormals(a << 16), without_denormals(b << 16), sum);
}

/// One lane of BFDOT, unless FPCR.EBF is set, which no system does unasked: the products of the
/// even and of the odd bfloat16 of `a` and `b` are added up, then `sum` to that. Each result is
/// rounded to odd: cut off to 24 bits, of which the last is set if something was lost. Denormals
/// are zeros, before and after; what is too large is infinite. (Not with -ffast-math.)
[[nodiscard]] inline float software_bfdot(float sum, std::uint32_t a, std::uint32_t b) noexcept {
  const auto rounded = [](double x) {
    const double size = x < 0 ? -x : x;
    if (size < 0x1p-126) return __builtin_copysign(0.0, x);
    if (size >= 0x1p128) return __builtin_copysign(__builtin_inf(), x);
    constexpr std::uint64_t lost = (1u << 29) - 1;
    const auto bits = detail::bit_cast<std::uint64_t>(x);
    const std::uint64_t last = (bits & lost) != 0 ? lost + 1 : 0;
    return x == x ? detail::bit_cast<double>((bits & ~lost) | last) : x;
  };
  const auto added = [&](double x, double y) {
    const double exact = x + y;
    const double part = exact - x;
    const double rest = (x - (exact - part)) + (y - part);  // that `exact` is too small by
    auto bits = detail::bit_cast<std::uint64_t>(exact);
    if ((rest < 0 || rest > 0) && (bits & 1) == 0)  // to odd, which rounding again does not spoil
      bits = (rest < 0) == (exact < 0) ? bits + 1 : bits - 1;
    return rounded(detail::bit_cast<double>(bits));
  };
  const auto product = [&](std::uint32_t x, std::uint32_t y) {  // of bfloat16: exact in 24 bits
    return rounded(static_cast<double>(without_denormals(x)) *
                   static_cast<double>(without_denormals(y)));
  };
  const double both = added(product(a << 16, b << 16), product(a & 0xffff0000u, b & 0xffff0000u));
  const auto before = static_cast<double>(without_denormals(detail::bit_cast<std::uint32_t>(sum)));
  const double after = added(before, both);
  return after == after ? static_cast<float>(after) : detail::bit_cast<float>(0x7fc00000u);
}

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
