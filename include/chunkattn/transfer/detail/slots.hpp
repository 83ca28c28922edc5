// Checks of the positions and the cache of a K/V transfer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "../../detail/kv/checks.hpp"
#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../../element.hpp"
#include "../../plan_view.hpp"
#include "../../tree_options.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

template <class Cache>
using cache_element = std::remove_pointer_t<decltype(std::declval<Cache&>().layer(0).k)>;

/// What a record says its elements are.
template <class Element>
[[nodiscard]] const char* element_text() {
  if constexpr (KvElement<Element>)
    return element_name<Element>();
  else
    return "other";
}

/// The view of a layer by whose tables the host finds rows: on a device another than kernels use.
template <class Cache>
[[nodiscard]] auto host_layer(Cache& cache, int layer) {
  if constexpr (requires { cache.host_layer(layer); })
    return cache.host_layer(layer);
  else
    return cache.layer(layer);
}
/// Copies bytes of a cache to host memory, and back.
template <class Cache>
void copy_out(const Cache& cache, const void* from, std::byte* to, std::size_t bytes) {
  if constexpr (requires { cache.copy_out(from, to, bytes); })
    cache.copy_out(from, to, bytes);
  else
    std::memcpy(to, from, bytes);
}
template <class Cache>
void copy_in(const Cache& cache, void* to, const std::byte* from, std::size_t bytes) {
  if constexpr (requires { cache.copy_in(to, from, bytes); })
    cache.copy_in(to, from, bytes);
  else
    std::memcpy(to, from, bytes);
}

/// Bytes of a row of K and of a row of V; 0 for V if it is in K.
template <class Cache>
[[nodiscard]] std::pair<std::size_t, std::size_t> row_bytes(const Cache& cache) {
  const auto bytes = [](int dim) {
    return static_cast<std::size_t>(dim) * sizeof(cache_element<Cache>);
  };
  const auto& options = cache.options();
  if constexpr (requires { options.v_in_k; })
    return {bytes(options.head_dim), options.v_in_k ? 0 : bytes(options.dim_of_v())};
  else
    return {bytes(options.head_dim), bytes(options.head_dim)};
}

/// Checks that the range is within the sequence, so that its end() does not overflow.
template <class Sequence>
void check_known(const Sequence& sequence, TokenRange range) {
  const auto size = static_cast<std::int64_t>(sequence.size());
  check_argument(range.begin >= 0 && range.begin <= size, "range.begin", range.begin,
                 {"0 to the sequence's end, ", size});
  check_argument(range.length >= 0 && range.length <= size - range.begin, "range.length",
                 range.length, {"an end within the sequence's ", size, " known tokens"});
}

/// Checks that the K/V of the range is in place.
template <class Sequence>
void check_written(const Sequence& sequence, TokenRange range) {
  check_known(sequence, range);
  check_argument(range.empty() || range.end() <= static_cast<std::int64_t>(sequence.num_written()),
                 "range.end()", range.end(),
                 "at most the sequence's num_written(): K/V after it is to be computed, or "
                 "to be copied by the next step");
}

/// Checks that the range is within the sequence, and that the cache has memory for it.
template <class Sequence, class Cache>
void check_slots(const Sequence& sequence, TokenRange range, Cache& cache) {
  check_known(sequence, range);
  if constexpr (requires { cache.tree_id(); })
    check_argument(cache.tree_id() == 0 || cache.tree_id() == sequence.tree_id(), "cache",
                   "of another tree", "the K/V memory of the sequence's tree");
  const auto view = cache.layer(0);
  check_argument(view.chunk_size == Sequence::chunk_size, "cache.chunk_size", view.chunk_size,
                 "the ChunkSize of the sequence's tree");
  if constexpr (has_row_scales<cache_element<Cache>>)
    for (int l = 0; l < cache.options().num_layers; ++l)
      check_row_scales(cache.layer(l), "what travels with a row is its own");
  sequence.for_each_run(range, [&](const Piece& piece) {
    check_argument(piece.chunk < view.num_chunks, "cache.num_chunks", view.num_chunks,
                   "memory for every chunk of the sequence: a cache of its tree, grown to it");
  });
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
