#include "request_head.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <string>

namespace serve {

namespace {

constexpr std::string_view line_end = "\r\n";

/// A character of a header's name, as RFC 9110 has it.
bool is_of_name(unsigned char c) {
  return std::isalnum(c) != 0 ||
         std::string_view("!#$%&'*+-.^_`|~").find(static_cast<char>(c)) != std::string_view::npos;
}

ApiError malformed(std::string_view line, const char* expected) {
  return ApiError(400, fmt::format("header {}: expected {}", line.substr(0, 40), expected));
}

std::optional<ApiError> header_error(std::string_view line) {
  if (line.starts_with(' ') || line.starts_with('\t'))
    return malformed(line, "a name: folded headers are not supported");
  const std::string_view name = line.substr(0, line.find(':'));
  if (name.size() == line.size() || name.empty() ||
      !std::all_of(name.begin(), name.end(), is_of_name))
    return malformed(line, "a name, and a colon behind it");
  return std::nullopt;
}

}  // namespace

std::optional<ApiError> head_error(std::string_view head) {
  if (head.size() > max_head_bytes)
    return ApiError(431, fmt::format("the headers have more than {} bytes", max_head_bytes));
  std::size_t headers = 0;
  for (bool first = true; !head.empty(); first = false) {
    const std::size_t end = head.find(line_end);
    const std::string_view line = head.substr(0, end);
    if (line.find_first_of(std::string_view("\r\n\0", 3)) != std::string_view::npos)
      return malformed(line, "CR and LF together, at its end alone");
    if (line.empty()) break;
    if (!first) {
      if (++headers > max_headers)
        return ApiError(431, fmt::format("there are more than {} headers", max_headers));
      if (auto error = header_error(line)) return error;
    }
    head.remove_prefix(std::min(head.size(), line.size() + line_end.size()));
  }
  return std::nullopt;
}

}  // namespace serve
