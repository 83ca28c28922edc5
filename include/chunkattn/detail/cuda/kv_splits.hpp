// Where runs are cut along KV: as often as makes the launch end soonest.
//
// Its blocks take (task, KV head) pairs, each the next one as soon as it is free: the chunk-first
// ones, longest first, then the sequence-first ones, longest first, which end with partial results
// of the former. So when a launch ends follows from the lengths of all items, not from the average
// work per block: 288 equal items on 264 blocks take as long as 528. Nor does it help to fill all
// blocks with chunk-first tasks if fewer keep the memory busy: the others begin with sequence-first
// tasks meanwhile. Candidates are tried in the order of their lower bounds.
//
// That is so where both kinds of tasks are bound by the memory. Where one is bound by arithmetic,
// the other may have the memory meanwhile: then the order goes through the KV heads
// (item_order.hpp).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "../../variants.hpp"
#include "../base/config.hpp"
#include "../base/to_size.hpp"
#include "cost_model.hpp"
#include "geometry.hpp"
#include "item_order.hpp"
#include "makespan.hpp"
#include "tile_layout.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

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
  std::int32_t split_tokens = 0;  ///< tokens of a split; the last one is open
  std::int32_t merges = 0;        ///< partial results from the path's begin to the end of this run
  std::int32_t partial_base = 0;  ///< of the first split; the next is partial_stride on
  std::int32_t partial_stride = 0;
  std::int32_t flag_base = 0;   ///< of the first split's first tile; the next split's follow
  std::int32_t merge_rows = 0;  ///< packed rows of a task where it only merges
  KeyRange hidden{};            ///< positions among these that none of its rows sees

  /// An own run, cut: streamed by chunk-first tasks.
  [[nodiscard]] bool moved() const noexcept { return last && splits > 1; }
  /// It is streamed by chunk-first tasks.
  [[nodiscard]] bool chunk_first() const noexcept { return !last || splits > 1; }
  /// An own run that is streamed by the tasks that merge and write. Without visible tokens too: it
  /// may grow before the next build.
  [[nodiscard]] bool streams_last() const noexcept { return last && !moved() && !covered; }
  /// Packed rows of its tasks at most: of those that merge and write, or chunk-first ones.
  [[nodiscard]] int most_rows(bool writing) const noexcept {
    return writing && !streams_last() ? merge_rows : max_tile_rows;
  }
  /// The path position of a token, counted without those that are hidden.
  [[nodiscard]] std::int32_t position_of(std::int32_t token) const noexcept {
    const std::int32_t at = position + token;
    return hidden.begin >= position && hidden.begin < hidden.end && at >= hidden.begin
               ? at + hidden.end - hidden.begin
               : at;
  }
};

/// Chooses `splits` and `split_tokens` of runs. Keeps its memory from call to call.
class KvSplits {
 public:
  /// The end of a launch that does not fit.
  static constexpr std::int64_t never = std::numeric_limits<std::int64_t>::max();

  /// Cuts `runs` so that the modelled time of the launch is least and everything fits `capacity`.
  /// Returns that time, or `never` if not even the uncut runs fit.
  std::int64_t choose(std::vector<Run>& runs, const Geometry& geometry, const CostModel& model,
                      const ScheduleCapacity& capacity) {
    runs_ = &runs;
    geometry_ = geometry;
    model_ = model;
    capacity_ = capacity;
    group_ = geometry.group();
    merge_rows_ = merge_rows(geometry.dims().v);
    alone_kib_ps_ = model.kib_ps(1);
    best_ = never;
    caps_ = {};
    ahead_ = geometry.num_kv_heads;
    if (!apply()) return never;
    // How shared runs are best cut depends on how own ones are: for the latter uncut and halved,
    // if that could be of use, then the other way round.
    const Longest own = longest(1);
    const std::int64_t starts = longest(0).runs > 0 && most_pieces(1, own) > 1 ? 2 : 1;
    for (std::int64_t pieces = 1; pieces <= starts; ++pieces) {
      caps_.of[1] = cap_of(own, pieces);
      search(0);
    }
    caps_ = best_caps_;
    const std::int64_t before = caps_.of[1];
    search(1);
    if (best_caps_.of[1] != before) {
      caps_ = best_caps_;
      search(0);
    }
    search_mixed();
    caps_ = best_caps_;
    apply();
    return best_;
  }

  /// How many KV heads chunk-first tasks are ahead, as ItemOrder has it.
  [[nodiscard]] std::int32_t ahead() const noexcept { return ahead_; }
  /// Tasks of the runs as they stand.
  [[nodiscard]] std::size_t num_tasks() const noexcept { return used_.tasks; }
  /// What 1 KiB of a run takes a block in phase 0 (chunk-first) or 1, in ps. One of its tiles pays
  /// for the memory; the others find it in the cache.
  [[nodiscard]] std::int64_t kib_ps(const Run& run, int phase) const noexcept {
    const std::int64_t kib = kib_ps_[phase];
    const int tiles = num_tiles(rows(run));
    return tiles == 1 ? kib : std::max(kib / tiles, alone_kib_ps_);
  }
  /// What 1 KiB takes a block that reads it alone, in ps.
  [[nodiscard]] std::int64_t kib_ps(int phase) const noexcept { return kib_ps_[phase]; }
  /// The work of the runs as they stand, divided evenly among the blocks.
  [[nodiscard]] std::int64_t even_share() const noexcept {
    return even_share(phases_[0].work + phases_[1].work);
  }

 private:
  static constexpr std::int64_t uncut = std::numeric_limits<std::int64_t>::max();

  // Runs of a kind.
  struct Longest {
    std::int64_t runs = 0;
    std::int64_t stream_ps = 0;
    std::int32_t tokens = 0;
  };
  // What the tasks of one phase come to for one KV head.
  struct Phase {
    std::int64_t tasks = 0;
    std::int64_t longest_stream = 0;  // all blocks sharing the memory
    std::int64_t work = 0;
    std::int64_t longest = 0, shortest = never;
    std::int64_t least_rest = never;
  };
  // ps of streaming a piece, by kind of run (0: shared, 1: own), all blocks sharing the memory.
  struct Caps {
    std::int64_t of[2] = {uncut, uncut};
  };
  // Tiles of a run that are alike.
  struct Tiles {
    std::int64_t ps;    // until partial results are needed
    std::int64_t rest;  // with them
    std::int32_t run;
    std::int32_t count;
  };
  // When a launch ends if nothing but its work counts: of two kinds of tasks one after the other,
  // and side by side.
  struct Ends {
    std::int64_t apart, mixed;
  };
  struct Candidate {
    std::int64_t bound;  // no better time is possible
    std::int64_t cap;
  };

  [[nodiscard]] Longest longest(int kind) const noexcept {
    Longest longest;
    for (const Run& run : *runs_) {
      if (run.last != (kind == 1)) continue;
      longest.stream_ps = std::max(longest.stream_ps, stream_ps(run, run.tokens));
      longest.tokens = std::max(longest.tokens, run.tokens);
      ++longest.runs;
    }
    return longest;
  }
  // Pieces finer than a quarter of an even share balance no better, and each costs a start.
  [[nodiscard]] std::int64_t most_pieces(int kind, const Longest& run) const noexcept {
    const std::int64_t even = even_share(phases_[kind].work) + 1;
    const std::int64_t most =
        std::min<std::int64_t>(run.tokens / model_.min_split_tokens, 4 * run.stream_ps / even + 1);
    return std::max<std::int64_t>(most, 1);
  }
  [[nodiscard]] static std::int64_t cap_of(const Longest& run, std::int64_t pieces) noexcept {
    return pieces == 1 ? uncut : (run.stream_ps + pieces - 1) / pieces;
  }

  // Tries cuts of the runs of one kind, the other kind as it stands.
  void search(int kind) {
    const Longest run = longest(kind);
    apply();
    const std::int64_t most = most_pieces(kind, run);
    candidates_.clear();
    // Pieces that take longer than the best launch, if at half of what they take among all others,
    // are of no use. Of many runs, cuts that differ little come to nearly the same.
    const std::int64_t fewest = 1 + run.stream_ps / 2 / std::max<std::int64_t>(best_, 1);
    for (std::int64_t pieces = fewest; pieces <= most; pieces += 1 + pieces * run.runs / 1024) {
      caps_.of[kind] = cap_of(run, pieces);
      if (!apply()) break;               // nor would more of them fit
      if (even_share() >= best_) break;  // nor would more of them be less work
      candidates_.push_back({bound(), caps_.of[kind]});
    }
    // Not std::stable_sort, which allocates: among equals the coarser cut.
    std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
      return a.bound != b.bound ? a.bound < b.bound : a.cap > b.cap;
    });
    for (const Candidate& candidate : candidates_) {
      if (candidate.bound >= best_ - best_ / 64) break;  // little to be won
      caps_.of[kind] = candidate.cap;
      apply();
      const std::int64_t ps = play();
      if (ps >= best_) continue;
      best_ = ps;
      best_caps_ = caps_;
    }
  }

  // Tries to have both kinds of tasks side by side, chunk-first ones a quarter of the KV heads
  // ahead. Blocks that wait hold tickets of tasks that others wait for: so pieces are to be short
  // beside the time that so many heads take, that partial results be there when they are needed.
  void search_mixed() {
    const std::int32_t heads = geometry_.num_kv_heads;
    const std::int32_t ahead = std::max(heads / 4, 1);
    caps_ = best_caps_;
    apply();
    const std::int64_t least = std::min(phases_[0].work, phases_[1].work);
    if (least * (heads - ahead) / heads < (phases_[0].work + phases_[1].work) / 16) return;
    const Ends before = ends(ahead);
    const std::int64_t good = before.apart - before.apart / 16;  // less is too uncertain
    if (before.mixed > good || phases_[1].longest > before.apart / 4) return;
    const std::int64_t longest = phases_[0].longest, most = before.apart / heads * ahead * 2 / 5;
    if (longest > most) {
      caps_.of[0] = phases_[0].longest_stream / (longest / (most + 1) + 1);
      if (!apply() || phases_[0].longest > most + most / 4) return;
    }
    const std::int64_t end = ends(ahead).mixed;
    if (end > good || used_.tasks > ItemOrder::most_mixed_tasks) return;
    best_ -= before.apart - end;
    best_caps_ = caps_;
    ahead_ = ahead;
  }
  // Whatever order tasks are in, they end when the memory has given all, or when blocks are done
  // that have it for themselves.
  [[nodiscard]] Ends ends(std::int32_t ahead) {
    std::int64_t memory[2] = {}, blocks[2] = {};
    kib_ps_[0] = kib_ps_[1] = alone_kib_ps_;
    for (const Run& run : *runs_)
      for (const int phase : {0, 1}) {
        each_tiles(run, phase, [&](std::int64_t ps, std::int64_t rest, std::int32_t count) {
          blocks[phase] += (ps + rest) * count;
        });
        if (phase == 0 ? !run.chunk_first() : !run.streams_last()) continue;
        memory[phase] += model_.stream_ps(run.tokens, 0, geometry_.dims());
        if (phase == 0)
          memory[0] += run.splits * model_.partial_ps(rows(run), geometry_.dims().v) / 2;
      }
    share_memory();
    const std::int64_t apart =
        even_share(std::max(memory[0], blocks[0]) + std::max(memory[1], blocks[1]));
    const std::int64_t beside = even_share(std::max(memory[0] + memory[1], blocks[0] + blocks[1]));
    return {apart, beside + (apart - beside) * ahead / geometry_.num_kv_heads};
  }

  [[nodiscard]] int rows(const Run& run) const noexcept {
    return (run.row_end - run.row_begin) * group_;
  }
  // Tokens of the last split.
  [[nodiscard]] static std::int32_t last_tokens(const Run& run) noexcept {
    return run.tokens - (run.splits - 1) * run.split_tokens;
  }
  [[nodiscard]] std::int64_t stream_ps(const Run& run, std::int32_t tokens) const noexcept {
    const int tile = tile_rows_for(std::min(rows(run), max_tile_rows));
    return model_.stream_ps(tokens, tile, geometry_.dims());
  }

  // Cuts each run into pieces no longer than its kind's cap, and adds up the tasks of both phases.
  // False: no room for them.
  bool apply() {
    phases_[0] = phases_[1] = {};
    used_ = {};
    all_merge_ = true;
    for (Run& run : *runs_) {
      cut(run);
      const std::int32_t above = run.above >= 0 ? (*runs_)[to_size(run.above)].merges : 0;
      run.merges = above + (run.chunk_first() ? run.splits : 0);
      if (run.chunk_first()) {
        count_tasks(phases_[0], run, std::max(run.split_tokens, last_tokens(run)), run.splits);
        used_.partials += to_size(run.row_end - run.row_begin) * to_size(geometry_.num_qo_heads) *
                          to_size(run.splits);
      }
      if (run.last) {
        all_merge_ = all_merge_ && run.merges > 0;
        if (run.streams_last()) count_tasks(phases_[1], run, run.tokens, 1);
        used_.merges += to_size(run.merges);
      }
    }
    count_merges();
    used_.tasks = to_size(phases_[0].tasks + phases_[1].tasks);
    share_memory();
    for (const Run& run : *runs_)
      for (const int phase : {0, 1})
        each_tiles(run, phase, [&](std::int64_t ps, std::int64_t rest, std::int32_t count) {
          Phase& sum = phases_[phase];
          sum.work += (ps + rest) * count;
          sum.longest = std::max(sum.longest, ps + rest);
          sum.shortest = std::min(sum.shortest, ps + rest);
          sum.least_rest = std::min(sum.least_rest, rest);
        });
    return used_.tasks <= capacity_.tasks && used_.merges <= capacity_.merges &&
           used_.partials <= std::min<std::size_t>(capacity_.partials, 0x7fffffff);
  }
  void count_tasks(Phase& phase, const Run& run, std::int32_t tokens, std::int32_t splits) const {
    phase.tasks += std::int64_t{splits} * num_tiles(rows(run));
    phase.longest_stream = std::max(phase.longest_stream, stream_ps(run, tokens));
  }
  // The tasks that only merge. Each has as many rows as a block holds the columns of; or fewer, so
  // that threads share partial results, where one round of blocks still takes all of phase 1.
  void count_merges() noexcept {
    std::int64_t merging = 0;
    for (int least = 1; least <= merge_rows_; least *= 2) {
      merging = 0;
      for (Run& run : *runs_) {
        if (!run.last || run.streams_last()) continue;
        run.merge_rows = best_merge_rows(run.merges, least);
        merging += num_tiles(rows(run), run.merge_rows);
      }
      const std::int64_t tasks = phases_[1].tasks + merging;
      if (tasks * geometry_.num_kv_heads <= model_.num_blocks &&
          to_size(phases_[0].tasks + tasks) <= capacity_.tasks)
        break;
    }
    phases_[1].tasks += merging;
  }
  [[nodiscard]] int best_merge_rows(int merges, int least) const noexcept {
    const auto in_a_row = [&](int rows) {
      return merges_in_a_row(rows, geometry_.dims().v, merges);
    };
    int rows = merge_rows_;
    while (rows / 2 >= least && in_a_row(rows / 2) < in_a_row(rows)) rows /= 2;
    return rows;
  }

  // Where chunk-first tasks leave blocks free, these stream what they may and then wait: the rest
  // of the memory goes to the former. So it does where there are few tasks at all.
  void share_memory() noexcept {
    const std::int64_t first = phases_[0].tasks * geometry_.num_kv_heads;
    const std::int64_t second = phases_[1].tasks * geometry_.num_kv_heads;
    kib_ps_[0] = model_.ps_per_kib;
    kib_ps_[1] = model_.kib_ps(second);
    if (first >= model_.num_blocks) return;
    kib_ps_[1] = model_.kib_ps(first + second);
    const std::int64_t all = phases_[0].longest_stream + 1;
    const std::int64_t beside = 1024 * std::min(all, phases_[1].longest_stream) / all;
    kib_ps_[0] = (beside * kib_ps_[1] + (1024 - beside) * model_.kib_ps(first)) / 1024;
  }

  void cut(Run& run) const noexcept {
    run.splits = 1;
    run.split_tokens = run.tokens;
    const std::int64_t cap = caps_.of[run.last ? 1 : 0];
    if (cap == uncut || run.covered || run.tokens < 2 * model_.min_split_tokens) return;
    const std::int64_t pieces = std::min<std::int64_t>((stream_ps(run, run.tokens) + cap - 1) / cap,
                                                       run.tokens / model_.min_split_tokens);
    if (pieces < 2) return;
    // Whole KV tiles, and no split without a token. The last one takes what is left over, or is
    // what is left, whichever makes the longest shorter.
    const int tile = kv_tile_tokens(geometry_.dims());
    const auto count = static_cast<std::int32_t>(pieces);
    const std::int32_t more = ((run.tokens + count - 1) / count + tile - 1) / tile * tile;
    const std::int32_t less = run.tokens / count / tile * tile;
    if (less >= model_.min_split_tokens && run.tokens - (count - 1) * less < more) {
      run.split_tokens = less;
      run.splits = count;
    } else {
      run.split_tokens = more;
      run.splits = (run.tokens + more - 1) / more;
    }
  }

  // f(ps, rest, count) for the tiles of a run in phase 0 (chunk-first) or 1.
  template <class F>
  void each_tiles(const Run& run, int phase, F&& f) const {
    if (phase == 0 ? !run.chunk_first() : !run.last) return;
    const HeadDims dims = geometry_.dims();
    const bool merge_only = phase == 1 && !run.streams_last();
    const int most = run.most_rows(phase == 1);
    const int all = rows(run);
    const std::int64_t kib = kib_ps(run, phase);
    const auto tiles = [&](int rows, int count) {
      const int tile = tile_rows_for(rows);
      if (phase == 1) {
        f(model_.sequence_first_ps(merge_only ? 0 : run.tokens, tile, dims, kib),
          model_.merge_all_ps(rows, dims.v, run.merges), count);
        return;
      }
      if (run.splits > 1)
        f(model_.chunk_first_ps(run.split_tokens, tile, rows, dims, kib, kib_ps_[0]), 0,
          count * (run.splits - 1));
      f(model_.chunk_first_ps(last_tokens(run), tile, rows, dims, kib, kib_ps_[0]), 0, count);
    };
    if (all >= most) tiles(most, all / most);
    if (all % most > 0) tiles(all % most, 1);
  }

  [[nodiscard]] std::int64_t even_share(std::int64_t work) const noexcept {
    return work * geometry_.num_kv_heads / model_.num_blocks;
  }
  // No order of the tasks ends sooner.
  [[nodiscard]] std::int64_t bound() const noexcept {
    const Phase& first = phases_[0];
    const Phase& second = phases_[1];
    if (first.tasks == 0) return std::max(even_share(), second.longest);
    const std::int64_t ready = first.shortest + model_.wait_ps;  // at the earliest
    const std::int64_t free = model_.num_blocks - first.tasks * geometry_.num_kv_heads;
    const std::int64_t chain =
        std::max(first.longest + model_.wait_ps + second.least_rest, second.longest);
    if (free <= 0)  // each block has a chunk-first task before any other
      return std::max({even_share(), chain, first.shortest + second.longest});
    if (!all_merge_) return std::max(even_share(), chain);
    // Blocks that begin with a task that merges wait before it ends.
    const std::int64_t wait = std::max<std::int64_t>(ready - second.longest, 0);
    const std::int64_t waiting = std::min(free, second.tasks * geometry_.num_kv_heads);
    return std::max(even_share() + waiting * wait / model_.num_blocks, chain);
  }

  // The modelled time of the launch. Whoever merges needs the partial results of its path. Not
  // played to its end when that is no better than what there is.
  [[nodiscard]] std::int64_t play() {
    makespan_.start(model_.num_blocks, geometry_.num_kv_heads);
    ready_.assign(runs_->size(), 0);
    for (const int phase : {0, 1}) {
      list(phase);
      for (const Tiles& tiles : tiles_) {
        std::int64_t& ready = ready_[to_size(tiles.run)];
        std::int64_t end = 0;
        for (int i = 0; i < tiles.count; ++i)
          end = makespan_.add(tiles.ps, phase == 1 ? ready : 0, tiles.rest);
        if (phase == 0) ready = std::max(ready, end + model_.wait_ps);
        if (makespan_.end() >= best_) return never;
      }
      if (phase == 1) break;
      for (std::size_t r = 0; r < runs_->size(); ++r)  // those above come first
        if (const std::int32_t above = (*runs_)[r].above; above >= 0)
          ready_[r] = std::max(ready_[r], ready_[to_size(above)]);
    }
    return makespan_.end();
  }
  // The tiles of a phase, longest first.
  void list(int phase) {
    tiles_.clear();
    for (std::size_t r = 0; r < runs_->size(); ++r)
      each_tiles((*runs_)[r], phase, [&](std::int64_t ps, std::int64_t rest, std::int32_t count) {
        tiles_.push_back({ps, rest, static_cast<std::int32_t>(r), count});
      });
    std::sort(tiles_.begin(), tiles_.end(), [](const Tiles& a, const Tiles& b) {
      return a.ps + a.rest != b.ps + b.rest ? a.ps + a.rest > b.ps + b.rest : a.run < b.run;
    });
  }

  std::vector<Run>* runs_ = nullptr;
  Geometry geometry_;
  int group_ = 1, merge_rows_ = 1;
  std::int64_t alone_kib_ps_ = 0;
  CostModel model_;
  ScheduleCapacity capacity_;
  ScheduleCapacity used_;
  Caps caps_, best_caps_;
  std::int32_t ahead_ = 1;
  Phase phases_[2];
  bool all_merge_ = true;        // the tasks of phase 1
  std::int64_t kib_ps_[2] = {};  // of a block in each phase
  std::vector<Candidate> candidates_;
  std::vector<Tiles> tiles_;
  std::vector<std::int64_t> ready_;  // by run: its path's partial results, flags and all
  Makespan makespan_;
  std::int64_t best_ = 0;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
