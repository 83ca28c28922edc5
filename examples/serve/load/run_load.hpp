// Running a load on one clock: what the engine takes is real time, and so is what requests wait.
// Only time without requests is skipped.
#pragma once

#include <cstddef>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "workload.hpp"

namespace serve {

struct LoadOptions {
  double max_seconds = std::numeric_limits<double>::infinity();  ///< on `clock`; then it ends
  std::function<double()> clock;                                 ///< seconds
  /// Called after each step with the time of the load, requests that arrived, requests that have
  /// ended.
  std::function<void(double now, std::size_t arrived, std::size_t ended)> progress = {};
};

/// Of a distribution, by nearest rank.
struct Percentiles {
  double p50 = 0, p90 = 0, p99 = 0;
};
[[nodiscard]] Percentiles percentiles(std::vector<double> values);

/// Of the requests that ended by themselves. Times in seconds.
struct LoadReport {
  std::size_t arrived = 0, completed = 0;
  bool capped = false;            ///< max_seconds ended it
  double seconds = 0;             ///< of the load, until its last event
  double busy_seconds = 0;        ///< of these, with somebody there
  std::size_t tokens = 0;         ///< generated, of all requests
  double normalised_latency = 0;  ///< mean of (last token - arrival) / tokens
  Percentiles ttft;               ///< first token - arrival
  Percentiles tpot;               ///< (last - first token) / (tokens - 1), where there are two
  [[nodiscard]] double tokens_per_second() const {
    return busy_seconds > 0 ? static_cast<double>(tokens) / busy_seconds : 0;
  }
  [[nodiscard]] double requests_per_second() const {
    return busy_seconds > 0 ? static_cast<double>(completed) / busy_seconds : 0;
  }
};

/// Runs a load to its end.
/// \param arrivals  by time; ids are indices
[[nodiscard]] LoadReport run_load(Engine& engine, std::span<const Arrival> arrivals,
                                  const LoadOptions& options);

}  // namespace serve
