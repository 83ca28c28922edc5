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
    std::vector<int> tokens;        // the prompt and what has been sampled
    chunkattn::TokenRange range{};  // this step's positions
    int logits_row = -1;            // among the rows that ask for logits
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
  std::vector<int> tokens, positions, logit_rows;
  std::size_t joined = 0;

  std::size_t longest_prompt = 0;
  for (const Request& request : requests) {
    longest_prompt = std::max(longest_prompt, request.prompt.size());
    if (request.prompt.size() > static_cast<std::size_t>(model.config.max_positions))
      throw std::invalid_argument("a prompt of " + std::to_string(request.prompt.size()) +
                                  " tokens: the model has " +
                                  std::to_string(model.config.max_positions) + " positions");
  }
  // A prefix that another request is still to write is there in time if that one writes all of it
  // in the same step; otherwise wait for it.
  const bool whole_prompts = longest_prompt <= options.prefill_chunk;

  for (int step = 0; joined < requests.size() || !live.empty(); ++step) {
    for (; joined < requests.size() && (requests[joined].join_step <= step || live.empty());
         ++joined) {
      const std::vector<int>& prompt = requests[joined].prompt;
      live.push_back({joined, tree.insert(prompt, {.max_reuse = prompt.size() - 1}), prompt});
      completions[joined].joined = step;
    }

    plan.clear();
    tokens.clear();
    positions.clear();
    logit_rows.clear();
    for (Live& one : live) {
      const std::size_t prompt_size = requests[one.request].prompt.size();
      const bool decoding = one.tokens.size() > prompt_size;
      one.range = {};
      one.logits_row = -1;
      if (!whole_prompts && one.sequence.num_pending() != 0) continue;
      one.range =
          decoding ? one.sequence.reserve(1) : one.sequence.next_uncomputed(options.prefill_chunk);
      plan.add(one.sequence, one.range);
      for (int p = one.range.begin; p < one.range.end(); ++p) {
        tokens.push_back(one.tokens[static_cast<std::size_t>(p)]);
        positions.push_back(p);
      }
      if (!decoding)
        completions[one.request].computed += static_cast<std::size_t>(one.range.length);
      if (static_cast<std::size_t>(one.range.end()) == one.tokens.size()) {
        one.logits_row = static_cast<int>(logit_rows.size());
        logit_rows.push_back(static_cast<int>(tokens.size()) - 1);
      }
    }
    if (tokens.empty()) throw std::logic_error("a step without rows");
    plan.update(tree);

    const auto logits_by = [&](Attention& attention) {
      return forward(model, executor, tokens, positions, logit_rows,
                     [&](int layer, std::span<const float> q, std::span<const float> k,
                         std::span<const float> v,
                         std::span<float> out) { attention.run(layer, plan, q, k, v, out); });
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
    for (Live& one : live) {
      if (one.range.length == 0) continue;
      const Request& request = requests[one.request];
      if (one.tokens.size() > request.prompt.size())
        one.sequence.commit(one.tokens.back());
      else
        one.sequence.commit(one.range);
      const auto limit = static_cast<std::size_t>(
          std::clamp(request.steps, 1, static_cast<int>(model.config.max_positions)));
      if (one.logits_row >= 0) {
        const int next = argmax(std::span<const float>(logits).subspan(
            static_cast<std::size_t>(one.logits_row) * vocabulary, vocabulary));
        if (next == Tokenizer::bos || one.tokens.size() > limit)
          one.done = true;
        else
          one.tokens.push_back(next);
      }
      if (one.tokens.size() > limit) one.done = true;
      if (one.done) {
        one.tokens.resize(std::min(one.tokens.size(), limit + 1));
        completions[one.request].tokens = std::move(one.tokens);
        completions[one.request].left = step;
      }
    }
    std::erase_if(live, [](const Live& one) { return one.done; });  // a handle that dies leaves
  }
  stats.plan_rebuilds = plan.num_rebuilds();
  return completions;
}

}  // namespace llama
