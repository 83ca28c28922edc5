#include "sampling.hpp"

#include <algorithm>
#include <cmath>
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
  Kept kept{candidates_.size(), sum};
  if (sampling.top_p < 1) kept = keep_most_likely(sampling.top_p * sum);
  double rest = uniform_number(sampling.seed, choice, position) * kept.sum;
  for (std::size_t i = 0; i < kept.count; ++i) {
    rest -= candidates_[i].weight;
    if (rest < 0) return candidates_[i].token;
  }
  return greatest;  // rounding left a rest, or logits were not numbers
}

Sampler::Kept Sampler::keep_most_likely(double wanted) {
  // A heap gives them in order, and few are needed of a large vocabulary. Equal weights: the first
  // token first.
  const auto less = [](const Candidate& a, const Candidate& b) {
    return a.weight != b.weight ? a.weight < b.weight : a.token > b.token;
  };
  std::make_heap(candidates_.begin(), candidates_.end(), less);
  Kept kept{0, 0};
  auto end = candidates_.end();
  while (end != candidates_.begin() && (kept.count == 0 || kept.sum < wanted)) {
    std::pop_heap(candidates_.begin(), end, less);
    --end;
    kept.sum += end->weight;
    ++kept.count;
  }
  std::reverse(candidates_.begin(), candidates_.end());
  return kept;
}

void check_sampling(const Sampling& sampling) {
  if (!(sampling.temperature >= 0 && sampling.temperature <= 2))
    throw std::invalid_argument("temperature = " + std::to_string(sampling.temperature) +
                                ": expected 0 to 2");
  if (!(sampling.top_p > 0 && sampling.top_p <= 1))
    throw std::invalid_argument("top_p = " + std::to_string(sampling.top_p) +
                                ": expected more than 0, at most 1");
}

}  // namespace serve
