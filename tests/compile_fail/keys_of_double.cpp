// expect: the elements of q, k, v and out must be float, chunkattn::half or chunkattn::bfloat16
// lines: 25
#include <chunkattn/chunkattn.hpp>
#include <vector>

#ifdef CHUNKATTN_CONTROL
using Real = float;
#else
using Real = double;
#endif

void store(chunkattn::ChunkAttention<chunkattn::Cpu, 8>& attention,
           const chunkattn::KvView<float>& layer, const chunkattn::LiveView& plan,
           const std::vector<Real>& k, const std::vector<float>& v) {
  attention.write(layer, plan, k, v);
}
