// A custom variant: a learned bias by distance, as T5 has it, written once as an expression and
// compiled into the kernels of every instruction set.
#include <algorithm>
#include <chunkattn/chunkattn.hpp>
#include <chunkattn/debug/reference.hpp>
#include <cstdio>
#include <random>
#include <vector>

using namespace chunkattn;
constexpr int num_rows = 100, num_heads = 2, head_dim = 32, num_distances = 32;

// Adds what the head has learned for the distance; the last entry is for all that are farther.
struct RelativeBias {
  const float* table;  // [num_heads][num_distances]

  auto logit(auto s, lanes::At at) const {
    const auto distance = lanes::min(at.q_idx - at.kv_idx, num_distances - 1);
    return s + lanes::table(table, at.head * num_distances + distance);
  }
};

int main() {
  PrefixTree<int> tree;
  KvCache<Cpu, float> cache(tree, {1, num_heads, head_dim});
  ChunkAttention<Cpu, head_dim> attention;
  AttentionPlan plan;
  auto sequence = tree.insert(std::vector<int>(num_rows, 7));
  auto step = tree.begin_step();
  (void)step.add(sequence);
  const auto view = plan.build(step);

  std::vector<float> q(num_rows * num_heads * head_dim), k(q), v(q), out(q), learned;
  std::mt19937 bits;
  std::normal_distribution<float> normal;
  for (auto* tensor : {&q, &k, &v})
    for (float& x : *tensor) x = normal(bits);
  for (const float slope : {-0.5f, 0.1f})  // head 0 prefers what is near, head 1 what is far
    for (int distance = 0; distance < num_distances; ++distance)
      learned.push_back(slope * float(distance));
  // The first element of V is the key's position, so that of `out` is where a row looks on average.
  for (std::size_t line = 0; line < num_rows * num_heads; ++line)
    v[line * head_dim] = float(line / num_heads);

  attention.write(cache.layer(0), view, k, v);
  attention.run(cache.layer(0), view, RelativeBias{learned.data()}, q, out);
  for (int head = 0; head < num_heads; ++head)
    std::printf("head %d of row 99 looks at %.0f on average\n", head,
                out[(99 * num_heads + head) * head_dim]);

  // The definition, one logit at a time in double precision.
  ReferenceVariant definition;
  definition.logit = [&](double s, LogitIndex at) {
    return s + learned[at.head * num_distances + std::min(at.q_idx - at.kv_idx, num_distances - 1)];
  };
  const auto expected = reference_attention<float, float>(cache.layer(0), view, q, {}, definition);
  const bool ok = compare_with_reference<float>(expected, out).ok();
  std::printf("%zu outputs: %s\n", out.size(), ok ? "correct" : "WRONG");
  return ok ? 0 : 1;
}
