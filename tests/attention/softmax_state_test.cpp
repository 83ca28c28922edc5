// The algebra of partial attention, against the definition: max, sum of exp, weighted values, over
// sets that are cut anywhere and may be empty.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "chunkattn/attention/state.hpp"
#include "support/random.hpp"

using namespace chunkattn;
using doctest::Approx;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

SoftmaxState state_of(const std::vector<float>& logits) {
  if (logits.empty()) return {};
  SoftmaxState state{*std::max_element(logits.begin(), logits.end()), 0.0f};
  for (float logit : logits) state.sum += std::exp(logit - state.max);
  return state;
}

}  // namespace

TEST_CASE("two states merge into that of both sets, whichever holds the maximum") {
  test::Random random(71);
  for (int round = 0; round < 200; ++round) {
    std::vector<float> a(static_cast<std::size_t>(random.uniform(0, 5)));
    std::vector<float> b(static_cast<std::size_t>(random.uniform(0, 5)));
    random.fill(std::span(a), 3.0f);
    random.fill(std::span(b), 3.0f);
    std::vector<float> both = a;
    both.insert(both.end(), b.begin(), b.end());
    const SoftmaxState expected = state_of(both);
    const MergedState merged = merge_states(state_of(a), state_of(b));
    CHECK(merged.state.empty() == both.empty());
    CHECK(merged.state.max == expected.max);
    if (!both.empty()) CHECK(log_sum_exp(merged.state) == Approx(log_sum_exp(expected)));
    // An empty side counts for nothing, whatever it holds.
    const auto weight = [&](const std::vector<float>& side) {
      return side.empty() ? 0.0f : std::exp(state_of(side).max - expected.max);
    };
    CHECK(merged.weight_a == Approx(weight(a)));
    CHECK(merged.weight_b == Approx(weight(b)));
  }
}

TEST_CASE("the empty state") {
  const SoftmaxState empty;
  CHECK(empty.empty());
  CHECK_FALSE(SoftmaxState{0.0f, 1.0f}.empty());
  CHECK(normaliser(empty) == 0.0f);
  CHECK(normaliser({3.0f, 4.0f}) == 0.25f);
  CHECK(empty_lse() == -infinity);
  CHECK(log_sum_exp(empty) == -infinity);
  CHECK(log_sum_exp({2.0f, 1.0f}) == 2.0f);
}

TEST_CASE("a sum of 0 is what makes a state empty, not its maximum") {
  const SoftmaxState some{1.0f, 2.0f};
  for (const SoftmaxState empty : {SoftmaxState{50.0f, 0.0f}, SoftmaxState{-50.0f, 0.0f}}) {
    for (const MergedState& merged : {merge_states(empty, some), merge_states(some, empty)}) {
      CHECK(merged.state.max == 1.0f);
      CHECK(merged.state.sum == 2.0f);
      CHECK(merged.weight_a + merged.weight_b == 1.0f);
    }
    CHECK(merge_states(empty, some).weight_a == 0.0f);
    CHECK(merge_states(some, empty).weight_b == 0.0f);
  }
}

TEST_CASE("normalised results merge, and an empty one leaves the other as it is") {
  test::Random random(72);
  constexpr int dim = 24;
  for (int round = 0; round < 100; ++round) {
    // One more element than the head has, which must not change.
    std::vector<float> a(dim + 1), b(dim + 1);
    random.fill(std::span(a));
    random.fill(std::span(b));
    float lse_a = round % 4 == 1 ? -infinity : round % 4 == 3 ? -3.1e38f : 4 * random.normal();
    const float lse_b = round % 8 == 2   ? -infinity
                        : round % 8 == 6 ? -3.2e38f
                                         : 4 * random.normal();
    const bool no_a = lse_a < -1e38f, no_b = lse_b < -1e38f;
    std::vector<float> expected = a;
    float lse = lse_a;
    if (!no_b) {
      const float weight_a = no_a ? 0.0f : std::exp(lse_a), weight_b = std::exp(lse_b);
      for (std::size_t i = 0; i < dim; ++i)
        expected[i] = ((no_a ? 0.0f : weight_a * a[i]) + weight_b * b[i]) / (weight_a + weight_b);
      lse = std::log(weight_a + weight_b);
    }
    merge_outputs(a.data(), lse_a, b.data(), lse_b, dim);
    for (std::size_t i = 0; i <= dim; ++i) CHECK(a[i] == Approx(expected[i]).epsilon(1e-4));
    if (no_a && no_b)
      CHECK(lse_a <= -3.0e38f);  // whatever a holds then
    else
      CHECK(lse_a == Approx(lse).epsilon(1e-4));
  }
}

TEST_CASE("an lse of -3e38 marks an empty side, one above it does not") {
  float out = 5.0f, lse = 1.0f;
  const float other = 7.0f;
  const float nothing = std::numeric_limits<float>::quiet_NaN();  // is not looked at
  merge_outputs(&out, lse, &nothing, -3.0e38f, 1);
  CHECK(out == 5.0f);
  CHECK(lse == 1.0f);
  lse = -3.0e38f;
  merge_outputs(&out, lse, &other, -2.9e38f, 1);  // the only side that holds anything
  CHECK(out == 7.0f);
  CHECK(lse == -2.9e38f);
  out = 5.0f;
  merge_outputs(&out, lse, &other, -2.9e38f, 1);  // two of equal weight
  CHECK(out == 6.0f);
}
