// Under nvcc the one include brings the CUDA backend, and a step of it compiles.
// CUDA's own element types do for ours, and its `half` does not get in the way.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <chunkattn/chunkattn.hpp>
#include <span>

#if !defined(HEAD_DIM)
#define HEAD_DIM 128
#endif

template class chunkattn::ChunkAttention<chunkattn::Cuda, HEAD_DIM>;

void decode(chunkattn::ChunkAttention<chunkattn::Cuda, HEAD_DIM>& attention,
            chunkattn::KvCache<chunkattn::Cuda, chunkattn::half>& cache,
            const chunkattn::LiveView& view, std::span<chunkattn::half> k,
            std::span<chunkattn::half> v, std::span<const chunkattn::half> q,
            std::span<chunkattn::half> out, cudaStream_t stream) {
  attention.prepare(view, stream);
  attention.write(cache.layer(0), view, k, v, stream);
  attention.run(cache.layer(0), view, q, out, {.stream = stream});
}

template <class T>
void decode_as_cuda_names_it(chunkattn::ChunkAttention<chunkattn::Cuda, HEAD_DIM>& attention,
                             chunkattn::KvCache<chunkattn::Cuda, T>& cache,
                             const chunkattn::LiveView& view, std::span<T> k, std::span<const T> q,
                             std::span<T> out, cudaStream_t stream) {
  attention.write(cache.layer(0), view, k, k, stream);
  attention.run(cache.layer(0), view, q, out, {.stream = stream});
  attention.run(chunkattn::make_kv_view(k.data(), k.data(), {}), view, k, out, {.stream = stream});
}
template void decode_as_cuda_names_it(chunkattn::ChunkAttention<chunkattn::Cuda, HEAD_DIM>&,
                                      chunkattn::KvCache<chunkattn::Cuda, __half>&,
                                      const chunkattn::LiveView&, std::span<__half>,
                                      std::span<const __half>, std::span<__half>, cudaStream_t);
template void decode_as_cuda_names_it(chunkattn::ChunkAttention<chunkattn::Cuda, HEAD_DIM>&,
                                      chunkattn::KvCache<chunkattn::Cuda, __nv_bfloat16>&,
                                      const chunkattn::LiveView&, std::span<__nv_bfloat16>,
                                      std::span<const __nv_bfloat16>, std::span<__nv_bfloat16>,
                                      cudaStream_t);
