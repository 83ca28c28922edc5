// How the CPU backend cuts a step into tasks, for machines that are not at hand: the task lists are
// played on up to 64 threads by the cost model.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <string>
#include <thread>
#include <vector>

#include "chunkattn/detail/cpu/schedule.hpp"
#include "chunkattn/detail/cpu/task_queue.hpp"
#include "support/random.hpp"
#include "support/random_plan.hpp"

namespace {

using chunkattn::KeyRange;
using Segment = chunkattn::PlanView::Segment;
using chunkattn::detail::cpu::CostModel;
using chunkattn::detail::cpu::JobSize;
using chunkattn::detail::cpu::RowBlock;
using chunkattn::detail::cpu::Schedule;
using chunkattn::detail::cpu::ScheduleOptions;
using chunkattn::detail::cpu::Split;
using chunkattn::detail::cpu::Task;
using chunkattn::detail::cpu::TaskQueue;
using chunkattn::detail::cpu::WorkItem;

constexpr int tile_lines = 32, min_product_lines = 9, max_lines = 256, min_tasks = 64;

CostModel fp16_cost() {
  CostModel cost;
  cost.bytes_per_token = 2.0 * 128 * 2;
  cost.flops_per_token_line = 4.0 * 128;
  return cost;
}

// A tree of equal levels: nodes[l] segments of tokens[l] tokens, one row per leaf.
test::RandomPlan levels(const std::vector<int>& nodes, const std::vector<int>& tokens) {
  test::RandomPlan plan;
  plan.chunk_size = 64;
  const int rows = nodes.back();
  // Depth first: a segment is added where its first row is.
  std::vector<int> last(nodes.size(), -1), segment(nodes.size(), -1);
  for (int row = 0; row < rows; ++row) {
    int position = 0;
    for (std::size_t l = 0; l < nodes.size(); ++l) {
      const int node = static_cast<int>(std::int64_t{row} * nodes[l] / rows);
      if (node != last[l]) {
        const int end = static_cast<int>((std::int64_t{node + 1} * rows + nodes[l] - 1) / nodes[l]);
        plan.segments.push_back({row, end, static_cast<int>(plan.pieces.size()), 0, position,
                                 tokens[l], l == 0 ? -1 : segment[l - 1], end - row});
        last[l] = node;
        segment[l] = static_cast<int>(plan.segments.size()) - 1;
      }
      position += tokens[l];
    }
    plan.row_segment.push_back(segment.back());
    plan.row_kv_len.push_back(position);
    plan.row_token.push_back(row);
  }
  plan.writes.assign(plan.row_token.size(), {chunkattn::no_chunk, 0});
  return plan;
}

// As ChunkAttention queues the row blocks, but for the limit on heads of a task's state.
TaskQueue queue_of(const Schedule& schedule, int num_kv_heads, int threads) {
  TaskQueue queue;
  queue.reset(static_cast<int>(schedule.row_blocks().size()), num_kv_heads, threads, [&](int b) {
    const RowBlock& block = schedule.row_blocks()[static_cast<std::size_t>(b)];
    return JobSize{block.cost, block.split_count, block.has_products ? 1 : num_kv_heads};
  });
  return queue;
}

// Seconds-free: how much of `threads` is busy when each takes the next task as it becomes free.
double busy_fraction(const Schedule& schedule, int num_kv_heads, int threads) {
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
  for (int t = 0; t < threads; ++t) free_at.push(0);
  double total = 0, end = 0;
  const TaskQueue queue = queue_of(schedule, num_kv_heads, threads);
  std::atomic<int> next{0};
  for (Task task; queue.take(next, task);) {
    const int first = schedule.row_blocks()[static_cast<std::size_t>(task.job)].split_begin;
    double cost = 0;
    for (int u = task.part_begin; u < task.part_end; ++u)
      cost += schedule.splits()[static_cast<std::size_t>(first + u)].cost;
    cost *= task.head_end - task.head_begin;
    const double until = free_at.top() + cost;
    free_at.pop();
    free_at.push(until);
    total += cost;
    end = std::max(end, until);
  }
  return total / (end * threads);
}

ScheduleOptions options_for(int num_kv_heads, int group) {
  return {.num_kv_heads = num_kv_heads,
          .group = group,
          .max_lines = max_lines,
          .min_product_lines = min_product_lines,
          .tile_lines = tile_lines,
          .min_tasks = min_tasks,
          .cost = fp16_cost()};
}

Schedule derive(const test::RandomPlan& plan, const ScheduleOptions& options) {
  Schedule schedule;
  schedule.derive(plan.view(), options);
  return schedule;
}
Schedule derive(const test::RandomPlan& plan, int num_kv_heads, int group) {
  return derive(plan, options_for(num_kv_heads, group));
}

// Sequences that share nothing, each with `rows` query tokens at its end.
test::RandomPlan unshared(int sequences, int tokens, int rows) {
  test::RandomPlan plan = levels({sequences}, {tokens});
  plan.row_segment.clear();
  plan.row_kv_len.clear();
  plan.row_token.clear();
  for (int s = 0; s < sequences; ++s) {
    auto& segment = plan.segments[static_cast<std::size_t>(s)];
    segment.row_begin = s * rows;
    segment.row_end = (s + 1) * rows;
    for (int row = 0; row < rows; ++row) {
      plan.row_segment.push_back(s);
      plan.row_kv_len.push_back(tokens - rows + row + 1);
      plan.row_token.push_back(s * rows + row);
    }
  }
  plan.writes.assign(plan.row_token.size(), {chunkattn::no_chunk, 0});
  return plan;
}

// Whether some row of the item's segment sees a token of the item's last block.
bool reads_what_is_seen(const chunkattn::PlanView& view, const WorkItem& item) {
  const Segment& segment = view.segments[item.segment];
  const std::int32_t* const lengths = view.row_kv_len;
  return (segment.position + item.token_end - 1) / 64 * 64 <
         *std::max_element(lengths + segment.row_begin, lengths + segment.row_end);
}

std::int64_t tokens_read(const Schedule& schedule) {
  std::int64_t total = 0;
  for (const WorkItem& item : schedule.items()) total += item.token_end - item.token_begin;
  return total;
}

}  // namespace

TEST_CASE("every row sees each of its positions once, products before streams") {
  test::Random random;
  for (int round = 0; round < 200; ++round) {
    test::RandomPlanOptions options;
    options.num_sequences = random.uniform(1, 80);
    options.max_length = random.uniform(1, 3000);
    options.max_queries = random.uniform(1, 3);
    test::RandomPlan plan = test::make_random_plan(random, options);
    for (std::int32_t& kv_len : plan.row_kv_len)  // less than the segments above, too
      if (random.chance(0.2)) kv_len = random.uniform(1, kv_len);
    const int heads = random.pick({1, 2, 8, 32});
    const int group = random.pick({1, 4, 8, 40});
    const int dim = random.pick({16, 128, 1024});  // of large rows a split has few tokens
    CAPTURE(heads);
    CAPTURE(group);
    CAPTURE(dim);
    ScheduleOptions wanted = options_for(heads, group);
    wanted.min_tasks = random.pick({1, 64, 1000});
    wanted.invariant = random.chance(0.3);
    wanted.cost.bytes_per_token = 4.0 * dim;
    wanted.cost.flops_per_token_line = 4.0 * dim;
    const Schedule schedule = derive(plan, wanted);
    const auto view = plan.view();
    int splits = 0;
    for (const RowBlock& block : schedule.row_blocks()) {
      CHECK(block.split_begin == splits);
      CHECK(block.split_count >= 1);
      splits += block.split_count;
      for (int u = block.split_begin; u < splits && block.split_count > 1; ++u) {
        const Split& split = schedule.splits()[static_cast<std::size_t>(u)];
        CHECK(split.item_begin < split.item_end);  // an empty one would have rows of its own
        CHECK(split.row_begin >= block.row_begin);
        CHECK(split.row_end <= block.row_end);
      }
    }
    CHECK(splits == static_cast<int>(schedule.splits().size()));
    std::vector<std::vector<int>> seen(static_cast<std::size_t>(view.num_rows));
    for (int row = 0; row < view.num_rows; ++row)
      seen[static_cast<std::size_t>(row)].assign(
          static_cast<std::size_t>(std::max(0, view.row_kv_len[row])), 0);
    for (const Split& split : schedule.splits()) {
      for (int i = split.item_begin; i < split.item_end; ++i) {
        const WorkItem& item = schedule.items()[static_cast<std::size_t>(i)];
        CHECK((i < split.stream_begin) ==
              ((item.row_end - item.row_begin) * group >= min_product_lines));
        CHECK(item.row_begin >= split.row_begin);
        CHECK(item.row_end <= split.row_end);
        const Segment& segment = view.segments[item.segment];
        CHECK(reads_what_is_seen(view, item));
        for (int row = item.row_begin; row < item.row_end; ++row)
          for (int t = item.token_begin; t < item.token_end; ++t)
            if (segment.position + t < view.row_kv_len[row])
              ++seen[static_cast<std::size_t>(row)][static_cast<std::size_t>(segment.position + t)];
      }
    }
    for (const auto& row : seen)
      CHECK(std::all_of(row.begin(), row.end(), [](int times) { return times == 1; }));
  }
}

TEST_CASE("what is hidden from all rows of an item is not read, what one of them sees is") {
  test::Random random;
  for (int round = 0; round < 200; ++round) {
    test::RandomPlanOptions random_options;
    random_options.num_sequences = random.uniform(1, 40);
    random_options.max_length = random.uniform(1, 600);
    random_options.max_queries = random.uniform(1, 3);
    test::RandomPlan plan = test::make_random_plan(random, random_options);
    for (std::int32_t& kv_len : plan.row_kv_len)  // less than the segments above, too
      if (random.chance(0.2)) kv_len = random.uniform(1, kv_len);
    const auto view = plan.view();
    // Ranges that begin and end elsewhere for each row, as no variant of ours has them.
    std::vector<KeyRange> hidden(static_cast<std::size_t>(view.num_rows));
    for (int row = 0; row < view.num_rows; ++row) {
      KeyRange& range = hidden[static_cast<std::size_t>(row)];
      const int length = std::max(0, view.row_kv_len[row]);
      range.begin = random.uniform(0, length);
      range.end = random.uniform(0, length);
      if (round % 2 == 1) {  // around whole blocks
        range.begin = std::clamp(range.begin / 64 * 64 + round / 2 % 3 - 1, 0, length);
        range.end = std::clamp(range.end / 64 * 64 + round / 2 % 3 - 1, 0, length);
      }
      if (round % 5 == 4) range.begin = std::numeric_limits<int>::max();  // nothing
    }
    ScheduleOptions options = options_for(random.pick({1, 8}), random.pick({1, 4}));
    options.hidden = hidden.data();
    options.invariant = random.uniform(0, 1) == 1;
    CAPTURE(options.invariant);
    Schedule schedule;
    schedule.derive(view, options);
    const auto is_hidden = [&](int row, int key) {
      const KeyRange& range = hidden[static_cast<std::size_t>(row)];
      return key >= range.begin && key < range.end;
    };
    std::vector<std::vector<int>> times(hidden.size());
    for (int row = 0; row < view.num_rows; ++row)
      times[static_cast<std::size_t>(row)].resize(
          static_cast<std::size_t>(std::max(0, view.row_kv_len[row])));
    for (const WorkItem& item : schedule.items()) {
      const int position = view.segments[item.segment].position;
      const int most =
          *std::max_element(view.row_kv_len + item.row_begin, view.row_kv_len + item.row_end);
      CHECK((position + item.token_end - 1) / 64 * 64 < most);  // some row sees the last block
      for (int key = position + item.token_begin; key < position + item.token_end; ++key) {
        bool all_hidden = true;
        for (int row = item.row_begin; row < item.row_end; ++row) {
          all_hidden = all_hidden && is_hidden(row, key);
          if (key < view.row_kv_len[row])
            ++times[static_cast<std::size_t>(row)][static_cast<std::size_t>(key)];
        }
        if (!options.invariant) CHECK(!all_hidden);  // else blocks are read whole
      }
    }
    for (int row = 0; row < view.num_rows; ++row)
      for (int key = 0; key < view.row_kv_len[row]; ++key) {
        const int read = times[static_cast<std::size_t>(row)][static_cast<std::size_t>(key)];
        CHECK((is_hidden(row, key) ? read <= 1 : read == 1));
      }
  }
}

TEST_CASE("any number of wanted tasks is understood, the largest too") {
  for (const auto& plan : {levels({1, 32}, {4096, 64}), unshared(32, 2048, 1)}) {
    for (const bool invariant : {false, true}) {
      const auto derived = [&](int wanted) {
        ScheduleOptions options = options_for(3, 1);
        options.min_tasks = options.min_free_tasks = wanted;
        options.invariant = invariant;
        Schedule schedule;
        schedule.derive(plan.view(), options);
        return schedule;
      };
      const Schedule many = derived(1'000'000);
      const Schedule most = derived(std::numeric_limits<int>::max());
      CHECK(most.row_blocks().size() == many.row_blocks().size());
      CHECK(most.splits().size() == many.splits().size());
    }
  }
}

TEST_CASE("every part of every head is taken once, towards the end in small tasks") {
  test::Random random;
  for (int round = 0; round < 200; ++round) {
    const int num_jobs = random.uniform(1, 40);
    const int num_heads = random.uniform(1, 33);
    const int threads = random.uniform(1, 64);
    std::vector<JobSize> sizes(static_cast<std::size_t>(num_jobs));
    double total = 0, largest = 0;
    for (JobSize& size : sizes) {
      size = {random.uniform(0, 1000) * 1.0, random.uniform(1, 9), random.uniform(1, num_heads)};
      total += size.cost * num_heads;
      largest = std::max(largest, size.cost / size.parts);
    }
    TaskQueue queue;
    queue.reset(num_jobs, num_heads, threads,
                [&](int j) { return sizes[static_cast<std::size_t>(j)]; });
    std::vector<std::vector<int>> taken(sizes.size());
    for (std::size_t j = 0; j < sizes.size(); ++j)
      taken[j].assign(static_cast<std::size_t>(num_heads * sizes[j].parts), 0);
    std::atomic<int> next{0};
    double left = total;
    int tasks = 0;
    for (Task task; queue.take(next, task); ++tasks) {
      const JobSize& size = sizes[static_cast<std::size_t>(task.job)];
      const int heads = task.head_end - task.head_begin;
      const int parts = task.part_end - task.part_begin;
      CHECK(heads >= 1);
      CHECK(parts >= 1);
      CHECK(heads <= size.max_heads);
      CHECK((heads == 1 || parts == size.parts));
      const double cost = size.cost / size.parts * heads * parts;
      CHECK(cost <= std::max(largest, left / (2 * threads)) * (1 + 1e-9) + 1e-6);
      left -= cost;
      for (int h = task.head_begin; h < task.head_end; ++h)
        for (int p = task.part_begin; p < task.part_end; ++p)
          ++taken[static_cast<std::size_t>(task.job)][static_cast<std::size_t>(h * size.parts + p)];
    }
    CHECK(tasks <= queue.size());
    for (const auto& job : taken)
      CHECK(std::all_of(job.begin(), job.end(), [](int times) { return times == 1; }));
  }
}

TEST_CASE("threads that take at once take every part once") {
  constexpr int num_jobs = 40, num_heads = 32, parts = 40, threads = 3;
  TaskQueue queue;
  queue.reset(num_jobs, num_heads, 64, [&](int job) { return JobSize{1.0 + job, parts, 4}; });
  for (int round = 0; round < 10; ++round) {
    std::vector<std::atomic<int>> taken(num_jobs * num_heads * parts);
    std::atomic<int> next{0}, ready{0};
    std::vector<std::thread> takers;
    for (int t = 0; t < threads; ++t)
      takers.emplace_back([&] {
        for (++ready; ready.load() < threads;) std::this_thread::yield();
        for (Task task; queue.take(next, task);)
          for (int head = task.head_begin; head < task.head_end; ++head)
            for (int part = task.part_begin; part < task.part_end; ++part)
              ++taken[static_cast<std::size_t>((task.job * num_heads + head) * parts + part)];
      });
    for (std::thread& taker : takers) taker.join();
    CHECK(std::all_of(taken.begin(), taken.end(), [](const auto& times) { return times == 1; }));
  }
}

TEST_CASE("2 to 64 threads find work in every shape of batch") {
  struct Shape {
    std::string name;
    std::vector<int> nodes, tokens;
    int num_kv_heads, group;
    double busy_on_64 = 0.85;
  };
  const Shape shapes[] = {
      {"one long sequence", {1}, {32768}, 8, 4},
      {"one long sequence, one KV head", {1}, {131072}, 1, 16},
      {"a shared prompt", {1, 32}, {4096, 64}, 32, 1},
      {"a shared prompt, few KV heads", {1, 32}, {4096, 64}, 8, 4},
      // Two blocks of rows fill their vectors, three would not.
      {"a shared prompt, three KV heads", {1, 32}, {4096, 64}, 3, 3, 0.7},
      {"a shared prompt, four KV heads", {1, 32}, {4096, 64}, 4, 6},
      {"a shared prompt, one KV head", {1, 64}, {4096, 64}, 1, 16},
      {"nothing shared", {32}, {2048}, 8, 4},
      {"thousands of short ones", {4096}, {64}, 8, 4},
      {"a deep tree",
       {1, 2, 4, 8, 16, 32, 64, 128, 1024},
       {256, 128, 64, 16, 16, 16, 16, 16, 16},
       8,
       4},
      {"beams", {1, 4, 16, 64, 256, 1024}, {256, 8, 256, 64, 32, 256}, 8, 4},
  };
  for (const Shape& shape : shapes) {
    INFO(shape.name);
    const test::RandomPlan plan = levels(shape.nodes, shape.tokens);
    const Schedule schedule = derive(plan, shape.num_kv_heads, shape.group);
    for (const int threads : {2, 3, 8, 64}) {
      const double busy = busy_fraction(schedule, shape.num_kv_heads, threads);
      CAPTURE(threads);
      CHECK(busy >= (threads == 64 ? shape.busy_on_64 : 0.95));
    }
  }
}

TEST_CASE("rows are cut where that leaves the products' vectors full") {
  constexpr int grain = tile_lines / 2;
  for (const int group : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16}) {
    for (const int rows : {16, 24, 32, 33, 48, 64}) {
      CAPTURE(group);
      CAPTURE(rows);
      const Schedule schedule = derive(levels({1, rows}, {4096, 64}), 3, group);
      const auto& blocks = schedule.row_blocks();
      const int block_rows = max_lines / group;
      if (static_cast<int>(blocks.size()) == (rows + block_rows - 1) / block_rows)
        continue;  // not cut but for the state's size
      int lines = 0;
      for (const RowBlock& block : blocks) lines += (block.num_rows() * group + grain - 1) / grain;
      CHECK(lines * grain <= rows * group * 17 / 16);
    }
  }
}

TEST_CASE("query tokens of one sequence do not read its K/V again each") {
  for (const int sequences : {1, 3, 32}) {
    for (const int rows : {1, 2, 5, 8, 33, 64}) {
      for (const int heads : {1, 8, 32}) {
        CAPTURE(sequences);
        CAPTURE(rows);
        CAPTURE(heads);
        for (const bool invariant : {false, true}) {
          ScheduleOptions options = options_for(heads, 1);
          options.min_free_tasks = min_tasks;
          options.invariant = invariant;
          Schedule schedule;
          schedule.derive(unshared(sequences, 4096, rows).view(), options);
          // Cuts may part a sequence, and many lines are parted on purpose.
          const int times = invariant ? 1 + rows / min_product_lines : 1 + rows / tile_lines;
          CHECK(tokens_read(schedule) <= std::int64_t{sequences} * 4096 * times * 2);
          if (sequences == 32 && rows == 1 && heads == 1)
            CHECK(schedule.row_blocks().size() == 32);  // cut at will
        }
      }
    }
  }
}

TEST_CASE("products are chosen where they use enough of their vectors") {
  for (int lines = 1; lines <= 64; ++lines) {
    CAPTURE(lines);
    ScheduleOptions options = options_for(32, 1);
    options.product_grain = 16;
    options.min_product_fill = 0.75;
    Schedule schedule;
    schedule.derive(unshared(1, 4096, lines).view(), options);
    const bool expected = lines >= min_product_lines && 4 * lines >= 3 * ((lines + 15) / 16 * 16);
    CHECK(schedule.row_blocks().size() == 1);
    CHECK(schedule.row_blocks()[0].has_products == expected);
    // What is read for more rows comes first, also by the order of products and streams.
    options.invariant = true;
    schedule.derive(unshared(1, 4096, lines).view(), options);
    CHECK(schedule.row_blocks()[0].has_products == (lines >= 12));
  }
}

TEST_CASE("fast products have no smaller row blocks, and half of the tasks at least") {
  for (const int tokens : {2048, 4096, 8192}) {
    CAPTURE(tokens);
    const auto plan = levels({1, 32}, {tokens, 64});  // 32 rows of 4 lines
    for (const double rate : {CostModel::stream_flops_per_ns, 190.0, 250.0}) {
      CAPTURE(rate);
      ScheduleOptions options = options_for(8, 4);
      options.cost.product_flops_per_ns = rate;
      Schedule schedule;
      schedule.derive(plan.view(), options);
      CHECK(schedule.row_blocks().size() == 1);
      CHECK(schedule.splits().size() * 8 >= min_tasks / 2);
      CHECK(schedule.splits().size() * 8 <= min_tasks);
    }
  }
}

TEST_CASE("the rate of products says what they cost, not what streams do") {
  const auto costs = [](const test::RandomPlan& plan, double rate) {
    ScheduleOptions options = options_for(8, 4);
    options.min_tasks = 1;  // whole lists
    options.cost.product_flops_per_ns = rate;
    Schedule schedule;
    schedule.derive(plan.view(), options);
    double total = 0;
    for (const Split& split : schedule.splits()) total += split.cost;
    return total;
  };
  const double slow = CostModel::stream_flops_per_ns, fast = 2 * slow;
  const auto streamed = levels({32}, {1000});
  CHECK(costs(streamed, fast) == costs(streamed, slow));
  const auto shared = levels({1}, {4096});  // of one sequence: streamed, too
  CHECK(costs(shared, fast) == costs(shared, slow));
  // 32 rows of 4 lines over 4096 tokens, then 64 tokens of each.
  const auto both = levels({1, 32}, {4096, 64});
  const double products = 4096 * fp16_cost().flops_per_token_line * 32 * 4;
  CHECK(costs(both, slow) - costs(both, fast) ==
        doctest::Approx(products / slow - products / fast));
}
