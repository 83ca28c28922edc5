// NaN in, NaN out, and nowhere else: a NaN in q, K or V reaches every query-head row that sees it,
// in every mode and element type, and no row that does not. Infinite logits likewise have one
// answer.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <span>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "chunkattn/detail/attention/state.hpp"
#include "support/nan_place.hpp"

using namespace chunkattn;
using test::Random;
using test::Share;

#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__

TEST_CASE("NaN and infinities") {
  std::printf("skipped: NaN and infinities: -ffinite-math-only says there are none\n");
}

#else

namespace {

constexpr double some_long = 0.3;

test::RandomPlanOptions random_shape(Random& random, double long_ones = some_long) {
  test::RandomPlanOptions options;
  options.share = random.pick({Share::none, Share::some, Share::all});
  const bool few = random.chance(long_ones);  // long and narrow: cut along KV
  options.num_sequences = random.uniform(1, few ? 2 : 12);
  options.chunk_size = random.pick({4, 16, 64});
  options.max_length = few ? 3000 : random.pick({5, 90});
  options.max_queries = random.pick({1, 1, 5, 40});
  return options;
}

template <int HeadDim>
std::vector<ChunkAttention<Cpu, HeadDim>> every_mode() {
  std::vector<ChunkAttention<Cpu, HeadDim>> modes;
  modes.emplace_back(2);
  modes.emplace_back(
      2, CpuOptions{.reduce = CpuOptions::Reduce::spin_lock, .tuning = {.min_tasks = 32}});
  modes.emplace_back(2, CpuOptions{.reduce = CpuOptions::Reduce::batch_invariant});
  return modes;
}

/// One NaN at a time; returns how many results were merged from parts.
template <int HeadDim, class T, class X = float>
int check_nan(std::uint64_t stream, int cases, double long_ones = some_long) {
  Random random(stream);
  auto modes = every_mode<HeadDim>();
  int merged = 0;
  for (int i = 0; i < test::scaled(cases); ++i) {
    const int group = random.pick({1, 2, 4, 16});
    const int kv_heads = random.uniform(1, 2);
    const test::AttentionCase<T, X> clean(random, random_shape(random, long_ones), HeadDim,
                                          kv_heads, group);
    for (const auto where : {test::NanPlace::q, test::NanPlace::k, test::NanPlace::v}) {
      const test::Storage<T> kv = test::copy_of<T>(clean.kv);
      std::vector<X> queries = clean.q;
      const test::NanPlace nan(random, where, clean.plan, kv.view, std::span(queries));
      for (auto& attention : modes) {
        CAPTURE(HeadDim);
        CAPTURE(element_name<X>());
        CAPTURE(where);
        CAPTURE(static_cast<int>(attention.options().reduce));
        test::Answer<X> before(clean), answer(clean);
        for (X& value : answer.out) value = from_float<X>(7.0f);  // a NaN must be written
        for (float& value : answer.lse) value = 7.0f;
        attention.run(kv.view, clean.plan.view(), queries, answer.out, {.lse = answer.lse});
        merged += schedule_of(attention).num_partial_rows() > 0 ? 1 : 0;
        CHECK(test::wrong_elements(nan, clean.plan, clean.reference, kv_heads,
                                   std::span<const X>(answer.out), answer.lse,
                                   test::rounding_in<T>(attention)) == 0);
        if (attention.options().reduce == CpuOptions::Reduce::spin_lock) continue;
        attention.run(clean.kv.view, clean.plan.view(), clean.q, before.out);
        CHECK(test::changed_lines(nan, clean.plan, kv_heads, kv_heads * group, HeadDim,
                                  std::span<const X>(before.out),
                                  std::span<const X>(answer.out)) == 0);
      }
    }
  }
  return merged;
}

}  // namespace

// Few kernels on purpose: under sanitizers each takes the compiler half a minute.
TEST_CASE("a NaN reaches every query-head row that sees it, and no other") {
  int merged = 0;
  merged += check_nan<64, float>(1, 12);
  merged += check_nan<24, float>(2, 6);
  merged += check_nan<64, half>(3, 8);
  merged += check_nan<128, bfloat16>(4, 8);
  merged += check_nan<64, std::int8_t>(5, 8);
  merged += check_nan<64, float8_e4m3>(7, 8);
  merged += check_nan<40, bfloat16, bfloat16>(6, 6);
  for (int more = 0; merged == 0 && more < 50; ++more)
    merged += check_nan<64, float>(8 + more, 1, 1);
  CHECK(merged > 0);  // partial results carried NaN too
}

TEST_CASE("K and V of NaN that write() rounds and quantises stay NaN") {
  Random random(11);
  test::RandomPlanOptions options;
  options.share = Share::none;
  options.num_sequences = 3;
  options.max_length = 40;
  const auto check = [&]<class T>(T) {
    constexpr int dim = 64;
    const test::AttentionCase<T> problem(random, options, dim, 1, 2);
    const test::RandomPlan& plan = problem.plan;
    ChunkAttention<Cpu, dim> attention(1);
    for (const bool in_k : {true, false}) {
      const auto rows = static_cast<std::size_t>(plan.num_rows());
      std::vector<float> k(rows * dim), v(rows * dim);
      random.fill(std::span(k));
      random.fill(std::span(v));
      for (float& value : std::span(in_k ? k : v).first(dim)) value = test::some_nan<float>(random);
      attention.write(problem.kv.view, plan.view(), k, v);
      test::Answer<> answer(problem);
      attention.run(problem.kv.view, plan.view(), problem.q, answer.out, {.lse = answer.lse});
      for (std::size_t token = 0; token < rows; ++token) {
        for (std::size_t i = 0; i < std::size_t{2} * dim; ++i)
          CHECK(std::isnan(answer.out[token * 2 * dim + i]) == (token == 0));
        for (std::size_t h = 0; h < 2; ++h)
          CHECK(std::isnan(answer.lse[token * 2 + h]) == (token == 0 && in_k));
      }
    }
  };
  check(0.0f);
  check(half{});
  check(std::int8_t{});
  check(float8_e4m3{});
}

TEST_CASE_TEMPLATE("infinite logits: -inf has no weight, +inf gives NaN", T, float, half,
                   bfloat16) {
  Random random(std::is_same_v<T, float> ? 12 : std::is_same_v<T, half> ? 14 : 15);
  constexpr int dim = 64;
  const float inf = std::numeric_limits<float>::infinity();
  auto modes = every_mode<dim>();
  for (int i = 0; i < test::scaled(6); ++i) {
    test::AttentionCase<T> problem(random, random_shape(random), dim, 1, random.pick({1, 4, 8}));
    const test::RandomPlan& plan = problem.plan;
    // Element 0 of q is positive, so an infinite element 0 of K makes the logit infinite.
    for (std::size_t at = 0; at < problem.q.size(); at += dim)
      problem.q[at] = 0.5f + std::abs(problem.q[at]);
    const KvView<T>& kv = problem.kv.view;

    // Some tokens at -inf: as if they were not there. The oracle agrees by its own arithmetic.
    for (int n = 0; n < 3; ++n) {
      const std::size_t row = random.index(plan.row_token.size());
      const int kv_len = plan.row_kv_len[row];
      if (kv_len < 8) continue;
      const Piece slot = test::place_of(plan, row, random.uniform(1, kv_len - 1));
      kv.k_row(slot.chunk, 0, slot.begin)[0] = from_float<T>(-inf);
    }
    const Reference some = reference_attention(kv, plan.view(), std::span<const float>(problem.q));
    for (auto& attention : modes) {
      test::Answer<> answer(problem);
      attention.run(kv, plan.view(), problem.q, answer.out, {.lse = answer.lse});
      const Rounding rounding = test::rounding_in<T>(attention);
      CHECK(compare_with_reference(some, std::span<const float>(answer.out), rounding).ok());
      CHECK(test::worst_lse(some, answer.lse, rounding) <= 1.0);
    }

    // All tokens of a row at -inf: the answer of a row that sees nothing.
    const std::size_t row = random.index(plan.row_token.size());
    for (int position = 0; position < plan.row_kv_len[row]; ++position) {
      const Piece slot = test::place_of(plan, row, position);
      kv.k_row(slot.chunk, 0, slot.begin)[0] = from_float<T>(-inf);
    }
    const Reference all = reference_attention(kv, plan.view(), std::span<const float>(problem.q));
    const auto heads = static_cast<std::size_t>(problem.num_qo_heads);
    const std::size_t first = static_cast<std::size_t>(plan.row_token[row]) * heads;
    for (auto& attention : modes) {
      test::Answer<> answer(problem);
      attention.run(kv, plan.view(), problem.q, answer.out, {.lse = answer.lse});
      for (std::size_t at = first * dim; at < (first + heads) * dim; ++at)
        CHECK(answer.out[at] == 0.0f);
      for (std::size_t line = first; line < first + heads; ++line) CHECK(answer.lse[line] == -inf);
      const Rounding rounding = test::rounding_in<T>(attention);
      CHECK(compare_with_reference(all, std::span<const float>(answer.out), rounding).ok());
      CHECK(test::worst_lse(all, answer.lse, rounding) <= 1.0);
    }

    // One at +inf: inf - inf.
    const Piece slot = test::place_of(plan, row, random.uniform(0, plan.row_kv_len[row] - 1));
    kv.k_row(slot.chunk, 0, slot.begin)[0] = from_float<T>(inf);
    for (auto& attention : modes) {
      test::Answer<> answer(problem);
      for (float& value : answer.out) value = 7.0f;
      for (float& value : answer.lse) value = 7.0f;
      attention.run(kv, plan.view(), problem.q, answer.out, {.lse = answer.lse});
      for (std::size_t at = first * dim; at < (first + heads) * dim; ++at)
        CHECK(std::isnan(answer.out[at]));
      for (std::size_t line = first; line < first + heads; ++line)
        CHECK(std::isnan(answer.lse[line]));
    }
  }
}

TEST_CASE("the algebra: NaN is neither empty nor lost") {
  const float nans[] = {std::bit_cast<float>(0x7fc00000u), std::bit_cast<float>(0xffc00000u),
                        std::bit_cast<float>(0xffffffffu)};
  for (const float nan : nans) {
    CHECK(!detail::SoftmaxState{0.0f, nan}.empty());
    CHECK(std::isnan(detail::normaliser({0.0f, nan})));
    CHECK(std::isnan(detail::log_sum_exp({0.0f, nan})));
    const detail::SoftmaxState whole{1.0f, 2.0f};
    for (const detail::SoftmaxState broken :
         {detail::SoftmaxState{0.0f, nan}, detail::SoftmaxState{nan, nan}}) {
      CHECK(std::isnan(merge_states(whole, broken).state.sum));
      CHECK(std::isnan(merge_states(broken, whole).state.sum));
      CHECK(std::isnan(merge_states(broken, {}).state.sum));
      CHECK(std::isnan(merge_states({}, broken).state.sum));
    }
  }
}

TEST_CASE("the oracle's report: NaN must meet NaN") {
  Random random(13);
  test::RandomPlanOptions options;
  options.num_sequences = 1;
  options.share = Share::none;
  test::AttentionCase<float> problem(random, options, 8, 1, 1);
  problem.q[0] = std::numeric_limits<float>::quiet_NaN();
  const Reference reference =
      reference_attention(problem.kv.view, problem.plan.view(), std::span<const float>(problem.q));
  CHECK(std::isnan(reference.out[0]));
  CHECK(std::isnan(reference.lse[0]));
  std::vector<float> out(problem.q.size(), std::numeric_limits<float>::quiet_NaN());
  CHECK(compare_with_reference(reference, std::span<const float>(out)).ok());
  out[3] = 0.0f;
  CHECK(!compare_with_reference(reference, std::span<const float>(out)).ok());
  CHECK(!compare_with_reference(problem.reference,
                                std::span<const float>(std::vector<float>(
                                    out.size(), std::numeric_limits<float>::quiet_NaN())))
             .ok());
}

#endif
