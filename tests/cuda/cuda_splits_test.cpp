// Where runs are cut along KV: a launch, played by as many blocks as the device holds, ends when
// its work does.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <queue>
#include <utility>
#include <vector>

#include "chunkattn/detail/cuda/scheduler.hpp"
#include "support/level_plan.hpp"
#include "support/random.hpp"
#include "support/schedule_cases.hpp"

namespace {

using chunkattn::detail::cuda::CostModel;
using chunkattn::detail::cuda::Geometry;
using namespace chunkattn::detail::cuda;

constexpr ScheduleCapacity plenty{std::size_t{1} << 20, std::size_t{1} << 20, std::size_t{1} << 28};

// A task for one KV head, by the cost model.
struct Length {
  std::int64_t ps = 0;      // until it needs partial results
  std::int64_t rest = 0;    // with them
  std::int64_t needed = 0;  // the longest task whose partial results it merges; 0: it merges none
  [[nodiscard]] std::int64_t all() const { return ps + rest; }
};

struct Played {
  std::int64_t chunk_first_items = 0;
  std::int64_t makespan = 0;
  std::int64_t busy = 0;   // all blocks busy all the time, or the longest chain
  std::int64_t bound = 0;  // no order of these tasks ends sooner
  bool in_rounds = true;   // one kind after the other; else the bound is `busy`
  [[nodiscard]] double to_busy() const {
    return static_cast<double>(makespan) / static_cast<double>(busy);
  }
  [[nodiscard]] double to_bound() const {
    return static_cast<double>(makespan) / static_cast<double>(bound);
  }
};

class Launch {
 public:
  // Tasks as the scheduler makes them by `judgement`; what they cost is by CostModel{} always.
  Launch(const test::RandomPlan& plan, const Geometry& geometry, const CostModel& judgement = {},
         const ScheduleCapacity& capacity = plenty)
      : plan_(plan), geometry_(geometry), heads_(static_cast<std::size_t>(geometry.num_kv_heads)) {
    scheduler_.build(plan.view(), geometry, judgement, capacity);
    first_ = static_cast<std::size_t>(scheduler_.num_chunk_first());
    for (const Task& task : tasks()) ++readers_[{task.segment, task.position_begin}];
    measure();
  }

  Played play() const {
    const std::int64_t busy = std::max(even_share(), chain());
    const bool in_rounds = scheduler_.order().ahead == geometry_.num_kv_heads;
    return {static_cast<std::int64_t>(first_ * heads_), makespan(), busy,
            in_rounds ? std::max(busy, rounds()) : busy, in_rounds};
  }

  // Blocks take (task, KV head) pairs in order, each the next one when it is free. Whoever merges
  // waits for the flags of those tasks, of its own head.
  std::int64_t makespan() const {
    std::priority_queue<std::int64_t, std::vector<std::int64_t>, std::greater<>> free;
    for (int b = 0; b < model_.num_blocks; ++b) free.push(0);
    std::vector<std::int64_t> flags(first_ * heads_);
    std::int64_t last = 0;
    const ItemOrder order = scheduler_.order();
    for (std::int32_t ticket = 0; ticket < order.num_pairs(); ++ticket) {
      const auto pair = static_cast<std::size_t>(order.pair(ticket));
      const std::size_t t = pair / heads_, head = pair % heads_;
      std::int64_t ready = 0;
      if (t >= first_)
        each_needed(tasks()[t], [&](std::size_t flag) {
          ready = std::max(ready, flags[flag * heads_ + head] + model_.wait_ps);
        });
      const std::int64_t end = std::max(free.top() + lengths_[t].ps, ready) + lengths_[t].rest;
      free.pop();
      free.push(end);
      last = std::max(last, end);
      if (t < first_) flags[static_cast<std::size_t>(tasks()[t].flag) * heads_ + head] = end;
    }
    return last;
  }

 private:
  const std::vector<Task>& tasks() const { return scheduler_.tasks(); }

  std::int64_t tokens(const Task& task) const {
    if (task.segment < 0) return 0;
    const auto& segment = plan_.segments[static_cast<std::size_t>(task.segment)];
    const int seen = plan_.row_kv_len[static_cast<std::size_t>(task.row_begin / geometry_.group())];
    return std::min({task.position_end, segment.position + segment.length, seen}) -
           task.position_begin;
  }
  // f(flag) for the tasks whose partial results a task merges.
  template <class F>
  void each_needed(const Task& task, F&& f) const {
    for (int m = 0; m < task.merge_count; ++m) {
      const Merge& merge = scheduler_.merges()[static_cast<std::size_t>(task.merge_begin + m)];
      const int first_row = task.row_begin - merge.row_begin;
      const int last_row = first_row + task.row_count - 1;
      for (int tile = first_row / max_tile_rows; tile <= last_row / max_tile_rows; ++tile)
        f(static_cast<std::size_t>(merge.flag + tile));
    }
  }

  // Blocks share the memory. Chunk-first tasks that leave blocks free have more of it while these,
  // when they have streamed their own, wait.
  void measure() {
    const auto blocks = static_cast<std::size_t>(model_.num_blocks);
    const std::size_t items[] = {first_ * heads_, (tasks().size() - first_) * heads_};
    const int dim = geometry_.head_dim;
    std::int64_t longest[2] = {};
    for (std::size_t t = 0; t < tasks().size(); ++t)
      longest[t < first_ ? 0 : 1] =
          std::max(longest[t < first_ ? 0 : 1],
                   model_.stream_ps(tokens(tasks()[t]), tasks()[t].tile_rows, dim));
    const auto kib_ps = [&](std::size_t n) { return model_.kib_ps(static_cast<std::int64_t>(n)); };
    std::int64_t kib[2] = {model_.ps_per_kib, kib_ps(items[1])};
    if (items[0] < blocks) {
      kib[1] = kib_ps(items[0] + items[1]);
      const std::int64_t all = longest[0] + 1;
      const std::int64_t beside = 1024 * std::min(all, longest[1]) / all;
      kib[0] = (beside * kib[1] + (1024 - beside) * kib_ps(items[0])) / 1024;
    }
    measure(kib[0], kib[1]);
    if (scheduler_.order().ahead < geometry_.num_kv_heads) measure_mixed();
  }
  // What one kind of tasks leaves of the memory, the other takes: alone, each ends when the memory
  // has given all, or when blocks are done that have it for themselves. The heads that are ahead
  // have nothing beside them, nor have the last ones.
  void measure_mixed() {
    const std::int64_t before = even_share();
    std::int64_t memory[2] = {}, blocks[2] = {};
    measure(model_.alone_ps_per_kib, model_.alone_ps_per_kib);
    for (std::size_t t = 0; t < tasks().size(); ++t) {
      const Task& task = tasks()[t];
      const int phase = t < first_ ? 0 : 1;
      blocks[phase] += lengths_[t].all();
      memory[phase] += model_.stream_ps(tokens(task), 0, geometry_.head_dim) /
                       readers_.at({task.segment, task.position_begin});
      if (phase == 0) memory[0] += model_.partial_ps(task.row_count, geometry_.head_dim) / 2;
    }
    const std::int64_t apart = std::max(memory[0], blocks[0]) + std::max(memory[1], blocks[1]);
    const std::int64_t mixed = std::max(memory[0] + memory[1], blocks[0] + blocks[1]);
    const std::int64_t gain =
        (apart - mixed) * (geometry_.num_kv_heads - scheduler_.order().ahead) / model_.num_blocks;
    // The memory is as much cheaper.
    std::int64_t low = model_.alone_ps_per_kib, high = model_.ps_per_kib;
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      measure(middle, middle);
      (even_share() < before - gain ? low : high) = middle;
    }
    measure(high, high);
  }
  void measure(std::int64_t chunk_first_kib, std::int64_t sequence_first_kib) {
    const int dim = geometry_.head_dim;
    lengths_.clear();
    std::vector<std::int64_t> of_flag(first_);
    for (std::size_t t = 0; t < tasks().size(); ++t) {
      const Task& task = tasks()[t];
      const int readers = readers_.at({task.segment, task.position_begin});
      Length length;
      const auto share = [&](std::int64_t all) {  // one of its tiles pays for the memory
        return readers == 1 ? all : std::max(all / readers, model_.kib_ps(1));
      };
      if (t < first_) {
        length.ps = model_.chunk_first_ps(tokens(task), task.tile_rows, task.row_count, dim,
                                          share(chunk_first_kib), chunk_first_kib);
        of_flag[static_cast<std::size_t>(task.flag)] = length.ps;
      } else {
        length.ps =
            model_.sequence_first_ps(tokens(task), task.tile_rows, dim, share(sequence_first_kib));
        length.rest = model_.merge_all_ps(task.row_count, dim, task.merge_count);
        each_needed(task, [&](std::size_t flag) {
          length.needed = std::max(length.needed, of_flag[flag]);
        });
      }
      lengths_.push_back(length);
    }
  }

  std::int64_t even_share() const {
    std::int64_t work = 0;
    for (const Length& length : lengths_) work += length.all();
    return work * geometry_.num_kv_heads / model_.num_blocks;
  }
  std::int64_t chain() const {
    std::int64_t longest = 0;
    for (const Length& length : lengths_) {
      longest = std::max(longest, length.all());
      if (length.needed > 0)
        longest = std::max(longest, length.needed + model_.wait_ps + length.rest);
    }
    return longest;
  }
  // Where all heads are ahead: tasks are not divided, blocks take chunk-first ones first, and
  // whoever merges waits. So till some time each block ends no more sequence-first tasks than of
  // the shortest there are.
  std::int64_t rounds() const {
    std::int64_t shortest = std::numeric_limits<std::int64_t>::max(), soonest = shortest;
    for (std::size_t t = first_; t < lengths_.size(); ++t) {
      shortest = std::min(shortest, lengths_[t].all());
      soonest = std::min(soonest, lengths_[t].needed > 0
                                      ? lengths_[t].needed + model_.wait_ps + lengths_[t].rest
                                      : 0);
    }
    std::vector<std::int64_t> begin;  // of each block's first sequence-first task, by one head each
    for (std::size_t t = 0; t < first_; ++t) begin.insert(begin.end(), heads_, lengths_[t].ps);
    const auto blocks = static_cast<std::size_t>(model_.num_blocks);
    const auto items = static_cast<std::int64_t>((lengths_.size() - first_) * heads_);
    const auto ended = [&](std::int64_t at) {
      std::int64_t count = 0;
      if (begin.size() > blocks) {  // each block has done one of the shortest at least
        const std::int64_t left = at - *std::min_element(begin.begin(), begin.end());
        return left < 0 ? 0 : left / shortest * model_.num_blocks;
      }
      for (const std::int64_t from : begin)
        count += std::max<std::int64_t>(at - from, 0) / shortest;
      const std::int64_t one = std::max(shortest, soonest);
      const std::int64_t each = at < one ? 0 : 1 + (at - one) / shortest;
      return count + each * static_cast<std::int64_t>(blocks - begin.size());
    };
    std::int64_t low = 0, high = makespan();  // too soon, and not
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (ended(middle) < items ? low : high) = middle;
    }
    return high;
  }

  const test::RandomPlan& plan_;
  Geometry geometry_;
  std::size_t heads_;
  CostModel model_;
  Scheduler scheduler_;
  std::size_t first_ = 0;                       // sequence-first task
  std::map<std::pair<int, int>, int> readers_;  // tiles of the same range
  std::vector<Length> lengths_;
};

Played play(const test::RandomPlan& plan, const Geometry& geometry) {
  return Launch(plan, geometry).play();
}

using test::gqa, test::mha;

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

TEST_CASE("a shared prefix keeps the memory busy, however long what follows it") {
  const CostModel model;
  for (const int own : {64, 512, 1024}) {
    CAPTURE(own);
    const Played played = play(test::make_two_level_plan(32, 4096, own), mha);
    // More blocks that stream would each be slower,
    CHECK(model.kib_ps(played.chunk_first_items) > model.alone_ps_per_kib);
    CHECK(played.chunk_first_items <= model.num_blocks);  // and no second round for a few
  }
}

TEST_CASE("no order of its tasks ends a launch sooner") {
  // Few rounds of tasks keep not all blocks busy all the time, whatever their order.
  int few_rounds = 0;
  for (const test::ScheduleCase& c : test::two_level_cases()) {
    CAPTURE(c.name);
    const Played played = play(c.plan(), c.geometry);
    CHECK(played.to_bound() <= (played.in_rounds ? 1.03 : 1.05));
    CHECK(played.to_busy() <= 1.06);
    few_rounds += played.to_busy() > 1.05 ? 1 : 0;
  }
  CHECK(few_rounds <= 1);
  few_rounds = 0;
  int uneven = 0;
  for (const test::ScheduleCase& c : test::published_trees()) {
    CAPTURE(c.name);
    const Played played = play(c.plan(), c.geometry);
    CHECK(played.to_bound() <= 1.06);
    CHECK(played.to_busy() <= 1.33);
    uneven += played.to_bound() > 1.05 ? 1 : 0;
    few_rounds += played.to_busy() > 1.05 ? 1 : 0;
  }
  // 17 nodes and 64 sequences: a block has two or three of the former, then several of the latter.
  CHECK(uneven <= 1);
  CHECK(few_rounds <= 9);
}

TEST_CASE("no other cut is better") {
  std::vector<CostModel> others;
  for (const int min_split_tokens : {128, 192, 256, 512, 1024, 2048}) {
    others.emplace_back();
    others.back().min_split_tokens = min_split_tokens;
  }
  for (const std::int64_t task_ps : {0, 3000000, 6000000}) {  // finer, and coarser
    others.emplace_back();
    others.back().task_ps = task_ps;
  }
  others.emplace_back();  // more tasks at a time
  others.back().alone_ps_per_kib = others.back().ps_per_kib;
  others.emplace_back();  // nothing shared or cut
  others.back().wait_ps = std::int64_t{1} << 50;
  std::vector<test::ScheduleCase> cases = test::two_level_cases();
  for (test::ScheduleCase& c : test::published_trees()) cases.push_back(std::move(c));
  for (const test::ScheduleCase& c : cases) {
    CAPTURE(c.name);
    const test::RandomPlan plan = c.plan();
    const std::int64_t end = Launch(plan, c.geometry).makespan();
    for (const CostModel& other : others)
      CHECK(static_cast<double>(end) <=
            1.04 * static_cast<double>(Launch(plan, c.geometry, other).makespan()));
  }
}

TEST_CASE("where partial results are scarce, cuts are fewer, not gone") {
  const test::RandomPlan plan = test::make_two_level_plan(32, 4096, 64);
  // With five of a line blocks have the memory busy, and with eight: with six or seven they share
  // it without one of them being done sooner.
  constexpr int cuts[] = {1, 2, 3, 4, 5, 5, 5, 8, 8};
  std::int64_t before = std::numeric_limits<std::int64_t>::max();
  for (std::size_t i = 0; i < std::size(cuts); ++i) {
    ScheduleCapacity few = plenty;
    few.partials = (i + 1) * 32 * 32;
    Scheduler scheduler;
    scheduler.build(plan.view(), mha, CostModel{}, few);
    CAPTURE(i);
    CHECK(scheduler.summary().num_shared == 1);
    CHECK(scheduler.num_chunk_first() == cuts[i]);
    const std::int64_t end = Launch(plan, mha, {}, few).makespan();
    CHECK(end <= before);
    before = end;
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
    CHECK(scheduler.tasks().size() + 2 * gqa.group() > few.tasks);
  }
  // but not where few partial results leave nothing to share.
  few.tasks = plenty.tasks;
  few.partials = 4 * static_cast<std::size_t>(gqa.num_qo_heads);
  scheduler.build(plan.view(), gqa, CostModel{}, few);
  CHECK(scheduler.num_chunk_first() == 4);
  CHECK(scheduler.num_sequence_first() == 1);
  CHECK(merge_rows(128) == 4);  // 128 threads, four columns each
  CHECK(merge_rows(256) == 2);
  CHECK(merge_rows(16) == 16);  // the smallest tile
}
