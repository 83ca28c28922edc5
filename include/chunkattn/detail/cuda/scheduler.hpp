// From a plan to tasks: what is shared, how runs are split along KV, which tile, in what order. Of
// some schedules it takes the one that takes least time by its own estimate; README.md has the rule
// ("Sharing, splitting, tiles"). Plain integer arithmetic on the host: the same plan gives the same
// tasks everywhere.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../../plan_view.hpp"
#include "../../variants.hpp"
#include "../support/check.hpp"
#include "../support/to_size.hpp"
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
    // Where partial results do not fit, what saves least by them is not shared.
    Choice best;
    for (std::int64_t price = 1; best.ps == never && price <= 4096; price *= 8)
      try_all(price, best);
    try_all(0, best);
    detail::check_argument(
        best.ps < never, "plan (tasks)", num_tasks_,
        {"at most ", capacity.tasks, " tasks: raise the rows or segments of the limits"});
    share(best.price);
    choose_tiles(best.own_rows);
    cut(best);
    (void)time();
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
  static constexpr std::int64_t never = std::int64_t{1} << 62;

  struct Choice {
    std::int64_t price = 0;     // of partial results against what sharing saves; 0: none is shared
    std::int64_t piece_ps = 0;  // the longest piece
    bool own = false;           // pieces of sequences' own runs, too
    std::int32_t own_rows = usual_tile_rows;  // most of a tile of own runs that merge nothing
    std::int64_t ps = never;                  // all takes
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
    std::int32_t mean_tokens = 0;           // that a tile sees: rows of a prefill see ever more
    std::int32_t long_tiles = 0;            // that see nearly all
    std::int32_t above = -1;                // the nearest shared run of the path
    std::int32_t tile_rows = usual_tile_rows, tiles = 0;
    std::int32_t pieces = 0;        // of chunk-first tasks; 0: streamed by those that merge
    std::int32_t piece_tokens = 0;  // the last piece is open: it may grow before the next build
    std::int32_t merges = 0;        // partial results from the path's begin to here
    std::int32_t partial_base = 0, flag = 0;  // of the first piece
    std::int32_t merge_begin = 0;
    std::int64_t ps = 0, piece_ps = 0;  // a block alone takes for a tile; now, for a piece
    std::int64_t mean_ps = 0;           // likewise, of all tiles

    [[nodiscard]] int rows() const noexcept { return row_end - row_begin; }
    [[nodiscard]] bool in_use() const noexcept { return own || shared; }
    [[nodiscard]] bool streams_last() const noexcept { return own && !shared && pieces == 0; }
    [[nodiscard]] int tile_height() const noexcept {
      return tile_rows_for(std::min(rows(), tile_rows));
    }
    /// The path position of a token, counted without those that are hidden.
    [[nodiscard]] std::int32_t position_of(std::int32_t token) const noexcept {
      const bool beyond = hidden.begin >= position && position + token >= hidden.begin;
      return position + token + (beyond ? hidden.size() : 0);
    }
    void add(std::int32_t len, KeyRange hides) noexcept {
      kv_len = std::max(kv_len, len);
      hidden = common(hidden, hides);
    }
  };

  // Of an own run, and how long it streams.
  struct Tile {
    std::int64_t ps;
    int run, row;
  };

  // Tasks that begin in one go. K/V comes from memory once for all tiles, a block has one task at a
  // time, and those of about the longest's length make waves.
  struct Phase {
    std::int64_t items = 0, memory_ps = 0, block_ps = 0, longest_ps = 0, long_items = 0;

    /// Of `part` of `whole` of them.
    [[nodiscard]] std::int64_t ps(const CostModel& model, std::int64_t part = 1,
                                  std::int64_t whole = 1) const noexcept {
      const std::int64_t blocks = model.num_blocks;
      const std::int64_t waves = (long_items * part / whole + blocks - 1) / blocks;
      const std::int64_t even = (std::max(memory_ps, block_ps) + items * model.task_ps) / blocks;
      return std::max(even * part / whole, waves * (longest_ps + model.task_ps));
    }
  };

  [[nodiscard]] static KeyRange common(KeyRange a, KeyRange b) noexcept {
    return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
  }
  [[nodiscard]] HeadDims dims() const noexcept { return geometry_.dims(); }
  [[nodiscard]] Run& run_at(int i) noexcept { return runs_[to_size(i)]; }

  // One for each segment, then one for each that rows end on.
  void find_runs(const KeyRange* hidden) {
    const int group = geometry_.group();
    runs_.clear();
    for (int s = 0; s < plan_.num_segments; ++s)
      runs_.push_back({s, plan_.segments[s].row_begin * group, plan_.segments[s].row_end * group});
    for (int row = 0; row < plan_.num_rows; ++row) {
      const std::int32_t segment = plan_.row_segment[row];
      if (row == 0 || segment != plan_.row_segment[row - 1]) {
        detail::check_argument(run_at(segment).branches++ == 0, "plan.row_segment", row,
                               "the rows of a segment side by side");
        runs_.push_back({segment, row * group, row * group, true});
      }
      const KeyRange hides = hidden != nullptr ? hidden[row] : KeyRange{};
      runs_.back().row_end += group;
      runs_.back().add(plan_.row_kv_len[row], hides);
      run_at(segment).add(plan_.row_kv_len[row], hides);
    }
    for (int s = plan_.num_segments - 1; s >= 0; --s) {
      const Run& run = run_at(s);
      if (plan_.segments[s].parent < 0 || run.rows() == 0) continue;
      Run& parent = run_at(plan_.segments[s].parent);
      parent.add(run.kv_len, run.hidden);
      ++parent.branches;
    }
  }

  // Top-down: a run is streamed once for all rows below, or goes on into each branch.
  void share(std::int64_t price) noexcept {
    for (Run& run : runs_) {
      const Segment& segment = plan_.segments[run.segment];
      const int up = run.own ? run.segment : segment.parent;
      const bool fresh = up < 0 || run_at(up).shared;
      run.above = up < 0 || fresh ? up : run_at(up).above;
      run.position = fresh ? segment.position : run_at(up).position;
      if (run.hidden.begin <= run.position) run.position = std::max(run.position, run.hidden.end);
      const KeyRange all{run.position, std::min(segment.position + segment.length, run.kv_len)};
      run.tokens = run.own && fresh ? 0 : all.size() - common(all, run.hidden).size();
      run.shared = run.own ? fresh : price > 0 && saves(run, price);
    }
  }

  [[nodiscard]] bool saves(const Run& run, std::int64_t price) const noexcept {
    if (to_size(run.rows()) * to_size(geometry_.num_kv_heads) > capacity_.partials) return false;
    const int tile_rows = tile_rows_for(std::min(run.rows(), usual_tile_rows));
    const std::int64_t once = model_.stream_ps(run.tokens, tile_rows, dims(), model_.ps_per_kib);
    const std::int64_t apart = model_.stream_ps(run.tokens, 0, dims(), model_.ps_per_kib);
    return run.branches * apart > num_tiles(run.rows()) * (once + model_.task_ps) +
                                      price * model_.partial_ps(run.rows(), dims().v);
  }

  // Large tiles read K/V half as often, but there are half as many: only for a shared run of which
  // every block has a task, in pieces of a length beside which a task's start does not count; and
  // for own runs that merge nothing, where that takes less time.
  void choose_tiles(std::int32_t own_rows) noexcept {
    constexpr int long_piece = 256;  // tokens
    for (Run& run : runs_) {
      const std::int64_t items = std::int64_t{num_tiles(run.rows(), model_.most_tile_rows)} *
                                 ((run.tokens + long_piece - 1) / long_piece) *
                                 geometry_.num_kv_heads;
      const bool large = run.own ? run.above < 0 : items >= model_.num_blocks;
      run.tile_rows = !large ? usual_tile_rows : run.own ? own_rows : model_.most_tile_rows;
      run.tiles = num_tiles(run.rows(), run.tile_rows);
      look_at_tiles(run);
      run.ps = stream_ps(run, run.tokens, model_.alone_ps_per_kib);
      run.mean_ps = stream_ps(run, run.mean_tokens, model_.alone_ps_per_kib);
    }
  }

  void look_at_tiles(Run& run) const noexcept {
    run.mean_tokens = run.tokens;
    run.long_tiles = run.tiles;
    if (!run.own || run.tiles == 1) return;
    std::int64_t all = 0;
    run.long_tiles = 0;
    for (int row = run.row_begin; row < run.row_end; row += run.tile_rows) {
      const std::int32_t tokens = seen_by(run, std::min(row + run.tile_rows, run.row_end));
      all += tokens;
      run.long_tiles += tokens > run.tokens / 4 * 3;
    }
    run.mean_tokens = static_cast<std::int32_t>(all / run.tiles);
  }

  // Of an own run: tokens of a tile whose packed rows end before `end`. The last one sees most.
  [[nodiscard]] std::int32_t seen_by(const Run& run, int end) const noexcept {
    const std::int32_t unseen = run.kv_len - plan_.row_kv_len[(end - 1) / geometry_.group()];
    return std::clamp(run.tokens - unseen, 0, run.tokens);
  }
  // Products wait for shared memory, of which a large tile reads three quarters of what two others
  // do. (Shared runs' times, by which these are cut, were found better without that.)
  [[nodiscard]] std::int64_t stream_ps(const Run& run, std::int64_t tokens,
                                       std::int64_t kib) const noexcept {
    const int rows = run.tile_height();
    const bool fast = run.own && rows > usual_tile_rows;
    return model_.stream_ps(tokens, fast ? rows * 3 / 4 : rows, dims(), kib);
  }

  // Pieces of one length, ever shorter, until they are a small part of what each block has to do.
  void try_all(std::int64_t price, Choice& best) noexcept {
    share(price);
    try_cuts({.price = price}, best);
    const bool large = std::any_of(runs_.begin(), runs_.end(), [](const Run& run) {
      return run.own && run.above < 0 && run.rows() > usual_tile_rows;
    });
    if (large && model_.most_tile_rows > usual_tile_rows)
      try_cuts({.price = price, .own_rows = model_.most_tile_rows}, best);
  }
  void try_cuts(Choice now, Choice& best) noexcept {
    choose_tiles(now.own_rows);
    std::int64_t longest = 0, all = 0;
    for (const Run& run : runs_) {
      if (!run.in_use()) continue;
      longest = std::max(longest, run.ps);
      all += run.tiles * run.mean_ps;
    }
    const std::int64_t enough = all * geometry_.num_kv_heads / model_.num_blocks / 8;
    for (std::int64_t n = 1; n == 1 || (n <= model_.num_blocks && longest / n > enough);
         n += 1 + n / 8)
      for (const bool own : {false, true}) {
        now.piece_ps = longest / n + 1;
        now.own = own;
        cut(now);
        now.ps = time();
        if (own) now.ps += now.ps / 32;  // for partial results, whose bytes time() leaves out
        if (now.ps < best.ps) best = now;
      }
  }

  // Equal pieces of whole KV tiles.
  void cut(const Choice& choice) noexcept {
    const int tile = kv_tile_tokens(dims());
    for (Run& run : runs_) {
      run.pieces = 0;
      if (!run.in_use() || (run.own && (!choice.own || run.tokens == 0))) continue;
      const auto wanted =
          static_cast<std::int32_t>((run.ps + choice.piece_ps - 1) / choice.piece_ps);
      const std::int32_t pieces =
          std::max(std::min(wanted, run.tokens / model_.min_split_tokens), 1);
      run.piece_tokens = ((run.tokens + pieces - 1) / pieces + tile - 1) / tile * tile;
      run.pieces = pieces == 1 ? 1 : (run.tokens + run.piece_tokens - 1) / run.piece_tokens;
    }
  }

  // What the runs as they are cut take, about; never: they do not fit.
  [[nodiscard]] std::int64_t time() noexcept {
    const std::int64_t heads = geometry_.num_kv_heads, blocks = model_.num_blocks;
    Phase phases[2];  // of chunk-first tasks and of the others
    std::int64_t tasks = 0, partials = 0, merges = 0, merging = 0;
    for (Run& run : runs_) {
      if (!run.in_use()) continue;
      run.merges = run.pieces + (run.above >= 0 ? run_at(run.above).merges : 0);
      partials += std::int64_t{run.pieces} * run.rows() * heads;
      if (run.own) merges += run.merges;
      if (run.own && !run.streams_last()) merging += run.rows();
      tasks += std::int64_t{run.tiles} * (run.streams_last() ? 1 : run.pieces);
      if (run.tokens == 0) continue;
      Phase& phase = phases[run.pieces > 0 ? 0 : 1];
      phase.items += std::int64_t{run.tiles} * std::max(run.pieces, 1) * heads;
      phase.memory_ps += model_.stream_ps(run.tokens, 0, dims(), model_.ps_per_kib) * heads;
      phase.block_ps += run.tiles * run.mean_ps * heads;
    }
    // As few rows to a task that only merges as one round of blocks takes, so that threads share
    // partial results.
    const int most_rows = merge_rows(dims().v);
    merge_rows_ = static_cast<int>(
        std::clamp<std::int64_t>((merging * heads + blocks - 1) / blocks, 1, most_rows));
    if (to_size(tasks + num_merge_tasks()) > capacity_.tasks) merge_rows_ = most_rows;
    num_tasks_ = to_size(tasks + num_merge_tasks());
    if (num_tasks_ > capacity_.tasks || to_size(merges) > capacity_.merges ||
        to_size(partials) > std::min<std::size_t>(capacity_.partials, 0x7fffffff))
      return never;
    // Bytes come the slower the more blocks stream.
    const std::int64_t streams = std::min(phases[0].items + phases[1].items, blocks);
    const std::int64_t kib =
        std::max(model_.alone_ps_per_kib, model_.ps_per_kib * streams / blocks);
    std::int64_t end = 0;  // from the last flag on
    for (Run& run : runs_) {
      if (!run.in_use()) continue;
      Phase& phase = phases[run.pieces > 0 ? 0 : 1];
      run.piece_ps = stream_ps(run, run.tokens, kib) / std::max(run.pieces, 1);
      phase.longest_ps = std::max(phase.longest_ps, run.piece_ps);
      if (!run.own || run.merges == 0) continue;
      const int rows = std::min(run.rows(), last_rows(run));
      const std::int64_t ps = model_.merge_ps * merges_in_a_row(rows, dims().v, run.merges);
      phases[1].block_ps += num_tiles(run.rows(), rows) * heads * ps;
      if (!run.streams_last()) phases[1].items += num_tiles(run.rows(), rows) * heads;
      end = std::max(end, model_.wait_ps + ps);
    }
    for (const Run& run : runs_) {
      Phase& phase = phases[run.pieces > 0 ? 0 : 1];
      if (run.in_use() && run.tokens > 0 && run.piece_ps > phase.longest_ps / 2)
        phase.long_items += std::int64_t{run.long_tiles} * std::max(run.pieces, 1) * heads;
    }
    // What finds no block beside the first phase begins after it.
    const std::int64_t second = std::max<std::int64_t>(phases[1].items, 1);
    const std::int64_t later =
        std::clamp<std::int64_t>(phases[0].items + second - blocks, 0, second);
    const std::int64_t all =
        std::max({phases[0].ps(model_) + phases[1].ps(model_, later, second), phases[1].ps(model_),
                  (phases[0].memory_ps + phases[1].memory_ps) / blocks});
    return all + end;
  }

  // Of the runs whose rows only merge.
  [[nodiscard]] std::int64_t num_merge_tasks() const noexcept {
    std::int64_t tasks = 0;
    for (const Run& run : runs_)
      if (run.own && !run.streams_last()) tasks += num_tiles(run.rows(), merge_rows_);
    return tasks;
  }

  // Longest first; among equals the plan's order, so that tiles of one run stay neighbours.
  void make_tasks() {
    tasks_.clear();
    merges_.clear();
    order_.clear();
    num_partials_ = 0;
    summary_ = {};
    has_large_tiles_ = false;
    for (int i = 0; i < static_cast<int>(runs_.size()); ++i)
      if (run_at(i).in_use()) order_.push_back(i);
    std::sort(order_.begin(), order_.end(), [&](int a, int b) {
      const std::int64_t x = run_at(a).piece_ps, y = run_at(b).piece_ps;
      return x != y ? x > y : a < b;
    });
    for (const int i : order_) add_chunk_first(run_at(i));
    num_chunk_first_ = static_cast<int>(tasks_.size());
    tiles_.clear();
    for (const int i : order_)
      if (run_at(i).own) add_merges(i);
    std::sort(tiles_.begin(), tiles_.end(), [](const Tile& a, const Tile& b) {
      return a.ps != b.ps ? a.ps > b.ps : a.row < b.row;
    });
    for (const Tile& tile : tiles_) add_sequence_first(tile);
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
    summary_.partial_bytes = num_partials_ * 2 * (dims().v + 1) * 4;
    summary_.kv_bytes =
        summary_.kv_tokens * geometry_.num_kv_heads * (dims().k + dims().v) * dims().stored;
  }

  void add_chunk_first(Run& run) {
    // The partial of (plan row, query head) has the index base + row * num_qo_heads + head.
    run.partial_base =
        static_cast<std::int32_t>(num_partials_) - run.row_begin * geometry_.num_kv_heads;
    run.flag = static_cast<std::int32_t>(tasks_.size());
    summary_.kv_tokens += std::int64_t{run.tiles} * run.tokens;
    summary_.num_shared += run.own ? 0 : 1;
    summary_.num_split += std::max(run.pieces - 1, 0);
    for (int i = 0; i < run.pieces; ++i) {
      Task task{};
      task.segment = run.segment;
      task.position_begin = run.position_of(i * run.piece_tokens);
      task.position_end =
          i == run.pieces - 1 ? open_end : run.position_of((i + 1) * run.piece_tokens);
      task.partial_base = partial_base(run, i);
      for (int row = run.row_begin; row < run.row_end; row += run.tile_rows) {
        task.flag = static_cast<std::int32_t>(tasks_.size());
        add_tile(run, task, row, run.tile_rows);
      }
      num_partials_ += std::int64_t{run.rows()} * geometry_.num_kv_heads;
    }
  }

  // What an own run merges, from the begin of its path to the end; and its tiles.
  void add_merges(int i) {
    Run& run = run_at(i);
    run.merge_begin = static_cast<std::int32_t>(merges_.size());
    merges_.resize(merges_.size() + to_size(run.merges));
    auto merge = merges_.end();
    for (const Run* r = &run; r != nullptr; r = r->above >= 0 ? &run_at(r->above) : nullptr)
      for (int piece = r->pieces - 1; piece >= 0; --piece)
        *--merge = {partial_base(*r, piece), r->flag + piece * r->tiles, r->row_begin,
                    std::countr_zero(static_cast<unsigned>(r->tile_rows))};
    const int most = last_rows(run);
    for (int row = run.row_begin; row < run.row_end; row += most) {
      const std::int32_t tokens = seen_by(run, std::min(row + most, run.row_end));
      tiles_.push_back(
          {run.streams_last() ? stream_ps(run, tokens, model_.ps_per_kib) : run.piece_ps, i, row});
    }
  }

  void add_sequence_first(const Tile& tile) {
    const Run& run = run_at(tile.run);
    Task task{};
    task.segment = run.streams_last() ? run.segment : -1;
    task.position_begin = run.position;
    task.position_end = open_end;
    task.merge_begin = run.merge_begin;
    task.merge_count = run.merges;
    add_tile(run, task, tile.row, last_rows(run));
  }

  // Rows of tiles of those tasks of an own run that write.
  [[nodiscard]] int last_rows(const Run& run) const noexcept {
    return run.streams_last() ? run.tile_rows : merge_rows_;
  }
  // Of a piece.
  [[nodiscard]] std::int32_t partial_base(const Run& run, int piece) const noexcept {
    return run.partial_base + piece * run.rows() * geometry_.num_kv_heads;
  }

  // The task of a tile of the run's rows, all else as in `task`.
  void add_tile(const Run& run, Task task, int row, int most) {
    task.row_begin = row;
    task.row_count = std::min(run.row_end - row, most);
    task.tile_rows = tile_rows_for(task.row_count);
    has_large_tiles_ = has_large_tiles_ || task.tile_rows > usual_tile_rows;
    tasks_.push_back(task);
  }

  PlanView plan_;
  Geometry geometry_;
  CostModel model_;
  ScheduleCapacity capacity_;
  InvariantSchedule invariant_;
  std::vector<Run> runs_;
  std::vector<int> order_;  // of runs
  std::vector<Tile> tiles_;
  int merge_rows_ = 1;  // packed rows at most of a task that only merges
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
