// The task lists of a plan: one where nothing is hidden, and one for each window that layers look
// through. They are kept, so that layers of different kinds take turns without planning anew.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#include "../support/to_size.hpp"
#include "scheduler.hpp"
#include "variant_terms.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// A task list and what it was made for.
class KeptSchedule {
 public:
  bool in_use = false;         ///< it is that of the plan which was prepared last
  bool captured = false;       ///< some graph uses it at any time
  std::uint64_t last_use = 0;  ///< by a call; calls are counted

  /// Makes the list for `plan` that take() puts in the place of the one there is. Throws before any
  /// change, as Scheduler::build() does.
  void build(const PlanView& plan, const HiddenKeys& hidden, const Geometry& geometry,
             const CostModel& model, const ScheduleCapacity& capacity) {
    next_.hidden = hidden;
    next_.tokens = tokens_of(plan);
    next_.ranges.clear();
    next_.blocks.clear();
    for (int row = 0; row < plan.num_rows; ++row) {
      if (model.batch_invariant) next_.blocks.push_back(last_block(plan, row));
      if (!hidden.none()) next_.ranges.push_back(hidden(plan.row_kv_len[row]));
    }
    next_.list.build(plan, geometry, model, capacity,
                     hidden.none() ? nullptr : next_.ranges.data());
  }
  void take() noexcept { std::swap(now_, next_); }

  [[nodiscard]] const Scheduler& list() const noexcept { return now_.list; }
  [[nodiscard]] const HiddenKeys& hidden() const noexcept { return now_.hidden; }

  /// Whether what the list leaves out is still hidden, of a plan of the same rows. Windows move on;
  /// a row that has become shorter, or another rule, may see what it has not seen.
  [[nodiscard]] bool holds(const PlanView& plan) const {
    for (std::size_t row = 0; row < now_.ranges.size(); ++row) {
      const KeyRange then = now_.ranges[row];
      if (then.size() == 0 || plan.row_kv_len[row] <= 0) continue;
      const KeyRange now = now_.hidden(plan.row_kv_len[row]);
      if (now.begin > then.begin || now.end < std::min(then.end, plan.row_kv_len[row]))
        return false;
    }
    return true;
  }
  /// Reduce::batch_invariant: whether each row ends in the same block.
  [[nodiscard]] bool keeps_blocks(const PlanView& plan) const noexcept {
    for (std::size_t row = 0; row < now_.blocks.size(); ++row)
      if (now_.blocks[row] != last_block(plan, static_cast<int>(row))) return false;
    return true;
  }
  /// Splits were chosen for the lengths of then: an eighth more or less, and they are chosen anew.
  [[nodiscard]] bool has_aged(const PlanView& plan) const noexcept {
    return std::abs(tokens_of(plan) - now_.tokens) > now_.tokens / 8;
  }

 private:
  struct Made {
    Scheduler list;
    HiddenKeys hidden;
    std::vector<KeyRange> ranges;      // by row: what is left out; empty: nothing
    std::vector<std::int32_t> blocks;  // by row: the last one; empty: of no matter
    std::int64_t tokens = 0;           // of the plan, each segment's once
  };
  [[nodiscard]] static std::int64_t tokens_of(const PlanView& plan) noexcept {
    std::int64_t tokens = 0;
    for (int s = 0; s < plan.num_segments; ++s) tokens += plan.segments[s].length;
    return tokens;
  }
  Made now_, next_;
};

/// The lists of one plan. Number 0 leaves out nothing and is always there.
class ScheduleCache {
 public:
  static constexpr int most = 8;

  explicit ScheduleCache(int count) : lists_(to_size(count)) { lists_[0].in_use = true; }

  [[nodiscard]] int count() const noexcept { return static_cast<int>(lists_.size()); }
  [[nodiscard]] KeptSchedule& operator[](int i) noexcept { return lists_[to_size(i)]; }
  [[nodiscard]] const KeptSchedule& operator[](int i) const noexcept { return lists_[to_size(i)]; }

  /// The one for `hidden`, or -1.
  [[nodiscard]] int find(const HiddenKeys& hidden) const noexcept {
    for (int i = 0; i < count(); ++i)
      if ((*this)[i].in_use && (*this)[i].hidden() == hidden) return i;
    return -1;
  }
  /// One to make anew: free, or the one that was not used for longest. -1: graphs use all of them.
  [[nodiscard]] int replaceable() const noexcept {
    int best = -1;
    for (int i = 1; i < count(); ++i) {
      const KeptSchedule& kept = (*this)[i];
      if (!kept.in_use) return i;
      if (!kept.captured && (best < 0 || kept.last_use < (*this)[best].last_use)) best = i;
    }
    return best;
  }
  /// A call uses list i; with `captured` a graph may use it at any time.
  void use(int i, bool captured) noexcept {
    (*this)[i].last_use = ++uses_;
    (*this)[i].captured = (*this)[i].captured || captured;
  }
  /// Other rows: lists that none of the last rows' calls has used are not made again.
  void drop_unused() noexcept {
    for (int i = 1; i < count(); ++i) {
      KeptSchedule& kept = (*this)[i];
      kept.in_use = kept.in_use && (kept.captured || kept.last_use > dropped_at_);
    }
    dropped_at_ = uses_;
  }

 private:
  std::vector<KeptSchedule> lists_;
  std::uint64_t uses_ = 0, dropped_at_ = 0;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
