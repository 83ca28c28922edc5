// Instruction sets of the CPU kernels: which there are, and which one runs on this processor.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>

#include "detail/base/amx.hpp"
#include "detail/base/check.hpp"
#include "detail/base/config.hpp"
#include "detail/base/instruction_sets.hpp"
#include "error.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// What CPU kernels are compiled for: four lanes in plain C++, many times slower, or the vectors of
/// a processor. avx2 stands for AVX2, FMA, F16C and BMI, avx512 for AVX-512 F, BW, DQ and VL, amx
/// for these with AMX-TILE and AMX-BF16, whose tiles then multiply 16- and 8-bit K and V.
/// automatic: the best that the build and the processor have.
enum class InstructionSet { automatic, portable, neon, avx2, avx512, amx };

CHUNKATTN_NAMESPACE_END

CHUNKATTN_ISA_NAMESPACE_BEGIN

/// The name of an instruction set, as CHUNKATTN_ISA and CHUNKATTN_CPU_ISA take it.
[[nodiscard]] constexpr const char* name_of(InstructionSet set) noexcept {
  switch (set) {
    case InstructionSet::neon:
      return "neon";
    case InstructionSet::avx2:
      return "avx2";
    case InstructionSet::avx512:
      return "avx512";
    case InstructionSet::amx:
      return "amx";
    case InstructionSet::portable:
      return "portable";
    default:
      return "automatic";
  }
}

/// The instruction set whose CPU kernels run: "amx", "avx512", "avx2", "neon", or "portable" (four
/// lanes in plain C++, many times slower). A build for x86-64 has all of that architecture and
/// chooses by what the processor has, unless compiler options or CHUNKATTN_ISA leave fewer; the
/// environment variable CHUNKATTN_CPU_ISA forces one.
/// \throws InvalidArgument if that one is not compiled in, or the processor lacks it
[[nodiscard]] inline const char* instruction_set();

/// instruction_set(), and what there was to choose from: for logs.
[[nodiscard]] inline std::string describe_instruction_set();

CHUNKATTN_ISA_NAMESPACE_END

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

/// The instruction sets that this translation unit has kernels for, the slowest first.
inline constexpr InstructionSet compiled_sets[] = {
#if defined(CHUNKATTN_WITH_PORTABLE)
    InstructionSet::portable,
#endif
#if defined(CHUNKATTN_WITH_NEON)
    InstructionSet::neon,
#endif
#if defined(CHUNKATTN_WITH_AVX2)
    InstructionSet::avx2,
#endif
#if defined(CHUNKATTN_WITH_AVX512)
    InstructionSet::avx512,
#endif
#if defined(CHUNKATTN_WITH_AMX)
    InstructionSet::amx,
#endif
};

/// Whether the processor and the operating system have what kernels of `set` need.
[[nodiscard]] inline bool is_supported(InstructionSet set) noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();  // for objects that are made before main()
  // Every processor with AVX2 converts half precision (F16C), for which older compilers cannot ask.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (set == InstructionSet::avx2) return avx2;
  if (set == InstructionSet::avx512)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (set == InstructionSet::amx)
    return is_supported(InstructionSet::avx512) && amx_state() == AmxState::granted;
#endif
  return set == InstructionSet::portable || set == InstructionSet::neon;
}

/// Why a compiled instruction set does not run here, as "this processor lacks"; nothing if it does.
[[nodiscard]] inline std::string_view why_not(InstructionSet set) noexcept {
  if (is_supported(set)) return {};
#if defined(__x86_64__)
  if (set == InstructionSet::amx && amx_state() == AmxState::refused)
    return "the operating system refuses";
#endif
  return "this processor lacks";
}

/// Says which instruction sets run, and why `wanted` does not.
[[noreturn]] CHUNKATTN_COLD inline void fail_instruction_set(std::string_view argument,
                                                             std::string_view wanted) {
  std::string running, others, reason;
  for (std::size_t i = std::size(compiled_sets); i-- > 0;) {
    const std::string_view name = name_of(compiled_sets[i]), why = why_not(compiled_sets[i]);
    std::string& names = why.empty() ? running : others;
    names += detail::joined({names.empty() ? "" : ", ", name});
    if (wanted == name) reason = detail::joined({"; ", why, " ", name});
  }
  for (const InstructionSet set :
       {InstructionSet::portable, InstructionSet::neon, InstructionSet::avx2,
        InstructionSet::avx512, InstructionSet::amx})
    if (wanted == name_of(set) && reason.empty())
      reason = detail::joined({"; this build has no ", wanted, " kernels"});
  if (running.empty()) detail::fail_argument(argument, wanted, {"a processor with ", others});
  detail::fail_argument(argument, wanted, {"one of ", running, reason});
}

/// The instruction set that `wanted` (automatic: CHUNKATTN_CPU_ISA, else the best) stands for.
/// \throws InvalidArgument if this build or this processor lacks it
[[nodiscard]] inline InstructionSet resolved(InstructionSet wanted) {
  const char* const forced = std::getenv("CHUNKATTN_CPU_ISA");
  const bool is_forced =
      wanted == InstructionSet::automatic && forced != nullptr && *forced != '\0';
  for (std::size_t i = std::size(compiled_sets); i-- > 0;) {
    const InstructionSet set = compiled_sets[i];
    const bool fits = is_forced ? std::string_view(forced) == name_of(set)
                      : wanted == InstructionSet::automatic ? true
                                                            : wanted == set;
    if (fits && is_supported(set)) return set;
  }
  if (is_forced) fail_instruction_set("CHUNKATTN_CPU_ISA", forced);
  fail_instruction_set("options.instruction_set", name_of(wanted));
}

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END

CHUNKATTN_ISA_NAMESPACE_BEGIN

inline const char* instruction_set() {
  return name_of(detail::cpu::resolved(InstructionSet::automatic));
}
inline std::string describe_instruction_set() {
  std::string text = instruction_set();
  const char* separator = " of ";
  for (const InstructionSet set : detail::cpu::compiled_sets) {
    const std::string_view why = detail::cpu::why_not(set);
    text += std::string(separator) + name_of(set);
    if (!why.empty()) text += detail::joined({" (", why, " it)"});
    separator = ", ";
  }
  return text;
}

CHUNKATTN_ISA_NAMESPACE_END
