#include "framing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

namespace serve {

bool has_body(const std::string& method) {
  return method == "POST" || method == "PUT" || method == "PATCH";
}

std::string framing_error(const httplib::Request& request) {
  const auto count = [&](const char* name) { return request.get_header_value_count(name); };
  const std::string length = request.get_header_value("Content-Length");
  std::string coding = request.get_header_value("Transfer-Encoding");
  std::transform(coding.begin(), coding.end(), coding.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
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
