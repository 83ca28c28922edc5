// SequenceTable: sequences, their paths, and the slots at the end of their private tails.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "../../tree_options.hpp"
#include "../support/array.hpp"
#include "../support/config.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

enum class SequenceState : std::uint8_t { free, live, leaving };

struct alignas(64) SequenceRecord {
  NodeIndex tail = none;
  std::int32_t size = 0;        ///< tokens known
  std::int32_t cursor = 0;      ///< next position to schedule
  std::int32_t computed = 0;    ///< end of what finished steps computed, slots after size included
  std::int32_t cached = 0;      ///< found written at insert
  std::int32_t reserved = 0;    ///< slots after size: drafts, and outputs that are to come
  std::uint8_t steps = 0;       ///< outstanding steps that have it
  std::uint8_t superseded = 0;  ///< of these, started on outputs that were discarded
  SequenceState state = SequenceState::free;
  bool may_wait = false;  ///< part of the path may be another sequence's to write
  std::uint32_t generation = 0;
  std::uint32_t epoch = 0;    ///< changes when outputs that are to come are discarded
  std::int32_t copies = 0;    ///< pending copies from or to this sequence's path
  std::int32_t priority = 0;  ///< as the caller gave it
  std::int32_t level = 0;     ///< what the retention policy makes of it
  SequenceIndex next_free = none;
  std::uint64_t last_step = 0;  ///< the last step that it was added to
};
static_assert(sizeof(SequenceRecord) == 64, "one cache line per sequence");

class SequenceTable {
 public:
  SequenceTable(Topology& topology, TreeStats& stats) : topology_(topology), stats_(stats) {}

  [[nodiscard]] SequenceRecord& operator[](SequenceIndex s) noexcept {
    return records_[to_size(s)];
  }
  [[nodiscard]] const SequenceRecord& operator[](SequenceIndex s) const noexcept {
    return records_[to_size(s)];
  }
  /// [num_indices()] until one joins.
  [[nodiscard]] SequenceRecord* records() noexcept { return records_.data(); }
  /// Indices of sequences are below this.
  [[nodiscard]] std::size_t num_indices() const noexcept { return records_.size(); }
  [[nodiscard]] std::size_t capacity() const noexcept { return records_.capacity(); }
  /// Never given to another sequence of this tree.
  [[nodiscard]] SequenceId id_of(SequenceIndex s) const noexcept {
    const SequenceRecord& record =
        records_[to_size(s)];  // leaving has raised the generation already
    return sequence_id(s, record.generation - (record.state == SequenceState::leaving ? 1 : 0));
  }
  [[nodiscard]] std::size_t num_live() const noexcept { return stats_.live_sequences; }

  // ---- records -------------------------------------------------------------------------------

  /// Makes room for one more, so that add() cannot fail.
  void reserve() { records_.reserve_more(1); }
  SequenceIndex add() noexcept {
    SequenceIndex s = free_records_;
    if (s != none) {
      free_records_ = records_[to_size(s)].next_free;
      records_[to_size(s)] = {.state = SequenceState::live,
                              .generation = records_[to_size(s)].generation};
    } else {
      s = static_cast<SequenceIndex>(records_.size());
      records_.push_back({.state = SequenceState::live});
    }
    ++stats_.live_sequences;
    return s;
  }
  /// It is live no longer. Its record stays until remove().
  void leave(SequenceIndex s) noexcept {
    SequenceRecord& record = records_[to_size(s)];
    record.state = SequenceState::leaving;
    ++record.generation;
    --stats_.live_sequences;
    ++stats_.leaving_sequences;
    ++version_;
    ++discarded_outputs_;
  }
  void remove(SequenceIndex s) noexcept {
    SequenceRecord& record = records_[to_size(s)];
    record.tail = none;
    record.state = SequenceState::free;
    --stats_.leaving_sequences;
    if (record.generation == last_generation) [[unlikely]]
      return;  // stays unused: the next would have the id of its first sequence
    record.next_free = free_records_;
    free_records_ = s;
  }

  // ---- paths ---------------------------------------------------------------------------------

  [[nodiscard]] TreeNode& tail(SequenceIndex s) noexcept {
    return topology_.node(records_[to_size(s)].tail);
  }
  /// Calls f(node, offset in the node, length) for the parts of `range` that each node of the path
  /// holds, last first.
  template <class F>
  void for_each_node(SequenceIndex s, TokenRange range, const F& f) const {
    for (NodeIndex i = records_[to_size(s)].tail; i != root_node; i = topology_.node(i).parent) {
      const TreeNode& n = topology_.node(i);
      const std::int32_t begin = (std::max)(range.begin, n.position);
      const std::int32_t end = (std::min)(range.end(), n.end());
      if (begin < end) f(i, begin - n.position, end - begin);
      if (begin == range.begin) return;
    }
  }
  /// The node of the path that holds this position.
  [[nodiscard]] NodeIndex node_of(SequenceIndex s, std::int32_t position) const noexcept {
    NodeIndex n = records_[to_size(s)].tail;
    while (topology_.node(n).position > position) n = topology_.node(n).parent;
    return n;
  }
  /// Leading slots of the path that other live sequences have, too.
  [[nodiscard]] std::int32_t num_shared(SequenceIndex s) const noexcept {
    NodeIndex n = records_[to_size(s)].tail;
    while (n != root_node && topology_.node(n).live < 2) n = topology_.node(n).parent;
    return n == root_node ? 0 : topology_.node(n).end();
  }
  /// Leading tokens of the path that every tenant of the adapter may share.
  [[nodiscard]] std::int32_t public_length(SequenceIndex s) const noexcept {
    NodeIndex n = records_[to_size(s)].tail;
    while (n != root_node && !topology_.node(n).name_space.is_public) n = topology_.node(n).parent;
    return topology_.node(n).end();
  }

  // ---- the private tail ----------------------------------------------------------------------

  /// Chunks that `count` further slots would take.
  [[nodiscard]] std::size_t chunks_needed(SequenceIndex s, std::size_t count) const noexcept {
    const std::size_t room = to_size(topology_.room(topology_.node(records_[to_size(s)].tail)));
    return count <= room ? 0 : (count - room - 1) / to_size(topology_.geometry.size) + 1;
  }
  /// Discards the slots after the first `keep` reserved ones. Where a step still uses the tail,
  /// its chunks stay with it.
  void shrink_reserved(SequenceRecord& record, std::int32_t keep) noexcept {
    shrink_reserved(record, keep, record.steps > 0);
  }
  void shrink_reserved(SequenceRecord& record, std::int32_t keep, bool keep_chunks) noexcept {
    record.reserved = keep;
    const std::int32_t end = record.size + keep;
    record.cursor = (std::min)(record.cursor, end);
    record.computed = (std::min)(record.computed, end);
    const std::int32_t length = end - topology_.node(record.tail).position;
    if (keep_chunks)
      topology_.shorten(record.tail, length);
    else if (topology_.release_slots(record.tail, length))
      ++version_;
  }
  /// The outputs that are to come are discarded: their slots, and the steps in flight that start
  /// on them, count for nothing.
  void drop_reserved(SequenceRecord& record) noexcept {
    if (record.reserved == 0) return;
    ++discarded_outputs_;
    ++record.epoch;
    record.superseded = record.steps;
    shrink_reserved(record, 0);
  }
  /// A new, empty tail below `parent`.
  void add_tail(SequenceIndex s, NodeIndex parent, Namespace name_space) noexcept {
    SequenceRecord& record = records_[to_size(s)];
    record.tail = topology_.add(parent, name_space, record.level, NodeState::unpublished);
    topology_.node(record.tail).live = 1;
    topology_.node(record.tail).tail_of = s;
  }
  /// The whole tail becomes an inner node; the sequence continues in an empty one.
  void retire_tail(SequenceIndex s) noexcept {
    SequenceRecord& record = records_[to_size(s)];
    const NodeIndex old = record.tail;
    if (record.steps == 0) topology_.release_slots(old, topology_.node(old).length);
    add_tail(s, old, topology_.node(old).name_space);
    topology_.node(old).tail_of = none;
    // No other node gets the slots after the tokens that steps in flight may still write.
    topology_.move_spare_slots(old, record.tail, /*claim_end=*/record.steps > 0);
  }

  /// Changes whenever a plan over live sequences may have to be rebuilt.
  [[nodiscard]] std::uint64_t version() const noexcept { return version_; }
  void change() noexcept { ++version_; }
  /// Counts what may keep outputs that are to come from being committed: sequences that left, and
  /// outputs that were discarded.
  [[nodiscard]] std::uint64_t discarded_outputs() const noexcept { return discarded_outputs_; }

 private:
  static constexpr std::uint32_t last_generation = (std::numeric_limits<std::uint32_t>::max)();

  Topology& topology_;
  TreeStats& stats_;
  Array<SequenceRecord> records_;
  SequenceIndex free_records_ = none;
  std::uint64_t version_ = 1;
  std::uint64_t discarded_outputs_ = 0;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
