// Block tables: where a batch's K/V lies, in the form that other paged attention kernels take.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "../detail/support/check.hpp"
#include "../detail/support/config.hpp"
#include "../plan_view.hpp"
#include "../tree_options.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// The pages of a batch in compressed rows (CSR), as FlashInfer's paged wrappers and vLLM's kernels
/// take them. A page is a chunk, so the page size is the tree's ChunkSize. For trees with
/// Sharing::chunk, whose sequences fill every chunk from its start.
///
/// - `indptr` [batch + 1]: the pages of sequence i are indices[indptr[i]] up to indptr[i + 1].
/// - `indices` [indptr[batch]]: chunk indices in path order.
/// - `last_page_len` [batch]: tokens in the last page, from 1 to ChunkSize.
/// - `seq_lens` [batch]: tokens in all pages of the sequence.
/// - `qo_indptr` [batch + 1]: the query tokens of sequence i, of those in a step.
/// - `slot_mapping` [num_rows]: where the K/V of each query token goes.
class BlockTable {
 public:
  /// Forgets the sequences, keeps the memory.
  void clear() noexcept {
    indptr_.assign(1, 0);
    indices_.clear();
    last_page_len_.clear();
    seq_lens_.clear();
    qo_indptr_.assign(1, 0);
  }

  /// Adds a sequence with its first `kv_len` tokens; by default its known tokens and its drafts in
  /// an open step (of a tree of drafts the longest branch).
  /// \throws InvalidArgument, with the table unchanged, for a `kv_len` of 0 or more than the
  ///         sequence has, and if Sharing::token has left chunks of it partly used
  template <PlacedSequence Sequence>
  void add(const Sequence& sequence,
           std::size_t kv_len = (std::numeric_limits<std::size_t>::max)()) {
    const std::size_t known = sequence.size() + sequence.num_reserved();
    if (kv_len == (std::numeric_limits<std::size_t>::max)())
      kv_len = (std::max)(sequence.size(), sequence.num_scheduled());
    if (kv_len < 1 || kv_len > known) [[unlikely]]
      detail::fail_argument("kv_len", kv_len,
                            {"from 1 to the sequence's ", known, " known and reserved tokens"});
    constexpr std::int32_t page = Sequence::chunk_size;
    const std::size_t before = indices_.size();
    std::int32_t misplaced = -1;
    sequence.for_each_run({0, static_cast<std::int32_t>(kv_len)}, [&](const Piece& piece) {
      const bool continues =
          piece.begin > 0 && indices_.size() > before && indices_.back() == piece.chunk;
      if (piece.begin != piece.position % page || (piece.begin > 0 && !continues)) {
        if (misplaced < 0) misplaced = piece.position;
      } else if (!continues) {
        indices_.push_back(piece.chunk);
      }
    });
    if (misplaced >= 0) [[unlikely]] {
      indices_.resize(before);
      detail::fail_argument("sequence", "not page-aligned",
                            {"a path that fills whole chunks: position ", misplaced,
                             " does not stand at its place in a page of ", page,
                             " tokens; make the tree with Sharing::chunk"});
    }
    indptr_.push_back(static_cast<std::int32_t>(indices_.size()));
    last_page_len_.push_back((static_cast<std::int32_t>(kv_len) - 1) % page + 1);
    seq_lens_.push_back(static_cast<std::int32_t>(kv_len));
    qo_indptr_.push_back(qo_indptr_.back());
  }
  /// Adds a sequence of an open step with its query tokens: K/V up to the last of them (of a tree
  /// of drafts: of the longest branch). If sequences are added in the order of Step::add(), query
  /// token i of the table is row i of the step.
  /// \param row  what Step::add() returned for the sequence
  /// \throws InvalidArgument as above, and for a row of another sequence
  template <PlacedSequence Sequence>
  void add(const Sequence& sequence, const ScheduledSequence& row) {
    if constexpr (requires { sequence.id() == row.sequence; })
      detail::check_argument(sequence.id() == row.sequence, "row", "of another sequence",
                             "the row that Step::add() gave for the sequence");
    add(sequence, (std::min)(static_cast<std::size_t>(std::int64_t{row.position} + row.num_rows),
                             static_cast<std::size_t>(sequence.num_scheduled())));
    qo_indptr_.back() += row.num_rows;
  }

  /// [num_sequences + 1]: sequence i has the pages [indptr[i], indptr[i + 1]) of indices().
  [[nodiscard]] const std::vector<std::int32_t>& indptr() const noexcept { return indptr_; }
  /// Chunk indices of the pages, all sequences one after the other.
  [[nodiscard]] const std::vector<std::int32_t>& indices() const noexcept { return indices_; }
  /// [num_sequences]: tokens in the last page, from 1 to the page size.
  [[nodiscard]] const std::vector<std::int32_t>& last_page_len() const noexcept {
    return last_page_len_;
  }

  /// [num_sequences]: tokens of K/V, vLLM's seq_lens.
  [[nodiscard]] const std::vector<std::int32_t>& seq_lens() const noexcept { return seq_lens_; }
  /// [num_sequences + 1]: sequence i has the query tokens [qo_indptr[i], qo_indptr[i + 1]); none
  /// where it was added without a row. FlashInfer's qo_indptr and append_indptr, vLLM's
  /// query_start_loc.
  [[nodiscard]] const std::vector<std::int32_t>& qo_indptr() const noexcept { return qo_indptr_; }

  /// [num_rows] where each query token's K/V is to be stored, chunk index * page size + offset, in
  /// the order of the step's rows: vLLM's slot_mapping. Perform the plan's copies before.
  /// \param plan     what AttentionPlan::build() gave for the step
  /// \param padding  stands for tokens whose K/V is in place already
  [[nodiscard]] static std::vector<std::int64_t> slot_mapping(const PlanView& plan,
                                                              std::int64_t padding = -1) {
    std::vector<std::int64_t> mapping(static_cast<std::size_t>(plan.num_rows), padding);
    for (std::size_t row = 0; row < mapping.size(); ++row) {
      const PlanView::WriteTarget& target = plan.writes[row];
      if (target.chunk != no_chunk)
        mapping[row] = std::int64_t{target.chunk} * plan.chunk_size + target.offset;
    }
    return mapping;
  }

  /// The pages as a matrix [num_sequences][max_pages], row by row: vLLM's block_tables. Missing
  /// pages are `padding`. Throws InvalidArgument for a sequence of more than max_pages, and for
  /// more pages than memory can hold.
  [[nodiscard]] std::vector<std::int32_t> padded(std::size_t max_pages,
                                                 std::int32_t padding = 0) const {
    const std::size_t most = std::vector<std::int32_t>().max_size() / (last_page_len_.size() + 1);
    if (max_pages > most && !last_page_len_.empty()) [[unlikely]]
      detail::fail_argument("max_pages", max_pages,
                            {"at most ", most, ", for a matrix that memory can hold"});
    std::vector<std::int32_t> table(last_page_len_.size() * max_pages, padding);
    for (std::size_t i = 0; i < last_page_len_.size(); ++i) {
      const auto begin = static_cast<std::size_t>(indptr_[i]);
      const auto end = static_cast<std::size_t>(indptr_[i + 1]);
      if (end - begin > max_pages) [[unlikely]]
        detail::fail_argument("max_pages", max_pages,
                              {"at least ", end - begin, ", what sequence ", i, " has"});
      for (std::size_t p = begin; p < end; ++p) table[i * max_pages + p - begin] = indices_[p];
    }
    return table;
  }

 private:
  std::vector<std::int32_t> indptr_{0};
  std::vector<std::int32_t> indices_;
  std::vector<std::int32_t> last_page_len_;
  std::vector<std::int32_t> seq_lens_;
  std::vector<std::int32_t> qo_indptr_{0};
};

CHUNKATTN_NAMESPACE_END
