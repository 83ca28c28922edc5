// The order in which a task reads K and V: a walk that yields blocks of at most block_tokens
// consecutive path positions, as pieces of chunks. It is walked twice, once to compute and once,
// further ahead, to prefetch what will be read.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../../plan_view.hpp"
#include "../support/config.hpp"
#include "../support/instruction_sets.hpp"
#include "schedule.hpp"

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

/// Tokens [begin, begin + count) of a chunk.
struct ChunkRun {
  ChunkIndex chunk;
  int begin;
  int count;
};

/// Up to block_tokens consecutive path positions, in any chunks, and the rows that read them.
struct BlockSpan {
  int count = 0;  ///< tokens
  int position = 0;
  int row_begin = 0;
  int row_end = 0;
  int num_runs = 0;
  ChunkRun runs[block_tokens];  ///< [num_runs]

  void start(int at, int first_row, int last_row) noexcept {
    count = num_runs = 0;
    position = at;
    row_begin = first_row;
    row_end = last_row;
  }
  void append(const ChunkRun& run) noexcept {
    runs[num_runs++] = run;
    count += run.count;
  }
};

/// Walks the items of a split. A block never crosses an item, but it may collect several pieces,
/// also of the segments above where the item begins before its own.
class ItemWalk {
 public:
  ItemWalk(const PlanView& plan, const WorkItem* begin, const WorkItem* end) noexcept
      : plan_(plan), item_(begin), end_(end) {
    if (item_ != end_) enter();
  }

  /// Steps to the next block; false at the end.
  bool next(BlockSpan& block) noexcept {
    if (item_ == end_) return false;
    block.start(position(), item_->row_begin, item_->row_end);
    while (block.count < block_tokens && token_ < item_->token_end) {
      const int count = (std::min)(
          {piece_->length - within_, block_tokens - block.count, item_->token_end - token_});
      block.append({piece_->chunk, piece_->begin + within_, count});
      token_ += count;
      within_ += count;
      if (within_ == piece_->length) {
        ++piece_;
        within_ = 0;
        if (token_ <= 0 && token_ < item_->token_end) find_piece();  // of the next segment, perhaps
      }
    }
    if (token_ == item_->token_end && ++item_ != end_) enter();
    return true;
  }

 private:
  void enter() noexcept {
    token_ = item_->token_begin;
    find_piece();
  }
  [[nodiscard]] std::int32_t position() const noexcept {
    return plan_.segments[item_->segment].position + token_;
  }

  // Finds the piece that holds the next token.
  void find_piece() noexcept {
    const Segment* segment = &plan_.segments[item_->segment];
    const std::int32_t at = position();
    while (segment->position > at) segment = &plan_.segments[segment->parent];
    const Piece* const first = plan_.pieces + segment->piece_begin;
    piece_ = first;
    if (at > segment->position) {
      piece_ = std::upper_bound(first, first + segment->num_pieces, at,
                                [](std::int32_t position, const Piece& piece) {
                                  return position < piece.position;
                                }) -
               1;
    }
    within_ = at - piece_->position;
  }

  const PlanView& plan_;
  const WorkItem* item_;
  const WorkItem* end_;
  const Piece* piece_ = nullptr;
  int token_ = 0;   // of the item's segment, negative before it
  int within_ = 0;  // within the piece
};

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
