// The algebra of partial attention: how results over disjoint sets of tokens combine exactly.
//
// Over a set of tokens with logits w_i and values v_i one row has
//     max m = max w_i,   sum d = sum exp(w_i - m),   output o = sum exp(w_i - m) v_i
// (unnormalised; the paper's m, n and O of Algorithms 1 and 2). Two disjoint sets merge by
// rescaling both to the larger maximum (attn_reduce, Eqn 2). The empty set is d == 0 and o == 0;
// its m is any finite number that loses every comparison. Emptiness is never tested through an
// infinity, so all of this holds under -ffast-math.
//
// NaN is not empty: a NaN logit makes d NaN, and with it o, lse and whatever they are merged with
// (not under -ffinite-math-only, which promises that there is none). So does a logit of +infinity,
// being inf - inf. A logit of -infinity, or below the m of the empty set, has no weight; a set of
// such logits only is empty.
#pragma once

#include <cmath>
#include <cstdint>

#include "../support/bit_cast.hpp"
#include "../support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// The maximum of an empty state: below any logit, far enough from the edge that differences
/// stay finite.
inline constexpr float empty_max = -1.0e38f;

/// Maximum and sum of a softmax over a set of tokens.
struct SoftmaxState {
  float max = empty_max;  ///< largest logit m
  float sum = 0.0f;       ///< sum d of exp(logit - max)

  /// Whether no token was seen.
  [[nodiscard]] CHUNKATTN_HD constexpr bool empty() const noexcept { return sum == 0.0f; }
};

/// How two partial results become one: o = weight_a * o_a + weight_b * o_b.
struct MergedState {
  SoftmaxState state;  ///< of both sets together
  float weight_a;      ///< factor of the first one's weighted values
  float weight_b;      ///< factor of the second one's
};

/// The base that a state's maximum and logarithms are in. Device kernels use one of base 2.
struct BaseE {
  /// e^x
  [[nodiscard]] CHUNKATTN_HD static float exp(float x) noexcept { return std::exp(x); }
  /// The natural logarithm of x.
  [[nodiscard]] CHUNKATTN_HD static float log(float x) noexcept { return std::log(x); }
};

/// Merges the states of two disjoint sets. Two empty ones give an empty one, never NaN; the weight
/// of an empty side is 0.
template <class Base = BaseE>
[[nodiscard]] CHUNKATTN_HD MergedState merge_states(SoftmaxState a, SoftmaxState b) noexcept {
  if (b.empty()) return {a, a.empty() ? 0.0f : 1.0f, 0.0f};
  if (a.empty()) return {b, 0.0f, 1.0f};
  MergedState merged;
  merged.state.max = a.max > b.max ? a.max : b.max;
  merged.weight_a = Base::exp(a.max - merged.state.max);
  merged.weight_b = Base::exp(b.max - merged.state.max);
  merged.state.sum = a.sum * merged.weight_a + b.sum * merged.weight_b;
  return merged;
}

/// What an empty row reports as its lse: minus infinity, made from bits so that -ffast-math cannot
/// take it for granted that it does not exist.
[[nodiscard]] CHUNKATTN_HD inline float empty_lse() noexcept {
  return bit_cast<float>(std::uint32_t{0xff800000u});
}

/// Whether an lse is that of a row that sees nothing.
[[nodiscard]] CHUNKATTN_HD inline bool is_empty_lse(float lse) noexcept {
  const auto bits = bit_cast<std::uint32_t>(lse);  // -ffast-math leaves these alone
  return bits >= bit_cast<std::uint32_t>(-3.0e38f) && bits <= 0xff800000u;  // NaN is above
}

/// Logarithm of the sum of exp(w_i); minus infinity for the empty set.
template <class Base = BaseE>
[[nodiscard]] CHUNKATTN_HD float log_sum_exp(SoftmaxState state) noexcept {
  return state.empty() ? empty_lse() : state.max + Base::log(state.sum);
}

/// 1 / d, or 0 for the empty set, whose output is therefore 0.
[[nodiscard]] CHUNKATTN_HD inline float normaliser(SoftmaxState state) noexcept {
  return state.empty() ? 0.0f : 1.0f / state.sum;
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
