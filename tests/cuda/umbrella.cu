// Under nvcc the one include brings the CUDA backend, and a step of it compiles.
#include <chunkattn/chunkattn.hpp>
#include <span>

template class chunkattn::ChunkAttention<chunkattn::Cuda, 128>;

void decode(chunkattn::ChunkAttention<chunkattn::Cuda, 128>& attention,
            chunkattn::KvCache<chunkattn::Cuda, chunkattn::half>& cache,
            const chunkattn::LiveView& view, std::span<chunkattn::half> k,
            std::span<chunkattn::half> v, std::span<const chunkattn::half> q,
            std::span<chunkattn::half> out, cudaStream_t stream) {
  attention.prepare(view, stream);
  attention.write(cache.layer(0), view, k, v, stream);
  attention.run(cache.layer(0), view, q, out, {}, stream);
}
