// How the work of one call is cut into tasks: plain integer arithmetic over the plan.
//
// Rows are cut into *row blocks* whose state fits the L2 cache; the work of a row block for one KV
// head is a list of *items* (a stretch of a segment's tokens, the rows that see it), parents first.
// Normally one task does the whole list, so the state of its rows never leaves the core. Where that
// gives too few tasks to keep every core busy, lists are cut along KV into several *units* whose
// partial results are merged.
//
// Where the cuts fall in deterministic mode depends on the plan and the geometry alone, never on
// the number of threads: so the same bits come out for any.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../config.hpp"
#include "../plan_types.hpp"

CHUNKATTN_ISA_NAMESPACE_BEGIN
namespace cpu {

/// Tokens that a kernel takes at once, and the grain at which a segment can be cut.
inline constexpr int block_tokens = 64;

/// Tokens [token_begin, token_end) of a segment (counted from its start) for [row_begin, row_end).
struct WorkItem {
  std::int32_t segment;
  std::int32_t token_begin;
  std::int32_t token_end;
  std::int32_t row_begin;
  std::int32_t row_end;
};

/// Items [item_begin, item_end) of one row block, touching the rows [row_begin, row_end).
struct Unit {
  std::int32_t row_block;
  std::int32_t item_begin;
  std::int32_t item_end;
  std::int32_t row_begin;
  std::int32_t row_end;
  std::int64_t partial_row;  ///< first row of its partial results, among all units'
  double cost;
};

/// Rows whose state one task holds. With one unit there is nothing to merge.
struct RowBlock {
  std::int32_t row_begin;
  std::int32_t row_end;
  std::int32_t unit_begin;
  std::int32_t unit_count;
};

/// What the machine can do, roughly: only ratios matter.
struct CostModel {
  double bytes_per_token = 0;       ///< K and V of one token and KV head
  double flops_per_token_line = 0;  ///< one query line against one token
  static constexpr double bytes_per_ns = 16;
  static constexpr double flops_per_ns = 140;
  static constexpr double item_ns = 200;  ///< fixed cost of an item

  [[nodiscard]] double token_ns(int lines) const noexcept {
    const double memory = bytes_per_token / bytes_per_ns;
    const double compute = flops_per_token_line * lines / flops_per_ns;
    return memory > compute ? memory : compute;
  }
};

/// Derives and holds the tasks of one call. Its memory is kept: no allocation once it has seen the
/// largest plan. Cost: O(rows + segments + units).
class Schedule {
 public:
  /// A list is cut only into parts of at least this cost, so that merging stays negligible.
  static constexpr double min_unit_ns = 25'000;

  /// \param group       query heads per KV head
  /// \param max_lines   lines (rows * group) of a row block, unless one row alone has more
  /// \param min_tasks   how many tasks are wanted in all, if the work allows
  void derive(const PlanView& plan, int num_kv_heads, int group, int max_lines, int min_tasks,
              const CostModel& cost) {
    find_visible(plan);
    cut_rows(plan.num_rows, std::max(1, max_lines / group));
    list_items(plan);
    cut_items(num_kv_heads, group, min_tasks, cost);
  }

  [[nodiscard]] const std::vector<WorkItem>& items() const noexcept { return unit_items_; }
  [[nodiscard]] const std::vector<Unit>& units() const noexcept { return units_; }
  [[nodiscard]] const std::vector<RowBlock>& row_blocks() const noexcept { return row_blocks_; }
  /// Indices of units, the most expensive first.
  [[nodiscard]] const std::vector<std::int32_t>& order() const noexcept { return order_; }
  /// Rows of partial results per KV head, all units that need merging together.
  [[nodiscard]] std::int64_t num_partial_rows() const noexcept { return num_partial_rows_; }
  /// Rows of the largest row block.
  [[nodiscard]] int max_block_rows() const noexcept { return max_block_rows_; }
  /// Items of segments that several sequences have in common: 0 if nothing is shared.
  [[nodiscard]] int num_shared_items() const noexcept { return num_shared_items_; }

 private:
  // Tokens of each segment that any row sees, from the rows' lengths up the tree.
  void find_visible(const PlanView& plan) {
    visible_.assign(static_cast<std::size_t>(plan.num_segments), 0);
    for (int row = 0; row < plan.num_rows; ++row) {
      const std::int32_t s = plan.row_segment[row];
      if (s < 0) continue;
      std::int32_t& kv_len = visible_[static_cast<std::size_t>(s)];
      kv_len = std::max(kv_len, plan.row_kv_len[row]);
    }
    for (int s = plan.num_segments; s-- > 0;) {
      const Segment& segment = plan.segments[s];
      const std::int32_t kv_len = visible_[static_cast<std::size_t>(s)];
      if (segment.parent >= 0) {
        std::int32_t& above = visible_[static_cast<std::size_t>(segment.parent)];
        above = std::max(above, kv_len);
      }
      visible_[static_cast<std::size_t>(s)] =
          std::clamp(kv_len - segment.position, 0, segment.length);
    }
  }

  void cut_rows(int num_rows, int max_rows) {
    const int count = (num_rows + max_rows - 1) / max_rows;
    row_blocks_.resize(static_cast<std::size_t>(count));
    max_block_rows_ = 0;
    for (int b = 0; b < count; ++b) {
      RowBlock& block = row_blocks_[static_cast<std::size_t>(b)];
      block = {cut(num_rows, b, count), cut(num_rows, b + 1, count), 0, 0};
      max_block_rows_ = std::max(max_block_rows_, block.row_end - block.row_begin);
    }
  }
  static std::int32_t cut(int total, int part, int parts) {
    return static_cast<std::int32_t>(static_cast<std::int64_t>(total) * part / parts);
  }

  // Each segment goes into every row block that it meets (counting sort, order kept).
  void list_items(const PlanView& plan) {
    const std::size_t blocks = row_blocks_.size();
    block_items_.assign(blocks + 1, 0);
    num_shared_items_ = 0;
    const auto first_block = [&](std::int32_t row) {
      std::size_t b =
          static_cast<std::size_t>(row) * blocks / static_cast<std::size_t>(plan.num_rows);
      while (b > 0 && row_blocks_[b].row_begin > row) --b;
      while (b + 1 < blocks && row_blocks_[b].row_end <= row) ++b;
      return b;
    };
    const auto for_each_block = [&](auto&& f) {
      for (int s = 0; s < plan.num_segments; ++s) {
        const Segment& segment = plan.segments[s];
        const std::int32_t length = visible_[static_cast<std::size_t>(s)];
        if (length <= 0 || segment.row_begin >= segment.row_end) continue;
        for (std::size_t b = first_block(segment.row_begin);
             b < blocks && row_blocks_[b].row_begin < segment.row_end; ++b)
          f(b, s, segment, length);
      }
    };
    for_each_block(
        [&](std::size_t b, int, const Segment&, std::int32_t) { ++block_items_[b + 1]; });
    for (std::size_t b = 0; b < blocks; ++b) block_items_[b + 1] += block_items_[b];
    items_.resize(static_cast<std::size_t>(block_items_[blocks]));
    fill_.assign(block_items_.begin(), block_items_.end() - 1);
    for_each_block([&](std::size_t b, int s, const Segment& segment, std::int32_t length) {
      const RowBlock& block = row_blocks_[b];
      items_[static_cast<std::size_t>(fill_[b]++)] = {s, 0, length,
                                                      std::max(segment.row_begin, block.row_begin),
                                                      std::min(segment.row_end, block.row_end)};
      if (segment.num_sequences > 1) ++num_shared_items_;
    });
  }

  void cut_items(int num_kv_heads, int group, int min_tasks, const CostModel& cost) {
    const auto token_ns = [&](const WorkItem& item) {
      return cost.token_ns((item.row_end - item.row_begin) * group);
    };
    const auto item_ns = [&](const WorkItem& item) {
      return CostModel::item_ns + token_ns(item) * (item.token_end - item.token_begin);
    };
    double total = 0;
    for (const WorkItem& item : items_) total += item_ns(item);
    const bool few = static_cast<int>(row_blocks_.size()) * num_kv_heads < min_tasks;
    const double target = std::max(min_unit_ns, total * num_kv_heads / min_tasks);

    units_.clear();
    unit_items_.clear();
    num_partial_rows_ = 0;
    for (std::size_t b = 0; b < row_blocks_.size(); ++b) {
      RowBlock& block = row_blocks_[b];
      block.unit_begin = static_cast<std::int32_t>(units_.size());
      const auto begin = items_.begin() + block_items_[b];
      const auto end = items_.begin() + block_items_[b + 1];
      double work = 0;
      for (auto item = begin; item != end; ++item) work += item_ns(*item);
      const int parts = few ? std::max(1, static_cast<int>(work / target + 0.5)) : 1;
      double done = 0;
      open_unit(b);
      for (auto item = begin; item != end; ++item) {
        WorkItem rest = *item;
        for (int part = unit_number(block); part < parts; part = unit_number(block)) {
          const double room = work * part / parts - done;  // to where this unit should end
          if (item_ns(rest) <= room) break;
          const double tokens_ns = std::max(0.0, room - CostModel::item_ns);
          const int blocks_of_tokens =
              static_cast<int>(tokens_ns / token_ns(rest) / block_tokens + 0.5);
          const int tokens = blocks_of_tokens * block_tokens;
          if (tokens >= rest.token_end - rest.token_begin) break;
          if (tokens > 0) {
            WorkItem head = rest;
            head.token_end = head.token_begin + tokens;
            rest.token_begin = head.token_end;
            add_item(head, item_ns(head));
            done += item_ns(head);
          } else if (units_.back().item_begin == static_cast<int>(unit_items_.size())) {
            break;  // a unit takes one item at least
          }
          open_unit(b);
        }
        add_item(rest, item_ns(rest));
        done += item_ns(rest);
      }
      block.unit_count = static_cast<std::int32_t>(units_.size()) - block.unit_begin;
      if (block.unit_count > 1) {
        for (std::int32_t u = 0; u < block.unit_count; ++u) {
          Unit& unit = units_[static_cast<std::size_t>(block.unit_begin + u)];
          unit.partial_row = num_partial_rows_;
          num_partial_rows_ += unit.row_end - unit.row_begin;
        }
      }
    }
    order_.resize(units_.size());
    for (std::size_t u = 0; u < order_.size(); ++u) order_[u] = static_cast<std::int32_t>(u);
    std::sort(order_.begin(), order_.end(), [&](std::int32_t a, std::int32_t b) {
      const double cost_a = units_[static_cast<std::size_t>(a)].cost;
      const double cost_b = units_[static_cast<std::size_t>(b)].cost;
      return cost_a != cost_b ? cost_a > cost_b : a < b;
    });
  }

  // Units of the row block so far, the open one included.
  int unit_number(const RowBlock& block) const noexcept {
    return static_cast<int>(units_.size()) - block.unit_begin;
  }
  void open_unit(std::size_t row_block) {
    const auto at = static_cast<std::int32_t>(unit_items_.size());
    units_.push_back({static_cast<std::int32_t>(row_block), at, at, 0, 0, 0, 0.0});
  }
  void add_item(const WorkItem& item, double cost) {
    Unit& unit = units_.back();
    if (unit.item_begin == unit.item_end) {
      unit.row_begin = item.row_begin;
      unit.row_end = item.row_end;
    }
    unit.row_begin = std::min(unit.row_begin, item.row_begin);
    unit.row_end = std::max(unit.row_end, item.row_end);
    unit.cost += cost;
    unit_items_.push_back(item);
    unit.item_end = static_cast<std::int32_t>(unit_items_.size());
  }

  std::vector<std::int32_t> visible_, block_items_, fill_, order_;
  std::vector<WorkItem> items_, unit_items_;
  std::vector<RowBlock> row_blocks_;
  std::vector<Unit> units_;
  std::int64_t num_partial_rows_ = 0;
  int max_block_rows_ = 0;
  int num_shared_items_ = 0;
};

}  // namespace cpu
CHUNKATTN_ISA_NAMESPACE_END
