// HeadRows: where the rows of q, k, v or out lie, if not one behind the other.
#pragma once

#include <cstdint>

#include "detail/support/check.hpp"
#include "detail/support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Rows of q, k, v or out, [num_tokens][num_heads][head_dim], at distances of their own, in
/// elements: a part of what a fused projection gave, or a tensor whose heads come before its
/// tokens. The elements of a row are neighbours. It owns nothing and is an aggregate: name its
/// members.
///
///     // of [q heads | K heads | V heads], for write() and run()
///     const HeadRows<float> all{.data = qkv, .num_tokens = n, .num_heads = 12, .head_dim = 64,
///                               .stride_token = 12 * 64, .stride_head = 64};
///     const auto q = all.heads(0, 8), k = all.heads(8, 2), v = all.heads(10, 2);
///
/// A stride of a single token or head is not looked at. Others are at least head_dim, and no two
/// rows overlap: one of them is at least as long as all that the other one spans.
///
/// \tparam X  float, half or bfloat16; const where nothing is written
template <class X>
struct HeadRows {
  X* data = nullptr;              ///< first element of the row of token 0 and head 0
  std::int32_t num_tokens = 0;    ///< the plan's query tokens, num_rows
  std::int32_t num_heads = 0;     ///< heads of each token
  std::int32_t head_dim = 0;      ///< elements of a row
  std::int64_t stride_token = 0;  ///< elements from a token to the next
  std::int64_t stride_head = 0;   ///< elements from a head to the next

  /// First element of a row.
  [[nodiscard]] X* row(std::int64_t token, std::int64_t head) const noexcept {
    return data + token * stride_token + head * stride_head;
  }
  /// The rows of the heads [first, first + count). Throws InvalidArgument for heads that there are
  /// not.
  [[nodiscard]] HeadRows heads(int first, int count) const {
    detail::check_argument(first >= 0 && first < num_heads, "first", first,
                           {"a head, 0 to ", num_heads - 1});
    detail::check_argument(count >= 1 && count <= num_heads - first, "count", count,
                           {"from 1 to ", num_heads - first, ", the heads from first on"});
    HeadRows part = *this;
    part.data = row(0, first);
    part.num_heads = count;
    return part;
  }
};

namespace detail {

/// Rows at `data`, which lie there as others do.
template <class To, class X>
[[nodiscard]] HeadRows<To> rows_at(To* data, const HeadRows<X>& others) noexcept {
  return {data,
          others.num_tokens,
          others.num_heads,
          others.head_dim,
          others.stride_token,
          others.stride_head};
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END
