// Concepts of a variant's members, and the checks that they share.
#pragma once

#include <concepts>
#include <cstddef>
#include <span>
#include <string_view>

#include "../../plan_view.hpp"
#include "../support/bit_cast.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"
#include "lanes.hpp"

CHUNKATTN_NAMESPACE_BEGIN
struct KeyRange;
namespace lanes {
struct At;
}

namespace detail {

/// Has `logit(s, at)`: the logit that replaces s.
template <class V>
concept ChangesLogits = requires(const V& variant, lanes::Logit s, lanes::At at) {
  { variant.logit(s, at) } -> lanes::Real;
};

/// Has `visible(at)`: whether the row sees the key.
template <class V>
concept HidesKeys = requires(const V& variant, lanes::At at) {
  { variant.visible(at) } -> lanes::Truth;
};

/// Has `masked(query)`: keys that are not visible to a row at this position.
template <class V>
concept SkipsKeys = requires(const V& variant, int query) {
  { variant.masked(query) } -> std::convertible_to<KeyRange>;
};

/// Has `sink(at)`: one more logit in the softmax, the same for all keys.
template <class V>
concept HasSinks = requires(const V& variant, lanes::At at) {
  { variant.sink(at) } -> lanes::Operand;
  requires decltype(lanes::expression(variant.sink(at)))::fixed;
};

/// Has `check(num_qo_heads)`, which throws InvalidArgument if members make no sense.
template <class V>
concept ChecksItself =
    requires(const V& variant, int num_qo_heads) { variant.check(num_qo_heads); };

inline void check_per_head(std::string_view name, std::span<const float> numbers,
                           int num_qo_heads) {
  if (numbers.size() != static_cast<std::size_t>(num_qo_heads)) [[unlikely]]
    fail_argument(joined({name, ".size()"}), numbers.size(), {"num_qo_heads = ", num_qo_heads});
  if (numbers.data() == nullptr) [[unlikely]]
    fail_argument(joined({name, ".data()"}), "null", "memory");
}

/// Checks slopes in memory of the host.
inline void check_slopes(std::string_view name, std::span<const float> slopes) {
  for (std::size_t head = 0; head < slopes.size(); ++head)
    if (!is_positive_finite(slopes[head])) [[unlikely]]
      fail_argument(joined({name, "[", head, "]"}), slopes[head], "a positive finite slope");
}

/// Checks that a variant hides from each row all keys before the plan's window, which the plan may
/// lack.
template <class V>
void check_window(const V& variant, const PlanView& plan) {
  if (plan.window == 0) [[likely]]
    return;
  for (std::int32_t row = 0; row < plan.num_rows; ++row) {
    const std::int32_t begin = plan.row_kv_len[row] - plan.window;
    if (begin <= 0) continue;
    if constexpr (SkipsKeys<V>) {
      const auto range = variant.masked(plan.row_kv_len[row] - 1);
      if (range.begin <= 0 && range.end >= begin) continue;
    }
    fail_argument("variant", "without the window of the plan's layers",
                  {"SlidingWindow{", plan.window, "}, or a smaller one, with keep = 0"});
  }
}

/// Checks what a variant points to in memory of the host: overloads in variants.hpp.
template <class V>
void check_host_memory(const V&) noexcept {}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
