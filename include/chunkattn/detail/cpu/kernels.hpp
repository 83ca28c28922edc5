// The CPU kernels, compiled once for each instruction set of this translation unit: the files of
// isa/ are included again for each of them, in a namespace of its own (isa/pass.hpp).
#pragma once

#include <cstddef>
#include <variant>

#include "../../attention_options.hpp"
#include "../../head_rows.hpp"
#include "../support/instruction_sets.hpp"
#include "call.hpp"
#include "executor_ref.hpp"
#include "isa/common.hpp"

// clang-format off: in this order
#if defined(CHUNKATTN_WITH_PORTABLE)
#define CHUNKATTN_PASS_PORTABLE 1
#include "isa/engine.hpp"
#include "isa/end.hpp"
#endif

#if defined(CHUNKATTN_WITH_NEON)
#define CHUNKATTN_PASS_NEON 1
#include "isa/engine.hpp"
#include "isa/end.hpp"
#endif

#if defined(CHUNKATTN_WITH_AVX2)
#define CHUNKATTN_PASS_AVX2 1
#include "isa/engine.hpp"
#include "isa/end.hpp"
#endif

#if defined(CHUNKATTN_WITH_AVX512)
#define CHUNKATTN_PASS_AVX512 1
#include "isa/engine.hpp"
#include "isa/end.hpp"
#endif

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

/// A list whose first type counts for nothing, so that each engine can follow a comma.
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

/// Computes a call without a variant.
template <int HeadDim, int ValueDim, class T, class X, class Y>
void run_kernels(AnyEngine<HeadDim, ValueDim>& engines, const ExecutorRef& executor,
                 const Call<T, X, Y, NoVariant>& call);

/// Stores K and V of a plan's rows; v.data = nullptr: K alone.
template <int HeadDim, int ValueDim, class T, class K, class V>
void write_kernels(AnyEngine<HeadDim, ValueDim>& engines, const ExecutorRef& executor,
                   const KvView<T>& layer, const PlanView& plan, const HeadRows<const K>& k,
                   const HeadRows<const V>& v);

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
