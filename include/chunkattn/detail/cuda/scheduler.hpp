// From a plan to tasks: what is shared, how runs are cut along KV, which tile, in what order.
// README.md has the rule ("Sharing, splitting, tiles"). Plain integer arithmetic on the host: the
// same plan gives the same tasks everywhere.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../../plan_view.hpp"
#include "../../variants.hpp"
#include "../support/array.hpp"
#include "../support/check.hpp"
#include "cost_model.hpp"
#include "device_plan.hpp"
#include "invariant_schedule.hpp"
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
    geometry_ = geometry;
    model_ = model;
    capacity_ = capacity;
    if (model.batch_invariant) return make_invariant_tasks(hidden);
    find_runs(hidden);
    Cut best;
    // Where partial results do not fit, what saves least by them is not shared.
    for (std::int64_t price = 1; best.ps == never && price < never / 8; price *= 8)
      for (int own_rows = usual_tile_rows; own_rows <= most_own_rows_; own_rows *= 2) {
        const std::int64_t longest = share(price, own_rows);
        // Pieces of one length, ever shorter, until they are a small part of the whole.
        for (std::int64_t n = 1; n == 1 || (n <= model.num_blocks && longest / n > best.ps / 16);
             n += 1 + n / 8)
          for (const bool own : {false, true}) {
            const std::int64_t ps = cut(longest / n + 1, own);
            if (ps < best.ps) best = {price, own_rows, longest / n + 1, own, ps};
          }
      }
    check_argument(
        best.ps < never, "plan (tasks)", num_tasks_,
        {"at most ", capacity.tasks, " tasks: raise the rows or segments of the limits"});
    (void)share(best.price, best.own_rows);
    (void)cut(best.piece_ps, best.own);
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
  /// Whether Reduce::batch_invariant would cut the plan's rows where it did when this was built.
  [[nodiscard]] bool keeps_blocks(const PlanView& plan) const noexcept {
    return invariant_.keeps_blocks(plan);
  }

 private:
  static constexpr std::int64_t never = std::int64_t{1} << 62;

  struct Cut {
    std::int64_t price = 0;     // of partial results against what sharing saves
    int own_rows = 0;           // of tiles of own runs that merge nothing
    std::int64_t piece_ps = 0;  // the longest piece
    bool own = false;           // pieces of sequences' own runs, too
    std::int64_t ps = never;    // all takes
  };

  // What the same rows see on the path of `segment`: all rows below, or those that end there (own).
  struct Run {
    std::int32_t segment, row_begin, row_end;  // packed rows
    bool own = false;                          // merges and writes
    bool shared = false;           // streamed once for all rows; own: there is nothing beside that
    std::int32_t branches = 0;     // into which a segment goes on
    std::int32_t kv_len = 0;       // the most that a row sees
    KeyRange hidden{0, open_end};  // from all rows
    std::int32_t position = 0, tokens = 0;  // the first that is seen, how many are
    std::int32_t above = -1;                // the nearest shared run of the path
    std::int32_t tile_rows = usual_tile_rows, tiles = 0;
    std::int64_t ps = 0, memory_ps = 0;  // a block alone takes for a tile; its K/V, beside others'
    std::int32_t pieces = 0;             // of chunk-first tasks; 0: streamed by those that merge
    std::int32_t piece_tokens = 0;       // the last piece is open: it may grow until the next build
    std::int32_t merges = 0;             // partial results from the path's begin to here
    std::int32_t partial_base = 0, flag = 0;  // of the first piece

    [[nodiscard]] int rows() const noexcept { return row_end - row_begin; }
    [[nodiscard]] bool in_use() const noexcept { return own || shared; }
    [[nodiscard]] bool streams_last() const noexcept { return own && !shared && pieces == 0; }
    /// The path position of a token, counted without those that are hidden.
    [[nodiscard]] std::int32_t position_of(std::int32_t token) const noexcept {
      const bool beyond = hidden.begin >= position && position + token >= hidden.begin;
      return position + token + (beyond ? hidden.size() : 0);
    }
  };

  // Chunk-first tasks, or the others. K/V comes from memory once for all tiles, a block has one
  // task at a time, and long ones make waves.
  struct Phase {
    std::int64_t memory_ps = 0, block_ps = 0, longest_ps = 0, long_items = 0;

    [[nodiscard]] std::int64_t ps(std::int64_t blocks) const noexcept {
      const std::int64_t waves = (long_items + blocks - 1) / blocks;
      return std::max(std::max(memory_ps, block_ps) / blocks, waves * longest_ps);
    }
  };

  [[nodiscard]] static KeyRange common(KeyRange a, KeyRange b) noexcept {
    return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
  }
  [[nodiscard]] Run& run_at(int i) noexcept { return runs_[to_size(i)]; }

  // One for each segment, then one for each that rows end on.
  void find_runs(const KeyRange* hidden) {
    runs_.clear();
    most_own_rows_ = usual_tile_rows;
    for (int s = 0; s < plan_.num_segments; ++s)
      add_run(s, plan_.segments[s].row_begin, plan_.segments[s].row_end, hidden);
    for (int row = 0, end = 0; row < plan_.num_rows; row = end) {
      const std::int32_t segment = plan_.row_segment[row];
      while (end < plan_.num_rows && plan_.row_segment[end] == segment) ++end;
      check_argument(run_at(segment).branches++ == 0, "plan.row_segment", row,
                     "the rows of a segment side by side");
      add_run(segment, row, end, hidden);
      runs_.back().own = true;
      if (runs_.back().rows() > usual_tile_rows) most_own_rows_ = model_.most_tile_rows;
    }
    for (int s = 0; s < plan_.num_segments; ++s)
      if (plan_.segments[s].parent >= 0 && run_at(s).rows() > 0)
        ++run_at(plan_.segments[s].parent).branches;
  }
  void add_run(std::int32_t segment, int row, int end, const KeyRange* hidden) {
    Run run{segment, row * geometry_.group(), end * geometry_.group()};
    for (; row < end; ++row) {
      run.kv_len = std::max(run.kv_len, plan_.row_kv_len[row]);
      run.hidden = common(run.hidden, hidden != nullptr ? hidden[row] : KeyRange{});
    }
    runs_.push_back(run);
  }

  // Top-down: a run is streamed once for all rows below, where that saves more than its partial
  // results cost, or goes on into each branch. Returns how long the longest is.
  std::int64_t share(std::int64_t price, int own_rows) noexcept {
    std::int64_t longest = 0;
    for (Run& run : runs_) {
      const Segment& segment = plan_.segments[run.segment];
      const int up = run.own ? run.segment : segment.parent;
      const bool fresh = up < 0 || run_at(up).shared;
      run.above = fresh ? up : run_at(up).above;
      run.position = fresh ? segment.position : run_at(up).position;
      if (run.hidden.begin <= run.position) run.position = std::max(run.position, run.hidden.end);
      const KeyRange all{run.position, std::min(segment.position + segment.length, run.kv_len)};
      run.tokens = run.own && fresh ? 0 : all.size() - common(all, run.hidden).size();
      choose_tiles(run, own_rows);
      const std::int64_t saves = (run.branches - run.tiles) * run.memory_ps;
      const std::int64_t costs = model_.partial_ps(run.rows(), geometry_.dims().v) +
                                 run.tiles * model_.task_ps + model_.wait_ps;
      run.shared = run.own ? fresh : saves / price > costs;
      if (run.in_use()) longest = std::max(longest, run.ps);
    }
    return longest;
  }

  // Large tiles read K/V half as often, but there are half as many: shared runs are in such where
  // every block has one, in pieces beside whose length a task's start does not count; own runs that
  // merge nothing where all takes least so.
  void choose_tiles(Run& run, int own_rows) const noexcept {
    constexpr int long_piece = 256;  // tokens
    const std::int64_t large = std::int64_t{num_tiles(run.rows(), model_.most_tile_rows)} *
                               num_tiles(run.tokens, long_piece) * geometry_.num_kv_heads;
    const int shared_rows = large >= model_.num_blocks ? model_.most_tile_rows : usual_tile_rows;
    run.tile_rows = !run.own ? shared_rows : run.above < 0 ? own_rows : usual_tile_rows;
    run.tiles = num_tiles(run.rows(), run.tile_rows);
    // Products wait for shared memory, of which 128 rows read what 96 would as two others.
    const int height = std::min(tile_rows_for(std::min(run.rows(), run.tile_rows)), 96);
    run.ps = model_.stream_ps(run.tokens, height, geometry_.dims(), model_.alone_ps_per_kib);
    run.memory_ps = model_.stream_ps(run.tokens, 0, geometry_.dims(), model_.ps_per_kib);
  }

  // Cuts runs into equal pieces of whole KV tiles; what they take then, about. never: no room.
  std::int64_t cut(std::int64_t piece_ps, bool own) noexcept {
    const std::int64_t heads = geometry_.num_kv_heads, blocks = model_.num_blocks;
    const HeadDims dims = geometry_.dims();
    // As few rows to a task that only merges as one round of blocks takes: threads share the rest.
    merge_rows_ = static_cast<int>(std::clamp<std::int64_t>(
        (std::int64_t{plan_.num_rows} * geometry_.num_qo_heads + blocks - 1) / blocks, 1,
        merge_rows(dims.v)));
    Phase first, last;  // chunk-first tasks, and the others
    std::int64_t tasks = 0, partials = 0, merges = 0, end = 0;
    for (Run& run : runs_) {
      run.pieces = 0;
      if (!run.in_use()) continue;
      if (!run.own || (own && run.tokens > 0)) {
        const std::int64_t most = std::max(run.tokens / model_.min_split_tokens, 1);
        const auto pieces =
            static_cast<int>(std::clamp<std::int64_t>(run.ps / piece_ps + 1, 1, most));
        const int tile = kv_tile_tokens(dims);
        run.piece_tokens = num_tiles(num_tiles(run.tokens, pieces), tile) * tile;
        run.pieces = pieces == 1 ? 1 : num_tiles(run.tokens, run.piece_tokens);
      }
      run.merges = run.pieces + (run.above >= 0 ? run_at(run.above).merges : 0);
      Phase& phase = run.pieces > 0 ? first : last;
      const int pieces = std::max(run.pieces, 1);
      const std::int64_t ps = run.ps / pieces + model_.task_ps;
      if (run.tokens > 0) {
        const std::int64_t items = std::int64_t{run.tiles} * pieces * heads;
        phase.memory_ps += run.memory_ps * heads;
        phase.block_ps += items * ps;
        phase.longest_ps = std::max(phase.longest_ps, ps);
        if (run.ps / pieces > piece_ps / 2) phase.long_items += items;
      }
      tasks += run.tiles * (run.streams_last() ? 1 : run.pieces);
      partials += std::int64_t{run.pieces} * run.rows() * heads;
      if (!run.own || run.merges == 0) continue;
      const int rows = std::min(run.rows(), last_rows(run));
      const std::int64_t items = num_tiles(run.rows(), rows);
      merges += run.merges;
      end = std::max(end,
                     model_.wait_ps + model_.merge_ps * merges_in_a_row(rows, dims.v, run.merges));
      if (run.streams_last()) continue;
      tasks += items;
      last.block_ps += items * heads * model_.task_ps;
    }
    num_tasks_ = to_size(tasks);
    if (num_tasks_ > capacity_.tasks || to_size(merges) > capacity_.merges ||
        to_size(partials) > std::min<std::size_t>(capacity_.partials, 0x7fffffff))
      return never;
    return first.ps(blocks) + last.ps(blocks) + end;
  }

  // Longest first; among equals the plan's order, so that tiles of one run stay neighbours.
  void make_tasks() {
    tasks_.clear();
    merges_.clear();
    num_partials_ = 0;
    num_chunk_first_ = 0;
    summary_ = {};
    has_large_tiles_ = false;
    const auto before = [](const Task& a, const Task& b) {
      return a.tokens != b.tokens ? a.tokens > b.tokens : a.flag < b.flag;
    };
    for (Run& run : runs_)
      if (run.in_use()) add_chunk_first(run);
    std::sort(tasks_.begin(), tasks_.end(), before);
    for (const Run& run : runs_)
      if (run.own) add_sequence_first(run);
    std::sort(tasks_.begin() + num_chunk_first_, tasks_.end(), before);
    add_up_bytes();
  }

  void make_invariant_tasks(const KeyRange* hidden) {
    invariant_.build(plan_, geometry_, capacity_, hidden);
    tasks_.swap(invariant_.tasks);
    merges_.swap(invariant_.merges);
    num_chunk_first_ = invariant_.num_chunk_first;
    num_partials_ = invariant_.num_partials;
    summary_ = {invariant_.kv_tokens};
    has_large_tiles_ = false;
    add_up_bytes();
  }

  void add_up_bytes() noexcept {
    const HeadDims dims = geometry_.dims();
    summary_.partial_bytes = num_partials_ * 2 * (dims.v + 1) * 4;
    summary_.kv_bytes =
        summary_.kv_tokens * geometry_.num_kv_heads * (dims.k + dims.v) * dims.stored;
  }

  void add_chunk_first(Run& run) {
    // The partial of (plan row, query head) has the index base + row * num_qo_heads + head.
    run.partial_base =
        static_cast<std::int32_t>(num_partials_) - run.row_begin * geometry_.num_kv_heads;
    run.flag = num_chunk_first_;
    summary_.num_shared += run.own ? 0 : 1;
    summary_.num_split += std::max(run.pieces - 1, 0);
    for (int i = 0; i < run.pieces; ++i) {
      const bool is_last = i == run.pieces - 1;
      Task task{};
      task.segment = run.segment;
      task.position_begin = run.position_of(i * run.piece_tokens);
      task.position_end = is_last ? open_end : run.position_of((i + 1) * run.piece_tokens);
      task.partial_base = partial_base(run, i);
      task.tokens = is_last ? run.tokens - i * run.piece_tokens : run.piece_tokens;
      for (int row = run.row_begin; row < run.row_end; row += run.tile_rows) {
        task.flag = num_chunk_first_++;
        add_tile(run, task, row, run.tile_rows);
      }
      num_partials_ += std::int64_t{run.rows()} * geometry_.num_kv_heads;
    }
  }

  // Tasks that write, after they have merged all from the path's begin to the end.
  void add_sequence_first(const Run& run) {
    Task task{};
    task.segment = run.streams_last() ? run.segment : -1;
    task.position_begin = run.position;
    task.position_end = open_end;
    task.merge_begin = static_cast<std::int32_t>(merges_.size());
    task.merge_count = run.merges;
    for (const Run* r = &run; r != nullptr; r = r->above >= 0 ? &run_at(r->above) : nullptr)
      for (int piece = r->pieces; piece-- > 0;)
        merges_.push_back({partial_base(*r, piece), r->flag + piece * r->tiles, r->row_begin,
                           std::countr_zero(static_cast<unsigned>(r->tile_rows))});
    std::reverse(merges_.begin() + task.merge_begin, merges_.end());
    const int most = last_rows(run);
    for (int row = run.row_begin; row < run.row_end; row += most) {
      // Of a prefill the last rows see most.
      const int end = std::min(row + most, run.row_end);
      const int unseen = run.kv_len - plan_.row_kv_len[(end - 1) / geometry_.group()];
      task.tokens = run.streams_last() ? std::max(run.tokens - unseen, 0) : 0;
      task.flag = row;
      add_tile(run, task, row, most);
    }
  }

  // Rows of tiles of those tasks of an own run that write.
  [[nodiscard]] int last_rows(const Run& run) const noexcept {
    return run.streams_last() ? run.tile_rows : merge_rows_;
  }
  [[nodiscard]] std::int32_t partial_base(const Run& run, int piece) const noexcept {
    return run.partial_base + piece * run.rows() * geometry_.num_kv_heads;
  }

  // The task of a tile of the run's rows, all else as in `task`.
  void add_tile(const Run& run, Task task, int row, int most) {
    task.row_begin = row;
    task.row_count = std::min(run.row_end - row, most);
    task.tile_rows = tile_rows_for(task.row_count);
    has_large_tiles_ = has_large_tiles_ || task.tile_rows > usual_tile_rows;
    summary_.kv_tokens += task.tokens;
    tasks_.push_back(task);
  }

  PlanView plan_;
  Geometry geometry_;
  CostModel model_;
  ScheduleCapacity capacity_;
  InvariantSchedule invariant_;
  std::vector<Run> runs_;
  int most_own_rows_ = usual_tile_rows;  // of tiles: a prefill has more than usual
  int merge_rows_ = 1;                   // packed rows at most of a task that only merges
  std::size_t num_tasks_ = 0;
  std::vector<Task> tasks_;
  std::vector<Merge> merges_;
  std::int64_t num_partials_ = 0;
  int num_chunk_first_ = 0;
  ScheduleSummary summary_;
  bool has_large_tiles_ = false;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
