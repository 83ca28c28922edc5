// PagedView: a step as paged attention sees it, each sequence's pages by themselves, whoever else
// has them. Writes are those of the tree's plan.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <cstdint>
#include <vector>

namespace serve {

class PagedView {
 public:
  void clear() {
    segments_.clear();
    pieces_.clear();
    row_token_.clear();
    row_kv_len_.clear();
    row_segment_.clear();
  }

  /// The next rows of the step: `num_rows` positions of the sequence from `position` on.
  template <class Sequence>
  void add(const Sequence& sequence, std::int32_t position, std::int32_t num_rows) {
    const auto first_row = static_cast<std::int32_t>(row_token_.size());
    const auto first_piece = static_cast<std::int32_t>(pieces_.size());
    const auto segment = static_cast<std::int32_t>(segments_.size());
    const std::int32_t length = position + num_rows;
    sequence.for_each_run({0, length},
                          [&](const chunkattn::Piece& piece) { pieces_.push_back(piece); });
    segments_.push_back({.row_begin = first_row,
                         .row_end = first_row + num_rows,
                         .piece_begin = first_piece,
                         .num_pieces = static_cast<std::int32_t>(pieces_.size()) - first_piece,
                         .position = 0,
                         .length = length,
                         .parent = -1,
                         .num_sequences = 1});
    for (std::int32_t i = 0; i < num_rows; ++i) {
      row_token_.push_back(first_row + i);
      row_kv_len_.push_back(position + i + 1);
      row_segment_.push_back(segment);
    }
  }

  /// Good until clear(), and as long as the plan it is made from.
  [[nodiscard]] chunkattn::LiveView over(const chunkattn::PlanView& plan) const {
    chunkattn::PlanView view = plan;  // its writes and copies
    view.num_segments = static_cast<std::int32_t>(segments_.size());
    view.num_pieces = static_cast<std::int32_t>(pieces_.size());
    view.segments = segments_.data();
    view.pieces = pieces_.data();
    view.row_token = row_token_.data();
    view.row_kv_len = row_kv_len_.data();
    view.row_segment = row_segment_.data();
    return chunkattn::LiveView::unchecked(view);
  }

 private:
  std::vector<chunkattn::PlanView::Segment> segments_;
  std::vector<chunkattn::Piece> pieces_;
  std::vector<std::int32_t> row_token_, row_kv_len_, row_segment_;
};

}  // namespace serve
