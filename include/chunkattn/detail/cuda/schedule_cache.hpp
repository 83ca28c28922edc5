// The task lists of a plan: one where nothing is hidden, and one for each window that layers look
// through. They are kept, so that layers of different kinds take turns without planning anew.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "../base/to_size.hpp"
#include "hidden_keys.hpp"
#include "scheduler.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// A task list and what it was made for.
class KeptSchedule {
 public:
  /// Makes the list for `plan` that take() puts in the place of the one there is. Throws before any
  /// change, as Scheduler::build() does.
  void build(const PlanView& plan, const HiddenKeys& hidden, const Geometry& geometry,
             const CostModel& model, const ScheduleCapacity& capacity) {
    next_hidden_ = hidden;
    next_ranges_.clear();
    if (!hidden.none())
      for (int row = 0; row < plan.num_rows; ++row)
        next_ranges_.push_back(hidden(plan.row_kv_len[row]));
    next_.build(plan, geometry, model, capacity, hidden.none() ? nullptr : next_ranges_.data());
  }
  void take() noexcept {
    std::swap(list_, next_);
    std::swap(ranges_, next_ranges_);
    hidden_ = next_hidden_;
  }

  [[nodiscard]] const Scheduler& list() const noexcept { return list_; }
  [[nodiscard]] const HiddenKeys& hidden() const noexcept { return hidden_; }

  // Both of a plan with the rows that the list was made for.

  /// Whether what the list leaves out is still hidden. Windows move on; a row that has become
  /// shorter, or another rule, may see what it has not seen.
  [[nodiscard]] bool holds(const PlanView& plan) const {
    for (std::size_t row = 0; row < ranges_.size(); ++row) {
      const KeyRange then = ranges_[row];
      if (then.size() == 0 || plan.row_kv_len[row] <= 0) continue;
      const KeyRange now = hidden_(plan.row_kv_len[row]);
      if (now.begin > then.begin || now.end < std::min(then.end, plan.row_kv_len[row]))
        return false;
    }
    return true;
  }
  /// Splits were chosen for the lengths of then: an eighth more or less, and they are chosen anew.
  [[nodiscard]] bool has_aged(const PlanView& plan, const Geometry& geometry) {
    const std::int64_t then = list_.visible_tokens();
    const std::int64_t now =
        next_.count_visible(plan, geometry, ranges_.empty() ? nullptr : ranges_.data());
    return now > then + then / 8 || now < then - then / 8;
  }

 private:
  Scheduler list_, next_;
  HiddenKeys hidden_, next_hidden_;
  std::vector<KeyRange> ranges_, next_ranges_;  // by row: what is left out; empty: nothing
};

/// The lists of one plan. Number 0 leaves out nothing and is always there.
class ScheduleCache {
 public:
  static constexpr int most = 8;

  explicit ScheduleCache(int count) : lists_(to_size(count)) { lists_[0].in_use = true; }

  [[nodiscard]] int count() const noexcept { return static_cast<int>(lists_.size()); }
  [[nodiscard]] KeptSchedule& operator[](int i) noexcept { return at(i).schedule; }
  [[nodiscard]] const KeptSchedule& operator[](int i) const noexcept {
    return lists_[to_size(i)].schedule;
  }
  [[nodiscard]] bool in_use(int i) const noexcept { return lists_[to_size(i)].in_use; }

  /// The one for `hidden`, or -1.
  [[nodiscard]] int find(const HiddenKeys& hidden) const noexcept {
    for (int i = 0; i < count(); ++i)
      if (in_use(i) && (*this)[i].hidden() == hidden) return i;
    return -1;
  }
  /// One to make anew: free, or the one that was not used for longest. -1: graphs use all of them.
  [[nodiscard]] int replaceable() const noexcept {
    int best = -1;
    for (int i = 1; i < count(); ++i) {
      const Entry& entry = lists_[to_size(i)];
      if (!entry.in_use) return i;
      if (entry.captured) continue;
      if (best < 0 || entry.last_use < lists_[to_size(best)].last_use) best = i;
    }
    return best;
  }
  void drop(int i) noexcept { at(i).in_use = false; }
  void keep(int i) noexcept { at(i).in_use = true; }
  /// A call uses list i; with `captured` a graph may use it at any time.
  void use(int i, bool captured) noexcept {
    at(i).used = true;
    at(i).last_use = ++uses_;
    at(i).captured = at(i).captured || captured;
  }
  /// Other rows: lists that none of the last rows' calls has used are not made again.
  void drop_unused() noexcept {
    for (std::size_t i = 1; i < lists_.size(); ++i) {
      Entry& entry = lists_[i];
      entry.in_use = entry.in_use && (entry.used || entry.captured);
      entry.used = false;
    }
  }

 private:
  struct Entry {
    KeptSchedule schedule;
    bool in_use = false;
    bool used = false;      // since its rows were planned
    bool captured = false;  // some graph uses it
    std::uint64_t last_use = 0;
  };
  [[nodiscard]] Entry& at(int i) noexcept { return lists_[to_size(i)]; }

  std::vector<Entry> lists_;
  std::uint64_t uses_ = 0;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
