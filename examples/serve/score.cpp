// serve score: what a model says of tokens that are given, for comparing with other programs.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../support/options.hpp"
#include "commands.hpp"
#include "loaded_model.hpp"
#include "model/forward.hpp"
#include "model/json_file.hpp"

namespace serve {

namespace {

struct Scores {
  std::vector<int> greatest;  ///< the token of the greatest logit at each position
  std::vector<double> log_p;  ///< of the token that follows, at each position but the last
};

double log_probability(std::span<const float> logits, int token) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  return logits[static_cast<std::size_t>(token)] - largest - std::log(sum);
}

/// One sequence by itself, through the library as the engine uses it.
/// \param all_logits  gets those of all positions, if it is open
Scores score(const std::vector<int>& tokens, const Model& model, Products& products, KvType kv,
             chunkattn::CpuOptions::Reduce reduce, std::ofstream& all_logits) {
  constexpr std::size_t step_tokens = 256;  // each with all of its logits
  chunkattn::PrefixTree<std::int32_t, 64> tree;
  chunkattn::AttentionPlan plan;
  const auto attention =
      make_attention(kv, tree, model.config, products.executor(), {.reduce = reduce});
  Forward forward(model, products);
  auto sequence = tree.insert(tokens);
  const auto vocabulary = static_cast<std::size_t>(model.config.vocab_size);
  Scores scores;
  while (scores.greatest.size() < tokens.size()) {
    auto step = tree.begin_step();
    (void)step.add(sequence, step_tokens);
    const auto view = plan.build(step);
    std::vector<int> rows(static_cast<std::size_t>(step.num_rows()));
    for (std::size_t r = 0; r < rows.size(); ++r) rows[r] = static_cast<int>(r);
    const auto logits = forward.run(
        view.tokens(), view.positions(), rows,
        [&](int layer, std::span<const float> q, std::span<const float> k, std::span<const float> v,
            std::span<float> out) { attention->run(layer, view, q, k, v, out); });
    if (all_logits.is_open())
      all_logits.write(reinterpret_cast<const char*>(logits.data()),
                       static_cast<std::streamsize>(logits.size_bytes()));
    for (std::size_t r = 0; r < rows.size(); ++r) {
      const auto row = logits.subspan(r * vocabulary, vocabulary);
      scores.greatest.push_back(argmax(row));
      if (const std::size_t next = scores.greatest.size(); next < tokens.size())
        scores.log_p.push_back(log_probability(row, tokens[next]));
    }
    (void)std::move(step).finish();
  }
  return scores;
}

std::vector<std::vector<int>> read_sequences(const std::string& path, const Config& config) {
  const auto sequences = with_json(path, read_text(path), [](const nlohmann::json& json) {
    return json.get<std::vector<std::vector<int>>>();
  });
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i].empty() ||
        sequences[i].size() > static_cast<std::size_t>(config.max_positions))
      throw FileError(fmt::format("{}: [{}] = {} tokens: expected 1 to {}", path, i,
                                  sequences[i].size(), config.max_positions));
    for (const int token : sequences[i])
      if (token < 0 || token >= config.vocab_size)
        throw FileError(fmt::format("{}: [{}] has token {}: expected less than {}", path, i, token,
                                    config.vocab_size));
  }
  return sequences;
}

}  // namespace

int score(int argc, char** argv) {
  ModelArguments arguments;
  std::string tokens_file, logits_file;
  examples::Options options(
      "serve score",
      "prints, for each position of sequences of tokens, the greatest logit's token "
      "and the log-probability of the token that follows");
  arguments.add_to(options);
  options.text("--tokens", "FILE.json", "a list of lists of tokens", tokens_file);
  options.text("--logits", "FILE", "gets the logits of all positions, as floats", logits_file);
  if (!options.parse(argc, argv)) return 0;
  if (tokens_file.empty()) throw examples::UsageError("expected --tokens FILE.json");
  const ProductKind kind = product_kind(arguments);
  chunkattn::ThreadPool executor(arguments.threads);
  const LoadedModel loaded = load(arguments, executor);
  Products products(executor, kind);
  try_out(products, loaded.model);
  std::ofstream logits;
  if (!logits_file.empty()) logits.open(logits_file, std::ios::binary);
  auto all = nlohmann::json::array();
  for (const auto& tokens : read_sequences(tokens_file, loaded.model.config)) {
    const Scores scores = score(tokens, loaded.model, products, kv_type(arguments, loaded.model),
                                reduce_of(arguments), logits);
    all.push_back({{"greatest", scores.greatest}, {"log_p", scores.log_p}});
  }
  if (!logits_file.empty() && !logits.flush()) throw FileError(logits_file + ": cannot be written");
  fmt::print("{}\n", all.dump());
  return 0;
}

}  // namespace serve
