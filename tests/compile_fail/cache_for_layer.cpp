// Kernels take one layer.
// each: write run run_with_variant
// expect: write cache.layer(l)
// lines: 20
#include <chunkattn/chunkattn.hpp>
#include <vector>

using namespace chunkattn;

struct Calls {
  ChunkAttention<Cpu, 8>& attention;
  const LiveView& plan;
  std::vector<float>&q, &k, &v, &out;

  void write(auto&& layer) { attention.write(layer, plan, k, v); }
  void run(auto&& layer) { attention.run(layer, plan, q, out); }
  void run_with_variant(auto&& layer) { attention.run(layer, plan, SoftCap{30}, q, out); }
};

void call(Calls& calls, KvCache<Cpu, half>& cache) {
#ifdef CHUNKATTN_CONTROL
  calls.CHUNKATTN_EACH(cache.layer(0));
#else
  calls.CHUNKATTN_EACH(cache);
#endif
}
