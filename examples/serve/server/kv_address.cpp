#include <fmt/format.h>

#include <charconv>
#include <stdexcept>
#include <string>

#include "kv_publisher.hpp"

namespace serve {

PublisherOptions publisher_addresses(const std::string& text) {
  const auto fail = [&] {
    throw std::invalid_argument(
        fmt::format("--kv-events = {}: expected a port below 65535, HOST:PORT, tcp://HOST:PORT or "
                    "ipc://FILE",
                    text));
  };
  PublisherOptions options;
  if (text.starts_with("ipc://")) {
    if (text.size() == 6) fail();
    options.address = text;
    options.replay = text + ".replay";
    return options;
  }
  std::string rest = text.starts_with("tcp://") ? text.substr(6) : text;
  const std::size_t colon = rest.rfind(':');
  const std::string host = colon == std::string::npos ? "127.0.0.1" : rest.substr(0, colon);
  if (colon != std::string::npos) rest.erase(0, colon + 1);
  int port = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), port);
  if (error != std::errc() || end != rest.data() + rest.size() || port < 1 || port > 65534 ||
      host.empty() || host.find('/') != std::string::npos)
    fail();
  options.address = fmt::format("tcp://{}:{}", host, port);
  options.replay = fmt::format("tcp://{}:{}", host, port + 1);
  return options;
}

}  // namespace serve
