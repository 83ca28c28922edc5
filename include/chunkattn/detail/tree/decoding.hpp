// The common case of a step: one row, for the last token of a sequence whose private tail goes on
// in the slot that it has. It touches the sequence's record, the first cache line of its tail and
// its entry in the step, nothing else. Whatever is not that case is refused, and Steps knows the
// rest.
//
// Engines decode thousands of sequences in every step, so an instruction here is one for each of
// them: loops over a step's entries hold in locals what they would otherwise read again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../base/config.hpp"
#include "sequences.hpp"
#include "step_record.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Adds sequences to an open step one after the other. Until store() it alone changes the step,
/// which has room for the entries.
class DecodingRun {
 public:
  /// \param max_steps  outstanding steps, this one included, that a sequence may be in
  DecodingRun(Topology& topology, Sequences& sequences, TreeStats& stats, StepRecord& step,
              std::int32_t max_steps) noexcept
      : stats_(stats),
        step_(step),
        records_(sequences.records()),
        nodes_(topology.nodes()),
        next_(step.entries.end()),
        row_(step.num_rows),
        step_number_(step.number),
        max_steps_(max_steps) {}

  /// Adds the last token of a sequence. False, with nothing changed, where more is to be asked or
  /// done, or where the handle's generation is over.
  CHUNKATTN_INLINE bool add(SequenceIndex s, std::uint32_t generation,
                            std::int32_t chunk_size) noexcept {
    SequenceRecord& record = records_[s];
    const std::int32_t begin = record.cursor;
    if (record.generation != generation || record.size + record.reserved != begin + 1 ||
        record.last_step == step_number_ || record.steps >= max_steps_ ||
        (record.superseded | std::uint8_t{record.may_wait}) != 0) [[unlikely]]
      return false;
    TreeNode& tail = nodes_[record.tail];
    const std::int32_t in_tail = begin - tail.position;
    if (tail.scheduled != in_tail || tail.writer != s || in_tail < 0 || begin >= max_length - 2)
        [[unlikely]]
      return false;
    const std::int32_t offset = (tail.begin + in_tail) & (chunk_size - 1);
    if (offset == chunk_size - 1) [[unlikely]]
      return false;
    tail.length += 1;  // the output's place
    tail.scheduled = in_tail + 1;
    record.reserved += 1;
    record.cursor = begin + 1;
    record.steps += 1;
    record.last_step = step_number_;
    StepEntry& entry = *next_++;
    entry.sequence = s;
    entry.generation = generation;
    entry.epoch = record.epoch;
    entry.begin = begin;
    entry.length = 1;
    entry.drafts = 0;
    entry.first_row = row_++;
    entry.slot = tail.last_slot;
    entry.offset = offset;
    entry.has_output = entry.drafts_known = true;
    return true;
  }
  /// Writes to the step what add() did.
  void store() noexcept {
    const auto count = static_cast<std::size_t>(next_ - step_.entries.end());
    step_.entries.take(count);
    step_.num_rows = row_;
    stats_.stored_tokens += count;
  }

 private:
  TreeStats& stats_;
  StepRecord& step_;
  SequenceRecord* records_;
  TreeNode* nodes_;
  StepEntry* next_;
  std::int32_t row_;
  std::uint64_t step_number_;
  std::int32_t max_steps_;
};

/// What the end of a step and its outputs do for such entries. Each takes the entries from `entry`
/// on as far as they are that case, and returns the first that is not, or `end`.
struct Decoding {
  /// The rows' K/V is written, their outputs are to come.
  __attribute__((noinline)) static StepEntry* finish(StepEntry* entry, StepEntry* end,
                                                     SequenceRecord* records,
                                                     TreeNode* nodes) noexcept {
    for (; entry != end; ++entry) {
      SequenceRecord& record = records[entry->sequence];
      const std::int32_t size = entry->begin + 1;
      if (entry->slot == no_slot || record.state != SequenceState::live ||
          record.epoch != entry->epoch || record.size != size) [[unlikely]]
        break;
      TreeNode& tail = nodes[record.tail];
      if (tail.writer != entry->sequence || tail.written != entry->begin - tail.position)
          [[unlikely]]
        break;
      tail.written += 1;  // it stays the writer: the output's place is its own too
      record.steps -= 1;
      record.computed = std::max(record.computed, size);
    }
    return entry;
  }

  /// Whether an output of the entry, which can be committed, only makes its sequence longer.
  [[nodiscard]] CHUNKATTN_INLINE static bool is_plain(const StepEntry& entry,
                                                      const SequenceRecord& record) noexcept {
    return entry.slot != no_slot && record.computed == record.size;
  }
  /// Commits it; its token stands behind that of the row, in the same slot.
  CHUNKATTN_INLINE static void commit(StepEntry& entry, SequenceRecord& record) noexcept {
    entry.has_output = false;
    record.size += 1;
    record.reserved -= 1;
  }
  /// Stores and commits one output of each.
  /// \param store  store(entry) stores the next output; store.ahead(entry) asks early for its place
  template <class Store>
  __attribute__((noinline)) static StepEntry* commit(StepEntry* entry, StepEntry* end,
                                                     SequenceRecord* records, Store& store) {
    Store next = store;  // in registers
    for (; entry != end; ++entry) {
      SequenceRecord& record = records[entry->sequence];
      if (!is_plain(*entry, record)) [[unlikely]]
        break;
      if (end - entry > 16) next.ahead(entry[16]);
      next(*entry);
      commit(*entry, record);
    }
    store = next;
    return entry;
  }
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
