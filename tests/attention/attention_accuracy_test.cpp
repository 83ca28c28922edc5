// Accuracies against bounds of their own, worst case and root mean square, and cases in which every
// accuracy is exact, so that a dropped token is seen whatever the rounding. They differ where a
// matrix unit computes: on a processor with AMX, and in this test's variant with tiles in software.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <span>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "support/attention_case.hpp"

using namespace chunkattn;
using Reduce = CpuOptions::Reduce;
using test::Random;
using test::Share;

namespace {

constexpr CpuOptions::Accuracy accuracies[] = {
    CpuOptions::Accuracy::fp32, CpuOptions::Accuracy::two_terms, CpuOptions::Accuracy::one_term};
constexpr const char* names[] = {"fp32", "two terms", "one term"};

// Ragged prefixes with enough query-head rows for products: grouped heads, decode rows, and causal
// prefill.
test::RandomPlanOptions random_shape(Random& random) {
  test::RandomPlanOptions options;
  options.share = random.pick({Share::some, Share::all, Share::all});
  options.num_sequences = random.uniform(2, random.pick({4, 20}));
  options.chunk_size = random.pick({1, 16, 64, 128});
  options.max_length = random.pick({40, 150});
  options.max_queries = random.pick({1, 1, 3, 40});
  return options;
}

struct Errors {
  double worst = 0, rms = 0, largest = 0, lse = 0;
};

// Errors as parts of their bounds; the largest in itself.
template <int HeadDim, class T, class X>
Errors errors_of(ChunkAttention<Cpu, HeadDim>& attention,
                 const test::AttentionCase<T, X>& problem) {
  test::Answer<> answer(problem);
  attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out, {.lse = answer.lse});
  const Rounding rounding = test::rounding_in<T>(attention);
  CHECK(chunkattn::rounding_of<T>(attention).p == rounding.p);
  CHECK(chunkattn::rounding_of<T>(attention).logit == rounding.logit);
  const OracleReport report =
      compare_with_reference(problem.reference, std::span<const float>(answer.out), rounding);
  return {report.worst, report.rms, report.max_abs_error,
          test::worst_lse(problem.reference, answer.lse, rounding)};
}

template <int HeadDim, class T, class X = float>
void check_errors(std::uint64_t stream, const char* type, int cases) {
  for (const CpuOptions::Accuracy accuracy : accuracies) {
    Random random(stream);  // the same cases for each
    ChunkAttention<Cpu, HeadDim> attention(2, {.accuracy = accuracy});
    // Without tiles whatever accuracy is asked for.
    const bool computes_in_fp32 = test::rounding_in<T>(attention).logit == 0;
    CAPTURE(type);
    CAPTURE(static_cast<int>(accuracy));
    Errors all;
    for (int i = 0; i < test::scaled(cases); ++i) {
      const int group = random.pick({1, 2, 4, 5, 8, 16});
      const test::AttentionCase<T, X> problem(random, random_shape(random), HeadDim,
                                              random.uniform(1, 2), group,
                                              random.pick({1.0f, 4.0f}));
      const Errors errors = errors_of(attention, problem);
      CHECK(errors.worst <= 1.0);
      // Roundings are as often up as down; a term that is missing is no such thing.
      CHECK(errors.rms <= (computes_in_fp32 ? 0.0625 : 0.04));
      CHECK(errors.lse <= 1.0);
      all = {std::max(all.worst, errors.worst), std::max(all.rms, errors.rms),
             std::max(all.largest, errors.largest), std::max(all.lse, errors.lse)};
    }
    std::printf("%-16s %-9s of the bound: worst %.3f, rms %.4f, lse %.3f; largest error %.2e\n",
                type, names[static_cast<int>(accuracy)], all.worst, all.rms, all.lse, all.largest);
  }
}

// Queries of zero and small integers as V: all probabilities are 1, all sums exact.
template <class T>
void fill_with_integers(Random& random, const test::RandomPlan& plan, const KvView<T>& kv) {
  fill_kv(random, plan, kv);
  plan.for_each_visible([&](int chunk, int offset) {
    for (int head = 0; head < kv.num_kv_heads; ++head) {
      for (int i = 0; i < kv.head_dim; ++i) {
        const int value = random.uniform(-8, 8);
        kv.v_row(chunk, head, offset)[i] = test::stored<T>(static_cast<float>(value));
      }
      if constexpr (has_row_scales<T>) *kv.v_row_scale(chunk, head, offset) = 0.5f;
    }
  });
}

// Whether out and lse of every row are exact but for the last division and the logarithm.
bool is_exact(const Reference& reference, std::span<const float> out, std::span<const float> lse) {
  for (std::size_t i = 0; i < out.size(); ++i)
    if (!(std::abs(static_cast<double>(out[i]) - reference.out[i]) <= 0x1p-22 * 8)) return false;
  for (std::size_t i = 0; i < lse.size(); ++i)
    if (!(std::abs(static_cast<double>(lse[i]) - reference.lse[i]) <= 0x1p-20)) return false;
  return true;
}

}  // namespace

TEST_CASE("each accuracy keeps its bounds, worst case and root mean square") {
  check_errors<128, bfloat16>(1, "bfloat16", 12);
  check_errors<128, bfloat16, bfloat16>(1, "bfloat16 queries", 12);
  check_errors<64, half>(2, "half", 12);
  check_errors<64, std::int8_t>(3, "int8", 12);
}

TEST_CASE_TEMPLATE("with q = 0 and integers in V every accuracy is exact, and no token is dropped",
                   T, bfloat16, half, std::int8_t, float8_e4m3) {
  Random random(4);
  constexpr int dim = 64;
  for (const CpuOptions::Accuracy accuracy : accuracies) {
    CAPTURE(static_cast<int>(accuracy));
    ChunkAttention<Cpu, dim> attention(2, {.accuracy = accuracy});
    int caught = 0, dropped = 0;
    for (int i = 0; i < test::scaled(8); ++i) {
      test::RandomPlan plan = make_random_plan(random, random_shape(random));
      const int group = random.pick({1, 4, 9, 16});
      test::Storage<T> kv(plan.num_chunks, 1, plan.chunk_size, dim);
      fill_with_integers(random, plan, kv.view);
      const std::vector<float> q(static_cast<std::size_t>(plan.num_rows() * group * dim));
      const Reference reference =
          reference_attention(kv.view, plan.view(), std::span<const float>(q));
      std::vector<float> out(q.size()), lse(q.size() / dim);
      attention.run(kv.view, plan.view(), q, out, {.lse = lse});
      CHECK(is_exact(reference, out, lse));

      const std::size_t row = random.index(plan.row_kv_len.size());  // one token less of one row
      if (plan.row_kv_len[row] < 2) continue;
      ++dropped;
      --plan.row_kv_len[row];
      attention.run(kv.view, plan.view(), q, out, {.lse = lse});
      caught += is_exact(reference, out, lse) ? 0 : 1;
    }
    CHECK(dropped > 0);
    CHECK(caught == dropped);
  }
}

TEST_CASE("a token that is dropped out of 4,096 is caught in every accuracy") {
  Random random(5);
  constexpr int dim = 64;
  test::RandomPlanOptions options;
  options.num_sequences = 2;
  options.share = Share::all;
  options.max_depth = 1;
  options.max_length = 4096;
  test::RandomPlan plan;
  do plan = make_random_plan(random, options);
  while (plan.row_kv_len.size() != 2 || plan.row_kv_len[0] < 4000);
  test::KvStorage<bfloat16> kv(plan.num_chunks, 1, options.chunk_size, dim);
  fill_with_integers(random, plan, kv.view);
  constexpr int group = 16;
  const std::vector<float> q(2 * group * dim);
  const Reference reference = reference_attention(kv.view, plan.view(), std::span<const float>(q));
  for (const CpuOptions::Accuracy accuracy : accuracies) {
    ChunkAttention<Cpu, dim> attention(1, {.accuracy = accuracy});
    std::vector<float> out(q.size()), lse(q.size() / dim);
    attention.run(kv.view, plan.view(), q, out, {.lse = lse});
    CHECK(is_exact(reference, out, lse));
    --plan.row_kv_len[0];
    attention.run(kv.view, plan.view(), q, out, {.lse = lse});
    CHECK(!is_exact(reference, out, lse));
    ++plan.row_kv_len[0];
  }
}

TEST_CASE("what computes in fp32 whatever the accuracy") {
  Random random(6);
  test::RandomPlanOptions options;
  options.share = Share::all;
  options.num_sequences = 12;
  const auto same_bits = [&]<int HeadDim, class T>(std::integral_constant<int, HeadDim>, T,
                                                   Reduce reduce) {
    const test::AttentionCase<T> problem(random, options, HeadDim, 1, 8);
    ChunkAttention<Cpu, HeadDim> exact(1,
                                       {.reduce = reduce, .accuracy = CpuOptions::Accuracy::fp32});
    ChunkAttention<Cpu, HeadDim> fast(
        1, {.reduce = reduce, .accuracy = CpuOptions::Accuracy::one_term});
    test::Answer<> a(problem), b(problem);
    exact.run(problem.kv.view, problem.plan.view(), problem.q, a.out, {.lse = a.lse});
    fast.run(problem.kv.view, problem.plan.view(), problem.q, b.out, {.lse = b.lse});
    return a.out == b.out && a.lse == b.lse;
  };
  constexpr std::integral_constant<int, 64> dim64;
  constexpr std::integral_constant<int, 40> dim40;
  CHECK(same_bits(dim64, float{}, Reduce::deterministic));
  CHECK(same_bits(dim64, bfloat16{}, Reduce::batch_invariant));
  // And who does not: else the cases above said nothing. Tiles are for whole multiples of 32.
  const auto rounds = [](const auto& one) { return test::rounding_in<bfloat16>(one).p > 0x1p-24; };
  constexpr CpuOptions one_term = {.accuracy = CpuOptions::Accuracy::one_term};
  const bool some = rounds(ChunkAttention<Cpu, 64>(1, one_term));
  CHECK(same_bits(dim64, bfloat16{}, Reduce::deterministic) == !some);
  const bool odd = rounds(ChunkAttention<Cpu, 40>(1, one_term));
  CHECK(same_bits(dim40, bfloat16{}, Reduce::deterministic) == !odd);
  std::printf("accuracies were compared with %s\n", odd    ? "dot products of pairs"
                                                    : some ? "tiles"
                                                           : "vectors of fp32 alone");
}
