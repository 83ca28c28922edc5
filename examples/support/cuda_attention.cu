#include <stdexcept>
#include <string>

#include "cuda_attention.cuh"

std::unique_ptr<examples::CudaAttention> examples::make_cuda_attention(const CudaShape& shape) {
  if (shape.head_dim <= 16) return std::make_unique<CudaAttentionOf<16>>(shape);
  if (shape.head_dim <= 64) return std::make_unique<CudaAttentionOf<64>>(shape);
  if (shape.head_dim <= 128) return std::make_unique<CudaAttentionOf<128>>(shape);
  throw std::invalid_argument("head_dim = " + std::to_string(shape.head_dim) +
                              ": on a GPU this program is built for at most 128");
}
