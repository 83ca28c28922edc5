#include "trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string_view>
#include <utility>

#include "random.hpp"

namespace replay {
namespace {

std::int64_t number_after(std::string_view line, std::string_view key) {
  const std::size_t at = line.find(key);
  std::int64_t value = 0;
  if (at != std::string_view::npos)
    std::from_chars(line.data() + at + key.size(), line.data() + line.size(), value);
  return value;
}

/// \param add_block  (prompt, block id): appends the block's tokens
std::vector<Request> read_trace(
    const std::function<void(std::vector<Token>&, std::uint32_t)>& add_block) {
  const char* data = std::getenv("CHUNKATTN_DATA");
  const std::string path = std::string(data != nullptr ? data : "../shared") +
                           "/traces/mooncake_conversation_trace.jsonl";
  std::vector<Request> requests;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    Request request;
    request.arrival = double(number_after(line, "\"timestamp\": ")) / 1000;
    request.output = static_cast<int>(number_after(line, "\"output_length\": ")) * 48 / 512 + 1;
    const char* at = line.data() + line.find('[') + 1;
    for (const char* const end = line.data() + line.size(); at < end && *at != ']';) {
      std::uint32_t id = 0;
      at = std::from_chars(at, end, id).ptr;
      while (at < end && (*at == ',' || *at == ' ')) ++at;
      add_block(request.prompt, id);
    }
    requests.push_back(std::move(request));
  }
  if (requests.empty())
    fmt::print("{}: no trace there; set CHUNKATTN_DATA. Nothing of it was replayed.\n", path);
  return requests;
}

}  // namespace

std::vector<Request> mooncake_trace() {
  auto requests = read_trace([](std::vector<Token>& prompt, std::uint32_t id) {
    const std::uint32_t length = 40 + (id * 2654435761u >> 16) % 17;
    for (std::uint32_t i = 0; i < length; ++i) prompt.push_back(id * 64 + i);
  });
  // Half of a last block is the request's own, as the trace's lengths are not whole blocks.
  for (std::size_t r = 0; r < requests.size(); ++r) {
    auto& prompt = requests[r].prompt;
    if (prompt.size() > 24)
      for (std::size_t i = prompt.size() - 12; i < prompt.size(); ++i)
        prompt[i] = 0x80000000u + static_cast<Token>(r);
  }
  return requests;
}

std::vector<Request> mooncake_blocks() {
  return read_trace([](std::vector<Token>& prompt, std::uint32_t id) {
    for (std::uint32_t i = 0; i < 64; ++i) prompt.push_back(id * 64 + i);
  });
}

std::vector<Request> groups_of_users() {
  Random random(20251123);
  constexpr int groups = 64, requests = 6000;
  constexpr double rate = 70;
  std::vector<std::vector<Token>> system(groups);
  Token next = 1;  // no token occurs twice but by sharing
  for (auto& prompt : system) {
    prompt.resize(random.between(1000, 3000));
    for (Token& token : prompt) token = next++;
  }
  std::vector<Request> all(requests);
  double now = 0;
  for (Request& request : all) {
    now += -std::log(1 - random.uniform()) / rate;
    request.arrival = now;
    request.prompt = system[random.between(0, groups - 1)];
    for (std::size_t own = random.between(50, 400); own > 0; --own)
      request.prompt.push_back(next++);
    request.output = static_cast<int>(random.between(50, 300));
  }
  return all;
}

}  // namespace replay
