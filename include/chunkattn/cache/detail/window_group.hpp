// WindowGroup: which K/V of a group of layers with a sliding window there is, beside a tree: what
// each live sequence holds, where a prompt can be resumed, what a step writes.
//
// A row at position p reads [p - window + 1, p]. So a live sequence whose next row is at `next`
// holds the chunks of [next - window + 1, next), and those of the steps that are not over. What
// falls behind is free, unless it is in a window before a *junction*, a position at which another
// prompt is likely to part: those stay cached. Nothing records where a prompt can be resumed: a
// position is as good as any if all slots of its window have K/V.
//
// A slot has K/V of the group if a step has written it, or a copy. What is there of tokens that
// were given up needs no clearing: the tree counts these slots as not written, and when it counts
// them again, a step has written both.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "../../detail/support/array.hpp"
#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/tree/core.hpp"
#include "../../detail/tree/node_observer.hpp"
#include "window_chunks.hpp"
#include "window_holds.hpp"
#include "window_points.hpp"
#include "window_search.hpp"
#include "window_writes.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Observes the tree from now on, until its owner removes it.
class WindowGroup final : public NodeObserver {
 public:
  WindowGroup(TreeCore& tree, std::int32_t window, std::size_t max_chunks, std::size_t max_cached)
      : core_(tree),
        chunks_(tree.chunk_table, tree.topology.geometry.size, max_chunks, max_cached),
        search_(tree, chunks_, window - 1),
        points_(tree, chunks_, window - 1) {
    core_.topology.observers.add(*this);
  }
  WindowGroup(const WindowGroup&) = delete;
  WindowGroup& operator=(const WindowGroup&) = delete;

  [[nodiscard]] const WindowChunks& chunks() const noexcept { return chunks_; }
  [[nodiscard]] const WindowSearch& search() const noexcept { return search_; }
  [[nodiscard]] WindowChunks& chunks() noexcept { return chunks_; }
  [[nodiscard]] WindowSearch& search() noexcept { return search_; }
  [[nodiscard]] WindowPoints& points() noexcept { return points_; }
  [[nodiscard]] std::uint64_t num_recomputed() const noexcept { return num_recomputed_; }

  // ---- sequences -----------------------------------------------------------------------------

  /// Whether the sequence can be added to a step as it stands.
  [[nodiscard]] bool is_ready(SequenceIndex s) const noexcept {
    return holds_.covers(s, core_.sequences[s].cursor);
  }
  /// Holds the window before a position for a sequence that is to be computed from there on, until
  /// commit_resume() or cancel_resume(); and what copies are to bring of it, until it has run a
  /// step. False, with nothing changed, where chunks are missing.
  bool prepare_resume(SequenceIndex s, std::int32_t position) {
    holds_.reserve(s);
    wanted_.clear();
    const std::int32_t begin = begin_of(position);
    for_each_run(s, {begin, position - begin},
                 [&](ChunkIndex c, std::int32_t, std::int32_t count, std::int32_t at) {
                   wanted_.push_back({c, no_chunk, at, at + count});
                 });
    const std::size_t count = wanted_.size();
    for (std::size_t i = 0; i < count; ++i)
      search_.for_each_source(wanted_[i].of_tree,
                              [&](const RowCopy& rows) { wanted_.push_back({rows.source_chunk}); });
    std::rotate(wanted_.begin(), wanted_.begin() + count, wanted_.end());
    holds_[s].parts.reserve(wanted_.size());
    return take_wanted();
  }
  void commit_resume(SequenceIndex s, std::int32_t position) noexcept {
    const SequenceRecord& record = core_.sequences[s];
    WindowHold& hold = holds_[s];
    holds_.release(hold);
    hold.is_used = true;
    hold.junction = none;
    hold.next = hold.end = position;
    hold.prompt_end = record.size - 1;
    for (const Wanted& wanted : wanted_)
      hold.parts.push_back({wanted.own, wanted.begin, wanted.end});
    wanted_.clear();
    num_recomputed_ += to_size(record.cursor - position);
  }
  void cancel_resume() noexcept { release_wanted(); }

  // ---- rows that come and go -----------------------------------------------------------------

  /// Holds chunks for rows of these positions until the sequence, which resume() must follow for,
  /// is resumed or leaves. False, with nothing changed but what was cached, where chunks are
  /// missing.
  bool hold_rows(SequenceIndex s, std::span<const TokenRange> ranges) {
    holds_.reserve(s);
    wanted_.clear();
    for (const TokenRange range : ranges)
      for_each_run(s, range, [&](ChunkIndex c, std::int32_t, std::int32_t, std::int32_t) {
        wanted_.push_back({c});
      });
    WindowHold& hold = holds_[s];
    hold.parts.reserve_more(wanted_.size());
    if (!take_wanted()) return false;
    for (const Wanted& wanted : wanted_) hold.parts.push_back({wanted.own, 0, 0});
    hold.is_used = false;
    return true;
  }

  // ---- steps ---------------------------------------------------------------------------------

  /// Of the available chunks, how many plan() is to take or hold for the step, at most.
  [[nodiscard]] std::size_t chunks_needed(const StepRecord& step) const {
    Array<ChunkIndex> needed;  // of the tree
    for (const StepEntry& entry : step.entries)
      for_each_row(entry, [&](ChunkIndex of_tree, std::int32_t, std::int32_t, std::int32_t) {
        if (!search_.is_held(of_tree)) needed.push_back(of_tree);
      });
    for (const Draft& draft : step.drafts)
      if (!search_.is_held(draft.chunk)) needed.push_back(draft.chunk);
    return count_distinct(needed);
  }
  /// Chunks for the rows of an open step, and where each of them is written, in the caller's order;
  /// with the copies that it makes of those of the tree's plan. Again where the step gets another
  /// plan. Throws OutOfChunks, with nothing changed but what was cached.
  void plan(const StepRecord& step, const PlanView& tree, Array<WriteTarget>& writes,
            Array<RowCopy>& copies) {
    writes_.drop(step.number);
    for (const auto& other : core_.steps.all())
      if (other->state == StepState::in_flight && !other->is_void) check_planned(*other);
    find_wanted(step);
    std::size_t num_copied = 0;
    for (std::int32_t i = 0; i < tree.num_copies; ++i) num_copied += to_size(tree.copies[i].length);
    WindowWrites::OfStep& own =
        writes_.unused(to_size(tree.num_rows) + num_copied, step.entries.size());
    writes.resize(to_size(tree.num_rows));
    copies.clear();
    copies.reserve(num_copied);
    if (!take_wanted()) fail_out_of_chunks();
    // From here on nothing fails.
    own.set_step(step);
    plan_copies(tree, copies, own);
    for (std::size_t i = 0; i < step.entries.size(); ++i) {
      const StepEntry& entry = step.entries[i];
      plan_entry(step, entry, tree, writes.data() + entry.first_row, own);
      own.ends[i] = own.slots.size();
    }
    if (step.scratch != none)
      core_.topology.for_each_chunk(core_.sequences.tail(step.scratch), [&](ChunkIndex of_tree) {
        if (const ChunkIndex c = chunks_.find(of_tree); c != no_chunk) chunks_.set_scratch(c);
      });
    release_wanted();
  }

  void set_free_sink(std::unique_ptr<FreeSink> sink) { chunks_.set_free_sink(std::move(sink)); }
  [[noreturn]] CHUNKATTN_COLD void fail_out_of_chunks() const {
    fail(OutOfChunks(num_missing_, chunks_.num_available(), chunks_.max_chunks()));
  }

  // ---- changes of the tree -------------------------------------------------------------------

  void on_free(ChunkIndex chunk) noexcept override { chunks_.detach(chunk); }
  void on_clear() noexcept override { chunks_.clear(); }
  void on_step_end(const StepRecord& step, bool has_run) noexcept override {
    WindowWrites::OfStep* own = writes_.find(step.number);
    if (own != nullptr && has_run && !own->is_of(step)) {
      writes_.drop(step.number);  // of an earlier plan; view() of the last one was not called
      own = nullptr;
    }
    std::size_t begin = 0, num_planned = 0;
    if (own != nullptr) {
      begin = own->num_copied;
      num_planned = own->ends.size();
      if (has_run) points_.tell({own->slots.data(), own->slots.size()}, /*is_kept=*/true);
      writes_.settle(*own, 0, begin, has_run);
    }
    for (std::size_t e = 0; e < step.entries.size(); ++e) {
      const StepEntry& entry = step.entries[e];
      const bool counts = has_run && entry.epoch == core_.sequences[entry.sequence].epoch;
      if (e >= num_planned) {  // view() was not called
        if (counts) skip(entry);
        continue;
      }
      writes_.settle(*own, begin, own->ends[e], counts);
      begin = own->ends[e];
      if (counts) holds_.advance(entry);
    }
    if (own == nullptr) {
      if (has_run) lose_copies(step.number);
      return;
    }
    own->step = 0;
    if (!has_run) writes_.plan_again();
  }
  void on_void() noexcept override { writes_.plan_again(); }
  void on_load(SequenceIndex s, TokenRange range) noexcept override {
    holds_.end(s, range.begin);
    forget(s, range);
  }
  void on_pin(NodeIndex last) noexcept override {
    const std::int32_t begin = begin_of(core_.topology.node(last).end());
    const bool is_pinned = core_.topology.node(last).pins > 0;
    for (NodeIndex i = last; i != root_node; i = core_.topology.node(i).parent) {
      const TreeNode& n = core_.topology.node(i);
      core_.topology.for_each_run(
          n, 0, n.length,
          [&](ChunkIndex of_tree, std::int32_t, std::int32_t count, std::int32_t done) {
            const ChunkIndex c = chunks_.find(of_tree);
            if (c == no_chunk) return;
            if (is_pinned && n.position + done + count > begin) chunks_.keep(c);
            chunks_.on_pin(c);
          });
    }
  }
  void on_leave(SequenceIndex s) noexcept override { holds_.leave(s); }
  void reserve(std::size_t) override {}
  void on_release(NodeIndex, std::int32_t) noexcept override {}
  void on_split(NodeIndex, NodeIndex) noexcept override {}
  void on_merge(NodeIndex, NodeIndex) noexcept override {}

  [[nodiscard]] bool is_consistent() const override {
    Array<std::int32_t> holds(chunks_.high_water());
    holds_.count_holds(holds);
    writes_.count_holds(holds);
    chunks_.count_scratch(holds);
    for (std::size_t c = 0; c < holds.size(); ++c)
      if (holds[c] != chunks_.num_holds(static_cast<ChunkIndex>(c))) return false;
    return holds_.is_consistent() && chunks_.is_consistent();
  }

 private:
  /// A chunk of the tree, the group's for it, and path positions in it where these are wanted.
  struct Wanted {
    ChunkIndex of_tree;
    ChunkIndex own = no_chunk;
    std::int32_t begin = 0, end = 0;
  };
  struct PartOfNode {
    NodeIndex node;
    std::int32_t offset, length;
  };
  [[nodiscard]] std::int32_t begin_of(std::int32_t next) const noexcept {
    return search_.begin_of(next);
  }
  // Sorts them.
  [[nodiscard]] static std::size_t count_distinct(Array<ChunkIndex>& chunks) noexcept {
    std::sort(chunks.begin(), chunks.end());
    return to_size(std::unique(chunks.begin(), chunks.end()) - chunks.begin());
  }

  // ---- slots ---------------------------------------------------------------------------------

  // f(chunk of the tree, offset, count, path position) for positions of a sequence, in order.
  template <class F>
  void for_each_run(SequenceIndex s, TokenRange range, const F& f) const {
    if (range.empty()) return;
    nodes_.clear();
    core_.sequences.for_each_node(s, range,
                                  [&](NodeIndex n, std::int32_t offset, std::int32_t length) {
                                    nodes_.push_back({n, offset, length});
                                  });
    for (std::size_t i = nodes_.size(); i-- > 0;) {
      const PartOfNode part = nodes_[i];
      const TreeNode& n = core_.topology.node(part.node);
      const std::int32_t position = n.position + part.offset;
      core_.topology.for_each_run(n, part.offset, part.length,
                                  [&](ChunkIndex c, std::int32_t offset, std::int32_t count,
                                      std::int32_t done) { f(c, offset, count, position + done); });
    }
  }
  // The same for the rows of an entry.
  template <class F>
  CHUNKATTN_INLINE void for_each_row(const StepEntry& entry, const F& f) const {
    if (entry.chunk != no_chunk) [[likely]]
      return f(entry.chunk, entry.offset, 1, entry.begin);
    for_each_run(entry.sequence, {entry.begin, entry.length}, f);
  }

  // ---- what is held --------------------------------------------------------------------------

  // Holds the group's chunk of each wanted chunk of the tree, and takes those that are not there.
  // All that are there are held before one is evicted for another. False, with none held, where
  // chunks are missing.
  bool take_wanted() {
    fresh_.clear();
    ChunkIndex largest = 0;
    for (Wanted& wanted : wanted_) {
      wanted.own = chunks_.find(wanted.of_tree);
      if (wanted.own == no_chunk) fresh_.push_back(wanted.of_tree);
      largest = (std::max)(largest, wanted.of_tree);
    }
    const std::size_t fresh = count_distinct(fresh_);
    chunks_.reserve(fresh, largest);
    for (const Wanted& wanted : wanted_)
      if (wanted.own != no_chunk) chunks_.hold(wanted.own);
    if (fresh > chunks_.num_available()) {
      num_missing_ = fresh;
      for (const Wanted& wanted : wanted_)
        if (wanted.own != no_chunk) chunks_.release(wanted.own);
      return false;
    }
    for (Wanted& wanted : wanted_) {
      if (wanted.own != no_chunk) continue;
      wanted.own = chunks_.find(wanted.of_tree);  // taken for an earlier one
      if (wanted.own != no_chunk)
        chunks_.hold(wanted.own);
      else
        wanted.own = chunks_.take(wanted.of_tree);
    }
    return true;
  }
  // What is there is not K/V of these positions.
  void forget(SequenceIndex s, TokenRange range) noexcept {
    core_.sequences.for_each_node(
        s, range, [&](NodeIndex n, std::int32_t offset, std::int32_t length) {
          core_.topology.for_each_run(
              core_.topology.node(n), offset, length,
              [&](ChunkIndex of_tree, std::int32_t first, std::int32_t count, std::int32_t) {
                if (const ChunkIndex c = chunks_.find(of_tree); c != no_chunk)
                  WindowChunks::for_each_word(c, first, count, [&](const auto& slots) {
                    points_.tell({&slots, 1}, /*is_kept=*/false);
                    chunks_.forget(slots);
                  });
              });
        });
  }
  // The step has made its copies for the tree alone.
  void lose_copies(std::uint64_t step) noexcept {
    for (const PendingCopy& copy : core_.pending_copies) {
      const ChunkIndex c = chunks_.find(copy.rows.target_chunk);
      if (copy.step != step || c == no_chunk) continue;
      WindowChunks::for_each_word(c, copy.rows.target_begin, copy.rows.length,
                                  [&](const auto& slots) { chunks_.forget(slots); });
      holds_.lose(c);
    }
  }
  // The entry's rows have run for the tree alone. What the tree had before, others may have here.
  void skip(const StepEntry& entry) noexcept {
    holds_.end(entry.sequence, entry.begin);
    const std::int32_t begin =
        (std::max)(entry.begin, core_.topology.written_end(core_.sequences[entry.sequence].tail));
    if (begin < entry.end()) forget(entry.sequence, {begin, entry.end() - begin});
  }

  // ---- a step's plan -------------------------------------------------------------------------

  // A step that runs writes rows here, too, which later ones read.
  void check_planned(const StepRecord& step) const {
    const WindowWrites::OfStep* const own = writes_.find(step.number);
    if (own != nullptr && own->is_of(step)) [[likely]]
      return;
    for (const StepEntry& entry : step.entries) {
      const SequenceRecord& record = core_.sequences[entry.sequence];
      const bool counts = entry.generation == record.generation && entry.epoch == record.epoch;
      const WindowHold* const hold = holds_.find(entry.sequence);
      if (counts && hold != nullptr && hold->is_used)
        fail_argument("step in flight", step.number,
                      "one of whose plan view() was called: finish it, then resume() what was in "
                      "it");
    }
  }
  // A chunk for each run of rows, and what is there already is held until release_wanted().
  void find_wanted(const StepRecord& step) {
    wanted_.clear();
    for (const StepEntry& entry : step.entries) {
      if (is_superseded(entry)) continue;
      if (!holds_.covers(entry.sequence, entry.begin)) [[unlikely]]
        fail_argument("position of a sequence's first row", entry.begin,
                      "one whose window is there: call resume() before add() unless is_ready()");
      WindowHold& hold = holds_[entry.sequence];
      hold.parts.reserve_more(to_size(entry.length));
      const bool is_held = hold.parts.size() > hold.first && hold.parts.back().begin < entry.begin;
      const ChunkIndex last = is_held ? hold.parts.back().chunk : no_chunk;
      for_each_row(entry, [&](ChunkIndex c, std::int32_t, std::int32_t, std::int32_t) {
        if (last == no_chunk || chunks_.find(c) != last) wanted_.push_back({c});
      });
    }
    for (const Draft& draft : step.drafts) wanted_.push_back({draft.chunk});
  }
  // What it rests on was discarded: its results are not used, and its slots may be another's.
  [[nodiscard]] bool is_superseded(const StepEntry& entry) const noexcept {
    return entry.epoch != core_.sequences[entry.sequence].epoch;
  }
  void release_wanted() noexcept {
    for (const Wanted& wanted : wanted_) chunks_.release(wanted.own);
    wanted_.clear();
  }
  void plan_copies(const PlanView& tree, Array<RowCopy>& copies,
                   WindowWrites::OfStep& own) noexcept {
    for (std::int32_t i = 0; i < tree.num_copies; ++i) {
      const RowCopy& copy = tree.copies[i];
      const ChunkIndex from = chunks_.find(copy.source_chunk);
      const ChunkIndex to = chunks_.find(copy.target_chunk);
      if (from == no_chunk || to == no_chunk) continue;
      for (std::int32_t k = 0; k < copy.length; ++k) {
        if (chunks_.known(WindowChunks::slot(from, copy.source_begin + k)) == 0) continue;
        copies.push_back({from, copy.source_begin + k, to, copy.target_begin + k, 1});
        writes_.add(own, WindowChunks::slot(to, copy.target_begin + k));
      }
    }
    own.num_copied = own.slots.size();
  }
  void plan_entry(const StepRecord& step, const StepEntry& entry, const PlanView& tree,
                  WriteTarget* rows, WindowWrites::OfStep& own) noexcept {
    const std::span<const Draft> drafts = step.tree_of(entry);
    const std::int32_t tree_begin = drafts.empty() ? entry.end() : entry.output_position();
    WriteTarget* const first_draft = rows + (tree_begin - entry.begin);
    if (is_superseded(entry)) [[unlikely]] {
      std::fill(rows, first_draft + drafts.size(), WriteTarget{no_chunk, 0});
      return;
    }
    WindowHold& hold = holds_.begin(entry);
    if (entry.chunk != no_chunk) [[likely]] {
      const ChunkIndex c = chunks_.find(entry.chunk);
      holds_.extend(hold, c, entry.begin, entry.begin + 1);
      *rows = {c, entry.offset};
      return writes_.add(own, WindowChunks::slot(c, entry.offset));
    }
    for_each_run(
        entry.sequence, {entry.begin, entry.length},
        [&](ChunkIndex of_tree, std::int32_t offset, std::int32_t count, std::int32_t position) {
          const ChunkIndex c = chunks_.find(of_tree);
          holds_.extend(hold, c, position, position + count);
          const std::int32_t first = position - entry.begin;
          plan_rows(c, offset, (std::min)(count, tree_begin - position),
                    tree.writes + entry.first_row + first, rows + first, own);
        });
    for (std::size_t i = 0; i < drafts.size(); ++i) {
      const ChunkIndex c = chunks_.find(drafts[i].chunk);
      first_draft[i] = {c, drafts[i].offset};
      writes_.add(own, WindowChunks::slot(c, drafts[i].offset));
    }
  }
  // Rows in a chunk. Each is written where the tree's is, and where only the group has lost it.
  void plan_rows(ChunkIndex c, std::int32_t offset, std::int32_t count, const WriteTarget* of_tree,
                 WriteTarget* rows, WindowWrites::OfStep& own) noexcept {
    std::int32_t k = 0;
    WindowChunks::for_each_word(c, offset, count, [&](WindowChunks::Slots slots) {
      const std::uint64_t known = chunks_.known(slots);
      std::uint64_t written = 0;
      for (; k < count && (offset + k) >> 6 == slots.word; ++k) {
        const std::uint64_t bit = std::uint64_t{1} << ((offset + k) & 63);
        const bool writes_it = of_tree[k].chunk != no_chunk || (known & bit) == 0;
        rows[k] = writes_it ? WriteTarget{c, offset + k} : WriteTarget{no_chunk, 0};
        if (writes_it) written |= bit;
      }
      slots.mask = written;
      if (written != 0) writes_.add(own, slots);
    });
  }

  TreeCore& core_;
  WindowChunks chunks_;
  WindowSearch search_;
  WindowWrites writes_{chunks_, core_.steps};
  WindowHolds holds_{core_, chunks_, search_};
  Array<Wanted> wanted_;
  Array<ChunkIndex> fresh_;      ///< of the tree, wanted and without a chunk
  std::size_t num_missing_ = 0;  ///< chunks, where take_wanted() failed
  mutable Array<PartOfNode> nodes_;
  std::uint64_t num_recomputed_ = 0;
  WindowPoints points_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
