// Slots: the indices under which every layer keeps K and V of a chunk, and what lies in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Index of a slot: one chunk's place in every layer's K/V memory.
using SlotIndex = std::int32_t;
inline constexpr SlotIndex no_slot = -1;

/// Tokens [begin, begin + length) of `slot` hold the path positions [position, position + length).
struct Piece {
  SlotIndex slot;         ///< the chunk
  std::int32_t begin;     ///< first token place inside the slot
  std::int32_t length;    ///< token places
  std::int32_t position;  ///< path position of the first one
};

/// How many of the piece's tokens, its first ones, a row sees that sees the path positions below
/// `kv_len` (`PlanView::row_kv_len`): 0 to `piece.length`.
CHUNKATTN_HD constexpr std::int32_t visible_length(const Piece& piece,
                                                   std::int32_t kv_len) noexcept {
  const std::int32_t seen = kv_len - piece.position;
  return seen < 0 ? 0 : (seen < piece.length ? seen : piece.length);
}

/// K/V rows [source_begin, +length) of source_slot are to be copied to target_slot, in every layer,
/// before anything is written. Doing it twice is harmless.
struct RowCopy {
  SlotIndex source_slot;      ///< chunk to copy from
  std::int32_t source_begin;  ///< first token place there
  SlotIndex target_slot;      ///< chunk to copy to
  std::int32_t target_begin;  ///< first token place there
  std::int32_t length;        ///< token places to copy
};

namespace detail {
class WriteChecks;
}

/// How many slots a tree has handed out, for K/V memory that follows it: valid wherever the tree is
/// moved, and 0 once it is gone.
struct SlotSource {
  std::shared_ptr<const void> tree;                     ///< keeps what it reads alive
  std::size_t (*slots_of)(const void* tree) = nullptr;  ///< reads it
  std::uint64_t tree_id = 0;                            ///< of the tree; 0: there is none
  /// Told of the tree's steps, for KvCacheOptions::check_writes; null: nobody is.
  std::shared_ptr<detail::WriteChecks> write_checks{};

  /// One more than the largest slot index handed out.
  [[nodiscard]] std::size_t num_slots() const { return tree ? slots_of(tree.get()) : 0; }
};

CHUNKATTN_NAMESPACE_END
