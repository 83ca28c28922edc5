// CpuOptions::Reduce::batch_invariant, plan by plan: each row of a random tree has the bits of the
// same row alone, its K and V elsewhere, its path cut in other places; for any number of threads,
// every element type, every instruction set, with and without a variant.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <span>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "support/attention_case.hpp"
#include "support/row_alone.hpp"
#include "support/variant_cases.hpp"

using namespace chunkattn;
using test::Random;
using test::RowAlone;
using test::same_bits;
using test::Share;
using Count = std::optional<int>;

namespace {

test::RandomPlanOptions random_shape(Random& random, int round) {
  test::RandomPlanOptions options;
  options.share = random.pick({Share::some, Share::all, Share::all});
  options.num_sequences = round % 3 == 0 ? 64 : random.uniform(1, 20);
  options.chunk_size = random.pick({4, 24, 64, 100});
  options.max_length = random.pick({10, 70, 200});
  options.max_queries = round % 3 == 0 ? 1 : random.pick({1, 4, 40});
  return options;
}

template <int HeadDim, class T, class Variant = test::PlainCase>
void check_rows(std::uint64_t stream, int rounds) {
  Random random(stream);
  for (int round = 0; round < test::scaled(rounds); ++round) {
    const auto options = random_shape(random, round);
    const int group = random.pick({1, 1, 3, 4, 8, 16});
    const int num_kv_heads = random.uniform(1, 2);
    test::AttentionCase<T> problem(random, options, HeadDim, num_kv_heads, group,
                                   random.pick({1.0f, 8.0f}));
    // Some rows see less: their queries lie somewhere in the middle of what others read.
    for (std::int32_t& kv_len : problem.plan.row_kv_len)
      if (random.chance(0.2)) kv_len = random.uniform(1, kv_len);
    CAPTURE(HeadDim);
    CAPTURE(group);
    CAPTURE(num_kv_heads);
    CAPTURE(options.num_sequences);
    CAPTURE(options.chunk_size);
    CAPTURE(options.max_length);
    CAPTURE(options.max_queries);
    const PlanView plan = problem.plan.view();
    const Variant of(random, test::VariantShape{problem.num_qo_heads});
    test::poison_hidden(problem.plan, problem.kv.view, group, of.definition);
    problem.reference = reference_attention(problem.kv.view, plan,
                                            std::span<const float>(problem.q), {}, of.definition);
    for (const InstructionSet set : detail::cpu::compiled_sets) {
      if (!detail::cpu::is_supported(set)) continue;
      CAPTURE(name_of(set));
      test::Answer<float> together(problem);
      for (int threads = 1; threads <= 7; ++threads) {
        CAPTURE(threads);
        test::Answer<float> answer(problem);
        ChunkAttention<Cpu, HeadDim> attention(
            threads, {.reduce = CpuOptions::Reduce::batch_invariant,
                      .instruction_set = set,
                      .tuning = {.min_tasks = random.pick<Count>({{}, {}, 1, 50}),
                                 .max_task_heads = random.pick<Count>({{}, 1}),
                                 .min_product_lines = random.pick<Count>({{}, 1, 20, 1000})}});
        attention.run(problem.kv.view, problem.plan.view(), of.variant, problem.q, answer.out,
                      {.lse = answer.lse});
        if (threads == 1) together = answer;
        CHECK(same_bits<float>(answer.out, together.out));
        CHECK(same_bits<float>(answer.lse, together.lse));
      }
      CHECK(compare_with_reference(problem.reference, std::span<const float>(together.out)).ok());
      CHECK(test::worst_lse(problem.reference, together.lse) <= 1.0);

      ChunkAttention<Cpu, HeadDim> attention(
          1, {.reduce = CpuOptions::Reduce::batch_invariant, .instruction_set = set});
      const auto heads = static_cast<std::size_t>(problem.num_qo_heads);
      std::vector<float> out(heads * HeadDim), lse(heads);
      for (int row = 0; row < plan.num_rows; ++row) {
        if (plan.num_rows > 100 && random.chance(0.8)) continue;
        CAPTURE(row);
        const RowAlone<T> alone(random, plan, problem.kv.view, row);
        const auto token = static_cast<std::size_t>(plan.row_token[row]);
        const auto q = std::span(problem.q).subspan(token * out.size(), out.size());
        attention.run(alone.kv.view, LiveView::unchecked(alone.plan.view()), of.variant, q, out,
                      {.lse = lse});
        CHECK(
            same_bits<float>(out, std::span(together.out).subspan(token * out.size(), out.size())));
        CHECK(same_bits<float>(lse, std::span(together.lse).subspan(token * heads, heads)));
      }
    }
  }
}

// A variant for a lesser machine has the shapes in which it may differ: they compile for minutes.
#if defined(CHUNKATTN_ISA) && CHUNKATTN_ISA_CHOICE != CHUNKATTN_ISA_CHOICE_native
constexpr bool is_variant = true;
#else
constexpr bool is_variant = false;
#endif
template <int HeadDim, class T>
void check_more_rows(std::uint64_t stream, int rounds) {
  if constexpr (!is_variant) check_rows<HeadDim, T>(stream, rounds);
}

}  // namespace

TEST_CASE("a row has the bits of the same row alone: fp32 K/V") {
  check_more_rows<64, float>(91, 10);
  check_rows<80, float>(92, 10);
  check_more_rows<128, float>(93, 10);
  check_more_rows<256, float>(94, 5);
}

TEST_CASE("a row has the bits of the same row alone: 16-bit K/V") {
  check_rows<24, half>(95, 10);
  check_more_rows<128, half>(96, 10);
  check_rows<64, bfloat16>(97, 10);
  check_more_rows<80, bfloat16>(98, 10);
}

TEST_CASE("a row has the bits of the same row alone: a window, a cap and sinks") {
  check_rows<32, float, test::WindowCapSinksCase>(102, 8);
  check_rows<32, bfloat16, test::WindowCapSinksCase>(103, 8);
  check_rows<32, std::int8_t, test::WindowCapSinksCase>(104, 8);
}

TEST_CASE("a row has the bits of the same row alone: 8-bit K/V") {
  check_rows<64, std::int8_t>(99, 10);
  check_more_rows<64, float8_e4m3>(101, 5);
  check_more_rows<128, std::int8_t>(100, 10);
}
