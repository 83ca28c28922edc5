// Tiles of 128 rows, of chunk-first tasks of what many lines share, and of a prefill, which write
// its outputs: the kernel against the oracle, run on the host by tests/simt. When there are such,
// cuda_schedule_test says.
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <span>
#include <vector>

#include "chunkattn/debug/reference.hpp"
#include "simt/attention.hpp"
#include "support/attention_case.hpp"
#include "support/level_plan.hpp"
#include "support/nan_place.hpp"
#include "support/random.hpp"
#include "support/random_plan.hpp"

namespace {

using chunkattn::bfloat16;
using chunkattn::half;
using chunkattn::detail::cuda::HeadDims;
using chunkattn::detail::cuda::max_tile_rows;
using chunkattn::detail::cuda::Task;
using simt::shuffle_turns;

int num_large(const chunkattn::detail::cuda::Scheduler& scheduler) {
  const std::vector<Task>& tasks = scheduler.tasks();
  return static_cast<int>(std::count_if(
      tasks.begin(), tasks.end(), [](const Task& t) { return t.tile_rows == max_tile_rows; }));
}

// Of those that write outputs.
int num_whole(const chunkattn::detail::cuda::Scheduler& scheduler) {
  const auto first = scheduler.tasks().begin() + scheduler.num_chunk_first();
  return static_cast<int>(std::count_if(
      first, scheduler.tasks().end(), [](const Task& t) { return t.tile_rows == max_tile_rows; }));
}

// On so few blocks that every shared run has a task for each.
chunkattn::detail::cuda::CostModel model_of_few_blocks(int blocks) {
  chunkattn::detail::cuda::CostModel model = simt::eager_model();
  model.num_blocks = blocks;
  return model;
}

template <class T, HeadDims Dims>
simt::StepResult<T> run(test::Random& random, const test::KvStorage<T>& kv,
                        const test::RandomPlan& plan, const std::vector<T>& q, int blocks = 1,
                        int grid = 3) {
  shuffle_turns(random);
  return simt::attention_step<T, Dims>(kv.view, plan.view(), std::span<const T>(q),
                                       model_of_few_blocks(blocks), random.uniform(2, 4), grid);
}

template <class T>
void compare(const test::AttentionCase<T, T>& problem, const test::RandomPlan& plan,
             const simt::StepResult<T>& got) {
  const auto reference =
      chunkattn::reference_attention(problem.kv.view, plan.view(), std::span<const T>(problem.q));
  CHECK(chunkattn::compare_with_reference(reference, std::span<const T>(got.out),
                                          chunkattn::unit_roundoff<T>())
            .ok());
  CHECK(test::worst_lse(reference, got.lse) <= 1.0);
}

// `sequences` x `group` lines of a shared prefix. Some of its rows may end inside it, as those of a
// prefill do. Adds to `small` where no tile was large although it could have been.
template <class T, HeadDims Dims>
void check(test::Random& random, int sequences, int group, int& small) {
  const int kv_heads = random.uniform(1, 2), blocks = random.pick({1, 2, 4});
  test::RandomPlan plan =
      test::make_two_level_plan(sequences, random.uniform(200, 600), random.uniform(1, 70));
  const bool ragged = random.chance(0.5);
  for (std::int32_t& length : plan.row_kv_len)
    if (ragged && random.chance(0.4)) length = random.uniform(0, length);
  random.shuffle(plan.row_token);
  CAPTURE(sequences);
  CAPTURE(group);
  CAPTURE(Dims.k);
  CAPTURE(Dims.v);
  test::AttentionCase<T, T> problem(random, plan, Dims.k, kv_heads, group, 1.0f, Dims.v);
  const auto got = run<T, Dims>(random, problem.kv, plan, problem.q, blocks);
  compare(problem, plan, got);
  small += blocks == 1 && !ragged && num_large(got.scheduler) == 0;
}

// Query rows of sequences that share nothing, each of which sees a token more than the one before;
// or, ragged, any number of them. Returns how many large tiles they have had.
template <class T, HeadDims Dims>
int check_prefill(test::Random& random, int group) {
  test::RandomPlanOptions options;
  options.share = test::Share::none;
  options.num_sequences = random.uniform(1, 3);
  options.max_length = 400;
  options.max_queries = 256 / group;
  options.chunk_size = random.pick({16, 32, 64});
  test::RandomPlan plan = test::make_random_plan(random, options);
  const bool ragged = random.chance(0.3);
  for (std::int32_t& length : plan.row_kv_len)
    if (ragged && random.chance(0.4)) length = random.uniform(0, length);
  const int kv_heads = random.uniform(1, 2);
  CAPTURE(group);
  CAPTURE(ragged);
  CAPTURE(Dims.k);
  CAPTURE(Dims.v);
  test::AttentionCase<T, T> problem(random, plan, Dims.k, kv_heads, group, 1.0f, Dims.v);
  const auto got = run<T, Dims>(random, problem.kv, plan, problem.q);
  compare(problem, plan, got);
  CHECK(got.scheduler.num_chunk_first() == 0);
  return num_whole(got.scheduler);
}

}  // namespace

TEST_CASE("large tiles: any number of lines, any lengths") {
  test::Random random(41);
  constexpr int lines[][2] = {{5, 13}, {8, 12},  {9, 14},  {8, 16}, {43, 3},
                              {8, 24}, {13, 15}, {16, 16}, {7, 37}, {24, 16}};
  int small = 0;
  for (const auto& [sequences, group] : lines) check<half, 16>(random, sequences, group, small);
  for (int i = 0; i < test::scaled(10); ++i) {
    const int sequences = random.uniform(5, 12);
    check<half, 16>(random, sequences, random.uniform(65 / sequences + 1, 30), small);
  }
  check<half, 64>(random, 8, random.uniform(9, 17), small);
#if !defined(CHUNKATTN_FEW_KERNELS)
  check<bfloat16, 16>(random, 8, random.uniform(9, 17), small);
  check<bfloat16, 128>(random, 8, random.uniform(9, 17), small);
  check<half, 80>(random, 10, random.uniform(7, 13), small);
  check<half, HeadDims{128, 96}>(random, 9, random.uniform(8, 16), small);
  check<half, HeadDims{64, 16}>(random, 9, random.uniform(8, 16), small);
#endif
  CHECK(small <= 1);  // the schedule may find another way shorter, as of 259 lines
}

TEST_CASE("large tiles of a prefill and of drafts, whose rows see different tokens") {
  test::Random random(42);
  for (int i = 0; i < test::scaled(6);) {
    test::RandomPlanOptions options;
    options.share = test::Share::all;
    options.num_sequences = random.uniform(3, 6);
    options.max_length = 300;
    options.max_queries = random.uniform(2, 30);
    options.chunk_size = random.pick({16, 32, 64});
    const test::RandomPlan plan = test::make_random_plan(random, options);
    const int group = random.uniform(4, 12);
    chunkattn::detail::cuda::Scheduler scheduler;
    scheduler.build(plan.view(), {group, 1, 16}, model_of_few_blocks(1), {1000, 1000, 1u << 20});
    if (num_large(scheduler) == 0) continue;
    ++i;
    test::AttentionCase<half, half> problem(random, plan, 16, 1, group);
    const auto got = run<half, 16>(random, problem.kv, plan, problem.q);
    CHECK(num_large(got.scheduler) > 0);
    compare(problem, plan, got);
  }
}

TEST_CASE("large tiles of a prefill, which write its outputs") {
  test::Random random(46);
  const auto until_large = [&](auto&& check) {
    while (check() == 0) {
    }
  };
  for (int i = 0; i < test::scaled(8); ++i)
    until_large(
        [&] { return check_prefill<half, 16>(random, random.pick({1, 2, 3, 4, 7, 8, 16})); });
  until_large([&] { return check_prefill<half, 64>(random, 8); });
#if !defined(CHUNKATTN_FEW_KERNELS)
  until_large([&] { return check_prefill<bfloat16, 16>(random, 4); });
  until_large([&] { return check_prefill<bfloat16, 128>(random, 8); });
  until_large([&] { return check_prefill<half, 80>(random, 5); });
  until_large([&] { return check_prefill<half, HeadDims{128, 96}>(random, 8); });
  until_large([&] { return check_prefill<half, HeadDims{64, 16}>(random, 4); });
#endif
}

TEST_CASE("large tiles: a NaN reaches every line that sees it, and no other") {
  test::Random random(43);
  for (int i = 0; i < test::scaled(6); ++i) {
    test::RandomPlan plan =
        test::make_two_level_plan(8, random.uniform(150, 400), random.uniform(1, 60));
    if (i % 2 == 0)  // mixed KV tiles
      for (std::int32_t& length : plan.row_kv_len)
        if (random.chance(0.5)) length = random.uniform(100, length);
    const int group = random.uniform(9, 20);
    const test::AttentionCase<half, half> clean(random, plan, 16, 1, group);
    for (const auto where : {test::NanPlace::q, test::NanPlace::k, test::NanPlace::v}) {
      const test::KvStorage<half> kv = test::copy_of<half>(clean.kv);
      std::vector<half> q = clean.q;
      const test::NanPlace nan(random, where, plan, kv.view, std::span(q));
      CAPTURE(where);
      const auto got = run<half, 16>(random, kv, plan, q);
      CHECK(num_large(got.scheduler) > 0);
      CHECK(test::wrong_elements(nan, plan, clean.reference, 1, std::span<const half>(got.out),
                                 got.lse, chunkattn::unit_roundoff<half>()) == 0);
    }
  }
}

TEST_CASE("large tiles of which rows see nothing that has a weight") {
  test::Random random(44);
  const float inf = std::numeric_limits<float>::infinity();
  const int shared = 256;
  for (const bool whole : {false, true}) {  // of a prefill, of which rows see nothing else
    CAPTURE(whole);
    const test::RandomPlan plan =
        whole ? test::make_level_plan({1}, {shared}, 8) : test::make_two_level_plan(8, shared, 30);
    test::AttentionCase<half, half> problem(random, plan, 16, 1, 11);
    for (std::size_t at = 0; at < problem.q.size(); at += 16)  // so that K decides the sign
      problem.q[at] = chunkattn::to_half(0.5f + std::abs(chunkattn::to_float(problem.q[at])));
    const auto set_key = [&](int position, float key) {
      const auto place = test::place_of(plan, 0, position);
      problem.kv.view.k_row(place.chunk, 0, place.begin)[0] = chunkattn::to_half(key);
    };
    for (int position = 0; position < shared; ++position) set_key(position, -inf);
    auto got = run<half, 16>(random, problem.kv, plan, problem.q);
    CHECK(num_large(got.scheduler) > 0);
    CHECK(num_whole(got.scheduler) == (whole ? 1 : 0));
    compare(problem, plan, got);
    // What has no weight has none whatever its value is, as long as nothing else is in its task.
    const auto place = test::place_of(plan, 0, 70);
    problem.kv.view.v_row(place.chunk, 0, place.begin)[3] = chunkattn::to_half(inf);
    const auto again = run<half, 16>(random, problem.kv, plan, problem.q);
    CHECK(again.out == got.out);
    CHECK(again.lse == got.lse);
  }
}

TEST_CASE("large tiles in a row with others: the same bits, however many blocks there are") {
  test::Random random(45);
  // 140 lines at the root, a tile and a small one; 70 on the next level; own tokens.
  for (const int own : {1, 64, 130}) {
    const test::RandomPlan plan = test::make_level_plan({1, 2, 10}, {400, 300, own});
    test::AttentionCase<half, half> problem(random, plan, 16, 2, 14);
    std::vector<half> first;
    for (const int grid : {1, 2, 5, 40}) {
      CAPTURE(own);
      CAPTURE(grid);
      const auto got = run<half, 16>(random, problem.kv, plan, problem.q, 4, grid);
      CHECK(num_large(got.scheduler) > 0);
      if (first.empty()) {
        compare(problem, plan, got);
        first = got.out;
      }
      CHECK(got.out == first);
    }
  }
}
