// Where runs are cut along KV: as often as makes the launch end soonest.
//
// Its blocks take (task, KV head) pairs, each the next one as soon as it is free: the chunk-first
// ones, longest first, then the sequence-first ones, longest first, which end with partial results
// of the former. So lengths tell when a launch ends, and no quotient does: 288 equal items on 264
// blocks take as long as 528. Candidates are tried in the order of what they promise at best.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "../attention/variant.hpp"
#include "../base/config.hpp"
#include "cost_model.hpp"
#include "tile_layout.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Heads of the layers that a schedule serves.
struct Geometry {
  std::int32_t num_qo_heads = 0;  ///< query heads
  std::int32_t num_kv_heads = 0;  ///< heads of K and of V
  std::int32_t head_dim = 0;      ///< elements per head of K
  std::int32_t value_dim = 0;     ///< elements per head of V; 0: head_dim
  /// Query heads that read the same K and V.
  [[nodiscard]] constexpr std::int32_t group() const noexcept {
    return num_qo_heads / num_kv_heads;
  }
  [[nodiscard]] constexpr cuda_detail::HeadDims dims() const noexcept {
    return {head_dim, value_dim != 0 ? value_dim : head_dim};
  }
};

namespace cuda_detail {

/// How much room a schedule has.
struct ScheduleCapacity {
  std::size_t tasks = 0;
  std::size_t merges = 0;
  std::size_t partials = 0;  ///< rows x query heads
};

/// `tokens` positions on the path of `segment`, from `position` on, for rows [row_begin, row_end),
/// without those that are hidden from all of them. It is streamed by
/// chunk-first tasks where several sequences share it (`last` is false) and where it is cut, else
/// by the tasks that merge and write.
struct Run {
  std::int32_t segment, row_begin, row_end, position, tokens;
  std::int32_t above = -1;        ///< the nearest shared run on the path, which stands before this
  bool last = false;              ///< a sequence's own run: merges and writes
  bool covered = false;           ///< such a run, all of it in the shared run that ends with it
  std::int32_t splits = 1;        ///< tasks along KV
  std::int32_t step = 0;          ///< tokens of a split; the last one is open
  std::int32_t merges = 0;        ///< partial results from the path's begin to the end of this run
  std::int32_t partial_base = 0;  ///< of the first split; the next is partial_stride on
  std::int32_t partial_stride = 0;
  std::int32_t flag_base = 0;  ///< of the first split's first tile; the next split's follow
  KeyRange hidden{};           ///< positions among these that none of its rows sees

  /// An own run, cut: streamed by chunk-first tasks.
  [[nodiscard]] bool moved() const noexcept { return last && splits > 1; }
  /// An own run that is streamed by the tasks that merge and write. Without visible tokens too: it
  /// may grow before the next build.
  [[nodiscard]] bool streams_last() const noexcept { return last && !moved() && !covered; }
  /// The path position of a token, counted without those that are hidden.
  [[nodiscard]] std::int32_t position_of(std::int32_t token) const noexcept {
    const std::int32_t at = position + token;
    return hidden.begin >= position && hidden.begin < hidden.end && at >= hidden.begin
               ? at + hidden.end - hidden.begin
               : at;
  }
};

/// When the last of `num_blocks` blocks is done that take items in the order of add(), each the
/// next one when it is free.
class Makespan {
 public:
  /// Items come `copies` at a time, all alike: one for each KV head.
  void start(int num_blocks, int copies) {
    // Blocks that always take copies of the same item go in step: one stands for all of them.
    const int together = std::gcd(num_blocks, copies);
    pushes_ = copies / together;
    free_.assign(static_cast<std::size_t>(num_blocks / together), 0);
    end_ = 0;
  }
  /// An item that takes `ps`, and then, from `ready` on at the earliest, `rest`.
  void add(std::int64_t ps, std::int64_t ready = 0, std::int64_t rest = 0) {
    for (int i = 0; i < pushes_; ++i) {
      std::pop_heap(free_.begin(), free_.end(), std::greater<>());
      free_.back() = std::max(free_.back() + ps, ready) + rest;
      end_ = std::max(end_, free_.back());
      std::push_heap(free_.begin(), free_.end(), std::greater<>());
    }
  }
  [[nodiscard]] std::int64_t end() const noexcept { return end_; }

 private:
  std::vector<std::int64_t> free_;  // a heap, the earliest first
  int pushes_ = 0;
  std::int64_t end_ = 0;
};

/// Chooses `splits` and `step` of runs. Keeps its memory from call to call.
class KvSplits {
 public:
  /// Cuts `runs` so that the modelled time of the launch is least and everything fits `capacity`.
  /// False: not even the uncut runs fit.
  bool choose(std::vector<Run>& runs, const Geometry& geometry, const CostModel& model,
              const ScheduleCapacity& capacity) {
    runs_ = &runs;
    geometry_ = geometry;
    model_ = model;
    capacity_ = capacity;
    caps_[0] = caps_[1] = uncut;
    if (!apply()) return false;
    best_ = play();
    // Shared runs once more, since cut runs of sequences join their phase.
    for (const int kind : {0, 1, 0}) search(kind);
    return apply();
  }

  /// Tasks of the runs as they stand.
  [[nodiscard]] std::size_t num_tasks() const noexcept { return used_.tasks; }

 private:
  // One phase: tasks of equal length, and what they come to for one KV head.
  struct Phase {
    struct Tasks {
      std::int64_t ps;    // until partial results are needed
      std::int64_t rest;  // with them
      std::int32_t count;
    };
    std::vector<Tasks> tasks;
    std::int64_t work = 0;
    std::int64_t longest = 0;
  };
  struct Candidate {
    std::int64_t bound;  // no better time is possible
    std::int64_t cap;
  };
  static constexpr std::int64_t uncut = std::numeric_limits<std::int64_t>::max();

  // Tries cuts of the runs of one kind (0: shared, 1: own), the other kind as it stands.
  void search(int kind) {
    std::int64_t longest = 0;
    std::int32_t tokens = 0;
    for (const Run& run : *runs_) {
      if (run.last != (kind == 1)) continue;
      longest = std::max(longest, stream_ps(run));
      tokens = std::max(tokens, run.tokens);
    }
    // Pieces finer than a quarter of an even share balance no better, and each costs a start.
    const std::int64_t even = even_share(phases_[kind]) + 1;
    const std::int64_t most =
        std::min<std::int64_t>(tokens / model_.min_split_tokens, 4 * longest / even + 1);
    candidates_.clear();
    const std::int64_t kept = caps_[kind];
    for (std::int64_t pieces = 1; pieces <= most; ++pieces) {
      caps_[kind] = (longest + pieces - 1) / pieces;
      if (!apply()) break;  // nor would more of them fit
      candidates_.push_back({bound(), caps_[kind]});
    }
    // Not std::stable_sort, which allocates: among equals the coarser cut.
    std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
      return a.bound != b.bound ? a.bound < b.bound : a.cap > b.cap;
    });
    caps_[kind] = kept;
    std::int64_t best_cap = kept;
    for (const Candidate& candidate : candidates_) {
      if (candidate.bound >= best_) break;
      caps_[kind] = candidate.cap;
      apply();
      const std::int64_t ps = play();
      if (ps >= best_) continue;
      best_ = ps;
      best_cap = candidate.cap;
    }
    caps_[kind] = best_cap;
    apply();
  }

  [[nodiscard]] int rows(const Run& run) const noexcept {
    return (run.row_end - run.row_begin) * geometry_.group();
  }
  [[nodiscard]] std::int64_t stream_ps(const Run& run) const noexcept {
    const int tile = tile_rows_for(std::min(rows(run), max_tile_rows));
    return model_.stream_ps(run.tokens, tile, geometry_.dims());
  }

  // Cuts each run into pieces no longer than its kind's cap, and lists the tasks of both phases.
  // False: no room for them.
  bool apply() {
    for (Phase& phase : phases_) {
      phase.tasks.clear();
      phase.work = phase.longest = 0;
    }
    used_ = {};
    for (Run& run : *runs_) {
      cut(run);
      const std::int32_t above =
          run.above >= 0 ? (*runs_)[static_cast<std::size_t>(run.above)].merges : 0;
      const bool chunk_first = !run.last || run.moved();
      run.merges = above + (chunk_first ? run.splits : 0);
      if (chunk_first) {
        add_tiles(run, 0, run.step, run.splits - 1);
        add_tiles(run, 0, run.tokens - (run.splits - 1) * run.step, 1);
        used_.partials += static_cast<std::size_t>(run.row_end - run.row_begin) *
                          static_cast<std::size_t>(geometry_.num_qo_heads) *
                          static_cast<std::size_t>(run.splits);
      }
      if (run.last) {
        add_tiles(run, 1, run.streams_last() ? run.tokens : 0, 1);
        used_.merges += static_cast<std::size_t>(run.merges);
      }
    }
    return used_.tasks <= capacity_.tasks && used_.merges <= capacity_.merges &&
           used_.partials <= std::min<std::size_t>(capacity_.partials, 0x7fffffff);
  }

  void cut(Run& run) const noexcept {
    run.splits = 1;
    run.step = run.tokens;
    const std::int64_t cap = caps_[run.last ? 1 : 0];
    if (cap == uncut || run.covered || run.tokens < 2 * model_.min_split_tokens) return;
    const std::int64_t pieces = std::min<std::int64_t>((stream_ps(run) + cap - 1) / cap,
                                                       run.tokens / model_.min_split_tokens);
    if (pieces < 2) return;
    // Whole KV tiles, and no split without a token.
    const int tile = kv_tile_tokens(geometry_.dims());
    const auto count = static_cast<std::int32_t>(pieces);
    run.step = ((run.tokens + count - 1) / count + tile - 1) / tile * tile;
    run.splits = (run.tokens + run.step - 1) / run.step;
  }

  // `times` x the tiles of a run against `tokens` positions, in phase 0 (chunk-first) or 1.
  void add_tiles(const Run& run, int which, std::int32_t tokens, std::int32_t times) {
    const bool merge_only = which == 1 && !run.streams_last();
    const int most = merge_only ? merge_rows(geometry_.dims().v) : max_tile_rows;
    const int rest = rows(run) % most;
    add_tasks(run, which, tokens, most, rows(run) / most * times);
    if (rest > 0) add_tasks(run, which, tokens, rest, times);
  }
  void add_tasks(const Run& run, int which, std::int32_t tokens, int rows, std::int32_t count) {
    if (count == 0) return;
    const HeadDims dims = geometry_.dims();
    const int tile = tile_rows_for(rows);
    const std::int64_t ps = which == 0 ? model_.chunk_first_ps(tokens, tile, rows, dims)
                                       : model_.sequence_first_ps(tokens, tile, rows, dims, 0);
    const std::int64_t rest = which == 0 ? 0 : model_.merge_all_ps(rows, dims.v, run.merges);
    Phase& phase = phases_[which];
    phase.work += (ps + rest) * count;
    phase.longest = std::max(phase.longest, ps + rest);
    used_.tasks += static_cast<std::size_t>(count);
    if (!phase.tasks.empty() && phase.tasks.back().ps == ps && phase.tasks.back().rest == rest)
      phase.tasks.back().count += count;
    else
      phase.tasks.push_back({ps, rest, count});
  }

  [[nodiscard]] std::int64_t even_share(const Phase& phase) const noexcept {
    return phase.work * geometry_.num_kv_heads / model_.num_blocks;
  }
  [[nodiscard]] std::int64_t bound() const noexcept {
    return std::max(
        {even_share(phases_[0]) + even_share(phases_[1]), phases_[0].longest, phases_[1].longest});
  }
  // The modelled time of the launch. Whoever merges is taken to need the last partial result.
  [[nodiscard]] std::int64_t play() {
    makespan_.start(model_.num_blocks, geometry_.num_kv_heads);
    for (Phase& phase : phases_) {
      const std::int64_t ready = makespan_.end() + model_.wait_ps;
      std::sort(phase.tasks.begin(), phase.tasks.end(), [](const auto& a, const auto& b) {
        return a.ps + a.rest != b.ps + b.rest ? a.ps + a.rest > b.ps + b.rest : a.ps > b.ps;
      });
      for (const auto& tasks : phase.tasks)
        for (int i = 0; i < tasks.count; ++i)
          makespan_.add(tasks.ps, tasks.rest > 0 ? ready : 0, tasks.rest);
    }
    return makespan_.end();
  }

  std::vector<Run>* runs_ = nullptr;
  Geometry geometry_;
  CostModel model_;
  ScheduleCapacity capacity_;
  ScheduleCapacity used_;
  std::int64_t caps_[2] = {uncut, uncut};  // ps of streaming a piece, by kind
  Phase phases_[2];
  std::vector<Candidate> candidates_;
  Makespan makespan_;
  std::int64_t best_ = 0;
};

}  // namespace cuda_detail
CHUNKATTN_NAMESPACE_END
