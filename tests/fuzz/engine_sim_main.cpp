// ./dev fuzz: the engine simulation for as many operations as asked, over all configurations.
//
//   engine_sim [--operations N] [--seed S] [--only R]
//
// Round R of a run with seed S is repeated by --seed S --only R.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <random>
#include <string>

#include "tests/support/engine_sim_configs.hpp"
#include "tests/support/retention.hpp"

namespace {

using Run = void (*)(const test::SimConfig&, std::uint64_t, int, test::Counters&);

struct Kind {
  const char* name;
  int chunk_size;
  bool retains;
  Run run;
  bool by_priority = false;
};

template <class Retention, int ChunkSize>
constexpr Kind kind(const char* name, bool by_priority = false) {
  return {name, ChunkSize, Retention{}.retains, &test::run_sim<Retention, ChunkSize>, by_priority};
}
using chunkattn::CachePolicy, chunkattn::RetentionOptions, test::NoRetention, test::TenantPolicy;
constexpr Kind kinds[] = {
    kind<NoRetention, 4>("no retention, 4"),    kind<RetentionOptions, 4>("LRU, 4"),
    kind<TenantPolicy, 4>("priority, 4", true), kind<NoRetention, 1>("no retention, 1"),
    kind<TenantPolicy, 2>("priority, 2", true), kind<CachePolicy, 16>("CachePolicy, 16"),
    kind<RetentionOptions, 64>("LRU, 64"),
};

std::uint64_t number(const char* text) {
  return std::strtoull(text, nullptr, 0);
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t operations = 10000000, seed = std::random_device{}(), only = 0;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    if (option == "--operations")
      operations = number(argv[i + 1]);
    else if (option == "--seed")
      seed = number(argv[i + 1]);
    else if (option == "--only")
      only = number(argv[i + 1]);
    else
      return std::fprintf(stderr, "engine_sim [--operations N] [--seed S] [--only ROUND]\n"), 2;
  }
  std::printf("engine simulation, --operations %llu --seed %llu\n",
              static_cast<unsigned long long>(operations), static_cast<unsigned long long>(seed));
  test::Counters counters;
  const auto start = std::chrono::steady_clock::now();
  std::uint64_t done = 0, round = 0;
  while (done < operations) {
    for (const Kind& kind : kinds)
      for (const test::SimConfig& config : test::sim_configs(kind.chunk_size, kind.by_priority)) {
        if (config.for_caches && !kind.retains) continue;
        ++round;
        if (only != 0 && round > only) return std::puts("no failure"), 0;
        if (done >= operations || (only != 0 && round != only)) continue;
        test::RandomChoices seeds(seed + 0x9e3779b97f4a7c15u * round);
        const std::uint64_t own = seeds.below(~std::size_t{0});
        try {
          kind.run(config, own, test::sim_round, counters);
        } catch (const std::exception& error) {
          std::printf("\nFAILED: %s, %s\nto repeat: ./dev fuzz --seed %llu --only %llu\n",
                      kind.name, error.what(), static_cast<unsigned long long>(seed),
                      static_cast<unsigned long long>(round));
          return 1;
        }
        done += std::uint64_t{test::sim_round};
        if (round % 20 == 0) {
          const double seconds =
              std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
          std::printf("\r%llu operations, %.0f s, %.0f a second ",
                      static_cast<unsigned long long>(done), seconds,
                      static_cast<double>(done) / seconds);
          std::fflush(stdout);
        }
      }
  }
  std::printf("\n%llu operations on %llu trees, no difference\n",
              static_cast<unsigned long long>(done), static_cast<unsigned long long>(round));
  test::print_counters(counters);
  return 0;
}
