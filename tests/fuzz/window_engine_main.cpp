// ./dev fuzz windows: the random engine of layers with windows, for as many operations as asked.
//
//   window_engine [--operations N] [--seed S] [--only R]
//
// Round R of a run with seed S is repeated by --seed S --only R.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "tests/support/window_engine_rounds.hpp"

namespace {

std::uint64_t operations = 10000000, only = 0, failed_round = 0;

TEST_CASE("windows") {
  constexpr int per_round = 1500;
  test::WindowCounts counts;
  const auto start = std::chrono::steady_clock::now();
  std::uint64_t done = 0, round = only > 0 ? only - 1 : 0;
  while (done < operations) {
    failed_round = ++round;
    test::run_window_round(counts, round, per_round);
    if (only > 0) break;
    done += std::uint64_t{per_round};
    if (round % 20 != 0) continue;
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("\r%llu operations, %.0f s ", static_cast<unsigned long long>(done), seconds);
    std::fflush(stdout);
  }
  failed_round = 0;
  std::printf("\n%llu operations on %llu trees, no difference\n",
              static_cast<unsigned long long>(done), static_cast<unsigned long long>(round));
  const auto print = [](const char* what, std::uint64_t count) {
    std::printf("%12llu %s\n", static_cast<unsigned long long>(count), what);
  };
  print("steps", counts.steps);
  print("rows", counts.rows);
  print("steps dropped", counts.dropped);
  print("steps lost in flight", counts.lost);
  print("times out of chunks", counts.refused);
  print("sequences resumed before what full layers have", counts.resumed_early);
  print("drafts accepted", counts.accepted);
  print("drafts rejected", counts.rejected);
  print("rows copied for forks", counts.copies);
  print("sequences swapped out", counts.swapped);
  print("of these, came back with their windows", counts.swapped_with_windows);
  print("tokens loaded from tiers", counts.loaded);
  print("groups that came while sequences were live", counts.groups);
  print("views that were not taken", counts.not_viewed);
  print("chunks of groups evicted", counts.evicted);
  print("prompts that a mirror can resume", counts.resume.found);
  print("of these, before what is cached", counts.resume.early);
  print("of these, at a state", counts.resume.by_state);
  print("events of what groups and states keep", counts.resume.kept);
  print("events of what they lose", counts.resume.lost);
  print("times that a mirror missed events", counts.resume.missed);
  print("states that ended while they were followed", counts.resume.ended);
}

}  // namespace

int main(int argc, char** argv) {
  std::string seed = std::to_string(std::random_device{}());
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    if (option == "--operations")
      operations = std::strtoull(argv[i + 1], nullptr, 0);
    else if (option == "--seed")
      seed = argv[i + 1];
    else if (option == "--only")
      only = std::strtoull(argv[i + 1], nullptr, 0);
    else
      return std::fprintf(stderr, "window_engine [--operations N] [--seed S] [--only ROUND]\n"), 2;
  }
  setenv("CHUNKATTN_SEED", seed.c_str(), 1);
  doctest::Context context;
  context.setOption("abort-after", 1);
  const int failed = context.run();
  if (failed != 0 && failed_round > 0)
    std::printf("to repeat: ./dev fuzz windows --seed %s --only %llu\n", seed.c_str(),
                static_cast<unsigned long long>(failed_round));
  return failed;
}
