// What the CUDA backend's schedules should cost on an H200 by bench/cuda_model.hpp, beside the
// floor of each case, how much of that hangs on each constant, and what the same tasks would cost
// in a launch for each phase. No GPU is asked.
//
// Usage: cuda_model [substring of the cases to run]
// Exit: 0, or 1 if the frozen constants no longer give what they were fitted to, within 10 %.
#include "bench/cuda_model.hpp"

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/support/level_plan.hpp"

namespace {

struct Case {
  std::string name;
  chunkattn::Geometry geometry;
  std::vector<int> nodes, tokens;
};

std::vector<Case> all_cases() {
  constexpr chunkattn::Geometry mha{32, 32, 128}, gqa{32, 8, 128};
  std::vector<Case> cases;
  const auto add = [&](const chunkattn::Geometry& geometry, int sequences, int shared, int own) {
    cases.push_back({std::to_string(geometry.num_qo_heads) + "/" +
                         std::to_string(geometry.num_kv_heads) + " b " + std::to_string(sequences) +
                         ", " + std::to_string(shared) + "+" + std::to_string(own),
                     geometry,
                     {1, sequences},
                     {shared, own}});
  };
  for (const int shared : {1024, 2048, 4096}) {
    for (const int own : {0, 64, 512, 1024}) add(mha, 32, shared, own);
    add(mha, 32, 0, shared);
  }
  for (const int sequences : {1, 4, 16, 64, 96}) add(mha, sequences, 2048, 256);
  for (const int sequences : {64, 256})
    for (const int shared : {4096, 32768})
      for (const int own : {64, 512}) add(gqa, sequences, shared, own);
  for (const int sequences : {1, 8, 64, 256}) add(gqa, sequences, 0, 4096);
  for (const auto& [nodes, tokens] : std::vector<std::pair<std::vector<int>, std::vector<int>>>{
           {{1, 4, 8, 256}, {8, 256, 256, 32}},  // trees of FastTree (MLSys 2025)
           {{1, 16, 64}, {1024, 256, 32}},
           {{1, 10}, {4000, 400}},
           {{1, 4, 16, 512}, {1024, 256, 128, 32}}})
    cases.push_back({"32/8 tree of " + std::to_string(nodes.back()), gqa, nodes, tokens});
  return cases;
}

bool print_fit(const model::Machine& machine) {
  bool good = true;
  std::printf("%-24s %10s %10s\n", "fitted to", "us", "this model");
  for (const model::Fitted& fitted : model::fitted_cases()) {
    const double us = model::play(machine, fitted);
    std::printf("%-24s %10.0f %10.1f\n", fitted.name, fitted.us, us);
    good = good && std::abs(us / fitted.us - 1) <= 0.1;
  }
  return good;
}

void print_case(const model::Machine& machine, const Case& c) {
  const test::RandomPlan plan = test::make_level_plan(c.nodes, c.tokens);
  chunkattn::cuda_detail::Scheduler scheduler;
  constexpr chunkattn::cuda_detail::ScheduleCapacity plenty{1u << 20, 1u << 20, 1u << 30};
  scheduler.build(plan.view(), c.geometry, chunkattn::CostModel{}, plenty);
  const double floor = model::floor_us(machine, plan.view(), c.geometry);
  double us = 0, least = 1e30, most = 0;
  for (const model::Machine& varied : model::varied(machine)) {
    const double now = model::play(varied, plan.view(), c.geometry, scheduler);
    if (us == 0) us = now;  // the first one is not varied
    least = std::min(least, now);
    most = std::max(most, now);
  }
  const double apart = model::play(machine, plan.view(), c.geometry, scheduler, false);
  const bool near = us <= std::max(floor / 0.8, floor + 8);
  std::printf("%-24s %8.1f %10.1f %9.1f to %5.1f %6.0f %% %12.1f %s\n", c.name.c_str(), floor, us,
              least, most, 100 * floor / us, apart, near ? "" : "beyond floor / 0.8 and floor + 8");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  const model::Machine machine;
  const bool good = print_fit(machine);
  std::printf("\n%-24s %8s %10s %18s %8s %12s\n", "schedules of today", "floor us", "modelled",
              "constants +-30 %", "of floor", "two launches");
  for (const Case& c : all_cases())
    if (c.name.find(filter) != std::string::npos) print_case(machine, c);
  if (!good) std::printf("the constants do not give what they were fitted to within 10 %%\n");
  return good ? 0 : 1;
}
