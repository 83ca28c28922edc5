#include "trace_file.hpp"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "examples/support/json_text.hpp"

namespace replay {
namespace {

using Json = nlohmann::json;
using Numbers = std::unordered_map<std::uint64_t, std::uint32_t>;  // of blocks, by id

// Replayed blocks take up to 64 tokens below 2^30, where those of answers begin.
constexpr std::size_t max_blocks = std::size_t{1} << 24;
constexpr std::uint64_t max_length = std::uint64_t{1} << 24;

[[noreturn]] void refuse(const std::string& member, const std::string& value,
                         const std::string& expected) {
  throw std::runtime_error(fmt::format("{} = {:.100}: expected {}", member, value, expected));
}

const Json& member_of(const Json& line, const char* name, const char* expected) {
  const auto at = line.find(name);
  if (at == line.end()) refuse(name, "missing", expected);
  return *at;
}

std::int64_t length_of(const Json& value, const char* name) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > max_length)
    refuse(name, value.dump(), fmt::format("a whole number from 0 to {}", max_length));
  return value.get<std::int64_t>();
}

TracedRequest request_of(const Json& line, double earliest, Numbers& numbers) {
  if (!line.is_object()) refuse("the line", line.dump(), "a JSON object");
  TracedRequest request;
  const Json& time = member_of(line, "timestamp", "milliseconds");
  if (!time.is_number() || !(time.get<double>() >= earliest))
    refuse("timestamp", time.dump(), fmt::format("milliseconds, {} or more", earliest));
  request.timestamp = time.get<double>();
  request.output_length =
      length_of(member_of(line, "output_length", "how many tokens"), "output_length");

  const char* const ids = "a list of whole numbers, one or more";
  const Json& blocks = member_of(line, "hash_ids", ids);
  if (!blocks.is_array() || blocks.empty()) refuse("hash_ids", blocks.dump(), ids);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    if (!blocks[i].is_number_unsigned())
      refuse(fmt::format("hash_ids[{}]", i), blocks[i].dump(), "a whole number below 2^64");
    const auto number = static_cast<std::uint32_t>(numbers.size());
    request.blocks.push_back(
        numbers.try_emplace(blocks[i].get<std::uint64_t>(), number).first->second);
  }
  if (numbers.size() > max_blocks)
    refuse("hash_ids", "another block", fmt::format("at most {} different ones", max_blocks));
  if (const auto at = line.find("input_length"); at != line.end()) {
    const auto most = static_cast<std::int64_t>(512 * blocks.size());
    const std::int64_t length = length_of(*at, "input_length");
    if (length > most || length <= most - 512)
      refuse("input_length", at->dump(),
             fmt::format("{} to {}, as hash_ids are {} blocks of 512 tokens", most - 511, most,
                         blocks.size()));
  }
  return request;
}

}  // namespace

std::vector<TracedRequest> read_trace(const std::string& file) {
  std::ifstream in(file);
  if (!in) throw std::runtime_error(fmt::format("{}: {}", file, std::strerror(errno)));
  std::vector<TracedRequest> requests;
  Numbers numbers;
  std::size_t number = 1;
  for (std::string line; std::getline(in, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      const double earliest = requests.empty() ? 0 : requests.back().timestamp;
      requests.push_back(request_of(examples::read_json(line), earliest, numbers));
    } catch (const examples::JsonError& error) {  // whose own text counts lines, too
      throw std::runtime_error(
          error.is_syntax()
              ? fmt::format("{}:{}: no JSON object at column {}", file, number, error.byte())
              : fmt::format("{}:{}: {}", file, number, error.what()));
    } catch (const std::exception& error) {
      throw std::runtime_error(fmt::format("{}:{}: {}", file, number, error.what()));
    }
  }
  if (in.bad()) throw std::runtime_error(fmt::format("{}: {}", file, std::strerror(errno)));
  if (requests.empty()) throw std::runtime_error(fmt::format("{}: no request is in it", file));
  return requests;
}

}  // namespace replay
