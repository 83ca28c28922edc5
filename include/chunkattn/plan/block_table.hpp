// Block tables: where a batch's K/V lies, in the form that paged attention kernels take.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "../base/concepts.hpp"
#include "../base/config.hpp"
#include "../base/error.hpp"
#include "../tree/types.hpp"
#include "view.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Pages of a batch in compressed rows, as FlashInfer's paged wrappers and vLLM's kernels take
/// them; a page is a slot, the page size is the tree's ChunkSize. Made for trees with
/// Sharing::chunk, whose paths fill every slot from its start.
///
/// - `indptr` [batch + 1]: the pages of sequence i are indices[indptr[i]] up to indptr[i + 1].
/// - `indices` [indptr[batch]]: slots in path order.
/// - `last_page_len` [batch]: tokens in the last page, from 1 to ChunkSize.
class BlockTable {
 public:
  /// Forgets the sequences, keeps the memory.
  void clear() noexcept {
    indptr_.assign(1, 0);
    indices_.clear();
    last_page_len_.clear();
  }

  /// Adds the first `kv_len` places of a sequence; by default its known tokens, and what an open
  /// step has of it beyond them (drafts; of a tree the longest branch). Throws InvalidArgument,
  /// with the table unchanged, if there are none or not so many, or if Sharing::token made the path
  /// leave a slot before its end or enter one after its start.
  template <PlacedSequence Sequence>
  void add(const Sequence& sequence, std::size_t kv_len = std::numeric_limits<std::size_t>::max()) {
    const std::size_t known = sequence.size() + sequence.num_reserved();
    if (kv_len == std::numeric_limits<std::size_t>::max())
      kv_len = std::max(sequence.size(), sequence.num_scheduled());
    if (kv_len < 1 || kv_len > known) [[unlikely]]
      detail::fail_argument("kv_len", kv_len,
                            {"from 1 to the sequence's ", known, " known and reserved tokens"});
    constexpr std::int32_t page = Sequence::chunk_size;
    const std::size_t before = indices_.size();
    std::int32_t misplaced = -1;
    sequence.for_each_run({0, static_cast<std::int32_t>(kv_len)}, [&](const Piece& piece) {
      const bool continues =
          piece.begin > 0 && indices_.size() > before && indices_.back() == piece.slot;
      if (piece.begin != piece.position % page || (piece.begin > 0 && !continues)) {
        if (misplaced < 0) misplaced = piece.position;
      } else if (!continues) {
        indices_.push_back(piece.slot);
      }
    });
    if (misplaced >= 0) [[unlikely]] {
      indices_.resize(before);
      detail::fail_argument("sequence", "not page-aligned",
                            {"a path that fills whole slots: position ", misplaced,
                             " does not stand at its place in a page of ", page,
                             " tokens; make the tree with Sharing::chunk"});
    }
    indptr_.push_back(static_cast<std::int32_t>(indices_.size()));
    last_page_len_.push_back((static_cast<std::int32_t>(kv_len) - 1) % page + 1);
  }

  /// [num_sequences + 1]: sequence i has the pages [indptr[i], indptr[i + 1]) of indices().
  [[nodiscard]] const std::vector<std::int32_t>& indptr() const noexcept { return indptr_; }
  /// Slots of the pages, all sequences one after the other.
  [[nodiscard]] const std::vector<std::int32_t>& indices() const noexcept { return indices_; }
  /// [num_sequences]: tokens in the last page, from 1 to the page size.
  [[nodiscard]] const std::vector<std::int32_t>& last_page_len() const noexcept {
    return last_page_len_;
  }

  /// The same as a padded matrix [batch][max_pages], row by row: vLLM's block_tables. Pages that a
  /// sequence does not have are `padding`.
  [[nodiscard]] std::vector<std::int32_t> padded(std::size_t max_pages,
                                                 std::int32_t padding = 0) const {
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
};

CHUNKATTN_NAMESPACE_END
