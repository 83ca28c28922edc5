// A simulated engine on the tree agrees with a naive model, over many configurations; ./dev fuzz is
// the same for longer. From CHUNKATTN_TEST_SCALE=10 on, every kind of event must have happened at
// least 100 times.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <string>

#include "tests/support/engine_sim_configs.hpp"
#include "tests/support/random.hpp"

using namespace chunkattn;

namespace {

test::Counters totals;
std::uint64_t operations = 0, trees = 0;

template <class Retention, int ChunkSize>
void run_all(const char* policy, int per_config) {
  for (const test::SimConfig& config : test::sim_configs(ChunkSize)) {
    if (config.for_caches && !Retention::retains) continue;
    const int ops = test::scaled(per_config);
    for (int left = ops; left > 0; left -= test::sim_round) {
      const int now = left < test::sim_round ? left : test::sim_round;
      // Mixed: seeds that are one step of the generator apart would give every tree the same
      // choices, shifted by one.
      test::RandomChoices seeds(test::run_seed() + 0x9e3779b97f4a7c15u * ++trees);
      const std::uint64_t seed = seeds.below(~std::size_t{0});
      try {
        test::run_sim<Retention, ChunkSize>(config, seed, now, totals);
      } catch (const std::exception& error) {
        FAIL(std::string(policy) << ", " << std::string(error.what()));
      }
      operations += static_cast<std::uint64_t>(now);
    }
  }
}

}  // namespace

TEST_CASE("an engine on NoRetention, chunks of 4") {
  run_all<NoRetention, 4>("NoRetention", 1200);
}
TEST_CASE("an engine on Lru, chunks of 4") {
  run_all<Lru, 4>("Lru", 1200);
}
TEST_CASE("an engine on Priority, chunks of 4") {
  run_all<test::TenantPriority, 4>("Priority", 1200);
}
TEST_CASE("an engine on CachePolicy, chunks of 16") {
  run_all<chunkattn::CachePolicy, 16>("CachePolicy", 600);
}

TEST_CASE("an engine on Lru, chunks of 1") {
  run_all<Lru, 1>("Lru", 600);
}
TEST_CASE("an engine on Priority, chunks of 64") {
  run_all<test::TenantPriority, 64>("Priority", 600);
}

TEST_CASE("every kind of event happened") {
  std::printf("%llu operations\n", static_cast<unsigned long long>(operations));
  test::print_counters(totals);
  if (operations < 80000) return;  // a part of the tests was run
  const std::uint64_t least = operations >= 800000 ? 100 : 1;
  for (const char* what : test::sim_events) {
    CAPTURE(what);
    CHECK(totals[what] >= least);
  }
}
