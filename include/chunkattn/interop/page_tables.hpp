// What a paged engine knows of a batch: which pages of K/V each sequence has, in the forms of vLLM
// and FlashInfer. They own nothing; PagedPlan makes a plan of them.
#pragma once

#include <cstdint>
#include <span>

#include "../detail/support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// How an engine's K/V memory is cut into pages, which are the chunks of the plan.
struct PageGeometry {
  std::int32_t page_size = 0;   ///< tokens per page (vLLM: block_size)
  std::int32_t num_pages = 0;   ///< pages that have memory: ids are from 0 to num_pages - 1
  std::int32_t null_page = -1;  ///< stands for pages that were freed, or -1: there is none
  /// The plan is for the view that join_pages() gives: one chunk of all pages, in which consecutive
  /// ones are read in one piece.
  bool joined = false;
};

/// The pages of a batch as a matrix, as vLLM has them. Entries beyond a sequence's last page may be
/// anything, and so may the row of a sequence without query tokens.
struct PageTables {
  /// [num_sequences][stride] page ids in path order (vLLM: block_table)
  std::span<const std::int32_t> table{};
  std::int64_t stride = 0;  ///< entries from a sequence's first page to that of the next sequence
  std::span<const std::int32_t> seq_lens{};  ///< [num_sequences] tokens of K/V, queries' included
  /// [num_sequences + 1] sequence i has the query tokens [query_start_loc[i], query_start_loc[i +
  /// 1]), the last ones of its seq_lens[i]
  std::span<const std::int32_t> query_start_loc{};
  /// [num_rows], or more: where the K/V of each query token goes, page * page_size + offset;
  /// negative: nowhere. Empty: to its own position in the table.
  std::span<const std::int64_t> slot_mapping{};
};

/// The pages of a batch in compressed rows (CSR), as FlashInfer's wrappers take them and BlockTable
/// gives them.
struct PageIndices {
  /// [num_sequences + 1] sequence i has the pages [indptr[i], indptr[i + 1]) of `indices`
  std::span<const std::int32_t> indptr{};
  std::span<const std::int32_t> indices{};        ///< page ids in path order
  std::span<const std::int32_t> last_page_len{};  ///< [num_sequences] tokens in the last page
  /// [num_sequences + 1] sequence i has the query tokens [qo_indptr[i], qo_indptr[i + 1]), the last
  /// ones of its K/V
  std::span<const std::int32_t> qo_indptr{};
  std::span<const std::int64_t> slot_mapping{};  ///< as of PageTables
};

CHUNKATTN_NAMESPACE_END
