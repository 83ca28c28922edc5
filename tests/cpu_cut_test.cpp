// Work that is cut along KV: rows that see nothing among others, geometry that reaches the
// schedule, items that are never empty.
#include <doctest/doctest.h>

#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "support/attention_case.hpp"

using namespace chunkattn;

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
      for (std::size_t row = 0; row < plan.row_kv_len.size(); row += 2) plan.row_kv_len[row] = 0;
      test::KvStorage<float> kv(plan.num_slots, 1, options.chunk_size, 64);
      fill_kv(random, plan, kv.view);
      std::vector<float> q(static_cast<std::size_t>(plan.num_rows()) * 64);
      random.fill(std::span(q));
      std::vector<float> out(q.size(), -1.0f), lse(q.size() / 64, -1.0f);
      ChunkAttention<Cpu, 64> attention(3, {.reduce = reduce});
      attention.run(kv.view, plan.view(), q, out, lse);
      cut += attention.schedule().num_partial_rows() > 0 ? 1 : 0;
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

TEST_CASE("the schedule of a run is the one of its geometry, and no item is empty") {
  test::Random random(52);
  for (int round = 0; round < test::scaled(40); ++round) {
    test::RandomPlanOptions options;
    options.num_sequences = random.uniform(1, 40);
    options.max_length = 200;
    const int heads = random.pick({1, 2, 8}), group = random.pick({1, 3, 8});
    const test::AttentionCase<half> problem(random, options, 64, heads, group);
    ChunkAttention<Cpu, 64> attention(2);
    test::Answer<float> answer(problem);
    attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out);
    const cpu::Schedule& schedule = attention.schedule();
    const PlanView view = problem.plan.view();
    int last_row = 0;
    for (const cpu::RowBlock& block : schedule.row_blocks()) {
      CHECK(block.row_begin == last_row);
      CHECK((block.num_rows() == 1 || block.num_rows() * group <= 256));
      CHECK(block.num_rows() > 0);
      last_row = block.row_end;
      for (int u = block.unit_begin; u < block.unit_begin + block.unit_count; ++u) {
        const cpu::Unit& unit = schedule.units()[static_cast<std::size_t>(u)];
        for (int i = unit.item_begin; i < unit.item_end; ++i) {
          const cpu::WorkItem& item = schedule.items()[static_cast<std::size_t>(i)];
          CHECK(item.token_begin < item.token_end);
          CHECK(item.token_end <= view.segments[item.segment].length);
          CHECK(item.row_begin < item.row_end);
          CHECK(item.row_begin >= block.row_begin);
          CHECK(item.row_end <= block.row_end);
          // From nine lines of 16-bit K and V on, an item is a product.
          CHECK((i < unit.stream_begin) == ((item.row_end - item.row_begin) * group >= 9));
        }
      }
    }
    CHECK(last_row == view.num_rows);
  }
}
