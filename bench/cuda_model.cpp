// What the CUDA backend's schedules should cost on an H200 by bench/cuda_model.hpp, beside the
// floor of each case, how much of that hangs on each constant, what the same tasks would cost in a
// launch for each phase, and what Reduce::batch_invariant costs. No GPU is asked. The last column
// is measured: making the task list, on this machine.
//
// Usage: cuda_model [substring of the cases to run]
// Exit: 0, or 1 if the frozen constants no longer give what they were fitted to, within 10 %.
#include "bench/cuda_model.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/support/schedule_cases.hpp"

namespace {

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

constexpr chunkattn::detail::cuda::ScheduleCapacity plenty{1u << 20, 1u << 20, 1u << 30};

// Cases, those whose time is near the floor, and the same of those that the memory bounds.
struct Tally {
  int cases = 0, near = 0, by_memory = 0, near_by_memory = 0;
  double log_of_invariant = 0, most_invariant = 0;  // times of Reduce::batch_invariant by default's
};

// By the schedule of Reduce::batch_invariant.
double invariant_us(const model::Machine& machine, const test::RandomPlan& plan,
                    const test::ScheduleCase& c) {
  chunkattn::detail::cuda::CostModel costs = model::costs_of_today();
  costs.batch_invariant = true;
  chunkattn::detail::cuda::Scheduler scheduler;
  scheduler.build(plan.view(), c.geometry, costs, plenty);
  return model::play(machine, plan.view(), c.geometry, scheduler);
}

void print_case(const model::Machine& machine, const test::ScheduleCase& c, Tally& tally) {
  const test::RandomPlan plan = c.plan();
  chunkattn::detail::cuda::Scheduler scheduler;
  double build_us = 1e30;
  for (int i = 0; i < 5; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    scheduler.build(plan.view(), c.geometry, model::costs_of_today(), plenty);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    build_us = std::min(build_us, took.count());
  }
  const model::Floor bounds = model::floor_of(machine, plan.view(), c.geometry);
  const double floor = bounds.us();
  double us = 0, least = 1e30, most = 0;
  for (const model::Machine& varied : model::varied(machine)) {
    const double now = model::play(varied, plan.view(), c.geometry, scheduler);
    if (us == 0) us = now;  // the first one is not varied
    least = std::min(least, now);
    most = std::max(most, now);
  }
  const double apart = model::play(machine, plan.view(), c.geometry, scheduler, false);
  const double invariant = invariant_us(machine, plan, c);
  tally.log_of_invariant += std::log(invariant / us);
  tally.most_invariant = std::max(tally.most_invariant, invariant / us);
  const bool near = us <= std::max(floor / 0.8, floor + 8);
  ++tally.cases;
  tally.near += near ? 1 : 0;
  tally.by_memory += bounds.memory_bound() ? 1 : 0;
  tally.near_by_memory += bounds.memory_bound() && near ? 1 : 0;
  std::printf("%-40s %8.1f %10.1f %9.1f to %6.1f %6.0f %% %12.1f %9.1f %8.0f %s\n", c.name.c_str(),
              floor, us, least, most, 100 * floor / us, apart, invariant, build_us,
              near                    ? ""
              : bounds.memory_bound() ? "beyond floor / 0.8 and floor + 8"
                                      : "beyond both, by arithmetic");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  const model::Machine machine;
  const bool good = print_fit(machine);
  std::printf("\n%-40s %8s %10s %19s %8s %12s %9s %8s\n", "schedules of today", "floor us",
              "modelled", "constants +-30 %", "of floor", "two launches", "invariant", "build us");
  for (const auto& cases :
       {test::two_level_cases(), test::published_trees(), test::prefill_cases()}) {
    Tally tally;
    for (const test::ScheduleCase& c : cases)
      if (c.name.find(filter) != std::string::npos) print_case(machine, c, tally);
    std::printf("%d of %d take at most floor / 0.8 or floor + 8; %d of %d that the memory bounds\n",
                tally.near, tally.cases, tally.near_by_memory, tally.by_memory);
    if (tally.cases > 0)
      std::printf(
          "Reduce::batch_invariant takes %.2f times as long (geometric mean), at most %.2f\n",
          std::exp(tally.log_of_invariant / tally.cases), tally.most_invariant);
  }
  if (!good) std::printf("the constants do not give what they were fitted to within 10 %%\n");
  return good ? 0 : 1;
}
