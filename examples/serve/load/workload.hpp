// Requests and when they arrive: made up as in the paper's experiment, or as a trace has them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../engine/engine.hpp"

namespace serve {

struct Arrival {
  double time = 0;  ///< seconds after the start
  Request request;  ///< its id is its index in the load
};

/// Poisson arrivals of prompts that begin alike.
struct PoissonLoad {
  double rate = 1;  ///< requests per second; infinity: all at the start
  std::size_t requests = 0;
  std::size_t prompt_tokens = 0;
  std::size_t shared_tokens = 0;  ///< the first of each prompt; at most prompt_tokens
  std::size_t completion_tokens = 0;
  int vocab_size = 0;
  std::uint64_t seed = 0;  ///< of arrivals and tokens
};
[[nodiscard]] std::vector<Arrival> poisson_load(const PoissonLoad& load);

/// The first requests of a trace in the format of Mooncake: a line of JSON each, with `timestamp`
/// (ms), `input_length`, `output_length`, and `hash_ids`, one for each block of 512 tokens; equal
/// ids stand for equal blocks after equal beginnings.
struct TraceLoad {
  std::string path;
  std::size_t requests = 0;    ///< at most
  std::size_t shrink = 1;      ///< tokens of the trace for one of ours; divides 512
  double speed = 1;            ///< seconds of the trace in one of ours
  std::size_t max_length = 0;  ///< prompts and completions are cut to it together
  int vocab_size = 0;
};
/// \throws FileError that names the line and the field
[[nodiscard]] std::vector<Arrival> trace_load(const TraceLoad& load);

}  // namespace serve
