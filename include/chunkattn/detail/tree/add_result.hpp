// What Step::add() says: the rows that a sequence has in the step, or why it has none.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../error.hpp"
#include "../../fwd.hpp"
#include "../../tree_options.hpp"
#include "../base/check.hpp"
#include "../base/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// The rows of one sequence in a step. Rows are counted over the whole step, in the order of add().
struct StepRow {
  SequenceId sequence = SequenceId::none;  ///< whose
  std::int32_t index = 0;                  ///< how many sequences were added before it
  std::int32_t position = 0;               ///< path position of the first row
  std::int32_t first_row = 0;              ///< of q, k, v and out
  std::int32_t num_rows = 0;               ///< drafts included
  std::int32_t num_drafts = 0;             ///< the last rows are these
  /// Whether the rows reach the end of the sequence, so that there is something to sample. (A part
  /// of a longer prompt has no output.)
  bool has_output = false;

  /// The row whose logits give the first output; those of the drafts follow.
  [[nodiscard]] std::int32_t output_row() const noexcept {
    return first_row + num_rows - 1 - num_drafts;
  }
};

/// Whether Step::add() added something, or why not.
class AddStatus {
 public:
  /// Whether it was added.
  [[nodiscard]] explicit operator bool() const noexcept { return reason_ == HoldReason::none; }
  /// Why it was not added.
  [[nodiscard]] HoldReason reason() const noexcept { return reason_; }
  /// With HoldReason::waits_for_sequence: which one. Add it first, wait until it has written, or
  /// Sequence::take_over() its job.
  [[nodiscard]] SequenceId waits_for() const noexcept { return waits_for_; }
  /// With HoldReason::waits_for_step: the number of the step that has to finish first.
  [[nodiscard]] std::uint64_t step() const noexcept { return step_; }

 private:
  template <class>
  friend class Step;
  HoldReason reason_ = HoldReason::none;
  SequenceId waits_for_ = SequenceId::none;
  std::uint64_t step_ = 0;
};

/// What Step::add() says of a sequence: its rows, or why there are none.
class AddResult : public AddStatus {
 public:
  /// Its rows. Throws if it was not added.
  [[nodiscard]] const StepRow& row() const& {
    check_added();
    return row_;
  }
  /// The same of a temporary.
  [[nodiscard]] StepRow row() const&& {
    check_added();
    return row_;
  }

 private:
  void check_added() const {
    detail::check_argument(static_cast<bool>(*this), "row()", "of a sequence that was not added",
                           "a result that is true; reason() says why this one is not");
  }

  template <class>
  friend class Step;
  StepRow row_;
};

/// What Step::add() says of many sequences: all were added, or none, and why.
class AddAllResult : public AddStatus {
 public:
  /// Where none was added: the first that could not be, counted from 0.
  [[nodiscard]] std::size_t held_index() const noexcept { return held_index_; }

 private:
  template <class>
  friend class Step;
  std::size_t held_index_ = 0;
};

CHUNKATTN_NAMESPACE_END
