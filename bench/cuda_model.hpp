// A model of a GPU for schedules of the CUDA backend: blocks take tasks in order; a task first
// waits for its chain of latencies, then streams, sharing the memory with the blocks that stream
// beside it, and merges when the partial results that it needs are there.
//
// It answers which of two schedules is better and how far from the floor one should be expected. It
// was fitted to predictions of another model of the same machine, never to a measurement: the first
// hour on a GPU fits or refutes it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <queue>
#include <utility>
#include <vector>

#include "chunkattn/cuda/schedule.hpp"

namespace model {

/// An H200 at two blocks per multiprocessor and head dimension 128. Frozen: schedules are changed
/// to suit it, not the other way round.
struct Machine {
  int num_blocks = 264;         ///< 132 multiprocessors, two blocks each (registers, shared memory)
  double bytes_per_us = 4.3e6;  ///< copies of 2 GB; 4.8 TB/s is what the data sheet says
  /// One block alone: 32 KB under way (one stage of 32 KB) per 1.2 us of loaded memory latency.
  double block_bytes_per_us = 27e3;
  /// One block's 64-row tiles: 345 to 390 TFLOP/s over 264 blocks, estimated from machine code.
  double block_flops_per_us = 1.45e6;
  double task_us = 3.0;    ///< ticket, task, tables, first K/V, epilogue: five loads in a row
  double merge_us = 0.15;  ///< one partial result of 128 threads' columns, of four read at a time
  double launch_us = 2.0;  ///< start and drain of a kernel inside a graph
  double wait_us = 1.0;    ///< from another block's last store to the read behind its flag
  /// Of task_us, in one launch: four of the five loads pass while the task before runs. Ticket,
  /// task and tables while its last K/V comes (the model counts that as its streaming), the first
  /// K/V while it merges and writes. The epilogue remains.
  double ahead = 0.8;
};

/// What one (task, KV head) pair does.
struct Item {
  double memory_bytes = 0;  ///< from device memory
  double bytes = 0;         ///< through the L2 too
  double flops = 0;
  double wait_us = 0;  ///< before streaming
  double end_us = 0;   ///< after it: partial results that it merges, once they are there
  std::vector<std::size_t> needs{};  ///< the items that make them, which stand before this
};

/// An item of `tokens` K/V rows of head dimension 128 past a tile of `tile_rows`, of which `rows`
/// are used; `readers` items of a launch stream the same K/V, so that one of them pays for the
/// memory.
inline Item make_item(const Machine& machine, std::int64_t tokens, int tile_rows, int rows,
                      int readers, bool chunk_first, int merges) {
  constexpr int dim = 128;
  Item item;
  item.bytes = static_cast<double>(4 * tokens * dim);
  item.memory_bytes = item.bytes / readers;
  if (chunk_first) item.memory_bytes += 4.0 * rows * (dim + 1);
  item.flops = 4.0 * static_cast<double>(tokens) * dim * tile_rows;
  const int rounds = (rows * dim + 511) / 512;
  item.wait_us = machine.task_us;
  item.end_us = machine.merge_us * merges * rounds;
  return item;
}

/// Microseconds from a launch's first ticket to its last block's end. What an item does in the end
/// (`end_us`), it does when those that it needs are done. Each block fetches `ahead` of the start
/// of all items but its first beforehand.
inline double play(const Machine& machine, const std::vector<Item>& items, double ahead = 0) {
  struct Stream {
    double left, most;  // bytes, bytes per microsecond
    std::size_t item;
  };
  struct Wait {
    double until;
    std::size_t item;
    bool ends;  // the item, or only what goes before its streaming
    bool operator>(const Wait& other) const { return until > other.until; }
  };
  std::priority_queue<Wait, std::vector<Wait>, std::greater<>> waiting;
  std::vector<Stream> streams;
  std::vector<double> rates;
  std::vector<std::vector<std::size_t>> needed_by(items.size());
  std::vector<std::size_t> missing(items.size());  // of what an item needs
  std::vector<bool> blocked(items.size());         // has streamed, and waits for these
  for (std::size_t i = 0; i < items.size(); ++i) {
    missing[i] = items[i].needs.size();
    for (const std::size_t needed : items[i].needs) needed_by[needed].push_back(i);
  }
  std::size_t next = 0;
  int free = machine.num_blocks;
  double now = 0;
  const auto share_memory = [&] {  // nobody gets more than he can take, the rest is shared evenly
    std::sort(streams.begin(), streams.end(),
              [](const Stream& a, const Stream& b) { return a.most < b.most; });
    rates.clear();
    double rest = machine.bytes_per_us;
    for (std::size_t i = 0; i < streams.size(); ++i) {
      rates.push_back(std::min(streams[i].most, rest / static_cast<double>(streams.size() - i)));
      rest -= rates.back();
    }
  };
  const auto end_of_stream = [&](std::size_t item) {
    if (missing[item] > 0)
      blocked[item] = true;
    else
      waiting.push({now + items[item].end_us, item, true});
  };
  while (true) {
    for (; free > 0 && next < items.size(); --free, ++next)
      waiting.push(
          {now + items[next].wait_us - (now > 0 ? ahead * machine.task_us : 0), next, false});
    if (waiting.empty() && streams.empty()) return now;
    share_memory();
    double step = waiting.empty() ? 1e30 : waiting.top().until - now;
    for (std::size_t i = 0; i < streams.size(); ++i)
      step = std::min(step, streams[i].left / rates[i]);
    now += step;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < streams.size(); ++i) {
      streams[i].left -= rates[i] * step;
      if (streams[i].left > 1e-3)
        streams[kept++] = streams[i];
      else
        end_of_stream(streams[i].item);
    }
    streams.resize(kept);
    while (!waiting.empty() && waiting.top().until <= now + 1e-9) {
      const Wait wait = waiting.top();
      waiting.pop();
      const Item& item = items[wait.item];
      const double alone = std::max(item.bytes / machine.block_bytes_per_us,
                                    item.flops / machine.block_flops_per_us);
      if (!wait.ends && alone > 0) {
        streams.push_back({item.memory_bytes, item.memory_bytes / alone, wait.item});
      } else if (!wait.ends) {
        end_of_stream(wait.item);
      } else {
        ++free;
        for (const std::size_t other : needed_by[wait.item])
          if (--missing[other] == 0 && blocked[other])
            waiting.push({now + machine.wait_us + items[other].end_us, other, true});
      }
    }
  }
}

/// A schedule, by one launch or by one for each phase.
inline double play(const Machine& machine, const chunkattn::PlanView& plan,
                   const chunkattn::Geometry& geometry,
                   const chunkattn::cuda_detail::Scheduler& scheduler, bool one_launch = true) {
  using chunkattn::cuda_detail::max_tile_rows;
  using chunkattn::cuda_detail::Task;
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
      const chunkattn::Segment& segment = plan.segments[task.segment];
      const int seen = plan.row_kv_len[task.row_begin / geometry.group()];
      tokens = std::min({task.position_end, segment.position + segment.length, seen}) -
               task.position_begin;
    }
    Item item =
        make_item(machine, tokens, task.tile_rows, task.row_count,
                  readers[{task.segment, task.position_begin}], t < phase1, task.merge_count);
    // The tasks whose flags it waits for, of its own head each.
    std::vector<std::size_t> needs;
    for (int m = 0; one_launch && t >= phase1 && m < task.merge_count; ++m) {
      const auto& merge = scheduler.merges()[static_cast<std::size_t>(task.merge_begin + m)];
      const int first_row = task.row_begin - merge.row_begin;
      const int last_row = first_row + task.row_count - 1;
      for (int tile = first_row / max_tile_rows; tile <= last_row / max_tile_rows; ++tile)
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

/// No schedule is faster: K, V, Q and O once through the memory, or 790 TFLOP/s of dense products.
inline double floor_us(const Machine& machine, const chunkattn::PlanView& plan,
                       const chunkattn::Geometry& geometry) {
  constexpr int dim = 128;
  double tokens = 0, products = 0;
  for (int s = 0; s < plan.num_segments; ++s) tokens += plan.segments[s].length;
  for (int row = 0; row < plan.num_rows; ++row) products += plan.row_kv_len[row];
  const double bytes = 4.0 * tokens * dim * geometry.num_kv_heads +
                       4.0 * plan.num_rows * dim * geometry.num_qo_heads;
  return std::max(bytes / machine.bytes_per_us,
                  4.0 * products * dim * geometry.num_qo_heads / 790e6);
}

/// What the constants were fitted to: launches as an earlier scheduler cut them.
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
          {"32/8 b 256, 4096+512", 241, {{{128, 4096, 64, 16}}, {{2048, 512, 16, 1}}}},
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
  for (const auto constant : {&Machine::bytes_per_us, &Machine::block_bytes_per_us,
                              &Machine::block_flops_per_us, &Machine::task_us, &Machine::merge_us,
                              &Machine::launch_us, &Machine::wait_us, &Machine::ahead})
    for (const double factor : {0.7, 1.3}) {
      machines.push_back(machine);
      machines.back().*constant *= factor;
      machines.back().ahead = std::min(machines.back().ahead, 1.0);  // a part of task_us
    }
  return machines;
}

}  // namespace model
