#include "context_part.hpp"

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace serve {

chunkattn::LiveView ContextPart::over(const chunkattn::PlanView& plan) {
  if (plan.num_copies > 0)
    throw std::invalid_argument("plan.num_copies = " + std::to_string(plan.num_copies) +
                                ": expected 0: chunks lie on several ranks");
  segments_.clear();
  pieces_.clear();
  row_kv_len_.clear();
  writes_.clear();
  for (std::int32_t s = 0; s < plan.num_segments; ++s) add_segment(plan, plan.segments[s]);
  for (std::int32_t row = 0; row < plan.num_rows; ++row) {
    row_kv_len_.push_back(visible(plan, row));
    const chunkattn::PlanView::WriteTarget target = plan.writes[row];
    const bool own = target.chunk != chunkattn::no_chunk && is_own(target.chunk);
    writes_.push_back({own ? target.chunk / size_ : chunkattn::no_chunk, target.offset});
  }
  chunkattn::PlanView view = plan;  // its rows, and who is whose parent
  view.num_pieces = static_cast<std::int32_t>(pieces_.size());
  view.segments = segments_.data();
  view.pieces = pieces_.data();
  view.row_kv_len = row_kv_len_.data();
  view.writes = writes_.data();
  return chunkattn::LiveView::unchecked(view);
}

/// The same segment with this rank's pieces, side by side: positions count its own tokens only.
/// Rows see the first tokens of their paths, so what they see of these are the first ones, too.
void ContextPart::add_segment(const chunkattn::PlanView& plan,
                              const chunkattn::PlanView::Segment& segment) {
  chunkattn::PlanView::Segment part = segment;
  part.piece_begin = static_cast<std::int32_t>(pieces_.size());
  part.position = 0;
  if (segment.parent >= 0) {
    const auto& above = segments_[static_cast<std::size_t>(segment.parent)];
    part.position = above.position + above.length;
  }
  part.length = 0;
  for (std::int32_t p = 0; p < segment.num_pieces; ++p) {
    chunkattn::Piece piece = plan.pieces[segment.piece_begin + p];
    if (!is_own(piece.chunk)) continue;
    piece.chunk /= size_;
    piece.position = part.position + part.length;
    part.length += piece.length;
    pieces_.push_back(piece);
  }
  part.num_pieces = static_cast<std::int32_t>(pieces_.size()) - part.piece_begin;
  segments_.push_back(part);
}

std::int32_t ContextPart::visible(const chunkattn::PlanView& plan, std::int32_t row) const {
  const std::int32_t kv_len = plan.row_kv_len[row];
  std::int32_t s = plan.row_segment[row];
  while (s >= 0 && plan.segments[s].position >= kv_len) s = plan.segments[s].parent;
  if (s < 0) return 0;
  const chunkattn::PlanView::Segment& segment = plan.segments[s];
  std::int32_t count = segments_[static_cast<std::size_t>(s)].position;
  for (std::int32_t p = 0; p < segment.num_pieces; ++p) {
    const chunkattn::Piece& piece = plan.pieces[segment.piece_begin + p];
    if (is_own(piece.chunk)) count += chunkattn::visible_length(piece, kv_len);
  }
  return count;
}

void merge_parts(Communicator& ranks, std::span<float> out, std::span<float> lse) {
  if (ranks.size() == 1) return;
  const auto size = static_cast<std::size_t>(ranks.rank() == 0 ? ranks.size() : 0);
  std::vector<float> outs(size * out.size()), lses(size * lse.size());
  ranks.gather(out, outs);
  ranks.gather(lse, lses);
  if (ranks.rank() == 0)
    chunkattn::merge_states(std::span<const float>(outs), lses, ranks.size(), out, lse);
  ranks.broadcast(std::as_writable_bytes(out));
  ranks.broadcast(std::as_writable_bytes(lse));
}

}  // namespace serve
