// The task lists of a plan: one where nothing is hidden, and one for each window that layers look
// through. They are kept, so that layers of different kinds take turns without planning anew.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "../support/array.hpp"
#include "scheduler.hpp"
#include "variant_terms.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// A task list and what it was made for.
struct KeptSchedule {
  static constexpr std::uint64_t captured = ~std::uint64_t{0};

  Scheduler list;
  HiddenKeys hidden;
  std::vector<KeyRange> ranges;  ///< by row: what is left out; empty: nothing
  std::int64_t tokens = 0;       ///< of the plan, each segment's once
  /// By a call; calls are counted. 0: it is not that of the plan which was prepared last. captured:
  /// some graph uses it at any time.
  std::uint64_t last_use = 0;

  void build(const PlanView& plan, const Geometry& geometry, const CostModel& model,
             const ScheduleCapacity& capacity) {
    tokens = tokens_of(plan);
    ranges.clear();
    for (int row = 0; row < plan.num_rows && !hidden.none(); ++row)
      ranges.push_back(hidden(plan.row_kv_len[row]));
    list.build(plan, geometry, model, capacity, hidden.none() ? nullptr : ranges.data());
  }
  /// Whether it serves a plan of the same rows, too. Windows move on; a row that has become
  /// shorter, or another rule, may see what it has not seen. Cuts were chosen for the lengths of
  /// then: an eighth more or less, and they are chosen anew.
  [[nodiscard]] bool serves(const PlanView& plan) const {
    for (std::size_t row = 0; row < ranges.size(); ++row) {
      const std::int32_t seen = plan.row_kv_len[row];
      if (ranges[row].size() == 0 || seen <= 0) continue;
      const KeyRange now = hidden(seen);
      if (now.begin > ranges[row].begin || now.end < (std::min)(ranges[row].end, seen))
        return false;
    }
    return list.keeps_blocks(plan) && std::abs(tokens_of(plan) - tokens) <= tokens / 8;
  }
  [[nodiscard]] static std::int64_t tokens_of(const PlanView& plan) noexcept {
    std::int64_t tokens = 0;
    for (int s = 0; s < plan.num_segments; ++s) tokens += plan.segments[s].length;
    return tokens;
  }
};

/// The lists of one plan. Number 0 leaves out nothing and is always there.
class ScheduleCache {
 public:
  static constexpr int most = 8;

  explicit ScheduleCache(int count) : lists_(to_size(count)) { use(0, false); }

  [[nodiscard]] int count() const noexcept { return static_cast<int>(lists_.size()); }
  [[nodiscard]] KeptSchedule& operator[](int i) noexcept { return lists_[to_size(i)]; }
  [[nodiscard]] const KeptSchedule& operator[](int i) const noexcept { return lists_[to_size(i)]; }
  [[nodiscard]] bool in_use(int i) const noexcept { return (*this)[i].last_use > 0; }

  /// The one for `hidden`, or -1.
  [[nodiscard]] int find(const HiddenKeys& hidden) const noexcept {
    for (int i = 0; i < count(); ++i)
      if (in_use(i) && (*this)[i].hidden == hidden) return i;
    return -1;
  }
  /// One to make anew: free, or the one that was not used for longest. -1: graphs use all of them.
  [[nodiscard]] int replaceable() const noexcept {
    const auto oldest =
        std::min_element(lists_.begin() + 1, lists_.end(),
                         [](const auto& a, const auto& b) { return a.last_use < b.last_use; });
    const bool none = oldest == lists_.end() || oldest->last_use == KeptSchedule::captured;
    return none ? -1 : static_cast<int>(oldest - lists_.begin());
  }
  /// A call uses list i; with `captured` a graph may use it at any time.
  void use(int i, bool captured) noexcept {
    std::uint64_t& last = (*this)[i].last_use;
    last = captured || last == KeptSchedule::captured ? KeptSchedule::captured : ++uses_;
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
