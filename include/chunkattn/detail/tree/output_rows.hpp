// The rows of a finished step whose outputs can be committed, as a range.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>

#include "../../tree_options.hpp"
#include "../base/check.hpp"
#include "../base/config.hpp"
#include "outputs.hpp"
#include "sequences.hpp"
#include "shared_tree.hpp"
#include "step_record.hpp"

CHUNKATTN_NAMESPACE_BEGIN

template <class Tree>
class Finished;

namespace detail {

inline StepRow row_of(const StepRecord& step, const StepEntry& entry, std::int32_t index,
                      SequenceId id) noexcept {
  StepRow row{id,           index,        entry.begin,     entry.first_row,
              entry.length, entry.drafts, entry.has_output};
  if (const auto tree = step.tree_of(entry); !tree.empty()) {
    row.num_drafts = static_cast<std::int32_t>(tree.size());
    row.num_rows += row.num_drafts - entry.drafts;
  }
  return row;
}

/// A range of the StepRow whose outputs can be committed, in the order of add(): not those of
/// sequences that have left, of parts of a prompt, or of rows that were computed behind a draft
/// that was rejected. See Finished::rows().
template <class Tree>
class OutputRows {
 public:
  /// Skips rows without output. Valid while the step's Finished is there.
  class iterator {
   public:
    using iterator_category = std::input_iterator_tag;  ///< values are made on the fly
    using value_type = StepRow;                         ///< what it gives
    using difference_type = std::ptrdiff_t;             ///< of positions
    using pointer = const StepRow*;                     ///< not used
    using reference = const StepRow;  ///< a value; const, so that `auto&` may name it

    /// At the first row from `at` on that has an output.
    iterator(const Outputs& outputs, const StepRecord& record, std::size_t at)
        : outputs_(&outputs), record_(&record), at_(at) {
      skip();
    }
    /// The row.
    reference operator*() const {
      const StepEntry& entry = record_->entries[at_];
      return row_of(*record_, entry, static_cast<std::int32_t>(at_),
                    Sequences::id_of(entry.sequence, entry.generation));
    }
    /// On to the next.
    iterator& operator++() {
      ++at_;
      skip();
      return *this;
    }
    /// Whether both stand at the same row.
    bool operator==(const iterator& other) const { return at_ == other.at_; }

   private:
    void skip() {
      while (at_ < record_->entries.size() && !outputs_->has_output(record_->entries[at_])) ++at_;
    }
    const Outputs* outputs_;
    const StepRecord* record_;
    std::size_t at_;
  };
  /// The first row. Throws InvalidArgument where the step's Finished is gone.
  [[nodiscard]] iterator begin() const {
    const StepRecord& step = record();
    return {shared_->tree->core.outputs, step, 0};
  }
  /// Behind the last. Throws as begin() does.
  [[nodiscard]] iterator end() const {
    const StepRecord& step = record();
    return {shared_->tree->core.outputs, step, step.entries.size()};
  }

 private:
  friend class Finished<Tree>;
  using Shared = SharedTree<Tree>;

  OutputRows(std::shared_ptr<const Shared> shared, const StepRecord& record)
      : shared_(std::move(shared)), record_(&record), number_(record.number) {}

  /// A record lives as long as its tree, and stands for one step after the other.
  [[nodiscard]] const StepRecord& record() const {
    if (!shared_->tree || record_->number != number_ || record_->state != StepState::finished)
        [[unlikely]]
      fail_argument("rows()", "of a step that is over",
                    "a Finished that is still there: keep it while going over its rows");
    return *record_;
  }

  std::shared_ptr<const Shared> shared_;  // the tree may be gone, and the record with it
  const StepRecord* record_;
  std::uint64_t number_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
