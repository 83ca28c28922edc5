// AttentionPlan: what one step computes, as plain arrays for the kernels (the paper's context,
// section 3.3, generated only when the tree's shape or the batch changed).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "detail/plan/check_current.hpp"
#include "detail/plan/plan_builder.hpp"
#include "detail/support/check.hpp"
#include "detail/support/config.hpp"
#include "detail/tree/step_reader.hpp"
#include "plan_view.hpp"
#include "step.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// The arrays of a step's plan, and what the model needs: token ids and positions. Valid until its
/// step ends or its plan builds another view (is_current()); after that its members, write() and
/// run() throw InvalidArgument.
template <class Tree>
class StepView : public LiveView {
 public:
  using token_type = typename Tree::token_type;  ///< what sequences are made of

  StepView() = default;
  /// A view of the same step. Moving copies, too.
  StepView(const StepView&) = default;
  /// Becomes a view of the other's step.
  StepView& operator=(const StepView&) = default;
  /// Whether there are any rows.
  [[nodiscard]] explicit operator bool() const noexcept { return num_rows > 0; }

  /// A query token that is not known on the host yet: a draft that only the device knows, or the
  /// output of an earlier step that is not committed.
  struct UnknownToken {
    std::int32_t row = 0;       ///< its row in this step, in the caller's order
    SequenceId sequence{};      ///< the sequence
    std::int32_t position = 0;  ///< its position in the sequence
  };

  /// [num_rows] the tokens to compute, in the caller's order: the model's input ids, drafts
  /// included. If an earlier step's draft was rejected meanwhile, or an earlier step dropped, the
  /// rows after it have no effect; such a row has the token that now is at its position, or is
  /// unknown.
  /// \param placeholder  stands for each of unknown_tokens(), which the engine fills in on the
  ///                     device
  [[nodiscard]] std::vector<token_type> tokens(const token_type& placeholder) const {
    std::vector<token_type> all;
    all.reserve(detail::to_size(num_rows));
    for_each_token([&](const detail::StepEntry&, std::int32_t, const token_type* token) {
      all.push_back(token != nullptr ? *token : placeholder);
    });
    return all;
  }
  /// [num_rows] the tokens to compute, in the caller's order: the model's input ids, drafts
  /// included. Throws InvalidArgument if one is unknown.
  [[nodiscard]] std::vector<token_type> tokens() const {
    std::vector<token_type> all;
    all.reserve(detail::to_size(num_rows));
    for_each_token([&](const detail::StepEntry&, std::int32_t position, const token_type* token) {
      all.push_back(known(token, position));
    });
    return all;
  }
  /// tokens(placeholder) into memory of [num_rows] tokens, without an allocation.
  /// \throws InvalidArgument for another size
  void copy_tokens(std::span<token_type> out, const token_type& placeholder) const {
    check_size(out.size());
    std::size_t row = 0;
    for_each_token([&](const detail::StepEntry&, std::int32_t, const token_type* token) {
      out[row++] = token != nullptr ? *token : placeholder;
    });
  }
  /// tokens() into memory of [num_rows] tokens, without an allocation.
  /// \throws InvalidArgument for another size, and if a token is unknown: the tokens before it are
  ///         copied by then
  void copy_tokens(std::span<token_type> out) const {
    check_size(out.size());
    std::size_t row = 0;
    for_each_token([&](const detail::StepEntry&, std::int32_t position, const token_type* token) {
      out[row++] = known(token, position);
    });
  }
  /// The query tokens that are not known on the host yet, in the caller's order.
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
  /// [num_rows] the tokens' positions in their sequences, counted from 0, in the caller's order:
  /// for the rotary embedding. That of a draft in a tree is the last token's plus the draft's
  /// depth.
  [[nodiscard]] std::vector<std::int32_t> positions() const {
    std::vector<std::int32_t> all(detail::to_size(num_rows));
    copy_positions(all);
    return all;
  }
  /// positions() into memory of [num_rows] integers, without an allocation.
  /// \throws InvalidArgument for another size
  void copy_positions(std::span<std::int32_t> out) const {
    check_size(out.size());
    std::size_t row = 0;
    for_each_token([&](const detail::StepEntry&, std::int32_t position, const token_type*) {
      out[row++] = position;
    });
  }

 private:
  friend class AttentionPlan;
  StepView(const PlanView& arrays, std::shared_ptr<const detail::ViewTicket> ticket,
           const detail::StepHandle<Tree>& step)
      : LiveView(arrays, std::move(ticket)), shared_(step.shared), step_(&step.record()) {}

  template <class F>
  void for_each_token(const F& f) const {
    detail::check_current(*this);
    if (step_ != nullptr) shared_->tree->for_each_row(*step_, num_rows, f);
  }
  static const token_type& known(const token_type* token, std::int32_t position) {
    if (token == nullptr) [[unlikely]]
      detail::fail_argument("token at position", position,
                            "known tokens; this one is the output of a step that is not "
                            "committed: use tokens(placeholder) and unknown_tokens()");
    return *token;
  }
  void check_size(std::size_t size) const {
    detail::check_argument(size == detail::to_size(num_rows), "out.size()", size,
                           {"num_rows, ", num_rows});
  }

  std::shared_ptr<detail::SharedTree<Tree>> shared_;
  const detail::StepRecord* step_ = nullptr;  // it ends with the step
};

/// Makes the arrays of a step: its query tokens, and the K/V that each of them reads (the paper's
/// context, section 3.3).
///
/// Keep one plan over many steps; if a step still reads its plan on the host while the next one is
/// built, use one for each of them in turn. If neither PrefixTree::version() nor the list of
/// (sequence, number of query tokens) has changed since the last build, only lengths are updated:
/// O(rows), without allocation. Filling a chunk adds a piece and does not rebuild, either. A
/// rebuild costs O(rows + branches + pieces) of the step's sequences.
class AttentionPlan {
 public:
  AttentionPlan() = default;
  /// Views of `other` become views of this plan.
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

  /// Makes the arrays of an open step, whose rows keep the order of Step::add(), with the copies
  /// that forks and accepted drafts need. Earlier views of this plan, and of other plans of this
  /// step, go out of date. The result is false if the step has no rows.
  template <class Tree>
  [[nodiscard]] StepView<Tree> build(Step<Tree>& step) & {
    detail::StepReader reader(step.handle_.tree().core, step.handle_.record());
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

  /// How often build() has rebuilt the arrays.
  [[nodiscard]] std::uint64_t num_rebuilds() const noexcept { return builder_.num_rebuilds(); }

 private:
  std::shared_ptr<detail::ViewTicket> ticket_;
  std::uint64_t views_ = 0;
  detail::PlanBuilder builder_;
};

CHUNKATTN_NAMESPACE_END
