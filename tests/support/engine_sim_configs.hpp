// The configurations of the engine simulation, shared by the test and by ./dev fuzz.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/engine_sim_run.hpp"

namespace test {

/// A configuration is a number, so that a run can be repeated.
struct SimConfig {
  std::string name;
  SimOptions options;
  bool for_caches = false;  // needs a policy that retains
};

inline std::vector<SimConfig> sim_configs(int chunk_size) {
  std::vector<SimConfig> all;
  const auto c = static_cast<std::size_t>(chunk_size);
  for (const Sharing sharing : {Sharing::token, Sharing::chunk})
    for (const int min_run : {0, 1, chunk_size}) {
      if (sharing == Sharing::chunk && min_run != 0) continue;
      SimOptions o;
      o.tree = {.sharing = sharing, .min_run = min_run};
      o.max_prompt = 6 + 4 * c;
      o.max_length = 30 + 14 * c;
      o.retention.max_pinned = 40;
      const std::string rule = (sharing == Sharing::token ? "token" : "chunk") +
                               std::string(", min_run ") + std::to_string(min_run);
      all.push_back({rule + ", no limit", o});
      SimOptions few = o;  // few sequences that meet often
      few.max_live = 6;
      few.letters = 2;
      few.many_namespaces = false;
      all.push_back({rule + ", few sequences", few});
      o.budget = 160;
      all.push_back({rule + ", cache is evicted", o});
      o.budget = 45;
      o.retention.max_pinned = 8;
      all.push_back({rule + ", out of chunks", o});
      few.budget = 14;
      few.retention.max_pinned = 6;
      all.push_back({rule + ", few sequences, out of chunks", few});
      o.budget = 200;
      o.retention.high_watermark = 70;
      o.retention.low_watermark = 50;
      all.push_back({rule + ", watermarks", o, true});
    }
  return all;
}

/// What went wrong, with the operations before.
struct SimFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Runs one simulation on a fresh tree; throws SimFailure.
template <class Retention, int ChunkSize>
void run_sim(const SimConfig& config, std::uint64_t seed, int operations, Counters& counters) {
  RandomChoices choices(seed);
  EngineSim<Retention, ChunkSize> sim(choices, config.options, counters);
  int i = 0;
  try {
    for (; i < operations; ++i) {
      sim.operate();
      if (i % 16 == 0) sim.check_all();
    }
    sim.check_all();
    sim.end();
  } catch (const std::exception& error) {
    throw SimFailure(config.name + ", seed " + std::to_string(seed) + ", operation " +
                     std::to_string(i) + ": " + error.what() + "\n" + sim.history());
  }
}

}  // namespace test
