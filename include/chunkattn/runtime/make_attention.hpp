// make_attention<Cpu, …> and, under nvcc, make_attention<Cuda, …> make an AnyAttention. They
// compile every kernel of their lists, so a program includes this in one source file for each
// backend, and any_attention.hpp in all others.
#pragma once

#include <concepts>
#include <memory>
#include <utility>

#include "../attention_options.hpp"
#include "../chunk_attention.hpp"
#include "../detail/support/config.hpp"
#include "../detail/support/instruction_sets.hpp"
#include "../element.hpp"
#include "../executor.hpp"
#include "../fwd.hpp"
#include "../kv_cache.hpp"
#include "../plan_view.hpp"
#include "any_attention.hpp"
#include "detail/built_with.hpp"
#include "detail/cpu_attention.hpp"
#include "detail/variant_name.hpp"

#if defined(__CUDACC__) || defined(CHUNKATTN_PTX_PROVIDED)  // nvcc, or the emulator of tests
#include "detail/cuda_attention.cuh"
#endif

CHUNKATTN_ISA_NAMESPACE_BEGIN

/// Attention on the CPU for heads of `size`, on its own threads.
///
/// \tparam Sizes       HeadDims<…>: what `size` may be
/// \tparam Types       ElementTypes<…>: what K and V may be stored as
/// \tparam Vs          Variants<…>: the variants that run() takes
/// \tparam Qo          ElementTypes<…>: the types of q, k, v and out; q and out have the same
/// \param num_threads  the caller's included; 0: as many as there are CPUs to use
/// \throws InvalidArgument for a size that is not listed, and for options that make no sense
template <class Device, class Sizes, class Types, class Vs = Variants<NoVariant>,
          class Qo = ElementTypes<float>>
  requires std::same_as<Device, Cpu>
[[nodiscard]] std::unique_ptr<AnyAttention> make_attention(HeadSize size, int num_threads = 0,
                                                           const CpuOptions& options = {}) {
  return detail::with_size(Sizes{}, size, [&]<HeadSize Size>() -> std::unique_ptr<AnyAttention> {
    return std::make_unique<detail::front::CpuAttention<Size, ThreadPool, Types, Vs, Qo>>(
        num_threads, options);
  });
}

/// Attention on the CPU for heads of `size`, on `executor`, which must outlive the object.
///
/// \tparam Sizes  HeadDims<…>: what `size` may be
/// \tparam Types  ElementTypes<…>: what K and V may be stored as
/// \tparam Vs     Variants<…>: the variants that run() takes
/// \tparam Qo     ElementTypes<…>: the types of q, k, v and out; q and out have the same
/// \throws InvalidArgument for a size that is not listed, and for options that make no sense
template <class Device, class Sizes, class Types, class Vs = Variants<NoVariant>,
          class Qo = ElementTypes<float>, Executor Exec>
  requires std::same_as<Device, Cpu>
[[nodiscard]] std::unique_ptr<AnyAttention> make_attention(HeadSize size, Exec& executor,
                                                           const CpuOptions& options = {}) {
  return detail::with_size(Sizes{}, size, [&]<HeadSize Size>() -> std::unique_ptr<AnyAttention> {
    return std::make_unique<detail::front::CpuAttention<Size, Exec, Types, Vs, Qo>>(executor,
                                                                                    options);
  });
}

CHUNKATTN_ISA_NAMESPACE_END

#if defined(__CUDACC__) || defined(CHUNKATTN_PTX_PROVIDED)  // nvcc, or the emulator of tests
CHUNKATTN_ISA_NAMESPACE_BEGIN

/// Attention for heads of `size` on the current GPU. Arrays of its calls are in device memory,
/// their streams are cudaStream_t.
///
/// \tparam Sizes  HeadDims<…>: what `size` may be
/// \tparam Types  ElementTypes<…>: half, bfloat16 or both; q and out are of K/V's type, k and v
/// too, or
///                float
/// \tparam Vs     Variants<…>: the variants that run() takes
/// \throws InvalidArgument for a size that is not listed, and for limits or options that make no
///         sense
/// \throws DeviceError without a usable device or without memory
template <class Device, class Sizes, class Types, class Vs = Variants<NoVariant>>
  requires std::same_as<Device, Cuda>
[[nodiscard]] std::unique_ptr<AnyAttention> make_attention(HeadSize size,
                                                           const CudaOptions::Limits& limits,
                                                           const CudaOptions& options = {}) {
  return detail::with_size(Sizes{}, size, [&]<HeadSize Size>() -> std::unique_ptr<AnyAttention> {
    return std::make_unique<detail::front::CudaAttention<Size, Types, Vs>>(limits, options);
  });
}

CHUNKATTN_ISA_NAMESPACE_END
#endif
