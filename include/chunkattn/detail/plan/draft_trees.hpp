// A tree of drafts in a plan: its branches are segments after those of its sequence's path, like
// the branches of the prefix tree. So what a draft sees needs no mask, and kernels know nothing of
// drafts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "../../plan_view.hpp"
#include "../support/array.hpp"
#include "../support/config.hpp"
#include "../tree/step_reader.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Adds a piece to those from `first` on; one that follows the last in its chunk reads as one with
/// it.
inline void add_piece(Array<Piece>& pieces, std::int32_t first, const Piece& piece) {
  if (static_cast<std::int32_t>(pieces.size()) > first) {
    Piece& last = pieces.back();
    if (last.chunk == piece.chunk && last.begin + last.length == piece.begin) {
      last.length += piece.length;
      return;
    }
  }
  pieces.push_back(piece);
}

/// Writes trees of drafts into a plan's arrays. Keeps its memory.
class DraftTrees {
 public:
  /// Where the rows of a tree are.
  struct Rows {
    std::int32_t token;     ///< the caller's index of draft 0
    std::int32_t row;       ///< the plan's index of the first
    std::int32_t position;  ///< path position of drafts of depth 1
    std::int32_t segment;   ///< the last one of the path
  };

  /// Adds segments, pieces, rows and write targets of all drafts, depth-first.
  void append(std::span<const Draft> drafts, const Rows& rows, PlanArrays& arrays) {
    link(drafts);
    std::int32_t row = rows.row;
    stack_.clear();
    push_children(first_root_, rows.segment);
    while (!stack_.empty()) {
      const Frame frame = stack_.back();
      stack_.pop_back();
      if (frame.draft == none) {
        arrays.segments[to_size(frame.segment)].row_end = row;
        continue;
      }
      // One segment for the drafts from here on as far as they do not branch.
      const auto segment = static_cast<std::int32_t>(arrays.segments.size());
      const auto first_piece = static_cast<std::int32_t>(arrays.pieces.size());
      const std::int32_t first_row = row,
                         position = rows.position + drafts[to_size(frame.draft)].depth - 1;
      std::int32_t i = frame.draft;
      while (true) {
        const Draft& draft = drafts[to_size(i)];
        add_piece(arrays.pieces, first_piece,
                  {draft.chunk, draft.offset, 1, rows.position + draft.depth - 1});
        arrays.row_token[to_size(row)] = rows.token + i;
        arrays.row_kv_len[to_size(row)] = rows.position + draft.depth;
        arrays.row_segment[to_size(row)] = segment;
        arrays.writes[to_size(rows.token + i)] = {draft.chunk, draft.offset};
        ++row;
        const std::int32_t child = links_[to_size(i)].first_child;
        if (child == none || links_[to_size(child)].next_sibling != none) break;
        i = child;
      }
      const auto num_pieces = static_cast<std::int32_t>(arrays.pieces.size()) - first_piece;
      arrays.segments.push_back(
          {first_row, row, first_piece, num_pieces, position, row - first_row, frame.segment, 1});
      stack_.push_back({none, segment});
      push_children(links_[to_size(i)].first_child, segment);
    }
  }

  /// append() for drafts whose results are not used any more: they see only what is left of their
  /// path, and write nothing.
  static void append_superseded(std::span<const Draft> drafts, const Rows& rows,
                                PlanArrays& arrays) noexcept {
    for (std::size_t i = 0; i < drafts.size(); ++i) {
      const std::size_t row = to_size(rows.row) + i, token = to_size(rows.token) + i;
      arrays.row_token[row] = static_cast<std::int32_t>(token);
      arrays.row_kv_len[row] = rows.position + drafts[i].depth;
      arrays.row_segment[row] = rows.segment;
      arrays.writes[token] = {no_chunk, 0};
    }
  }

 private:
  struct Links {
    std::int32_t first_child = none, next_sibling = none;
  };
  struct Frame {
    std::int32_t draft;    // to visit; none: close `segment`
    std::int32_t segment;  // the segment before it
  };

  /// Children last first, so that of those that are pushed the first is on top.
  void link(std::span<const Draft> drafts) {
    links_.assign(drafts.size(), {});
    first_root_ = none;
    for (std::size_t i = 0; i < drafts.size(); ++i) {
      const std::int32_t parent = drafts[i].parent;
      std::int32_t& first = parent == none ? first_root_ : links_[to_size(parent)].first_child;
      links_[i].next_sibling = first;
      first = static_cast<std::int32_t>(i);
    }
  }
  void push_children(std::int32_t first, std::int32_t segment) {
    for (std::int32_t i = first; i != none; i = links_[to_size(i)].next_sibling)
      stack_.push_back({i, segment});
  }
  std::int32_t first_root_ = none;
  Array<Links> links_;
  Array<Frame> stack_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
