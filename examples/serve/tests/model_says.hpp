// What a model says of tokens that are computed by themselves.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/attention.hpp"
#include "model/forward.hpp"

namespace test {

/// Log-probabilities of all tokens behind each of a sequence, which is computed by itself.
inline std::vector<std::vector<float>> own_distributions(const serve::Model& model,
                                                         serve::Products& products,
                                                         const std::vector<int>& tokens) {
  chunkattn::PrefixTree<std::int32_t, 64> tree({}, {}, {.retains = false});
  chunkattn::AttentionPlan plan;
  const auto attention =
      serve::make_attention(serve::KvType::fp32, tree, model.config, products.executor(),
                            {.reduce = chunkattn::CpuOptions::Reduce::batch_invariant});
  serve::Forward forward(model, products);
  auto sequence = tree.insert(tokens);
  auto step = tree.begin_step();
  (void)step.add(sequence, tokens.size());
  const auto view = plan.build(step);
  std::vector<int> rows(tokens.size());
  for (std::size_t r = 0; r < rows.size(); ++r) rows[r] = static_cast<int>(r);
  const auto logits = forward.run(
      view.tokens(), view.positions(), rows,
      [&](int layer, std::span<const float> q, std::span<const float> k, std::span<const float> v,
          std::span<float> out) { attention->run(layer, view, q, k, v, out); });
  std::vector<std::vector<float>> distributions;
  const auto vocabulary = static_cast<std::size_t>(model.config.vocab_size);
  for (std::size_t r = 0; r < tokens.size(); ++r) {
    const auto row = logits.subspan(r * vocabulary, vocabulary);
    double sum = 0;
    for (const float logit : row) sum += std::exp(static_cast<double>(logit));
    std::vector<float>& all = distributions.emplace_back();
    for (const float logit : row) all.push_back(static_cast<float>(logit - std::log(sum)));
  }
  (void)std::move(step).finish();
  return distributions;
}

/// What the model says of each token from the second on.
inline std::vector<float> own_logprobs(const serve::Model& model, serve::Products& products,
                                       const std::vector<int>& tokens) {
  const auto all = own_distributions(model, products, tokens);
  std::vector<float> logprobs;
  for (std::size_t r = 0; r + 1 < tokens.size(); ++r)
    logprobs.push_back(all[r][static_cast<std::size_t>(tokens[r + 1])]);
  return logprobs;
}

}  // namespace test
