// The path of one row, block by block at absolute positions: what Reduce::batch_invariant walks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../config.hpp"
#include "../kv_view.hpp"
#include "../plan_types.hpp"
#include "block.hpp"

CHUNKATTN_ISA_NAMESPACE_BEGIN
namespace cpu {

/// Walks the tokens that a row sees from position 0 on. Every block begins at a multiple of
/// block_tokens, however the tree happens to cut the path, so that the order of arithmetic depends
/// on the row's own tokens alone.
template <class T>
class PathCursor {
 public:
  /// `path` is scratch with room for the plan's number of segments.
  PathCursor(const KvView<T>& kv, const PlanView& plan, int kv_head, int row,
             std::vector<std::int32_t>& path) noexcept
      : kv_(kv), plan_(plan), path_(path), kv_head_(kv_head), kv_len_(plan.row_kv_len[row]) {
    path_.clear();
    for (std::int32_t s = plan.row_segment[row]; s >= 0; s = plan.segments[s].parent)
      path_.push_back(s);
    skip_to_piece();
  }

  /// Fills `block`; count == 0 at the end.
  void next(Block<T>& block) noexcept {
    block.count = 0;
    block.position = position_;
    while (block.count < block_tokens && position_ < kv_len_ && !path_.empty()) {
      const Piece& piece = plan_.pieces[plan_.segments[path_.back()].piece_begin + piece_];
      const int within = position_ - piece.position;
      const int take =
          std::min({piece.length - within, block_tokens - block.count, kv_len_ - position_});
      block.append(kv_, piece.slot, kv_head_, piece.begin + within, take);
      position_ += take;
      if (within + take == piece.length) {
        ++piece_;
        skip_to_piece();
      }
    }
    if (block.count > 0) block.pad();
  }

 private:
  // On to the next segment where this one has no further piece.
  void skip_to_piece() noexcept {
    while (!path_.empty() && piece_ == plan_.segments[path_.back()].piece_count) {
      path_.pop_back();
      piece_ = 0;
    }
  }

  const KvView<T>& kv_;
  const PlanView& plan_;
  std::vector<std::int32_t>& path_;  // segments still to walk, the next one last
  int kv_head_;
  std::int32_t kv_len_;
  std::int32_t piece_ = 0;
  std::int32_t position_ = 0;
};

}  // namespace cpu
CHUNKATTN_ISA_NAMESPACE_END
