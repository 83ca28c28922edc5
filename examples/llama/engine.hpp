// Continuous batching: requests join while others decode, all live ones advance together, and each
// leaves when it is done. One step is one forward pass over whatever rows it has.
#pragma once

#include <algorithm>
#include <chunkattn/chunkattn.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attention.hpp"
#include "model.hpp"
#include "tokenizer.hpp"

namespace llama {

struct Request {
  std::vector<int> prompt;  ///< begins with bos
  int steps = 256;          ///< positions to run, the prompt's included
  int join_step = 0;
};

struct Completion {
  std::vector<int> tokens;   ///< prompt and generated ones
  std::size_t computed = 0;  ///< prompt tokens that went through the model; the rest were cached
  int joined = 0, left = 0;  ///< steps
};

struct ServeOptions {
  chunkattn::Sharing sharing = chunkattn::Sharing::token;
  chunkattn::Reduce reduce = chunkattn::Reduce::deterministic;
  std::string kv = "fp32";
  std::string device = "cpu";      ///< "cuda": attention in fp16 on a GPU, logits held against the
                                   ///< CPU's, which is fed the same tokens
  std::size_t prefill_chunk = 64;  ///< prompt tokens of one request in one step
};

struct ServeStats {
  int steps = 0;
  std::size_t rows = 0, peak_live = 0, peak_slots = 0;
  std::uint64_t plan_rebuilds = 0;
  std::size_t compared_logits = 0;  ///< with the CPU's
  double max_logit_difference = 0;  ///< among them
};

/// Query tokens of one step at most.
inline int max_rows(std::span<const Request> requests, std::size_t prefill_chunk) {
  std::size_t rows = 0;
  for (const Request& request : requests)
    rows += std::clamp<std::size_t>(request.prompt.size(), 1, prefill_chunk);
  return static_cast<int>(rows);
}

/// Serves all requests greedily; completions stand in the order of the requests.
template <int ChunkSize>
std::vector<Completion> serve(const Model& model, std::span<const Request> requests,
                              chunkattn::ThreadPool& executor, const ServeOptions& options,
                              ServeStats& stats) {
  using Tree = chunkattn::PrefixTree<std::int32_t, ChunkSize>;
  struct Live {
    std::size_t request;
    typename Tree::Sequence sequence;
    std::size_t logits = 0;  // among the rows of this step that ask for logits
    bool done = false;
  };

  Tree tree({}, {.sharing = options.sharing});
  const std::unique_ptr<Attention> on_cpu =
      make_attention(options.kv, tree, model.config, executor, {.reduce = options.reduce});
  std::unique_ptr<Attention> on_gpu;
  if (options.device == "cuda")
    on_gpu = std::make_unique<AttentionOnGpu<Tree>>(tree, model.config,
                                                    max_rows(requests, options.prefill_chunk));
  chunkattn::AttentionPlan plan;
  std::vector<Completion> completions(requests.size());
  std::vector<Live> live;
  std::vector<int> logit_rows;
  std::vector<Live*> in_step;  // by StepRow::index
  std::size_t joined = 0;

  for (const Request& request : requests)
    if (request.prompt.size() > static_cast<std::size_t>(model.config.max_positions))
      throw std::invalid_argument("a prompt of " + std::to_string(request.prompt.size()) +
                                  " tokens: the model has " +
                                  std::to_string(model.config.max_positions) + " positions");

  for (int number = 0; joined < requests.size() || !live.empty(); ++number) {
    for (; joined < requests.size() && (requests[joined].join_step <= number || live.empty());
         ++joined) {
      live.push_back({joined, tree.insert(requests[joined].prompt)});
      completions[joined].joined = number;
    }

    typename Tree::Step step = tree.begin_step();
    in_step.clear();
    logit_rows.clear();
    for (Live& one : live) {
      const auto added = step.add(one.sequence, options.prefill_chunk);
      if (!added) continue;  // another request has part of its prompt still to compute
      const chunkattn::StepRow& row = added.row();
      in_step.push_back(&one);
      one.logits = logit_rows.size();
      if (row.has_output) logit_rows.push_back(row.output_row());
      if (one.sequence.size() == requests[one.request].prompt.size())
        completions[one.request].computed += static_cast<std::size_t>(row.num_rows);
    }
    const auto view = plan.build(step);
    if (!view) throw std::logic_error("a step without rows");
    const std::vector<int> tokens = view.tokens(), positions = view.positions();

    const auto logits_by = [&](Attention& attention) {
      return forward(model, executor, tokens, positions, logit_rows,
                     [&](int layer, std::span<const float> q, std::span<const float> k,
                         std::span<const float> v,
                         std::span<float> out) { attention.run(layer, view, q, k, v, out); });
    };
    const std::vector<float> logits = logits_by(on_gpu != nullptr ? *on_gpu : *on_cpu);
    if (on_gpu != nullptr) {
      const std::vector<float> expected = logits_by(*on_cpu);
      for (std::size_t i = 0; i < logits.size(); ++i) {
        const double difference = std::abs(static_cast<double>(logits[i]) - expected[i]);
        stats.max_logit_difference =
            std::max(stats.max_logit_difference,
                     std::isnan(difference) ? std::numeric_limits<double>::infinity() : difference);
      }
      stats.compared_logits += logits.size();
    }

    stats.rows += tokens.size();
    stats.peak_live = std::max(stats.peak_live, live.size());
    stats.peak_slots = std::max(stats.peak_slots, tree.num_slots());
    ++stats.steps;
    const auto vocabulary = static_cast<std::size_t>(model.config.vocab_size);
    typename Tree::Finished finished = std::move(step).finished();
    for (const chunkattn::StepRow& row : finished.rows()) {
      Live& one = *in_step[static_cast<std::size_t>(row.index)];
      const int next =
          argmax(std::span<const float>(logits).subspan(one.logits * vocabulary, vocabulary));
      if (next == Tokenizer::bos)
        one.done = true;
      else
        finished.commit(row, next);  // the next token to compute
    }
    for (Live* one : in_step) {
      const auto limit = static_cast<std::size_t>(std::clamp(
          requests[one->request].steps, 1, static_cast<int>(model.config.max_positions)));
      if (one->sequence.size() > limit) one->done = true;
      if (!one->done) continue;
      Completion& completion = completions[one->request];
      completion.tokens = one->sequence.tokens();
      completion.tokens.resize(std::min(completion.tokens.size(), limit + 1));
      completion.left = number;
    }
    std::erase_if(live, [](const Live& one) { return one.done; });  // a handle that dies leaves
  }
  stats.plan_rebuilds = plan.num_rebuilds();
  return completions;
}

}  // namespace llama
