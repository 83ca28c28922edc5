// WindowPlan: the arrays of a group's plan, made from those of the tree's: the same rows, the
// group's chunks, and of each segment only what some row's window touches.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../plan_view.hpp"
#include "window_chunks.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Kept from step to step, as the tree's plan is: a segment's pieces stay as they are, but those
/// that fall behind are dropped from its front, and those that rows have reached follow at its end.
class WindowPlan {
 public:
  Array<WriteTarget> writes;
  Array<RowCopy> copies;

  /// The arrays for a step whose rows all have chunks.
  /// \param window  keys that a row sees, its own included
  void update(const PlanView& tree, const WindowChunks& chunks, std::int32_t window) {
    const std::size_t count = to_size(tree.num_segments);
    bool changed = tree.segments_version != tree_segments_ || known_.size() != count;
    if (changed) {
      tree_segments_ = tree.segments_version;
      segments_version_ = next_segments_version();
      segments_.assign(tree.segments, tree.segments + count);
      known_.assign(count, {});
    }
    const bool all_stale = chunks_version_ != chunks.version();
    const bool may_fill = chunks_taken_ != chunks.num_taken();
    chunks_version_ = chunks.version();
    chunks_taken_ = chunks.num_taken();
    if (all_stale || may_fill)
      for (Known& known : known_) known.is_stale |= all_stale || known.has_gaps;
    if (pieces_.size() < to_size(tree.num_pieces)) pieces_.resize(2 * to_size(tree.num_pieces));
    find_rows(tree);
    for (std::size_t s = 0; s < count; ++s) changed |= map(tree, s, chunks, window);
    if (changed) ++pieces_version_;
  }
  /// Puts the arrays into a copy of the tree's view.
  void put_into(PlanView& view) const noexcept {
    view.segments = segments_.data();
    view.pieces = pieces_.data();
    view.writes = writes.data();
    view.copies = copies.data();
    view.num_copies = static_cast<std::int32_t>(copies.size());
    view.segments_version = segments_version_;
    view.pieces_version = pieces_version_;
  }

 private:
  /// Of a segment: which of its pieces are in the plan, [first, end) of those of the tree's.
  struct Known {
    std::int32_t first = 0, end = 0;
    std::int32_t begin = 0;   ///< path position that the first was chosen for
    bool is_stale = true;     ///< the pool may have given its pieces other chunks
    bool has_gaps = false;    ///< a piece had no chunk, and may have got one since
    std::int32_t lowest = 0;  ///< row_kv_len of the rows on it
    std::int32_t highest = 0;
  };

  /// Kernels that take whole blocks begin at a multiple of this many positions.
  static constexpr std::int32_t block = 64;

  // The least and the largest row_kv_len of the rows on each segment.
  void find_rows(const PlanView& tree) noexcept {
    for (Known& known : known_) {
      known.lowest = (std::numeric_limits<std::int32_t>::max)();
      known.highest = 0;
    }
    const auto add = [&](std::int32_t s, std::int32_t lowest, std::int32_t highest) {
      Known& known = known_[to_size(s)];
      known.lowest = (std::min)(known.lowest, lowest);
      known.highest = (std::max)(known.highest, highest);
    };
    for (std::int32_t row = 0; row < tree.num_rows; ++row)
      if (tree.row_segment[row] >= 0)
        add(tree.row_segment[row], tree.row_kv_len[row], tree.row_kv_len[row]);
    for (std::size_t s = known_.size(); s-- > 0;)
      if (const std::int32_t parent = tree.segments[s].parent; parent >= 0)
        add(parent, known_[s].lowest, known_[s].highest);
  }
  // Returns whether anything of the segment has changed.
  bool map(const PlanView& tree, std::size_t s, const WindowChunks& chunks, std::int32_t window) {
    const Segment& from = tree.segments[s];
    const Piece* const pieces = tree.pieces + from.piece_begin;
    Piece* const mapped = pieces_.data() + from.piece_begin;
    Known& known = known_[s];
    Segment& segment = segments_[s];
    const std::int32_t begin = (std::max)(0, known.lowest - window) / block * block;
    const auto is_behind = [begin](const Piece& piece) {
      return piece.position + piece.length <= begin;
    };
    bool changed = false;
    if (known.is_stale || begin < known.begin ||
        segment.piece_begin - known.first != from.piece_begin) {
      known.first = known.end = static_cast<std::int32_t>(
          std::partition_point(pieces, pieces + from.num_pieces, is_behind) - pieces);
      known.is_stale = known.has_gaps = false;
      changed = true;
    }
    known.begin = begin;
    for (; known.first < known.end && is_behind(pieces[known.first]); ++known.first) changed = true;
    for (; known.end < from.num_pieces; ++known.end) {
      const Piece& piece = pieces[known.end];
      if (piece.position >= known.highest) break;  // no row has reached it
      // Without a chunk it is masked for every row of this step; any chunk stands in.
      const ChunkIndex c = chunks.find(piece.chunk);
      known.has_gaps |= c == no_chunk;
      mapped[known.end] = {c == no_chunk ? 0 : c, piece.begin, piece.length, piece.position};
      changed = true;
    }
    // A segment that no row has reached begins where the one before it ends: kernels that take
    // whole blocks count what straddles as the later one's.
    if (known.end == known.first && known.first < from.num_pieces && from.parent >= 0) {
      const Segment& parent = segments_[to_size(from.parent)];
      segment.position = parent.position + parent.length;
    }
    if (!changed) return false;
    segment.piece_begin = from.piece_begin + known.first;
    segment.num_pieces = known.end - known.first;
    segment.length = 0;
    if (known.end > known.first) {
      const Piece& last = mapped[known.end - 1];
      segment.position = pieces[known.first].position;
      segment.length = last.position + last.length - segment.position;
    } else if (known.first == from.num_pieces) {
      segment.position = from.position + from.length;
    }
    return true;
  }

  Array<Segment> segments_;
  Array<Piece> pieces_;
  Array<Known> known_;
  std::uint64_t tree_segments_ = 0, segments_version_ = 0, pieces_version_ = 0;
  std::uint64_t chunks_version_ = 0, chunks_taken_ = 0;  // of the pool
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
