#include "workload.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "../engine/sampling.hpp"
#include "../model/json_file.hpp"

namespace serve {

namespace {

constexpr std::size_t block_tokens = 512;  // of the trace

/// The token at a position of a text that has a number, one text in each stream. The first three
/// tokens of vocabularies mean something.
int token_at(std::uint64_t text, int stream, std::size_t position, int vocab_size) {
  return 3 + static_cast<int>(uniform_number(text, stream, position) * (vocab_size - 3));
}

}  // namespace

std::vector<Arrival> poisson_load(const PoissonLoad& load) {
  std::vector<Arrival> arrivals(load.requests);
  double time = 0;
  for (std::size_t i = 0; i < load.requests; ++i) {
    if (i > 0) time -= std::log1p(-uniform_number(load.seed, 0, i)) / load.rate;
    arrivals[i].time = time;
    Request& request = arrivals[i].request;
    request.id = i;
    request.max_length = load.prompt_tokens + load.completion_tokens;
    for (std::size_t t = 0; t < load.prompt_tokens; ++t)
      request.prompt.push_back(t < load.shared_tokens
                                   ? token_at(load.seed, 1, t, load.vocab_size)
                                   : token_at(load.seed + 1 + i, 2, t, load.vocab_size));
  }
  return arrivals;
}

std::vector<Arrival> trace_load(const TraceLoad& load) {
  std::ifstream file(load.path);
  if (!file) throw FileError(load.path + ": cannot be opened");
  std::vector<Arrival> arrivals;
  std::string line;
  while (arrivals.size() < load.requests && std::getline(file, line)) {
    const auto where = fmt::format("{}: line {}", load.path, arrivals.size() + 1);
    Arrival arrival;
    Request& request = arrival.request;
    request.id = arrivals.size();
    with_json(where, line, [&](const nlohmann::json& entry) {
      const auto count = [&](const char* name) {
        const auto& value = entry.at(name);
        if (!value.is_number_unsigned() || value > 1u << 30)
          throw FileError(
              fmt::format("{}: {} = {}: expected 0 to 2^30", where, name, value.dump()));
        return value.get<std::size_t>();
      };
      arrival.time = static_cast<double>(count("timestamp")) / 1000 / load.speed;
      const auto blocks = entry.at("hash_ids").get<std::vector<std::uint64_t>>();
      const std::size_t input = count("input_length"), output = count("output_length");
      if (blocks.size() != (input + block_tokens - 1) / block_tokens)
        throw FileError(
            fmt::format("{}: hash_ids has {} blocks: expected one for each {} of {} "
                        "tokens",
                        where, blocks.size(), block_tokens, input));
      const std::size_t block = block_tokens / load.shrink;
      const std::size_t size = std::clamp<std::size_t>(input / load.shrink, 1,
                                                       std::max<std::size_t>(load.max_length, 1));
      for (std::size_t t = 0; t < size; ++t)
        request.prompt.push_back(
            token_at(blocks.empty() ? 0 : blocks[t / block], 3, t % block, load.vocab_size));
      request.max_length =
          std::min(size + std::max<std::size_t>(output / load.shrink, 1), load.max_length);
    });
    arrivals.push_back(std::move(arrival));
  }
  return arrivals;
}

}  // namespace serve
