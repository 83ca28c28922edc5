// An engine by itself over a small model of random weights, and what it says of prompts that are
// scored.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "model/load.hpp"
#include "tests/support/random.hpp"

namespace test {

inline std::vector<int> drawn_tokens(Random& random, int count) {
  std::vector<int> tokens(static_cast<std::size_t>(count));
  for (int& token : tokens) token = random.uniform(3, 299);
  return tokens;
}

inline std::vector<int> joined(std::vector<int> first, const std::vector<int>& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// Of each token of a prompt, its own log-probability and the most likely ones.
using Scores = std::vector<std::vector<serve::TokenLogprob>>;

/// To the bit.
inline bool is_same(const Scores& a, const Scores& b) {
  const auto is_one = [](const serve::TokenLogprob& x, const serve::TokenLogprob& y) {
    return x.token == y.token && x.logprob == y.logprob;
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](const auto& x, const auto& y) {
    return std::equal(x.begin(), x.end(), y.begin(), y.end(), is_one);
  });
}

/// A request for the log-probabilities of a prompt, which generates nothing.
inline serve::Request scored(std::vector<int> prompt, int logprobs = 3, std::size_t from = 1) {
  serve::Request request;
  request.prompt = std::move(prompt);
  request.prompt_logprobs = true;
  request.logprobs = logprobs;
  request.scored_from = from;
  return request;
}

struct ScoringEngine {
  static serve::EngineOptions options() {
    serve::EngineOptions options;
    options.chunk_size = 8;
    options.max_chunks = 120;
    options.reduce = chunkattn::CpuOptions::Reduce::batch_invariant;
    options.preempt = serve::Preempt::swap;
    return options;
  }
  static serve::Config shape(int vocabulary) {
    return {64, 172, 2, 8, 4, vocabulary, 256, true, 1e-5f, 10000.0f};
  }
  /// Of three layers all but each `global_every`-th have a window.
  static serve::Config windowed(int window, int global_every) {
    serve::Config config = shape(300);
    config.num_layers = 3;
    config.window = window;
    config.global_every = global_every;
    return config;
  }

  chunkattn::ThreadPool pool{1};
  serve::Model model;
  serve::Products products{pool, serve::ProductKind::own};
  std::unique_ptr<serve::Engine> engine;
  serve::RequestId last_id = 0;

  explicit ScoringEngine(const serve::EngineOptions& options,
                         const serve::Config& config = shape(300))
      : model(serve::random_model(config, serve::Element::fp32, 7, pool)),
        engine(serve::make_engine(model, products, options)) {}

  /// Another engine over the same model.
  void restart(const serve::EngineOptions& options) {
    engine.reset();
    engine = serve::make_engine(model, products, options);
  }
  /// Of requests that generate nothing, unless they say how much; and how many rows that took.
  std::pair<std::vector<Scores>, std::size_t> run_all(std::vector<serve::Request> requests) {
    std::map<serve::RequestId, std::size_t> places;
    for (serve::Request& request : requests) {
      request.id = ++last_id;
      request.max_length = std::max(request.max_length, request.prompt.size());
      const std::size_t place = places.size();
      places[request.id] = place;
      engine->submit(std::move(request));
    }
    const std::size_t before = engine->stats().rows;
    while (engine->step(0)) continue;
    std::vector<Scores> scores(places.size());
    for (const serve::Event& event : engine->take_events())
      if (!event.prompt_logprobs.empty()) scores[places.at(event.id)] = event.prompt_logprobs;
    return {scores, engine->stats().rows - before};
  }
  std::pair<Scores, std::size_t> run(const serve::Request& request) {
    auto [scores, rows] = run_all({request});
    return {scores.front(), rows};
  }
};

}  // namespace test
