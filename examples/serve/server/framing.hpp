// Framing: where requests end.
#pragma once

#include <httplib.h>

#include <string>

namespace serve {

/// Why the bytes after this request's head cannot be told apart from a next request, or may not be
/// read; empty if all is well. The connection is closed then: what httplib makes of such requests
/// depends on its version.
[[nodiscard]] std::string framing_error(const httplib::Request& request);

/// In lower case, as far as it is ASCII.
[[nodiscard]] std::string lowered(std::string text);

/// Whether a Content-Type is JSON's, with whatever parameters.
[[nodiscard]] bool is_json(const std::string& content_type);

/// Whether requests of this method have a body here; others may not.
[[nodiscard]] bool has_body(const std::string& method);

}  // namespace serve
