// Variants of attention with random members, each beside its definition in double precision, and
// what holds their answers against the oracle.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "attention_case.hpp"
#include "chunkattn/debug/reference.hpp"
#include "chunkattn/variants.hpp"
#include "nan_place.hpp"

namespace test {

using chunkattn::LogitIndex;
using chunkattn::ReferenceVariant;

/// What members are drawn for.
struct VariantShape {
  int num_qo_heads;
};

/// A number in [-1, 1] that looks random, the same for the same index.
CHUNKATTN_HD inline float noise(LogitIndex at) {
  auto x = static_cast<std::uint32_t>(at.row * 73 + at.kv_idx * 31 + at.head * 17);
  x = (x ^ (x >> 7)) * 0x9e3779b1u;
  return static_cast<float>(x >> 8) * 0x1p-23f - 1.0f;
}

// Each case has `variant` and `definition`, made from random members, and the number of its random
// inputs where it is one of TEST_VARIANT_CASES.

struct PlainCase {
  chunkattn::NoVariant variant;
  ReferenceVariant definition;
  PlainCase(Random&, VariantShape) {}
};

struct SoftCapCase {
  static constexpr std::uint64_t stream = 10;
  chunkattn::SoftCap variant;
  ReferenceVariant definition;

  SoftCapCase(Random& random, VariantShape) : variant{random.pick({0.5f, 5.0f, 50.0f})} {
    const auto cap = static_cast<double>(variant.cap);
    definition.logit = [cap](double s, LogitIndex) { return cap * std::tanh(s / cap); };
  }
};

struct WindowCase {
  static constexpr std::uint64_t stream = 20;
  chunkattn::SlidingWindow variant;
  ReferenceVariant definition;

  WindowCase(Random& random, VariantShape)
      : variant{random.pick({1, 7, 64, 100, 1000}), random.pick({0, 0, 5})} {
    const auto window = variant;
    definition.visible = [window](LogitIndex at) {
      return at.kv_idx > at.q_idx - window.size || at.kv_idx < window.keep;
    };
  }
};

struct SinksCase {
  static constexpr std::uint64_t stream = 30;
  std::vector<float> logits;
  chunkattn::Sinks variant;
  ReferenceVariant definition;

  SinksCase(Random& random, VariantShape shape)
      : logits(static_cast<std::size_t>(shape.num_qo_heads)), variant{logits} {
    random.fill(std::span(logits), 4.0f);
    if (random.chance(0.3))
      logits[random.index(logits.size())] = -std::numeric_limits<float>::infinity();
    definition.sink = [this](int head) {
      return static_cast<double>(logits[static_cast<std::size_t>(head)]);
    };
  }
};

struct AlibiCase {
  static constexpr std::uint64_t stream = 40;
  std::vector<float> slopes;
  chunkattn::Alibi variant;
  ReferenceVariant definition;

  AlibiCase(Random& random, VariantShape shape)
      : slopes(static_cast<std::size_t>(shape.num_qo_heads)), variant{slopes} {
    for (float& slope : slopes) slope = std::exp2(-static_cast<float>(random.uniform(1, 8)));
    definition.logit = [this](double s, LogitIndex at) {
      return s - static_cast<double>(slopes[static_cast<std::size_t>(at.head)]) *
                     (at.q_idx - at.kv_idx);
    };
  }
};

/// Adds 2 * noise, and minus infinity at some indices.
struct BiasCase {
  static constexpr std::uint64_t stream = 50;
  CHUNKATTN_HD static float bias(LogitIndex at) {
    const float x = noise(at);
    return x > 0.9f ? -std::numeric_limits<float>::infinity() : 2.0f * x;
  }
  struct Function {
    CHUNKATTN_HD float operator()(LogitIndex at) const { return bias(at); }
  };
  chunkattn::Bias<Function> variant{};
  ReferenceVariant definition;

  BiasCase(Random&, VariantShape) {
    definition.logit = [](double s, LogitIndex at) { return s + static_cast<double>(bias(at)); };
  }
};

/// Masks a third of all indices, and every index for some rows.
struct MaskCase {
  static constexpr std::uint64_t stream = 60;
  CHUNKATTN_HD static bool shows(LogitIndex at) { return at.row % 5 != 3 && noise(at) > -0.4f; }
  struct Function {
    CHUNKATTN_HD bool operator()(LogitIndex at) const { return shows(at); }
  };
  chunkattn::Mask<Function> variant{};
  ReferenceVariant definition;

  MaskCase(Random&, VariantShape) {
    definition.visible = [](LogitIndex at) { return shows(at); };
  }
};

/// What a user might write: weak logits far away, a table by distance, and pages of 16 keys of
/// which each head skips some.
struct UserVariant {
  const float* by_distance;  ///< [64]

  auto logit(auto s, chunkattn::lanes::At at) const {
    using namespace chunkattn::lanes;
    const auto distance = at.q_idx - at.kv_idx;
    return select(distance >= 32 && at.head != 1, -min(-s, 3) / 2, s * 0.75f) +
           table(by_distance, select(distance < 40, distance, min(distance, 63)));
  }
  auto visible(chunkattn::lanes::At at) const {
    return !(at.kv_idx * 3 > at.q_idx * 2 && at.kv_idx + at.row == at.q_idx) ||
           at.kv_idx == at.q_idx;
  }
};
struct UserCase {
  static constexpr std::uint64_t stream = 70;
  std::vector<float> by_distance = std::vector<float>(64);
  UserVariant variant{by_distance.data()};
  ReferenceVariant definition;

  UserCase(Random& random, VariantShape) {
    random.fill(std::span(by_distance));
    definition.logit = [this](double s, LogitIndex at) {
      const int distance = at.q_idx - at.kv_idx;
      const double weak = distance >= 32 && at.head != 1 ? std::max(s, -3.0) / 2 : s * 0.75;
      return weak +
             static_cast<double>(by_distance[static_cast<std::size_t>(std::min(distance, 63))]);
    };
    definition.visible = [](LogitIndex at) {
      return at.kv_idx == at.q_idx || at.kv_idx * 3 <= at.q_idx * 2 ||
             at.kv_idx + at.row != at.q_idx;
    };
  }
};

/// What every backend is tested with.
#define TEST_VARIANT_CASES                                                               \
  test::SoftCapCase, test::WindowCase, test::SinksCase, test::AlibiCase, test::BiasCase, \
      test::MaskCase, test::UserCase

/// Two cases at once: what is to be seen must be visible in both, logits go through one after the
/// other.
template <class A, class B>
struct PairCase {
  A a;
  B b;
  decltype(chunkattn::combine(a.variant, b.variant)) variant;
  ReferenceVariant definition;

  PairCase(Random& random, VariantShape shape)
      : a(random, shape), b(random, shape), variant(chunkattn::combine(a.variant, b.variant)) {
    const ReferenceVariant &first = a.definition, &second = b.definition;
    definition.logit = [&](double s, LogitIndex at) {
      if (first.logit) s = first.logit(s, at);
      return second.logit ? second.logit(s, at) : s;
    };
    definition.visible = [&](LogitIndex at) {
      return (!first.visible || first.visible(at)) && (!second.visible || second.visible(at));
    };
    if (first.sink) definition.sink = first.sink;
    if (second.sink) definition.sink = second.sink;
  }
  PairCase(const PairCase&) = delete;
};

/// What changes most about a walk: keys that are not read, logits, and one more of them.
using WindowCapSinksCase = PairCase<PairCase<WindowCase, SoftCapCase>, SinksCase>;

/// Makes K and V NaN wherever no query head may look: a read of it is noticed.
template <class T>
void poison_hidden(const RandomPlan& plan, const chunkattn::KvView<T>& kv, int group,
                   const ReferenceVariant& definition) {
  if (!definition.visible) return;
  std::vector<bool> seen(static_cast<std::size_t>(kv.num_chunks * kv.chunk_size * kv.num_kv_heads));
  const auto index = [&](int chunk, int offset, int head) {
    return static_cast<std::size_t>((chunk * kv.chunk_size + offset) * kv.num_kv_heads + head);
  };
  for (std::size_t row = 0; row < plan.row_kv_len.size(); ++row)
    for (int key = 0; key < plan.row_kv_len[row]; ++key) {
      const chunkattn::Piece slot = place_of(plan, row, key);
      for (int head = 0; head < kv.num_kv_heads * group; ++head)
        if (definition.visible({plan.row_token[row], plan.row_kv_len[row] - 1, key, head}))
          seen[index(slot.chunk, slot.begin, head / group)] = true;
    }
  for (int chunk = 0; chunk < kv.num_chunks; ++chunk)
    for (int offset = 0; offset < kv.chunk_size; ++offset)
      for (int head = 0; head < kv.num_kv_heads; ++head) {
        if (seen[index(chunk, offset, head)]) continue;
        const float nan = std::numeric_limits<float>::quiet_NaN();
        if constexpr (chunkattn::has_row_scales<T>) {
          *kv.k_row_scale(chunk, head, offset) = nan;
          *kv.v_row_scale(chunk, head, offset) = nan;
        }
        if constexpr (!std::is_same_v<T, std::int8_t>) {
          std::fill_n(kv.k_row(chunk, head, offset), kv.head_dim, chunkattn::from_float<T>(nan));
          std::fill_n(kv.v_row(chunk, head, offset), kv.dim_of_v(), chunkattn::from_float<T>(nan));
        }
      }
}

/// Every mode of attention that computes by other kernels or in another order.
template <int HeadDim, int ValueDim = HeadDim>
auto variant_modes() {
  using Attention = chunkattn::ChunkAttention<chunkattn::Cpu, HeadDim, ValueDim>;
  std::vector<Attention> modes;
  modes.emplace_back(2);
  modes.emplace_back(2, chunkattn::CpuOptions{.reduce = chunkattn::CpuOptions::Reduce::spin_lock,
                                              .tuning = {.min_tasks = 32, .min_product_lines = 1}});
  modes.emplace_back(2, chunkattn::CpuOptions{.tuning = {.min_product_lines = 1 << 20}});
  modes.emplace_back(
      2, chunkattn::CpuOptions{.reduce = chunkattn::CpuOptions::Reduce::batch_invariant});
  return modes;
}

/// The CPU as a backend of check_variant(): a variant in each mode.
template <int HeadDim, int ValueDim = HeadDim>
struct CpuModes {
  template <class T>
  using Query = float;
  static constexpr int head_dim = HeadDim;
  static constexpr int value_dim = ValueDim;
  static constexpr int long_path = 3000;  ///< tokens from which on walks are cut

  decltype(variant_modes<HeadDim, ValueDim>()) modes = variant_modes<HeadDim, ValueDim>();

  /// Calls check(out, lse, rounding) with each answer.
  template <class T, class V, class F>
  void each_answer(const AttentionCase<T>& problem, const V& variant, const F& check) {
    for (auto& attention : modes) {
      CAPTURE(static_cast<int>(attention.options().reduce));
      CAPTURE(attention.options().tuning.min_product_lines);
      Answer<> answer(problem);
      attention.run(problem.kv.view, problem.plan.view(), variant, problem.q, answer.out,
                    {.lse = answer.lse});
      check(std::span<const float>(answer.out), answer.lse, rounding_in<T>(attention));
    }
  }
};

/// One problem in each of a backend's modes.
template <class Backend, class T, class X, class Case>
void check_variant_case(Backend& backend, const AttentionCase<T, X>& problem, int group,
                        const Case& of) {
  poison_hidden(problem.plan, problem.kv.view, group, of.definition);
  const chunkattn::Reference reference = chunkattn::reference_attention(
      problem.kv.view, problem.plan.view(), std::span<const X>(problem.q), {}, of.definition);
  const auto check = [&](std::span<const X> out, std::span<const float> lse,
                         chunkattn::Rounding rounding) {
    CHECK(chunkattn::compare_with_reference(reference, out, rounding).worst <= 1.0);
    CHECK(worst_lse(reference, lse, rounding) <= 1.0);
  };
  backend.each_answer(problem, of.variant, check);
}

/// A variant on a backend, generated: groups of 1, 4 and 6, nothing, some and all shared, decode
/// and prefill, and now and then paths long enough to be cut.
template <class Case, class T, class Backend>
void check_variant_on(Backend backend, std::uint64_t stream) {
  using X = typename Backend::template Query<T>;
  Random random(stream);
  for (const int group : {1, 4, 6}) {
    for (const Share share : {Share::none, Share::some, Share::all}) {
      for (const int queries : {1, 9}) {
        RandomPlanOptions options;
        options.share = share;
        const bool is_long = random.chance(0.1);
        options.num_sequences = is_long ? 2 : random.uniform(2, 8);
        options.max_length = is_long ? Backend::long_path : random.pick({20, 110});
        options.max_queries = queries;
        options.chunk_size = random.pick({4, 16, 64});
        const int heads = random.uniform(1, 2);
        const AttentionCase<T, X> problem(random, options, Backend::head_dim, heads, group,
                                          random.pick({1.0f, 10.0f}), Backend::value_dim);
        CAPTURE(stream);
        CAPTURE(group);
        CAPTURE(static_cast<int>(share));
        CAPTURE(queries);
        const Case of(random, VariantShape{heads * group});
        check_variant_case(backend, problem, group, of);
      }
    }
  }
}

/// The same on the CPU.
template <class Case, class T, int HeadDim = 32, int ValueDim = HeadDim>
void check_variant(std::uint64_t stream) {
  check_variant_on<Case, T>(CpuModes<HeadDim, ValueDim>{}, stream);
}

}  // namespace test
