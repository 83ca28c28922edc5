// Merging results of attention: what run() gives for the same queries over disjoint sets of tokens
// becomes what it would give for all of them together. For engines that compute part of a context
// elsewhere (another device, another backend, the tokens of a step itself).
//
// A result is a state: (out, lse), the normalised output of a query head and the logarithm of its
// softmax denominator. With m the largest lse and w_i = exp(lse_i - m) (the paper's attn_reduce,
// Eqn 2, on normalised outputs):
//     out = sum w_i out_i / sum w_i,   lse = m + log(sum w_i)
//
// An lse below -3e38 (minus infinity included) marks an empty state, whose elements are not looked
// at: they may be anything. Only empty states: 0 and minus infinity, as of a row that sees nothing.
// A single state that is not empty keeps its values. An lse of NaN or plus infinity makes the whole
// output NaN, an element of NaN or infinity that element alone (not under -ffinite-math-only).
// States over sets that overlap, and learned sinks that several states have counted, count twice.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "detail/attention/merge_head.hpp"
#include "detail/attention/state.hpp"
#include "detail/base/check.hpp"
#include "detail/base/config.hpp"
#include "element.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// What an lse is a logarithm of: e, as run() gives it, or 2, as FlashInfer does.
enum class LseBase { e, two };

namespace detail {

/// Exponential and logarithm of base 2.
struct Base2 {
  [[nodiscard]] CHUNKATTN_HD static float exp(float x) noexcept { return std::exp2(x); }
  [[nodiscard]] CHUNKATTN_HD static float log(float x) noexcept { return std::log2(x); }
};
template <LseBase Base>
using Logarithm = std::conditional_t<Base == LseBase::e, BaseE, Base2>;

}  // namespace detail

/// Whether an lse is that of a row that sees nothing.
[[nodiscard]] CHUNKATTN_HD inline bool is_empty_lse(float lse) noexcept {
  return detail::is_empty_lse(lse);
}

/// Merges a state into another, for one query head of one row; for device code, too.
/// \tparam Base     of both lse, and of the result's
/// \param out, lse  [head_dim] and its lse: one state, then both together
template <LseBase Base = LseBase::e, class X>
CHUNKATTN_HD void merge_state(X* out, float& lse, const X* other_out, float other_lse,
                              int head_dim) noexcept {
  const detail::TwoStates<X> states{{out, other_out}, {lse, other_lse}};
  lse = detail::merge_head<detail::Logarithm<Base>>(states, 2, out, head_dim);
}

/// The same for whole results.
///
/// \param out, lse              [num_rows][num_qo_heads][head_dim] and [num_rows][num_qo_heads]
/// \param other_out, other_lse  the other result, of the same shape
/// \throws InvalidArgument where the sizes do not fit each other
template <LseBase Base = LseBase::e, QoElement X>
void merge_state(std::span<X> out, std::span<float> lse,
                 std::type_identity_t<std::span<const X>> other_out,
                 std::span<const float> other_lse) {
  const std::size_t dim = detail::head_dim_of(out.size(), lse.size());
  detail::check_argument(other_out.size() == out.size(), "other_out.size()", other_out.size(),
                         {"out.size() = ", out.size()});
  detail::check_argument(other_lse.size() == lse.size(), "other_lse.size()", other_lse.size(),
                         {"lse.size() = ", lse.size()});
  for (std::size_t line = 0; line < lse.size(); ++line)
    merge_state<Base>(out.data() + line * dim, lse[line], other_out.data() + line * dim,
                      other_lse[line], static_cast<int>(dim));
}

/// Merges several results, each as run() gave it, in their order.
///
/// \param outs  [num_states][num_rows][num_qo_heads][head_dim]
/// \param lses  [num_states][num_rows][num_qo_heads]
/// \param out   [num_rows][num_qo_heads][head_dim]; may be one of the states
/// \param lse   [num_rows][num_qo_heads]; may be that state's
/// \throws InvalidArgument where the sizes do not fit each other
template <LseBase Base = LseBase::e, QoElement X>
void merge_states(std::span<const X> outs, std::span<const float> lses, int num_states,
                  std::type_identity_t<std::span<X>> out, std::span<float> lse) {
  const std::size_t dim = detail::head_dim_of(out.size(), lse.size());
  detail::check_argument(num_states > 0, "num_states", num_states, "at least one");
  const auto states = static_cast<std::size_t>(num_states);
  detail::check_argument(outs.size() % states == 0 && outs.size() / states == out.size(),
                         "outs.size()", outs.size(),
                         {"num_states * out.size() = ", num_states, " * ", out.size()});
  detail::check_argument(lses.size() % states == 0 && lses.size() / states == lse.size(),
                         "lses.size()", lses.size(),
                         {"num_states * lse.size() = ", num_states, " * ", lse.size()});
  for (std::size_t line = 0; line < lse.size(); ++line) {
    const detail::StridedStates<X> of_line{outs.data() + line * dim, lses.data() + line,
                                           static_cast<std::ptrdiff_t>(out.size()),
                                           static_cast<std::ptrdiff_t>(lse.size())};
    lse[line] = detail::merge_head<detail::Logarithm<Base>>(
        of_line, num_states, out.data() + line * dim, static_cast<int>(dim));
  }
}

CHUNKATTN_NAMESPACE_END
