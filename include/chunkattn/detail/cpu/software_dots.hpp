// Dot-product instructions in plain C++: tests run the kernels that use them on machines without
// (CHUNKATTN_SOFTWARE_DOTS), and compare bits where there are some.
#pragma once

#include <cstdint>

#include "../base/config.hpp"
#include "../base/instruction_sets.hpp"

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

/// One lane of VPDPBUSD: sum + the products of the four bytes of `a`, unsigned, with those of `b`,
/// signed; modulo 2^32.
[[nodiscard]] constexpr std::uint32_t software_dot_bytes(std::uint32_t sum, std::uint32_t a,
                                                         std::uint32_t b) noexcept {
  for (int i = 0; i < 4; ++i) {
    const auto x = static_cast<std::uint8_t>(a >> 8 * i);
    const auto y = static_cast<std::int8_t>(static_cast<std::uint8_t>(b >> 8 * i));
    sum += static_cast<std::uint32_t>(x * y);
  }
  return sum;
}

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
