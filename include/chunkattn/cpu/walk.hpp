// The order in which a task reads K and V: walks that yield blocks of at most block_tokens
// consecutive path positions, as pieces of slots. Each is walked twice, once to compute and once,
// further ahead, to prefetch what will be read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../base/array.hpp"
#include "../base/config.hpp"
#include "../base/instruction_sets.hpp"
#include "../plan/view.hpp"
#include "schedule.hpp"

CHUNKATTN_ISA_NAMESPACE_BEGIN
namespace cpu {

/// Tokens [begin, begin + count) of a slot.
struct SlotRun {
  SlotIndex slot;
  int begin;
  int count;
};

/// Up to block_tokens consecutive path positions, wherever they lie, and the rows that read them.
struct BlockSpan {
  int count = 0;  ///< tokens
  int position = 0;
  int row_begin = 0;
  int row_end = 0;
  int num_runs = 0;
  SlotRun runs[block_tokens];  ///< [num_runs]

  void start(int at, int first_row, int last_row) noexcept {
    count = num_runs = 0;
    position = at;
    row_begin = first_row;
    row_end = last_row;
  }
  void append(const SlotRun& run) noexcept {
    runs[num_runs++] = run;
    count += run.count;
  }
};

/// Walks the items of a unit. A block never crosses a segment, but it may collect several pieces.
class ItemWalk {
 public:
  ItemWalk(const PlanView& plan, const WorkItem* begin, const WorkItem* end) noexcept
      : plan_(plan), item_(begin), end_(end) {
    if (item_ != end_) enter();
  }

  /// Steps to the next block; false at the end.
  bool next(BlockSpan& block) noexcept {
    if (item_ == end_) return false;
    block.start(plan_.segments[item_->segment].position + token_, item_->row_begin, item_->row_end);
    while (block.count < block_tokens && token_ < item_->token_end) {
      const int count = std::min(
          {piece_->length - within_, block_tokens - block.count, item_->token_end - token_});
      block.append({piece_->slot, piece_->begin + within_, count});
      token_ += count;
      within_ += count;
      if (within_ == piece_->length) {
        ++piece_;
        within_ = 0;
      }
    }
    if (token_ == item_->token_end && ++item_ != end_) enter();
    return true;
  }

 private:
  // Finds the piece that holds the item's first token.
  void enter() noexcept {
    const Segment& segment = plan_.segments[item_->segment];
    token_ = item_->token_begin;
    const Piece* const first = plan_.pieces + segment.piece_begin;
    piece_ = first;
    if (token_ > 0) {
      const std::int32_t position = segment.position + token_;
      piece_ = std::upper_bound(
                   first, first + segment.piece_count, position,
                   [](std::int32_t at, const Piece& piece) { return at < piece.position; }) -
               1;
    }
    within_ = segment.position + token_ - piece_->position;
  }

  const PlanView& plan_;
  const WorkItem* item_;
  const WorkItem* end_;
  const Piece* piece_ = nullptr;
  int token_ = 0;   // within the segment
  int within_ = 0;  // within the piece
};

/// Walks the tokens that one row sees from position 0 on, for Reduce::batch_invariant. Every block
/// begins at a multiple of block_tokens, however the tree happens to cut the path, so that the
/// order of arithmetic depends on the row's own tokens alone.
class PathWalk {
 public:
  /// Writes the row's segments, leaf first, to `path`, which must have room for them. This walk and
  /// its copies read it.
  PathWalk(const PlanView& plan, int row, Array<std::int32_t>& path) noexcept
      : plan_(plan), path_(path), row_(row), kv_len_(plan.row_kv_len[row]) {
    path.clear();
    for (std::int32_t s = plan.row_segment[row]; s >= 0; s = plan.segments[s].parent)
      path.push_back(s);
    to_walk_ = path.size();
    skip_to_piece();
  }

  /// Steps to the next block; false at the end.
  bool next(BlockSpan& block) noexcept {
    block.start(position_, row_, row_ + 1);
    while (block.count < block_tokens && position_ < kv_len_ && to_walk_ > 0) {
      const Piece& piece = plan_.pieces[segment().piece_begin + piece_];
      const int within = position_ - piece.position;
      const int count =
          std::min({piece.length - within, block_tokens - block.count, kv_len_ - position_});
      block.append({piece.slot, piece.begin + within, count});
      position_ += count;
      if (within + count == piece.length) {
        ++piece_;
        skip_to_piece();
      }
    }
    return block.count > 0;
  }

 private:
  const Segment& segment() const noexcept { return plan_.segments[path_[to_walk_ - 1]]; }
  // On to the next segment where this one has no further piece.
  void skip_to_piece() noexcept {
    while (to_walk_ > 0 && piece_ == segment().piece_count) {
      --to_walk_;
      piece_ = 0;
    }
  }

  const PlanView& plan_;
  const Array<std::int32_t>& path_;
  std::size_t to_walk_;  // segments of the path
  int row_;
  std::int32_t kv_len_;
  std::int32_t piece_ = 0;
  std::int32_t position_ = 0;
};

}  // namespace cpu
CHUNKATTN_ISA_NAMESPACE_END
