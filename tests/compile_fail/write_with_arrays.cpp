// Bare arrays say nothing about the step that they were made for: LiveView::unchecked() says that
// there is none.
// expect: PlanView
// expect: LiveView
#include <chunkattn/chunkattn.hpp>
#include <vector>

void store(chunkattn::ChunkAttention<chunkattn::Cpu, 8>& attention,
           const chunkattn::KvView<float>& layer, const chunkattn::PlanView& arrays,
           const std::vector<float>& k) {
#ifdef CHUNKATTN_CONTROL
  attention.write(layer, chunkattn::LiveView::unchecked(arrays), k, k);
#else
  attention.write(layer, arrays, k, k);
#endif
}
