// AttentionPlan: what one step computes, as plain arrays for the kernels (the paper's context,
// section 3.3, generated only when the tree's shape or the batch changed).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "detail/base/check.hpp"
#include "detail/base/config.hpp"
#include "detail/plan/check_current.hpp"
#include "detail/plan/plan_builder.hpp"
#include "detail/tree/step_reader.hpp"
#include "plan_view.hpp"
#include "step.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// The arrays of a step's plan, and what the model needs beside them. Ends with the step, or when
/// the plan builds another; is_current() tells.
template <class Tree>
class StepView : public LiveView {
 public:
  using token_type = typename Tree::token_type;  ///< what sequences are made of

  StepView() = default;
  /// A copy; one that is moved from stays as it is.
  StepView(const StepView&) = default;
  /// The same.
  StepView& operator=(const StepView&) = default;
  /// Whether there are any rows.
  [[nodiscard]] explicit operator bool() const noexcept { return num_rows > 0; }

  /// A query token whose value is the output of an earlier step that is not committed yet.
  struct UnknownToken {
    std::int32_t row = 0;       ///< in this step
    SequenceId sequence{};      ///< whose token it is
    std::int32_t position = 0;  ///< its path position
  };

  /// [num_rows] the tokens to compute, in the caller's row order: the model's input ids. Known
  /// drafts are what add() was given. A row whose output or draft was given up meanwhile, since a
  /// draft before it was wrong or an earlier step was dropped, counts for nothing: it has the token
  /// that the sequence has got at its position since then, or else is unknown.
  /// \param placeholder  stands for unknown_tokens(), which the engine fills in on the device
  [[nodiscard]] std::vector<token_type> tokens(const token_type& placeholder) const {
    std::vector<token_type> all;
    for_each_token([&](const detail::StepEntry&, std::int32_t, const token_type* token) {
      all.push_back(token != nullptr ? *token : placeholder);
    });
    return all;
  }
  /// The same where all are known; throws InvalidArgument where one is not.
  [[nodiscard]] std::vector<token_type> tokens() const {
    std::vector<token_type> all;
    for_each_token([&](const detail::StepEntry&, std::int32_t position, const token_type* token) {
      if (token == nullptr) [[unlikely]]
        detail::fail_argument("token at position", position,
                              "known tokens; this one is the output of a step that is not "
                              "committed: use tokens(placeholder) and unknown_tokens()");
      all.push_back(*token);
    });
    return all;
  }
  /// The query tokens that are not known to the tree yet.
  [[nodiscard]] std::vector<UnknownToken> unknown_tokens() const {
    std::vector<UnknownToken> unknown;
    std::int32_t row = 0;
    for_each_token(
        [&](const detail::StepEntry& entry, std::int32_t position, const token_type* token) {
          if (token == nullptr) unknown.push_back({row, entry.id(), position});
          ++row;
        });
    return unknown;
  }
  /// [num_rows] the tokens' path positions, in the caller's row order: for the rotary embedding.
  /// Drafts that are a tree stand as far behind the path as they are deep.
  [[nodiscard]] std::vector<std::int32_t> positions() const {
    std::vector<std::int32_t> all;
    for_each_token([&](const detail::StepEntry&, std::int32_t position, const token_type*) {
      all.push_back(position);
    });
    return all;
  }

 private:
  friend class AttentionPlan;
  StepView(const PlanView& arrays, std::shared_ptr<const detail::ViewTicket> ticket,
           const detail::StepHandle<Tree, detail::Held::step>& step)
      : LiveView(arrays, std::move(ticket)), tokens_(step) {}

  template <class F>
  void for_each_token(const F& f) const {
    detail::check_current(*this);
    tokens_.for_each_row(num_rows, f);
  }

  detail::StepTokens<Tree> tokens_;
};

/// The query tokens of one step and the K/V that each of them reads, as plain arrays.
///
/// Keep one plan over many steps, or, where a step still reads its plan on the host while the next
/// one is built, one for each of them in turn. A kept plan is cheap: if neither the tree's version
/// nor the list of (sequence, number of query tokens) changed since the last build, only lengths
/// advance: O(rows), nothing is allocated. Filling a chunk adds one piece to its sequence and is no
/// rebuild either.
class AttentionPlan {
 public:
  AttentionPlan() = default;
  /// Views of `other` go on with this one.
  AttentionPlan(AttentionPlan&& other) noexcept = default;
  /// Views of this plan go out of date.
  AttentionPlan& operator=(AttentionPlan&& other) noexcept {
    if (this != &other) {
      std::destroy_at(this);
      std::construct_at(this, std::move(other));
    }
    return *this;
  }
  ~AttentionPlan() {
    if (ticket_) ticket_->set(0);
  }

  /// Brings the arrays up to date with an open step, whose rows keep the order of Step::add().
  /// Views that this plan gave before, or another plan for this step, go out of date. The step's
  /// plan carries the row copies of forks made so far. False where the step has no rows.
  template <class Tree>
  [[nodiscard]] StepView<Tree> build(Step<Tree>& step) & {
    detail::StepReader reader(step.handle_.core(), step.handle_.record());
    if (ticket_ == nullptr) ticket_ = std::make_shared<detail::ViewTicket>();
    ticket_->set(0);
    reader.start_plan();
    if (reader.entries().empty()) return {};
    builder_.update(reader);
    PlanView view = builder_.view();
    reader.finish_plan(view, ticket_, ++views_);
    return {view, ticket_, step.handle_};
  }
  template <class Tree>
  StepView<Tree> build(Step<Tree>& step) && = delete;  // the view would read what is gone

  /// How often build() could not just advance.
  [[nodiscard]] std::uint64_t num_rebuilds() const noexcept { return builder_.num_rebuilds(); }

 private:
  std::shared_ptr<detail::ViewTicket> ticket_;
  std::uint64_t views_ = 0;
  detail::PlanBuilder builder_;
};

CHUNKATTN_NAMESPACE_END
