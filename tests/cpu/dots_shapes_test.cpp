// Products of int8 K and V as dot products of bytes, in every kind of shape and with variants,
// against the oracle. Dimensions are those that differ in vectors and what is left behind whole
// ones.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <span>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "support/attention_case.hpp"
#include "support/dot_cases.hpp"
#include "support/variant_cases.hpp"

using namespace chunkattn;
using test::Random;

namespace {

template <int HeadDim, int ValueDim>
using Attention = ChunkAttention<Cpu, HeadDim, ValueDim>;

}  // namespace

TEST_CASE("every kind of head and value dimension") {
  test::check_dot_shapes<8, 72>(1, 8);
  test::check_dot_shapes<40, 80>(2, 8);
  test::check_dot_shapes<144, 128>(5, 10);
  test::check_dot_shapes<64, 64, bfloat16>(9, 6);
}

TEST_CASE("rows so long that a sum might leave 32 bits are computed in fp32") {
  test::check_dot_shapes<512, 8>(10, 2);
  test::check_dot_shapes<520, 8>(11, 2);
  const Attention<512, 8> longest(1, test::dot_options());
  const Attention<520, 8> longer(1, test::dot_options());
  CHECK(rounding_of<std::int8_t>(longer).p_of_largest == 0);
  const bool dots = test::rounding_in<std::int8_t>(longest).p_of_largest > 0;
  CHECK((rounding_of<std::int8_t>(longest).p_of_largest > 0) == dots);

  // The largest sum there is: 512 products of -128 and the largest query.
  Random random(12);
  test::AttentionCase<std::int8_t> problem(random, test::dot_shape(random), 512, 1, 16, 1.0f, 8);
  std::fill(problem.kv.k.begin(), problem.kv.k.end(), std::int8_t{-128});
  std::fill(problem.q.begin(), problem.q.end(), -0.25f);
  Attention<512, 8> attention(1, test::dot_options(1));
  const Reference reference =
      reference_attention(problem.kv.view, problem.plan.view(), std::span<const float>(problem.q));
  test::Answer<> answer(problem);
  attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out, {.lse = answer.lse});
  const Rounding rounding = test::rounding_in<std::int8_t>(attention);
  CHECK(compare_with_reference(reference, std::span<const float>(answer.out), rounding).ok());
  // The bound is of sums whose errors differ, but those of equal products are all of one sign. In
  // fp32 with 4 lanes there are 128 of them in a row, and it is kept no more.
#if defined(__aarch64__)
  const double most = dots ? 1.0 : 4.0;
#else
  const double most = 1.0;
#endif
  CHECK(test::worst_lse(reference, answer.lse, rounding) <= most);
}

TEST_CASE("variants: logits that change, keys that are hidden") {
  test::check_variant<test::SoftCapCase, std::int8_t>(20);
  test::check_variant<test::PairCase<test::WindowCase, test::AlibiCase>, std::int8_t>(21);
  test::check_variant<test::MaskCase, std::int8_t>(22);
}
