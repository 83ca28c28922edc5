// A model of a GPU for schedules of the CUDA backend: what they cost on it (cuda_launch.hpp plays
// them), what no schedule can cost less than, and what its constants were fitted to.
//
// It answers which of two schedules is better and how far from the floor one should be expected.
// Its latencies were fitted to predictions of another model of the same machine, its limits have
// the sources that stand beside them; none of it is a measurement: the first hour on a GPU fits or
// refutes it. Not in it: a kernel of 161 KB in the instruction cache, K/V that the L2 has lost
// before the last tile reads it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "bench/cuda_launch.hpp"
#include "chunkattn/detail/cuda/scheduler.hpp"

namespace model {

/// What the model counts of the attention kernel at head dimension 128.
struct Kernel {
  int tall_warp_rows = 32;  ///< query-head rows of a warp in tiles of 64 and more
  /// Instructions of a warp for 64 tokens, beside mma: for a tile, for each of its rows, for the
  /// second 16 rows of a warp. Counted in PTX (./dev gpu_counts).
  double tile_instructions = 410, row_instructions = 5.7, tall_instructions = 106;
};
/// As it was, and was assumed to be, while schedules were made whose times are kept in tests.
inline constexpr Kernel kernel_of_16_lines{16, 215, 220.0 / 64, 0};

/// An item of `tokens` K/V rows of head dimension 128 past a tile of `tile_rows`, of which `rows`
/// are used; `readers` items of a launch stream the same K/V, so that one of them pays for the
/// memory.
inline Item make_item(const Machine& machine, std::int64_t tokens, int tile_rows, int rows,
                      int readers, bool chunk_first, int merges, const Kernel& kernel = {}) {
  constexpr int dim = 128;
  Item item;
  item.bytes = static_cast<double>(4 * tokens * dim);
  item.memory_bytes = item.bytes / readers;
  if (chunk_first) item.memory_bytes += 4.0 * rows * (dim + 1);
  const auto rows_of_tokens = static_cast<double>(tokens);
  item.flops = 4.0 * rows_of_tokens * dim * tile_rows;
  // For each token, ldmatrix: the warps side by side along the lines read all of K and V, and each
  // warp its lines of Q for 64 tokens; cp.async: K and V once. 96 KB and 32 KB for 64 x 64.
  const double warp_rows = tile_rows >= 64 ? kernel.tall_warp_rows : 16;
  item.shared_bytes = rows_of_tokens * dim * (4.0 * tile_rows / warp_rows + warp_rows / 8 + 4.0);
  item.instructions = rows_of_tokens / 64 *
                      (kernel.tile_instructions + kernel.row_instructions * tile_rows +
                       (tile_rows >= 64 ? kernel.tall_instructions : 0));
  item.write_us = machine.task_us / 5;
  item.wait_us = machine.task_us - item.write_us;
  item.end_us = machine.merge_us * chunkattn::detail::cuda::merges_in_a_row(rows, dim, merges);
  return item;
}

/// The machine with blocks of more than two stages: all but one of them are under way, and come
/// while the task before ends.
inline Machine with_stages(Machine machine, int stages) {
  machine.block_bytes_per_us *= stages - 1;
  machine.ahead_bytes *= stages - 1;
  return machine;
}

/// What schedules of head dimension 128 are made by on the machine: large tiles have room there.
inline chunkattn::detail::cuda::CostModel costs_of_today() {
  chunkattn::detail::cuda::CostModel costs;
  costs.most_tile_rows = chunkattn::detail::cuda::max_tile_rows;
  return costs;
}

/// Microseconds from a launch's first ticket to its last block's end. Each block does `ahead` of
/// the start of all items but its first beforehand.
inline double play(const Machine& machine, const std::vector<Item>& items, double ahead = 0) {
  return Launch(machine, items, ahead).play();
}

/// A schedule, by one launch or by one for each phase.
inline double play(const Machine& machine, const chunkattn::PlanView& plan,
                   const chunkattn::detail::cuda::Geometry& geometry,
                   const chunkattn::detail::cuda::Scheduler& scheduler, bool one_launch = true,
                   const Kernel& kernel = {}) {
  using chunkattn::detail::cuda::Task;
  const std::vector<Task>& tasks = scheduler.tasks();
  const auto phase1 = static_cast<std::size_t>(scheduler.num_chunk_first());
  std::map<std::pair<int, int>, int> readers;  // tiles of the same run
  for (const Task& task : tasks) ++readers[{task.segment, task.position_begin}];
  std::vector<std::size_t> task_of(phase1);  // that sets a flag
  for (std::size_t t = 0; t < phase1; ++t) task_of[static_cast<std::size_t>(tasks[t].flag)] = t;
  const auto heads = static_cast<std::size_t>(geometry.num_kv_heads);
  std::vector<Item> items;
  for (std::size_t t = 0; t < tasks.size(); ++t) {
    const Task& task = tasks[t];
    std::int64_t tokens = 0;
    if (task.segment >= 0) {
      const chunkattn::PlanView::Segment& segment = plan.segments[task.segment];
      const int last = (task.row_begin + task.row_count - 1) / geometry.group();
      const int seen = *std::max_element(plan.row_kv_len + task.row_begin / geometry.group(),
                                         plan.row_kv_len + last + 1);
      tokens = std::max(std::min({task.position_end, segment.position + segment.length, seen}) -
                            task.position_begin,
                        0);
    }
    Item item = make_item(machine, tokens, task.tile_rows, task.row_count,
                          readers[{task.segment, task.position_begin}], t < phase1,
                          task.merge_count, kernel);
    // The tasks whose flags it waits for, of its own head each.
    std::vector<std::size_t> needs;
    for (int m = 0; one_launch && t >= phase1 && m < task.merge_count; ++m) {
      const auto& merge = scheduler.merges()[static_cast<std::size_t>(task.merge_begin + m)];
      const int first_row = task.row_begin - merge.row_begin;
      const int last_row = first_row + task.row_count - 1;
      for (int tile = first_row >> merge.tile_bits; tile <= last_row >> merge.tile_bits; ++tile)
        needs.push_back(task_of[static_cast<std::size_t>(merge.flag + tile)]);
    }
    for (std::size_t head = 0; head < heads; ++head) {
      item.needs.clear();
      for (const std::size_t needed : needs) item.needs.push_back(needed * heads + head);
      items.push_back(item);
    }
  }
  if (one_launch) return machine.launch_us + play(machine, items, machine.ahead);
  const auto middle = items.begin() + static_cast<std::ptrdiff_t>(phase1 * heads);
  const std::vector<Item> chunk_first(items.begin(), middle);
  const std::vector<Item> sequence_first(middle, items.end());
  double us = machine.launch_us + play(machine, sequence_first);
  if (phase1 > 0) us += machine.launch_us + play(machine, chunk_first);
  return us;
}

/// No schedule is faster.
struct Floor {
  double memory_us;      ///< K, V, Q and O once through the memory
  double arithmetic_us;  ///< all products at 790 TFLOP/s, dense
  [[nodiscard]] double us() const { return std::max(memory_us, arithmetic_us); }
  /// What the goals near the floor hold for.
  [[nodiscard]] bool memory_bound() const { return arithmetic_us <= memory_us / 2; }
};
inline Floor floor_of(const Machine& machine, const chunkattn::PlanView& plan,
                      const chunkattn::detail::cuda::Geometry& geometry) {
  constexpr int dim = 128;
  double tokens = 0, products = 0;
  for (int s = 0; s < plan.num_segments; ++s) tokens += plan.segments[s].length;
  for (int row = 0; row < plan.num_rows; ++row) products += plan.row_kv_len[row];
  const double bytes = 4.0 * tokens * dim * geometry.num_kv_heads +
                       4.0 * plan.num_rows * dim * geometry.num_qo_heads;
  return {bytes / machine.bytes_per_us, 4.0 * products * dim * geometry.num_qo_heads / 790e6};
}

/// What the constants of latencies and of one block's memory were fitted to: launches as an earlier
/// scheduler cut them. Tiles of 64 rows are not among them: that model let these multiply at 380
/// TFLOP/s, more than shared memory can feed.
struct Fitted {
  const char* name;
  double us;  ///< another model's prediction
  struct Tasks {
    int count;
    std::int64_t tokens;
    int tile_rows, readers;
  };
  std::vector<std::vector<Tasks>> launches;  ///< in the order of tickets, all KV heads
};

inline std::vector<Fitted> fitted_cases() {
  return {{"32/32 b 32, 1024+64", 35, {{{64, 384, 32, 1}, {32, 256, 32, 1}}, {{1024, 64, 16, 1}}}},
          {"32/32 b 32, 2048+64", 37, {{{128, 448, 32, 1}, {32, 256, 32, 1}}, {{1024, 64, 16, 1}}}},
          {"32/32 b 32, 4096+64", 45, {{{160, 704, 32, 1}, {32, 576, 32, 1}}, {{1024, 64, 16, 1}}}},
          {"32/32 b 32, 4096+512", 123, {{{64, 2048, 32, 1}}, {{1024, 512, 16, 1}}}},
          {"32/32 b 32, 0+1024", 143, {{{1024, 1024, 16, 1}}}},
          {"32/32 b 32, 0+2048", 273, {{{1024, 2048, 16, 1}}}},
          {"32/32 b 32, 0+4096", 531, {{{1024, 4096, 16, 1}}}}};
}

inline double play(const Machine& machine, const Fitted& fitted) {
  double us = 0;
  for (const auto& launch : fitted.launches) {
    std::vector<Item> items;
    for (const auto& tasks : launch)
      items.insert(items.end(), static_cast<std::size_t>(tasks.count),
                   make_item(machine, tasks.tokens, tasks.tile_rows, 0, tasks.readers, false, 0));
    us += play(machine, items) + machine.launch_us;
  }
  return us;
}

/// The machine, and it with each constant 30 % lower and higher.
inline std::vector<Machine> varied(const Machine& machine) {
  std::vector<Machine> machines{machine};
  for (const auto constant :
       {&Machine::bytes_per_us, &Machine::l2_bytes_per_us, &Machine::block_bytes_per_us,
        &Machine::block_shared_per_us, &Machine::block_flops_per_us,
        &Machine::warp_instructions_per_us, &Machine::task_us, &Machine::merge_us,
        &Machine::launch_us, &Machine::wait_us, &Machine::ahead, &Machine::ahead_bytes})
    for (const double factor : {0.7, 1.3}) {
      machines.push_back(machine);
      machines.back().*constant *= factor;
      machines.back().ahead = std::min(machines.back().ahead, 1.0);  // a part of task_us
    }
  return machines;
}

}  // namespace model
