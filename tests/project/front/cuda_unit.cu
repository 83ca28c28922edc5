// The unit that compiles the GPU's kernels.
#include <cuda_fp16.h>

#include <chunkattn/runtime/make_attention.hpp>

#include "attention.hpp"

using namespace chunkattn;

std::unique_ptr<AnyAttention> cuda_attention(int head_dim, int max_rows, int num_qo_heads,
                                             int num_kv_heads) {
  CudaOptions::Limits limits;
  limits.max_rows = max_rows;
  limits.num_qo_heads = num_qo_heads;
  limits.num_kv_heads = num_kv_heads;
  return make_attention<Cuda, HeadDims<64, HeadSize(192, 128)>, ElementTypes<chunkattn::half>,
                        Variants<NoVariant, SlidingWindow>>(head_dim, limits);
}
