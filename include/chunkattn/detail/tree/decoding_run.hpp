// DecodingRun: adding sequences that just decode to an open step.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../support/config.hpp"
#include "sequence_table.hpp"
#include "step_table.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// The common case of a step: one row, for the last token of a sequence whose private tail
/// continues in the chunk that it has. It touches the sequence's record, the first cache line of
/// its tail and its entry in the step, nothing else. Whatever is not that case is refused, and left
/// to TreeCore::add(). Until store() it alone changes the step, which has room for the
/// entries.
///
/// Engines decode thousands of sequences in every step, so an instruction here is one for each of
/// them: loops over a step's entries hold in locals what they would otherwise read again.
class DecodingRun {
 public:
  /// \param max_steps  outstanding steps, this one included, that a sequence may be in
  DecodingRun(Topology& topology, SequenceTable& sequences, StepRecord& step,
              std::int32_t max_steps) noexcept
      : topology_(topology),
        step_(step),
        records_(sequences.records()),
        nodes_(topology.nodes()),
        next_(step.entries.end()),
        row_(step.num_rows),
        step_number_(step.number),
        max_steps_(max_steps) {}

  /// Adds the last token of a sequence. False, with nothing changed, where more is to be asked or
  /// done.
  CHUNKATTN_INLINE bool add(SequenceIndex s, std::int32_t chunk_size) noexcept {
    SequenceRecord& record = records_[s];
    const std::int32_t begin = record.cursor;
    if (record.size + record.reserved != begin + 1 || record.last_step == step_number_ ||
        record.steps >= max_steps_ || (record.superseded | std::uint8_t{record.may_wait}) != 0)
        [[unlikely]]
      return false;
    TreeNode& tail = nodes_[record.tail];
    const std::int32_t in_tail = begin - tail.position;
    if (tail.scheduled != in_tail || tail.writer != s || in_tail < 0 || begin >= max_length - 2)
        [[unlikely]]
      return false;
    const std::int32_t offset = (tail.begin + in_tail) & (chunk_size - 1);
    if (offset == chunk_size - 1) [[unlikely]]
      return false;
    tail.length += 1;  // the output's slot
    tail.scheduled = in_tail + 1;
    record.reserved += 1;
    record.cursor = begin + 1;
    record.steps += 1;
    record.last_step = step_number_;
    StepEntry& entry = *next_++;
    entry.sequence = s;
    entry.generation = record.generation;
    entry.epoch = record.epoch;
    entry.begin = begin;
    entry.length = 1;
    entry.drafts = 0;
    entry.first_row = row_++;
    entry.chunk = tail.last_chunk;
    entry.offset = offset;
    entry.has_output = entry.drafts_known = true;
    return true;
  }
  /// Writes to the step what add() did.
  void store() noexcept {
    const auto count = static_cast<std::size_t>(next_ - step_.entries.end());
    step_.entries.take(count);
    step_.num_rows = row_;
    topology_.count_slots(count);
  }

 private:
  Topology& topology_;
  StepRecord& step_;
  SequenceRecord* records_;
  TreeNode* nodes_;
  StepEntry* next_;
  std::int32_t row_;
  std::uint64_t step_number_;
  std::int32_t max_steps_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
