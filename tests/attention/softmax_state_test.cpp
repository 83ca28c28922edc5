// The algebra of partial attention, against the definition: max, sum of exp, weighted values, over
// sets that are cut anywhere and may be empty.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "chunkattn/detail/attention/state.hpp"
#include "support/random.hpp"

using namespace chunkattn;
using doctest::Approx;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

detail::SoftmaxState state_of(const std::vector<float>& logits) {
  if (logits.empty()) return {};
  detail::SoftmaxState state{*std::max_element(logits.begin(), logits.end()), 0.0f};
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
    const detail::SoftmaxState expected = state_of(both);
    const detail::MergedState merged = detail::merge_states(state_of(a), state_of(b));
    CHECK(merged.state.empty() == both.empty());
    CHECK(merged.state.max == expected.max);
    if (!both.empty())
      CHECK(detail::log_sum_exp(merged.state) == Approx(detail::log_sum_exp(expected)));
    // An empty side counts for nothing, whatever it holds.
    const auto weight = [&](const std::vector<float>& side) {
      return side.empty() ? 0.0f : std::exp(state_of(side).max - expected.max);
    };
    CHECK(merged.weight_a == Approx(weight(a)));
    CHECK(merged.weight_b == Approx(weight(b)));
  }
}

TEST_CASE("the empty state") {
  const detail::SoftmaxState empty;
  CHECK(empty.empty());
  CHECK_FALSE(detail::SoftmaxState{0.0f, 1.0f}.empty());
  CHECK(detail::normaliser(empty) == 0.0f);
  CHECK(detail::normaliser({3.0f, 4.0f}) == 0.25f);
  CHECK(detail::empty_lse() == -infinity);
  CHECK(detail::log_sum_exp(empty) == -infinity);
  CHECK(detail::log_sum_exp({2.0f, 1.0f}) == 2.0f);
}

TEST_CASE("a sum of 0 is what makes a state empty, not its maximum") {
  const detail::SoftmaxState some{1.0f, 2.0f};
  for (const detail::SoftmaxState empty :
       {detail::SoftmaxState{50.0f, 0.0f}, detail::SoftmaxState{-50.0f, 0.0f}}) {
    for (const detail::MergedState& merged :
         {detail::merge_states(empty, some), detail::merge_states(some, empty)}) {
      CHECK(merged.state.max == 1.0f);
      CHECK(merged.state.sum == 2.0f);
      CHECK(merged.weight_a + merged.weight_b == 1.0f);
    }
    CHECK(detail::merge_states(empty, some).weight_a == 0.0f);
    CHECK(detail::merge_states(some, empty).weight_b == 0.0f);
  }
}
