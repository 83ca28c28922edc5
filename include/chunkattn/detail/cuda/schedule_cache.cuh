// The task lists of a plan: one where nothing is hidden, and one for each window that layers look
// through. They are kept, so that layers of different kinds take turns without planning anew.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

#include "../support/array.hpp"
#include "scheduler.hpp"
#include "variant_terms.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// A task list and what it was made for.
class KeptSchedule {
 public:
  static constexpr std::uint64_t captured = ~std::uint64_t{0};

  /// By a call; calls are counted. 0: it is not that of the plan which was prepared last. captured:
  /// some graph uses it at any time.
  std::uint64_t last_use = 0;
  [[nodiscard]] bool in_use() const noexcept { return last_use > 0; }

  /// Makes the list for `plan` that take() puts in the place of the one there is. Throws before any
  /// change, as Scheduler::build() does.
  void build(const PlanView& plan, const HiddenKeys& hidden, const Geometry& geometry,
             const CostModel& model, const ScheduleCapacity& capacity) {
    next_.hidden = hidden;
    next_.tokens = tokens_of(plan);
    next_.ranges.clear();
    for (int row = 0; row < plan.num_rows && !hidden.none(); ++row)
      next_.ranges.push_back(hidden(plan.row_kv_len[row]));
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
  /// Splits were chosen for the lengths of then: an eighth more or less, and they are chosen anew.
  [[nodiscard]] bool has_aged(const PlanView& plan) const noexcept {
    return std::abs(tokens_of(plan) - now_.tokens) > now_.tokens / 8;
  }

 private:
  struct Made {
    Scheduler list;
    HiddenKeys hidden;
    std::vector<KeyRange> ranges;  // by row: what is left out; empty: nothing
    std::int64_t tokens = 0;       // of the plan, each segment's once
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

  explicit ScheduleCache(int count) : lists_(to_size(count)) { use(0, false); }

  [[nodiscard]] int count() const noexcept { return static_cast<int>(lists_.size()); }
  [[nodiscard]] KeptSchedule& operator[](int i) noexcept { return lists_[to_size(i)]; }
  [[nodiscard]] const KeptSchedule& operator[](int i) const noexcept { return lists_[to_size(i)]; }

  /// The one for `hidden`, or -1.
  [[nodiscard]] int find(const HiddenKeys& hidden) const noexcept {
    for (int i = 0; i < count(); ++i)
      if ((*this)[i].in_use() && (*this)[i].hidden() == hidden) return i;
    return -1;
  }
  /// One to make anew: free, or the one that was not used for longest. -1: graphs use all of them.
  [[nodiscard]] int replaceable() const noexcept {
    int best = -1;
    for (int i = 1; i < count(); ++i)
      if ((*this)[i].last_use < (best < 0 ? KeptSchedule::captured : (*this)[best].last_use))
        best = i;
    return best;
  }
  /// A call uses list i; with `captured` a graph may use it at any time.
  void use(int i, bool captured) noexcept {
    const bool stays = captured || (*this)[i].last_use == KeptSchedule::captured;
    (*this)[i].last_use = stays ? KeptSchedule::captured : ++uses_;
  }
  /// Other rows: lists that none of the last rows' calls has used are not made again.
  void drop_unused() noexcept {
    for (int i = 1; i < count(); ++i)
      if ((*this)[i].last_use <= dropped_at_) (*this)[i].last_use = 0;
    dropped_at_ = uses_;
  }

 private:
  std::vector<KeptSchedule> lists_;
  std::uint64_t uses_ = 0, dropped_at_ = 0;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
