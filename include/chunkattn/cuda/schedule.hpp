// From a plan to tasks: what is shared, how ranges are split along KV, which tile, in what order.
// Plain integer arithmetic on the host: the same plan gives the same tasks everywhere.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../base/error.hpp"
#include "../plan/view.hpp"
#include "cost_model.hpp"
#include "device_plan.hpp"
#include "tile_layout.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Heads of the layers that a schedule serves.
struct Geometry {
  std::int32_t num_qo_heads = 0;  ///< query heads
  std::int32_t num_kv_heads = 0;  ///< heads of K and of V
  std::int32_t head_dim = 0;      ///< elements per head
  /// Query heads that read the same K and V.
  [[nodiscard]] constexpr std::int32_t group() const noexcept {
    return num_qo_heads / num_kv_heads;
  }
};

/// What a step moves and computes, for floors and tests. All KV heads together.
struct ScheduleSummary {
  std::int64_t kv_tokens = 0;      ///< K/V rows streamed, one KV head: tasks x their tokens
  std::int64_t kv_bytes = 0;       ///< the same in bytes, all KV heads
  std::int64_t partial_bytes = 0;  ///< written and read
  std::int64_t padded_flops = 0;   ///< with the unused rows of tiles
  std::int32_t num_shared = 0;     ///< runs that are shared
  std::int32_t num_split = 0;      ///< further cuts along KV
};

namespace cuda_detail {

/// How much room a schedule has.
struct ScheduleCapacity {
  std::size_t tasks = 0;
  std::size_t merges = 0;
  std::size_t partials = 0;  ///< rows x query heads
};

/// Builds task lists. Keeps its memory from call to call.
class Scheduler {
 public:
  /// \throws InvalidArgument if the rows of a segment are not contiguous, or if even the plainest
  ///         schedule does not fit `capacity`.
  void build(const PlanView& plan, const Geometry& geometry, const CostModel& model,
             const ScheduleCapacity& capacity) {
    plan_ = plan;
    geometry_ = geometry;
    model_ = model;
    measure();
    // Plainer until it fits: no cuts along KV, then nothing shared.
    for (const auto [share, split] : {Mode{true, true}, Mode{true, false}, Mode{false, false}}) {
      choose_runs(share);
      choose_splits(split);
      emit();
      if (tasks_.size() <= capacity.tasks && merges_.size() <= capacity.merges &&
          static_cast<std::size_t>(num_partials_) <= capacity.partials)
        return;
    }
    detail::fail_argument(
        "plan (tasks)", tasks_.size(),
        {"at most ", capacity.tasks, " tasks: raise the rows or segments of the limits"});
  }

  [[nodiscard]] const std::vector<Task>& tasks() const noexcept { return tasks_; }
  [[nodiscard]] int num_chunk_first() const noexcept { return num_chunk_first_; }
  [[nodiscard]] int num_sequence_first() const noexcept {
    return static_cast<int>(tasks_.size()) - num_chunk_first_;
  }
  [[nodiscard]] const std::vector<std::int32_t>& merges() const noexcept { return merges_; }
  [[nodiscard]] std::int64_t num_partials() const noexcept { return num_partials_; }
  [[nodiscard]] const ScheduleSummary& summary() const noexcept { return summary_; }
  /// K/V rows that the plan's rows saw when this was built, each segment once.
  [[nodiscard]] std::int64_t visible_tokens() const noexcept { return visible_tokens_; }

  /// What visible_tokens() would be now: tells when a schedule has aged.
  [[nodiscard]] std::int64_t count_visible(const PlanView& plan) {
    plan_ = plan;
    measure();
    return visible_tokens_;
  }

 private:
  struct Mode {
    bool share, split;
  };
  struct Node {
    std::int32_t kv_len = 0;        // the most any row below sees
    std::int32_t tokens = 0;        // of this segment, visible to some row
    std::int32_t direct_begin = 0;  // rows whose path ends here
    std::int32_t direct_count = 0;
    std::int32_t branches = 0;          // children with rows, and direct rows as one
    std::int64_t branch_tile_rows = 0;  // padded rows of all branches together
    std::int32_t run_begin = 0;         // first position of the run that ends here
    std::int32_t run_tokens = 0;
    bool shared = false;     // the run that ends here is a task of its own
    std::int32_t unit = -1;  // its index in units_
  };
  // A run of positions on the path of `segment` for rows [row_begin, row_end).
  struct Unit {
    std::int32_t segment, row_begin, row_end, position, tokens;
    std::int32_t splits = 1;
    std::int32_t step = 0;          // tokens of a split; the last one is open
    bool last = false;              // a sequence's own run: merges and writes
    bool covered = false;           // such a run, all of it in the shared run that ends with it
    bool moved = false;             // such a run, cut along KV: streamed by chunk-first tasks
    std::int32_t partial_base = 0;  // of the first split; the next is partial_stride on
    std::int32_t partial_stride = 0;
    std::int32_t above = -1;  // the nearest shared unit on the path
  };

  [[nodiscard]] int packed(int rows) const noexcept { return rows * geometry_.group(); }

  // Rows of tiles that hold `rows` packed rows.
  [[nodiscard]] static std::int64_t padded(int rows) noexcept {
    const int rest = rows % max_tile_rows;
    return rows - rest + (rest > 0 ? tile_rows_for(rest) : 0);
  }
  [[nodiscard]] std::int64_t stream_all(std::int64_t tokens, int rows) const noexcept {
    const int rest = rows % max_tile_rows;
    std::int64_t ps = rows / max_tile_rows * model_.stream_ps(tokens, max_tile_rows, dim());
    if (rest > 0) ps += model_.stream_ps(tokens, tile_rows_for(rest), dim());
    return ps;
  }
  [[nodiscard]] static int num_tiles(int rows) noexcept {
    return (rows + max_tile_rows - 1) / max_tile_rows;
  }
  [[nodiscard]] int dim() const noexcept { return geometry_.head_dim; }

  void measure() {
    nodes_.assign(static_cast<std::size_t>(plan_.num_segments), Node{});
    for (int row = 0; row < plan_.num_rows; ++row) {
      Node& node = nodes_[index(plan_.row_segment[row])];
      if (node.direct_count == 0) node.direct_begin = row;
      detail::check_argument(node.direct_begin + node.direct_count == row, "plan.row_segment", row,
                             "the rows of a segment side by side");
      ++node.direct_count;
      node.kv_len = std::max(node.kv_len, plan_.row_kv_len[row]);
    }
    visible_tokens_ = 0;
    for (int s = plan_.num_segments - 1; s >= 0; --s) {
      Node& node = nodes_[index(s)];
      const Segment& segment = plan_.segments[s];
      node.tokens = std::clamp(node.kv_len - segment.position, 0, segment.length);
      visible_tokens_ += node.tokens;
      if (node.direct_count > 0) {
        ++node.branches;
        node.branch_tile_rows += padded(packed(node.direct_count));
      }
      if (segment.parent >= 0 && segment.row_end > segment.row_begin) {
        Node& parent = nodes_[index(segment.parent)];
        parent.kv_len = std::max(parent.kv_len, node.kv_len);
        ++parent.branches;
        parent.branch_tile_rows += padded(packed(segment.row_end - segment.row_begin));
      }
    }
  }

  // Top-down: a run either becomes a task shared by all rows below, or goes on into each branch.
  void choose_runs(bool share) {
    units_.clear();
    std::int64_t gain = 0;
    for (int s = 0; s < plan_.num_segments; ++s) {
      const Segment& segment = plan_.segments[s];
      Node& node = nodes_[index(s)];
      const Node* parent = segment.parent >= 0 ? &nodes_[index(segment.parent)] : nullptr;
      const bool fresh = parent == nullptr || parent->shared;
      node.run_begin = fresh ? segment.position : parent->run_begin;
      node.run_tokens = (fresh ? 0 : parent->run_tokens) + node.tokens;
      node.shared = false;
      const int rows = packed(segment.row_end - segment.row_begin);
      if (!share || node.branches < 2 || node.run_tokens == 0) continue;
      const std::int64_t together = stream_all(node.run_tokens, rows) +
                                    num_tiles(rows) * model_.task_ps +
                                    model_.partial_ps(rows, dim());
      const std::int64_t apart = stream_apart(node);
      node.shared = together < apart;
      if (node.shared) gain += apart - together;
    }
    // The second kernel must earn its launch.
    if (share && gain > 0 && gain * geometry_.num_kv_heads / model_.num_blocks < model_.launch_ps)
      return choose_runs(false);
    for (int s = 0; s < plan_.num_segments; ++s) {
      const Segment& segment = plan_.segments[s];
      Node& node = nodes_[index(s)];
      const int above = segment.parent >= 0 ? nodes_[index(segment.parent)].unit : -1;
      node.unit = above;
      if (node.shared) {
        node.unit = add_unit(s, segment.row_begin, segment.row_end, node, above);
      }
      if (node.direct_count > 0) {
        const int unit =
            add_unit(s, node.direct_begin, node.direct_begin + node.direct_count, node, node.unit);
        units_[index(unit)].last = true;
        if (node.shared) {
          units_[index(unit)].covered = true;
          units_[index(unit)].tokens = 0;
        }
      }
    }
  }

  // The time of streaming a node's run once per branch: bytes for each of their tiles.
  [[nodiscard]] std::int64_t stream_apart(const Node& node) const noexcept {
    // Branches of few rows differ from one another little: the average tile stands for all.
    const std::int64_t bytes_only = node.branches * model_.stream_ps(node.run_tokens, 0, dim());
    const std::int64_t flops = 4 * std::int64_t{node.run_tokens} * dim() * node.branch_tile_rows;
    return std::max(bytes_only, flops * model_.ps_per_mflop / 1000000);
  }

  int add_unit(int segment, int row_begin, int row_end, const Node& node, int above) {
    Unit unit{segment, row_begin, row_end, node.run_begin, node.run_tokens};
    unit.above = above;
    units_.push_back(unit);
    return static_cast<int>(units_.size()) - 1;
  }

  // Cuts long runs so that no block works on when the others are done.
  void choose_splits(bool split) {
    summary_ = {};
    std::int64_t total = 0;
    bool has_phase1 = false;
    for (const Unit& unit : units_) {
      total += stream_all(unit.tokens, packed(unit.row_end - unit.row_begin));
      has_phase1 |= !unit.last;
    }
    const std::int64_t ideal = total * geometry_.num_kv_heads / model_.num_blocks + 1;
    for (Unit& unit : units_) {
      if (!split || unit.tokens < 2 * model_.min_split_tokens) continue;
      const int rows = std::min(packed(unit.row_end - unit.row_begin), max_tile_rows);
      const std::int64_t one = model_.stream_ps(unit.tokens, tile_rows_for(rows), dim());
      const std::int64_t most = unit.tokens / model_.min_split_tokens;
      const auto splits =
          static_cast<std::int32_t>(std::clamp((one + ideal - 1) / ideal, std::int64_t{1}, most));
      if (splits < 2) continue;
      const std::int64_t gain = one - one / splits;
      std::int64_t cost =
          model_.partial_ps(std::int64_t{rows} * (splits - (unit.last ? 0 : 1)), dim()) +
          model_.task_ps;
      if (unit.last && !has_phase1) cost += model_.launch_ps;
      if (gain <= cost) continue;
      // Whole tiles, and no split without a token.
      const int tile = kv_tile_tokens(dim());
      unit.step = ((unit.tokens + splits - 1) / splits + tile - 1) / tile * tile;
      unit.splits = (unit.tokens + unit.step - 1) / unit.step;
      unit.moved = unit.last && unit.splits > 1;
      summary_.num_split += unit.splits - 1;
    }
  }

  void emit() {
    tasks_.clear();
    merges_.clear();
    keys_.clear();
    num_partials_ = 0;
    for (Unit& unit : units_) {
      if (unit.last && !unit.moved) continue;
      if (!unit.last) ++summary_.num_shared;
      const std::int64_t stride =
          std::int64_t{unit.row_end - unit.row_begin} * geometry_.num_qo_heads;
      unit.partial_stride = static_cast<std::int32_t>(stride);
      unit.partial_base = static_cast<std::int32_t>(num_partials_ - std::int64_t{unit.row_begin} *
                                                                        geometry_.num_qo_heads);
      num_partials_ += stride * unit.splits;
      if (num_partials_ > max_index) return;  // too many: build() falls back
      for (int i = 0; i < unit.splits; ++i) {
        const int begin = unit.position + i * unit.step;
        const bool open = i == unit.splits - 1;
        add_tiles(unit, true, begin, open ? open_end : begin + unit.step,
                  unit.partial_base + i * unit.partial_stride, 0, 0);
      }
    }
    sort_tasks(0);
    num_chunk_first_ = static_cast<int>(tasks_.size());
    for (const Unit& unit : units_) {
      if (!unit.last) continue;
      const std::size_t first = merges_.size();
      if (unit.moved) add_merges(unit);
      for (int u = unit.above; u >= 0; u = units_[index(u)].above) add_merges(units_[index(u)]);
      std::reverse(merges_.begin() + static_cast<std::ptrdiff_t>(first), merges_.end());
      // A run without visible tokens is streamed all the same: it may grow before the next build.
      add_tiles(unit, !unit.moved && !unit.covered, unit.position, open_end, 0,
                static_cast<std::int32_t>(first),
                static_cast<std::int32_t>(merges_.size() - first));
    }
    sort_tasks(static_cast<std::size_t>(num_chunk_first_));
    summary_.partial_bytes = num_partials_ * 2 * (dim() + 1) * 4;
    summary_.kv_bytes = summary_.kv_tokens * geometry_.num_kv_heads * dim() * 4;
    summary_.padded_flops *= geometry_.num_kv_heads;
  }

  void add_merges(const Unit& unit) {
    for (int i = unit.splits - 1; i >= 0; --i)
      merges_.push_back(unit.partial_base + i * unit.partial_stride);
  }

  void add_tiles(const Unit& unit, bool streams, int begin, int end, int partial_base,
                 int merge_begin, int merge_count) {
    const int first = packed(unit.row_begin);
    const int stop = packed(unit.row_end);
    for (int row = first; row < stop;) {
      const int left = stop - row;
      Task task{};
      task.tile_rows = left >= max_tile_rows ? max_tile_rows : tile_rows_for(left);
      task.row_begin = row;
      task.row_count = std::min(left, task.tile_rows);
      task.segment = streams ? unit.segment : -1;
      task.position_begin = begin;
      task.position_end = end;
      task.partial_base = partial_base;
      task.merge_begin = merge_begin;
      task.merge_count = merge_count;
      std::int64_t tokens = 0;
      if (streams) {
        std::int32_t seen = 0;
        for (int r = row / geometry_.group(); r <= (row + task.row_count - 1) / geometry_.group();
             ++r)
          seen = std::max(seen, plan_.row_kv_len[r]);
        tokens =
            std::clamp(std::min({seen, end, unit.position + unit.tokens}) - begin, 0, unit.tokens);
      }
      summary_.kv_tokens += tokens;
      summary_.padded_flops += 4 * tokens * dim() * task.tile_rows;
      keys_.push_back(model_.stream_ps(tokens, task.tile_rows, dim()) + merge_count);
      tasks_.push_back(task);
      row += task.row_count;
    }
  }

  // Longest first; among equals the plan's order, so that tiles of one run stay neighbours.
  void sort_tasks(std::size_t from) {
    order_.resize(tasks_.size() - from);
    for (std::size_t i = 0; i < order_.size(); ++i) order_[i] = from + i;
    // Not std::stable_sort, which allocates.
    std::sort(order_.begin(), order_.end(), [this](std::size_t a, std::size_t b) {
      return keys_[a] != keys_[b] ? keys_[a] > keys_[b] : a < b;
    });
    sorted_.clear();
    for (const std::size_t i : order_) sorted_.push_back(tasks_[i]);
    std::copy(sorted_.begin(), sorted_.end(), tasks_.begin() + static_cast<std::ptrdiff_t>(from));
  }

  static constexpr std::int64_t max_index = 0x7fffffff;
  static std::size_t index(std::int32_t i) noexcept { return static_cast<std::size_t>(i); }

  PlanView plan_;
  Geometry geometry_;
  CostModel model_;
  std::vector<Node> nodes_;
  std::vector<Unit> units_;
  std::vector<Task> tasks_, sorted_;
  std::vector<std::int64_t> keys_;
  std::vector<std::size_t> order_;
  std::vector<std::int32_t> merges_;
  std::int64_t num_partials_ = 0;
  std::int64_t visible_tokens_ = 0;
  int num_chunk_first_ = 0;
  ScheduleSummary summary_;
};

}  // namespace cuda_detail
CHUNKATTN_NAMESPACE_END
