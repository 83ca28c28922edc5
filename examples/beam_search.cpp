// Beam search: fork() the beams that go on, drop the others. What they share is stored once.
#include <algorithm>
#include <chunkattn/chunkattn.hpp>
#include <cmath>
#include <cstdio>
#include <vector>

using namespace chunkattn;
using Beams = std::vector<PrefixTree<int, 8>::Sequence>;
constexpr int vocabulary = 16, width = 3;

int main() {
  PrefixTree<int, 8> tree;
  KvCache<Cpu, float> cache(tree, {.num_layers = 1, .num_kv_heads = 1, .head_dim = vocabulary});
  ChunkAttention<Cpu, vocabulary> attention(1);
  AttentionPlan plan;
  // A step of all beams. Stands in for a model: q, k and v of a row are a function of its token and
  // position, and what attention gives are the logits, [beam][vocabulary].
  const auto logits_of = [&](Beams& beams) {
    auto step = tree.begin_step();
    (void)step.add(beams);
    const auto view = plan.build(step);
    const auto tokens = view.tokens(), positions = view.positions();
    std::vector<float> x, out(tokens.size() * vocabulary), logits;
    for (std::size_t row = 0; row < tokens.size(); ++row)
      for (int i = 1; i <= vocabulary; ++i)
        x.push_back(4 * std::sin(float((tokens[row] + 1) * i + positions[row])));
    attention.write(cache.layer(0), view, x, x);  // makes the copies that forks ask for, too
    attention.run(cache.layer(0), view, x, out);
    auto finished = std::move(step).finish();  // commits nothing: append() says what comes next
    for (const auto& row : finished.rows())
      std::copy_n(&out[row.output_row() * vocabulary], vocabulary, std::back_inserter(logits));
    return logits;
  };

  Beams beams;
  beams.push_back(tree.insert(std::vector<int>(30, 7)));
  for (std::vector<float> scores{0}; beams[0].size() < 36;) {
    auto totals = logits_of(beams);
    for (std::size_t i = 0; i < totals.size(); ++i) totals[i] += scores[i / vocabulary];
    scores.clear();
    Beams best;
    while (best.size() < width) {
      const auto choice = std::ranges::max_element(totals) - totals.begin();
      best.push_back(beams[choice / vocabulary].fork());
      best.back().append(int(choice % vocabulary));
      scores.push_back(std::exchange(totals[choice], -INFINITY));
    }
    beams = std::move(best);
  }
  Beams recomputed;  // the same paths for another tenant, who shares nothing
  for (const auto& beam : beams) {
    for (std::size_t p = 30; p < beam.size(); ++p) std::printf("%d ", beam.token(p));
    std::printf("shares %zu of %zu tokens\n", beam.num_shared(), beam.size());
    recomputed.push_back(tree.insert(beam.tokens(), {.name_space = {.tenant = 1}}));
  }
  const auto close = [](float a, float b) { return std::abs(a - b) < 1e-4f; };
  if (!std::ranges::equal(logits_of(beams), logits_of(recomputed), close)) return 1;
  std::puts("the logits of each are those of its path computed again");
}
