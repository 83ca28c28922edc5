// The records of the prefix tree and the two tables under it: slots (who holds which places of a
// slot) and the child index (which node continues a path with a given key).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../base/config.hpp"
#include "types.hpp"

CHUNKATTN_NAMESPACE_BEGIN

using NodeIndex = std::int32_t;
using SequenceIndex = std::int32_t;

namespace detail {

inline constexpr std::int32_t none = -1;
inline constexpr NodeIndex root_node = 0;

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
  std::int32_t priority = 0;
  std::int32_t pins = 0;                 ///< pins of paths through it
  std::uint32_t hash = 0;                ///< of the key, while published
  NodeIndex older = none, newer = none;  ///< neighbours in the retention list
  Namespace name_space{};

  [[nodiscard]] bool active() const noexcept { return live + held > 0; }
  [[nodiscard]] std::int32_t end() const noexcept { return position + length; }
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
  std::uint32_t epoch = 0;  ///< changes when outputs that are to come are given up
  std::int32_t copies = 0;  ///< pending copies from or to this sequence's path
  std::int32_t priority = 0;
  SequenceIndex next_free = none;
  std::uint64_t last_step = 0;  ///< the last step that it was added to
};
static_assert(sizeof(SequenceRecord) == 64, "one cache line per sequence");

/// A copy asked for by a fork. The first step that is built after it carries it; when that step
/// has finished, the copy is done. Until then neither end is let go.
struct PendingCopy {
  RowCopy rows;
  SequenceIndex source = none, target = none;
  std::uint64_t step = 0;       ///< the outstanding step that carries it, 0: none
  std::uint64_t last_step = 0;  ///< the last one that carried it
};

/// A pinned path, from the root to `last`; none: the record is free.
struct PinRecord {
  NodeIndex last = none;
  std::uint32_t generation = 0;
};

inline std::uint64_t mix_hash(std::uint64_t hash, std::uint64_t value) noexcept {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

/// Open-addressing table of published nodes by the hash of (parent, namespace, key tokens). A hash
/// only proposes a node; the caller compares.
class ChildIndex {
 public:
  [[nodiscard]] bool has_room(std::size_t count) const noexcept {
    return 2 * count + 2 <= table_.size();
  }

  /// Makes room for `count` entries in all; inserting them then cannot fail.
  void reserve(std::size_t count) {
    if (has_room(count)) return;
    const std::size_t wanted = 2 * count + 2;
    std::size_t capacity = table_.empty() ? 64 : table_.size();
    while (capacity < wanted) capacity *= 2;
    std::vector<Entry> grown(capacity);
    table_.swap(grown);
    for (const Entry& entry : grown)
      if (entry.node != none) place(entry);
  }

  void insert(std::uint32_t hash, NodeIndex node) noexcept {
    place({hash, node});
    ++size_;
  }

  void erase(std::uint32_t hash, NodeIndex node) noexcept {
    const std::size_t mask = table_.size() - 1;
    std::size_t hole = hash & mask;
    while (table_[hole].node != node) hole = (hole + 1) & mask;
    // Shift later entries of the probe run back, so that no tombstones are needed.
    for (std::size_t i = (hole + 1) & mask; table_[i].node != none; i = (i + 1) & mask) {
      const std::size_t home = table_[i].hash & mask;
      if (((i - home) & mask) >= ((i - hole) & mask)) {
        table_[hole] = table_[i];
        hole = i;
      }
    }
    table_[hole] = {};
    --size_;
  }

  /// The first node with this hash that `same(node)` confirms, or none.
  template <class Same>
  [[nodiscard]] NodeIndex find(std::uint32_t hash, const Same& same) const {
    if (table_.empty()) return none;
    const std::size_t mask = table_.size() - 1;
    for (std::size_t i = hash & mask; table_[i].node != none; i = (i + 1) & mask)
      if (table_[i].hash == hash && same(table_[i].node)) return table_[i].node;
    return none;
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }

 private:
  struct Entry {
    std::uint32_t hash = 0;
    NodeIndex node = none;
  };

  void place(Entry entry) noexcept {
    const std::size_t mask = table_.size() - 1;
    std::size_t i = entry.hash & mask;
    while (table_[i].node != none) i = (i + 1) & mask;
    table_[i] = entry;
  }

  std::vector<Entry> table_;  // power of two, at most half full
  std::size_t size_ = 0;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
