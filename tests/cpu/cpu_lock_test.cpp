// The lock of merges: whoever holds it is alone, here made certain by letting the holder wait for
// an intruder.
#include <atomic>
#include <chrono>
#include <thread>

// Threads at the place that the lock guards, and the most that were there at once.
inline std::atomic<int> threads_inside{0};
inline std::atomic<int> most_inside{0};

inline void wait_for_intruder() {
  const int inside = ++threads_inside;
  if (most_inside.load() < inside) most_inside = inside;
  for (int i = 0; i < 20 && most_inside.load() < 2; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  --threads_inside;
}
#define CHUNKATTN_SPIN_LOCK_HOOK() wait_for_intruder()

#include <doctest/doctest.h>

#include <vector>

#include "chunkattn/detail/cpu/kernels.hpp"
#include "support/random_plan.hpp"

using namespace chunkattn;

namespace {

constexpr int dim = 16;
using State = detail::cpu::CHUNKATTN_LEAST_ISA::LineState<dim, dim>;
using Partials = detail::cpu::CHUNKATTN_LEAST_ISA::PartialResults<State>;

}  // namespace

TEST_CASE("a spin lock lets one in after the other") {
  detail::SpinLock lock;
  std::atomic<bool> entered{false};
  lock.lock();
  std::thread other([&] {
    lock.lock();
    entered = true;
    lock.unlock();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  CHECK_FALSE(entered.load());
  lock.unlock();
  other.join();
  CHECK(entered.load());
  lock.lock();  // free again
  lock.unlock();
}

TEST_CASE("merges into the same rows exclude each other, and give back what they take") {
  // One row block of two rows: one KV head, two query heads of a group.
  test::Random random(91);
  test::RandomPlanOptions options;
  options.num_sequences = 2;
  options.max_queries = 1;
  options.share = test::Share::all;
  options.max_depth = 1;
  const test::RandomPlan plan = make_random_plan(random, options);
  detail::cpu::Schedule schedule;
  schedule.derive(plan.view(), {.num_kv_heads = 1,
                                .group = 2,
                                .max_lines = 256,
                                .min_product_lines = 9,
                                .tile_lines = 32,
                                .min_tasks = 1,
                                .cost = {}});
  REQUIRE(schedule.row_blocks().size() == 1);

  Partials partials;
  partials.reset(schedule, plan.num_rows(), 1, 2, false);
  const detail::cpu::TaskLines lines{0, 2, 0, 1, 2};
  const auto merge = [&] {
    State state;
    state.reserve(lines.count());
    state.clear(0, lines.count());
    for (int l = 0; l < lines.count(); ++l) {
      state.max[l] = 1;
      state.sum[l] = static_cast<float>(l + 1);
      for (int i = 0; i < dim; ++i) state.out[l * dim + i] = static_cast<float>(i);
    }
    for (int round = 0; round < 3; ++round) partials.merge_under_lock(0, lines, state);
  };
  std::thread other(merge);
  merge();
  other.join();
  CHECK(most_inside.load() == 1);
  int finished = 0;
  partials.finish_rows(schedule.row_blocks()[0], 0, [&](int row, int l, State::Total result) {
    ++finished;
    CHECK(result.softmax().max == 1.0f);
    CHECK(result.softmax().sum == static_cast<float>(6 * (2 * row + l + 1)));
    for (int i = 0; i < dim; ++i) CHECK(result.out()[i] == static_cast<float>(6 * i));
  });
  CHECK(finished == 4);
}
