// Cuts of runs along KV: evenly, by the rule of README.md here ("Sharing, splitting, tiles") and
// without a search.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../../variants.hpp"
#include "../support/config.hpp"
#include "../support/to_size.hpp"
#include "cost_model.hpp"
#include "tile_layout.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// How much room a schedule has.
struct ScheduleCapacity {
  std::size_t tasks = 0;
  std::size_t merges = 0;
  std::size_t partials = 0;  ///< rows x query heads
};

/// `tokens` positions on the path of `segment`, from `position` on, for packed rows [row_begin,
/// row_end), without those that are hidden from all of them. Chunk-first tasks stream it where
/// several sequences share it (`last` is false) and where it is `moved`, else the tasks that merge
/// and write.
struct Run {
  std::int32_t segment, row_begin, row_end, position, tokens;
  std::int32_t above = -1;        ///< the nearest shared run on the path, which stands before this
  bool last = false;              ///< a sequence's own run: merges and writes
  bool covered = false;           ///< such a run, all of it in the shared run that ends with it
  bool moved = false;             ///< such a run, streamed by chunk-first tasks
  std::int32_t splits = 1;        ///< pieces
  std::int32_t split_tokens = 0;  ///< tokens of a piece; the last one is open
  std::int32_t merges = 0;        ///< partial results from the path's begin to the end of this run
  std::int32_t partial_base = 0;  ///< of the first piece; the next is rows() x KV heads on
  std::int32_t flag_base = 0;     ///< of the first piece's first tile; the next piece's follow
  std::int32_t tile_rows = usual_tile_rows;  ///< of each tile but the last
  std::int32_t tiles = 0;                    ///< in which its rows are
  KeyRange hidden{};                         ///< positions among these that none of its rows sees

  [[nodiscard]] int rows() const noexcept { return row_end - row_begin; }
  /// It is streamed by chunk-first tasks.
  [[nodiscard]] bool chunk_first() const noexcept { return !last || moved; }
  /// An own run that is streamed by the tasks that merge and write. Without visible tokens too: it
  /// may grow before the next build.
  [[nodiscard]] bool streams_last() const noexcept { return last && !moved && !covered; }
  /// The path position of a token, counted without those that are hidden.
  [[nodiscard]] std::int32_t position_of(std::int32_t token) const noexcept {
    const std::int32_t at = position + token;
    return hidden.begin >= position && hidden.begin < hidden.end && at >= hidden.begin
               ? at + hidden.end - hidden.begin
               : at;
  }
};

/// Sets `tile_rows`, `tiles`, `splits`, `split_tokens`, `moved` and `merges` of runs.
class EvenCuts {
 public:
  /// False: not even the whole runs fit. Where pieces do not, they become longer.
  bool cut(std::vector<Run>& runs, const Geometry& geometry, const CostModel& model,
           const ScheduleCapacity& capacity) {
    runs_ = &runs;
    geometry_ = geometry;
    model_ = model;
    choose_tiles();
    measure();
    std::int64_t most[2] = {longest_piece(0), longest_piece(1)};
    for (;;) {
      const bool whole = !cut_by(most);
      if (count(capacity)) return true;
      if (whole) return false;
      moves_ = false;
      for (std::int64_t& ps : most) ps = std::min(ps + ps / 4 + 1, uncut);
    }
  }

  /// Packed rows at most of a task that only merges.
  [[nodiscard]] int merge_rows() const noexcept { return merge_rows_; }
  /// Tasks of the runs as they stand.
  [[nodiscard]] std::size_t num_tasks() const noexcept { return num_tasks_; }

 private:
  static constexpr std::int64_t uncut = std::int64_t{1} << 60;

  // 0: shared, 1: a sequence's own.
  [[nodiscard]] static int kind(const Run& run) noexcept { return run.last ? 1 : 0; }
  // What a block takes for a tile of a run, each KiB in `kib` ps.
  [[nodiscard]] std::int64_t length_ps(const Run& run, std::int64_t kib) const noexcept {
    const int rows = tile_rows_for(std::min<int>(run.rows(), run.tile_rows));
    return model_.stream_ps(run.tokens, rows, geometry_.dims(), kib);
  }
  [[nodiscard]] std::int64_t length_ps(const Run& run) const noexcept {
    return length_ps(run, model_.alone_ps_per_kib);
  }
  // While all blocks stream.
  [[nodiscard]] std::int64_t busy_ps(const Run& run) const noexcept {
    return length_ps(run, model_.ps_per_kib);
  }
  [[nodiscard]] bool is_long(const Run& run) const noexcept {
    return run.last && run.above >= 0 && busy_ps(run) > 8 * model_.task_ps;
  }

  // Large tiles read K/V half as often, but there are half as many: only for a shared run of which
  // every block has a task, in pieces of a length beside which a task's start does not count.
  void choose_tiles() noexcept {
    constexpr int long_piece = 256;  // tokens
    for (Run& run : *runs_) {
      const int tiles = num_tiles(run.rows(), model_.most_tile_rows);
      const int pieces = (run.tokens + long_piece - 1) / long_piece;
      const bool enough =
          std::int64_t{tiles} * pieces * geometry_.num_kv_heads >= model_.num_blocks;
      run.tile_rows = !run.last && enough ? model_.most_tile_rows : usual_tile_rows;
      run.tiles = num_tiles(run.rows(), run.tile_rows);
    }
  }

  void measure() noexcept {
    std::int64_t work = 0;
    bool any_long = false;
    tall_ = false;
    for (const Run& run : *runs_) {
      work += run.tiles * busy_ps(run);
      any_long = any_long || is_long(run);
      tall_ = tall_ || (!run.last && run.tiles > 1);
    }
    even_ = work * geometry_.num_kv_heads / model_.num_blocks + model_.task_ps;
    moves_ = tall_ && any_long;
  }

  // How long a piece of a kind of runs may be.
  [[nodiscard]] std::int64_t longest_piece(int of) const noexcept {
    std::int64_t longest = 0;
    for (const Run& run : *runs_)
      if (kind(run) == of) longest = std::max(longest, length_ps(run));
    const std::int64_t enough = even_ * (of == 1 || moves_ ? 5 : 1) / 8;
    if (longest <= enough) return uncut;
    const std::int64_t blocks = model_.num_blocks;
    const std::int64_t busy = of == 1 || tall_ ? blocks : blocks * 2 / 3;
    std::int64_t one_wave = uncut;
    for (std::int64_t pieces = 1; one_wave > enough && pieces <= blocks; ++pieces) {
      const std::int64_t most = (longest + pieces - 1) / pieces;
      const std::int64_t items = num_items(of, most);
      if (items > blocks) break;
      one_wave = most;
      if (items >= busy) break;
    }
    return one_wave <= even_ ? one_wave : even_ / 2;
  }
  // (piece, tile, KV head) triples of a kind of runs.
  [[nodiscard]] std::int64_t num_items(int of, std::int64_t most_ps) const noexcept {
    std::int64_t items = 0;
    for (const Run& run : *runs_)
      if (kind(run) == of && !run.covered && run.tokens > 0)
        items += run.tiles * num_pieces(run, most_ps);
    return items * geometry_.num_kv_heads;
  }
  [[nodiscard]] std::int64_t num_pieces(const Run& run, std::int64_t most_ps) const noexcept {
    const std::int64_t pieces =
        std::min<std::int64_t>((length_ps(run) + most_ps - 1) / std::max<std::int64_t>(most_ps, 1),
                               run.tokens / model_.min_split_tokens);
    return std::max<std::int64_t>(pieces, 1);
  }

  // False: all runs are whole, and own ones are streamed last.
  bool cut_by(const std::int64_t (&most_ps)[2]) noexcept {
    bool any = false;
    const int tile = kv_tile_tokens(geometry_.dims());
    for (Run& run : *runs_) {
      const auto pieces = static_cast<std::int32_t>(num_pieces(run, most_ps[kind(run)]));
      run.split_tokens =
          pieces == 1 ? run.tokens : ((run.tokens + pieces - 1) / pieces + tile - 1) / tile * tile;
      run.splits = pieces == 1 ? 1 : (run.tokens + run.split_tokens - 1) / run.split_tokens;
      run.moved = run.last && (run.splits > 1 || (moves_ && is_long(run)));
      any = any || run.splits > 1 || run.moved;
    }
    return any;
  }

  // Adds up the tasks. False: no room for them.
  bool count(const ScheduleCapacity& capacity) noexcept {
    std::int64_t chunk_first = 0, streaming = 0, partials = 0, merges = 0;
    for (Run& run : *runs_) {
      run.merges = run.above >= 0 ? (*runs_)[to_size(run.above)].merges : 0;
      if (run.chunk_first()) {
        run.merges += run.splits;
        chunk_first += std::int64_t{run.splits} * run.tiles;
        partials += std::int64_t{run.splits} * run.rows() * geometry_.num_kv_heads;
      }
      if (run.streams_last()) streaming += run.tiles;
      if (run.last) merges += run.merges;
    }
    // As few rows to a task that only merges as one round of blocks takes, so that threads share
    // partial results.
    const int most_rows = detail::cuda::merge_rows(geometry_.dims().v);
    for (merge_rows_ = 1;; merge_rows_ *= 2) {
      std::int64_t last = streaming;
      for (const Run& run : *runs_)
        if (run.last && !run.streams_last()) last += num_tiles(run.rows(), merge_rows_);
      num_tasks_ = to_size(chunk_first + last);
      if (2 * merge_rows_ > most_rows ||
          (last * geometry_.num_kv_heads <= model_.num_blocks && num_tasks_ <= capacity.tasks))
        break;
    }
    return num_tasks_ <= capacity.tasks && to_size(merges) <= capacity.merges &&
           to_size(partials) <= std::min<std::size_t>(capacity.partials, 0x7fffffff);
  }

  std::vector<Run>* runs_ = nullptr;
  Geometry geometry_;
  CostModel model_;
  std::int64_t even_ = 0;  // share of a block
  bool tall_ = false;      // some shared run has several tiles
  bool moves_ = false;     // long own runs are streamed by chunk-first tasks
  int merge_rows_ = 1;
  std::size_t num_tasks_ = 0;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
