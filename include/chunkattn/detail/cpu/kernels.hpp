// The CPU kernels, compiled once for each instruction set of this translation unit: the files of
// isa/, which have no include guards, between macros that say for which one.
//
// CHUNKATTN_PASS_BEGIN opens the instruction set's namespace, detail::cpu::avx512 for example, and
// where the compiler's options do not promise that set already, allows it for the functions up to
// CHUNKATTN_PASS_END. Nothing outside such a namespace may use what the options do not promise: it
// would be merged with the same function of another translation unit and run anywhere.
#pragma once

// clang-format off
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "../../merge_state.hpp"
#include "../../attention_options.hpp"
#include "../attention/state.hpp"
#include "../../variants.hpp"
#include "../base/array.hpp"
#include "../base/config.hpp"
#include "../../element.hpp"
#include "../base/instruction_sets.hpp"
#include "../base/spin_lock.hpp"
#include "../../kv_view.hpp"
#include "../../plan_view.hpp"
#include "block.hpp"
#include "call.hpp"
#include "prefetch.hpp"
#include "schedule.hpp"
#include "task_queue.hpp"
#include "walk.hpp"
#if defined(CHUNKATTN_SOFTWARE_TILES)
#include "software_tiles.hpp"
#endif

#if defined(CHUNKATTN_WITH_AVX2) || defined(CHUNKATTN_WITH_AVX512)
#include <immintrin.h>
#elif defined(CHUNKATTN_WITH_NEON)
#include <arm_neon.h>
#endif

// A pragma stands last in a macro: g++ 14 loses the braces that follow it there.
#define CHUNKATTN_PASS_BEGIN    \
  CHUNKATTN_ISA_DETAIL_BEGIN \
  namespace cpu::CHUNKATTN_PASS { \
  CHUNKATTN_PASS_ALLOW
#define CHUNKATTN_PASS_END    \
  }                           \
  CHUNKATTN_ISA_DETAIL_END \
  CHUNKATTN_PASS_FORBID

// The same around functions that may use the matrix unit besides. Its instructions are written as
// assembler, for which clang wants the permission and g++ does not.
#define CHUNKATTN_TILES_BEGIN   \
  CHUNKATTN_ISA_DETAIL_BEGIN \
  namespace cpu::CHUNKATTN_PASS { \
  CHUNKATTN_TILES_ALLOW
#define CHUNKATTN_TILES_END   \
  }                           \
  CHUNKATTN_ISA_DETAIL_END \
  CHUNKATTN_TILES_FORBID

#if defined(__clang__)
#define CHUNKATTN_ALLOW_AVX2                                                                  \
  _Pragma("clang attribute push(__attribute__((target(\"avx2,fma,f16c,bmi,bmi2\"))), apply_to = function)")
#define CHUNKATTN_ALLOW_AVX512                                                                \
  _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2\"))), apply_to = function)")
#define CHUNKATTN_ALLOW_AMX                                                                   \
  _Pragma("clang attribute push(__attribute__((target(\"amx-tile,amx-bf16\"))), apply_to = function)")
#define CHUNKATTN_ALLOW_AVX512_AMX                                                            \
  _Pragma("clang attribute push(__attribute__((target(\"amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2\"))), apply_to = function)")
#define CHUNKATTN_FORBID _Pragma("clang attribute pop")
#else
#define CHUNKATTN_ALLOW_AVX2   \
  _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,fma,f16c,bmi,bmi2\")")
#define CHUNKATTN_ALLOW_AVX512 \
  _Pragma("GCC push_options") \
  _Pragma("GCC target(\"avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2\")")
#define CHUNKATTN_FORBID _Pragma("GCC pop_options")
#endif

#define CHUNKATTN_TILES_ALLOW CHUNKATTN_PASS_ALLOW
#define CHUNKATTN_TILES_FORBID CHUNKATTN_PASS_FORBID

#if defined(CHUNKATTN_WITH_PORTABLE)
#define CHUNKATTN_PASS portable
#define CHUNKATTN_PASS_ALLOW
#define CHUNKATTN_PASS_FORBID
#include "isa/all.hpp"
#undef CHUNKATTN_PASS
#undef CHUNKATTN_PASS_ALLOW
#undef CHUNKATTN_PASS_FORBID
#endif

#if defined(CHUNKATTN_WITH_NEON)
#define CHUNKATTN_PASS neon
#define CHUNKATTN_PASS_NEON 1
#define CHUNKATTN_PASS_ALLOW
#define CHUNKATTN_PASS_FORBID
#include "isa/all.hpp"
#undef CHUNKATTN_PASS
#undef CHUNKATTN_PASS_NEON
#undef CHUNKATTN_PASS_ALLOW
#undef CHUNKATTN_PASS_FORBID
#endif

#if defined(CHUNKATTN_WITH_AVX2)
#define CHUNKATTN_PASS avx2
#define CHUNKATTN_PASS_AVX2 1
#if defined(CHUNKATTN_NATIVE_AVX2) || defined(CHUNKATTN_NATIVE_AVX512)
#define CHUNKATTN_PASS_ALLOW
#define CHUNKATTN_PASS_FORBID
#else
#define CHUNKATTN_PASS_ALLOW CHUNKATTN_ALLOW_AVX2
#define CHUNKATTN_PASS_FORBID CHUNKATTN_FORBID
#endif
#include "isa/all.hpp"
#undef CHUNKATTN_PASS
#undef CHUNKATTN_PASS_AVX2
#undef CHUNKATTN_PASS_ALLOW
#undef CHUNKATTN_PASS_FORBID
#endif

#undef CHUNKATTN_TILES_ALLOW
#undef CHUNKATTN_TILES_FORBID

#if defined(CHUNKATTN_WITH_AVX512)
#define CHUNKATTN_PASS avx512
#define CHUNKATTN_PASS_AVX512 1
#if defined(CHUNKATTN_WITH_AMX)
#define CHUNKATTN_PASS_AMX 1
#endif
#if defined(CHUNKATTN_WITH_AMX) && defined(__clang__)
#if defined(CHUNKATTN_NATIVE_AVX512)
#define CHUNKATTN_TILES_ALLOW CHUNKATTN_ALLOW_AMX
#else
#define CHUNKATTN_TILES_ALLOW CHUNKATTN_ALLOW_AVX512_AMX
#endif
#define CHUNKATTN_TILES_FORBID CHUNKATTN_FORBID
#else
#define CHUNKATTN_TILES_ALLOW CHUNKATTN_PASS_ALLOW
#define CHUNKATTN_TILES_FORBID CHUNKATTN_PASS_FORBID
#endif
#if defined(CHUNKATTN_NATIVE_AVX512)
#define CHUNKATTN_PASS_ALLOW
#define CHUNKATTN_PASS_FORBID
#else
#define CHUNKATTN_PASS_ALLOW CHUNKATTN_ALLOW_AVX512
#define CHUNKATTN_PASS_FORBID CHUNKATTN_FORBID
#endif
#include "isa/all.hpp"
#undef CHUNKATTN_PASS
#undef CHUNKATTN_PASS_AVX512
#undef CHUNKATTN_PASS_AMX
#undef CHUNKATTN_TILES_ALLOW
#undef CHUNKATTN_TILES_FORBID
#undef CHUNKATTN_PASS_ALLOW
#undef CHUNKATTN_PASS_FORBID
#endif

#undef CHUNKATTN_PASS_BEGIN
#undef CHUNKATTN_PASS_END
#undef CHUNKATTN_TILES_BEGIN
#undef CHUNKATTN_TILES_END

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

template <class Nothing, class... Engines>
struct EngineList {
  using Any = std::variant<Engines...>;
};

/// One of the engines that are compiled.
template <int HeadDim, int ValueDim>
using AnyEngine = typename EngineList<void
#if defined(CHUNKATTN_WITH_PORTABLE)
                                      , portable::Engine<HeadDim, ValueDim>
#endif
#if defined(CHUNKATTN_WITH_NEON)
                                      , neon::Engine<HeadDim, ValueDim>
#endif
#if defined(CHUNKATTN_WITH_AVX2)
                                      , avx2::Engine<HeadDim, ValueDim>
#endif
#if defined(CHUNKATTN_WITH_AVX512)
                                      , avx512::Engine<HeadDim, ValueDim>
#endif
                                      >::Any;

/// The engine of options.instruction_set, which is one that is compiled. The avx512 engine is that of
/// amx too.
template <int HeadDim, int ValueDim, std::size_t I = 0>
[[nodiscard]] AnyEngine<HeadDim, ValueDim> make_engine(const CpuOptions& options) {
  using Engines = AnyEngine<HeadDim, ValueDim>;
  using Engine = std::variant_alternative_t<I, Engines>;
  const InstructionSet vectors = options.instruction_set == InstructionSet::amx
                                     ? InstructionSet::avx512
                                     : options.instruction_set;
  if constexpr (I + 1 < std::variant_size_v<Engines>)
    if (vectors != Engine::instruction_set)
      return make_engine<HeadDim, ValueDim, I + 1>(options);
  return Engine(options);
}

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
