// The tasks of CudaOptions::Reduce::batch_invariant: a row's bits depend on its own tokens alone.
// On what they would depend, and why they do not: README.md here, "Batch-invariant".
//
// Every path is cut where its positions are multiples of a block. A row's last block is streamed by
// the task that merges and writes, each one before it by a chunk-first task, whose partial results
// are merged in path order. A block in which paths part belongs to each branch: the tokens before
// it are read again. All tiles are of one height, so that warps divide every row's tokens alike.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../../plan_view.hpp"
#include "../../variants.hpp"
#include "../support/array.hpp"
#include "../support/check.hpp"
#include "task_list.hpp"
#include "tile_layout.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// Tokens of a block: whole KV tiles, and no more than any kernel adds up without a total
/// (RunningTotal), whose windows are counted from a task's first visible tile.
inline constexpr std::int32_t invariant_block = 256;
/// Rows of every tile. (Tiles of 16 let groups of threads merge, by the number of rows.)
inline constexpr int invariant_tile_rows = 64;
static_assert(invariant_block % 64 == 0 && invariant_block <= 512 && invariant_tile_rows > 16);

/// Which block holds the last position that a row sees.
[[nodiscard]] inline std::int32_t last_block(const PlanView& plan, int row) noexcept {
  const Segment& segment = plan.segments[plan.row_segment[row]];
  const std::int32_t seen = (std::min)(plan.row_kv_len[row], segment.position + segment.length);
  return (std::max)(seen - 1, 0) / invariant_block;
}

/// Makes the lists. Keeps its memory from call to call.
class InvariantSchedule {
 public:
  TaskList list;

  /// \param hidden  [num_rows] keys that a row does not see; or null
  /// \throws InvalidArgument if the result does not fit `capacity`
  void build(const PlanView& plan, const Geometry& geometry, const ScheduleCapacity& capacity,
             const KeyRange* hidden) {
    group_ = geometry.group();
    num_kv_heads_ = geometry.num_kv_heads;
    list.clear();
    blocks_.clear();
    first_block_.clear();
    last_blocks_.clear();
    for (int row = 0; row < plan.num_rows; ++row) last_blocks_.push_back(last_block(plan, row));
    for (int s = 0; s < plan.num_segments; ++s) add_chunk_first(plan, s, hidden);
    for (int begin = 0, end = 0; begin < plan.num_rows; begin = end) {
      const std::int32_t segment = plan.row_segment[begin];
      const std::int32_t last = last_block(plan, begin);
      while (end < plan.num_rows && plan.row_segment[end] == segment &&
             last_block(plan, end) == last)
        ++end;
      add_sequence_first(plan, segment, last, begin, end);
    }
    std::sort(list.tasks.begin() + list.num_chunk_first, list.tasks.end(),
              [](const Task& a, const Task& b) {
                return a.merge_count != b.merge_count ? a.merge_count > b.merge_count
                                                      : a.flag < b.flag;
              });
    check_capacity(capacity);
  }

  /// Whether each row of the plan that the lists were made for ends in the same block.
  [[nodiscard]] bool keeps_blocks(const PlanView& plan) const noexcept {
    for (std::size_t row = 0; row < last_blocks_.size(); ++row)
      if (last_blocks_[row] != last_block(plan, static_cast<int>(row))) return false;
    return true;
  }

 private:
  // Of each block that ends in a segment: what merges it. Nothing where nobody wants it.
  struct Block {
    Merge merge;
    bool wanted = false;
  };

  // A block's results of so many rows.
  [[nodiscard]] std::int64_t partials(int rows) const noexcept {
    return std::int64_t{rows} * group_ * num_kv_heads_;
  }

  void add_chunk_first(const PlanView& plan, int s, const KeyRange* hidden) {
    const Segment& segment = plan.segments[s];
    const std::int32_t first = segment.position / invariant_block;
    const std::int32_t stop = (segment.position + segment.length) / invariant_block;
    first_block_.push_back(static_cast<std::int32_t>(blocks_.size()) - first);
    std::int32_t begin = segment.row_begin, end = segment.row_end;
    for (std::int32_t b = first; b < stop; ++b) {
      // Whose last block is a later one. Each block has no rows that the one before has not.
      while (begin < end && last_block(plan, begin) <= b) ++begin;
      while (begin < end && last_block(plan, end - 1) <= b) --end;
      const std::int32_t position = b * invariant_block;
      Block block;
      for (int row = begin; row < end && !block.wanted; ++row)
        block.wanted = hidden == nullptr || hidden[row].begin > position ||
                       hidden[row].end < position + invariant_block;
      if (block.wanted) {
        Task task{};
        task.segment = s;
        task.position_begin = position;
        task.position_end = position + invariant_block;
        task.tokens = invariant_block;
        task.tile_rows = invariant_tile_rows;
        block.merge = list.add_chunk_first(task, begin * group_, end * group_, invariant_tile_rows,
                                           num_kv_heads_);
      }
      blocks_.push_back(block);
    }
  }

  // Rows [begin, end), whose paths end with `segment` and whose last block is number `last`.
  void add_sequence_first(const PlanView& plan, std::int32_t segment, std::int32_t last, int begin,
                          int end) {
    Task task{};
    task.segment = segment;
    task.position_begin = last * invariant_block;
    task.position_end = open_end;
    task.merge_begin = static_cast<std::int32_t>(list.merges.size());
    std::int32_t stop = last;
    for (std::int32_t s = segment; s >= 0; s = plan.segments[s].parent) {
      const std::int32_t first = plan.segments[s].position / invariant_block;
      for (std::int32_t b = stop; b-- > first;) {
        const Block& block = blocks_[to_size(first_block_[to_size(s)] + b)];
        if (block.wanted) list.merges.push_back(block.merge);
      }
      stop = (std::min)(stop, first);
    }
    std::reverse(list.merges.begin() + task.merge_begin, list.merges.end());
    task.merge_count = static_cast<std::int32_t>(list.merges.size()) - task.merge_begin;
    const std::int32_t most = *std::max_element(plan.row_kv_len + begin, plan.row_kv_len + end);
    task.tokens = (std::max)(most - task.position_begin, 0);
    task.tile_rows = invariant_tile_rows;
    list.add_tiles(task, begin * group_, end * group_, invariant_tile_rows);
  }

  void check_capacity(const ScheduleCapacity& capacity) const {
    check_argument(
        to_size(list.num_partials) <= (std::min<std::size_t>)(capacity.partials, 0x7fffffff) &&
            list.tasks.size() <= capacity.tasks && list.merges.size() <= capacity.merges,
        "limits.max_partial_rows", capacity.partials / to_size(partials(1)),
        {"at least ", list.num_partials / partials(1),
         ": with Reduce::batch_invariant a row has a partial "
         "result for every ",
         invariant_block, " tokens before its last"});
  }

  int group_ = 1, num_kv_heads_ = 1;
  std::vector<Block> blocks_;              // by segment, then in path order
  std::vector<std::int32_t> first_block_;  // [segment] where its block number b stands: this + b
  std::vector<std::int32_t> last_blocks_;  // by row
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
