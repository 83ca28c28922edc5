// DevicePlan: the tasks and the device's copies of a plan's arrays, as PODs that kernels read; and
// where a path position lies, the same function for host and device.
#pragma once

#include <cstdint>

#include "../../plan_view.hpp"
#include "../support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// One tile of rows over one range of path positions; run once per KV head.
///
/// Rows are packed for grouped-query attention: packed row i is plan row i / group, query head
/// kv_head * group + i % group. The positions lie on the path that ends with `segment`.
struct alignas(16) Task {
  std::int32_t tile_rows;       ///< 16, 32, 64 or, if there is nothing to merge, 128
  std::int32_t row_begin;       ///< first packed row
  std::int32_t row_count;       ///< packed rows, at most tile_rows
  std::int32_t segment;         ///< deepest segment of the range; -1: nothing to stream, merge only
  std::int32_t position_begin;  ///< first path position
  std::int32_t position_end;    ///< one past the last; `open_end`: to the end of `segment`
  std::int32_t partial_base;    ///< chunk-first: the partial of (plan row, qo head) has the index
                                ///< partial_base + row * num_qo_heads + head
  std::int32_t merge_begin;     ///< sequence-first: into PlanMemory::merges
  std::int32_t merge_count;
  std::int32_t flag;  ///< chunk-first: of KV head h, flag * num_kv_heads + h in PlanMemory::flags
  std::int32_t chunk_first;  ///< whether it writes partial results; else it merges and writes out
  std::int32_t tokens;       // the host's: what it streams, for the order of tasks
};
static_assert(sizeof(Task) == 48);

/// The partial results of one range of a run, one task per tile of its rows, as a sequence-first
/// task merges them.
struct alignas(16) Merge {
  std::int32_t partial_base;  ///< as the tasks'
  std::int32_t flag;          ///< of the first tile; the others' follow
  std::int32_t row_begin;     ///< packed row that the first tile begins with
  std::int32_t tile_bits;     ///< log2 of the rows of each tile but the last
};

inline constexpr std::int32_t open_end = 0x7fffffff;

/// Counts that change from plan to plan; kernels read them on the device, so that a captured graph
/// stays valid.
struct PlanHeader {
  std::int32_t num_rows;
  std::int32_t num_copies;
  std::int32_t num_tasks;  ///< chunk-first ones, then the others
};

/// Tickets: blocks take (task, KV head) pairs in order. The last block to leave a launch zeroes
/// them and counts the launch, so that flags which earlier launches have set mean nothing to the
/// next. So does prepare(), whatever launches that overlapped have left: the next step finds them
/// right.
struct Counters {
  std::int32_t next;       ///< tickets drawn
  std::int32_t left;       ///< blocks that have left
  std::uint32_t launches;  ///< that are over
};

/// Device pointers; fixed for the life of an attention object.
struct PlanMemory {
  const PlanHeader* header;
  const Task* tasks;
  const Merge* merges;  ///< in path order
  const Segment* segments;
  const Piece* pieces;
  const std::int32_t* row_token;
  std::int32_t* row_kv_len;
  const std::int32_t* row_segment;
  WriteTarget* writes;
  const RowCopy* copies;
  Counters* counters;
  std::uint32_t* flags;  ///< [chunk-first task][KV head]: the launch that last wrote its partials
  float* partial_out;    ///< [partial][value_dim], normalised
  float* partial_lse;    ///< [partial], base 2; at most empty_max2: empty
  float* totals;         ///< of each block, while it runs a long task: see RunningTotal
  std::uint32_t* overlapped;  ///< of the host: set by a launch that others have taken tickets from
};

/// Which of the pieces first..last, of which the last one ends beyond `position`, holds it.
[[nodiscard]] CHUNKATTN_HD inline std::int32_t find_piece(const Piece* pieces, std::int32_t first,
                                                          std::int32_t last,
                                                          std::int32_t position) noexcept {
  while (first < last) {
    const std::int32_t middle = (first + last) / 2;
    if (position >= pieces[middle].position + pieces[middle].length)
      first = middle + 1;
    else
      last = middle;
  }
  return first;
}

/// The place of path position `position` on the path that ends with `segment`; no_chunk if the path
/// has no such place.
[[nodiscard]] CHUNKATTN_HD inline WriteTarget locate(const Segment* segments, const Piece* pieces,
                                                     std::int32_t segment,
                                                     std::int32_t position) noexcept {
  while (segment >= 0 && position < segments[segment].position) segment = segments[segment].parent;
  if (segment < 0) return {no_chunk, 0};
  const Segment& s = segments[segment];
  if (position >= s.position + s.length) return {no_chunk, 0};
  const Piece& piece =
      pieces[find_piece(pieces, s.piece_begin, s.piece_begin + s.num_pieces - 1, position)];
  return {piece.chunk, piece.begin + position - piece.position};
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
