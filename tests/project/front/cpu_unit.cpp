// The unit that compiles the CPU's kernels.
#include <chunkattn/runtime/make_attention.hpp>

#include "attention.hpp"

using namespace chunkattn;

std::unique_ptr<AnyAttention> cpu_attention(int head_dim) {
  return make_attention<Cpu, HeadDims<64, 128>, ElementTypes<half>,
                        Variants<NoVariant, SlidingWindow>>(head_dim, 2);
}
