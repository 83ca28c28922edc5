// Where runs are cut along KV: a launch, played by as many blocks as the device holds, ends when
// its work does.
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

// The launch: blocks take (task, KV head) pairs in order, each the next one when it is free.
// Whoever merges does so when the last partial result is there.
struct Played {
  std::int64_t items[2] = {};    // of each phase
  std::int64_t longest[2] = {};  // the same
  std::int64_t work[2] = {};     // the same
  std::int64_t least_rest = 0;   // of those that merge, from the last partial result on
  std::int64_t makespan = 0;
  double ratio = 0;  // of the makespan to what no schedule of these tasks can beat
  double apart = 0;  // of the makespan to what no schedule can beat whose phases are launches
};

Played play(const test::RandomPlan& plan, const Geometry& geometry) {
  const CostModel model;
  Scheduler scheduler;
  scheduler.build(plan.view(), geometry, model, plenty);
  Played played;
  std::priority_queue<std::int64_t, std::vector<std::int64_t>, std::greater<>> free;
  for (int b = 0; b < model.num_blocks; ++b) free.push(0);
  const auto& tasks = scheduler.tasks();
  std::int64_t ready = 0;  // the last partial result
  for (std::size_t t = 0; t < tasks.size(); ++t) {
    const Task& task = tasks[t];
    const int phase = t < static_cast<std::size_t>(scheduler.num_chunk_first()) ? 0 : 1;
    std::int64_t tokens = 0;
    if (task.segment >= 0) {
      const auto& segment = plan.segments[static_cast<std::size_t>(task.segment)];
      const int seen = plan.row_kv_len[static_cast<std::size_t>(task.row_begin / geometry.group())];
      tokens = std::min({task.position_end, segment.position + segment.length, seen}) -
               task.position_begin;
    }
    const int dim = geometry.head_dim;
    const std::int64_t ps =
        phase == 0 ? model.chunk_first_ps(tokens, task.tile_rows, task.row_count, dim)
                   : model.sequence_first_ps(tokens, task.tile_rows, task.row_count, dim, 0);
    const std::int64_t rest = model.merge_all_ps(task.row_count, dim, task.merge_count);
    if (phase == 0) CHECK(rest == 0);
    for (int head = 0; head < geometry.num_kv_heads; ++head) {
      const std::int64_t end = std::max(free.top() + ps, rest > 0 ? ready : 0) + rest;
      free.pop();
      free.push(end);
      played.makespan = std::max(played.makespan, end);
    }
    if (t + 1 == static_cast<std::size_t>(scheduler.num_chunk_first()))
      ready = played.makespan + model.wait_ps;
    if (rest > 0 && (played.least_rest == 0 || rest < played.least_rest)) played.least_rest = rest;
    played.items[phase] += geometry.num_kv_heads;
    played.work[phase] += (ps + rest) * geometry.num_kv_heads;
    played.longest[phase] = std::max(played.longest[phase], ps + rest);
  }
  const std::int64_t chain =
      std::max(played.longest[0] + model.wait_ps + played.least_rest, played.longest[1]);
  const auto share = [&](std::int64_t work) {
    return static_cast<double>(work) / model.num_blocks;
  };
  const auto makespan = static_cast<double>(played.makespan);
  played.ratio =
      makespan / std::max(share(played.work[0] + played.work[1]), static_cast<double>(chain));
  played.apart = makespan / (std::max(share(played.work[0]), double(played.longest[0])) +
                             std::max(share(played.work[1]), double(played.longest[1])));
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
    const std::int64_t ready = random.uniform(0, 3000);
    for (int task = random.uniform(0, 30); task > 0; --task) {
      const std::int64_t ps = random.uniform(0, 1000);
      const std::int64_t rest = random.chance(0.5) ? random.uniform(1, 300) : 0;
      makespan.add(ps, rest > 0 ? ready : 0, rest);
      for (int c = 0; c < copies; ++c) {
        std::int64_t& first = *std::min_element(free.begin(), free.end());
        first = std::max(first + ps, rest > 0 ? ready : 0) + rest;
      }
    }
    CHECK(makespan.end() == *std::max_element(free.begin(), free.end()));
  }
}

TEST_CASE("a shared prefix fills the device, however long what follows it") {
  const int num_blocks = CostModel{}.num_blocks;
  for (const int own : {64, 512, 1024}) {
    CAPTURE(own);
    const Played played = play(test::make_two_level_plan(32, 4096, own), mha);
    CHECK(played.items[0] > num_blocks * 9 / 10);
    CHECK(played.items[0] <= num_blocks);  // and not a second round for a few
  }
}

TEST_CASE("a launch ends when its work does") {
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
  int few = 0;
  for (const Case& c : cases) {
    CAPTURE(c.sequences);
    CAPTURE(c.shared);
    CAPTURE(c.own);
    CAPTURE(c.geometry.num_kv_heads);
    const Played played = play(test::make_two_level_plan(c.sequences, c.shared, c.own), c.geometry);
    // A few sequences are a round of each phase, which the work of both together says nothing of.
    CHECK((played.ratio <= 1.05 || played.apart <= 0.9));
    few += played.ratio > 1.05 ? 1 : 0;
  }
  CHECK(few <= 1);
}

// FastTree (MLSys 2025), the trees of its kernel benchmark. Small ones are a round of each phase,
// which the work of both together says nothing of.
TEST_CASE("published trees end no later than two launches could") {
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
      // A few rounds of tasks that are not worth a cut cannot end evenly.
      uneven += played.apart > 1.05 ? 1 : 0;
      CHECK(played.apart <= 1.15);
    }
  CHECK(uneven <= 2);
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
