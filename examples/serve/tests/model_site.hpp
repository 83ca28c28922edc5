// A server over a small model of random weights, and what that model says by itself.
#pragma once

#include <cmath>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "http_setup.hpp"
#include "model/forward.hpp"
#include "model/load.hpp"

namespace test {

/// A server over random weights. What the engine refers to stands before it.
struct ModelSite {
  chunkattn::ThreadPool pool{1};
  serve::Model model = serve::random_model({64, 172, 2, 8, 4, 300, 256, true, 1e-5f, 10000.0f},
                                           serve::Element::fp32, 7, pool);
  serve::Products products{pool, serve::ProductKind::own};
  Site site;

  explicit ModelSite(serve::HttpOptions http = {}, const serve::EngineOptions& engine = options(),
                     serve::ServiceOptions service = {})
      : site(serve::make_engine(model, products, engine), std::move(http), std::move(service)) {}

  static serve::EngineOptions options() {
    serve::EngineOptions options;
    options.chunk_size = 8;
    options.max_chunks = 120;
    options.reduce = chunkattn::CpuOptions::Reduce::batch_invariant;
    options.preempt = serve::Preempt::swap;
    return options;
  }
};

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
