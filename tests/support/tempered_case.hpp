// A variant that reads a table by position, and a problem with a row that has no position: a
// read before the table is noticed.
#pragma once

#include <cstddef>
#include <span>

#include "attention_case.hpp"
#include "chunkattn/debug/reference.hpp"
#include "chunkattn/variants.hpp"
#include "guarded_table.hpp"
#include "random_plan.hpp"

namespace test {

/// Logits of a row are multiplied by a number of its position.
struct Tempered {
  const float* by_position;
  auto logit(auto s, chunkattn::lanes::At at) const {
    return s * chunkattn::lanes::table(by_position, at.q_idx);
  }
};

template <class T, class X = float>
struct TemperedCase {
  GuardedTable table;
  Tempered variant;
  AttentionCase<T, X> problem;
  chunkattn::Reference reference;

  TemperedCase(Random& random, int dim)
      : variant{fill(table)}, problem(random, plan(random), dim, 1, 3), reference(expected()) {}

 private:
  static const float* fill(const GuardedTable& table) {
    for (std::size_t i = 0; i < table.values().size(); ++i)
      table.values()[i] = 0.5f + 0.25f * static_cast<float>(i % 7);
    return table.values().data();
  }
  static RandomPlan plan(Random& random) {
    RandomPlanOptions options;
    options.share = Share::all;
    options.num_sequences = 7;
    options.max_length = 100;
    RandomPlan plan = make_random_plan(random, options);
    plan.row_kv_len[2] = 0;  // it sees nothing
    return plan;
  }
  chunkattn::Reference expected() const {
    chunkattn::ReferenceVariant definition;
    definition.logit = [this](double s, chunkattn::LogitIndex at) {
      return s * static_cast<double>(variant.by_position[at.q_idx]);
    };
    definition.gain = 2;
    return chunkattn::reference_attention(problem.kv.view, problem.plan.view(),
                                          std::span<const X>(problem.q), {}, definition);
  }
};

}  // namespace test
