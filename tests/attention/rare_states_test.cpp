// Rare states in every unit that computes products, against the oracle: NaN, infinities and numbers
// that a unit does not hold, in some lines of a worker, with NaN in all memory that calls leave.
#include "support/rare_states.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/attention.hpp"
#include "support/attention_case.hpp"

using namespace chunkattn;
using Reduce = CpuOptions::Reduce;
using Accuracy = CpuOptions::Accuracy;
using Count = std::optional<int>;
using test::Random;

#if defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__

TEST_CASE("rare states") {
  std::printf("skipped: rare states: -ffinite-math-only says there are no NaN and infinities\n");
}

#else

namespace {

constexpr int head_dim = 32, value_dim = 64;

CpuOptions random_options(Random& random) {
  CpuOptions options;
  options.reduce = random.pick({Reduce::deterministic, Reduce::spin_lock, Reduce::batch_invariant});
  options.accuracy = random.pick({Accuracy::two_terms, Accuracy::two_terms, Accuracy::one_term});
  if (random.chance(0.1)) options.accuracy = Accuracy::fp32;
  options.tuning.min_tasks = random.pick<Count>({{}, 1, 32});
  options.tuning.max_task_heads = random.pick<Count>({{}, 1});
  options.tuning.min_product_lines = random.pick<Count>({{}, 1, 1, 1 << 20});
  return options;
}

#if defined(CHUNKATTN_SOFTWARE_TILES)
constexpr Accuracy keeping_subnormals = Accuracy::fp32;
constexpr int cases = 40;  // a model computes one element after the other
#else
constexpr Accuracy keeping_subnormals = Accuracy::two_terms;
constexpr int cases = 150;
#endif

template <class T, class Variant>
void check_variant_in(std::uint64_t stream) {
  using Attention = ChunkAttention<Cpu, head_dim, value_dim>;
  Random random(stream);
  std::vector<Attention> attentions;  // each takes whatever shapes come
  for (int i = 0; i < 12; ++i)
    attentions.emplace_back(random.uniform(1, 3), random_options(random));
  for (int i = 0; i < test::scaled(cases); ++i) {
    const test::RareCase<T, Variant> problem(random, head_dim, value_dim);
    for (int n = 0; n < 3; ++n) {
      Attention& attention = attentions[random.index(attentions.size())];
      const CpuOptions& options = attention.options();
      if (problem.subnormal && options.accuracy != keeping_subnormals) continue;
      test::Answer<> answer(problem);
      const auto run = [&] {
        std::fill(answer.out.begin(), answer.out.end(), 7.0f);  // a NaN must be written
        std::fill(answer.lse.begin(), answer.lse.end(), 7.0f);
        test::poison_stack();
        attention.run(problem.kv.view, problem.plan.view(), problem.variant.variant, problem.q,
                      answer.out, {.lse = answer.lse});
      };
      run();
      poison_scratch(attention, random.pick({std::numeric_limits<float>::quiet_NaN(), 1e30f}));
      run();
      CAPTURE(std::string(element_name<T>()));
      CAPTURE(i);
      CAPTURE(static_cast<int>(options.reduce));
      CAPTURE(static_cast<int>(options.accuracy));
      CAPTURE(options.tuning.min_tasks.value_or(-1));
      CAPTURE(options.tuning.min_product_lines.value_or(-1));
      CHECK(problem.wrong(answer.out, answer.lse, test::rounding_in<T>(attention)) == "");
    }
  }
}

template <class T>
void check_rare_states(std::uint64_t stream) {
  check_variant_in<T, test::PlainCase>(stream);
  check_variant_in<T, test::PairCase<test::WindowCapSinksCase, test::AlibiCase>>(stream + 1);
}

}  // namespace

// Units in software are those of 16 and 8 bits; half is another element for tiles alone.
#if !defined(CHUNKATTN_SOFTWARE_TILES) && !defined(CHUNKATTN_SOFTWARE_DOTS)
TEST_CASE("rare states: fp32 K/V") {
  check_rare_states<float>(201);
}
#endif
#if defined(CHUNKATTN_SOFTWARE_TILES)
TEST_CASE("rare states: half K/V") {
  check_rare_states<half>(205);
}
#endif
TEST_CASE("rare states: bfloat16 K/V") {
  check_rare_states<bfloat16>(203);
}
TEST_CASE("rare states: int8 K/V") {
  check_rare_states<std::int8_t>(207);
}

#endif
