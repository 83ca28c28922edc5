// Context parallelism: the chunks of a tree dealt out to ranks, which attend each over its own.
//
// All ranks have the same tree, which knows tokens only, and build the same steps; rank r of n
// keeps the K and V of the chunks s with s % n == r, as its chunk s / n. A sequence's chunks get
// indices one after the other, so each rank has about as many positions of a long one. What a rank
// attends over is a plan of its own, of the tokens that it has; the results, each with its lse,
// merge to those over all.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <cstdint>
#include <span>
#include <vector>

#include "../ranks/communicator.hpp"

namespace serve {

/// A rank's part of a step.
class ContextPart {
 public:
  explicit ContextPart(const Communicator& ranks) : rank_(ranks.rank()), size_(ranks.size()) {}

  /// Chunks that this rank needs memory for where the tree has `num_chunks`.
  [[nodiscard]] std::size_t num_chunks(std::size_t num_chunks) const {
    const auto n = static_cast<std::size_t>(size_), r = static_cast<std::size_t>(rank_);
    return (num_chunks + n - 1 - r) / n;
  }

  /// What write() and run() take for this rank's K/V. Rows that see none of it get 0 and an lse of
  /// minus infinity. Good until the next call, and as long as `plan`.
  /// \throws std::invalid_argument where rows are to be copied from chunk to chunk, which may be
  ///         from rank to rank; trees with TreeOptions::Sharing::chunk have no copies
  [[nodiscard]] chunkattn::LiveView over(const chunkattn::PlanView& plan);

 private:
  [[nodiscard]] bool is_own(chunkattn::ChunkIndex chunk) const { return chunk % size_ == rank_; }
  void add_segment(const chunkattn::PlanView& plan, const chunkattn::PlanView::Segment& segment);
  /// How many of this rank's tokens a row sees.
  [[nodiscard]] std::int32_t visible(const chunkattn::PlanView& plan, std::int32_t row) const;

  int rank_, size_;
  std::vector<chunkattn::PlanView::Segment> segments_;
  std::vector<chunkattn::Piece> pieces_;
  std::vector<std::int32_t> row_kv_len_;
  std::vector<chunkattn::PlanView::WriteTarget> writes_;
};

/// The results over all ranks' parts, merged in the order of the ranks: the same bits on all.
/// \param out  [rows][num_qo_heads][head_dim], of run()
/// \param lse  [rows][num_qo_heads]
void merge_parts(Communicator& ranks, std::span<float> out, std::span<float> lse);

}  // namespace serve
