// The head of a request: its first line and its headers, as bytes.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

#include "api_error.hpp"

namespace serve {

constexpr std::size_t max_head_bytes = std::size_t{16} << 10;
constexpr std::size_t max_headers = 100;

/// Why a head is refused before anything reads it: 431 where it is larger than the limits above,
/// 400 where its lines could be read in two ways (folded headers, space before a colon, lone CR or
/// LF).
/// \param head  up to and with the empty line, or as far as it has come when it is too large
[[nodiscard]] std::optional<ApiError> head_error(std::string_view head);

}  // namespace serve
