// The walk over K and V, place by place: what each block holds, which rows read it, where blocks
// begin. It is copied to run ahead, so it must not depend on being the first. And the items of a
// batch-invariant schedule, which show each row its path in whole blocks.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "chunkattn/detail/cpu/schedule.hpp"
#include "chunkattn/detail/cpu/walk.hpp"
#include "support/random.hpp"
#include "support/random_plan.hpp"

using namespace chunkattn;
using detail::cpu::block_tokens;
using detail::cpu::BlockSpan;

namespace {

using Places = std::vector<std::pair<ChunkIndex, int>>;  // chunk, offset

test::RandomPlan plan_of(test::Random& random) {
  test::RandomPlanOptions options;
  options.num_sequences = random.uniform(1, 6);
  options.max_length = random.pick({3, 63, 64, 65, 300});
  options.chunk_size = random.pick({4, 16, 64});
  options.max_queries = 3;
  return make_random_plan(random, options);
}

// The places of a segment's tokens, in order.
Places places_of(const test::RandomPlan& plan, const PlanView::Segment& segment) {
  Places places;
  for (int p = 0; p < segment.num_pieces; ++p) {
    const Piece& piece = plan.pieces[static_cast<std::size_t>(segment.piece_begin + p)];
    for (int t = 0; t < piece.length; ++t) places.emplace_back(piece.chunk, piece.begin + t);
  }
  return places;
}

// Appends a block's places, which must be as many as it says.
void add(const BlockSpan& block, Places& places) {
  int count = 0;
  for (int r = 0; r < block.num_runs; ++r) {
    CHECK(block.runs[r].count > 0);
    for (int t = 0; t < block.runs[r].count; ++t)
      places.emplace_back(block.runs[r].chunk, block.runs[r].begin + t);
    count += block.runs[r].count;
  }
  CHECK(count == block.count);
  CHECK(count > 0);
  CHECK(count <= block_tokens);
}

}  // namespace

TEST_CASE("items are walked in blocks that hold their tokens, in order") {
  test::Random random(81);
  for (int round = 0; round < test::scaled(100); ++round) {
    const test::RandomPlan plan = plan_of(random);
    std::vector<detail::cpu::WorkItem> items;
    for (int i = 0; i < 5; ++i) {
      const auto s = static_cast<std::int32_t>(random.index(plan.segments.size()));
      const int length = plan.segments[static_cast<std::size_t>(s)].length;
      const int begin = random.chance(0.5) ? 0 : random.uniform(0, length - 1);
      const int end = random.chance(0.5) ? length : random.uniform(begin + 1, length);
      items.push_back({s, begin, end, i, i + 2});
    }
    const PlanView view = plan.view();
    detail::cpu::ItemWalk walk(view, items.data(), items.data() + items.size());
    BlockSpan block;
    for (const detail::cpu::WorkItem& item : items) {
      const PlanView::Segment& segment = view.segments[item.segment];
      const Places all = places_of(plan, segment);
      Places seen;
      for (int token = item.token_begin; token < item.token_end; token += block_tokens) {
        detail::cpu::ItemWalk twin = walk;
        BlockSpan same;
        REQUIRE(twin.next(same));
        REQUIRE(walk.next(block));
        CHECK(same.position == block.position);
        CHECK(block.position == segment.position + token);
        CHECK(block.count == std::min(block_tokens, item.token_end - token));
        CHECK(block.row_begin == item.row_begin);
        CHECK(block.row_end == item.row_end);
        add(block, seen);
      }
      CHECK(seen == Places(all.begin() + item.token_begin, all.begin() + item.token_end));
    }
    CHECK_FALSE(walk.next(block));
    CHECK_FALSE(detail::cpu::ItemWalk(view, nullptr, nullptr).next(block));
  }
}

TEST_CASE("batch-invariant: each row sees its path from position 0 in whole blocks, in order") {
  test::Random random(82);
  for (int round = 0; round < test::scaled(100); ++round) {
    test::RandomPlan plan = plan_of(random);
    if (round % 3 == 0) {  // segments without a piece, first and last on the path
      for (PlanView::Segment& segment : plan.segments) ++segment.parent;
      for (std::int32_t& segment : plan.row_segment) ++segment;
      plan.segments.insert(plan.segments.begin(), {0, plan.num_rows(), 0, 0, 0, 0, -1, 2});
      const PlanView::Segment& last = plan.segments.back();
      const int position = last.position + last.length;
      plan.segments.push_back({last.row_begin, last.row_end, last.piece_begin, 0, position, 0,
                               static_cast<std::int32_t>(plan.segments.size()) - 1, 1});
      for (std::int32_t& segment : plan.row_segment)
        if (segment + 2 == static_cast<std::int32_t>(plan.segments.size())) ++segment;
    }
    for (std::int32_t& kv_len : plan.row_kv_len)
      if (random.chance(0.2)) kv_len = random.uniform(0, kv_len);
    const PlanView view = plan.view();
    detail::cpu::Schedule schedule;
    detail::cpu::ScheduleOptions options;
    options.invariant = true;
    options.max_lines = random.pick({1, 4, 256});
    options.min_product_lines = random.pick({1, 3, 5});
    options.min_tasks = random.pick({1, 64});
    schedule.derive(view, options);
    CHECK(schedule.num_partial_rows() == 0);
    std::vector<Places> seen(static_cast<std::size_t>(view.num_rows));
    for (const detail::cpu::Split& split : schedule.splits()) {
      const detail::cpu::WorkItem* const items = schedule.items().data();
      detail::cpu::ItemWalk walk(view, items + split.item_begin, items + split.item_end);
      BlockSpan block;
      while (walk.next(block)) {
        CHECK(block.position % block_tokens == 0);
        Places places;
        add(block, places);
        for (int row = block.row_begin; row < block.row_end; ++row) {
          Places& path = seen[static_cast<std::size_t>(row)];
          const int visible = std::min(view.row_kv_len[row] - block.position, block.count);
          if (visible <= 0) continue;
          CHECK(static_cast<int>(path.size()) == block.position);
          CHECK((visible == block_tokens || block.position + visible == view.row_kv_len[row]));
          path.insert(path.end(), places.begin(), places.begin() + visible);
        }
      }
    }
    for (int row = 0; row < view.num_rows; ++row) {
      Places all;
      for (std::int32_t s = view.row_segment[row]; s >= 0; s = view.segments[s].parent) {
        const Places above = places_of(plan, view.segments[s]);
        all.insert(all.begin(), above.begin(), above.end());
      }
      all.resize(static_cast<std::size_t>(view.row_kv_len[row]));
      CHECK(seen[static_cast<std::size_t>(row)] == all);
    }
  }
}
