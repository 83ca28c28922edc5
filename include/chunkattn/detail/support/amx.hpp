// Detection of the matrix unit of x86-64 processors (AMX), for this process. The processor must
// have it, the operating system must save its registers, and Linux must be asked, once per process,
// for their 8 KB in every thread.
#pragma once

#include <cstdint>

#include "config.hpp"
#include "instruction_sets.hpp"

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

enum class AmxState {
  absent,   ///< the processor lacks AMX-TILE or AMX-BF16
  refused,  ///< the operating system does not let this process use them
  granted,
};

#if defined(__x86_64__)

/// What a processor says of itself. Asked for by instructions, because compilers learnt the names
/// of features at different times.
struct CpuidLeaf {
  std::uint32_t a, b, c, d;
};
inline CpuidLeaf cpuid(std::uint32_t leaf, std::uint32_t part = 0) noexcept {
  CpuidLeaf x{leaf, 0, part, 0};
  __asm__ volatile("cpuid" : "+a"(x.a), "=b"(x.b), "+c"(x.c), "=d"(x.d));
  return x;
}
inline std::uint32_t enabled_registers() noexcept {  // the lower half of XCR0
  std::uint32_t low = 0;
  __asm__ volatile("xgetbv" : "=a"(low) : "c"(0) : "rdx");
  return low;
}

/// arch_prctl(ARCH_REQ_XCOMP_PERM, tile data). Kernels before 5.16 and other systems refuse.
inline bool request_tiles() noexcept {
#if defined(__linux__)
  long result = 158;
  __asm__ volatile("syscall" : "+a"(result) : "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
  return result == 0;
#else
  return false;
#endif
}

inline AmxState find_amx_state() noexcept {
  constexpr std::uint32_t osxsave = 1u << 27;
  constexpr std::uint32_t amx_bf16 = 1u << 22, amx_tile = 1u << 24;
  constexpr std::uint32_t tile_registers = 3u << 17;  // configuration and data
  if (cpuid(0).a < 7 || (cpuid(1).c & osxsave) == 0) return AmxState::absent;
  const std::uint32_t features = cpuid(7).d;
  if ((features & amx_bf16) == 0 || (features & amx_tile) == 0) return AmxState::absent;
  if ((enabled_registers() & tile_registers) != tile_registers) return AmxState::refused;
  return request_tiles() ? AmxState::granted : AmxState::refused;
}

/// Whether AMX can be used. The first call asks the operating system, for the whole process.
[[nodiscard]] inline AmxState amx_state() noexcept {
  static const AmxState state = find_amx_state();
  return state;
}

#endif

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
