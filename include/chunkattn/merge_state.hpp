// Merging results of attention: those of the same queries over disjoint sets of tokens become the
// result over all of these tokens. For engines that compute part of a context elsewhere (on another
// device, by another backend).
//
// A result is a state: (out, lse), the normalised output of a query head and the logarithm of its
// softmax denominator. With m the largest lse and w_i = exp(lse_i - m) (the paper's attn_reduce,
// Eqn 2, on normalised outputs):
//     out = sum w_i out_i / sum w_i,   lse = m + log(sum w_i)
//
// An lse below -3e38 (minus infinity included) marks an empty state, whose elements are not read.
// If all states are empty, the result is 0 and minus infinity, as of a row that sees nothing. If
// only one is not empty, the result is that one. An lse of NaN or plus infinity makes the whole
// output NaN, an element of NaN or infinity only that element (not with -ffinite-math-only).
// Tokens, and learned sinks, that several states have counted are counted more than once.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "detail/attention/merge_head.hpp"
#include "detail/attention/state.hpp"
#include "detail/support/check.hpp"
#include "detail/support/config.hpp"
#include "element.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// The base of the logarithm that an lse is: e, as of run(), or 2, as of FlashInfer.
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

/// Whether an lse is that of an empty state: of a row that sees nothing.
[[nodiscard]] CHUNKATTN_HD inline bool is_empty_lse(float lse) noexcept {
  return detail::is_empty_lse(lse);
}

/// Merges a state into another, for one query head of one row (the paper's attn_reduce, Eqn 2); for
/// device code, too.
/// \tparam Base                 LseBase::e or two: of both lse
/// \param out, lse              [head_dim] and its lse: one state, replaced by the merged one
/// \param other_out, other_lse  [head_dim] and its lse: the other state
/// \param head_dim              elements per head of V and of the output
template <LseBase Base = LseBase::e, class X>
CHUNKATTN_HD void merge_state(X* out, float& lse, const X* other_out, float other_lse,
                              int head_dim) noexcept {
  const detail::TwoStates<X> states{{out, other_out}, {lse, other_lse}};
  lse = detail::merge_head<detail::Logarithm<Base>>(states, 2, out, head_dim);
}

/// Merges a result of attention into another, for all rows and query heads (the paper's
/// attn_reduce, Eqn 2).
///
/// \tparam Base                 LseBase::e or two: of both lse
/// \param out, lse              [num_rows][num_qo_heads][head_dim] and [num_rows][num_qo_heads]:
///                              one result, replaced by the merged one
/// \param other_out, other_lse  the other result, of the same shapes
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

/// Merges several results of attention, each as run() gave it, in their order (the paper's
/// attn_reduce, Eqn 2).
///
/// \tparam Base  LseBase::e or two: of all lse
/// \param outs  [num_states][num_rows][num_qo_heads][head_dim]
/// \param lses  [num_states][num_rows][num_qo_heads]
/// \param out   [num_rows][num_qo_heads][head_dim]; may be one of the states
/// \param lse   [num_rows][num_qo_heads]; may be that state's
/// \throws InvalidArgument where the sizes do not fit each other
template <LseBase Base = LseBase::e, QoElement X>
void merge_states(std::span<const X> outs, std::span<const float> lses, int num_states,
                  std::type_identity_t<std::span<X>> out, std::span<float> lse) {
  const std::size_t dim = detail::check_states(outs, lses, num_states, out, lse);
  for (std::size_t line = 0; line < lse.size(); ++line) {
    const detail::StridedStates<X> of_line{outs.data() + line * dim, lses.data() + line,
                                           static_cast<std::ptrdiff_t>(out.size()),
                                           static_cast<std::ptrdiff_t>(lse.size())};
    lse[line] = detail::merge_head<detail::Logarithm<Base>>(
        of_line, num_states, out.data() + line * dim, static_cast<int>(dim));
  }
}

CHUNKATTN_NAMESPACE_END
