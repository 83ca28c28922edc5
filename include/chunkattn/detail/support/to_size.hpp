// Signed numbers that are known not to be negative as sizes and indices.
#pragma once

#include <cstddef>
#include <cstdint>

#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

[[nodiscard]] CHUNKATTN_HD constexpr std::size_t to_size(std::int64_t n) noexcept {
  return static_cast<std::size_t>(n);
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
