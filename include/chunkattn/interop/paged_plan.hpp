// PagedPlan: a plan for the page tables of any paged engine, without a tree. Pages that sequences
// have in common become shared segments: chunk-first attention without the prefix tree.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "../detail/support/config.hpp"
#include "../plan_view.hpp"
#include "detail/page_forest.hpp"
#include "detail/page_rows.hpp"
#include "page_tables.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Makes the plan of a step from an engine's page tables: what ChunkAttention::write() and run()
/// take, for K/V in the engine's own pages. Equal ids say equal K/V: the leading pages that
/// sequences have in common, and that are full in each of them, are read once for all of these.
/// Freed pages (PageGeometry::null_page) are in the plan, so attention must hide them:
/// SlidingWindow. What is behind them is shared by sequences that have freed equally many.
///
/// Rows are in the order of query tokens. A sequence without query tokens has no part in the plan;
/// query tokens of a sequence of 0 tokens are padding: they see nothing, their outputs are 0.
///
/// Keep one plan over many steps; if a step still reads its plan on the host while the next one is
/// built, use one for each of them in turn. If nothing has changed since the last build but
/// lengths, and pages were added, page ids are compared and the plan is only updated; else it is
/// rebuilt: O(page ids + n log n) for n sequences.
class PagedPlan {
 public:
  /// \throws InvalidArgument for sizes that make no sense
  explicit PagedPlan(const PageGeometry& geometry) : geometry_(detail::checked(geometry)) {}
  /// Views of `other` become views of this plan.
  PagedPlan(PagedPlan&& other) noexcept = default;
  /// Views of this plan go out of date.
  PagedPlan& operator=(PagedPlan&& other) noexcept {
    if (this != &other) {
      std::destroy_at(this);
      std::construct_at(this, std::move(other));
    }
    return *this;
  }
  ~PagedPlan() {
    if (ticket_) ticket_->set(0);
  }

  /// The plan of a batch; earlier views of this plan go out of date. It does not refer to the
  /// engine's arrays.
  /// \throws InvalidArgument, with everything as it was, for arrays that do not fit each other and
  ///         pages that are not there
  [[nodiscard]] LiveView build(const PageTables& tables) & {
    rows_.assign(tables, geometry_);
    return update();
  }
  /// The same of tables in compressed rows.
  [[nodiscard]] LiveView build(const PageIndices& indices) & {
    rows_.assign(indices, geometry_);
    return update();
  }
  LiveView build(const PageTables& tables) && = delete;  // the view would read what is gone
  LiveView build(const PageIndices& indices) && = delete;

  /// How pages lie in memory.
  [[nodiscard]] const PageGeometry& geometry() const noexcept { return geometry_; }
  /// How often build() has rebuilt the plan.
  [[nodiscard]] std::uint64_t num_rebuilds() const noexcept { return num_rebuilds_; }

 private:
  struct CountedView : LiveView {
    CountedView(const PlanView& arrays, std::shared_ptr<const detail::ViewTicket> ticket)
        : LiveView(arrays, std::move(ticket)) {}
  };

  LiveView update() {
    if (ticket_ == nullptr) ticket_ = std::make_shared<detail::ViewTicket>();
    if (forest_.continues(rows_)) {
      forest_.advance(rows_);
    } else {
      spare_.rebuild(rows_, geometry_);  // the last plan stays as it is if this fails
      std::swap(forest_, spare_);
      ++num_rebuilds_;
    }
    ticket_->set(++views_);
    return CountedView(forest_.view(), ticket_);
  }

  PageGeometry geometry_;
  detail::PageRows rows_;
  detail::PageForest forest_, spare_;
  std::shared_ptr<detail::ViewTicket> ticket_;
  std::uint64_t views_ = 0;
  std::uint64_t num_rebuilds_ = 0;
};

CHUNKATTN_NAMESPACE_END
