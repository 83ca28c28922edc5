// The kernels of a program whose units define CHUNKATTN_EXTERN_KERNELS, and what of the tree and of
// plans depends on no type of theirs, so that they do not compile it each time. One unit does, for
// each head size and its types, before it includes any other header of the library:
//
//     #include <chunkattn/kernels.ipp>
//     CHUNKATTN_KERNELS(128, 128, chunkattn::half, float)
//
// Others may be spread over several units, which compile side by side. What no unit compiles is
// an error of the linker that names head sizes and types. All units need the same options for the
// processor (-march); else kernels of these options are missing. Calls with a variant compile in
// place. The CMake function chunkattn_add_kernels() writes such units.
#pragma once

#if defined(CHUNKATTN_BODIES)
#error "chunkattn: include <chunkattn/kernels.ipp> before all other headers of chunkattn"
#endif
#define CHUNKATTN_KERNELS_UNIT
#if !defined(CHUNKATTN_EXTERN_KERNELS)
#define CHUNKATTN_EXTERN_KERNELS
#endif

#include "attention_plan.hpp"
#include "chunk_attention.hpp"
#include "prefix_tree.hpp"

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
      const chunkattn::PlanView&, const chunkattn::HeadRows<const Qo>&,                           \
      const chunkattn::HeadRows<const Qo>&)
