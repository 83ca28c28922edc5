#include "sampling.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "../model/forward.hpp"

namespace serve {

namespace {

/// One round of splitmix64: a bijection that spreads every bit.
std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

double uniform_number(std::uint64_t seed, int choice, std::size_t position) {
  const std::uint64_t stream = mixed(mixed(seed) ^ static_cast<std::uint64_t>(choice));
  return static_cast<double>(mixed(stream ^ position) >> 11) * 0x1p-53;
}

int Sampler::sample(std::span<const float> logits, const Sampling& sampling, int choice,
                    std::size_t position) {
  const int greatest = argmax(logits);
  if (sampling.temperature <= 0) return greatest;
  const double largest = logits[static_cast<std::size_t>(greatest)];
  candidates_.resize(logits.size());
  double sum = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double weight = std::exp((logits[i] - largest) / sampling.temperature);
    candidates_[i] = {weight, static_cast<int>(i)};
    sum += weight;
  }
  const Kept kept = narrowed(sampling, sum);
  double rest = uniform_number(sampling.seed, choice, position) * kept.sum;
  for (std::size_t i = 0; i < kept.count; ++i) {
    rest -= candidates_[i].weight;
    if (rest < 0) return candidates_[i].token;
  }
  return greatest;  // rounding left a rest, or logits were not numbers
}

/// Temperature has shaped the weights already. Then min_p, top_k, and top_p of what these leave.
Sampler::Kept Sampler::narrowed(const Sampling& sampling, double sum) {
  Kept kept{candidates_.size(), sum};
  if (sampling.min_p > 0) kept = keep_least(sampling.min_p);  // the greatest weight is 1
  const auto most = static_cast<std::size_t>(sampling.top_k);
  if (most > 0 && most < kept.count) {
    kept = keep_most_likely(std::numeric_limits<double>::infinity(), most);
    candidates_.resize(kept.count);
  }
  if (sampling.top_p < 1) kept = keep_most_likely(sampling.top_p * kept.sum, kept.count);
  return kept;
}

Sampler::Kept Sampler::keep_least(double weight) {
  std::erase_if(candidates_, [weight](const Candidate& one) { return one.weight < weight; });
  Kept kept{candidates_.size(), 0};
  for (const Candidate& one : candidates_) kept.sum += one.weight;
  return kept;
}

Sampler::Kept Sampler::keep_most_likely(double wanted, std::size_t most) {
  // A heap gives them in order, and few are needed of a large vocabulary. Equal weights: the first
  // token first.
  const auto less = [](const Candidate& a, const Candidate& b) {
    return a.weight != b.weight ? a.weight < b.weight : a.token > b.token;
  };
  std::make_heap(candidates_.begin(), candidates_.end(), less);
  Kept kept{0, 0};
  auto end = candidates_.end();
  while (end != candidates_.begin() && kept.count < most &&
         (kept.count == 0 || kept.sum < wanted)) {
    std::pop_heap(candidates_.begin(), end, less);
    --end;
    kept.sum += end->weight;
    ++kept.count;
  }
  std::reverse(candidates_.begin(), candidates_.end());
  return kept;
}

std::span<const float> Sampler::adjusted(std::span<const float> logits, const Request& request,
                                         const SoFar& so_far) {
  if (request.logit_bias.empty() && so_far.counts.empty() && so_far.prompt.empty() &&
      so_far.too_early.empty())
    return logits;
  adjusted_.assign(logits.begin(), logits.end());
  const auto logit = [this](int token) -> float& {
    return adjusted_[static_cast<std::size_t>(token)];
  };
  for (const LogitBias& one : request.logit_bias) logit(one.token) += one.bias;
  const Sampling& sampling = request.sampling;
  const auto repeat = [&](int token) {
    const auto penalty = static_cast<float>(sampling.repetition_penalty);
    logit(token) = logit(token) > 0 ? logit(token) / penalty : logit(token) * penalty;
  };
  if (sampling.repetition_penalty != 1) {
    for (const int token : so_far.prompt) repeat(token);
    for (const auto& [token, count] : so_far.counts)
      if (!std::binary_search(so_far.prompt.begin(), so_far.prompt.end(), token)) repeat(token);
  }
  for (const auto& [token, count] : so_far.counts)
    logit(token) -=
        static_cast<float>(count * sampling.frequency_penalty + sampling.presence_penalty);
  for (const int token : so_far.too_early) logit(token) = -std::numeric_limits<float>::infinity();
  return adjusted_;
}

std::vector<int> each_once(std::span<const int> tokens) {
  std::vector<int> sorted(tokens.begin(), tokens.end());
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  return sorted;
}

namespace {

/// From a token to its log-probability.
auto logprob_by(std::span<const float> logits) {
  const double largest = logits[static_cast<std::size_t>(argmax(logits))];
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  return [logits, largest, of_all = std::log(sum)](int token) {
    return static_cast<float>(logits[static_cast<std::size_t>(token)] - largest - of_all);
  };
}

}  // namespace

std::vector<float> logprobs_of(std::span<const float> logits, std::span<const int> tokens) {
  std::vector<float> logprobs(tokens.size());
  std::transform(tokens.begin(), tokens.end(), logprobs.begin(), logprob_by(logits));
  return logprobs;
}

std::vector<TokenLogprob> logprobs_of(std::span<const float> logits, int token, int most) {
  const auto scored = [logprob = logprob_by(logits)](int one) {
    return TokenLogprob{one, logprob(one)};
  };
  std::vector<int> tokens(logits.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  const auto key =
      [logits](int one) {  // of what is no number: the least, which keeps them in order
        const float logit = logits[static_cast<std::size_t>(one)];
        return std::isnan(logit) ? -std::numeric_limits<float>::infinity() : logit;
      };
  const auto count = std::min(tokens.size(), static_cast<std::size_t>(most));
  std::partial_sort(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(count),
                    tokens.end(),
                    [&](int a, int b) { return key(a) != key(b) ? key(a) > key(b) : a < b; });
  std::vector<TokenLogprob> logprobs{scored(token)};
  for (std::size_t i = 0; i < count; ++i) logprobs.push_back(scored(tokens[i]));
  return logprobs;
}

void check_sampling(const Sampling& sampling) {
  const auto check = [](const char* name, double value, bool good, const char* expected) {
    if (!good)
      throw std::invalid_argument(std::string(name) + " = " + std::to_string(value) +
                                  ": expected " + expected);
  };
  const auto within = [](double value, double least, double most) {
    return value >= least && value <= most;
  };
  const Sampling& s = sampling;
  check("temperature", s.temperature, within(s.temperature, 0, 2), "0 to 2");
  check("top_p", s.top_p, s.top_p > 0 && s.top_p <= 1, "more than 0, at most 1");
  check("top_k", s.top_k, s.top_k >= 0, "0, which is all, or more");
  check("min_p", s.min_p, within(s.min_p, 0, 1), "0 to 1");
  check("frequency_penalty", s.frequency_penalty, within(s.frequency_penalty, -2, 2), "-2 to 2");
  check("presence_penalty", s.presence_penalty, within(s.presence_penalty, -2, 2), "-2 to 2");
  check("repetition_penalty", s.repetition_penalty,
        s.repetition_penalty > 0 && s.repetition_penalty <= 100, "more than 0, at most 100");
}

}  // namespace serve
