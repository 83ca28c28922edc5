// The one file of the engine that compiles kernels: every (head_dim, K/V type) it offers, and no
// more.
#include "dispatch.hpp"

#include <chunkattn/make_attention.hpp>

#include "engine.hpp"

using namespace chunkattn;

std::unique_ptr<AnyAttention> engine::load_attention(int head_dim, Threads& threads) {
  return make_attention<Cpu, HeadDims<64, 128>, ElementTypes<float, half, bfloat16>>(head_dim,
                                                                                     threads);
}
