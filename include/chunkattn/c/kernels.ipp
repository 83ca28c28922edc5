// Kernels of the C interface, for one head size and pair of types:
//
//     #include <chunkattn/c/kernels.ipp>
//     CHUNKATTN_C_KERNEL(64, 64, chunkattn::half, float)
//
// A source file has as many as it likes; several compile side by side.
#pragma once

#include <memory>

#include "../attention_options.hpp"
#include "../runtime/any_attention.hpp"
#include "../runtime/make_attention.hpp"
#include "../runtime/openmp_executor.hpp"
#include "../variants.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::c {

/// Attention for K/V of Kv, and q, k, v and out of Qo, on `threads`, which must outlive it.
/// \throws InvalidArgument for options that make no sense, and processors that lack instructions
template <int HeadDim, int ValueDim, class Kv, class Qo>
std::unique_ptr<AnyAttention> make(OpenMpExecutor& threads, const CpuOptions& options);

// A window that is longer than any context stands for none, which halves the number of kernels.
using KernelVariants =
    Variants<NoVariant, SlidingWindow, decltype(combine(SoftCap{}, SlidingWindow{})),
             decltype(combine(Sinks{}, SlidingWindow{})), Alibi>;

}  // namespace detail::c
CHUNKATTN_NAMESPACE_END

/// Compiles them.
#define CHUNKATTN_C_KERNEL(HeadDim, ValueDim, Kv, Qo)                                             \
  template <>                                                                                     \
  std::unique_ptr<chunkattn::AnyAttention> chunkattn::detail::c::make<HeadDim, ValueDim, Kv, Qo>( \
      chunkattn::OpenMpExecutor & threads, const chunkattn::CpuOptions& options) {                \
    constexpr chunkattn::HeadSize size(HeadDim, ValueDim);                                        \
    return chunkattn::make_attention<                                                             \
        chunkattn::Cpu, chunkattn::HeadDims<size>, chunkattn::ElementTypes<Kv>,                   \
        chunkattn::detail::c::KernelVariants, chunkattn::ElementTypes<Qo>>(size, threads,         \
                                                                           options);              \
  }
