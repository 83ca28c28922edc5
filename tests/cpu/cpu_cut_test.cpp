// Work that is cut along KV: rows that see nothing among others, geometry that reaches the
// schedule, items that are never empty.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "support/attention_case.hpp"

using namespace chunkattn;
using Count = std::optional<int>;
using Reduce = CpuOptions::Reduce;

namespace {

// What ChunkAttention<Cpu> makes of a case, against the oracle.
template <class T>
void check_answer(ChunkAttention<Cpu, 64>& attention, const test::AttentionCase<T>& problem) {
  test::Answer<float> answer(problem);
  attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out, {.lse = answer.lse});
  const Rounding rounding = test::rounding_in<T>(attention);
  CHECK(
      compare_with_reference(problem.reference, std::span<const float>(answer.out), rounding).ok());
  CHECK(test::worst_lse(problem.reference, answer.lse, rounding) <= 1);
}

}  // namespace

TEST_CASE("every way to merge agrees with the oracle, for any number of tasks and heads per task") {
  test::Random random(53);
  int cut = 0;
  for (int round = 0; round < test::scaled(24) || (cut == 0 && round < 500); ++round) {
    const bool few = round % 2 == 0;  // only what is long and narrow is cut along KV
    test::RandomPlanOptions options;
    options.share = random.pick({test::Share::none, test::Share::some, test::Share::all});
    options.num_sequences = few ? random.uniform(1, 3) : random.uniform(4, 40);
    options.max_length = few ? 4000 : 150;
    options.max_queries = random.pick({1, 4});
    const int heads = random.pick({1, 2, 5}), group = random.pick({1, 2, 9});
    test::AttentionCase<half> problem(random, options, 64, heads, group);
    if (round % 4 >= 2) {  // queries in the middle of what others read, and of nothing at all
      test::RandomPlan& plan = problem.plan;
      for (std::size_t row = 0; row < plan.row_kv_len.size(); ++row) {
        if (random.chance(0.3)) plan.row_kv_len[row] = random.uniform(0, plan.row_kv_len[row]);
        if (random.chance(0.1)) plan.row_kv_len[row] = 0, plan.row_segment[row] = -1;
      }
      fill_kv(random, plan, problem.kv.view);
      problem.reference =
          reference_attention(problem.kv.view, plan.view(), std::span<const float>(problem.q));
    }
    for (const Reduce reduce :
         {Reduce::deterministic, Reduce::spin_lock, Reduce::batch_invariant}) {
      CAPTURE(static_cast<int>(reduce));
      ChunkAttention<Cpu, 64> attention(
          random.pick({1, 3}), {.reduce = reduce,
                                .tuning = {.min_tasks = random.pick<Count>({{}, 1, 300}),
                                           .max_task_heads = random.pick<Count>({{}, 1, 2})}});
      for (int again = 0; again < 2; ++again) check_answer(attention, problem);
      if (reduce != Reduce::batch_invariant) cut += schedule_of(attention).num_partial_rows() > 0;
    }
  }
  CHECK(cut > 0);
}

TEST_CASE("a worker takes several heads of a job while much is left, single ones at the end") {
  detail::cpu::TaskQueue queue;
  queue.reset(2, 8, 1, [](int j) { return detail::cpu::JobSize{j == 0 ? 1.0 : 2.0, 3, 6}; });
  CHECK(queue.size() == 2 * 8 * 3);
  std::atomic<int> next{0};
  detail::cpu::Task task;
  std::vector<int> heads;
  while (queue.take(next, task)) {
    if (task.part_begin == 0 && task.part_end == 3)
      heads.push_back(task.head_end - task.head_begin);
  }
  REQUIRE(heads.size() >= 3);
  CHECK(heads[0] == 6);  // half of what is left is as much, and more than one may take
  CHECK(heads[1] == 2);  // the job's last ones
  CHECK(heads.back() == 1);
}

TEST_CASE("one object serves plans of any size, one after the other") {
  test::Random random(54);
  for (const Reduce reduce : {Reduce::deterministic, Reduce::spin_lock, Reduce::batch_invariant}) {
    ChunkAttention<Cpu, 64> attention(3, {.reduce = reduce});
    for (int round = 0; round < test::scaled(12); ++round) {
      test::RandomPlanOptions options;
      options.num_sequences = random.pick({1, 2, 30});
      options.max_length = random.pick({20, 3000});
      if (options.num_sequences == 30) options.max_length = 60;
      const int heads = random.pick({1, 4}), group = random.pick({1, 8});
      check_answer(attention, test::AttentionCase<float>(random, options, 64, heads, group));
    }
  }
}

TEST_CASE("a row that sees nothing gives zeros also where its row block is cut along KV") {
  test::Random random(51);
  test::RandomPlanOptions options;
  options.num_sequences = 2;
  options.share = test::Share::none;
  options.max_length = 6000;
  options.max_queries = 3;
  options.reserve_chance = 0;
  for (const Reduce reduce : {Reduce::deterministic, Reduce::spin_lock}) {
    int cut = 0;
    for (int round = 0; round < 12; ++round) {
      test::RandomPlan plan = make_random_plan(random, options);
      const test::RandomPlan everything = plan;
      for (std::size_t row = 0; row < plan.row_kv_len.size(); row += 2) plan.row_kv_len[row] = 0;
      test::KvStorage<float> kv(plan.num_chunks, 1, options.chunk_size, 64);
      std::vector<float> q(static_cast<std::size_t>(plan.num_rows()) * 64);
      random.fill(std::span(q));
      std::vector<float> out(q.size(), -1.0f), lse(q.size() / 64, -1.0f);
      // What partial results hold from a run before is not looked at.
      ChunkAttention<Cpu, 64> attention(3, {.reduce = reduce});
      std::fill(kv.v.begin(), kv.v.end(), std::numeric_limits<float>::quiet_NaN());
      attention.run(kv.view, everything.view(), q, out, {.lse = lse});
      fill_kv(random, plan, kv.view);
      attention.run(kv.view, plan.view(), q, out, {.lse = lse});
      cut += schedule_of(attention).num_partial_rows() > 0 ? 1 : 0;
      const Reference reference =
          reference_attention(kv.view, plan.view(), std::span<const float>(q));
      CHECK(compare_with_reference(reference, std::span<const float>(out)).ok());
      for (std::size_t row = 0; row < plan.row_kv_len.size(); row += 2) {
        const auto token = static_cast<std::size_t>(plan.row_token[row]);
        for (std::size_t i = 0; i < 64; ++i) CHECK(out[token * 64 + i] == 0.0f);
        CHECK(lse[token] == -std::numeric_limits<float>::infinity());
      }
    }
    CHECK(cut > 0);
  }
}

TEST_CASE("rows that see next to nothing do not make row blocks of more lines than there may be") {
  test::Random random(53);
  test::RandomPlanOptions options;
  options.num_sequences = 40;
  options.share = test::Share::none;
  test::AttentionCase<float> problem(random, options, 64, 1, 8);
  std::fill(problem.plan.row_kv_len.begin(), problem.plan.row_kv_len.end(), 1);
  problem.reference =
      reference_attention(problem.kv.view, problem.plan.view(), std::span<const float>(problem.q));
  ChunkAttention<Cpu, 64> attention(2);
  check_answer(attention, problem);
  for (const detail::cpu::RowBlock& block : schedule_of(attention).row_blocks())
    CHECK(block.num_rows() * 8 <= 256);
}

TEST_CASE("the schedule of a run is the one of its geometry, and no item is empty") {
  test::Random random(52);
  for (int round = 0; round < test::scaled(40); ++round) {
    test::RandomPlanOptions options;
    options.num_sequences = random.uniform(1, 40);
    options.max_length = 200;
    options.share = random.pick({test::Share::none, test::Share::all});
    const int heads = random.pick({1, 2, 8}), group = random.pick({1, 3, 8});
    test::AttentionCase<half> problem(random, options, 64, heads, group);
    // Rows that see little leave segments that no row sees; another has no rows.
    const double less = random.pick({0.0, 0.2, 0.9});
    for (std::int32_t& kv_len : problem.plan.row_kv_len)
      if (random.chance(less)) kv_len = random.uniform(0, kv_len);
    const int rows = problem.plan.num_rows();
    problem.plan.segments.push_back(
        {rows, rows, problem.plan.segments[0].piece_begin, 1, 0, 1, -1, 0});
    const int min_product_lines = random.pick({1, 9, 30});
    ChunkAttention<Cpu, 64> attention(2, {.tuning = {.min_product_lines = min_product_lines}});
    test::Answer<float> answer(problem);
    attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out);
    const detail::cpu::Schedule& schedule = schedule_of(attention);
    const PlanView view = problem.plan.view();
    if (options.share == test::Share::none) CHECK(schedule.num_shared_items() == 0);
    int shared = 0;
    std::vector<std::int32_t> token_end(static_cast<std::size_t>(view.num_segments));
    int last_row = 0;
    for (const detail::cpu::RowBlock& block : schedule.row_blocks()) {
      CHECK(block.row_begin == last_row);
      CHECK((block.num_rows() == 1 || block.num_rows() * group <= 256));
      CHECK(block.num_rows() > 0);
      last_row = block.row_end;
      for (int u = block.split_begin; u < block.split_begin + block.split_count; ++u) {
        const detail::cpu::Split& split = schedule.splits()[static_cast<std::size_t>(u)];
        for (int i = split.item_begin; i < split.item_end; ++i) {
          const detail::cpu::WorkItem& item = schedule.items()[static_cast<std::size_t>(i)];
          CHECK(item.token_begin < item.token_end);
          CHECK(item.token_end <= view.segments[item.segment].length);
          CHECK(item.row_begin < item.row_end);
          CHECK(item.row_begin >= block.row_begin);
          CHECK(item.row_end <= block.row_end);
          std::int32_t& end = token_end[static_cast<std::size_t>(item.segment)];
          end = std::max(end, item.token_end);
          shared += view.segments[item.segment].num_sequences > 1;
          CHECK((i < split.stream_begin) ==
                ((item.row_end - item.row_begin) * group >= min_product_lines));
        }
      }
    }
    // Of each segment just what any of its rows sees.
    for (int s = 0; s < view.num_segments; ++s) {
      const PlanView::Segment& segment = view.segments[s];
      std::int32_t seen = 0;
      for (int row = segment.row_begin; row < segment.row_end; ++row)
        seen = std::max(seen, std::min(view.row_kv_len[row] - segment.position, segment.length));
      CHECK(token_end[static_cast<std::size_t>(s)] == seen);
    }
    CHECK((schedule.num_shared_items() > 0) == (shared > 0));
    CHECK(last_row == view.num_rows);
  }
}
