// Whether this processor has dot-product instructions that are worth using: products of 8- or
// 16-bit elements, several to a lane, added up in 32 bits.
//
// VPDPBUSD (AVX-512 VNNI) multiplies 4 pairs of bytes per lane where VFMADD231PS multiplies one
// pair of floats, in the same time on every processor that was measured.
#pragma once

#include <cstdint>

#include "config.hpp"
#include "instruction_sets.hpp"

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

/// The dot products that kernels of avx512 use.
struct DotUnits {
  bool int8 = false;  ///< VPDPBUSD
};

#if defined(CHUNKATTN_WITH_DOTS)

/// Finds them out, by the processor's own account: compilers learnt the names of these features at
/// different times. That the operating system saves the registers is avx512's to ask.
class DotProbe {
 public:
  static DotUnits units() noexcept {
    constexpr std::uint32_t avx512_vnni = 1u << 11;
    if (cpuid(0).a < 7) return {};
    return {.int8 = (cpuid(7).c & avx512_vnni) != 0};
  }

 private:
  struct Leaf {
    std::uint32_t a, b, c, d;
  };
  static Leaf cpuid(std::uint32_t leaf) noexcept {
    Leaf x{leaf, 0, 0, 0};
    __asm__ volatile("cpuid" : "+a"(x.a), "=b"(x.b), "+c"(x.c), "=d"(x.d));
    return x;
  }
};

/// What there is; asked for once per process.
[[nodiscard]] inline DotUnits dot_units() noexcept {
  static const DotUnits units = DotProbe::units();
  return units;
}

#else

/// No kernels were compiled that could use any.
[[nodiscard]] inline DotUnits dot_units() noexcept {
  return {};
}

#endif

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
