// First step: two prompts with a common beginning, attention for both. What they share is stored
// once and computed once.
#include <chunkattn/chunkattn.hpp>
#include <chunkattn/debug/reference.hpp>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

using namespace chunkattn;
constexpr int num_qo_heads = 4, num_kv_heads = 2, head_dim = 32;

int main() {
  PrefixTree<int, 16> tree;  // knows tokens, finds what they have in common; 16 to a chunk
  KvCache<Cpu, float> cache(tree, {1, num_kv_heads, head_dim});  // one layer
  ChunkAttention<Cpu, head_dim> attention;
  AttentionPlan plan;

  std::vector<int> prompt(100);
  std::iota(prompt.begin(), prompt.end(), 0);
  auto first = tree.insert(prompt);
  prompt[90] = -1;  // from here on the second one differs
  auto second = tree.insert(prompt);

  auto step = tree.begin_step();
  for (auto* sequence : {&first, &second})
    if (const auto added = step.add(*sequence))
      std::printf("%zu tokens, of which this step computes %d\n", sequence->size(),
                  added.row().num_rows);
  const auto view = plan.build(step);

  // q, k and v of view.tokens() come from your model, which rotates q and k by view.positions().
  const auto rows = static_cast<std::size_t>(view.num_rows);
  std::vector<float> q(rows * num_qo_heads * head_dim), out(q.size());
  std::vector<float> k(rows * num_kv_heads * head_dim), v(k.size());
  std::mt19937 bits;
  std::normal_distribution<float> normal;
  for (auto* tensor : {&q, &k, &v})
    for (float& x : *tensor) x = normal(bits);

  attention.write(cache.layer(0), view, k, v);
  attention.run(cache.layer(0), view, q, out);

  // The same from the definition, in double precision.
  const auto expected = reference_attention<float, float>(cache.layer(0), view, q);
  const bool ok = compare_with_reference<float>(expected, out).ok();
  std::printf("%zu outputs: %s\n", out.size(), ok ? "correct" : "WRONG");

  auto finished = std::move(step).finish();
  for (const auto& row : finished.rows()) {  // your model samples from the logits of this row
    finished.commit(row, 1000 + row.output_row());
    std::printf("row %d gives the next token\n", row.output_row());
  }
  std::printf("%zu and %zu tokens lie in %zu chunks of 16\n", first.size(), second.size(),
              tree.stats().used_chunks);
  return ok ? 0 : 1;
}
