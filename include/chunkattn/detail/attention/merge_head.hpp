// Merges the states of one query head.
#pragma once

#include <cstddef>

#include "../../element.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"
#include "state.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// States at equal distances in memory: those of one query head in merge_states().
template <class X>
struct StridedStates {
  const X* outs;
  const float* lses;
  std::ptrdiff_t out_stride, lse_stride;

  [[nodiscard]] CHUNKATTN_HD const X* out(int s) const noexcept { return outs + s * out_stride; }
  [[nodiscard]] CHUNKATTN_HD float lse(int s) const noexcept { return lses[s * lse_stride]; }
};

/// Two states.
template <class X>
struct TwoStates {
  const X* outs[2];
  float lses[2];

  [[nodiscard]] CHUNKATTN_HD const X* out(int s) const noexcept { return outs[s]; }
  [[nodiscard]] CHUNKATTN_HD float lse(int s) const noexcept { return lses[s]; }
};

/// Merges the states of one query head into `out`, which may be one of theirs; returns the lse.
template <class Base, class States, class X>
CHUNKATTN_HD float merge_head(const States& states, int num_states, X* out, int head_dim) noexcept {
  SoftmaxState all;
  for (int s = 0; s < num_states; ++s)
    if (!is_empty_lse(states.lse(s))) all = merge_states<Base>(all, {states.lse(s), 1.0f}).state;
  const float scale = normaliser(all);
  constexpr int at_once = 16;  // elements are read before the same ones are written
  for (int begin = 0; begin < head_dim; begin += at_once) {
    const int count = head_dim - begin < at_once ? head_dim - begin : at_once;
    float sums[at_once] = {};
    for (int s = 0; s < num_states; ++s) {
      if (is_empty_lse(states.lse(s))) continue;
      const float weight = Base::exp(states.lse(s) - all.max) * scale;
      for (int i = 0; i < count; ++i) sums[i] += weight * to_float(states.out(s)[begin + i]);
    }
    for (int i = 0; i < count; ++i) out[begin + i] = from_float<X>(sums[i]);
  }
  return log_sum_exp<Base>(all);
}

/// Elements of a head; refuses sizes that do not fit each other.
inline std::size_t head_dim_of(std::size_t out_size, std::size_t lse_size) {
  check_argument(lse_size > 0, "lse.size()", lse_size, "at least one query head");
  check_argument(out_size > 0 && out_size % lse_size == 0, "out.size()", out_size,
                 {"a positive multiple of lse.size() = ", lse_size});
  return out_size / lse_size;
}

/// Elements of a head of several results; refuses sizes that do not fit each other.
template <class Outs, class Lses, class Out, class Lse>
std::size_t check_states(const Outs& outs, const Lses& lses, int num_states, const Out& out,
                         const Lse& lse) {
  const std::size_t dim = head_dim_of(out.size(), lse.size());
  check_argument(num_states > 0, "num_states", num_states, "at least one");
  const auto states = static_cast<std::size_t>(num_states);
  check_argument(outs.size() % states == 0 && outs.size() / states == out.size(), "outs.size()",
                 outs.size(), {"num_states * out.size() = ", num_states, " * ", out.size()});
  check_argument(lses.size() % states == 0 && lses.size() / states == lse.size(), "lses.size()",
                 lses.size(), {"num_states * lse.size() = ", num_states, " * ", lse.size()});
  return dim;
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
