// The kernels of a program whose units define CHUNKATTN_EXTERN_KERNELS, so that they do not compile
// them each time. One unit does, for each head size and its types:
//
//     #include <chunkattn/kernels.ipp>
//     CHUNKATTN_KERNELS(128, 128, chunkattn::half, float)
//
// Others may be spread over several units, which compile side by side. What no unit compiles is
// an error of the linker that names head sizes and types. All units need the same options for the
// processor (-march); else kernels of these options are missing. Calls with a variant compile in
// place. The CMake function chunkattn_add_kernels() writes such units.
#include "chunk_attention.hpp"
#include "detail/cpu/run_kernels.hpp"

/// Compiles what ChunkAttention<Cpu, HeadDim, ValueDim> needs for K/V of Element, and for k, v, q and
/// out of Qo (float, half or bfloat16).
#define CHUNKATTN_KERNELS(HeadDim, ValueDim, Element, Qo)                                         \
  template void chunkattn::detail::cpu::run_kernels<HeadDim, ValueDim, Element, Qo, Qo>(          \
      chunkattn::detail::cpu::AnyEngine<HeadDim, ValueDim>&,                                      \
      const chunkattn::detail::cpu::ExecutorRef&,                                                 \
      const chunkattn::detail::cpu::Call<Element, Qo, Qo, chunkattn::NoVariant>&);                \
  template void chunkattn::detail::cpu::write_kernels<HeadDim, ValueDim, Element, Qo, Qo>(        \
      chunkattn::detail::cpu::AnyEngine<HeadDim, ValueDim>&,                                      \
      const chunkattn::detail::cpu::ExecutorRef&, const chunkattn::KvView<Element>&,              \
      const chunkattn::PlanView&, const Qo*, const Qo*)
