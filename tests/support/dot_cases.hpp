// Problems for products of int8 and bfloat16 K and V by dot products.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "attention_case.hpp"
#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "random_plan.hpp"

namespace test {

/// Values of min_product_lines by which all lines go through products of tiles, or are streamed.
inline constexpr int all_products = 1, all_streams = 1 << 20;

/// Options by which dot products compute wherever they can: a matrix unit does not take their
/// place.
inline chunkattn::CpuOptions dot_options(std::optional<int> min_product_lines = {}) {
  chunkattn::CpuOptions options;
#if defined(CHUNKATTN_WITH_DOTS)
  constexpr auto set = chunkattn::InstructionSet::CHUNKATTN_DOTS_SET;
  if (chunkattn::detail::cpu::is_supported(set) && chunkattn::detail::cpu::dot_units().int8)
    options.instruction_set = set;
#endif
  options.tuning.min_product_lines = min_product_lines;
  return options;
}

/// Ragged prefixes: few lines and many, decode rows and prefill, paths that are cut along KV.
inline RandomPlanOptions dot_shape(Random& random) {
  RandomPlanOptions options;
  options.share = random.pick({Share::none, Share::some, Share::all});
  options.num_sequences = random.uniform(1, random.pick({2, 20}));
  options.chunk_size = random.pick({1, 16, 64, 128});
  options.max_length = random.pick({10, 150, 700});
  options.max_queries = random.pick({1, 3, 40});
  return options;
}

/// Some problems of such shapes against the oracle, by some products, all and none.
template <int HeadDim, int ValueDim = HeadDim, class X = float, class T = std::int8_t>
void check_dot_shapes(
    std::uint64_t stream, int cases,
    chunkattn::CpuOptions::Accuracy accuracy = chunkattn::CpuOptions::Accuracy::two_terms) {
  using Attention = chunkattn::ChunkAttention<chunkattn::Cpu, HeadDim, ValueDim>;
  chunkattn::CpuOptions usual = dot_options(), all = dot_options(all_products), many = all,
                        none = dot_options(all_streams);
  many.reduce = chunkattn::CpuOptions::Reduce::spin_lock;
  many.tuning.min_tasks = 32;
  std::vector<Attention> modes;
  for (chunkattn::CpuOptions options : {usual, all, many, none}) {
    options.accuracy = accuracy;
    modes.emplace_back(2, options);
  }
  Random random(stream);
  for (int i = 0; i < scaled(cases); ++i) {
    const int group = random.pick({1, 2, 3, 5, 7, 8, 16, 33});
    const AttentionCase<T, X> problem(random, dot_shape(random), HeadDim, random.uniform(1, 2),
                                      group, random.pick({1.0f, 20.0f}), ValueDim);
    for (Attention& attention : modes) {
      CAPTURE(HeadDim);
      CAPTURE(ValueDim);
      CAPTURE(group);
      CAPTURE(attention.options().tuning.min_product_lines);
      Answer<X> answer(problem);
      attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out,
                    {.lse = answer.lse});
      const chunkattn::Rounding rounding = rounding_in<T>(attention);
      const std::span<const X> out(answer.out);
      CHECK(chunkattn::compare_with_reference(problem.reference, out, rounding).worst <= 1.0);
      CHECK(worst_lse(problem.reference, answer.lse, rounding) <= 1.0);
    }
  }
}

}  // namespace test
