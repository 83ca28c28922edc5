// Instantiates the attention kernel with each variant of the library and with K/V of 8 bits, and
// the kernels that go with these, for the checks of compiled code: nvcc -DHEAD_DIM=128
// -DVALUE_DIM=128 -DELEMENT=half -cubin variant_kernels.cu
#include "chunkattn/detail/cuda/merge_states.cuh"
#include "chunkattn/detail/cuda/run_tasks.cuh"
#include "chunkattn/detail/cuda/write_quantized.cuh"

using namespace chunkattn;

/// Functions of a place, as a user writes them for both backends.
struct Nearer {
  CHUNKATTN_HD float operator()(LogitIndex at) const {
    return -0.01f * static_cast<float>(at.q_idx - at.kv_idx);
  }
};
struct OddRows {
  CHUNKATTN_HD bool operator()(LogitIndex at) const {
    return at.row % 2 == 1 || at.kv_idx < at.head;
  }
};

#define INSTANTIATE(...)                                                     \
  template __global__ void                                                   \
  detail::cuda::attention_kernel<ELEMENT, HEAD_DIM, VALUE_DIM, __VA_ARGS__>( \
      const detail::cuda::AttentionArguments<ELEMENT, __VA_ARGS__>)

#if !defined(EIGHT_BITS_ONLY)
INSTANTIATE(SoftCap);
INSTANTIATE(SlidingWindow);
INSTANTIATE(Sinks);
INSTANTIATE(Alibi);
INSTANTIATE(Bias<Nearer>);
INSTANTIATE(Mask<OddRows>);
INSTANTIATE(decltype(combine(SoftCap{}, SlidingWindow{})));
#endif
// K/V of 8 bits.
using EightBits = detail::cuda::Quantized<std::int8_t, NoVariant>;
using EightBitFloats = detail::cuda::Quantized<float8_e4m3, SlidingWindow>;
INSTANTIATE(EightBits);
INSTANTIATE(EightBitFloats);
template __global__ void detail::cuda::write_quantized_kernel<std::int8_t, ELEMENT>(
    const detail::cuda::WriteQuantizedArguments<std::int8_t, ELEMENT>);
template __global__ void detail::cuda::write_quantized_kernel<float8_e4m3, ELEMENT>(
    const detail::cuda::WriteQuantizedArguments<float8_e4m3, ELEMENT>);
template __global__ void detail::cuda::merge_states_kernel<ELEMENT>(
    const detail::cuda::MergeStatesArguments<ELEMENT>);
