// A plan's arrays, owned: what a PlanView looks at.
#pragma once

#include <cstdint>

#include "../../plan_view.hpp"
#include "../base/array.hpp"
#include "../base/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// The arrays that PlanView describes. AttentionPlan fills one from a tree; an engine that makes a
/// plan by hand fills its own and passes LiveView::unchecked(arrays.view()) to the kernels.
struct PlanArrays {
  Array<Segment> segments;           ///< parents before children
  Array<Piece> pieces;               ///< found through their segments
  Array<std::int32_t> row_token;     ///< [num_rows] row -> the caller's token index
  Array<std::int32_t> row_kv_len;    ///< [num_rows] path positions the row sees
  Array<std::int32_t> row_segment;   ///< [num_rows] the deepest segment of the row's path
  Array<WriteTarget> writes;         ///< [num_rows] in the caller's token order
  Array<RowCopy> copies;             ///< row copies before this step writes
  std::int32_t chunk_size = 0;       ///< tokens per slot
  std::uint64_t topology = 0;        ///< changes when rows, segments or their row intervals change
  std::uint64_t pieces_version = 0;  ///< changes when any piece or segment length changes

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
    view.topology = topology;
    view.pieces_version = pieces_version;
    return view;
  }
  PlanView view() const&& = delete;  // the arrays of a temporary are gone at once
};

CHUNKATTN_NAMESPACE_END
