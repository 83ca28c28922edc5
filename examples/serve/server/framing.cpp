#include "framing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

namespace serve {

std::string lowered(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

bool is_json(const std::string& content_type) {
  const std::string type = content_type.substr(0, content_type.find(';'));
  const std::size_t first = type.find_first_not_of(" \t"), last = type.find_last_not_of(" \t");
  return first != std::string::npos &&
         lowered(type.substr(first, last + 1 - first)) == "application/json";
}

bool has_body(const std::string& method) {
  return method == "POST" || method == "PUT" || method == "PATCH";
}

std::string framing_error(const httplib::Request& request) {
  const auto count = [&](const char* name) { return request.get_header_value_count(name); };
  const std::string length = request.get_header_value("Content-Length");
  const std::string coding = lowered(request.get_header_value("Transfer-Encoding"));
  if (count("Content-Length") > 1 || count("Transfer-Encoding") > 1 ||
      (count("Content-Length") > 0 && count("Transfer-Encoding") > 0))
    return "expected one Content-Length or one Transfer-Encoding";
  if (count("Content-Length") > 0 &&
      (length.empty() || length.size() > 18 ||
       !std::all_of(length.begin(), length.end(),
                    [](unsigned char c) { return std::isdigit(c) != 0; })))
    return fmt::format("Content-Length = {}: expected a number", length.substr(0, 40));
  if (count("Transfer-Encoding") > 0 && coding != "chunked")
    return fmt::format("Transfer-Encoding = {}: expected chunked", coding.substr(0, 40));
  if (!has_body(request.method)) {
    if (count("Transfer-Encoding") > 0 || (count("Content-Length") > 0 && length != "0"))
      return request.method + ": expected no body";
  } else if (count("Content-Length") == 0 && count("Transfer-Encoding") == 0) {
    return "Content-Length: expected with " + request.method;
  }
  if (request.has_header("Range")) return "Range: not supported";
  return "";
}

}  // namespace serve
