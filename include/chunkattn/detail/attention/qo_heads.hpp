// The number of query heads of a call, from the size of q.
#pragma once

#include <cstddef>

#include "../../attention_options.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// The query heads of q, [num_rows][num_qo_heads][head_dim], from its size alone.
[[nodiscard]] inline int count_qo_heads(std::size_t q_size, int num_rows, int head_dim) {
  const auto row = static_cast<std::size_t>(num_rows) * static_cast<std::size_t>(head_dim);
  if (q_size == 0 || row == 0 || q_size % row != 0) [[unlikely]]
    fail_argument("q.size()", q_size,
                  {"a positive multiple of num_rows * head_dim = ", num_rows, " * ", head_dim});
  if (q_size / row > max_qo_heads) [[unlikely]]
    fail_argument(
        "num_qo_heads", q_size / row,
        {"at most ", max_qo_heads, " from q.size() = ", q_size, " / (num_rows * head_dim)"});
  return static_cast<int>(q_size / row);
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
