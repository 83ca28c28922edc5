// The records of the prefix tree: nodes, slots, sequences, copies, pins.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../plan_view.hpp"
#include "../../tree_options.hpp"
#include "../base/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

using SequenceIndex = std::int32_t;

using NodeIndex = std::int32_t;

inline constexpr std::int32_t none = -1;
inline constexpr NodeIndex root_node = 0;

/// Tokens of a sequence, at most.
inline constexpr std::int32_t max_length = 1 << 30;

inline constexpr std::size_t at(std::int32_t index) noexcept {
  return static_cast<std::size_t>(index);
}

/// Tokens per slot, a power of two.
struct ChunkGeometry {
  std::int32_t size = 1;
  std::int32_t shift = 0;

  explicit constexpr ChunkGeometry(std::int32_t chunk_size) noexcept : size(chunk_size) {
    while (std::int32_t{1} << shift < size) ++shift;
  }
  /// Slots before this place of a run of slots.
  [[nodiscard]] constexpr std::int32_t slots_before(std::int32_t place) const noexcept {
    return place >> shift;
  }
  /// Offset of this place in its slot.
  [[nodiscard]] constexpr std::int32_t offset(std::int32_t place) const noexcept {
    return place & (size - 1);
  }
  /// Slots that this many places take.
  [[nodiscard]] constexpr std::int32_t slots_for(std::int32_t places) const noexcept {
    return places <= 0 ? 0 : (places + size - 1) >> shift;
  }
};

enum class NodeState : std::uint8_t {
  unused,
  hidden,     ///< generated tokens of live sequences: not found by a match
  published,  ///< in the child index
  stale       ///< from before clear(): serves its live sequences, never found again
};

/// A run of tokens on consecutive places: from offset `begin` of `first_slot` to its end, over as
/// many slots as it takes, all full but the last. A node that is split keeps its slots; the two
/// halves then share the slot that was cut.
/// What a decode step touches stands in the first cache line.
struct alignas(64) TreeNode {
  NodeIndex parent = none, first_child = none, next_sibling = none, prev_sibling = none;
  std::int32_t position = 0;  ///< path position of the first token
  std::int32_t length = 0;    ///< places taken, those of reserved tokens included
  std::int32_t begin = 0;
  SlotIndex first_slot = no_slot, last_slot = no_slot;
  std::int32_t written = 0;      ///< leading tokens whose K/V is written
  std::int32_t scheduled = 0;    ///< leading tokens that are written or that a step is to write
  SequenceIndex writer = none;   ///< who is to write those that are not written
  SequenceIndex tail_of = none;  ///< the sequence whose private tail this is
  std::int32_t live = 0;         ///< live sequences at or below
  std::int32_t held = 0;         ///< sequences at or below that left and are still in use
  NodeState state = NodeState::unused;
  bool retained = false;
  std::int32_t level = 0;                ///< of retention: the highest of those that used it
  std::int32_t pins = 0;                 ///< pins of paths through it
  std::uint32_t hash = 0;                ///< of the key, while published
  NodeIndex older = none, newer = none;  ///< neighbours in the retention list
  Namespace name_space{};

  [[nodiscard]] bool active() const noexcept { return live + held > 0; }
  [[nodiscard]] std::int32_t end() const noexcept { return position + length; }
  /// The K/V of the first tokens is written.
  void set_written(std::int32_t count) noexcept {
    written = count;
    if (written == length) writer = none;
  }
};

/// The nodes of a slot form a chain from ancestor to descendant with disjoint ranges. The one at
/// its end owns the free places behind it. `next` and `prev` link the slots of one node's run.
struct SlotRecord {
  NodeIndex owner = none;
  std::int32_t nodes = 0;   ///< nodes with a range in this slot
  std::int32_t active = 0;  ///< of these, used by a live or leaving sequence
  std::int32_t pinned = 0;  ///< of these, pinned
  SlotIndex next = no_slot, prev = no_slot;
  std::int32_t pending_copies = 0;  ///< copies still to be made into this slot
};

enum class SequenceState : std::uint8_t { unused, live, leaving };

struct alignas(64) SequenceRecord {
  NodeIndex tail = none;
  std::int32_t size = 0;      ///< tokens known
  std::int32_t cursor = 0;    ///< next position to schedule
  std::int32_t computed = 0;  ///< end of what finished steps computed, places behind size included
  std::int32_t cached = 0;    ///< found written at insert
  std::int32_t reserved = 0;  ///< places behind size: drafts, and outputs that are to come
  std::uint8_t steps = 0;     ///< outstanding steps that have it
  std::uint8_t superseded = 0;  ///< of these, started on outputs that were given up
  SequenceState state = SequenceState::unused;
  bool may_wait = false;  ///< part of the path may be another sequence's to write
  std::uint32_t generation = 0;
  std::uint32_t epoch = 0;    ///< changes when outputs that are to come are given up
  std::int32_t copies = 0;    ///< pending copies from or to this sequence's path
  std::int32_t priority = 0;  ///< as the caller gave it
  std::int32_t level = 0;     ///< what the retention policy makes of it
  SequenceIndex next_free = none;
  std::uint64_t last_step = 0;  ///< the last step that it was added to
};
static_assert(sizeof(SequenceRecord) == 64, "one cache line per sequence");

/// A copy asked for by a fork, or for an accepted draft. The first step that is built after it
/// carries it; when that step has finished, the copy is done. Until then neither end is let go.
struct PendingCopy {
  RowCopy rows;
  SequenceIndex source = none, target = none;
  std::int32_t position = 0;    ///< path position of the first target row
  std::uint64_t step = 0;       ///< the outstanding step that carries it, 0: none
  std::uint64_t last_step = 0;  ///< the last one that carried it
};

/// A pinned path, from the root to `last`; none: the record is free.
struct PinRecord {
  NodeIndex last = none;
  std::uint32_t generation = 0;
};

/// Tokens [begin, begin + length) of a path, from the root to a place in `last`.
struct Match {
  NodeIndex last = root_node;  ///< deepest node reached
  std::int32_t used = 0;       ///< tokens of it that matched
  std::int32_t length = 0;     ///< tokens matched in all
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
