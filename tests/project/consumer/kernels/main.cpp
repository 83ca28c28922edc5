// Attention whose kernels may be compiled elsewhere (CHUNKATTN_EXTERN_KERNELS), without a variant
// and with one of its own: prints the bits of what it computes.
#include <chunkattn/chunkattn.hpp>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#if !defined(HEAD_DIM)
#define HEAD_DIM 64
#endif
#if !defined(ELEMENT)
#define ELEMENT half
#endif

using namespace chunkattn;

struct EveryOther {
  auto visible(lanes::At at) const { return at.q_idx - at.kv_idx != 1; }
};

// An executor that the library does not know.
struct Backwards {
  int concurrency() const { return 2; }
  template <class F>
  void parallel_for(int n, F&& f) {
    while (n > 0) f(--n);
  }
};

int main() {
  constexpr int head_dim = HEAD_DIM, value_dim = HEAD_DIM == 64 ? 32 : HEAD_DIM, heads = 2;
  PrefixTree<int> tree;
  KvCache<Cpu, ELEMENT> cache(
      tree, {.num_layers = 1, .num_kv_heads = heads, .head_dim = head_dim, .value_dim = value_dim});
  Backwards executor;
  ChunkAttention<Cpu, head_dim, value_dim, Backwards> attention(executor);
  AttentionPlan plan;
  std::vector<PrefixTree<int>::Sequence> batch;
  for (int i = 0; i < 3; ++i) {
    std::vector<int> prompt(150, 7);
    prompt.resize(150 + 10 * static_cast<std::size_t>(i), i);
    batch.push_back(tree.insert(prompt, {.share_pending = false}));
  }
  auto step = tree.begin_step();
  if (!step.add(batch)) return 1;
  const auto view = plan.build(step);
  const std::size_t rows = view.tokens().size();
  std::uint32_t state = 1;
  const auto random = [&](std::size_t size) {
    std::vector<float> values(size);
    for (float& x : values)
      x = static_cast<float>((state = state * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f;
    return values;
  };
  const auto q = random(rows * 2 * heads * head_dim), k = random(rows * heads * head_dim),
             v = random(rows * heads * value_dim);
  std::vector<float> out(rows * 2 * heads * value_dim, 99.0f);
  attention.write(cache.layer(0), view, k, v);
  const auto print = [&](const char* what) {
    std::uint64_t hash = 1469598103934665603u;
    for (const float x : out) {
      std::uint32_t bits;
      std::memcpy(&bits, &x, sizeof(bits));
      hash = (hash ^ bits) * 1099511628211u;
    }
    std::printf("%s: %zu numbers, hash %016llx\n", what, out.size(),
                static_cast<unsigned long long>(hash));
  };
  attention.run(cache.layer(0), view, q, out);
  print("plain");
#if !defined(PLAIN_ALONE)  // whose kernels every unit compiles by itself
  attention.run(cache.layer(0), view, EveryOther{}, q, out);
  print("a variant of its own");
#endif
  return 0;
}
