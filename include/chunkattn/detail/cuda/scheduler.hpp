// From a plan to tasks: what is shared, how ranges are split along KV, which tile, in what order.
// Plain integer arithmetic on the host: the same plan gives the same tasks everywhere.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../../attention_options.hpp"
#include "../../plan_view.hpp"
#include "../../variants.hpp"
#include "../support/check.hpp"
#include "../support/to_size.hpp"
#include "cost_model.hpp"
#include "device_plan.hpp"
#include "even_cuts.hpp"
#include "tile_layout.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail::cuda {

/// What a step moves and computes, for floors and tests. All KV heads together.
struct ScheduleSummary {
  std::int64_t kv_tokens = 0;      ///< K/V rows streamed, one KV head: tasks x their tokens
  std::int64_t kv_bytes = 0;       ///< the same in bytes, all KV heads
  std::int64_t partial_bytes = 0;  ///< written and read
  std::int32_t num_shared = 0;     ///< runs that are shared
  std::int32_t num_split = 0;      ///< further cuts along KV
};

/// Builds task lists. Keeps its memory from call to call.
class Scheduler {
 public:
  /// \param hidden  [num_rows] keys that are not visible to a row, among those up to its own; or
  ///                null. Not read after this call.
  /// \throws InvalidArgument if the rows of a segment are not contiguous, or if even the plainest
  ///         schedule does not fit `capacity`.
  void build(const PlanView& plan, const Geometry& geometry, const CostModel& model,
             const ScheduleCapacity& capacity, const KeyRange* hidden = nullptr) {
    plan_ = plan;
    hidden_ = hidden;
    geometry_ = geometry;
    model_ = model;
    measure();
    // What does not fit is cut less, then shared less: what saves least by its partial results
    // first.
    bool fits = false;
    for (std::int64_t price = 1; price <= 4096 && !fits; price *= 4) {
      choose_runs(price <= 1024 ? price : 0, capacity.partials);
      fits = cuts_.cut(runs_, geometry_, model_, capacity);
    }
    if (!fits)
      detail::fail_argument(
          "plan (tasks)", cuts_.num_tasks(),
          {"at most ", capacity.tasks, " tasks: raise the rows or segments of the limits"});
    make_tasks();
  }

  [[nodiscard]] const std::vector<Task>& tasks() const noexcept { return tasks_; }
  [[nodiscard]] int num_chunk_first() const noexcept { return num_chunk_first_; }
  [[nodiscard]] int num_sequence_first() const noexcept {
    return static_cast<int>(tasks_.size()) - num_chunk_first_;
  }
  [[nodiscard]] const std::vector<Merge>& merges() const noexcept { return merges_; }
  [[nodiscard]] std::int64_t num_partials() const noexcept { return num_partials_; }
  [[nodiscard]] const ScheduleSummary& summary() const noexcept { return summary_; }
  /// Whether some tile has more rows than all kernels can take.
  [[nodiscard]] bool has_large_tiles() const noexcept { return has_large_tiles_; }

 private:
  struct Node {
    std::int32_t kv_len = 0;        // the most any row below sees
    KeyRange hidden{0, open_end};   // from all rows below
    std::int32_t direct_begin = 0;  // rows whose path ends here
    std::int32_t direct_count = 0;
    std::int32_t branches = 0;   // children with rows, and direct rows as one
    std::int32_t run_begin = 0;  // first position of the run that ends here
    std::int32_t run_tokens = 0;
    bool shared = false;    // the run that ends here is a task of its own
    std::int32_t run = -1;  // its index in runs_
  };
  struct SizedTask {
    std::int64_t ps;
    std::size_t number;
    Task task;
  };
  [[nodiscard]] int packed(int rows) const noexcept { return rows * geometry_.group(); }
  [[nodiscard]] int partials_of_piece(const Run& run) const noexcept {
    return run.rows() * geometry_.num_kv_heads;
  }
  [[nodiscard]] HeadDims dims() const noexcept { return geometry_.dims(); }

  void measure() {
    nodes_.assign(to_size(plan_.num_segments), Node{});
    for (int row = 0; row < plan_.num_rows; ++row) {
      Node& node = nodes_[to_size(plan_.row_segment[row])];
      if (node.direct_count == 0) node.direct_begin = row;
      detail::check_argument(node.direct_begin + node.direct_count == row, "plan.row_segment", row,
                             "the rows of a segment side by side");
      ++node.direct_count;
      node.kv_len = std::max(node.kv_len, plan_.row_kv_len[row]);
      node.hidden = common(node.hidden, hidden_from(row));
    }
    for (int s = plan_.num_segments - 1; s >= 0; --s) {
      Node& node = nodes_[to_size(s)];
      const Segment& segment = plan_.segments[s];
      if (node.direct_count > 0) ++node.branches;
      if (segment.parent >= 0 && segment.row_end > segment.row_begin) {
        Node& parent = nodes_[to_size(segment.parent)];
        parent.kv_len = std::max(parent.kv_len, node.kv_len);
        parent.hidden = common(parent.hidden, node.hidden);
        ++parent.branches;
      }
    }
  }

  [[nodiscard]] KeyRange hidden_from(int row) const noexcept {
    return hidden_ != nullptr ? hidden_[row] : KeyRange{};
  }
  // What is in both. Ranges that are empty have something empty in common.
  [[nodiscard]] static KeyRange common(KeyRange a, KeyRange b) noexcept {
    return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
  }
  // Positions [begin, end) that are not hidden.
  [[nodiscard]] static std::int32_t visible_between(std::int32_t begin, std::int32_t end,
                                                    KeyRange hidden) noexcept {
    return KeyRange{begin, end}.size() - common({begin, end}, hidden).size();
  }
  // One past the last position of a segment that some row below may see.
  [[nodiscard]] static std::int32_t end_of(const Segment& segment, const Node& node) noexcept {
    return std::min(segment.position + segment.length, node.kv_len);
  }

  // Top-down: a run either becomes a task shared by all rows below, or goes on into each branch.
  // Partial results cost `price` times what they take, 0: nothing is shared. No run has more than
  // `most_partials`.
  void choose_runs(std::int64_t price, std::size_t most_partials) {
    runs_.clear();
    std::int64_t gain = 0;  // of all sharing, in ps of work of one KV head
    for (int s = 0; s < plan_.num_segments; ++s) {
      const Segment& segment = plan_.segments[s];
      Node& node = nodes_[to_size(s)];
      const Node* parent = segment.parent >= 0 ? &nodes_[to_size(segment.parent)] : nullptr;
      const bool fresh = parent == nullptr || parent->shared;
      node.run_begin = fresh ? segment.position : parent->run_begin;
      node.run_tokens = visible_between(node.run_begin, end_of(segment, node), node.hidden);
      node.run = parent != nullptr ? parent->run : -1;
      const int rows = packed(segment.row_end - segment.row_begin);
      const std::int64_t saved = price > 0 ? saved_by_sharing(node, rows, price) : 0;
      node.shared = saved > 0 && to_size(rows) * to_size(geometry_.num_kv_heads) <= most_partials;
      if (node.shared) {
        gain += saved;
        node.run = add_run(s, segment.row_begin, segment.row_end, node);
      }
      if (node.direct_count > 0) {
        Run& run = runs_[to_size(
            add_run(s, node.direct_begin, node.direct_begin + node.direct_count, node))];
        run.last = true;
        run.covered = node.shared;
        if (run.covered) run.tokens = 0;
      }
    }
    // There is a task more and a wait for partial results: if that takes longer, nothing is shared.
    if (gain > 0 &&
        gain * geometry_.num_kv_heads / model_.num_blocks < model_.task_ps + model_.wait_ps)
      choose_runs(0, 0);
  }

  // Of the time of streaming a node's run once per branch, if it is streamed once for all.
  [[nodiscard]] std::int64_t saved_by_sharing(const Node& node, int rows,
                                              std::int64_t price) const noexcept {
    if (node.branches < 2) return 0;
    const std::int64_t apart = node.branches * model_.stream_ps(node.run_tokens, 0, dims());
    const int tile_rows = tile_rows_for(std::min(rows, usual_tile_rows));
    const std::int64_t tile = model_.stream_ps(node.run_tokens, tile_rows, dims());
    return apart - num_tiles(rows) * (tile + model_.task_ps) -
           price * model_.partial_ps(rows, dims().v);
  }

  int add_run(int segment, int row_begin, int row_end, const Node& node) {
    Run run{segment, packed(row_begin), packed(row_end), node.run_begin, node.run_tokens, node.run};
    run.hidden = node.hidden;
    if (run.hidden.begin <= run.position)  // it begins with what is seen
      run.position = std::max(run.position, run.hidden.end);
    runs_.push_back(run);
    return static_cast<int>(runs_.size()) - 1;
  }

  void make_tasks() {
    tasks_.clear();
    merges_.clear();
    num_partials_ = 0;
    summary_ = {};
    has_large_tiles_ = false;
    for (Run& run : runs_)
      if (run.chunk_first()) add_chunk_first(run);
    take_sorted();
    num_chunk_first_ = static_cast<int>(tasks_.size());
    for (const Run& run : runs_)
      if (run.last) add_sequence_first(run);
    take_sorted();
    summary_.partial_bytes = num_partials_ * 2 * (dims().v + 1) * 4;
    summary_.kv_bytes =
        summary_.kv_tokens * geometry_.num_kv_heads * (dims().k + dims().v) * dims().stored;
  }

  void add_chunk_first(Run& run) {
    if (!run.last) ++summary_.num_shared;
    summary_.num_split += run.splits - 1;
    // The partial of (plan row, query head) has the index base + row * num_qo_heads + head.
    run.partial_base =
        static_cast<std::int32_t>(num_partials_) - run.row_begin * geometry_.num_kv_heads;
    num_partials_ += std::int64_t{partials_of_piece(run)} * run.splits;
    run.flag_base = static_cast<std::int32_t>(sized_.size());  // as many tasks as flags before this
    for (int i = 0; i < run.splits; ++i) {
      const bool open = i == run.splits - 1;
      Task task{};
      task.segment = run.segment;
      task.position_begin = run.position_of(i * run.split_tokens);
      task.position_end = open ? open_end : run.position_of((i + 1) * run.split_tokens);
      task.partial_base = run.partial_base + i * partials_of_piece(run);
      task.flag = static_cast<std::int32_t>(sized_.size());
      add_tiles(run, task, true);
    }
  }

  void add_sequence_first(const Run& run) {
    const std::size_t first = merges_.size();
    if (run.moved) add_merges(run);
    for (int r = run.above; r >= 0; r = runs_[to_size(r)].above) add_merges(runs_[to_size(r)]);
    std::reverse(merges_.begin() + static_cast<std::ptrdiff_t>(first), merges_.end());
    Task task{};
    task.segment = run.streams_last() ? run.segment : -1;
    task.position_begin = run.position;
    task.position_end = open_end;
    task.merge_begin = static_cast<std::int32_t>(first);
    task.merge_count = static_cast<std::int32_t>(merges_.size() - first);
    add_tiles(run, task, false);
  }

  void add_merges(const Run& run) {
    for (int i = run.splits - 1; i >= 0; --i)
      merges_.push_back({run.partial_base + i * partials_of_piece(run),
                         run.flag_base + i * run.tiles, run.row_begin,
                         std::countr_zero(static_cast<unsigned>(run.tile_rows))});
  }

  // One task per tile of the run's rows, all else as in `task`.
  void add_tiles(const Run& run, Task task, bool chunk_first) {
    const int most = chunk_first || run.streams_last() ? run.tile_rows : cuts_.merge_rows();
    for (int row = run.row_begin; row < run.row_end; row += task.row_count) {
      task.row_count = std::min(run.row_end - row, most);
      task.tile_rows = tile_rows_for(task.row_count);
      has_large_tiles_ = has_large_tiles_ || task.tile_rows > usual_tile_rows;
      task.row_begin = row;
      const std::int32_t tokens = task.segment >= 0 ? visible_tokens(run, task) : 0;
      summary_.kv_tokens += tokens;
      const std::int64_t merging =
          chunk_first ? 0 : merges_in_a_row(task.row_count, dims().v, task.merge_count);
      sized_.push_back(
          {model_.stream_ps(tokens, task.tile_rows, dims()) + merging * model_.merge_ps,
           sized_.size(), task});
      ++task.flag;
    }
  }

  // Positions of a task that one of its rows sees.
  [[nodiscard]] std::int32_t visible_tokens(const Run& run, const Task& task) const noexcept {
    std::int32_t seen = 0;
    KeyRange hidden{0, open_end};
    const int last = (task.row_begin + task.row_count - 1) / geometry_.group();
    for (int row = task.row_begin / geometry_.group(); row <= last; ++row) {
      seen = std::max(seen, plan_.row_kv_len[row]);
      hidden = common(hidden, hidden_from(row));
    }
    const std::int32_t end = std::min({seen, task.position_end, run.position_of(run.tokens)});
    return visible_between(task.position_begin, end, hidden);
  }

  // Longest first; among equals the plan's order, so that tiles of one run stay neighbours.
  void take_sorted() {
    std::sort(sized_.begin(), sized_.end(), [](const SizedTask& a, const SizedTask& b) {
      return a.ps != b.ps ? a.ps > b.ps : a.number < b.number;
    });
    for (const SizedTask& sized : sized_) tasks_.push_back(sized.task);
    sized_.clear();
  }

  PlanView plan_;
  const KeyRange* hidden_ = nullptr;  // [num_rows] or null
  Geometry geometry_;
  CostModel model_;
  std::vector<Node> nodes_;
  std::vector<Run> runs_;
  EvenCuts cuts_;
  std::vector<SizedTask> sized_;  // of the phase that is made
  std::vector<Task> tasks_;
  std::vector<Merge> merges_;
  std::int64_t num_partials_ = 0;
  int num_chunk_first_ = 0;
  ScheduleSummary summary_;
  bool has_large_tiles_ = false;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
