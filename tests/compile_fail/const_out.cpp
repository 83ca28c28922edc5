// expect: ChunkAttention::run: out is written, so its elements must not be const
// lines: 25
#include <chunkattn/chunkattn.hpp>
#include <vector>

#ifdef CHUNKATTN_CONTROL
using Out = std::vector<float>;
#else
using Out = const std::vector<float>;
#endif

void attend(chunkattn::ChunkAttention<chunkattn::Cpu, 8>& attention,
            const chunkattn::KvView<float>& layer, const chunkattn::LiveView& plan,
            const std::vector<float>& q, Out& out) {
  attention.run(layer, plan, q, out);
}
