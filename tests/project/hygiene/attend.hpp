// A small but complete use of the library, for programs that are built in unusual ways: three
// sequences share a prompt, are prefilled and decode one token; the result is compared with plain
// attention in double.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace hygiene {

inline constexpr int head_dim = 16, num_kv_heads = 2, num_qo_heads = 4, shared = 45, batch = 3;

using Tree = chunkattn::PrefixTree<int, 16>;
using Cache = chunkattn::KvCache<chunkattn::Cpu, float>;

// K, V and Q are functions of (token, position, head, dimension): nothing has to be remembered.
inline float value(int kind, int token, std::size_t position, int head, int i) {
  std::uint32_t x = static_cast<std::uint32_t>(kind * 7919 + token * 104729 + head * 1299709 + i) +
                    static_cast<std::uint32_t>(position) * 15485863u;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return static_cast<float>(x & 0xffffu) / 32768.0f - 1.0f;
}

// The computation itself, a template so that each unit that calls it with its own ISA tag has its
// own: what is tested is that the library's functions are not merged, not that this one is not.
template <class Isa>
struct Attend {
  chunkattn::ChunkAttention<chunkattn::Cpu, head_dim> attention{1};
  chunkattn::AttentionPlan plan;
  std::vector<float> k, v, q, out;

  // Computes an open step; the outputs are [num_rows][num_qo_heads][head_dim].
  void compute(Tree::Step& step, Cache& cache) {
    const auto view = plan.build(step);
    const std::vector<int> tokens = view.tokens(), positions = view.positions();
    k.clear();
    v.clear();
    q.clear();
    for (std::size_t row = 0; row < tokens.size(); ++row) {
      const auto position = static_cast<std::size_t>(positions[row]);
      for (int h = 0; h < num_kv_heads; ++h)
        for (int i = 0; i < head_dim; ++i) {
          k.push_back(value(1, tokens[row], position, h, i));
          v.push_back(value(2, tokens[row], position, h, i));
        }
      for (int h = 0; h < num_qo_heads; ++h)
        for (int i = 0; i < head_dim; ++i)
          q.push_back(2.0f * value(3, tokens[row], position, h, i));
    }
    out.assign(q.size(), 0.0f);
    attention.write(cache.layer(0), view, std::span<const float>(k), std::span<const float>(v));
    attention.run(cache.layer(0), view, std::span<const float>(q), std::span<float>(out));
  }

  // Joins, prefills and decodes one step; the outputs of that step,
  // [batch][num_qo_heads][head_dim].
  std::vector<float> run(Tree& tree, Cache& cache, std::vector<Tree::Sequence>& sequences) {
    for (int s = 0; s < batch; ++s) {
      std::vector<int> prompt;
      for (int t = 0; t < shared; ++t) prompt.push_back(t);
      for (int t = 0; t < 5 * s; ++t) prompt.push_back(100 * s + t);
      sequences.push_back(tree.insert(prompt));
      Tree::Step step = tree.begin_step();
      (void)step.add(sequences.back());
      compute(step, cache);
      Tree::Finished finished = std::move(step).finish();
      for (const auto& row : finished.rows()) finished.commit(row, 1000);
    }
    Tree::Step step = tree.begin_step();
    for (auto& sequence : sequences) (void)step.add(sequence);
    compute(step, cache);
    (void)std::move(step).finish();
    return out;
  }

  // The same step by the formula: the largest difference.
  double error(const std::vector<Tree::Sequence>& sequences) const {
    double worst = 0;
    for (std::size_t s = 0; s < sequences.size(); ++s)
      for (int h = 0; h < num_qo_heads; ++h) {
        const int kv_head = h / (num_qo_heads / num_kv_heads);
        const std::size_t n = sequences[s].size();
        std::vector<double> weight(n);
        double sum = 0;
        for (std::size_t p = 0; p < n; ++p) {
          double dot = 0;
          for (int i = 0; i < head_dim; ++i)
            dot += 2.0 * static_cast<double>(value(3, 1000, n - 1, h, i)) *
                   static_cast<double>(value(1, sequences[s].token(p), p, kv_head, i));
          weight[p] = std::exp(dot / std::sqrt(double{head_dim}));
          sum += weight[p];
        }
        for (int i = 0; i < head_dim; ++i) {
          double expected = 0;
          for (std::size_t p = 0; p < n; ++p)
            expected += weight[p] / sum *
                        static_cast<double>(value(2, sequences[s].token(p), p, kv_head, i));
          const auto index = (s * num_qo_heads + static_cast<std::size_t>(h)) * head_dim +
                             static_cast<std::size_t>(i);
          const double difference = std::fabs(expected - static_cast<double>(out[index]));
          if (!(difference <= worst)) worst = difference;
        }
      }
    return worst;
  }
};

}  // namespace hygiene
