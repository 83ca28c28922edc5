// Moving K/V out of the cache and back: to host memory when a sequence is preempted, to a file, to
// another machine. for_each_kv_span() finds the memory; the other functions use it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../allocator.hpp"
#include "../detail/support/check.hpp"
#include "../detail/support/config.hpp"
#include "../kv_cache.hpp"
#include "../kv_view.hpp"
#include "../plan_view.hpp"
#include "../tree_options.hpp"
#include "companion.hpp"
#include "detail/slots.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// The K/V of the positions [position, position + length) of a sequence, in one layer, KV head and
/// chunk. Row i of K is head_dim elements at k + i * stride_token; row i of V is value_dim elements
/// at v + i * v_stride_token, which with v_in_k lie in the row of K. For 8-bit K/V k_scale[i] and
/// v_scale[i] are the rows' scales; else both are null.
template <class T>
struct KvSpan {
  ChunkIndex chunk = no_chunk;    ///< index of the chunk
  int layer = 0;                  ///< which layer
  int kv_head = 0;                ///< which KV head
  std::int32_t begin = 0;         ///< token slot of the first row in the chunk
  std::int32_t position = 0;      ///< its position in the sequence
  std::int32_t length = 0;        ///< rows
  T* k = nullptr;                 ///< first K row
  T* v = nullptr;                 ///< first V row
  std::int64_t stride_token = 0;  ///< elements from a row of K to the next
  float* k_scale = nullptr;       ///< scales of the K rows, 8-bit K/V only
  float* v_scale = nullptr;       ///< scales of the V rows, 8-bit K/V only

  std::int64_t v_stride_token = 0;  ///< elements from a row of V to the next
};

/// Calls f(const KvSpan<T>&) for every layer, chunk and KV head that hold K/V of the positions
/// `range`; within a layer in path order. The memory is neither freed nor moved while the sequence
/// is live. It holds K/V below Sequence::num_written(); Sequence::loadable() may be filled in.
///
/// An engine with its own memory, on a device too, passes any KvProvider and starts its
/// asynchronous copies in `f`. Of a KvCache<Cuda> k, v and scales are device memory.
/// \throws InvalidArgument for positions that the sequence does not have, or a cache of another
///         tree
template <PlacedSequence Sequence, KvProvider Cache, class F>
void for_each_kv_span(const Sequence& sequence, TokenRange range, Cache& cache, const F& f) {
  using T = detail::cache_element<Cache>;
  detail::check_slots(sequence, range, cache);
  if (range.empty()) return;
  for (int l = 0; l < cache.options().num_layers; ++l) {
    const auto view = detail::host_layer(cache, l);
    sequence.for_each_run(range, [&](const Piece& piece) {
      for (int head = 0; head < view.num_kv_heads; ++head) {
        KvSpan<T> span;
        span.chunk = piece.chunk;
        span.layer = l;
        span.kv_head = head;
        span.begin = piece.begin;
        span.position = piece.position;
        span.length = piece.length;
        span.k = view.k_row(piece.chunk, head, piece.begin);
        span.v = view.v_row(piece.chunk, head, piece.begin);
        span.stride_token = view.stride_token;
        span.v_stride_token = view.token_stride_of_v();
        if constexpr (has_row_scales<T>) {
          span.k_scale = view.k_row_scale(piece.chunk, head, piece.begin);
          span.v_scale = view.v_row_scale(piece.chunk, head, piece.begin);
        }
        f(std::as_const(span));
      }
    });
  }
}

/// Bytes that gather_kv() writes and scatter_kv() reads for `length` tokens.
/// \throws InvalidArgument for 2^63 bytes or more
template <KvProvider Cache>
[[nodiscard]] std::size_t kv_bytes(const Cache& cache, std::size_t length) {
  using T = detail::cache_element<Cache>;
  const auto& options = cache.options();
  const std::size_t rows =
      static_cast<std::size_t>(options.num_layers) * static_cast<std::size_t>(options.num_kv_heads);
  const auto [k, v] = detail::row_bytes(cache);
  const std::size_t scales = !has_row_scales<T> ? 0 : v > 0 ? 2 : 1;
  const std::size_t per_token = rows * (k + v + scales * sizeof(float));
  detail::check_argument(length <= (~std::size_t{0} >> 1) / per_token, "length", length,
                         {"tokens of ", per_token, " bytes, in all less than 2^63"});
  return length * per_token;
}

namespace detail {

/// Pairs each row of `range` with its offset in a contiguous buffer that holds the positions
/// `held`, laid out [num_layers][K, V][num_kv_heads][held.length][dim] without regard to chunks
/// (without V where it is in K), for 8-bit elements followed by float scales [num_layers][K,
/// V][num_kv_heads][held.length].
template <class Sequence, class Cache, class Byte, class Copy>
void transfer(const Sequence& sequence, TokenRange range, Cache& cache, std::span<Byte> buffer,
              TokenRange held, const Copy& copy) {
  using T = cache_element<Cache>;
  check_argument(held.begin >= 0 && held.begin <= range.begin && held.length >= range.length &&
                     held.length - range.length >= range.begin - held.begin,
                 "held", held.begin, "positions that include those of range");
  const auto length = static_cast<std::size_t>(held.length);
  check_argument(buffer.size() == kv_bytes(cache, length), "buffer.size()", buffer.size(),
                 "kv_bytes() of the positions it holds");
  const auto heads = static_cast<std::size_t>(cache.options().num_kv_heads);
  const auto layers = static_cast<std::size_t>(cache.options().num_layers);
  // Not as a structured binding, which clang before 16 cannot capture.
  const auto bytes_of_row = row_bytes(cache);
  const std::size_t k_row = bytes_of_row.first, v_row = bytes_of_row.second;
  const std::size_t rows = heads * length;  // of K of a layer
  const bool has_v = v_row > 0;
  Byte* const scales = buffer.data() + layers * rows * (k_row + v_row);
  for_each_kv_span(sequence, range, cache, [&](const KvSpan<T>& span) {
    const auto layer = static_cast<std::size_t>(span.layer);
    const auto head = static_cast<std::size_t>(span.kv_head);
    const auto first = static_cast<std::size_t>(span.position - held.begin);
    const std::size_t at = head * length + first;
    Byte* k = buffer.data() + layer * rows * (k_row + v_row) + at * k_row;
    Byte* v = buffer.data() + layer * rows * (k_row + v_row) + rows * k_row + at * v_row;
    const auto copy_rows = [&](T* from, std::int64_t stride, Byte* to, std::size_t bytes) {
      if (stride * static_cast<std::int64_t>(sizeof(T)) == static_cast<std::int64_t>(bytes))
        return copy(from, to, bytes * static_cast<std::size_t>(span.length));  // without gaps
      for (std::int32_t i = 0; i < span.length; ++i, to += bytes)
        copy(from + i * stride, to, bytes);
    };
    copy_rows(span.k, span.stride_token, k, k_row);
    if (has_v) copy_rows(span.v, span.v_stride_token, v, v_row);
    if (span.k_scale == nullptr) return;
    const std::size_t bytes = static_cast<std::size_t>(span.length) * sizeof(float);
    Byte* const scale = scales + ((has_v ? 2 : 1) * layer * rows + at) * sizeof(float);
    copy(span.k_scale, scale, bytes);
    if (has_v) copy(span.v_scale, scale + rows * sizeof(float), bytes);
  });
}

}  // namespace detail

/// The number of the layout of gather_kv()'s buffer. It changes when the layout does: who keeps
/// such buffers longer than the program runs stores it with them, and compares it.
inline constexpr std::uint32_t kv_layout_version = 1;

/// Copies the K/V of the positions `range`, of all layers, to a contiguous buffer in host memory,
/// and waits for that. Its layout depends neither on the chunk size nor on the device.
///
/// \param buffer  kv_bytes(cache, range.length) bytes: [num_layers][K,
///                V][num_kv_heads][range.length][head_dim] (V: value_dim; with v_in_k no V); for
///                8-bit elements then float scales [num_layers][K, V][num_kv_heads][range.length]
/// \throws InvalidArgument for positions whose K/V is not in place, and a buffer of another size
template <PlacedSequence Sequence, KvProvider Cache>
void gather_kv(const Sequence& sequence, TokenRange range, Cache& cache,
               std::span<std::byte> buffer) {
  detail::check_written(sequence, range);
  detail::transfer(sequence, range, cache, buffer, range,
                   [&](const void* row, std::byte* to, std::size_t bytes) {
                     detail::copy_out(cache, row, to, bytes);
                   });
}

/// The reverse of gather_kv(): copies the K/V of the positions `range` from a buffer. Call
/// Sequence::mark_loaded() after it.
///
/// \param buffer  what gather_kv() wrote for the positions `held`
/// \param held    positions that include `range`
/// \throws InvalidArgument for positions outside Sequence::loadable(), because other sequences may
///         share them, and for a buffer of another size
template <PlacedSequence Sequence, KvProvider Cache>
void scatter_kv(const Sequence& sequence, TokenRange range, Cache& cache,
                std::span<const std::byte> buffer, TokenRange held) {
  detail::check_known(sequence, range);
  const TokenRange loadable = sequence.loadable();
  if (!range.empty() && (range.begin < loadable.begin || range.end() > loadable.end())) [[unlikely]]
    detail::fail_argument("range.begin", range.begin,
                          {"positions within the sequence's loadable() range, from ",
                           loadable.begin, " to ", loadable.end()});
  detail::transfer(sequence, range, cache, buffer, held,
                   [&](void* row, const std::byte* from, std::size_t bytes) {
                     detail::copy_in(cache, row, from, bytes);
                   });
}
/// scatter_kv() of a buffer that holds just the positions `range`.
template <PlacedSequence Sequence, KvProvider Cache>
void scatter_kv(const Sequence& sequence, TokenRange range, Cache& cache,
                std::span<const std::byte> buffer) {
  scatter_kv(sequence, range, cache, buffer, range);
}

/// A preempted sequence in host memory: its tokens, its options, and K/V.
template <class Token>
struct SwappedSequence {
  std::vector<Token> tokens;  ///< all of the sequence's tokens
  std::size_t shared = 0;     ///< first tokens whose K/V is not in `kv`: other sequences had it
  std::size_t written = 0;    ///< tokens whose K/V was in place
  std::vector<std::byte> kv;  ///< of [shared, written), as gather_kv() lays it out
  InsertOptions options;      ///< namespace, public length and priority of the sequence
  std::uint64_t tree_id = 0;  ///< the tree that it left; 0: unknown, weights are not checked
  std::uint64_t weights_epoch = 0;          ///< Sequence::weights_epoch() when it left
  std::vector<CompanionRows> companions{};  ///< of each that swap_out() was given
};

namespace detail {

/// One past the last token whose K/V resume() brings: one whose K/V is there is not computed.
template <class Token>
[[nodiscard]] std::size_t loaded_end(const SwappedSequence<Token>& swapped) {
  return swapped.options.compute_last ? (std::min)(swapped.written, swapped.tokens.size() - 1)
                                      : swapped.written;
}

}  // namespace detail

/// Preemption by swapping: copies a sequence's tokens, and its written K/V that no other live
/// sequence has (Sequence::num_shared()), to host memory and lets it leave. What steps in flight
/// compute for it is discarded; if an output was expected, the last token is computed again after
/// resume(). resume() does not copy back what the tree still has cached.
/// \param companions  what else is kept of its tokens, such as K/V of windows
template <PlacedSequence Sequence, KvProvider Cache>
[[nodiscard]] SwappedSequence<typename Sequence::token_type> swap_out(
    Sequence& sequence, Cache& cache,
    const std::type_identity_t<KvCompanions<Sequence>>& companions = {}) {
  detail::check_companions(companions);
  SwappedSequence<typename Sequence::token_type> swapped;
  swapped.tokens = sequence.tokens();
  swapped.written = sequence.num_written();
  swapped.shared = (std::min)(sequence.num_shared(), swapped.written);
  swapped.options = sequence.options();
  swapped.tree_id = sequence.tree_id();
  swapped.weights_epoch = sequence.weights_epoch();
  swapped.options.compute_last = sequence.num_uncomputed() > 0 || sequence.num_reserved() > 0;
  const TokenRange own{static_cast<std::int32_t>(swapped.shared),
                       static_cast<std::int32_t>(swapped.written - swapped.shared)};
  swapped.kv.resize(kv_bytes(cache, detail::to_size(own.length)));
  gather_kv(sequence, own, cache, swapped.kv);
  const std::size_t next = detail::end_of_all(companions, sequence, detail::loaded_end(swapped));
  for (KvCompanion<Sequence>* const one : companions)
    swapped.companions.push_back(gather_rows(sequence, one->needed(next, own), *one));
  sequence.leave();
  return swapped;
}

/// Brings a swapped sequence back, bit for bit and into its own namespace: K/V that is still cached
/// is shared, the rest is copied from `swapped`, and tokens that were never computed are left to
/// compute. If some of the first `swapped.shared` tokens are not cached any more, or if clear() was
/// called after the sequence had joined (its K/V is of old weights), all that is not cached is
/// computed again. Returns nothing if there are too few chunks; try again later.
/// \param companions  those that swap_out() was given, or none where it was given none
/// \throws InvalidArgument if `swapped.kv` has not the size for this cache, or rows are of other
///         companions
template <class Tree, KvProvider Cache>
[[nodiscard]] std::optional<typename Tree::Sequence> resume(
    Tree& tree, Cache& cache, const SwappedSequence<typename Tree::token_type>& swapped,
    const KvCompanions<typename Tree::Sequence>& companions = {}) {
  detail::check_argument(swapped.written <= swapped.tokens.size(), "swapped.written",
                         swapped.written, "at most the number of tokens");
  detail::check_argument(swapped.shared <= swapped.written, "swapped.shared", swapped.shared,
                         "at most swapped.written");
  const std::size_t length = swapped.written - swapped.shared;
  detail::check_argument(swapped.kv.size() == kv_bytes(cache, length), "swapped.kv.size()",
                         swapped.kv.size(), "kv_bytes(cache, swapped.written - swapped.shared)");
  detail::check_companions(companions);
  detail::check_argument(swapped.companions.size() == companions.size(),
                         "swapped.companions.size()", swapped.companions.size(),
                         {"rows of each of the ", companions.size(), " companions"});
  for (std::size_t i = 0; i < companions.size(); ++i)
    detail::check_rows(*companions[i], swapped.companions[i], swapped.written);
  auto sequence = tree.try_insert(swapped.tokens, swapped.options);
  if (!sequence) return sequence;
  const TokenRange held{static_cast<std::int32_t>(swapped.shared),
                        static_cast<std::int32_t>(length)};
  const bool outdated =
      swapped.tree_id != 0 &&
      (swapped.weights_epoch == 0 || (swapped.tree_id == sequence->tree_id() &&
                                      swapped.weights_epoch != sequence->weights_epoch()));
  if (outdated || sequence->num_written() < swapped.shared) return sequence;
  for (std::size_t i = 0; i < companions.size(); ++i)
    if (!companions[i]->reserve(*sequence, swapped.companions[i])) return std::nullopt;
  if (length > 0) sequence->take_over();  // what another sequence is still to write is here
  const auto load_end = static_cast<std::int32_t>(detail::loaded_end(swapped));
  for (TokenRange range = sequence->loadable(); range.begin < load_end && !range.empty();
       range = sequence->loadable()) {
    range.length = (std::min)(range.length, load_end - range.begin);
    scatter_kv(*sequence, range, cache, std::span<const std::byte>(swapped.kv), held);
    sequence->mark_loaded(range);
  }
  detail::put_back(*sequence, swapped.companions, companions);
  return sequence;
}

CHUNKATTN_NAMESPACE_END
