// Every shape against the double-precision oracle: ragged prefix trees, all element types, grouped
// heads, head dimensions from 8 to 256, causal prefill, logits up to ±80, poisoned memory.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "support/attention_case.hpp"
#include "support/written_rows.hpp"

using namespace chunkattn;
using test::Random;
using test::Share;

namespace {

test::RandomPlanOptions random_shape(Random& random, Share share) {
  test::RandomPlanOptions options;
  options.share = share;
  options.num_sequences = random.uniform(1, random.pick({3, 12, 40}));
  options.chunk_size = random.pick({1, 4, 16, 32, 64, 128});
  options.max_length = random.pick({3, 40, 150});
  options.max_queries = random.pick({1, 1, 1, 4, 30});
  return options;
}

/// \param fixed_group, fixed_heads  query heads per KV head and KV heads; 0: any
template <int HeadDim, class T, class X = float>
void check_shapes(std::uint64_t stream, int cases, int fixed_group = 0, int fixed_heads = 0) {
  Random random(stream);
  ChunkAttention<Cpu, HeadDim> ordered(2);
  ChunkAttention<Cpu, HeadDim> locked(2, {.reduce = CpuOptions::Reduce::spin_lock,
                                          .tuning = {.min_tasks = 16, .min_product_lines = 1}});
  ChunkAttention<Cpu, HeadDim> invariant(2, {.reduce = CpuOptions::Reduce::batch_invariant});
  for (int i = 0; i < test::scaled(cases); ++i) {
    const Share share = random.pick({Share::none, Share::some, Share::all});
    const int group = fixed_group > 0 ? fixed_group : random.pick({1, 1, 2, 3, 4, 5, 8, 16});
    const int num_kv_heads = fixed_heads > 0 ? fixed_heads : random.uniform(1, group > 4 ? 1 : 3);
    const float deviation = random.pick({1.0f, 20.0f});
    const auto options = random_shape(random, share);
    const test::AttentionCase<T, X> problem(random, options, HeadDim, num_kv_heads, group,
                                            deviation);
    CAPTURE(HeadDim);
    CAPTURE(element_name<X>());
    CAPTURE(group);
    CAPTURE(num_kv_heads);
    CAPTURE(deviation);
    CAPTURE(options.num_sequences);
    CAPTURE(options.chunk_size);
    CAPTURE(options.max_queries);
    for (auto* attention : {&ordered, &locked, &invariant}) {
      test::Answer<X> answer(problem);
      attention->run(problem.kv.view, problem.plan.view(), problem.q, answer.out,
                     {.lse = answer.lse});
      const Rounding rounding = test::rounding_in<T>(*attention);
      const OracleReport report =
          compare_with_reference(problem.reference, std::span<const X>(answer.out), rounding);
      CHECK(report.worst <= 1.0);
      CHECK(test::worst_lse(problem.reference, answer.lse, rounding) <= 1.0);
      const bool any_shared = problem.plan.any_shared();
      if (!any_shared) CHECK(schedule_of(*attention).num_shared_items() == 0);
    }
  }
}

// A build with the kernels of all instruction sets takes minutes for each of these.
#if defined(CHUNKATTN_WITH_PORTABLE) && defined(CHUNKATTN_WITH_AVX512)
constexpr bool has_all_sets = true;
#else
constexpr bool has_all_sets = false;
#endif
template <int HeadDim, class T>
void check_more_shapes(std::uint64_t stream, int cases, int group = 0, int heads = 0) {
  if constexpr (!has_all_sets) check_shapes<HeadDim, T>(stream, cases, group, heads);
}

}  // namespace

TEST_CASE("fp32 K/V, every kind of head dimension") {
  check_shapes<8, float>(1, 12);
  check_more_shapes<24, float>(2, 8);
  check_more_shapes<64, float>(3, 12);
  check_shapes<80, float>(4, 8);
  check_more_shapes<96, float>(5, 8);
  check_shapes<128, float>(6, 12);
  check_more_shapes<256, float>(7, 5);
}

TEST_CASE("16-bit K/V") {
  check_more_shapes<8, half>(11, 8);
  check_more_shapes<64, half>(12, 8);
  check_shapes<128, half>(13, 10);
  check_more_shapes<256, half>(14, 4);
  check_shapes<40, bfloat16>(15, 8);
  check_shapes<128, bfloat16>(16, 10);
  check_more_shapes<96, bfloat16>(17, 6);
}

TEST_CASE("8-bit K/V: exact for what is stored") {
  check_shapes<64, std::int8_t>(21, 8);
  check_more_shapes<128, std::int8_t>(22, 8);
  check_shapes<64, float8_e4m3>(23, 8);
  check_more_shapes<40, float8_e4m3>(24, 8);
}

TEST_CASE("16-bit queries and outputs") {
  check_shapes<64, half, half>(31, 8);
  check_shapes<128, bfloat16, bfloat16>(32, 8);
  check_shapes<72, float, half>(33, 6);
}

TEST_CASE("every group of 1 to 16 query heads") {
  for (int group = 1; group <= 16; ++group) {
    const auto stream = static_cast<std::uint64_t>(group);
    check_shapes<128, float>(50 + stream, 2, group);
    check_shapes<128, bfloat16>(70 + stream, 2, group);
  }
}

TEST_CASE("shapes of models: 24 query heads on 4 of 256, groups of 3 of 64") {
  check_more_shapes<256, float>(90, 3, 6, 4);
  check_more_shapes<256, half>(91, 3, 6, 4);
  check_shapes<64, std::int8_t>(92, 4, 3, 3);
  check_shapes<64, half, half>(93, 4, 3, 3);
}

TEST_CASE("one token dropped out of 4,096 breaks the bound") {
  Random random(41);
  test::RandomPlanOptions options;
  options.num_sequences = 1;
  options.share = Share::none;
  options.reserve_chance = 0;
  options.max_length = 4096;
  int caught = 0;
  constexpr int trials = 3;
  for (int trial = 0; trial < trials; ++trial) {
    test::RandomPlan plan;
    do plan = make_random_plan(random, options);
    while (plan.row_kv_len[0] < 4000);
    test::KvStorage<float> kv(plan.num_chunks, 1, options.chunk_size, 64);
    fill_kv(random, plan, kv.view);
    std::vector<float> q(64), out(64), faulty(64);
    random.fill(std::span(q));
    const Reference reference =
        reference_attention(kv.view, plan.view(), std::span<const float>(q));
    ChunkAttention<Cpu, 64> attention(1);
    attention.run(kv.view, plan.view(), q, out);
    CHECK(compare_with_reference(reference, std::span<const float>(out)).ok());
    --plan.row_kv_len[0];
    attention.run(kv.view, plan.view(), q, faulty);
    if (!compare_with_reference(reference, std::span<const float>(faulty)).ok()) ++caught;
  }
  CHECK(caught == trials);
}

TEST_CASE("a row that sees nothing gives zeros and an lse of minus infinity") {
  Random random(42);
  test::RandomPlanOptions options;
  options.num_sequences = 9;
  options.share = Share::all;
  options.max_length = 30;
  test::RandomPlan plan = make_random_plan(random, options);
  for (std::size_t row = 0; row < plan.row_kv_len.size(); row += 2) plan.row_kv_len[row] = 0;
  test::KvStorage<half> kv(plan.num_chunks, 2, options.chunk_size, 64);
  fill_kv(random, plan, kv.view);
  std::vector<float> q(static_cast<std::size_t>(plan.num_rows()) * 4 * 64);
  random.fill(std::span(q));
  std::vector<float> out(q.size(), -1.0f), lse(q.size() / 64, -1.0f);
  ChunkAttention<Cpu, 64>(2).run(kv.view, plan.view(), q, out, {.lse = lse});
  for (std::size_t row = 0; row < plan.row_kv_len.size(); row += 2) {
    const auto token = static_cast<std::size_t>(plan.row_token[row]);
    for (std::size_t i = 0; i < std::size_t{4} * 64; ++i) CHECK(out[token * 4 * 64 + i] == 0.0f);
    for (std::size_t h = 0; h < 4; ++h)
      CHECK(lse[token * 4 + h] == -std::numeric_limits<float>::infinity());
  }
}

TEST_CASE("beside a logit of 0 a sink rounds by its own size") {
  Random random(45);
  test::RandomPlanOptions options;
  options.num_sequences = options.max_length = options.max_queries = 1;
  const test::RandomPlan plan = make_random_plan(random, options);
  test::KvStorage<half> kv(plan.num_chunks, 1, options.chunk_size, 64);
  const std::vector<float> q(64);
  ChunkAttention<Cpu, 64> attention(1);
  for (int i = 0; i < test::scaled(300); ++i) {
    fill_kv(random, plan, kv.view, 1.0f, 5000.0f);
    std::vector<float> sinks(1);
    random.fill(std::span(sinks), 4.0f);
    std::vector<float> out(64);
    attention.run(kv.view, plan.view(), Sinks{sinks}, q, out);
    const Reference reference =
        reference_attention(kv.view, plan.view(), std::span<const float>(q), {},
                            {.sink = [&](int) { return static_cast<double>(sinks[0]); }});
    CAPTURE(sinks[0]);
    CHECK(compare_with_reference(reference, std::span<const float>(out)).ok());
  }
}

TEST_CASE("sm_scale replaces 1 / sqrt(head_dim)") {
  Random random(43);
  test::RandomPlanOptions options;
  options.max_length = 60;
  const test::AttentionCase<float> problem(random, options, 64, 2, 2);
  const Reference scaled = reference_attention(problem.kv.view, problem.plan.view(),
                                               std::span<const float>(problem.q), 0.3);
  test::Answer<> answer(problem);
  ChunkAttention<Cpu, 64>(1, {.sm_scale = 0.3f})
      .run(problem.kv.view, problem.plan.view(), problem.q, answer.out);
  CHECK(compare_with_reference(scaled, std::span<const float>(answer.out)).ok());
  CHECK(!compare_with_reference(problem.reference, std::span<const float>(answer.out)).ok());
}

TEST_CASE("strided memory: an engine's own layout [chunk][token][head][dim]") {
  Random random(44);
  test::RandomPlanOptions options;
  options.max_length = 100;
  const test::RandomPlan plan = make_random_plan(random, options);
  constexpr int heads = 3;
  constexpr int dim = 64;
  test::KvStorage<half> kv(plan.num_chunks, heads, options.chunk_size, dim);
  kv.view.stride_head = dim;
  kv.view.stride_token = heads * dim;
  fill_kv(random, plan, kv.view);
  std::vector<float> q(static_cast<std::size_t>(plan.num_rows()) * heads * 2 * dim);
  random.fill(std::span(q));
  std::vector<float> out(q.size());
  ChunkAttention<Cpu, dim> attention(2);
  attention.run(kv.view, plan.view(), q, out);
  CHECK(compare_with_reference(reference_attention(kv.view, plan.view(), std::span<const float>(q)),
                               std::span<const float>(out), test::rounding_in<half>(attention))
            .ok());
}

TEST_CASE_TEMPLATE("cut walks: what the last call left is not merged into this one", T, float, half,
                   std::int8_t) {
  Random random(46);
  // A worker that takes all units of a head merges them by itself: one worker does so with the
  // first of several heads. Several workers leave units to each other, or meet under the lock.
  ChunkAttention<Cpu, 64> alone(1);
  ChunkAttention<Cpu, 64> ordered(3);
  ChunkAttention<Cpu, 64> locked(
      3, {.reduce = CpuOptions::Reduce::spin_lock, .tuning = {.min_tasks = 64}});
  for (int call = 0; call < test::scaled(6); ++call) {
    test::RandomPlanOptions options;
    options.num_sequences = random.uniform(1, 3);
    options.share = random.pick({Share::none, Share::some, Share::all});
    options.max_length = 6000;
    options.max_queries = random.pick({1, 3});
    for (auto* attention : {&alone, &ordered, &locked}) {
      bool cut = false;
      for (int draw = 0; draw < 200 && !cut; ++draw) {  // until a walk is long enough
        const int heads = attention == &alone ? 4 : random.uniform(1, 2);
        const test::AttentionCase<T> problem(random, options, 64, heads, random.pick({1, 2, 4}));
        test::Answer<> answer(problem);
        attention->run(problem.kv.view, problem.plan.view(), problem.q, answer.out,
                       {.lse = answer.lse});
        cut = schedule_of(*attention).num_partial_rows() > 0;
        const Rounding rounding = test::rounding_in<T>(*attention);
        CHECK(
            compare_with_reference(problem.reference, std::span<const float>(answer.out), rounding)
                .ok());
        CHECK(test::worst_lse(problem.reference, answer.lse, rounding) <= 1.0);
      }
      CHECK(cut);
    }
  }
}

TEST_CASE_TEMPLATE("what write() stores is what attention reads", T, float, half, bfloat16,
                   std::int8_t, float8_e4m3) {
  Random random(47);
  constexpr int dim = 64;
  for (int round = 0; round < test::scaled(6); ++round) {
    const Share share = random.pick({Share::none, Share::some, Share::all});
    const test::RandomPlan plan = make_random_plan(random, random_shape(random, share));
    const int heads = random.uniform(1, 3);
    constexpr int largest = !has_row_scales<T> ? 0 : std::is_same_v<T, std::int8_t> ? 127 : 448;
    const test::WrittenRows rows(random, plan, heads, dim, largest);
    test::Storage<T> kv(plan.num_chunks, heads, plan.chunk_size, dim);
    test::poison_kv(kv.view);
    ChunkAttention<Cpu, dim> attention(2);
    rows.write(random, attention, kv.view);

    // The oracle reads the same rows where the test itself put them, rounded by from_float.
    test::KvStorage<float> exact(plan.num_chunks, heads, plan.chunk_size, dim);
    test::poison_kv(exact.view);
    rows.template store<T>(exact.view);
    std::vector<float> q(static_cast<std::size_t>(plan.num_rows() * heads * 2 * dim));
    random.fill(std::span(q));
    std::vector<float> out(q.size(), 7.0f);
    attention.run(kv.view, plan.view(), q, out);
    const Reference reference =
        reference_attention(exact.view, plan.view(), std::span<const float>(q));
    Rounding rounding = test::rounding_in<T>(attention);
    rounding.p_of_largest *= 4;  // the reference does not see that rows have scales of 1, 2 and 4
    CHECK(compare_with_reference(reference, std::span<const float>(out), rounding).worst <= 1.0);
  }
}

TEST_CASE("8-bit K/V: the error against what was quantised") {
  Random random(45);
  constexpr int dim = 128;
  constexpr int tokens = 1024;
  test::RandomPlanOptions options;
  options.share = Share::none;
  options.num_sequences = 4;
  options.max_length = tokens;
  const test::RandomPlan plan = make_random_plan(random, options);
  test::KvStorage<float> exact(plan.num_chunks, 1, options.chunk_size, dim);
  test::QuantizedStorage small(plan.num_chunks, 1, options.chunk_size, dim);
  fill_kv(random, plan, exact.view);
  plan.for_each_visible([&](int chunk, int offset) {
    *small.view.k_row_scale(chunk, 0, offset) =
        quantize_row(exact.view.k_row(chunk, 0, offset), dim, small.view.k_row(chunk, 0, offset));
    *small.view.v_row_scale(chunk, 0, offset) =
        quantize_row(exact.view.v_row(chunk, 0, offset), dim, small.view.v_row(chunk, 0, offset));
  });
  std::vector<float> q(static_cast<std::size_t>(plan.num_rows()) * dim);
  random.fill(std::span(q));
  std::vector<float> out(q.size());
  ChunkAttention<Cpu, dim>(1).run(small.view, plan.view(), q, out);
  const Reference reference =
      reference_attention(exact.view, plan.view(), std::span<const float>(q));
  double largest = 0;
  double square = 0;
  double norm = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double error = static_cast<double>(out[i]) - reference.out[i];
    largest = std::max(largest, std::abs(error));
    square += error * error;
    norm += reference.out[i] * reference.out[i];
  }
  MESSAGE("8-bit K/V: largest error ", largest, ", relative ", std::sqrt(square / norm));
  // Elements of unit variance are off by at most max|x| / 254, about 0.013; averaging only helps.
  CHECK(largest < 0.05);
  CHECK(std::sqrt(square / norm) < 0.02);
}

TEST_CASE("a comparison reports the largest error and where it is worst") {
  Reference reference;
  reference.num_rows = reference.num_qo_heads = 1;
  reference.head_dim = reference.value_dim = 3;
  reference.out = {1, 2, 3};
  reference.abs_v = {1, 2, 3};
  reference.lse = {0};
  reference.logit_size = {1};
  const std::vector<float> out{1, 2.5f, 2.75f};
  const OracleReport report = compare_with_reference(reference, std::span<const float>(out));
  CHECK(!report.ok());
  CHECK(report.max_abs_error == 0.5);
  CHECK(report.index == 1);
  CHECK(report.worst > 1e4);
}
