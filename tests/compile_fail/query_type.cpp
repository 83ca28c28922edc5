// Queries are float, half or bfloat16; integers are a mistake.
// expect: QoRange
#include <chunkattn/chunkattn.hpp>
#include <vector>

#ifdef CHUNKATTN_CONTROL
using Query = float;
#else
using Query = int;
#endif

void attend(chunkattn::ChunkAttention<chunkattn::Cpu, 8>& attention,
            const chunkattn::KvView<float>& layer, const chunkattn::LiveView& plan,
            const std::vector<Query>& q, std::vector<float>& out) {
  attention.run(layer, plan, q, out);
}
