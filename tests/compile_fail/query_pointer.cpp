// expect: for a pointer write std::span(pointer, count)
// lines: 25
#include <chunkattn/chunkattn.hpp>
#include <span>
#include <vector>

void attend(chunkattn::ChunkAttention<chunkattn::Cpu, 8>& attention,
            const chunkattn::KvView<float>& layer, const chunkattn::LiveView& plan, const float* q,
            std::size_t count, std::vector<float>& out) {
#ifdef CHUNKATTN_CONTROL
  attention.run(layer, plan, std::span(q, count), out);
#else
  (void)count;
  attention.run(layer, plan, q, out);
#endif
}
