// TaskList: the tasks and merges of a schedule, tile by tile.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "device_plan.hpp"
#include "tile_layout.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// How much room a schedule has.
struct ScheduleCapacity {
  std::size_t tasks = 0;
  std::size_t merges = 0;
  std::size_t partials = 0;  ///< rows x query heads
};

/// Chunk-first tasks, then those that merge and write.
struct TaskList {
  std::vector<Task> tasks;
  std::vector<Merge> merges;  ///< in path order, for each range of rows that is written
  int num_chunk_first = 0;
  std::int64_t num_partials = 0;

  void clear() noexcept {
    tasks.clear();
    merges.clear();
    num_chunk_first = 0;
    num_partials = 0;
  }

  /// One task for at most `most` of packed rows [begin, end) each, all else as in `task`. Its
  /// tile_rows are 0 where those that hold a task's rows will do.
  void add_tiles(Task task, int begin, int end, int most) {
    const bool any_height = task.tile_rows == 0;
    for (task.row_begin = begin; task.row_begin < end; task.row_begin += most) {
      task.row_count = (std::min)(end - task.row_begin, most);
      if (any_height) task.tile_rows = tile_rows_for(task.row_count);
      task.flag = static_cast<std::int32_t>(tasks.size());
      tasks.push_back(task);
    }
  }

  /// Those of a piece of K/V, and how their results are merged.
  Merge add_chunk_first(Task task, int begin, int end, int most, int num_kv_heads) {
    // The partial of (plan row, query head) has the index base + row * num_qo_heads + head.
    task.chunk_first = 1;
    task.partial_base = static_cast<std::int32_t>(num_partials) - begin * num_kv_heads;
    num_partials += std::int64_t{end - begin} * num_kv_heads;
    const Merge merge{task.partial_base, static_cast<std::int32_t>(tasks.size()), begin,
                      std::countr_zero(static_cast<unsigned>(most))};
    add_tiles(task, begin, end, most);
    num_chunk_first = static_cast<int>(tasks.size());
    return merge;
  }
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
