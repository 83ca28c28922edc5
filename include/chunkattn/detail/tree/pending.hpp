// Writers and Copies: K/V that is not in place yet, who is to write it, and the row copies that
// forks and accepted drafts ask for, until a step has made them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "../../plan_view.hpp"
#include "../../tree_options.hpp"
#include "../support/array.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"
#include "chunk_table.hpp"
#include "sequence_table.hpp"
#include "step_table.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// A copy asked for by a fork, or for an accepted draft. The first step that is built after it
/// carries it; when that step has finished, the copy is done. Until then neither end is let go.
struct PendingCopy {
  RowCopy rows;
  SequenceIndex source = none, target = none;
  std::int32_t position = 0;  ///< path position of the first target row
  /// The last step that carried it, 0: none yet. It still does unless it is void or has ended.
  std::uint64_t step = 0;
};

/// Row copies, until a step has made them.
class Copies {
 public:
  Copies(const Topology& topology, ChunkTable& chunk_table, SequenceTable& sequences,
         const StepTable& steps)
      : topology_(topology), chunks_(chunk_table), sequences_(sequences), steps_(steps) {}

  [[nodiscard]] std::span<const PendingCopy> all() const noexcept { return copies_; }
  [[nodiscard]] bool empty() const noexcept { return copies_.empty(); }

  /// Makes room for the copies of so many rows, so that request() cannot fail: one per row at the
  /// most.
  void reserve(std::size_t rows) {
    if (copies_.capacity() - copies_.size() < rows) copies_.reserve(2 * copies_.capacity() + rows);
  }
  /// Asks for the K/V of the first `count` tokens of `from` at `to`, which has them in one chunk.
  /// Rows that are themselves still to be copied are taken from where they come from, so that no
  /// copy depends on another.
  void request(SequenceIndex source, SequenceIndex target, const TreeNode& from, const TreeNode& to,
               std::int32_t count) noexcept {
    topology_.for_each_run(
        from, 0, count,
        [&](ChunkIndex chunk, std::int32_t offset, std::int32_t run, std::int32_t done) {
          const std::size_t older = chunks_[chunk].pending_copies > 0 ? copies_.size() : 0;
          for (std::int32_t i = 0; i < run;) {
            PendingCopy copy{{chunk, offset + i, to.first_chunk, to.begin + done + i, run - i},
                             source,
                             target,
                             to.position + done + i};
            for (std::size_t k = 0; k < older; ++k)
              if (copies_[k].rows.target_chunk == chunk && redirect(copy, copies_[k], offset + i))
                break;
            push_back(copy);
            i += copy.rows.length;
          }
          return true;
        });
  }
  /// Asks for a copy of rows that are there, to path positions of `target` from `position` on.
  void request(SequenceIndex source, SequenceIndex target, const RowCopy& rows,
               std::int32_t position) noexcept {
    push_back({rows, source, target, position});
  }

  /// The copies that the step's plan must carry, which from now on it has: those that no step has
  /// but one that is void. (One that has ended without making them counts as void.)
  void carry(std::uint64_t step, Array<RowCopy>& rows) {
    rows.clear();
    if (copies_.empty()) return;
    rows.reserve(copies_.size());
    for (PendingCopy& copy : copies_) {
      if (copy.step != 0 && copy.step != step && !steps_.is_void(copy.step)) continue;
      rows.push_back(copy.rows);
      copy.step = step;
    }
  }
  /// The step has made the copies that it carried.
  void complete(std::uint64_t step) noexcept {
    erase([&](const PendingCopy& copy) { return copy.step == step; });
  }

  /// A sequence that leaves before rows of its tail were copied takes the copies back, unless a
  /// step that may still run has them or another shares that part of the tail.
  void cancel(SequenceIndex s) noexcept {
    TreeNode& tail = sequences_.tail(s);
    const std::uint64_t oldest = steps_.oldest_outstanding();
    erase([&](const PendingCopy& copy) {
      const std::int32_t first = copy.position - tail.position;  // below 0: split off, and shared
      if (copy.target != s || first < 0 || copy.step >= oldest) return false;
      tail.written = std::min(tail.written, first);
      tail.scheduled = std::min(tail.scheduled, first);
      return true;
    });
  }
  /// Nobody wants any copy: unless a step may still run, none is made.
  void forget_all() noexcept {
    if (!copies_.empty() && steps_.oldest_outstanding() == StepTable::no_step)
      erase([](const PendingCopy&) { return true; });
  }

  /// Shortens [0, end) of a path to what does not wait for a copy.
  [[nodiscard]] std::int32_t readable_end(NodeIndex last, std::int32_t end) const noexcept {
    for (const PendingCopy& copy : copies_) {
      if (copy.position >= end) continue;
      NodeIndex i = last;  // what a copy writes is on no path but those that have its first row
      while (topology_.node(i).position > copy.position) i = topology_.node(i).parent;
      const TreeNode& n = topology_.node(i);
      const std::int32_t slot = n.begin + copy.position - n.position;
      if (topology_.chunk_of(n, slot) == copy.rows.target_chunk &&
          topology_.geometry.offset(slot) == copy.rows.target_begin)
        end = copy.position;
    }
    return end;
  }

 private:
  /// Where `pending` is to write the row at `offset`, `copy` reads what that one reads. Else it
  /// ends where `pending` begins.
  static bool redirect(PendingCopy& copy, const PendingCopy& pending,
                       std::int32_t offset) noexcept {
    const std::int32_t into = offset - pending.rows.target_begin;
    if (into >= 0 && into < pending.rows.length) {
      copy.rows.source_chunk = pending.rows.source_chunk;
      copy.rows.source_begin = pending.rows.source_begin + into;
      copy.rows.length = std::min(copy.rows.length, pending.rows.length - into);
      copy.source = pending.source;
      return true;
    }
    if (into < 0) copy.rows.length = std::min(copy.rows.length, -into);
    return false;
  }

  void push_back(const PendingCopy& copy) noexcept {
    ++sequences_[copy.source].copies;
    ++sequences_[copy.target].copies;
    ++chunks_[copy.rows.target_chunk].pending_copies;
    copies_.push_back(copy);
  }
  template <class F>
  void erase(const F& done) noexcept {
    copies_.erase_if([&](const PendingCopy& copy) {
      if (!done(copy)) return false;
      --sequences_[copy.source].copies;
      --sequences_[copy.target].copies;
      --chunks_[copy.rows.target_chunk].pending_copies;
      return true;
    });
  }

  const Topology& topology_;
  ChunkTable& chunks_;
  SequenceTable& sequences_;
  const StepTable& steps_;
  Array<PendingCopy> copies_;
};

/// Who is to write the K/V of which nodes. Those that nobody has written yet have one writer; what
/// a step is to write is scheduled, what it has written is written.
class Writers {
 public:
  Writers(Topology& topology, SequenceTable& sequences, const StepTable& steps, TreeStats& stats)
      : topology_(topology), sequences_(sequences), steps_(steps), stats_(stats) {}

  // ---- whose job it is -----------------------------------------------------------------------

  /// Calls f for the nodes of the path that another sequence has still to write, last first.
  template <class F>
  void for_each_awaited(SequenceIndex s, const F& f) const {
    if (!sequences_[s].may_wait) return;
    for (NodeIndex i = sequences_[s].tail; i != root_node; i = topology_.node(i).parent) {
      const TreeNode& n = topology_.node(i);
      if (n.writer != s && n.written < n.length) f(i);
    }
  }
  /// Path positions that another sequence is to write.
  [[nodiscard]] std::int32_t num_pending(SequenceIndex s) const noexcept {
    std::int32_t pending = 0;
    for_each_awaited(
        s, [&](NodeIndex n) { pending += topology_.node(n).length - topology_.node(n).written; });
    return pending;
  }
  /// Who is to write the first of these positions; none where there are none.
  [[nodiscard]] SequenceIndex waits_for(SequenceIndex s) const noexcept {
    SequenceIndex writer = none;
    for_each_awaited(s, [&](NodeIndex n) { writer = topology_.node(n).writer; });
    return writer;
  }
  /// The topmost run of positions that are this sequence's to write, empty while a step has it.
  [[nodiscard]] TokenRange loadable(SequenceIndex s) const noexcept {
    const SequenceRecord& record = sequences_[s];
    std::int32_t begin = record.size, end = record.size;
    if (record.steps > 0) return {record.size, 0};
    for (NodeIndex i = record.tail; i != root_node; i = topology_.node(i).parent) {
      const TreeNode& n = topology_.node(i);
      const std::int32_t first = n.position + n.written;
      const std::int32_t last = std::min(n.end(), record.size);
      if (first >= last || n.writer != s) continue;
      if (begin != last) end = last;  // not in one run with what stands below
      begin = first;
    }
    return {begin, end - begin};
  }
  /// Lowers `end` to the first position whose K/V is still to be written by another sequence that
  /// no step has, and says by whom. (Two sequences may each have to write what the other one reads:
  /// each goes as far as it can.)
  AddOutcome find_missing(SequenceIndex s, std::int32_t& end) noexcept {
    AddOutcome outcome;
    bool waits = false;
    for_each_awaited(s, [&](NodeIndex index) {
      const TreeNode& n = topology_.node(index);
      waits = true;
      if (n.position >= end || n.scheduled >= std::min(n.length, end - n.position)) return;
      end = n.position + n.scheduled;
      if (sequences_[n.writer].state == SequenceState::live)
        outcome = {AddResult::Reason::waits_for_sequence, n.writer};
      else
        outcome = {AddResult::Reason::waits_for_step, none, steps_.oldest_step_of(n.writer)};
    });
    sequences_[s].may_wait = waits;
    return outcome;
  }
  /// Makes what others are still to write on this path its own job, where no step is at it.
  /// Returns the tokens that it got.
  std::int32_t take_over(SequenceIndex s) noexcept {
    SequenceRecord& record = sequences_[s];
    std::int32_t taken = 0;
    for_each_awaited(s, [&](NodeIndex index) {
      TreeNode& n = topology_.node(index);
      SequenceRecord& before = sequences_[n.writer];
      // A step may be at it, or one that was dropped in flight.
      if (n.scheduled > n.written || (steps_.any_void() && before.steps > 0)) return;
      const std::int32_t first = n.position + n.written;
      if (before.cursor >= first)
        before.cursor = std::max(before.cursor, std::min(n.end(), before.size - 1));
      before.may_wait = true;
      n.writer = s;
      record.cursor = std::min(record.cursor, first);
      taken += n.length - n.written;
    });
    if (taken > 0) ++stats_.reassigned_nodes;
    return taken;
  }

  /// A step that had the sequence has ended: if it was the last, and the sequence has left, others
  /// continue writing what it had still to write.
  void end_step_of(SequenceIndex s) noexcept {
    const SequenceRecord& record = sequences_[s];
    if (record.state != SequenceState::leaving || record.steps > 0) return;
    for (NodeIndex n = record.tail; n != none; n = topology_.node(n).parent)
      if (topology_.node(n).writer == s) reassign(n);
  }

  /// The node's writer is it no longer: what is still to be written goes to a live sequence below.
  CHUNKATTN_INLINE void reassign(NodeIndex index) noexcept {
    TreeNode& n = topology_.node(index);
    n.writer = none;
    if (n.written < n.length && n.live > 0) [[unlikely]]
      give_to_successor(index);
  }

  // ---- what steps write ----------------------------------------------------------------------

  /// The entry, which has just been added, is to write its positions.
  CHUNKATTN_INLINE void schedule(const StepEntry& entry) noexcept {
    set_scheduled(entry.sequence, {entry.begin, entry.length}, true);
  }
  /// A step that has the entry is void: it writes nothing that counts.
  void unschedule(const StepEntry& entry) noexcept {
    set_scheduled(entry.sequence, {entry.begin, entry.length}, false);
  }
  /// The step has run: the K/V of the entry's positions is written.
  void mark_written(const StepEntry& entry, SequenceRecord& record) noexcept {
    record.computed = std::max(record.computed, entry.end());
    const auto mark = [&](TreeNode& n, std::int32_t offset, std::int32_t end) {
      if (n.writer == entry.sequence && n.written >= offset && n.written < end) n.set_written(end);
    };
    const std::int32_t end = std::min(entry.end(), record.size);  // known tokens
    TreeNode& tail = topology_.node(record.tail);
    if (entry.begin >= tail.position) [[likely]]
      return mark(tail, entry.begin - tail.position, end - tail.position);
    sequences_.for_each_node(entry.sequence, {entry.begin, end - entry.begin},
                             [&](NodeIndex n, std::int32_t offset, std::int32_t length) {
                               mark(topology_.node(n), offset, offset + length);
                             });
  }
  /// The step has ended, for the entries from `entry` on as far as each just decodes, see
  /// StepEntry::chunk. Returns the first that does not, or `end`.
  [[nodiscard]] StepEntry* mark_decoded(StepEntry* entry, StepEntry* end) noexcept {
    return mark_decoded(entry, end, sequences_.records(), topology_.nodes());
  }

  /// The step does not run: it is as if the entry had not been added.
  void cancel(const StepEntry& entry, bool keep_chunks) noexcept {
    SequenceRecord& record = sequences_[entry.sequence];
    --record.steps;
    take_back(entry, record);
    if (entry.has_output && entry.epoch == record.epoch)  // nothing was scheduled after it
      sequences_.shrink_reserved(record, record.reserved - entry.drafts - 1, keep_chunks);
  }
  /// The same for an entry of a step that may have run, and that others may have been scheduled
  /// after.
  void discard(const StepEntry& entry, SequenceRecord& record) noexcept {
    const bool counted = entry.epoch == record.epoch;
    take_back(entry, record);
    if (counted && entry.has_output) sequences_.drop_reserved(record);
  }

  /// K/V of these positions has come from elsewhere: a file, another machine, host memory.
  void mark_loaded(SequenceIndex s, TokenRange range) {
    SequenceRecord& record = sequences_[s];
    if (range.empty()) return;
    if (range.end() > record.size) [[unlikely]]
      fail_argument("range.end()", range.end(),
                    {"at most ", record.size, ", the sequence's known tokens"});
    check_argument(record.steps == 0, "sequence", "in a step",
                   "a sequence that no open step and no step in flight has");
    sequences_.for_each_node(s, range, [&](NodeIndex i, std::int32_t offset, std::int32_t length) {
      check_loadable(s, range, topology_.node(i), offset, offset + length);
    });
    sequences_.for_each_node(s, range, [&](NodeIndex i, std::int32_t offset, std::int32_t length) {
      TreeNode& n = topology_.node(i);
      if (n.written >= offset + length) return;
      n.scheduled = offset + length;
      n.set_written(offset + length);
    });
    if (range.begin <= record.cursor) record.cursor = std::max(record.cursor, range.end());
  }

 private:
  [[gnu::noinline]] void give_to_successor(NodeIndex index) noexcept {
    TreeNode& pending = topology_.node(index);
    pending.writer = find_successor(index);
    SequenceRecord& successor = sequences_[pending.writer];
    successor.cursor = std::min(successor.cursor, pending.position + pending.written);
    ++stats_.reassigned_nodes;
  }
  [[nodiscard]] SequenceIndex find_successor(NodeIndex n) const noexcept {
    const auto is_live = [&](SequenceIndex s) {
      return s != none && sequences_[s].state == SequenceState::live;
    };
    while (true) {
      if (is_live(topology_.node(n).tail_of)) return topology_.node(n).tail_of;
      NodeIndex child = topology_.node(n).first_child;
      while (topology_.node(child).live == 0) child = topology_.node(child).next_sibling;
      n = child;
      // The writer below continues, so that one sequence writes a run from its start to its end.
      if (is_live(topology_.node(n).writer)) return topology_.node(n).writer;
    }
  }

  /// A step is to write those positions in the range that are the sequence's to write, or no
  /// longer is.
  CHUNKATTN_INLINE void set_scheduled(SequenceIndex s, TokenRange range, bool scheduled) noexcept {
    const auto set = [s, scheduled](TreeNode& n, std::int32_t begin, std::int32_t end) {
      if (n.writer != s) return;
      const std::int32_t limit = std::max(n.written, scheduled ? end : begin);
      n.scheduled = scheduled ? std::max(n.scheduled, limit) : std::min(n.scheduled, limit);
    };
    TreeNode& tail = sequences_.tail(s);
    if (range.begin >= tail.position) [[likely]]
      return set(tail, range.begin - tail.position,
                 std::min(range.end(), tail.end()) - tail.position);
    sequences_.for_each_node(s, range, [&](NodeIndex n, std::int32_t offset, std::int32_t length) {
      set(topology_.node(n), offset, offset + length);
    });
  }

  /// The entry's positions are to be computed again.
  void take_back(const StepEntry& entry, SequenceRecord& record) noexcept {
    // Superseded rows may be known tokens too, where several void steps end in any order.
    record.cursor = std::min(record.cursor, entry.begin);
    unschedule(entry);
    if (entry.epoch != record.epoch) --record.superseded;
  }

  __attribute__((noinline)) static StepEntry* mark_decoded(StepEntry* entry, StepEntry* end,
                                                           SequenceRecord* records,
                                                           TreeNode* nodes) noexcept {
    for (; entry != end; ++entry) {
      SequenceRecord& record = records[entry->sequence];
      const std::int32_t size = entry->begin + 1;
      if (entry->chunk == no_chunk || record.state != SequenceState::live ||
          record.epoch != entry->epoch || record.size != size) [[unlikely]]
        break;
      TreeNode& tail = nodes[record.tail];
      if (tail.writer != entry->sequence || tail.written != entry->begin - tail.position)
          [[unlikely]]
        break;
      tail.written += 1;  // it stays the writer: the output's slot is its own too
      record.steps -= 1;
      record.computed = std::max(record.computed, size);
    }
    return entry;
  }

  void check_loadable(SequenceIndex s, TokenRange range, const TreeNode& n, std::int32_t offset,
                      std::int32_t end) const {
    if (n.written >= end) return;
    const std::int32_t first = n.position + n.written;
    if (n.writer != s) [[unlikely]]
      fail_argument("range.begin", range.begin,
                    {"positions that are this sequence's to write; another is to write position ",
                     first, ": take_over() first"});
    if (n.written < offset) [[unlikely]]
      fail_argument("range.begin", range.begin,
                    {"at most ", first, ", the first position without K/V"});
  }

  Topology& topology_;
  SequenceTable& sequences_;
  const StepTable& steps_;
  TreeStats& stats_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
