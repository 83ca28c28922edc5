// The CUDA scheduler and tile layout: plain integers on the host.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <map>
#include <set>
#include <vector>

#include "chunkattn/detail/cuda/device_plan.hpp"
#include "chunkattn/detail/cuda/scheduler.hpp"
#include "support/level_plan.hpp"
#include "support/random.hpp"
#include "support/random_plan.hpp"
#include "support/schedule_summary.hpp"

namespace {

using chunkattn::PlanView;
using Segment = chunkattn::PlanView::Segment;
using chunkattn::detail::cuda::CostModel;
using chunkattn::detail::cuda::Geometry;
using namespace chunkattn::detail::cuda;

constexpr ScheduleCapacity plenty{std::size_t{1} << 20, std::size_t{1} << 20, std::size_t{1} << 28};

// Every (row, head) sees each visible position exactly once, through one streaming task or through
// the partials its final task merges; only what is `hidden` from the row may be left out.
void check_exact_cover(const test::RandomPlan& plan, const Geometry& geometry,
                       const Scheduler& scheduler,
                       const std::vector<chunkattn::KeyRange>& hidden = {}) {
  const PlanView view = plan.view();
  const int group = geometry.group();
  struct Source {
    int row, begin, end, flag;
  };
  std::set<int> flags;
  std::map<std::int64_t, Source> partials;  // index of (row, first head of KV head 0) -> range
  const auto ranges_of = [&](const Task& task, int packed, int& begin, int& end) {
    const int row = packed / group;
    begin = end = 0;
    if (task.segment < 0) return;
    const Segment& s = view.segments[task.segment];
    // The task's segment stands on the row's path.
    int on_path = view.row_segment[row];
    while (on_path >= 0 && on_path != task.segment) on_path = view.segments[on_path].parent;
    REQUIRE(on_path == task.segment);
    begin = task.position_begin;
    end = std::min({task.position_end, s.position + s.length, view.row_kv_len[row]});
    end = std::max(begin, end);
  };
  std::vector<std::vector<std::pair<int, int>>> seen(
      static_cast<std::size_t>(view.num_rows * group));
  for (int t = 0; t < static_cast<int>(scheduler.tasks().size()); ++t) {
    const Task& task = scheduler.tasks()[static_cast<std::size_t>(t)];
    // A large tile's results go straight to where they stay: it merges nothing.
    const bool whole = t < scheduler.num_chunk_first() || task.merge_count == 0;
    CHECK((task.tile_rows == 16 || task.tile_rows == 32 || task.tile_rows == 64 ||
           (task.tile_rows == 128 && whole)));
    REQUIRE(task.row_count >= 1);
    REQUIRE(task.row_count <= task.tile_rows);
    if (t < scheduler.num_chunk_first()) {
      CHECK(flags.insert(task.flag).second);
      CHECK(task.flag >= 0);
      CHECK(task.flag < scheduler.num_chunk_first());
    }
    for (int packed = task.row_begin; packed < task.row_begin + task.row_count; ++packed) {
      const int row = packed / group;
      int begin = 0, end = 0;
      ranges_of(task, packed, begin, end);
      const std::int64_t line = std::int64_t{row} * geometry.num_qo_heads + packed % group;
      if (t < scheduler.num_chunk_first()) {
        const std::int64_t index = task.partial_base + line;
        REQUIRE(index >= 0);
        REQUIRE(index < scheduler.num_partials());
        REQUIRE(partials.emplace(index, Source{packed, begin, end, task.flag}).second);
      } else {
        auto& mine = seen[static_cast<std::size_t>(packed)];
        REQUIRE(mine.empty());
        for (int m = 0; m < task.merge_count; ++m) {
          const Merge& merge = scheduler.merges()[static_cast<std::size_t>(task.merge_begin + m)];
          const auto found = partials.find(merge.partial_base + line);
          REQUIRE(found != partials.end());
          REQUIRE(found->second.row == packed);
          // Whoever writes it raises the flag that is waited for.
          CHECK(found->second.flag == merge.flag + ((packed - merge.row_begin) >> merge.tile_bits));
          mine.emplace_back(found->second.begin, found->second.end);
          CHECK((m == 0 || mine[mine.size() - 1] >= mine[mine.size() - 2]));  // in path order
        }
        mine.emplace_back(begin, end);
      }
    }
  }
  // The first position from `from` to `to` that the row sees, or `to`.
  const auto skip_hidden = [&](int row, int from, int to) {
    if (hidden.empty() || from >= to) return from;
    const chunkattn::KeyRange range = hidden[static_cast<std::size_t>(row)];
    return from >= range.begin && from < range.end ? std::min(range.end, to) : from;
  };
  for (int packed = 0; packed < view.num_rows * group; ++packed) {
    auto& mine = seen[static_cast<std::size_t>(packed)];
    REQUIRE(!mine.empty());  // every row has one final task
    std::sort(mine.begin(), mine.end());
    int reached = 0;
    for (const auto& [begin, end] : mine) {
      if (begin == end) continue;
      CHECK(skip_hidden(packed / group, reached, begin) == begin);
      reached = end;
    }
    const int kv_len = view.row_kv_len[packed / group];
    CHECK(skip_hidden(packed / group, reached, kv_len) == kv_len);
  }
}

bool has_large_tiles(const Scheduler& scheduler) {
  return std::any_of(scheduler.tasks().begin(), scheduler.tasks().end(),
                     [](const Task& task) { return task.tile_rows > usual_tile_rows; });
}

int num_shared(const Scheduler& scheduler) {
  return test::summarize(scheduler, Geometry{1, 1, 128}).num_shared;
}
std::int64_t kv_tokens(const Scheduler& scheduler) {
  return test::summarize(scheduler, Geometry{1, 1, 128}).kv_tokens;
}

// Chunk-first tasks of the run that ends with a segment.
std::vector<Task> pieces_of(const Scheduler& scheduler, int segment) {
  std::vector<Task> pieces;
  for (int t = 0; t < scheduler.num_chunk_first(); ++t) {
    const Task& task = scheduler.tasks()[static_cast<std::size_t>(t)];
    if (task.segment == segment) pieces.push_back(task);
  }
  return pieces;
}

}  // namespace

TEST_CASE("tasks cover each visible position of each row exactly once") {
  test::Random random(21);
  constexpr int groups[] = {1, 2, 3, 4, 7, 8, 16};
  constexpr test::Share shares[] = {test::Share::none, test::Share::some, test::Share::all};
  for (int i = 0; i < test::scaled(300); ++i) {
    test::RandomPlanOptions options;
    options.share = random.pick(shares);
    options.num_sequences = random.uniform(1, 40);
    options.max_length = random.uniform(1, 900);
    options.max_queries = random.chance(0.3) ? 100 : 1;
    const test::RandomPlan plan = test::make_random_plan(random, options);
    Geometry geometry;
    geometry.num_kv_heads = random.uniform(1, 4);
    geometry.num_qo_heads = geometry.num_kv_heads * random.pick(groups);
    geometry.head_dim = 128;
    CostModel model;
    if (random.chance(0.7)) {
      model.wait_ps = model.task_ps = model.merge_ps = 0;
      model.min_split_tokens = 64;
    }
    if (random.chance(0.5)) {
      model.most_tile_rows = max_tile_rows;
      model.num_blocks = random.pick({1, 8, 264});
    }
    Scheduler scheduler;
    scheduler.build(plan.view(), geometry, model, plenty);
    check_exact_cover(plan, geometry, scheduler);
    // The same plan gives the same tasks.
    Scheduler again;
    again.build(plan.view(), geometry, model, plenty);
    REQUIRE(again.tasks().size() == scheduler.tasks().size());
    for (std::size_t t = 0; t < again.tasks().size(); ++t)
      CHECK(std::memcmp(&again.tasks()[t], &scheduler.tasks()[t], sizeof(Task)) == 0);
    // So it does with half the room for partial results, within that room,
    const auto fewer = static_cast<std::size_t>(scheduler.num_partials() / 2);
    again.build(plan.view(), geometry, model, {std::size_t{1} << 20, std::size_t{1} << 20, fewer});
    CHECK(again.num_partials() <= scheduler.num_partials() / 2);
    check_exact_cover(plan, geometry, again);
    // and with next to none.
    const ScheduleCapacity small{again.tasks().size() + 1000, std::size_t{1} << 20, 0};
    again.build(plan.view(), geometry, model, small);
    CHECK(again.num_chunk_first() == 0);
    check_exact_cover(plan, geometry, again);
  }
}

TEST_CASE("tasks leave out what is hidden from all of their rows, and nothing else") {
  test::Random random(24);
  for (int i = 0; i < test::scaled(200); ++i) {
    test::RandomPlanOptions options;
    options.share = random.pick({test::Share::none, test::Share::some, test::Share::all});
    options.num_sequences = random.uniform(1, 30);
    options.max_length = random.uniform(1, 900);
    options.max_queries = random.chance(0.3) ? 100 : 1;
    const test::RandomPlan plan = test::make_random_plan(random, options);
    const int window = random.pick({1, 50, 300, 3000}), keep = random.pick({0, 1, 100});
    std::vector<chunkattn::KeyRange> hidden;
    for (const std::int32_t kv_len : plan.row_kv_len) hidden.push_back({keep, kv_len - window});
    CostModel model;
    if (random.chance(0.7)) {
      model.wait_ps = model.task_ps = model.merge_ps = 0;
      model.min_split_tokens = 64;
    }
    const Geometry geometry{4, 2, 128};
    Scheduler scheduler;
    scheduler.build(plan.view(), geometry, model, plenty, hidden.data());
    check_exact_cover(plan, geometry, scheduler, hidden);
    // The same lists when nothing is hidden as without being told of it.
    Scheduler all, told;
    std::fill(hidden.begin(), hidden.end(), chunkattn::KeyRange{7, 7});
    all.build(plan.view(), geometry, model, plenty);
    told.build(plan.view(), geometry, model, plenty, hidden.data());
    REQUIRE(all.tasks().size() == told.tasks().size());
    for (std::size_t t = 0; t < all.tasks().size(); ++t)
      CHECK(std::memcmp(&all.tasks()[t], &told.tasks()[t], sizeof(Task)) == 0);
  }
}

TEST_CASE("a window over a long context costs about what a short context does") {
  constexpr int window = 1024;
  for (const int sequences : {1, 8, 64}) {
    const test::RandomPlan far = test::make_two_level_plan(sequences, 0, 32768);
    const test::RandomPlan near = test::make_two_level_plan(sequences, 0, window);
    const std::vector<chunkattn::KeyRange> hidden(static_cast<std::size_t>(sequences),
                                                  {0, 32768 - window});
    Scheduler of_far, of_near;
    of_far.build(far.view(), {32, 8, 128}, CostModel{}, plenty, hidden.data());
    of_near.build(near.view(), {32, 8, 128}, CostModel{}, plenty);
    CHECK(kv_tokens(of_far) == kv_tokens(of_near));
    CHECK(of_far.tasks().size() == of_near.tasks().size());
  }
}

TEST_CASE("a long shared prefix is read once") {
  const test::RandomPlan plan = test::make_two_level_plan(32, 2048, 64);
  Scheduler scheduler;
  scheduler.build(plan.view(), {32, 32, 128}, CostModel{}, plenty);
  CHECK(num_shared(scheduler) == 1);
  // The table of floors: 2048 shared and 32 x 64 private tokens of 32 heads.
  CHECK(kv_tokens(scheduler) == 2048 + 32 * 64);
  CHECK(test::summarize(scheduler, Geometry{32, 32, 128}).kv_bytes ==
        std::int64_t{4} * 128 * 32 * (2048 + 32 * 64));
  CHECK(scheduler.num_sequence_first() == 32);
}

TEST_CASE("with nothing shared there is one phase") {
  const test::RandomPlan plan = test::make_two_level_plan(256, 0, 700);
  Scheduler scheduler;
  scheduler.build(plan.view(), {32, 8, 128}, CostModel{}, plenty);
  CHECK(scheduler.num_chunk_first() == 0);
  CHECK(scheduler.num_sequence_first() == 256);
  CHECK(scheduler.num_partials() == 0);
}

TEST_CASE("sharing that does not pay is not done") {
  Scheduler scheduler;
  CostModel model;
  const auto shared = [&](int sequences, int length, int private_tokens, Geometry geometry) {
    const test::RandomPlan plan = test::make_two_level_plan(sequences, length, private_tokens);
    scheduler.build(plan.view(), geometry, model, plenty);
    return num_shared(scheduler);
  };
  CHECK(shared(2, 8, 100, {32, 32, 128}) == 0);  // 8 tokens: partials cost more
  CHECK(shared(32, 1024, 64, {32, 32, 128}) == 1);
  CHECK(shared(1, 4096, 64, {32, 32, 128}) == 0);  // nobody to share with
  CHECK(shared(64, 4096, 64, {32, 8, 128}) == 1);
  CHECK(shared(2, 48, 64, {2, 2, 128}) == 0);  // saves less than the wait for partials costs
  // Rows that all end in the shared run and fit one tile are one group already.
  CHECK(shared(16, 4096, 0, {8, 8, 128}) == 0);
  // Two branches save one reading of 512 bytes per token; eight rows' partial results have 8,256.
  model.task_ps = model.wait_ps = 0;
  CHECK(shared(2, 16, 64, {4, 1, 128}) == 0);
  CHECK(shared(2, 17, 64, {4, 1, 128}) == 1);
  // Tiles of 64 rows read it once each, as two branches would.
  CHECK(shared(2, 4096, 64, {64, 1, 128}) == 0);
  CHECK(shared(3, 4096, 64, {43, 1, 128}) == 0);
  CHECK(shared(3, 4096, 64, {42, 1, 128}) == 1);
  model.wait_ps = std::int64_t{1} << 50;
  CHECK(shared(32, 4096, 64, {32, 8, 128}) == 0);
}

TEST_CASE("rows that see nothing, where nothing costs anything, still have their tasks") {
  test::RandomPlan plan = test::make_two_level_plan(4, 2000, 300);
  std::fill(plan.row_kv_len.begin(), plan.row_kv_len.end(), 0);
  CostModel model;
  model.task_ps = model.merge_ps = model.wait_ps = 0;
  Scheduler scheduler;
  scheduler.build(plan.view(), {4, 2, 64}, model, plenty);
  CHECK(scheduler.num_sequence_first() == 4);
  CHECK(kv_tokens(scheduler) == 0);
}

TEST_CASE("few sequences are cut along KV until the device is busy") {
  const test::RandomPlan plan = test::make_two_level_plan(1, 0, 32768);
  Scheduler scheduler;
  const CostModel model;
  scheduler.build(plan.view(), {32, 8, 128}, model, plenty);
  const int tasks = scheduler.num_chunk_first() * 8;
  CHECK(tasks * model.ps_per_kib >= model.num_blocks * model.alone_ps_per_kib);  // the memory is
  CHECK(tasks <= model.num_blocks);                                              // one wave
  CHECK(scheduler.num_sequence_first() == 4);  // the merge, of a row each
  const auto& first = scheduler.tasks().front();
  CHECK(first.position_end - first.position_begin >= model.min_split_tokens);
}

TEST_CASE("tasks stand longest first") {
  test::Random random(22);
  test::RandomPlanOptions options;
  options.num_sequences = 30;
  options.share = test::Share::none;
  options.max_length = 3000;
  const test::RandomPlan plan = test::make_random_plan(random, options);
  Scheduler scheduler;
  scheduler.build(plan.view(), {8, 8, 128}, CostModel{}, plenty);
  int last = 1 << 30;
  for (int t = scheduler.num_chunk_first(); t < static_cast<int>(scheduler.tasks().size()); ++t) {
    const Task& task = scheduler.tasks()[static_cast<std::size_t>(t)];
    if (task.segment < 0) continue;
    const int length = plan.row_kv_len[static_cast<std::size_t>(task.row_begin)];
    CHECK(length <= last);
    last = length;
  }
}

TEST_CASE("chunk-first tasks stand longest first, whatever comes first in the tree") {
  const test::RandomPlan plan = test::make_level_plan({1, 8, 96}, {300, 2000, 20});
  CostModel model;
  model.min_split_tokens = 4000;  // nothing is cut
  Scheduler scheduler;
  scheduler.build(plan.view(), {8, 8, 128}, model, plenty);
  REQUIRE(num_shared(scheduler) == 9);
  std::vector<int> lengths;
  for (int t = 0; t < scheduler.num_chunk_first(); ++t) {
    const Task& task = scheduler.tasks()[static_cast<std::size_t>(t)];
    lengths.push_back(plan.segments[static_cast<std::size_t>(task.segment)].length);
  }
  CHECK(lengths.front() == 2000);
  CHECK(std::is_sorted(lengths.rbegin(), lengths.rend()));
}

TEST_CASE("a schedule that cannot fit is refused by name") {
  const test::RandomPlan plan = test::make_two_level_plan(32, 2048, 64);
  Scheduler scheduler;
  CHECK_THROWS_WITH_AS(scheduler.build(plan.view(), {32, 32, 128}, CostModel{}, {4, 4, 4}),
                       doctest::Contains("at most 4 tasks"), chunkattn::InvalidArgument);
}

TEST_CASE("rows of a segment that are not side by side are refused by name") {
  test::RandomPlan plan = test::make_two_level_plan(3, 64, 64);
  plan.row_segment[2] = plan.row_segment[0];
  Scheduler scheduler;
  CHECK_THROWS_WITH_AS(scheduler.build(plan.view(), {32, 8, 128}, CostModel{}, plenty),
                       doctest::Contains("plan.row_segment = 2: expected the rows of a segment"),
                       chunkattn::InvalidArgument);
}

TEST_CASE("cuts are as many as each limit leaves room for") {
  const test::RandomPlan plan = test::make_two_level_plan(1, 0, 32768);
  Scheduler scheduler;
  for (const int most : {3, 8}) {
    CAPTURE(most);
    ScheduleCapacity few = plenty;
    few.merges = static_cast<std::size_t>(most);
    scheduler.build(plan.view(), {32, 8, 128}, CostModel{}, few);
    CHECK(scheduler.num_chunk_first() == most);
    CHECK(scheduler.merges().size() == few.merges);
    // Four tasks merge, of a row each.
    few = plenty;
    few.tasks = static_cast<std::size_t>(most) + 4;
    scheduler.build(plan.view(), {32, 8, 128}, CostModel{}, few);
    CHECK(scheduler.num_chunk_first() == most);
    CHECK(scheduler.num_sequence_first() == 4);
  }
  CostModel model;
  model.min_split_tokens = 10000;
  scheduler.build(plan.view(), {32, 8, 128}, model, plenty);
  CHECK(scheduler.num_chunk_first() == 3);
  // Each tile of a piece is a task.
  const test::RandomPlan tall = test::make_two_level_plan(100, 8192, 64);
  scheduler.build(tall.view(), {32, 8, 128}, CostModel{}, plenty);
  const std::size_t free = scheduler.tasks().size();
  REQUIRE(free > 120);
  for (const std::size_t most : {free - 1, free - 5, std::size_t{110}, std::size_t{100}}) {
    CAPTURE(most);
    ScheduleCapacity few = plenty;
    few.tasks = most;
    scheduler.build(tall.view(), {32, 8, 128}, CostModel{}, few);
    CHECK(scheduler.tasks().size() <= most);
  }
}

TEST_CASE("pieces of a window have as many visible tokens each, and the last one is open") {
  const test::RandomPlan plan = test::make_two_level_plan(1, 0, 32768);
  Scheduler scheduler;
  for (const chunkattn::KeyRange hidden : {chunkattn::KeyRange{0, 24000}, {640, 24000}}) {
    CAPTURE(hidden.begin);
    scheduler.build(plan.view(), {32, 8, 128}, CostModel{}, plenty, &hidden);
    REQUIRE(scheduler.num_chunk_first() > 2);
    CHECK(scheduler.tasks().front().position_begin == (hidden.begin == 0 ? hidden.end : 0));
    int tokens = 0;
    for (int t = 0; t < scheduler.num_chunk_first() - 1; ++t) {
      const Task& task = scheduler.tasks()[static_cast<std::size_t>(t)];
      const int left_out = std::max(
          0, std::min(task.position_end, hidden.end) - std::max(task.position_begin, hidden.begin));
      const int seen = task.position_end - task.position_begin - left_out;
      if (t == 0) tokens = seen;
      CHECK(seen == tokens);
    }
    const Task& last = scheduler.tasks()[static_cast<std::size_t>(scheduler.num_chunk_first() - 1)];
    CHECK(last.position_end == open_end);
    CHECK(32768 - last.position_begin <= tokens);
  }
  // None begins with what is hidden, wherever that is.
  for (int begin = 64; begin <= 2048; begin += 64) {
    CAPTURE(begin);
    const chunkattn::KeyRange hidden{begin, 24000};
    scheduler.build(plan.view(), {32, 8, 128}, CostModel{}, plenty, &hidden);
    for (const Task& task : scheduler.tasks())
      CHECK((task.position_begin < hidden.begin || task.position_begin >= hidden.end));
  }
  // What is hidden begins before the sequences' own runs.
  const test::RandomPlan branches = test::make_two_level_plan(2, 1000, 32768);
  const chunkattn::KeyRange hidden[] = {{640, 24000}, {640, 24000}};
  scheduler.build(branches.view(), {32, 8, 128}, CostModel{}, plenty, hidden);
  for (const Task& task : scheduler.tasks())
    if (task.segment > 0) CHECK(task.position_begin >= 24000);
}

TEST_CASE("locate finds every place of every path") {
  test::Random random(23);
  const test::RandomPlan plan = test::make_random_plan(random, {});
  const PlanView view = plan.view();
  for (int row = 0; row < view.num_rows; ++row)
    for (int s = view.row_segment[row]; s >= 0; s = view.segments[s].parent)
      for (int p = 0; p < view.segments[s].num_pieces; ++p) {
        const auto& piece = view.pieces[view.segments[s].piece_begin + p];
        for (int i = 0; i < piece.length; ++i) {
          const auto place =
              locate(view.segments, view.pieces, view.row_segment[row], piece.position + i);
          CHECK(place.chunk == piece.chunk);
          CHECK(place.offset == piece.begin + i);
        }
      }
  CHECK(locate(view.segments, view.pieces, view.row_segment[0], 1 << 20).chunk ==
        chunkattn::no_chunk);
}

TEST_CASE("one ldmatrix phase touches every bank once") {
  for (const int head_dim : {16, 64, 80, 96, 112, 128, 256})
    for (int first = 0; first < 64; first += 8)
      for (int chunk_size = 0; chunk_size < head_dim / 8; ++chunk_size) {
        std::set<int> groups;  // of four banks
        for (int row = first; row < first + 8; ++row) {
          const int place = swizzle(head_dim, row, chunk_size);
          CHECK(place >= 0);
          CHECK(place < head_dim / 8);
          groups.insert((row * (head_dim / 8) + place) % 8);
        }
        CHECK(groups.size() == 8);
      }
}

TEST_CASE("four rows of an accumulator are stored into different banks") {
  for (const int columns : {16, 64, 80, 96, 112, 128, 256})
    for (int row = 0; row < 16; ++row) {
      std::set<int> places;
      for (int column = 0; column < columns; ++column) {
        const int place = accumulator_column(columns, row, column);
        CHECK(place / 4 * 4 + column % 4 == place);  // groups of four stay together
        places.insert(place);
      }
      CHECK(places.size() == static_cast<std::size_t>(columns));  // and none is lost
      CHECK(*places.rbegin() == columns - 1);
      std::set<int> banks;
      for (int r = row / 4 * 4; r < row / 4 * 4 + 4; ++r)
        banks.insert((r * columns + accumulator_column(columns, r, 0)) % 32 / 8);
      CHECK(banks.size() == 4);
    }
}

TEST_CASE("groups of threads that share merges fit a block, and the rows that no query stands in") {
  for (const int value_dim : {16, 64, 96, 128, 256})
    for (int rows = 1; rows <= usual_tile_rows; ++rows)
      for (int merges = 0; merges <= 200; ++merges) {
        const int groups = 1 << merge_group_bits(rows, value_dim, merges);
        const int in_a_row = merges_in_a_row(rows, value_dim, merges);
        const int rounds = (rows * value_dim / 4 + block_threads - 1) / block_threads;
        CHECK(in_a_row <= rounds * merges);
        if (groups == 1) {
          CHECK(in_a_row == rounds * merges);
          continue;
        }
        CHECK(merges > merges_at_once * groups / 2);  // for fewer, half of the groups would do
        CHECK(groups * rows * value_dim / 4 <= block_threads);
        CHECK(in_a_row == (merges + groups - 1) / groups + 1);
        // Two warps at least have rows of their own, which stand beside one another.
        const int kv_warps = value_dim >= 64 ? 2 : block_warps;
        CHECK((2 + (groups - 1) / kv_warps) * rows <= 16);
      }
  CHECK(merge_group_bits(1, 128, 4) == 0);  // read at a time by one thread
  CHECK(merge_group_bits(1, 128, 5) == 1);
  CHECK(merge_group_bits(1, 128, 20) == 2);  // of 32 threads
  CHECK(merge_group_bits(2, 128, 20) == 1);
  CHECK(merge_group_bits(4, 128, 20) == 0);
}

TEST_CASE("stages fit the device and keep enough bytes in flight") {
  struct Machine {
    const char* name;
    int per_block, per_sm;
  };
  for (const Machine& m : {Machine{"sm_80", 166912, 167936}, Machine{"sm_86", 101376, 102400},
                           Machine{"sm_90", 232448, 233472}})
    for (const HeadDims dims : {HeadDims{64}, HeadDims{96}, HeadDims{128}, HeadDims{192, 128},
                                HeadDims{256}, HeadDims{256, 64}}) {
      const Occupancy chosen =
          choose_occupancy(dims, 1000, m.per_block, m.per_sm, wanted_blocks(dims));
      INFO(m.name, " head_dim ", dims.k, " value_dim ", dims.v);
      REQUIRE(chosen.num_stages >= min_stages);
      const int bytes = shared_bytes(dims, chosen.num_stages, chosen.tile_rows);
      CHECK(bytes <= m.per_block);
      CHECK(chosen.blocks_per_sm * (bytes + 1024) <= m.per_sm);
      CHECK(chosen.bytes_in_flight >= (m.per_sm > 110000 ? 48 : 24) * 1024);
    }
  CHECK(choose_occupancy(128, 1000, 232448, 233472, 2).num_stages == 2);
  CHECK(choose_occupancy(128, 1000, 232448, 233472, 2).blocks_per_sm == 2);
}

TEST_CASE("queries of large tiles take no block, and no bytes in flight that are needed") {
  struct Case {
    HeadDims dims;
    int stages, blocks, tile_rows;
  };
  const auto check = [](int per_block, int per_sm, std::initializer_list<Case> cases,
                        int rows = 65) {
    for (const Case& c : cases) {
      CAPTURE(per_sm);
      CAPTURE(c.dims.k);
      CAPTURE(c.dims.v);
      const Occupancy chosen =
          choose_occupancy(c.dims, rows, per_block, per_sm, wanted_blocks(c.dims));
      CHECK(chosen.num_stages == c.stages);
      CHECK(chosen.blocks_per_sm == c.blocks);
      CHECK(chosen.tile_rows == c.tile_rows);
    }
  };
  check(166912, 167936,  // sm_80
        {{64, 3, 2, 128}, {96, 2, 2, 128}, {112, 2, 2, 64}, {128, 3, 1, 128}, {256, 3, 1, 64}});
  check(101376, 102400,  // sm_86
        {{64, 4, 1, 128}, {96, 3, 1, 64}, {112, 2, 1, 64}, {128, 2, 1, 64}, {256, 2, 1, 64}});
  check(232448, 233472,  // sm_90
        {{64, 4, 2, 128}, {96, 3, 2, 128}, {112, 3, 2, 64}, {128, 2, 2, 128}, {256, 3, 1, 64}});
  // Kernels that have none.
  check(232448, 233472, {{{64, 128}, 4, 2, 64}, {{128, 128, 1}, 3, 2, 64}});
  // Plans that have no use for them.
  check(232448, 233472, {{64, 4, 2, 64}, {128, 2, 2, 64}}, 64);
}

TEST_CASE("where plans have few lines, their queries leave room for more stages") {
  constexpr int per_block = 232448, per_sm = 233472;  // sm_90
  const auto stages = [](HeadDims dims, int rows) {
    const Occupancy chosen = choose_occupancy(dims, rows, per_block, per_sm, wanted_blocks(dims));
    CHECK(chosen.blocks_per_sm == wanted_blocks(dims));
    CHECK(chosen.tile_rows >= std::min(rows, usual_tile_rows));
    return chosen.num_stages;
  };
  CHECK(stages(128, 1) == 3);
  CHECK(stages(128, 32) == 3);
  CHECK(stages(128, 33) == 2);
  CHECK(stages(128, 1000) == 2);
  CHECK(stages(96, 32) == 4);
  CHECK(stages(96, 33) == 3);
  CHECK(stages(256, 16) == 3);  // no fourth one
  for (const int rows : {1, 16, 17, 32, 33, 64})
    CHECK(choose_occupancy(64, rows, per_block, per_sm, 2).tile_rows == tile_rows_for(rows));
}

TEST_CASE("a shared run is in large tiles where every block has one of 256 tokens") {
  CostModel model;
  model.most_tile_rows = max_tile_rows;
  Scheduler scheduler;
  // Heights of tiles of the shared run, and how many there are of each.
  const auto heights = [&](int sequences, int shared, const Geometry& geometry) {
    const test::RandomPlan plan = test::make_two_level_plan(sequences, shared, 64);
    scheduler.build(plan.view(), geometry, model, plenty);
    check_exact_cover(plan, geometry, scheduler);
    std::map<int, int> found;
    for (const Task& task : pieces_of(scheduler, 0)) ++found[task.tile_rows];
    return found;
  };
  const auto only = [](const std::map<int, int>& found, int rows) {
    return found.size() == 1 && found.begin()->first == rows;
  };
  const Geometry geometry{32, 8, 128};
  // 256 lines, 2 tiles, 8 heads: 17 pieces for 264 blocks.
  CHECK(only(heights(64, 17 * 256, geometry), 128));
  CHECK(only(heights(64, 16 * 256 + 1, geometry), 128));
  CHECK(only(heights(64, 16 * 256, geometry), 64));
  model.num_blocks = 256;
  CHECK(only(heights(64, 16 * 256, geometry), 128));
  // 65 to 128 lines are one tile; others' last tiles have the height that holds them.
  CHECK(only(heights(17, 32 * 256, geometry), 128));
  CHECK(only(heights(32, 32 * 256, geometry), 128));
  CHECK(only(heights(32, 31 * 256, geometry), 64));
  const std::map<int, int> two = heights(36, 32 * 256, geometry);  // 144 lines
  REQUIRE(two.size() == 2);
  CHECK(two.at(128) == two.at(16));
  // Up to 64 lines fill a tile of 64.
  CHECK(only(heights(16, 64 * 256, geometry), 64));
  CHECK(has_large_tiles(scheduler) == false);
  model.most_tile_rows = usual_tile_rows;  // where the device or the kernel has none
  CHECK(only(heights(64, 32 * 256, geometry), 64));
}

TEST_CASE("a prefill that fills the device is whole, in large tiles, longest first") {
  CostModel model;
  model.most_tile_rows = max_tile_rows;
  Scheduler scheduler;
  const Geometry geometry{32, 8, 128};
  const auto build = [&](int sequences, int cached, int rows, std::size_t partials = 1u << 28) {
    const test::RandomPlan plan = test::make_level_plan({sequences}, {cached + rows}, rows);
    scheduler.build(plan.view(), geometry, model, {plenty.tasks, plenty.merges, partials});
    check_exact_cover(plan, geometry, scheduler);
    return plan;
  };
  const auto count = [&](int rows) {
    return std::count_if(scheduler.tasks().begin(), scheduler.tasks().end(),
                         [&](const Task& task) { return task.tile_rows == rows; });
  };
  for (const int cached : {0, 4096})
    for (const int sequences : {1, 3}) {
      const test::RandomPlan plan = build(sequences, cached, 4100);
      CHECK(has_large_tiles(scheduler));
      CHECK(scheduler.num_chunk_first() == 0);
      CHECK(scheduler.merges().empty());
      CHECK(count(128) == sequences * 128);
      CHECK(count(16) == sequences);  // 16 lines more
      int last = cached + 4100;
      for (const Task& task : scheduler.tasks()) {
        if (task.tile_rows == 16) continue;
        const int row = (task.row_begin + task.row_count - 1) / 4;
        const int seen = plan.row_kv_len[static_cast<std::size_t>(row)];
        CHECK(seen <= last);
        last = seen;
      }
    }
  // Too few for each block to have one: cut, where there is room for that, and each piece is read
  // once for 128 lines; else as many of 64 as there are blocks, nearly.
  build(1, 4096, 512);
  CHECK(scheduler.num_chunk_first() > 0);
  CHECK(count(128) == scheduler.num_chunk_first());
  build(1, 4096, 512, 0);
  CHECK(count(64) == 32);
  CHECK(scheduler.num_sequence_first() == 32);
  CHECK_FALSE(has_large_tiles(scheduler));
  // None for 64 lines, and where the kernel has none.
  model.num_blocks = 1;
  build(1, 4096, 16);
  CHECK_FALSE(has_large_tiles(scheduler));
  build(1, 4096, 17);
  CHECK(count(128) == 1);
  model.most_tile_rows = usual_tile_rows;
  build(1, 0, 4100);
  CHECK_FALSE(has_large_tiles(scheduler));
}

TEST_CASE("a prefill behind what others share merges that, in tiles that can") {
  CostModel model;
  model.most_tile_rows = max_tile_rows;
  model.num_blocks = 8;
  // 60 sequences that decode, one that goes on with 100 tokens, and beside them a new one of 2,000.
  test::RandomPlan plan = test::make_two_level_plan(61, 8192, 200);
  const auto add_rows = [&](int segment, int count, int first_len) {
    for (int i = 0; i < count; ++i) {
      plan.row_segment.push_back(segment);
      plan.row_token.push_back(plan.num_rows());
      plan.row_kv_len.push_back(first_len + i);
    }
  };
  plan.row_kv_len.back() = 8293;
  add_rows(61, 99, 8294);
  plan.segments.front().row_end = plan.segments.back().row_end = 160;
  add_rows(62, 2000, 1);
  plan.segments.push_back({160, 2160, 0, 0, 0, 2000, -1, 1});
  const Geometry geometry{32, 8, 128};
  Scheduler scheduler;
  scheduler.build(plan.view(), geometry, model, plenty);
  check_exact_cover(plan, geometry, scheduler);
  REQUIRE(num_shared(scheduler) == 1);
  CHECK(scheduler.num_chunk_first() > 0);
  int whole = 0, behind = 0;
  for (const Task& task : scheduler.tasks()) {
    if (task.merge_count == 0) whole += task.tile_rows == 128 && task.segment == 62;
    if (task.merge_count > 0 && task.row_begin >= 240) {
      CHECK(task.tile_rows == (task.row_count > 16 ? 64 : 16));
      behind += task.row_count;
    }
  }
  CHECK(whole == 62);  // 8,000 lines, and 64 more
  CHECK(behind == 400);
}

TEST_CASE("where partial results are scarce, cuts are fewer, not gone") {
  const test::RandomPlan plan = test::make_two_level_plan(32, 4096, 64);
  int before = 1;
  for (int room = 1; room <= 8; ++room) {
    ScheduleCapacity few = plenty;
    few.partials = static_cast<std::size_t>(room) * 32 * 32;
    Scheduler scheduler;
    scheduler.build(plan.view(), {32, 32, 128}, CostModel{}, few);
    CAPTURE(room);
    CHECK(num_shared(scheduler) == 1);
    CHECK(scheduler.num_chunk_first() <= room);
    CHECK(scheduler.num_chunk_first() >= before);
    before = scheduler.num_chunk_first();
  }
  CHECK(before >= 5);
}

TEST_CASE("pieces of a run are as long, whole KV tiles, and make one wave") {
  Scheduler scheduler;
  const CostModel model;
  for (const int shared : {1000, 4096, 40000}) {
    const test::RandomPlan plan = test::make_two_level_plan(64, shared, 64);
    scheduler.build(plan.view(), {32, 8, 128}, model, plenty);  // 256 lines: it computes
    const std::vector<Task> pieces = pieces_of(scheduler, 0);
    const int tokens = pieces.front().position_end - pieces.front().position_begin;
    CAPTURE(shared);
    CHECK(tokens % kv_tile_tokens(128) == 0);
    CHECK(static_cast<int>(pieces.size()) == 4 * ((shared + tokens - 1) / tokens));
    CHECK(static_cast<int>(pieces.size()) * 8 <= model.num_blocks);
    CHECK(static_cast<int>(pieces.size()) * 8 > model.num_blocks / 3);
    for (const Task& task : pieces)
      CHECK((task.position_end == open_end || task.position_end - task.position_begin == tokens));
  }
}

TEST_CASE("long sequences are streamed beside a prefix that computes") {
  Scheduler scheduler;
  const auto merging_only = [&](int sequences, int shared, int own, int kv_heads) {
    const test::RandomPlan plan = test::make_two_level_plan(sequences, shared, own);
    scheduler.build(plan.view(), {32, kv_heads, 128}, CostModel{}, plenty);
    check_exact_cover(plan, {32, kv_heads, 128}, scheduler);
    const auto& tasks = scheduler.tasks();
    return std::all_of(tasks.begin() + scheduler.num_chunk_first(), tasks.end(),
                       [](const Task& task) { return task.segment < 0; });
  };
  CHECK(merging_only(256, 4096, 512, 8));
  CHECK(scheduler.num_chunk_first() == 16 + 256);
  CHECK_FALSE(merging_only(256, 4096, 16, 8));   // short ones
  CHECK_FALSE(merging_only(32, 4096, 512, 32));  // the prefix reads
}

TEST_CASE("rows that only merge are spread over the blocks") {
  constexpr Geometry mha{32, 32, 128}, gqa{32, 8, 128};
  for (const Geometry& geometry : {mha, gqa}) {
    const test::RandomPlan plan = test::make_two_level_plan(32, 4096, 0);
    Scheduler scheduler;
    scheduler.build(plan.view(), geometry, CostModel{}, plenty);
    REQUIRE(scheduler.num_chunk_first() > 1);
    const int group = geometry.group();
    CHECK(scheduler.num_sequence_first() == 32 * group / merge_rows(128));
  }
  // One sequence's rows are so few that each has a task, in which all threads share its merges,
  const test::RandomPlan plan = test::make_two_level_plan(1, 0, 4096);
  Scheduler scheduler;
  scheduler.build(plan.view(), gqa, CostModel{}, plenty);
  REQUIRE(scheduler.num_chunk_first() > 4);
  CHECK(scheduler.num_sequence_first() == gqa.group());
  // as far as there is room for them,
  ScheduleCapacity few = plenty;
  const std::size_t most = scheduler.tasks().size();
  for (few.tasks = 1; few.tasks < most; ++few.tasks) {
    scheduler.build(plan.view(), gqa, CostModel{}, few);
    CHECK(scheduler.tasks().size() <= few.tasks);
    CHECK(scheduler.tasks().size() + 3 * gqa.group() > few.tasks);
  }
  // but not where few partial results leave nothing to share.
  few.tasks = plenty.tasks;
  few.partials = 4 * static_cast<std::size_t>(gqa.num_qo_heads);
  scheduler.build(plan.view(), gqa, CostModel{}, few);
  CHECK(scheduler.num_chunk_first() == 4);
  CHECK(scheduler.num_sequence_first() == gqa.group());
  CHECK(merge_rows(128) == 4);  // 128 threads, four columns each
  CHECK(merge_rows(256) == 2);
  CHECK(merge_rows(16) == 16);  // the smallest tile
}
