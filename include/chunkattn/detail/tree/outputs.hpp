// Outputs of finished steps: which can be committed, and what a sequence is once they are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../base/check.hpp"
#include "../base/config.hpp"
#include "decoding.hpp"
#include "sequences.hpp"
#include "step_record.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

class Outputs {
 public:
  Outputs(Topology& topology, Sequences& sequences) : topology_(topology), sequences_(sequences) {}

  /// Whether the entry's outputs can still be committed.
  [[nodiscard]] bool has_output(const StepEntry& entry) const noexcept {
    const SequenceRecord& record = sequences_[entry.sequence];  // leaving raises the generation
    return entry.has_output && record.generation == entry.generation && record.epoch == entry.epoch;
  }
  /// How many entries has_output(). Throws InvalidArgument where one of them cannot be committed
  /// yet.
  [[nodiscard]] std::size_t count(const StepRecord& step) const {
    if (has_all(step)) return step.entries.size();
    std::size_t outputs = 0;
    for (const StepEntry& entry : step.entries) {
      if (!has_output(entry)) continue;
      check_order(entry);
      ++outputs;
    }
    return outputs;
  }
  /// Throws InvalidArgument unless the entry's outputs can be committed now, `count` of them.
  void check(const StepEntry& entry, std::size_t count) const {
    check(entry);
    if (count != 1 && entry.drafts == 0) [[unlikely]]
      fail_argument("outputs.size()", count, "1: the row has no drafts");
    if (count < 1 || count > at(entry.drafts) + 1) [[unlikely]]
      fail_argument("outputs.size()", count,
                    {"1 to ", entry.drafts + 1, ", the row's drafts and one more"});
    check_order(entry);
  }
  /// Throws InvalidArgument unless outputs of the entry can be committed at some time.
  void check(const StepEntry& entry) const {
    if (!has_output(entry)) [[unlikely]]
      fail_argument("row", "without output",
                    "a row of Finished::rows(): live, not superseded, not committed yet");
  }

  /// The tokens that were stored from the entry's output position on are known: accepted drafts,
  /// then one more, which is the next to be computed.
  /// \param on_trunk  the accepted drafts stand at these places
  void commit(StepRecord& step, StepEntry& entry, std::int32_t count,
              bool on_trunk = true) noexcept {
    SequenceRecord& record = sequences_[entry.sequence];
    --step.num_outputs;
    if (count == 1 && Decoding::is_plain(entry, record)) return Decoding::commit(entry, record);
    TreeNode& tail = topology_.node(record.tail);
    const std::int32_t first = record.size - tail.position;
    entry.has_output = false;
    record.size += count;
    record.reserved -= count;
    if (count <= entry.drafts || !on_trunk) [[unlikely]] {
      record.computed = std::min(record.computed, record.size - 1);  // a draft's, at that place
      sequences_.drop_reserved(record);
      record.cursor = record.size - 1;
      tail.scheduled = std::min(tail.scheduled, record.cursor - tail.position);
    }
    if (tail.written == first)  // else an earlier position is still to be computed
      tail.set_written(std::min(record.computed, record.size) - tail.position);
  }
  /// One output of each entry that has one, all of which count() has checked.
  /// \param store  as for Decoding::commit
  template <class Store>
  void commit_all(StepRecord& step, Store store) {
    const bool all = has_all(step);
    StepEntry* const end = step.entries.end();
    for (StepEntry* entry = step.entries.begin();; ++entry) {
      if (all) {
        StepEntry* const first = entry;
        entry = Decoding::commit(first, end, sequences_.records(), store);
        step.num_outputs -= static_cast<std::int32_t>(entry - first);
      }
      if (entry == end) break;
      if (!all && !has_output(*entry)) continue;
      store(*entry);
      commit(step, *entry, 1);
    }
  }
  /// Those that were not committed are not any more.
  void give_up(const StepRecord& step) noexcept {
    if (step.num_outputs == 0) return;
    for (const StepEntry& entry : step.entries)
      if (has_output(entry)) sequences_.drop_reserved(sequences_[entry.sequence]);
  }

 private:
  /// Whether nothing has come between the end of the step, when each of its entries had one output
  /// to come, and this.
  [[nodiscard]] bool has_all(const StepRecord& step) const noexcept {
    return step.all_outputs && at(step.num_outputs) == step.entries.size() &&
           step.outputs_given_up == sequences_.outputs_given_up();
  }
  void check_order(const StepEntry& entry) const {
    const SequenceRecord& record = sequences_[entry.sequence];
    if (entry.output_position() != record.size) [[unlikely]]
      fail_argument(
          "position of the row's output", entry.output_position(),
          {record.size, ": commit the outputs of the earlier step first, or drop its Finished"});
  }

  Topology& topology_;
  Sequences& sequences_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
