// Speculative drafts: a step computes the last letter and guesses of what follows it. Guesses that
// the model would have made itself are kept: the same text in fewer steps.
#include <algorithm>
#include <chunkattn/chunkattn.hpp>
#include <cstdio>
#include <string>
#include <vector>

using namespace chunkattn;
constexpr char alphabet[] = " abcdefghijklmnopqrstuvwxyz";  // a letter stands at letter % 32
constexpr int head_dim = 32;

// Goes on with `text` up to 44 letters and prints what each step gives.
std::string write_on(std::string text, std::size_t num_drafts) {
  PrefixTree<char, 16> tree;
  KvCache<Cpu, float> cache(tree, {.num_layers = 1, .num_kv_heads = 1, .head_dim = head_dim});
  ChunkAttention<Cpu, head_dim> attention(1, {.sm_scale = 20});
  AttentionPlan plan;
  auto sequence = tree.insert(text);
  while (text.size() < 44) {
    // The guess: what came next where the last letter stood before.
    const auto before = text.rfind(text.back(), text.size() - 2);
    const std::string drafts = text.substr(before + 1, num_drafts), path = text + drafts;
    auto step = tree.begin_step();
    const auto row = step.add(sequence, path.size(), {.tokens = drafts}).row();
    const auto view = plan.build(step);

    // Stands in for a model: K names the letter before a row's and V the row's own, so attention
    // counts what came next where the row's letter stood before.
    std::vector<float> q(std::size_t(row.num_rows * head_dim)), k(q), v(q), out(q);
    for (int i = 0, p = row.position; i < row.num_rows; ++i, ++p) {
      q[i * head_dim + path[p] % 32] = v[i * head_dim + path[p] % 32] = 1;
      if (p > 0) k[i * head_dim + path[p - 1] % 32] = 1;
    }
    attention.write(cache.layer(0), view, k, v);
    attention.run(cache.layer(0), view, q, out);
    const auto likeliest = [&](int of_row) {
      const auto counts = out.begin() + of_row * head_dim;
      return alphabet[std::max_element(counts, counts + head_dim) - counts];
    };

    std::string outputs{likeliest(row.output_row())};
    for (const char draft : drafts) {
      if (draft != outputs.back()) break;  // wrong, and so is what stands after it
      outputs += likeliest(row.output_row() + int(outputs.size()));
    }
    auto finished = std::move(step).finish();
    finished.commit(row, outputs);  // the right drafts, and one letter more
    text += outputs;
    std::printf("%s|", outputs.c_str());
  }
  std::printf(" %d steps\n", int(tree.stats().steps));
  return text.substr(0, 44);
}

int main() {
  const auto plain = write_on("row row row your boat ", 0);
  const auto drafted = write_on("row row row your boat ", 4);
  return drafted == plain ? 0 : 1;
}
