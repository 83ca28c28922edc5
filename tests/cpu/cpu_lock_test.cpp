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
  const detail::cpu::RowBlock& block = schedule.row_blocks()[0];
  const auto filled = [](const detail::cpu::TaskLines& lines, State& state) {
    state.reserve(lines.count());
    state.clear(0, lines.count());
    for (int l = 0; l < lines.count(); ++l) {
      state.max[l] = 1;
      state.sum[l] = static_cast<float>(2 * lines.row_begin + l + 1);
      for (int i = 0; i < dim; ++i) state.out[l * dim + i] = static_cast<float>(i);
    }
  };
  const auto merge = [&] {
    const detail::cpu::TaskLines lines{0, 2, 0, 1, 2};
    State state;
    filled(lines, state);
    for (int round = 0; round < 3; ++round) CHECK(!partials.merge_under_lock(0, 0, lines, state));
  };
  std::thread other(merge);
  merge();
  other.join();
  CHECK(most_inside.load() == 1);

  // The last task has the second row only; what stands beside its lines is nothing of the first's.
  const detail::cpu::TaskLines last{1, 2, 0, 1, 2};
  State state;
  filled(last, state);
  for (int l = -2; l < 0; ++l) state.max[l] = state.sum[l] = 1;
  CHECK(partials.merge_under_lock(0, block.split_count, last, state));
  int finished = 0;
  partials.finish_last(block, last, state, [&](int row, int l, State::Total result) {
    ++finished;
    const int parts = 6 + row;
    float out[dim];
    CHECK(result.close(out).max == 1.0f);
    CHECK(result.softmax().sum == static_cast<float>(parts * (2 * row + l + 1)));
    for (int i = 0; i < dim; ++i) CHECK(out[i] == static_cast<float>(parts * i));
  });
  CHECK(finished == 4);
}

TEST_CASE("partial results take one shape after the other") {
  test::Random random(92);
  test::RandomPlanOptions options;
  options.num_sequences = 6;
  const test::RandomPlan plan = make_random_plan(random, options);
  Partials partials;
  for (const int heads : {1, 3, 2, 1}) {
    detail::cpu::Schedule schedule;
    schedule.derive(plan.view(), {.num_kv_heads = heads, .max_lines = 2, .cost = {}});
    const auto& blocks = schedule.row_blocks();
    REQUIRE(blocks.size() >= 3);
    partials.reset(schedule, plan.num_rows(), heads, 1, heads == 2);
    for (int b = 0; b < static_cast<int>(blocks.size()); ++b)
      for (int head = 0; head < heads; ++head)
        CHECK(partials.report_finished(b, head, blocks[static_cast<std::size_t>(b)].split_count));
  }
}
