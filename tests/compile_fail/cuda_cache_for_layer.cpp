// Kernels of the other backend take one layer, too.
// each: write run run_with_variant
// expect: write cache.layer(l)
// lines: 20
#include <span>

#include "simt/runtime.hpp"
// After the fakes, which take the place of the CUDA runtime and of ptx.cuh.
#include <chunkattn/cuda.cuh>

using namespace chunkattn;

struct Calls {
  ChunkAttention<Cuda, 128>& attention;
  const LiveView& plan;
  std::span<half> q, k, v, out;
  cudaStream_t stream;

  void write(auto&& layer) { attention.write(layer, plan, k, v, stream); }
  void run(auto&& layer) { attention.run(layer, plan, q, out, {.stream = stream}); }
  void run_with_variant(auto&& layer) {
    attention.run(layer, plan, SoftCap{30}, q, out, {.stream = stream});
  }
};

void call(Calls& calls, KvCache<Cuda, half>& cache) {
#ifdef CHUNKATTN_CONTROL
  calls.CHUNKATTN_EACH(cache.layer(0));
#else
  calls.CHUNKATTN_EACH(cache);
#endif
}
