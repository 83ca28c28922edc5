// Queries are float, half or bfloat16; double is a mistake.
// expect: the elements of q, k, v and out must be float, chunkattn::half or chunkattn::bfloat16
// lines: 25
#include <chunkattn/chunkattn.hpp>
#include <vector>

#ifdef CHUNKATTN_CONTROL
using Query = float;
#else
using Query = double;
#endif

void attend(chunkattn::ChunkAttention<chunkattn::Cpu, 8>& attention,
            const chunkattn::KvView<float>& layer, const chunkattn::LiveView& plan,
            const std::vector<Query>& q, std::vector<float>& out) {
  attention.run(layer, plan, q, out);
}
