// From a plan to tasks: what is shared, how runs are cut along KV, which tile, in what order.
// README.md has the rule ("Sharing, splitting, tiles"). Plain integer arithmetic on the host: the
// same plan gives the same tasks everywhere.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "../../attention_options.hpp"
#include "../../plan_view.hpp"
#include "../../variants.hpp"
#include "../support/array.hpp"
#include "../support/check.hpp"
#include "invariant_schedule.hpp"
#include "task_list.hpp"
#include "tile_layout.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// What a schedule is chosen by. Times are of one block, in picoseconds.
struct CostModel : CudaOptions::Tuning {
  std::int32_t num_blocks = 264;  ///< that run at the same time
  /// Most rows of a tile: 128 where the kernel and its shared memory have room for such.
  std::int32_t most_tile_rows = usual_tile_rows;
  /// CudaOptions::Reduce::batch_invariant, for which nothing here is asked.
  bool batch_invariant = false;
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
    if (model.batch_invariant) {
      invariant_.build(plan, geometry, capacity, hidden);
      return std::swap(list_, invariant_.list);
    }
    plan_ = plan;
    geometry_ = geometry;
    model_ = model;
    capacity_ = capacity;
    find_runs(hidden);
    Cut best;
    // Where partial results do not fit, what saves least by them is not shared.
    for (std::int64_t price = 1; best.ps == never && price < never; price *= 8) {
      const std::int64_t longest = share(price);
      // Pieces of one length, ever shorter, until they are a small part of the whole.
      for (std::int64_t n = 1; n == 1 || (n <= model.num_blocks && longest / n > best.ps / 16);
           n += 1 + n / 8)
        for (const bool own : {false, true}) best = (std::min)(best, cut(longest / n + 1, own));
    }
    check_argument(
        best.ps < never, "plan (tasks)", num_tasks_,
        {"at most ", capacity.tasks, " tasks: raise the rows or segments of the limits"});
    (void)cut(best.piece_ps, best.own);
    make_list();
  }

  [[nodiscard]] const std::vector<Task>& tasks() const noexcept { return list_.tasks; }
  [[nodiscard]] int num_chunk_first() const noexcept { return list_.num_chunk_first; }
  [[nodiscard]] int num_sequence_first() const noexcept {
    return static_cast<int>(tasks().size()) - num_chunk_first();
  }
  [[nodiscard]] const std::vector<Merge>& merges() const noexcept { return list_.merges; }
  [[nodiscard]] std::int64_t num_partials() const noexcept { return list_.num_partials; }
  /// Whether Reduce::batch_invariant would cut the plan's rows where it did when this was built.
  [[nodiscard]] bool keeps_blocks(const PlanView& plan) const noexcept {
    return invariant_.keeps_blocks(plan);
  }

 private:
  static constexpr std::int64_t never = std::int64_t{1} << 60;

  struct Cut {
    std::int64_t ps = never;    // that it takes, about
    std::int64_t piece_ps = 0;  // the longest piece
    bool own = false;           // pieces of own runs, too
    bool operator<(const Cut& other) const noexcept { return ps < other.ps; }
  };

  // What the same rows see of a segment and, where those above are not shared, of them: all rows
  // below, or those whose paths end there.
  struct Run {
    std::int32_t segment, row_begin, row_end;  // packed rows
    bool own = false;                          // of rows that end there: merges and writes
    bool shared = false;                       // streamed once for all; own: nothing is left to see
    std::int32_t branches = 0;                 // into which a segment goes on
    std::int32_t kv_len = 0;                   // the most that a row sees
    KeyRange hidden{0, open_end};              // from all rows
    std::int32_t above = -1;                   // the nearest shared run of the path
    std::int32_t position = 0, tokens = 0;     // the first that is streamed, how many are
    std::int32_t tile_rows = 0, tiles = 0;
    std::int64_t ps = 0, memory_ps = 0;  // that a tile takes alone; its K/V, beside others
    std::int32_t pieces = 0;             // of chunk-first tasks
    std::int32_t piece_tokens = 0;       // of each but the last, which is open: it may grow
    std::int32_t first_piece = 0;        // in pieces_
    std::int32_t merges = 0;             // partial results from the path's begin to here

    [[nodiscard]] int rows() const noexcept { return row_end - row_begin; }
    [[nodiscard]] bool merges_only() const noexcept { return own && (shared || pieces > 0); }
    /// The path position of a token, counted without those that are hidden.
    [[nodiscard]] std::int32_t position_of(std::int32_t token) const noexcept {
      const bool beyond = hidden.begin >= position && position + token >= hidden.begin;
      return position + token + (beyond ? hidden.size() : 0);
    }
    void see(std::int32_t len, KeyRange hides) noexcept {
      kv_len = (std::max)(kv_len, len);
      hidden = common(hidden, hides);
    }
  };

  // Chunk-first tasks, or the others. K/V comes from memory once for all tiles, a block has one
  // task at a time, and long ones make waves.
  struct Phase {
    std::int64_t memory_ps = 0, work_ps = 0, longest_ps = 0, long_items = 0;

    [[nodiscard]] std::int64_t ps(std::int64_t blocks) const noexcept {
      const std::int64_t waves = (long_items + blocks - 1) / blocks;
      return (std::max)((std::max)(memory_ps, work_ps) / blocks, waves * longest_ps);
    }
  };

  [[nodiscard]] static KeyRange common(KeyRange a, KeyRange b) noexcept {
    return {(std::max)(a.begin, b.begin), (std::min)(a.end, b.end)};
  }
  [[nodiscard]] Run& run_at(int i) noexcept { return runs_[to_size(i)]; }

  // One for each segment, then one for each that rows end on.
  void find_runs(const KeyRange* hidden) {
    const int group = geometry_.group();
    runs_.clear();
    for (int s = 0; s < plan_.num_segments; ++s)
      runs_.push_back({s, plan_.segments[s].row_begin * group, plan_.segments[s].row_end * group});
    for (int row = 0, end = 0; row < plan_.num_rows; row = end) {
      const std::int32_t segment = plan_.row_segment[row];
      check_argument(run_at(segment).branches++ == 0, "plan.row_segment", row,
                     "the rows of a segment side by side");
      Run run{segment, row * group, 0, true};
      for (; end < plan_.num_rows && plan_.row_segment[end] == segment; ++end)
        run.see(plan_.row_kv_len[end], hidden != nullptr ? hidden[end] : KeyRange{});
      run.row_end = end * group;
      run_at(segment).see(run.kv_len, run.hidden);
      runs_.push_back(run);
    }
    for (int s = plan_.num_segments; s-- > 0;) {
      const std::int32_t parent = plan_.segments[s].parent;
      if (parent < 0 || run_at(s).rows() == 0) continue;
      run_at(parent).see(run_at(s).kv_len, run_at(s).hidden);
      ++run_at(parent).branches;
    }
  }

  // Top-down: a run is streamed once for all rows below, where that saves more than its partial
  // results cost, or goes on into each branch. Returns how long the longest is.
  std::int64_t share(std::int64_t price) noexcept {
    const HeadDims dims = geometry_.dims();
    const std::int64_t heads = geometry_.num_kv_heads;
    std::int64_t longest = 0;
    for (Run& run : runs_) {
      const Segment& segment = plan_.segments[run.segment];
      const int up = run.own ? run.segment : segment.parent;
      const bool fresh = up < 0 || run_at(up).shared;
      run.above = fresh ? up : run_at(up).above;
      run.position = fresh ? segment.position : run_at(up).position;
      if (run.hidden.begin <= run.position) run.position = (std::max)(run.position, run.hidden.end);
      const KeyRange all{run.position, (std::min)(segment.position + segment.length, run.kv_len)};
      run.tokens = run.own && fresh ? 0 : all.size() - common(all, run.hidden).size();
      // Large tiles read K/V half as often, but there are half as many: only where every block has
      // one, in pieces that there is room for and beside whose length a task's start does not
      // count, of rows that none merge.
      const auto room = static_cast<std::int64_t>(capacity_.partials) / (run.rows() * heads + 1);
      const auto pieces = (std::min<std::int64_t>)(num_tiles(run.tokens, 256), room + 1);
      const std::int64_t items = num_tiles(run.rows(), model_.most_tile_rows) * pieces * heads;
      const bool fills = items >= model_.num_blocks && (!run.own || run.above < 0);
      run.tile_rows = fills ? model_.most_tile_rows : usual_tile_rows;
      run.tiles = num_tiles(run.rows(), run.tile_rows);
      const int height = tile_rows_for((std::min)(run.rows(), run.tile_rows));
      const std::int64_t elements = std::int64_t{run.tokens} * (dims.k + dims.v);
      const std::int64_t bytes = elements * dims.stored;
      run.ps = (std::max)(bytes * model_.alone_ps_per_kib / 1024,
                          2 * elements * height * model_.ps_per_mflop / 1000000);
      run.memory_ps = bytes * model_.ps_per_kib / 1024;
      const std::int64_t saves = (run.branches - run.tiles) * run.memory_ps;
      const std::int64_t partials_ps =
          std::int64_t{run.rows()} * (dims.v + 1) * 8 * model_.ps_per_kib / 1024;
      const std::int64_t costs = partials_ps + run.tiles * model_.task_ps + model_.wait_ps;
      run.shared = run.own ? fresh : saves / price > costs;
      if (!run.own && !run.shared) run.tokens = 0;  // streamed by those below
      if (run.tokens > 0) longest = (std::max)(longest, run.ps);
    }
    return longest;
  }

  // Cuts runs into equal pieces of whole KV tiles; what they take then, about. never: no room.
  Cut cut(std::int64_t piece_ps, bool own) noexcept {
    const HeadDims dims = geometry_.dims();
    const std::int64_t heads = geometry_.num_kv_heads, blocks = model_.num_blocks;
    const int kv_tile = kv_tile_tokens(dims);
    Phase first, last;  // chunk-first tasks, and the others
    std::int64_t tasks = 0, partials = 0, merges = 0, end = 0;
    for (Run& run : runs_) {
      run.pieces = 0;
      if (run.tokens > 0 && (!run.own || own)) {
        const int most = (std::max)(run.tokens / model_.min_split_tokens, 1);
        const auto pieces =
            static_cast<int>(std::clamp<std::int64_t>(run.ps / piece_ps + 1, 1, most));
        run.piece_tokens = num_tiles(num_tiles(run.tokens, pieces), kv_tile) * kv_tile;
        run.pieces = num_tiles(run.tokens, run.piece_tokens);
      }
      const std::int64_t pieces = (std::max)(run.pieces, 1);
      run.merges = run.pieces + (run.above >= 0 ? run_at(run.above).merges : 0);
      if (run.tokens > 0) {
        Phase& phase = run.pieces > 0 ? first : last;
        const std::int64_t ps = run.ps / pieces + model_.task_ps;
        const std::int64_t items = run.tiles * pieces * heads;
        phase.memory_ps += run.memory_ps * heads;
        phase.work_ps += items * ps;
        phase.longest_ps = (std::max)(phase.longest_ps, ps);
        if (run.ps / pieces > piece_ps / 2) phase.long_items += items;
      }
      tasks += std::int64_t{run.tiles} * run.pieces;
      partials += std::int64_t{run.pieces} * run.rows() * heads;
      if (!run.own) continue;
      const int rows = (std::min)(run.rows(), last_height(run));
      const std::int64_t writes = num_tiles(run.rows(), rows);
      const int in_a_row = merges_in_a_row(rows, dims.v, run.merges);
      tasks += writes;
      merges += run.merges;
      if (run.merges > 0) end = (std::max)(end, model_.wait_ps + model_.merge_ps * in_a_row);
      if (run.merges_only()) last.work_ps += writes * heads * model_.task_ps;
    }
    num_tasks_ = to_size(tasks);
    const bool fits = num_tasks_ <= capacity_.tasks && to_size(merges) <= capacity_.merges &&
                      to_size(partials) <= (std::min<std::size_t>)(capacity_.partials, 0x7fffffff);
    return {fits ? first.ps(blocks) + last.ps(blocks) + end : never, piece_ps, own};
  }

  // Longest first; among equals the plan's order, so that tiles of one run stay neighbours.
  void make_list() {
    const auto before = [](const Task& a, const Task& b) {
      return a.tokens != b.tokens ? a.tokens > b.tokens : a.flag < b.flag;
    };
    list_.clear();
    pieces_.clear();
    for (Run& run : runs_) add_chunk_first(run);
    for (const Run& run : runs_)
      if (run.own) add_sequence_first(run);
    const auto middle = list_.tasks.begin() + num_chunk_first();
    std::sort(list_.tasks.begin(), middle, before);
    std::sort(middle, list_.tasks.end(), before);
  }

  void add_chunk_first(Run& run) {
    run.first_piece = static_cast<std::int32_t>(pieces_.size());
    for (int i = 0; i < run.pieces; ++i) {
      const std::int32_t begin = i * run.piece_tokens, end = begin + run.piece_tokens;
      Task task{};
      task.segment = run.segment;
      task.position_begin = run.position_of(begin);
      task.position_end = i + 1 < run.pieces ? run.position_of(end) : open_end;
      task.tokens = (std::min)(run.tokens, end) - begin;
      pieces_.push_back(list_.add_chunk_first(task, run.row_begin, run.row_end, run.tile_rows,
                                              geometry_.num_kv_heads));
    }
  }

  // Tasks that write, after they have merged all from the path's begin to the end.
  void add_sequence_first(const Run& run) {
    Task task{};
    task.segment = run.merges_only() ? -1 : run.segment;
    task.position_begin = run.position;
    task.position_end = open_end;
    task.merge_begin = static_cast<std::int32_t>(merges().size());
    task.merge_count = run.merges;
    for (const Run* r = &run; r != nullptr; r = r->above >= 0 ? &run_at(r->above) : nullptr) {
      const auto first = pieces_.begin() + r->first_piece;
      list_.merges.insert(list_.merges.begin() + task.merge_begin, first, first + r->pieces);
    }
    const std::size_t added = tasks().size();
    list_.add_tiles(task, run.row_begin, run.row_end, last_height(run));
    if (run.merges_only()) return;
    for (Task& t : std::span(list_.tasks).subspan(added)) {
      // Of a prefill the last rows see most.
      const int last = (t.row_begin + t.row_count - 1) / geometry_.group();
      t.tokens = (std::max)(run.tokens - (run.kv_len - plan_.row_kv_len[last]), 0);
    }
  }

  // Most rows of the tasks that write an own run. Those that only merge have as few as one round of
  // blocks takes: threads share the rest.
  [[nodiscard]] int last_height(const Run& run) const noexcept {
    if (!run.merges_only()) return run.tile_rows;
    const std::int64_t rows = std::int64_t{plan_.num_rows} * geometry_.num_qo_heads;
    return static_cast<int>(std::clamp<std::int64_t>(
        (rows + model_.num_blocks - 1) / model_.num_blocks, 1, merge_rows(geometry_.dims().v)));
  }

  PlanView plan_;
  Geometry geometry_;
  CostModel model_;
  ScheduleCapacity capacity_;
  InvariantSchedule invariant_;
  std::vector<Run> runs_;
  std::vector<Merge> pieces_;
  std::size_t num_tasks_ = 0;
  TaskList list_;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
