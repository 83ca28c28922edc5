// Preemption by swapping: K/V of a sequence that makes room, in host memory. What other live
// sequences have stays in the tree and is not copied; what the tree still has as cache when the
// sequence comes back is not copied back.
#pragma once

#include <algorithm>
#include <chunkattn/chunkattn.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention.hpp"

namespace serve {

/// K/V of the path positions `range`, as HostAttention::copy_out() lays it out.
struct SwappedKv {
  chunkattn::TokenRange range;
  std::vector<std::byte> bytes;
};

/// Where positions of a sequence lie.
template <class Sequence>
std::vector<chunkattn::Piece> pieces_of(const Sequence& sequence, chunkattn::TokenRange range) {
  std::vector<chunkattn::Piece> pieces;
  sequence.for_each_run(range, [&](const chunkattn::Piece& piece) { pieces.push_back(piece); });
  return pieces;
}

/// The positions of a sequence that are lost when it leaves.
template <class Sequence>
chunkattn::TokenRange private_range(const Sequence& sequence) {
  const std::size_t end = sequence.num_written();
  const std::size_t begin = std::min(sequence.num_shared(), end);
  return {static_cast<std::int32_t>(begin), static_cast<std::int32_t>(end - begin)};
}

template <class Sequence>
SwappedKv copy_out(const Sequence& sequence, chunkattn::TokenRange range,
                   HostAttention& attention) {
  SwappedKv kv{range, std::vector<std::byte>(static_cast<std::size_t>(range.length) *
                                             attention.bytes_per_token())};
  attention.copy_out(pieces_of(sequence, range), range, kv.bytes);
  return kv;
}

/// Puts in place what the tree has lost of a sequence that joined again; its last token is left to
/// compute. Where more was lost than was copied, that is computed again and all behind it, too.
/// Returns the tokens that were copied.
template <class Sequence>
std::size_t copy_in(Sequence& sequence, const SwappedKv& kv, HostAttention& attention) {
  const std::int32_t end = std::min(kv.range.end(), static_cast<std::int32_t>(sequence.size()) - 1);
  std::size_t copied = 0;
  for (;;) {
    chunkattn::TokenRange lost = sequence.loadable();
    lost.length = std::min(lost.end(), end) - lost.begin;
    if (lost.begin < kv.range.begin || lost.length <= 0) return copied;
    attention.copy_in(pieces_of(sequence, lost), kv.range, kv.bytes);
    sequence.mark_loaded(lost);
    copied += static_cast<std::size_t>(lost.length);
  }
}

}  // namespace serve
