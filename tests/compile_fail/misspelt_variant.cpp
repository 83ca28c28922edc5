// expect: ChunkAttention::run: this variant has none of the members logit(s, at)
// lines: 25
#include <chunkattn/chunkattn.hpp>
#include <vector>

struct Window {
#ifdef CHUNKATTN_CONTROL
  auto visible(chunkattn::lanes::At at) const { return at.q_idx - at.kv_idx < 8; }
#else
  auto visable(chunkattn::lanes::At at) const { return at.q_idx - at.kv_idx < 8; }
#endif
};

void attend(chunkattn::ChunkAttention<chunkattn::Cpu, 8>& attention,
            const chunkattn::KvView<float>& layer, const chunkattn::LiveView& plan,
            const std::vector<float>& q, std::vector<float>& out) {
  attention.run(layer, plan, Window{}, q, out);
}
