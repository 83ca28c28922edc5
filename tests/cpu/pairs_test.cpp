// Products of bfloat16 K and V as dot products of pairs: the instruction against its model, who
// uses it, and what is not finite. On processors without them vectors of fp32 compute; in this
// test's variant "dots", the model does.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <span>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "support/attention_case.hpp"
#include "support/dot_cases.hpp"
#include "support/nan_place.hpp"
#include "support/software_dots.hpp"

using namespace chunkattn;
using test::Random;
using Accuracy = CpuOptions::Accuracy;

namespace {

constexpr std::size_t dim = 64;

CpuOptions with(Accuracy accuracy) {
  CpuOptions options = test::dot_options(1);
  options.accuracy = accuracy;
  return options;
}

// Twelve sequences of a common prefix, eight query heads.
test::AttentionCase<bfloat16> shared_case(Random& random, bool exact_queries) {
  test::RandomPlanOptions options;
  options.share = test::Share::all;
  options.num_sequences = 12;
  options.max_length = 300;
  test::AttentionCase<bfloat16> problem(random, options, dim, 1, 8);
  if (exact_queries)
    for (float& x : problem.q) x = to_float(from_float<bfloat16>(x));
  return problem;
}

template <class Variant = NoVariant>
test::Answer<> answer_of(const test::AttentionCase<bfloat16>& problem, const CpuOptions& options,
                         const Variant& variant = {}) {
  ChunkAttention<Cpu, dim> attention(1, options);
  test::Answer<> answer(problem);
  attention.run(problem.kv.view, problem.plan.view(), variant, problem.q, answer.out,
                {.lse = answer.lse});
  return answer;
}

std::uint32_t pair(float odd, float even) {
  return (std::bit_cast<std::uint32_t>(odd) & 0xffff0000u) |
         std::bit_cast<std::uint32_t>(even) >> 16;
}

bool has_pairs() {
  const ChunkAttention<Cpu, dim> attention(1, with(Accuracy::one_term));
  return test::rounding_in<bfloat16>(attention).logit > 0;
}

}  // namespace

TEST_CASE("the model of VDPBF16PS adds the odd products, then the even ones") {
  using detail::cpu::software_dot_pairs;
  CHECK(software_dot_pairs(1, pair(2, 3), pair(4, 5)) == 24.0f);
  CHECK(software_dot_pairs(0x1p24f, pair(1, 1), pair(1, 1)) == 0x1p24f);  // rounded after each
  CHECK(software_dot_pairs(0, pair(0x1p24f, 1), pair(1, 1)) == 0x1p24f);
  CHECK(software_dot_pairs(-0x1p24f, pair(0x1p24f, 1), pair(1, 1)) == 1.0f);
  CHECK(software_dot_pairs(-0x1p24f, pair(1, 0x1p24f), pair(1, 1)) == 1.0f);
  CHECK(software_dot_pairs(0, pair(0x1p-130f, 0), pair(0x1p100f, 0)) == 0.0f);  // a denormal
  CHECK(software_dot_pairs(0, pair(0x1p-70f, 0), pair(0x1p-70f, 0)) == 0.0f);   // becomes one
  CHECK(software_dot_pairs(0x1p-130f, 0, 0) == 0.0f);
}

TEST_CASE("the model of BFDOT adds the products, then the sum, and rounds to odd") {
  using detail::cpu::software_bfdot;
  const float inf = std::numeric_limits<float>::infinity();
  CHECK(software_bfdot(1, pair(2, 3), pair(4, 5)) == 24.0f);
  CHECK(software_bfdot(0x1p24f, pair(1, 1), pair(1, 1)) == 0x1p24f + 2);  // products first
  CHECK(software_bfdot(-0x1p24f, pair(0x1p24f, 1), pair(1, 1)) ==
        2.0f);  // 2^24 + 1, cut off and made odd
  CHECK(software_bfdot(0, pair(0x1p25f, 1), pair(1, 1)) == 0x1p25f + 4);
  CHECK(software_bfdot(0, pair(-0x1p25f, -1), pair(1, 1)) == -0x1p25f - 4);
  CHECK(software_bfdot(0, pair(0x1p25f, -1), pair(1, 1)) == 0x1p25f - 2);
  CHECK(software_bfdot(1, pair(0x1p100f, 0x1p-100f), pair(1, 1)) == 0x1.000002p100f);
  CHECK(software_bfdot(0, pair(0x1p-130f, 0), pair(0x1p100f, 0)) == 0.0f);  // a denormal
  CHECK(software_bfdot(0, pair(0x1p-70f, 0), pair(0x1p-70f, 0)) == 0.0f);   // becomes one
  CHECK(software_bfdot(-0x1.8p-126f, pair(0x1p-126f, 0), pair(1, 0)) == 0.0f);
  CHECK(software_bfdot(0x1p-130f, 0, 0) == 0.0f);
  CHECK(software_bfdot(0, pair(-0x1p100f, 1), pair(0x1p100f, 1)) == -inf);
  CHECK(software_bfdot(0x1.fffffep127f, pair(0x1p100f, 0), pair(1, 0)) == 0x1.fffffep127f);
  CHECK(software_bfdot(0x1.fffffep127f, pair(0x1p104f, 0), pair(1, 0)) == inf);
#if !defined(__FINITE_MATH_ONLY__) || !__FINITE_MATH_ONLY__
  CHECK(std::isnan(software_bfdot(0, pair(inf, 0), pair(0, 0))));
  CHECK(std::isnan(software_bfdot(-inf, pair(inf, 0), pair(1, 0))));
#endif
}

#if defined(CHUNKATTN_WITH_PAIRS)

namespace {

namespace pass = detail::cpu::CHUNKATTN_DOTS_SET;

CHUNKATTN_ALLOW_DOTS
// `W` lanes of sums and a, one word b; the sums become the instruction's.
template <int W>
void processor(float* sums, const std::uint32_t* a, std::uint32_t b) {
  pass::simd::Float<W> sum;
  pass::simd::Unsigned<W> lanes;
  __builtin_memcpy(&sum, sums, sizeof sum);
  __builtin_memcpy(&lanes, a, sizeof lanes);
  sum = pass::dot_pairs<W>(sum, lanes, pass::simd::spread<W>(b));
  __builtin_memcpy(sums, &sum, sizeof sum);
}
CHUNKATTN_FORBID

float model(float sum, std::uint32_t a, std::uint32_t b) {
#if defined(__aarch64__)
  return detail::cpu::software_bfdot(sum, a, b);
#else
  return detail::cpu::software_dot_pairs(sum, a, b);
#endif
}

// Numbers of like size, of any, and of those that are denormal or nearly so.
std::uint32_t some_number(Random& random, int kind) {
  const auto bits = static_cast<std::uint32_t>(random.bits());
  const int exponent = kind == 0   ? random.uniform(120, 135)
                       : kind == 1 ? random.uniform(1, 254)
                                   : random.uniform(0, 40);
  return (bits & 0x807fffffu) | static_cast<std::uint32_t>(exponent) << 23;
}

// Sums of 16 lanes by vectors of W or fewer lanes, against the model.
template <int W>
void check_processor(Random& random, int kind) {
  const auto some_pair = [&] {
    return some_number(random, kind) >> 16 | (some_number(random, kind) & 0xffff0000u);
  };
  float sums[16], expected[16];
  std::uint32_t a[16];
  const std::uint32_t b = some_pair();
  for (int lane = 0; lane < 16; ++lane) {
    sums[lane] = std::bit_cast<float>(some_number(random, kind));
    a[lane] = some_pair();
    expected[lane] = model(sums[lane], a[lane], b);
  }
  for (int lane = 0; lane < 16; lane += W) processor<W>(sums + lane, a + lane, b);
  for (int lane = 0; lane < 16; ++lane) {
    CAPTURE(a[lane]);
    CAPTURE(b);
    if (!std::isnan(expected[lane]))
      CHECK(std::bit_cast<std::uint32_t>(sums[lane]) ==
            std::bit_cast<std::uint32_t>(expected[lane]));
  }
  if constexpr (W > 4) check_processor<W / 2>(random, kind);
}

}  // namespace

#endif

TEST_CASE("the processor's dot products of pairs give the model's bits") {
#if defined(CHUNKATTN_WITH_PAIRS)
  constexpr auto set = InstructionSet::CHUNKATTN_DOTS_SET;
  if (detail::cpu::is_supported(set) && detail::cpu::dot_units().bfloat16) {
    Random random(1);
    for (int i = 0; i < test::scaled(3000); ++i)
      check_processor<pass::simd::native_width>(random, i % 3);
    return;
  }
  std::printf("skipped: dot products of pairs of the processor: it has none that are fast\n");
#else
  std::printf("skipped: dot products of pairs of the processor: this build has none\n");
#endif
}

#if defined(CHUNKATTN_WITH_PAIRS)

namespace {

// The least part of a block's cache lines that the products of any number of lines can prefetch.
template <int Dim>
double prefetched() {
  constexpr int lines = 2 * detail::cpu::block_tokens * Dim * 2 / 64;
  double least = 1e9;
  for (int count = 1; count <= pass::tile_lines; ++count)
    least = std::min(least, 1.0 * detail::cpu::max_burst *
                                pass::dot_steps<pass::PairUnit<Dim, Dim>>(count) / lines);
  return least;
}

}  // namespace

TEST_CASE("products of few lines have bursts enough to prefetch the next block") {
  CHECK(prefetched<64>() >= 1);
  CHECK(prefetched<80>() >= 1);
  CHECK(prefetched<96>() >= 1);
  CHECK(prefetched<128>() >= 1);
  CHECK(prefetched<256>() >= 1);
  CHECK(pass::dot_steps<pass::PairUnit<128, 128>>(0) == 0);
}

#endif

TEST_CASE("small and large plans agree with the oracle") {
  test::check_dot_shapes<dim, dim, bfloat16, bfloat16>(3, 4);
  test::check_dot_shapes<dim, dim, float, bfloat16>(4, 4, Accuracy::one_term);
}

TEST_CASE("queries that are bfloat16 by value are exact, others are computed in fp32") {
  Random random(30);
  auto problem = shared_case(random, false);
  CHECK(answer_of(problem, with(Accuracy::two_terms)).out ==
        answer_of(problem, with(Accuracy::fp32)).out);
  CHECK((answer_of(problem, with(Accuracy::one_term)).out ==
         answer_of(problem, with(Accuracy::fp32)).out) == !has_pairs());

  problem = shared_case(random, true);
  const auto exact = answer_of(problem, with(Accuracy::two_terms));
  CHECK((exact.out == answer_of(problem, with(Accuracy::fp32)).out) == !has_pairs());
  CHECK((exact.out == answer_of(problem, with(Accuracy::one_term)).out) == !has_pairs());
  std::vector<bfloat16> q;
  for (const float x : problem.q) q.push_back(from_float<bfloat16>(x));
  ChunkAttention<Cpu, dim> attention(1, with(Accuracy::two_terms));
  test::Answer<> narrow(problem);
  attention.run(problem.kv.view, problem.plan.view(), q, narrow.out, {.lse = narrow.lse});
  CHECK(narrow.out == exact.out);
  for (const float tiny : {0x1p-126f, 0x1p-127f}) {  // the least normal number, and one below
    problem.q[0] = tiny;
    const auto fp32 = answer_of(problem, with(Accuracy::fp32)).out;
    const auto pairs = answer_of(problem, with(Accuracy::two_terms)).out;
    CHECK(std::equal(pairs.begin(), pairs.begin() + dim, fp32.begin()) ==
          (!has_pairs() || tiny < 0x1p-126f));
  }
  std::printf("bfloat16 was computed by %s\n", has_pairs() ? "dot products" : "vectors of fp32");
}

TEST_CASE("integers in V and equal logits come out exactly") {
  Random random(31);
  for (int i = 0; i < test::scaled(10); ++i) {
    auto problem = shared_case(random, true);
    std::fill(problem.q.begin(), problem.q.end(), 0.0f);
    for (bfloat16& value : problem.kv.v)
      value = from_float<bfloat16>(static_cast<float>(random.uniform(-255, 255)));
    const Reference reference = reference_attention(problem.kv.view, problem.plan.view(),
                                                    std::span<const float>(problem.q));
    for (const Accuracy accuracy : {Accuracy::one_term, Accuracy::two_terms}) {
      const auto answer = answer_of(problem, with(accuracy));
      for (std::size_t at = 0; at < answer.out.size(); ++at)  // but for the last division
        CHECK(std::abs(static_cast<double>(answer.out[at]) - reference.out[at]) <=
              0x1p-23 * std::abs(reference.out[at]));
    }
  }
}

#if !defined(__FINITE_MATH_ONLY__) || !__FINITE_MATH_ONLY__

namespace {

enum class Of { query, key, value };

// Puts a number into a query, key or value. Lines that do not see it keep their bits; others are
// NaN where fp32 has NaN, and infinite where it is infinite.
void check_number(Random& random, Of of, float number, Accuracy accuracy) {
  auto problem = shared_case(random, true);
  const test::RandomPlan& plan = problem.plan;
  const auto before = answer_of(problem, with(accuracy));
  const auto heads = static_cast<std::size_t>(problem.num_qo_heads);
  const std::size_t row = random.index(plan.row_token.size());
  const std::size_t line =
      static_cast<std::size_t>(plan.row_token[row]) * heads + random.index(heads);
  const Piece place = test::place_of(plan, row, random.uniform(0, plan.row_kv_len[row] - 1));
  const std::size_t element = random.index(dim);
  if (of == Of::query)
    problem.q[line * dim + element] = number;
  else if (of == Of::key)
    problem.kv.view.k_row(place.chunk, 0, place.begin)[element] = from_float<bfloat16>(number);
  else
    problem.kv.view.v_row(place.chunk, 0, place.begin)[element] = from_float<bfloat16>(number);
  const auto after = answer_of(problem, with(accuracy));
  const auto plain = answer_of(problem, with(Accuracy::fp32));
  for (std::size_t r = 0; r < plan.row_token.size(); ++r) {
    const Piece here = test::place_of(plan, r, place.position);
    const bool sees = place.position < plan.row_kv_len[r] && here.chunk == place.chunk &&
                      here.begin == place.begin;
    for (std::size_t h = 0; h < heads; ++h) {
      const std::size_t other = static_cast<std::size_t>(plan.row_token[r]) * heads + h;
      for (std::size_t i = other * dim; i < (other + 1) * dim; ++i) {
        if (of == Of::query ? other == line : sees) {
          CAPTURE(plain.out[i]);
          CAPTURE(after.out[i]);
          CHECK(std::isnan(after.out[i]) == std::isnan(plain.out[i]));
          CHECK(std::isinf(after.out[i]) == std::isinf(plain.out[i]));
        } else {
          CHECK(std::bit_cast<std::uint32_t>(after.out[i]) ==
                std::bit_cast<std::uint32_t>(before.out[i]));
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("what is not finite reaches the lines that see it") {
  Random random(40);
  const float inf = std::numeric_limits<float>::infinity();
  for (const Accuracy accuracy : {Accuracy::one_term, Accuracy::two_terms})
    for (const Of of : {Of::query, Of::key, Of::value})
      for (int i = 0; i < test::scaled(3); ++i) {
        CAPTURE(static_cast<int>(accuracy));
        CAPTURE(static_cast<int>(of));
        check_number(random, of, test::some_nan<float>(random), accuracy);
        check_number(random, of, inf, accuracy);
        check_number(random, of, -inf, accuracy);
        check_number(random, of, of == Of::value ? 0x1.fep127f : 0x1p40f, accuracy);
      }
}

TEST_CASE("what is not finite reaches no line that a window hides it from") {
  Random random(43);
  constexpr SlidingWindow window{.size = 40};
  const float inf = std::numeric_limits<float>::infinity();
  int hidden = 0;
  for (const Accuracy accuracy : {Accuracy::one_term, Accuracy::two_terms})
    for (int i = 0; i < test::scaled(10) || (hidden == 0 && i < 1000); ++i) {
      auto problem = shared_case(random, true);
      const test::RandomPlan& plan = problem.plan;
      const auto before = answer_of(problem, with(accuracy), window);
      const std::size_t row = random.index(plan.row_token.size());
      const int last = plan.row_kv_len[row] - 1;
      const Piece place =
          test::place_of(plan, row, random.uniform(std::max(0, last - window.size + 1), last));
      bfloat16* const v = problem.kv.view.v_row(place.chunk, 0, place.begin);
      std::fill(v, v + dim, from_float<bfloat16>(i % 2 == 0 ? inf : std::nanf("")));
      const auto after = answer_of(problem, with(accuracy), window);
      const auto heads = static_cast<std::size_t>(problem.num_qo_heads);
      for (std::size_t r = 0; r < plan.row_token.size(); ++r) {
        const Piece here = test::place_of(plan, r, place.position);
        const bool has = place.position < plan.row_kv_len[r] && here.chunk == place.chunk &&
                         here.begin == place.begin;
        const bool sees = has && plan.row_kv_len[r] - 1 - place.position < window.size;
        hidden += has && !sees ? 1 : 0;
        const std::size_t begin = static_cast<std::size_t>(plan.row_token[r]) * heads * dim;
        for (std::size_t at = begin; at < begin + heads * dim; ++at)
          if (sees)
            CHECK_FALSE(std::isfinite(after.out[at]));
          else
            CHECK(std::bit_cast<std::uint32_t>(after.out[at]) ==
                  std::bit_cast<std::uint32_t>(before.out[at]));
      }
    }
  CHECK(hidden > 0);
}

TEST_CASE("one product that overflows is computed again wherever its token stands") {
  Random random(44);
  auto problem = shared_case(random, true);
  const test::RandomPlan& plan = problem.plan;
  std::fill(problem.q.begin(), problem.q.end(), 0x1p124f);
  CpuOptions options = with(Accuracy::two_terms);
  options.sm_scale = 0x1p-128f * 16;
  for (const int position : {0, 1, plan.row_kv_len[0] - 1}) {
    CAPTURE(position);
    std::fill(problem.kv.k.begin(), problem.kv.k.end(), from_float<bfloat16>(0.0f));
    const Piece place = test::place_of(plan, 0, std::min(position, plan.row_kv_len[0] - 1));
    bfloat16* const k = problem.kv.view.k_row(place.chunk, 0, place.begin);
    std::fill(k, k + dim, from_float<bfloat16>(1.0f));
    const auto answer = answer_of(problem, options);
    for (const float lse : answer.lse) CHECK(std::isfinite(lse));
    // 64 dims of 1 times 1: nothing else counts.
    const auto line = static_cast<std::size_t>(plan.row_token[0] * problem.num_qo_heads);
    CHECK(answer.lse[line] == doctest::Approx(64.0));
  }
}

TEST_CASE("a logit far above all others counts alone wherever its token stands") {
  Random random(45);
  CpuOptions options = with(Accuracy::two_terms);
  options.sm_scale = 1;
  for (int round = 0; round < test::scaled(5); ++round) {
    auto problem = shared_case(random, true);
    const test::RandomPlan& plan = problem.plan;
    std::fill(problem.q.begin(), problem.q.end(), 1.0f);
    std::fill(problem.kv.k.begin(), problem.kv.k.end(), from_float<bfloat16>(0.0f));
    for (int position = 0; position < plan.row_kv_len[0]; ++position) {
      CAPTURE(position);
      const Piece place = test::place_of(plan, 0, position);
      bfloat16* const k = problem.kv.view.k_row(place.chunk, 0, place.begin);
      std::fill(k, k + dim, from_float<bfloat16>(8.0f));
      const auto answer = answer_of(problem, options);
      std::fill(k, k + dim, from_float<bfloat16>(0.0f));
      const auto line = static_cast<std::size_t>(plan.row_token[0] * problem.num_qo_heads);
      CHECK(answer.lse[line] == doctest::Approx(8.0 * dim));
      const bfloat16* const v = problem.kv.view.v_row(place.chunk, 0, place.begin);
      for (std::size_t i = 0; i < dim; ++i) CHECK(answer.out[line * dim + i] == to_float(v[i]));
    }
  }
}

TEST_CASE("logits whose products overflow are computed with sm_scale in the queries") {
  Random random(41);
  auto problem = shared_case(random, true);
  for (bfloat16& k : problem.kv.k) k = from_float<bfloat16>(1.0f);
  for (float& x : problem.q) x = 0x1p124f;
  CpuOptions options = with(Accuracy::two_terms);
  options.sm_scale = 0x1p-128f * 16;
  const auto answer = answer_of(problem, options);
  options.accuracy = Accuracy::fp32;
  const auto plain = answer_of(problem, options);
  for (std::size_t i = 0; i < plain.lse.size(); ++i) {
    CHECK(std::isfinite(plain.lse[i]));
    CHECK(answer.lse[i] == doctest::Approx(plain.lse[i]));
  }
}

#endif
