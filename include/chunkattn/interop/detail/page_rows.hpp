// The sequences of a batch, from page tables of either form: checks all but the page ids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "../../detail/support/array.hpp"
#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../page_tables.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// One sequence of a batch. Without query tokens nothing else of it is looked at.
struct PageRow {
  const std::int32_t* pages = nullptr;  ///< [num_pages]
  std::int32_t seq_len = 0;
  std::int32_t num_pages = 0;    ///< those that hold its seq_len tokens
  std::int32_t full_pages = 0;   ///< of these, without the last one if that is partly filled
  std::int32_t first_token = 0;  ///< of its query tokens, in the caller's order
  std::int32_t num_queries = 0;
};

/// "name[index]"
CHUNKATTN_COLD inline std::string indexed_name(const char* name, std::size_t index) {
  return joined({name, "[", index, "]"});
}

inline const PageGeometry& checked(const PageGeometry& geometry) {
  check_argument(geometry.page_size > 0, "geometry.page_size", geometry.page_size, "at least 1");
  check_argument(geometry.num_pages > 0, "geometry.num_pages", geometry.num_pages, "at least 1");
  if (geometry.null_page < -1 || geometry.null_page >= geometry.num_pages) [[unlikely]]
    fail_argument("geometry.null_page", geometry.null_page,
                  {"a page from 0 to ", geometry.num_pages - 1, ", or -1"});
  const std::int64_t tokens = std::int64_t{geometry.num_pages} * geometry.page_size;
  check_argument(!geometry.joined || tokens <= (std::numeric_limits<std::int32_t>::max)(),
                 "geometry.joined", "true",
                 "fewer than 2^31 tokens in all pages, or pages that are not joined");
  return geometry;
}

/// Lists the sequences of a batch; keeps its memory.
class PageRows {
 public:
  /// \throws InvalidArgument for arrays that do not fit each other
  void assign(const PageTables& tables, const PageGeometry& geometry) {
    start(tables.seq_lens.size(), "query_start_loc", tables.query_start_loc);
    for (std::size_t s = 0; s < rows_.size(); ++s) {
      PageRow& row = rows_[s];
      if (row.num_queries == 0) continue;
      set_length(row, tables.seq_lens[s], geometry, [&] { return indexed_name("seq_lens", s); });
      if (row.num_pages > tables.stride) [[unlikely]]
        fail_argument("stride", tables.stride,
                      {"at least ", row.num_pages, ": the pages of sequence ", s});
      const std::size_t size = tables.table.size();
      const std::size_t needed = to_size(row.num_pages);
      if (size < needed || (s > 0 && (size - needed) / s < to_size(tables.stride))) [[unlikely]]
        fail_argument("table.size()", size,
                      {"stride * ", s, " + ", needed, " or more, for the pages of sequence ", s});
      row.pages = tables.table.data() + s * to_size(tables.stride);
    }
    set_slots(tables.slot_mapping, geometry);
  }
  /// \throws InvalidArgument for arrays that do not fit each other
  void assign(const PageIndices& indices, const PageGeometry& geometry) {
    const std::size_t count = indices.last_page_len.size();
    start(count, "qo_indptr", indices.qo_indptr);
    check_indptr("indptr", indices.indptr, count);
    const auto num_indices = to_size(indices.indptr[count]);
    if (indices.indices.size() < num_indices) [[unlikely]]
      fail_argument("indices.size()", indices.indices.size(),
                    {"at least ", num_indices, ", the last of indptr"});
    for (std::size_t s = 0; s < count; ++s) {
      PageRow& row = rows_[s];
      if (row.num_queries == 0) continue;
      const std::int64_t num_pages = indices.indptr[s + 1] - indices.indptr[s];
      const std::int32_t last = indices.last_page_len[s];
      if (num_pages > 0 && (last < 1 || last > geometry.page_size)) [[unlikely]]
        fail_argument(indexed_name("last_page_len", s), last,
                      {"from 1 to the page size, ", geometry.page_size});
      const std::int64_t seq_len = num_pages == 0 ? 0 : (num_pages - 1) * geometry.page_size + last;
      set_length(row, seq_len, geometry, [&] { return joined({"tokens of sequence ", s}); });
      row.pages = indices.indices.data() + indices.indptr[s];
    }
    set_slots(indices.slot_mapping, geometry);
  }

  [[nodiscard]] const Array<PageRow>& list() const noexcept { return rows_; }
  [[nodiscard]] std::int32_t num_queries() const noexcept { return num_queries_; }
  /// [num_queries()] of the caller's slot mapping; null if there is none.
  [[nodiscard]] const std::int64_t* slots() const noexcept { return slots_; }

 private:
  // Lists `count` sequences with their query tokens.
  void start(std::size_t count, const char* name, std::span<const std::int32_t> indptr) {
    check_indptr(name, indptr, count);
    rows_.assign(count, PageRow{});
    for (std::size_t s = 0; s < count; ++s) {
      rows_[s].first_token = indptr[s];
      rows_[s].num_queries = indptr[s + 1] - indptr[s];
    }
    num_queries_ = indptr[count];
  }

  static void check_indptr(const char* name, std::span<const std::int32_t> indptr,
                           std::size_t count) {
    if (indptr.size() != count + 1) [[unlikely]]
      fail_argument(joined({name, ".size()"}), indptr.size(),
                    {"one more than the ", count, " sequences"});
    if (indptr[0] != 0) [[unlikely]]
      fail_argument(indexed_name(name, 0), indptr[0], "0");
    for (std::size_t s = 0; s < count; ++s)
      if (indptr[s + 1] < indptr[s]) [[unlikely]]
        fail_argument(indexed_name(name, s + 1), indptr[s + 1],
                      {"at least the one before, ", indptr[s]});
  }

  template <class Name>
  static void set_length(PageRow& row, std::int64_t seq_len, const PageGeometry& geometry,
                         const Name& name) {
    const std::int64_t most =
        std::int64_t{(std::numeric_limits<std::int32_t>::max)()} - geometry.page_size;
    if (seq_len < 0 || seq_len > most) [[unlikely]]
      fail_argument(name(), seq_len, {"from 0 to ", most});
    if (seq_len > 0 && seq_len < row.num_queries) [[unlikely]]
      fail_argument(name(), seq_len,
                    {"at least its ", row.num_queries, " query tokens, or 0 for padding"});
    row.seq_len = static_cast<std::int32_t>(seq_len);
    row.full_pages = row.seq_len / geometry.page_size;
    row.num_pages = row.full_pages + (row.seq_len % geometry.page_size > 0 ? 1 : 0);
  }

  void set_slots(std::span<const std::int64_t> mapping, const PageGeometry& geometry) {
    slots_ = mapping.empty() ? nullptr : mapping.data();
    if (slots_ == nullptr) return;
    if (mapping.size() < to_size(num_queries_)) [[unlikely]]
      fail_argument("slot_mapping.size()", mapping.size(),
                    {"0, or at least the ", num_queries_, " query tokens"});
    const std::int64_t end = std::int64_t{geometry.num_pages} * geometry.page_size;
    for (std::size_t i = 0; i < to_size(num_queries_); ++i)
      if (slots_[i] >= end) [[unlikely]]
        fail_argument(indexed_name("slot_mapping", i), slots_[i],
                      {"less than num_pages * page_size = ", end});
  }

  Array<PageRow> rows_;
  std::int32_t num_queries_ = 0;
  const std::int64_t* slots_ = nullptr;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
