// One random attention problem and its answer: what every oracle test draws from.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "chunkattn/kv_view.hpp"
#include "random_plan.hpp"

namespace test {

/// 8-bit K/V memory with its scales, poisoned by NaN scales where no row may look.
template <class T>
struct ScaledStorage {
  std::vector<T> k, v;
  std::vector<float> k_scale, v_scale;
  chunkattn::KvView<T> view;

  ScaledStorage(int num_chunks, int num_kv_heads, int chunk_size, int head_dim,
                std::optional<int> value_dim = {}) {
    const auto rows = static_cast<std::size_t>(num_chunks) *
                      static_cast<std::size_t>(num_kv_heads) * static_cast<std::size_t>(chunk_size);
    k.resize(rows * static_cast<std::size_t>(head_dim));
    v.resize(rows * static_cast<std::size_t>(value_dim.value_or(head_dim)));
    k_scale.resize(rows);
    v_scale.resize(rows);
    view = chunkattn::make_kv_view(k.data(), v.data(), k_scale.data(), v_scale.data(),
                                   {num_chunks, num_kv_heads, chunk_size, head_dim, value_dim});
  }
};

using QuantizedStorage = ScaledStorage<std::int8_t>;

template <class T>
using Storage = std::conditional_t<chunkattn::has_row_scales<T>, ScaledStorage<T>, KvStorage<T>>;

/// The 8 bits or more that a number which they hold exactly is stored as.
template <class T>
T stored(float value) {
  if constexpr (std::is_same_v<T, std::int8_t>)
    return static_cast<std::int8_t>(value);
  else
    return chunkattn::from_float<T>(value);
}

template <class T>
  requires chunkattn::has_row_scales<T>
void fill_kv(Random& random, const RandomPlan& plan, const chunkattn::KvView<T>& kv,
             float k_deviation = 1.0f, float v_deviation = 1.0f) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (int chunk = 0; chunk < kv.num_chunks; ++chunk) {
    for (int head = 0; head < kv.num_kv_heads; ++head) {
      for (int t = 0; t < kv.chunk_size; ++t) {
        *kv.k_row_scale(chunk, head, t) = nan;
        *kv.v_row_scale(chunk, head, t) = nan;
        if constexpr (!std::is_same_v<T, std::int8_t>) {
          std::fill_n(kv.k_row(chunk, head, t), kv.head_dim, chunkattn::from_float<T>(nan));
          std::fill_n(kv.v_row(chunk, head, t), kv.dim_of_v(), chunkattn::from_float<T>(nan));
        }
      }
    }
  }
  std::vector<float> row(static_cast<std::size_t>(kv.head_dim));
  std::vector<float> v_row(static_cast<std::size_t>(kv.dim_of_v()));
  plan.for_each_visible([&](int chunk, int offset) {
    for (int head = 0; head < kv.num_kv_heads; ++head) {
      random.fill(std::span(row), k_deviation);
      *kv.k_row_scale(chunk, head, offset) =
          chunkattn::quantize_row(row.data(), kv.head_dim, kv.k_row(chunk, head, offset));
      random.fill(std::span(v_row), v_deviation);
      *kv.v_row_scale(chunk, head, offset) =
          chunkattn::quantize_row(v_row.data(), kv.dim_of_v(), kv.v_row(chunk, head, offset));
    }
  });
}

/// A plan, K/V, queries and the oracle's answer.
template <class T, class X = float>
struct AttentionCase {
  RandomPlan plan;
  Storage<T> kv;
  int num_qo_heads;
  int head_dim;
  std::vector<X> q;
  chunkattn::Reference reference;

  /// \param q_deviation  1: logits of about unit variance; 20: logits up to about ±80
  /// \param value_dim    elements per row of V; unset: as many as of K
  AttentionCase(Random& random, const RandomPlanOptions& options, int head_dim_, int num_kv_heads,
                int group, float q_deviation = 1.0f, std::optional<int> value_dim = {})
      : AttentionCase(random, make_random_plan(random, options), head_dim_, num_kv_heads, group,
                      q_deviation, value_dim) {}

  AttentionCase(Random& random, RandomPlan plan_, int head_dim_, int num_kv_heads, int group,
                float q_deviation = 1.0f, std::optional<int> value_dim = {})
      : plan(std::move(plan_)),
        kv(plan.num_chunks, num_kv_heads, plan.chunk_size, head_dim_, value_dim),
        num_qo_heads(num_kv_heads * group),
        head_dim(head_dim_) {
    fill_kv(random, plan, kv.view);
    q.resize(static_cast<std::size_t>(plan.num_rows()) * static_cast<std::size_t>(num_qo_heads) *
             static_cast<std::size_t>(head_dim));
    random.fill(std::span(q), q_deviation);
    reference = chunkattn::reference_attention(kv.view, plan.view(), std::span<const X>(q));
  }
};

/// An answer, poisoned before each run.
template <class X = float>
struct Answer {
  std::vector<X> out;
  std::vector<float> lse;

  template <class Case>
  explicit Answer(const Case& problem)
      : out(problem.reference.out.size(),
            chunkattn::from_float<X>(std::numeric_limits<float>::quiet_NaN())),
        lse(problem.reference.lse.size(), std::numeric_limits<float>::quiet_NaN()) {}
};

/// How `attention` rounds products over K and V of T.
template <class T, int HeadDim, int ValueDim, class Exec>
chunkattn::Rounding rounding_in(
    const chunkattn::ChunkAttention<chunkattn::Cpu, HeadDim, ValueDim, Exec>& attention) {
  using Reduce = chunkattn::CpuOptions::Reduce;
  using Accuracy = chunkattn::CpuOptions::Accuracy;
  const chunkattn::CpuOptions& options = attention.options();
  if (options.accuracy == Accuracy::fp32 || options.reduce == Reduce::batch_invariant) return {};
  const bool amx = options.instruction_set == chunkattn::InstructionSet::amx;
#if defined(CHUNKATTN_SOFTWARE_DOTS)
  constexpr bool dots = true, pairs = true;
#elif defined(CHUNKATTN_DOTS_SET)
  const bool has = options.instruction_set == chunkattn::InstructionSet::CHUNKATTN_DOTS_SET;
  const bool dots = (has || amx) && chunkattn::detail::cpu::dot_units().int8;
  const bool pairs = has && chunkattn::detail::cpu::dot_units().bfloat16;
#else
  constexpr bool dots = false, pairs = false;
#endif
  const bool int16 = options.instruction_set == chunkattn::InstructionSet::avx2;
  const bool integers = (dots || int16) && std::is_same_v<T, std::int8_t> && HeadDim <= 512;
#if defined(CHUNKATTN_SOFTWARE_TILES)
  constexpr bool tiles = true;
#else
  const bool tiles = amx && !integers;
#endif
  if (tiles && HeadDim % 32 == 0 && ValueDim % 32 == 0)
    return chunkattn::rounding_of<T>(options.accuracy);
  if (integers) return chunkattn::rounding_of_dots(options.instruction_set);
  if (pairs && std::is_same_v<T, chunkattn::bfloat16>)
    return chunkattn::rounding_of_pairs(options.accuracy);
  return {};
}

/// Largest |lse - ref| / bound; infinity for NaN.
inline double worst_lse(const chunkattn::Reference& reference, std::span<const float> lse,
                        chunkattn::Rounding rounding = {}) {
  double worst = 0;
  for (std::size_t i = 0; i < lse.size(); ++i) {
    const double expected = reference.lse[i];
    const double got = static_cast<double>(lse[i]);
    if (expected == -std::numeric_limits<double>::infinity() && got == expected) continue;
    const double ratio = std::abs(got - expected) / reference.lse_bound(i, rounding);
    if (!(ratio <= worst)) worst = ratio >= 0 ? ratio : std::numeric_limits<double>::infinity();
  }
  return worst;
}

}  // namespace test
