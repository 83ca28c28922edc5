// Products of bfloat16 K and V as dot products of pairs, in every kind of shape and with variants,
// against the oracle. Dimensions are those that differ in vectors and what is left behind whole
// ones.
#include <doctest/doctest.h>

#include <span>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "support/attention_case.hpp"
#include "support/dot_cases.hpp"
#include "support/variant_cases.hpp"

using namespace chunkattn;
using test::Random;
using Accuracy = CpuOptions::Accuracy;

namespace {

// A backend of check_variant_on(): queries rounded, and as they are.
struct PairModes {
  template <class T>
  using Query = bfloat16;
  static constexpr int head_dim = 64;
  static constexpr int value_dim = 64;
  static constexpr int long_path = 3000;

  std::vector<ChunkAttention<Cpu, 64>> modes;

  PairModes() {
    for (const Accuracy accuracy : {Accuracy::one_term, Accuracy::two_terms})
      for (const int min_lines : {1, 9}) {
        CpuOptions options = test::dot_options(min_lines);
        options.accuracy = accuracy;
        modes.emplace_back(2, options);
      }
  }
  template <class V, class F>
  void each_answer(const test::AttentionCase<bfloat16, bfloat16>& problem, const V& variant,
                   const F& check) {
    for (auto& attention : modes) {
      CAPTURE(static_cast<int>(attention.options().accuracy));
      test::Answer<bfloat16> answer(problem);
      attention.run(problem.kv.view, problem.plan.view(), variant, problem.q, answer.out,
                    {.lse = answer.lse});
      check(std::span<const bfloat16>(answer.out), answer.lse,
            test::rounding_in<bfloat16>(attention));
    }
  }
};

}  // namespace

TEST_CASE("every kind of head and value dimension") {
  test::check_dot_shapes<8, 72, bfloat16, bfloat16>(1, 4);
  test::check_dot_shapes<40, 80, float, bfloat16>(2, 4, Accuracy::one_term);
  test::check_dot_shapes<144, 128, bfloat16, bfloat16>(5, 5);
  test::check_dot_shapes<520, 8, float, bfloat16>(6, 2, Accuracy::one_term);
}

TEST_CASE("variants: logits that change, keys that are hidden") {
  test::check_variant_on<test::SoftCapCase, bfloat16>(PairModes(), 20);
  test::check_variant_on<test::PairCase<test::WindowCase, test::AlibiCase>, bfloat16>(PairModes(),
                                                                                      21);
  test::check_variant_on<test::MaskCase, bfloat16>(PairModes(), 22);
}
