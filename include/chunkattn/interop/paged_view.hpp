// Pages of an engine's own memory as one chunk, where they lie one behind the other.
#pragma once

#include <cstdint>
#include <limits>

#include "../detail/support/check.hpp"
#include "../detail/support/config.hpp"
#include "../kv_view.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Whether join_pages() can make one chunk of this memory: the token places of all pages are at
/// equal distances, and fewer than 2^31. So it is with pages of one token, and with layouts
/// [page][token][head] (NHD) of K and of V apart.
template <class T>
[[nodiscard]] bool can_join_pages(const KvView<T>& pages) noexcept {
  const auto even = [&](std::int64_t stride_page, std::int64_t stride_token) {
    return pages.chunk_size == 1 || stride_page == pages.chunk_size * stride_token;
  };
  bool joins = pages.k_slabs == nullptr && pages.v_slabs == nullptr &&
               even(pages.stride_chunk, pages.stride_token) &&
               std::int64_t{pages.num_chunks} * pages.chunk_size <=
                   (std::numeric_limits<std::int32_t>::max)();
  if (pages.value_dim != 0) joins = joins && even(pages.v_stride_chunk, pages.v_stride_token);
  if constexpr (has_row_scales<T>)  // those of a chunk's tokens are neighbours
    joins = joins && pages.k_scale_slabs == nullptr && pages.v_scale_slabs == nullptr &&
            (pages.scales != KvScales::per_row || pages.scale_stride_chunk == pages.chunk_size);
  return joins;
}

/// The same memory as one chunk of all pages: for plans of PageGeometry::joined, which read
/// consecutive pages in one piece. Pages of a few tokens cost as little as large ones then.
/// \throws InvalidArgument unless can_join_pages()
template <class T>
[[nodiscard]] KvView<T> join_pages(const KvView<T>& pages) {
  detail::check_argument(can_join_pages(pages), "pages", "not joined",
                         "token places at equal distances through all pages, fewer than 2^31");
  KvView<T> view = pages;
  view.num_chunks = 1;
  view.chunk_size = pages.num_chunks * pages.chunk_size;
  if (pages.chunk_size == 1) {
    view.stride_token = pages.stride_chunk;
    view.v_stride_token = pages.v_stride_chunk;
  }
  return view;
}

CHUNKATTN_NAMESPACE_END
