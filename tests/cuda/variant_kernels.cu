// Instantiates the attention kernel with each variant of the library, for the checks of compiled
// code: nvcc -DHEAD_DIM=128 -DVALUE_DIM=128 -DELEMENT=half -cubin variant_kernels.cu
#include "chunkattn/detail/cuda/kernels.cuh"

using namespace chunkattn;

/// Functions of a place, as a user writes them for both backends.
struct Nearer {
  CHUNKATTN_HD float operator()(Place at) const {
    return -0.01f * static_cast<float>(at.query - at.key);
  }
};
struct OddRows {
  CHUNKATTN_HD bool operator()(Place at) const { return at.row % 2 == 1 || at.key < at.head; }
};

#define INSTANTIATE(...)                                                     \
  template __global__ void                                                   \
  detail::cuda::attention_kernel<ELEMENT, HEAD_DIM, VALUE_DIM, __VA_ARGS__>( \
      const detail::cuda::AttentionArguments<ELEMENT, __VA_ARGS__>)

INSTANTIATE(SoftCap);
INSTANTIATE(SlidingWindow);
INSTANTIATE(Sinks);
INSTANTIATE(Alibi);
INSTANTIATE(Bias<Nearer>);
INSTANTIATE(Mask<OddRows>);
INSTANTIATE(decltype(combine(SoftCap{}, SlidingWindow{})));
