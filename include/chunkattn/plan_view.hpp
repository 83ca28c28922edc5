// PlanView: plain arrays for kernels that describe which query row attends to which K/V rows.
//
// A *row* is one query token of the step. The caller numbers query tokens in the order of
// Step::add(); the plan numbers rows depth-first over the prefix tree, so that the rows below any
// node are consecutive. A *segment* is a range of path positions that exactly the rows [row_begin,
// row_end) have in common; parents come before children. A *piece* is the part of a segment inside
// one chunk. The branches of a tree of drafts are segments, too, with few rows and short pieces.
//
// The causal mask is one number per row: row r sees the path positions below row_kv_len[r]. So of a
// piece it sees the first min(length, row_kv_len[r] - position) tokens, none if that is negative. A
// piece may have tokens that no row sees (reserved for later, or of another sequence): their K/V
// may be anything, NaN too, and must not be used.
#pragma once

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "allocator.hpp"
#include "detail/support/array.hpp"
#include "detail/support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// A part of one chunk: its token slots [begin, begin + length) hold the path positions
/// [position, position + length).
struct Piece {
  ChunkIndex chunk;       ///< index of the chunk
  std::int32_t begin;     ///< first token slot in the chunk, from 0
  std::int32_t length;    ///< token slots
  std::int32_t position;  ///< path position of the first one
};

/// How many of a piece's first tokens a row sees: from 0 to `piece.length`.
/// \param kv_len  PlanView::row_kv_len of the row: it sees the path positions below it
CHUNKATTN_HD constexpr std::int32_t visible_length(const Piece& piece,
                                                   std::int32_t kv_len) noexcept {
  const std::int32_t seen = kv_len - piece.position;
  return seen < 0 ? 0 : (seen < piece.length ? seen : piece.length);
}

/// Non-owning view of a plan. All arrays are in host memory.
struct PlanView {
  /// Pieces [piece_begin, piece_begin + num_pieces), seen by the rows [row_begin, row_end).
  struct Segment {
    std::int32_t row_begin;      ///< first row that sees it
    std::int32_t row_end;        ///< one past the last
    std::int32_t piece_begin;    ///< index of its first piece
    std::int32_t num_pieces;     ///< its pieces, consecutive and in path order
    std::int32_t position;       ///< path position of the first token
    std::int32_t length;         ///< sum of the pieces' lengths, reserved slots included
    std::int32_t parent;         ///< index of the segment before it on the path, -1 for the first
    std::int32_t num_sequences;  ///< sequences of this plan on it; more than 1: shared
  };

  /// Where the K/V of one query token goes; chunk == no_chunk: nowhere (already written).
  struct WriteTarget {
    ChunkIndex chunk;     ///< index of the chunk, or no_chunk
    std::int32_t offset;  ///< token slot inside the chunk
  };

  /// K/V rows [source_begin, +length) of source_chunk are to be copied to target_chunk, in every
  /// layer, before the step writes or reads K/V there. Doing it twice is harmless.
  struct RowCopy {
    ChunkIndex source_chunk;    ///< index of the chunk to copy from
    std::int32_t source_begin;  ///< first token slot there
    ChunkIndex target_chunk;    ///< index of the chunk to copy to
    std::int32_t target_begin;  ///< first token slot there
    std::int32_t length;        ///< token slots to copy
  };

  std::int32_t num_rows = 0;      ///< query tokens of the step
  std::int32_t num_segments = 0;  ///< parents before children
  std::int32_t num_pieces = 0;    ///< extent of the piece array (it may have unused gaps)
  std::int32_t num_copies = 0;  ///< row copies (see RowCopy), of rows that the step does not write
  std::int32_t chunk_size = 0;  ///< tokens per chunk
  std::int32_t window = 0;      ///< keys that a row sees at most, its own included; 0: all are here
  const Segment* segments = nullptr;        ///< [num_segments]
  const Piece* pieces = nullptr;            ///< [num_pieces], found through their segments
  const std::int32_t* row_token = nullptr;  ///< [num_rows] the row's index in the caller's order
  /// [num_rows] the row sees the path positions below this, its own included
  const std::int32_t* row_kv_len = nullptr;
  const std::int32_t* row_segment = nullptr;  ///< [num_rows] the last segment of the row's path
  const WriteTarget* writes = nullptr;        ///< [num_rows] in the caller's order
  const RowCopy* copies = nullptr;            ///< [num_copies]
  std::uint64_t segments_version = 0;  ///< changes with rows, segments or their row intervals
  std::uint64_t pieces_version = 0;    ///< changes when any piece or segment length changes
  std::uint64_t tree_id = 0;           ///< number of the tree; 0: made by hand
  std::uint64_t step_number = 0;       ///< number of the step in that tree; 0: made by hand

  /// Whether write() has anything to do: rows to store, or copies to make.
  [[nodiscard]] bool writes_anything() const noexcept {
    for (std::int32_t row = 0; row < num_rows; ++row)
      if (writes[row].chunk != no_chunk) return true;
    return num_copies > 0;
  }

  /// The arrays that a PlanView describes. AttentionPlan fills one from a tree; an engine that
  /// makes a plan by hand fills its own and passes LiveView::unchecked(arrays.view()) to the
  /// kernels.
  struct Arrays {
    Array<Segment> segments;             ///< parents before children
    Array<Piece> pieces;                 ///< found through their segments
    Array<std::int32_t> row_token;       ///< [num_rows] row -> the caller's token index
    Array<std::int32_t> row_kv_len;      ///< [num_rows] path positions the row sees
    Array<std::int32_t> row_segment;     ///< [num_rows] the deepest segment of the row's path
    Array<WriteTarget> writes;           ///< [num_rows] in the caller's token order
    Array<RowCopy> copies;               ///< see RowCopy
    std::int32_t chunk_size = 0;         ///< tokens per chunk
    std::uint64_t segments_version = 0;  ///< changes with rows, segments or their row intervals
    std::uint64_t pieces_version = 0;    ///< changes when any piece or segment length changes

    /// Valid until an array is resized.
    [[nodiscard]] PlanView view() const& noexcept {
      PlanView view;
      view.num_rows = static_cast<std::int32_t>(row_token.size());
      view.num_segments = static_cast<std::int32_t>(segments.size());
      view.num_pieces = static_cast<std::int32_t>(pieces.size());
      view.num_copies = static_cast<std::int32_t>(copies.size());
      view.chunk_size = chunk_size;
      view.segments = segments.data();
      view.pieces = pieces.data();
      view.row_token = row_token.data();
      view.row_kv_len = row_kv_len.data();
      view.row_segment = row_segment.data();
      view.writes = writes.data();
      view.copies = copies.data();
      view.segments_version = segments_version;
      view.pieces_version = pieces_version;
      return view;
    }
    PlanView view() const&& = delete;  // the arrays of a temporary are gone at once
  };
};

namespace detail {
using Segment = PlanView::Segment;
using WriteTarget = PlanView::WriteTarget;
using RowCopy = PlanView::RowCopy;
using PlanArrays = PlanView::Arrays;

/// Shared by a plan, its views and the step they were built for: which view is up to date. A plan
/// may end on another thread than its step, in any order; nothing else is ordered by the number.
class ViewTicket {
 public:
  /// The number of that view, 0: none.
  [[nodiscard]] std::uint64_t current() const noexcept {
    return current_.load(std::memory_order_relaxed);
  }
  /// That view is up to date from now on.
  void set(std::uint64_t number) noexcept { current_.store(number, std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> current_{0};
};
struct ViewAccess;
}  // namespace detail

/// A plan's arrays with the proof that they stand for a step that is still there: what
/// ChunkAttention::write() and run() take. A view goes out of date when its plan builds another, or
/// when its step finishes or is dropped.
class LiveView : public PlanView {
 public:
  LiveView() = default;
  /// A view of the same step. (Moving copies, too: a view without its ticket would always look up
  /// to date.)
  LiveView(const LiveView&) = default;
  /// Becomes a view of the other's step.
  LiveView& operator=(const LiveView&) = default;

  /// A view of arrays that were made by hand: they always count as up to date.
  [[nodiscard]] static LiveView unchecked(const PlanView& arrays) {
    LiveView view;
    static_cast<PlanView&>(view) = arrays;
    return view;
  }

  /// Whether the arrays are up to date.
  [[nodiscard]] bool is_current() const noexcept {
    return !ticket_ || ticket_->current() == number_;
  }

 protected:
  /// A view that is up to date as long as the ticket says so.
  LiveView(const PlanView& arrays, std::shared_ptr<const detail::ViewTicket> ticket)
      : PlanView(arrays), ticket_(std::move(ticket)), number_(ticket_->current()) {}

 private:
  friend struct detail::ViewAccess;
  std::shared_ptr<const detail::ViewTicket> ticket_;
  std::uint64_t number_ = 0;
};

namespace detail {
/// What components see of a view beyond its public members.
struct ViewAccess {
  /// Shared by all views of one plan; null for arrays that were made by hand.
  [[nodiscard]] static const std::shared_ptr<const ViewTicket>& ticket(const LiveView& view) {
    return view.ticket_;
  }
};
}  // namespace detail

/// A sequence of which it is known in which chunks its tokens lie: Sequence, or an engine's own.
///
/// - `size()`: known tokens; `num_reserved()`: positions after them that are reserved;
///   `num_scheduled()`: positions that are computed or in a step.
/// - `for_each_run(range, f)` calls f(const Piece&) for each part of `range` inside one chunk.
template <class S>
concept PlacedSequence = requires(const S& sequence, void (*f)(const Piece&)) {
  { S::chunk_size } -> std::convertible_to<int>;
  { sequence.size() } -> std::convertible_to<std::size_t>;
  { sequence.num_reserved() } -> std::convertible_to<std::size_t>;
  { sequence.num_scheduled() } -> std::convertible_to<std::size_t>;
  sequence.for_each_run({0, 1}, f);
};

CHUNKATTN_NAMESPACE_END
