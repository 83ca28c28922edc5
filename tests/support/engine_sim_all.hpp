// All configurations of the engine simulation for one policy, and how much came of it. From
// CHUNKATTN_TEST_SCALE=10 on, every kind of event must have happened at least 100 times.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>

#include "tests/support/engine_sim_configs.hpp"
#include "tests/support/random.hpp"

namespace test {

struct SimTotals {
  Counters counters;
  std::uint64_t operations = 0, trees = 0;
};

template <class Retention, int ChunkSize>
void run_all(SimTotals& totals, const char* policy, int per_config, bool by_priority = false) {
  for (const SimConfig& config : sim_configs(ChunkSize, by_priority)) {
    if (config.for_caches && !Retention{}.retains) continue;
    const int ops = scaled(per_config);
    for (int left = ops; left > 0; left -= sim_round) {
      const int now = left < sim_round ? left : sim_round;
      // Mixed: seeds that are one step of the generator apart would give every tree the same
      // choices, shifted by one.
      RandomChoices seeds(run_seed() + 0x9e3779b97f4a7c15u * ++totals.trees);
      const std::uint64_t seed = seeds.below(~std::size_t{0});
      try {
        run_sim<Retention, ChunkSize>(config, seed, now, totals.counters);
      } catch (const std::exception& error) {
        FAIL(std::string(policy) << ", " << std::string(error.what()));
      }
      totals.operations += static_cast<std::uint64_t>(now);
    }
  }
}

inline void report(const SimTotals& totals) {
  std::printf("%llu operations\n", static_cast<unsigned long long>(totals.operations));
  print_counters(totals.counters);
}

}  // namespace test
