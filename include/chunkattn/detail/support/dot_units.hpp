// Detection of dot-product instructions that are worth using: products of 8- or 16-bit elements,
// several to a lane, added up in 32 bits.
//
// VPDPBUSD (AVX-512 VNNI) multiplies 4 pairs of bytes per lane where VFMADD231PS multiplies one
// pair of floats, in the same time on every processor that was measured. VDPBF16PS (AVX-512 BF16)
// multiplies 2 pairs of bfloat16, on some processors in the same time, on others in four times as
// much, so it is used on those alone that are known to be fast. bench/dot_rates.cpp measures all
// three:
//
//   AMD family 19h, Zen 4    VDPBF16PS 2.0 × the multiply-adds of VFMADD231PS, VPDPBUSD 3.7 – 4 ×
//   AMD family 1Ah, Zen 5    VDPBF16PS 2.0 ×, VPDPBUSD 4.0 × (EPYC, model 2)
//   Intel with AMX           VDPBF16PS 0.5 ×; VPDPBUSD not measured
//
// SDOT and UDOT (Arm FEAT_DotProd) do 4 times the multiply-adds of FMLA and BFDOT (FEAT_BF16) twice
// as many where all of them are started in the same pipes. By Arm's optimization guides, as LLVM's
// scheduling models have them, these cores do so; not measured:
//
//   Neoverse N1              SDOT
//   Neoverse N2, V1, V2      SDOT, BFDOT
//
// Products of bytes need half of FMLA's instructions, so they lose on a core alone that starts less
// than half as many; none is known. BFDOT is used on cores of the table.
#pragma once

#include <cstdint>

#include "amx.hpp"
#include "config.hpp"
#include "instruction_sets.hpp"

#if defined(CHUNKATTN_WITH_DOTS) && defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

/// The dot products that kernels of avx512 or neon use.
struct DotUnits {
  bool int8 = false;      ///< VPDPBUSD; SDOT and UDOT
  bool bfloat16 = false;  ///< VDPBF16PS; BFDOT
};

#if defined(CHUNKATTN_WITH_DOTS) && defined(__aarch64__)

#if defined(CHUNKATTN_WITH_PAIRS)
/// The cores of the table above that BFDOT is worth using on, and qemu's `max`, for tests.
inline bool multiplies_pairs_fast() noexcept {
  std::uint64_t midr = 0;
  __asm__("mrs %0, midr_el1" : "=r"(midr));
  const auto implementer = static_cast<std::uint32_t>(midr >> 24) & 0xffu;
  const auto part = static_cast<std::uint32_t>(midr >> 4) & 0xfffu;
  return (implementer == 0x41 && (part == 0xd40 || part == 0xd49 || part == 0xd4f)) ||
         (implementer == 0 && part == 0x051);
}
#endif

/// Linux lists them in the auxiliary vector, and, where it says so, the core in MIDR_EL1.
inline DotUnits find_dot_units() noexcept {
  DotUnits units;
#if defined(__ARM_FEATURE_DOTPROD)
  units.int8 = true;
#elif defined(__linux__)
  constexpr unsigned long asimd_dp = 1ul << 20;
  units.int8 = (::getauxval(AT_HWCAP) & asimd_dp) != 0;
#endif
#if defined(CHUNKATTN_WITH_PAIRS) && defined(__linux__)
  constexpr unsigned long cpuid = 1ul << 11, bf16 = 1ul << 14;  // of AT_HWCAP2
  units.bfloat16 = (::getauxval(AT_HWCAP2) & bf16) != 0 && (::getauxval(AT_HWCAP) & cpuid) != 0 &&
                   multiplies_pairs_fast();
#endif
  return units;
}

#elif defined(CHUNKATTN_WITH_DOTS)

/// The processors of the table above that VDPBF16PS is worth using on.
inline bool multiplies_pairs_fast() noexcept {
  const CpuidLeaf vendor = cpuid(0);
  const bool is_amd = vendor.b == 0x68747541u && vendor.d == 0x69746e65u;  // "Auth", "enti"
  const std::uint32_t version = cpuid(1).a;
  const std::uint32_t family = (version >> 8 & 0xfu) + (version >> 20 & 0xffu);
  return is_amd && (family == 0x19 || family == 0x1a);
}

/// By the processor's own account. That the operating system saves the registers is avx512's to
/// ask.
inline DotUnits find_dot_units() noexcept {
  constexpr std::uint32_t avx512_vnni = 1u << 11, avx512_bf16 = 1u << 5;
  if (cpuid(0).a < 7) return {};
  return {.int8 = (cpuid(7).c & avx512_vnni) != 0,
          .bfloat16 = multiplies_pairs_fast() && (cpuid(7, 1).a & avx512_bf16) != 0};
}

#else

/// No kernels were compiled that could use any.
inline DotUnits find_dot_units() noexcept {
  return {};
}

#endif

/// What there is; asked for once per process.
[[nodiscard]] inline DotUnits dot_units() noexcept {
  static const DotUnits units = find_dot_units();
  return units;
}

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
