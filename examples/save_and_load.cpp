// Save and load: the K/V of a prompt goes to a file and comes back in another cache, where the
// prompt need not be computed again.
#include <chunkattn/chunkattn.hpp>
#include <chunkattn/transfer/transfer.hpp>
#include <cmath>
#include <cstdio>
#include <vector>

using namespace chunkattn;
using Tree = PrefixTree<int, 16>;
constexpr int num_layers = 2, num_heads = 2, head_dim = 32, num_tokens = 200;

struct Engine {
  Tree tree;
  KvCache<Cpu, half> cache{tree, {num_layers, num_heads, head_dim}};
  // A row's bits then depend on its own path alone, not on what is computed beside it.
  ChunkAttention<Cpu, head_dim> attention{1, {.reduce = CpuOptions::Reduce::batch_invariant}};
  AttentionPlan plan;

  // Computes what is not computed yet. Returns what attention gives for the last token.
  std::vector<float> compute(Tree::Sequence& sequence) {
    auto step = tree.begin_step();
    std::printf("computes %d of %zu tokens\n", step.add(sequence).row().num_rows, sequence.size());
    const auto view = plan.build(step);
    std::vector<float> x;  // stands in for a model: q, k and v follow from the position
    for (const int position : view.positions())
      for (int i = 0; i < num_heads * head_dim; ++i) x.push_back(std::sin(float(position * i)));
    std::vector<float> out(x.size());
    for (int layer = 0; layer < num_layers; ++layer) {
      attention.write(cache.layer(layer), view, x, x);
      attention.run(cache.layer(layer), view, x, out);
    }
    (void)std::move(step).finish();
    return {out.end() - num_heads * head_dim, out.end()};
  }
};

int main() {
  const std::vector<int> prompt(num_tokens, 7);
  Engine one, other;
  auto sequence = one.tree.insert(prompt);
  const auto computed = one.compute(sequence);

  // The K/V of all layers, position by position, wherever its chunks lie.
  std::vector<std::byte> kv(kv_bytes(one.cache, num_tokens));
  gather_kv(sequence, {0, num_tokens}, one.cache, kv);
  std::FILE* const file = std::tmpfile();
  std::printf("saved %zu bytes\n", std::fwrite(kv.data(), 1, kv.size(), file));

  std::rewind(file);
  std::vector<std::byte> read(kv.size());
  if (std::fread(read.data(), 1, read.size(), file) != read.size()) return 1;
  auto loaded = other.tree.insert(prompt);
  const TokenRange range{0, num_tokens - 1};  // all but the last: its output is what is wanted
  scatter_kv(loaded, range, other.cache, read, {0, num_tokens});
  loaded.mark_loaded(range);
  const bool same = other.compute(loaded) == computed;
  std::printf("the same bits: %s\n", same ? "yes" : "NO");
  return same ? 0 : 1;
}
