// Sampling: the distribution that is asked for, and random numbers that depend on the seed, the
// choice and the position alone. The seeds of the statistics are fixed, so that luck has no part.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/sampling.hpp"
#include "tests/support/random.hpp"

using namespace serve;

namespace {

/// What sampling stands for: softmax, the most likely tokens up to top_p, renormalised.
std::vector<double> distribution(const std::vector<float>& logits, double temperature,
                                 double top_p) {
  std::vector<double> p(logits.size());
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i)
    sum += p[i] = std::exp((logits[i] - largest) / temperature);
  std::vector<std::size_t> order(p.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return p[a] > p[b]; });
  double kept = 0;
  std::size_t count = 0;
  while (count < order.size() && (count == 0 || kept < top_p * sum)) kept += p[order[count++]];
  for (std::size_t i = 0; i < order.size(); ++i) p[order[i]] *= i < count ? 1 / kept : 0;
  return p;
}

/// Pearson's statistic of counts against what is expected; infinite where the impossible happened.
double chi_square(const std::vector<int>& counts, const std::vector<double>& p) {
  double sum = 0;
  int n = 0;
  for (const int count : counts) n += count;
  for (std::size_t i = 0; i < p.size(); ++i) {
    const double expected = p[i] * n;
    if (expected == 0 && counts[i] > 0) return std::numeric_limits<double>::infinity();
    if (expected > 0) sum += (counts[i] - expected) * (counts[i] - expected) / expected;
  }
  return sum;
}

const std::vector<float> logits{1.0f, -0.5f, 2.0f, 0.25f, 1.5f, -1.0f, 2.0f, 0.0f};

}  // namespace

TEST_CASE("tokens come with their probabilities") {
  constexpr int draws = 100000;
  constexpr double bound = 45;  // 7 degrees of freedom: passed once in 7 million seeds
  Sampler sampler;
  for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, ~std::uint64_t{0}})
    for (const double temperature : {0.3, 1.0, 2.0})
      for (const double top_p : {1.0, 0.95, 0.6, 0.1}) {
        const auto p = distribution(logits, temperature, top_p);
        std::vector<int> by_position(logits.size()), by_seed(logits.size());
        std::vector<int> by_choice(logits.size());
        for (int i = 0; i < draws; ++i) {
          const Sampling sampling{temperature, top_p, seed};
          const auto at = static_cast<std::size_t>(i);
          ++by_position[static_cast<std::size_t>(sampler.sample(logits, sampling, 3, at))];
          ++by_choice[static_cast<std::size_t>(sampler.sample(logits, sampling, i, 17))];
          const Sampling other{temperature, top_p, seed + at};
          ++by_seed[static_cast<std::size_t>(sampler.sample(logits, other, 0, 5))];
        }
        CAPTURE(seed);
        CAPTURE(temperature);
        CAPTURE(top_p);
        CHECK(chi_square(by_position, p) < bound);
        CHECK(chi_square(by_choice, p) < bound);
        CHECK(chi_square(by_seed, p) < bound);
      }
}

TEST_CASE("neighbouring draws know nothing of each other") {
  constexpr int draws = 200000;
  constexpr double bound = 130;  // 63 degrees of freedom: passed once in 500,000 seeds
  const auto cell = [](double u) { return static_cast<std::size_t>(u * 8); };
  for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{12345}}) {
    std::vector<int> positions(64), choices(64), seeds(64);
    for (int i = 0; i < draws; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const double u = uniform_number(seed, 0, at);
      CHECK((u >= 0 && u < 1));
      ++positions[8 * cell(u) + cell(uniform_number(seed, 0, at + 1))];
      ++choices[8 * cell(u) + cell(uniform_number(seed, 1, at))];
      ++seeds[8 * cell(u) + cell(uniform_number(seed + 1, 0, at))];
    }
    const std::vector<double> even(64, 1.0 / 64);
    CHECK(chi_square(positions, even) < bound);
    CHECK(chi_square(choices, even) < bound);
    CHECK(chi_square(seeds, even) < bound);
  }
}

TEST_CASE("the coldest and the narrowest sampling take the greatest logit") {
  test::Random random(1);
  Sampler sampler;
  for (int i = 0; i < 200; ++i) {
    std::vector<float> values(random.index(1000) + 1);
    for (float& value : values) value = static_cast<float>(random.uniform(-9, 9));
    const auto greatest =
        static_cast<int>(std::max_element(values.begin(), values.end()) - values.begin());
    const std::uint64_t seed = random.bits();
    CHECK(sampler.sample(values, {0, 1, seed}, 0, 1) == greatest);
    CHECK(sampler.sample(values, {0, 0.5, seed}, 1, 1) == greatest);
    CHECK(sampler.sample(values, {1, 1e-9, seed}, 2, 1) == greatest);
    const int cold = sampler.sample(values, {1e-300, 1, seed}, 3, 1);
    CHECK(values[static_cast<std::size_t>(cold)] == values[static_cast<std::size_t>(greatest)]);
  }
}

TEST_CASE("logits that are not finite give some token of the vocabulary") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  Sampler sampler;
  for (const auto& values : {std::vector<float>{nan, nan, nan},
                             {1, nan, 2},
                             {-infinity, 0, 1},
                             {infinity, 0, 1},
                             {-infinity, -infinity, -infinity}})
    for (const double top_p : {1.0, 0.5})
      for (std::size_t position = 0; position < 50; ++position) {
        const int token = sampler.sample(values, {1, top_p, 7}, 0, position);
        CHECK((token >= 0 && token < 3));
      }
  for (std::size_t position = 0; position < 100; ++position)  // minus infinity: never
    CHECK(sampler.sample(std::vector<float>{-infinity, 0, 1}, {2, 1, 7}, 0, position) > 0);
}

TEST_CASE("sampling out of range is refused by name") {
  const auto refusal = [](double temperature, double top_p) -> std::string {
    try {
      check_sampling({temperature, top_p, 0});
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  CHECK(refusal(0, 1).empty());
  CHECK(refusal(2, 1e-9).empty());
  CHECK(refusal(-0.1, 1) == "temperature = -0.100000: expected 0 to 2");
  CHECK(refusal(2.5, 1).starts_with("temperature = 2.5"));
  CHECK(refusal(std::nan(""), 1).starts_with("temperature = nan"));
  CHECK(refusal(1, 0).starts_with("top_p = 0.0"));
  CHECK(refusal(1, 1.5) == "top_p = 1.500000: expected more than 0, at most 1");
  CHECK(refusal(1, std::nan("")).starts_with("top_p = nan"));
}
