// Kernels take the view that a plan built, which knows whether it is up to date; not the plan.
// expect: AttentionPlan
// expect: LiveView
#include <chunkattn/chunkattn.hpp>
#include <vector>

#ifdef CHUNKATTN_CONTROL
using Plan = chunkattn::LiveView;
#else
using Plan = chunkattn::AttentionPlan;
#endif

void attend(chunkattn::ChunkAttention<chunkattn::Cpu, 8>& attention,
            const chunkattn::KvView<float>& layer, const Plan& plan, const std::vector<float>& q,
            std::vector<float>& out) {
  attention.run(layer, plan, q, out);
}
