// What a schedule of the CUDA backend streams and exchanges, counted task by task, for floors and
// tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>

#include "chunkattn/detail/cuda/scheduler.hpp"

namespace test {

/// All KV heads together.
struct ScheduleSummary {
  std::int64_t kv_tokens = 0;      ///< K/V rows streamed, one KV head: tasks x their tokens
  std::int64_t kv_bytes = 0;       ///< the same in bytes, all KV heads
  std::int64_t partial_bytes = 0;  ///< written and read
  std::int32_t num_shared = 0;     ///< runs that are streamed for several others
  std::int32_t num_split = 0;      ///< further cuts along KV
};

[[nodiscard]] inline ScheduleSummary summarize(const chunkattn::detail::cuda::Scheduler& list,
                                               const chunkattn::detail::cuda::Geometry& geometry) {
  const chunkattn::detail::cuda::HeadDims dims = geometry.dims();
  ScheduleSummary all;
  for (const auto& task : list.tasks()) all.kv_tokens += task.tokens;
  all.kv_bytes = all.kv_tokens * geometry.num_kv_heads * (dims.k + dims.v) * dims.stored;
  all.partial_bytes = list.num_partials() * 2 * (dims.v + 1) * 4;
  std::map<std::int32_t, int> readers;  // of a piece, by the flag of its first tile
  for (const auto& merge : list.merges()) ++readers[merge.flag];
  std::set<std::int32_t> runs, shared;
  for (const auto& task :
       std::span(list.tasks()).first(static_cast<std::size_t>(list.num_chunk_first()))) {
    if (!readers.contains(task.flag)) continue;  // another tile
    all.num_split += runs.insert(task.segment).second ? 0 : 1;
    if (readers[task.flag] > 1) shared.insert(task.segment);
  }
  all.num_shared = static_cast<std::int32_t>(shared.size());
  return all;
}

}  // namespace test
