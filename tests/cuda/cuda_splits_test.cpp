// Where runs are cut along KV: both launches, played by as many blocks as the device holds, end
// when their work does.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "chunkattn/cuda/schedule.hpp"
#include "support/level_plan.hpp"
#include "support/random.hpp"

namespace {

using chunkattn::CostModel;
using chunkattn::Geometry;
using namespace chunkattn::cuda_detail;

constexpr ScheduleCapacity plenty{std::size_t{1} << 20, std::size_t{1} << 20, std::size_t{1} << 28};

// One launch: blocks take (task, KV head) pairs in order, each the next one when it is free.
struct Launch {
  std::int64_t items = 0;
  std::int64_t work = 0;
  std::int64_t longest = 0;
  std::int64_t makespan = 0;

  // No launch can end before this.
  double floor(int num_blocks) const {
    return std::max(static_cast<double>(work) / num_blocks, static_cast<double>(longest));
  }
};

Launch play(const test::RandomPlan& plan, const Geometry& geometry, const CostModel& model,
            const Scheduler& scheduler, bool chunk_first) {
  Launch launch;
  std::priority_queue<std::int64_t, std::vector<std::int64_t>, std::greater<>> free;
  for (int b = 0; b < model.num_blocks; ++b) free.push(0);
  const auto& tasks = scheduler.tasks();
  const auto phase1 = static_cast<std::size_t>(scheduler.num_chunk_first());
  for (std::size_t t = chunk_first ? 0 : phase1; t < (chunk_first ? phase1 : tasks.size()); ++t) {
    const Task& task = tasks[t];
    std::int64_t tokens = 0;
    if (task.segment >= 0) {
      const auto& segment = plan.segments[static_cast<std::size_t>(task.segment)];
      const int seen = plan.row_kv_len[static_cast<std::size_t>(task.row_begin / geometry.group())];
      tokens = std::min({task.position_end, segment.position + segment.length, seen}) -
               task.position_begin;
    }
    const std::int64_t ps =
        chunk_first
            ? model.chunk_first_ps(tokens, task.tile_rows, task.row_count, geometry.head_dim)
            : model.sequence_first_ps(tokens, task.tile_rows, task.row_count, geometry.head_dim,
                                      task.merge_count);
    for (int head = 0; head < geometry.num_kv_heads; ++head) {
      const std::int64_t end = free.top() + ps;
      free.pop();
      free.push(end);
      launch.makespan = std::max(launch.makespan, end);
    }
    launch.items += geometry.num_kv_heads;
    launch.work += ps * geometry.num_kv_heads;
    launch.longest = std::max(launch.longest, ps);
  }
  return launch;
}

struct Played {
  Launch first, second;
  double ratio = 0;  // of the modelled time to what no schedule of these tasks can beat
};

Played play(const test::RandomPlan& plan, const Geometry& geometry) {
  const CostModel model;
  Scheduler scheduler;
  scheduler.build(plan.view(), geometry, model, plenty);
  Played played{play(plan, geometry, model, scheduler, true),
                play(plan, geometry, model, scheduler, false)};
  played.ratio = static_cast<double>(played.first.makespan + played.second.makespan) /
                 (played.first.floor(model.num_blocks) + played.second.floor(model.num_blocks));
  return played;
}

constexpr Geometry mha{32, 32, 128};
constexpr Geometry gqa{32, 8, 128};
constexpr Geometry mqa{16, 1, 128};

}  // namespace

TEST_CASE("a makespan is what blocks that take items one by one come to") {
  test::Random random(31);
  Makespan makespan;
  for (int i = 0; i < test::scaled(200); ++i) {
    const int blocks = random.uniform(1, 40);
    const int copies = random.uniform(1, 12);
    std::vector<std::int64_t> free(static_cast<std::size_t>(blocks), 0);
    makespan.start(blocks, copies);
    for (int task = random.uniform(0, 30); task > 0; --task) {
      const std::int64_t ps = random.uniform(0, 1000);
      makespan.add(ps);
      for (int c = 0; c < copies; ++c) *std::min_element(free.begin(), free.end()) += ps;
    }
    CHECK(makespan.end() == *std::max_element(free.begin(), free.end()));
  }
}

TEST_CASE("a shared prefix fills the device, however long what follows it") {
  const int num_blocks = CostModel{}.num_blocks;
  for (const int own : {64, 512, 1024}) {
    CAPTURE(own);
    const Launch first = play(test::make_two_level_plan(32, 4096, own), mha).first;
    CHECK(first.items > num_blocks * 9 / 10);
    CHECK(first.items <= num_blocks);  // and not a second round for a few
  }
}

TEST_CASE("both launches end when their work does") {
  struct Case {
    int sequences, shared, own;
    Geometry geometry;
  };
  std::vector<Case> cases;
  for (const int shared : {1024, 2048, 4096}) {
    for (const int own : {0, 64, 512, 1024}) cases.push_back({32, shared, own, mha});
    cases.push_back({32, 0, shared, mha});
  }
  for (const int sequences : {1, 4, 16, 64, 96}) cases.push_back({sequences, 2048, 256, mha});
  for (const int sequences : {64, 256})
    for (const int shared : {4096, 32768})
      for (const int own : {64, 512}) cases.push_back({sequences, shared, own, gqa});
  for (const int sequences : {1, 8, 20, 48, 64, 256}) cases.push_back({sequences, 0, 4096, gqa});
  for (const Case& c : cases) {
    CAPTURE(c.sequences);
    CAPTURE(c.shared);
    CAPTURE(c.own);
    CAPTURE(c.geometry.num_kv_heads);
    CHECK(play(test::make_two_level_plan(c.sequences, c.shared, c.own), c.geometry).ratio <= 1.05);
  }
}

// FastTree (MLSys 2025), the trees of its kernel benchmark.
TEST_CASE("so they do for published trees") {
  struct Tree {
    std::vector<int> nodes, tokens;
  };
  const Tree trees[] = {
      {{1, 2, 64}, {8, 256, 32}},
      {{1, 4, 256}, {8, 256, 32}},
      {{1, 4, 8, 256}, {8, 256, 256, 32}},
      {{1, 256}, {256, 32}},
      {{1, 1024}, {2048, 32}},
      {{1, 16, 64}, {1024, 256, 32}},
      {{1, 4, 16, 512}, {1024, 256, 128, 32}},
      {{1, 4, 16, 64, 256, 1024}, {256, 8, 256, 64, 32, 256}},
      {{1, 10}, {4000, 400}},
      {{1, 2, 4, 8, 16, 32, 64, 128, 1024}, {16, 16, 16, 16, 16, 16, 16, 16, 16}},
      {{1, 2, 4, 8, 16, 32, 64, 128, 1024}, {256, 128, 64, 16, 16, 16, 16, 16, 16}},
      {{1, 8, 16, 32, 64, 128, 1024}, {256, 128, 64, 16, 16, 16, 16}},
      {{1, 8, 16, 32, 64, 256, 1024}, {256, 128, 64, 16, 16, 16, 16}},
      {{1, 16, 32, 64, 128, 1024}, {256, 128, 64, 16, 16, 16}},
      {{1, 16, 32, 64, 256, 1024}, {256, 128, 64, 16, 16, 16}}};
  int uneven = 0;
  for (const Tree& tree : trees)
    for (const Geometry& geometry : {mha, gqa, mqa}) {
      const Played played = play(test::make_level_plan(tree.nodes, tree.tokens), geometry);
      CAPTURE(tree.nodes.size());
      CAPTURE(tree.nodes.back());
      CAPTURE(geometry.num_kv_heads);
      // A launch of one to three rounds of tasks that are not worth a cut cannot end evenly.
      uneven += played.ratio > 1.05 ? 1 : 0;
      CHECK(played.ratio <= 1.2);
    }
  CHECK(uneven <= 4);
}

TEST_CASE("where partial results are scarce, cuts are fewer, not gone") {
  const test::RandomPlan plan = test::make_two_level_plan(32, 4096, 64);
  const CostModel model;
  for (const std::size_t partials_of_a_line : {1, 2, 4, 6}) {
    ScheduleCapacity few = plenty;
    few.partials = partials_of_a_line * 32 * 32;
    Scheduler scheduler;
    scheduler.build(plan.view(), mha, model, few);
    CAPTURE(partials_of_a_line);
    CHECK(scheduler.summary().num_shared == 1);
    CHECK(scheduler.num_chunk_first() == static_cast<int>(partials_of_a_line));
  }
}

TEST_CASE("rows that only merge are spread over the blocks") {
  for (const Geometry& geometry : {mha, gqa}) {
    const test::RandomPlan plan = test::make_two_level_plan(32, 4096, 0);
    Scheduler scheduler;
    scheduler.build(plan.view(), geometry, CostModel{}, plenty);
    REQUIRE(scheduler.num_chunk_first() > 1);
    const int group = geometry.group();
    CHECK(scheduler.num_sequence_first() == 32 * group / merge_rows(128));
  }
  CHECK(merge_rows(128) == 4);  // 128 threads, four columns each
  CHECK(merge_rows(256) == 2);
  CHECK(merge_rows(16) == 16);  // the smallest tile
}
