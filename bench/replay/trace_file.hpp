// Traces of requests in files, as Mooncake publishes its own: a JSON object a line.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace replay {

/// A line of a trace.
struct TracedRequest {
  double timestamp = 0;  ///< milliseconds
  std::int64_t output_length = 0;
  /// Of 512 tokens each; numbers of the file's ids in the order in which these first occur.
  std::vector<std::uint32_t> blocks;
};

/// Equal `hash_ids` stand for equal blocks of 512 tokens; ids are whole numbers of 64 bits. Times
/// do not go back. `input_length` may be missing; other members say nothing to us.
/// \throws std::runtime_error  the file cannot be read or has no request, or, as FILE:LINE, what is
///                             not understood, and what was expected
[[nodiscard]] std::vector<TracedRequest> read_trace(const std::string& file);

}  // namespace replay
