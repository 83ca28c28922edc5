// Products of int8 K and V as dot products of bytes, or with avx2 of int16: the instruction against
// its model, and what has no integers. On processors without them vectors of fp32 compute; in this
// test's variant "dots", the model does.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <limits>
#include <span>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "support/attention_case.hpp"
#include "support/dot_cases.hpp"
#include "support/nan_place.hpp"
#include "support/software_dots.hpp"

using namespace chunkattn;
using test::Random;

namespace {

// Twelve sequences of a common prefix. Rows of a sequence see ever more tokens.
test::AttentionCase<std::int8_t> shared_case(Random& random, int head_dim) {
  test::RandomPlanOptions options;
  options.share = test::Share::all;
  options.num_sequences = 12;
  options.max_length = 300;
  options.max_queries = random.pick({1, 3});
  return {random, options, head_dim, 1, random.pick({1, 3, 8})};
}

}  // namespace

TEST_CASE("the model adds up four products of bytes, signed or not") {
  const auto mixed = detail::cpu::software_dot_bytes<std::uint8_t, std::int8_t>;
  CHECK(mixed(0, 0x04030201u, 0x01010101u) == 10u);
  CHECK(mixed(7, 0xffffffffu, 0x80808080u) == 7u - 4u * 255u * 128u);
  CHECK(mixed(0, 0xff000000u, 0xff000000u) == 0u - 255u);
  CHECK(mixed(0, 0x000000ffu, 0x7f7f7f7fu) == 255u * 127u);
  CHECK(mixed(0xffffffffu, 1u, 1u) == 0u);           // modulo 2^32, …
  CHECK(mixed(0x7fffffffu, 1u, 1u) == 0x80000000u);  // … no saturation
  const auto is_signed = detail::cpu::software_dot_bytes<std::int8_t, std::int8_t>;
  CHECK(is_signed(7, 0xffffffffu, 0x80808080u) == 7u + 4u * 128u);
  const auto is_unsigned = detail::cpu::software_dot_bytes<std::uint8_t, std::uint8_t>;
  CHECK(is_unsigned(7, 0xffffffffu, 0x80808080u) == 7u + 4u * 255u * 128u);
}

TEST_CASE("the model adds up two products of int16") {
  const auto model = detail::cpu::software_dot_int16;
  CHECK(model(7, 0x00030002u, 0x00050001u) == 7u + 2u + 15u);
  CHECK(model(0, 0xffff0001u, 0x00020003u) == 1u);
  CHECK(model(0, 0x80000000u, 0x7fffffffu) == 0u - 32768u * 32767u);
  CHECK(model(0, 0x80008000u, 0x80008000u) == 0x80000000u);  // the one sum that is too large, …
  CHECK(model(0xffffffffu, 1u, 1u) == 0u);                   // … modulo 2^32
}

#if defined(CHUNKATTN_WITH_AVX2) && !defined(CHUNKATTN_SOFTWARE_DOTS)

CHUNKATTN_ALLOW_AVX2
static void processor_int16(std::uint32_t* sums, std::uint32_t a, const std::uint32_t* b) {
  using Bits = detail::cpu::avx2::simd::Unsigned<8>;
  Bits lanes[2];
  __builtin_memcpy(&lanes[0], sums, sizeof lanes[0]);
  __builtin_memcpy(&lanes[1], b, sizeof lanes[1]);
  lanes[0] = detail::cpu::avx2::dot_int16<8>(lanes[0], Bits{} + a, lanes[1]);
  __builtin_memcpy(sums, &lanes[0], sizeof lanes[0]);
}
CHUNKATTN_FORBID

TEST_CASE("the processor's dot products of int16 give the model's bits") {
  Random random(2);
  for (int i = 0; i < test::scaled(700) && detail::cpu::is_supported(InstructionSet::avx2); ++i) {
    std::uint32_t sums[8], b[8], expected[8];
    const auto a = random.chance(0.1) ? 0x80008000u : static_cast<std::uint32_t>(random.bits());
    for (int lane = 0; lane < 8; ++lane) {
      sums[lane] = static_cast<std::uint32_t>(random.bits());
      b[lane] = random.chance(0.1) ? 0x80008000u : static_cast<std::uint32_t>(random.bits());
      expected[lane] = detail::cpu::software_dot_int16(sums[lane], a, b[lane]);
    }
    processor_int16(sums, a, b);
    CHECK(std::equal(sums, sums + 8, expected));
  }
}

#endif
#if defined(CHUNKATTN_WITH_DOTS)

namespace {

namespace pass = detail::cpu::CHUNKATTN_DOTS_SET;

CHUNKATTN_ALLOW_DOTS
// `W` lanes of sums and b, one word a; the sums become the instruction's.
template <class A, class B, int W>
void processor(std::uint32_t* sums, std::uint32_t a, const std::uint32_t* b) {
  pass::simd::Unsigned<W> lanes[2];
  __builtin_memcpy(&lanes[0], sums, sizeof lanes[0]);
  __builtin_memcpy(&lanes[1], b, sizeof lanes[1]);
  lanes[0] = pass::dot_bytes<A, B, W>(lanes[0], pass::simd::spread<W>(a), lanes[1]);
  __builtin_memcpy(sums, &lanes[0], sizeof lanes[0]);
}
CHUNKATTN_FORBID

// Sums of 16 lanes by vectors of W or fewer lanes, against the model.
template <class A, class B, int W>
void check_processor(Random& random) {
  std::uint32_t sums[16], b[16], expected[16];
  const auto a = static_cast<std::uint32_t>(random.bits());
  for (int lane = 0; lane < 16; ++lane) {
    sums[lane] = static_cast<std::uint32_t>(random.bits());
    b[lane] = random.chance(0.1) ? 0x80808080u : static_cast<std::uint32_t>(random.bits());
    expected[lane] = detail::cpu::software_dot_bytes<A, B>(sums[lane], a, b[lane]);
  }
  for (int lane = 0; lane < 16; lane += W) processor<A, B, W>(sums + lane, a, b + lane);
  CHECK(std::equal(sums, sums + 16, expected));
  if constexpr (W > 4) check_processor<A, B, W / 2>(random);
}

}  // namespace

#endif

TEST_CASE("the processor's dot products give the model's bits") {
#if defined(CHUNKATTN_WITH_DOTS)
  constexpr auto set = InstructionSet::CHUNKATTN_DOTS_SET;
  if (detail::cpu::is_supported(set) && detail::cpu::dot_units().int8) {
    Random random(1);
    for (int i = 0; i < test::scaled(700); ++i) {
      constexpr int width = pass::simd::native_width;
      check_processor<pass::KeyByte, std::int8_t, width>(random);
      check_processor<std::uint8_t, pass::ValueByte, width>(random);
    }
    return;
  }
  std::printf("skipped: dot products of the processor: it has none\n");
#else
  std::printf("skipped: dot products of the processor: this build has none\n");
#endif
}

#if defined(CHUNKATTN_WITH_DOTS)

namespace {

// The least part of a block's cache lines that the products of any number of lines can prefetch.
template <int Dim>
double prefetched() {
  constexpr int lines =
      2 * detail::cpu::block_tokens * (Dim + 4) / 64;  // K and V with their scales
  double least = 1e9;
  for (int count = 1; count <= pass::tile_lines; ++count)
    least = std::min(least, 1.0 * detail::cpu::max_burst *
                                pass::dot_steps<pass::ByteUnit<Dim, Dim>>(count) / lines);
  return least;
}

}  // namespace

TEST_CASE("products of few lines have bursts enough to prefetch the next block") {
  CHECK(prefetched<64>() >= 1);
  CHECK(prefetched<80>() >= 1);
  CHECK(prefetched<96>() >= 1);
  CHECK(prefetched<128>() >= 1);
  CHECK(prefetched<256>() >= 1);
  CHECK(pass::dot_steps<pass::ByteUnit<128, 128>>(0) == 0);
}

#endif

TEST_CASE("small and large plans agree with the oracle") {
  test::check_dot_shapes<64>(3, 6);
}

TEST_CASE("one line alone agrees with the oracle") {
  Random random(32);
  test::RandomPlanOptions options;
  options.share = test::Share::none;
  options.num_sequences = 1;
  const test::AttentionCase<std::int8_t> problem(random, options, 64, 1, 1);
  ChunkAttention<Cpu, 64> attention(1, test::dot_options());
  test::Answer<> answer(problem);
  attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out, {.lse = answer.lse});
  const Rounding rounding = test::rounding_in<std::int8_t>(attention);
  const std::span<const float> out(answer.out);
  CHECK(compare_with_reference(problem.reference, out, rounding).worst <= 1.0);
}

TEST_CASE("who computes in fp32") {
  Random random(30);
  const auto problem = shared_case(random, 64);
  const auto answer_of = [&](CpuOptions options) {
    ChunkAttention<Cpu, 64> attention(1, options);
    test::Answer<> answer(problem);
    attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out, {.lse = answer.lse});
    return answer.out;
  };
  const auto with = [](auto&& change) {
    CpuOptions options = test::dot_options();
    change(options);
    return options;
  };
  using Options = CpuOptions;
  const auto usual = answer_of(test::dot_options());
  const auto exact = answer_of(with([](Options& o) { o.accuracy = Options::Accuracy::fp32; }));
  const ChunkAttention<Cpu, 64> attention(1, test::dot_options());
  const bool dots = test::rounding_in<std::int8_t>(attention).p_of_largest > 0;
  CHECK((usual == exact) == !dots);
  const auto streamed = [](Options& o) {
    o.tuning.min_product_lines = test::all_streams;
    o.tuning.min_tasks = 1;  // where walks are cut depends on what products would cost
  };
  const auto exact_stream = [&](Options& o) {
    streamed(o);
    o.accuracy = Options::Accuracy::fp32;
  };
  const bool int16 = attention.options().instruction_set == InstructionSet::avx2;  // streams, too
  CHECK((answer_of(with(streamed)) == answer_of(with(exact_stream))) == !(dots && int16));
  CHECK(answer_of(with([](Options& o) { o.accuracy = Options::Accuracy::one_term; })) == usual);
  const auto invariant = [](Options& o) { o.reduce = Options::Reduce::batch_invariant; };
  CHECK(answer_of(with(invariant)) == answer_of(with([&](Options& o) {
          invariant(o);
          o.accuracy = Options::Accuracy::fp32;
        })));
  std::printf("int8 was computed by %s\n", dots ? "dot products" : "vectors of fp32");
}

TEST_CASE("small integers in V and equal logits come out exactly") {
  Random random(31);
  for (int i = 0; i < test::scaled(20); ++i) {
    auto problem = shared_case(random, 64);
    std::fill(problem.q.begin(), problem.q.end(), 0.0f);
    for (std::int8_t& value : problem.kv.v)
      value = static_cast<std::int8_t>(random.uniform(-127, 127));
    for (float& scale : problem.kv.v_scale) scale = 0.25f;
    const Reference reference = reference_attention(problem.kv.view, problem.plan.view(),
                                                    std::span<const float>(problem.q));
    const int way = i % 2 == 0 ? test::all_products : test::all_streams;
    ChunkAttention<Cpu, 64> attention(2, test::dot_options(way));
    test::Answer<> answer(problem);
    attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out, {.lse = answer.lse});
    for (std::size_t at = 0; at < answer.out.size(); ++at)  // but for the last division
      CHECK(std::abs(static_cast<double>(answer.out[at]) - reference.out[at]) <=
            0x1p-23 * std::abs(reference.out[at]));
  }
}

TEST_CASE("what rounds to the next power of two does not lose its highest bit") {
  Random random(33);
  for (const int way : {test::all_products, test::all_streams})
    for (const float scale : {0x1.fffep0f, 0x1.ffffp0f, 0x1.ffff02p0f, 0x1.fffffep0f}) {
      CAPTURE(way);
      CAPTURE(scale);
      auto problem = shared_case(random, 64);
      std::fill(problem.q.begin(), problem.q.end(), 0.0f);  // all weights are 1
      for (float& one : problem.kv.v_scale) one = scale;
      const Reference reference = reference_attention(problem.kv.view, problem.plan.view(),
                                                      std::span<const float>(problem.q));
      ChunkAttention<Cpu, 64> attention(2, test::dot_options(way));
      test::Answer<> answer(problem);
      attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out,
                    {.lse = answer.lse});
      double error = 0;
      for (std::size_t at = 0; at < answer.out.size(); ++at)
        error = std::max(error, std::abs(static_cast<double>(answer.out[at]) - reference.out[at]));
      CHECK(error <=
            127 * std::max(0x1p-15, 2 * test::rounding_in<std::int8_t>(attention).p_of_largest));
    }
}

#if !defined(__FINITE_MATH_ONLY__) || !__FINITE_MATH_ONLY__

namespace {

struct Changed {
  std::span<float> q;        // of one line
  float &k_scale, &v_scale;  // of one token
};

// Changes a line's query, or (if `change` says so) what lines that see a token have in common.
// Holds the answer against the oracle, and other lines against what they had before.
template <class Change>
void check_change(Random& random, const Change& change) {
  constexpr std::size_t dim = 64;
  auto problem = shared_case(random, dim);
  const test::RandomPlan& plan = problem.plan;
  const int way = random.pick({test::all_products, test::all_streams});
  CAPTURE(way);
  ChunkAttention<Cpu, dim> attention(1, test::dot_options(way));
  test::Answer<> before(problem), after(problem);
  attention.run(problem.kv.view, plan.view(), problem.q, before.out, {.lse = before.lse});
  const auto heads = static_cast<std::size_t>(problem.num_qo_heads);
  const std::size_t row = random.index(plan.row_token.size());
  const std::size_t line =
      static_cast<std::size_t>(plan.row_token[row]) * heads + random.index(heads);
  const int last = plan.row_kv_len[row] - 1;  // rows before it do not see this one
  const Piece place =
      test::place_of(plan, row, random.chance(0.5) ? last : random.uniform(0, last));
  const bool of_token = change(Changed{std::span(problem.q).subspan(line * dim, dim),
                                       *problem.kv.view.k_row_scale(place.chunk, 0, place.begin),
                                       *problem.kv.view.v_row_scale(place.chunk, 0, place.begin)});
  const Reference reference =
      reference_attention(problem.kv.view, plan.view(), std::span<const float>(problem.q));
  attention.run(problem.kv.view, plan.view(), problem.q, after.out, {.lse = after.lse});
  const OracleReport report = compare_with_reference(reference, std::span<const float>(after.out),
                                                     test::rounding_in<std::int8_t>(attention));
  const bool has_infinity = std::any_of(reference.out.begin(), reference.out.end(),
                                        [](double x) { return std::isinf(x); });
  CAPTURE(report.index);
  CAPTURE(after.out[report.index]);
  CAPTURE(reference.out[report.index]);
  CHECK((has_infinity || report.worst <= 1.0));
  for (std::size_t r = 0; r < plan.row_token.size(); ++r) {
    const Piece here = test::place_of(plan, r, place.position);
    const bool sees = place.position < plan.row_kv_len[r] && here.chunk == place.chunk &&
                      here.begin == place.begin;
    for (std::size_t h = 0; h < heads; ++h) {
      const std::size_t other = static_cast<std::size_t>(plan.row_token[r]) * heads + h;
      CHECK(std::isnan(after.lse[other]) == std::isnan(reference.lse[other]));
      const auto at = static_cast<std::ptrdiff_t>(other * dim);
      if (of_token ? sees : other == line)
        for (std::size_t i = 0; i < dim; ++i)
          CHECK(std::isfinite(after.out[other * dim + i]) ==
                std::isfinite(reference.out[other * dim + i]));
      else
        CHECK(std::equal(after.out.begin() + at, after.out.begin() + at + dim,
                         before.out.begin() + at));
    }
  }
}

}  // namespace

#if defined(CHUNKATTN_WITH_DOTS)

namespace {

CHUNKATTN_ALLOW_DOTS
float unit_of(const float* q) {
  return pass::QueryIntegers<64>(q, [](int, auto) {}).scale;
}
CHUNKATTN_FORBID

}  // namespace

TEST_CASE("queries have a unit unless it would not be a normal number") {
  if (!detail::cpu::is_supported(InstructionSet::CHUNKATTN_DOTS_SET)) {
    std::printf("skipped: units of queries: the processor has no vectors for them\n");
    return;
  }
  using Limits = std::numeric_limits<float>;
  alignas(64) float q[64];
  const auto unit_with = [&](float x) {
    std::fill(std::begin(q), std::end(q), 0.0f);
    q[17] = x;
    return unit_of(q);
  };
  for (const float x : {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN(),
                        -Limits::quiet_NaN(), Limits::denorm_min(), 0x0.ffffffp-100f}) {
    CAPTURE(x);
    CHECK(std::isnan(unit_with(x)));
  }
  for (const float x : {Limits::max(), -1.0f, 0x1p-100f}) {
    CAPTURE(x);
    CHECK(unit_with(x) == std::abs(x) / pass::largest_query);
  }
  CHECK(unit_with(0.0f) == 0.0f);
}

#endif

TEST_CASE("queries without integers are computed in fp32, for their line alone") {
  Random random(40);
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto with = [&](auto&& change) {
    for (int i = 0; i < test::scaled(6); ++i)
      check_change(random, [&](Changed changed) {
        change(changed.q);
        return false;
      });
  };
  with([&](std::span<float> q) { q[random.index(q.size())] = nan; });
  with([&](std::span<float> q) { q[random.index(q.size())] = -inf; });
  with([](std::span<float> q) { std::fill(q.begin(), q.end(), 0.0f); });
  with([](std::span<float> q) { std::fill(q.begin(), q.end(), 0x1p-130f); });
  with([](std::span<float> q) {
    for (float& x : q) x *= 0x1p-105f;
  });
  with([](std::span<float> q) {
    for (float& x : q) x *= 0x1p20f;
  });
}

TEST_CASE("scales that are not positive numbers reach the lines that see them") {
  Random random(41);
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const float scale : {nan, -nan, inf, -inf, 0.0f, -0.0f, -1.0f, 0x1p-126f, 0x1p100f}) {
    CAPTURE(scale);
    for (int i = 0; i < test::scaled(4); ++i) {
      check_change(random, [&](Changed changed) {
        changed.v_scale = scale;
        return true;
      });
      if (std::isinf(scale) || std::abs(scale) > 1) continue;
      check_change(random, [&](Changed changed) {
        changed.k_scale = scale;
        return true;
      });
    }
  }
}

TEST_CASE("V of any size keeps its digits") {
  Random random(42);
  for (const int way : {test::all_products, test::all_streams})
    for (const float size : {0x1p-100f, 0x1p-60f, 0x1p60f, 0x1p110f}) {
      CAPTURE(way);
      auto problem = shared_case(random, 64);
      for (float& scale : problem.kv.v_scale) scale *= size;
      ChunkAttention<Cpu, 64> attention(1, test::dot_options(way));
      const Reference reference = reference_attention(problem.kv.view, problem.plan.view(),
                                                      std::span<const float>(problem.q));
      test::Answer<> answer(problem);
      attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out,
                    {.lse = answer.lse});
      double largest = 0, error = 0;
      for (std::size_t at = 0; at < answer.out.size(); ++at) {
        largest = std::max(largest, std::abs(reference.out[at]));
        error = std::max(error, std::abs(static_cast<double>(answer.out[at]) - reference.out[at]));
      }
      CHECK(error <= largest * 0x1p-10);
    }
}

#endif
