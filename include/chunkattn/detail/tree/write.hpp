// Writers of K/V. Positions that are not written yet have one writer; what a step is to write is
// scheduled, what it has written is written. Rows that forks and accepted drafts ask for are copied
// by a step.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../support/array.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"
#include "core.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

CHUNKATTN_FUNCTION std::int32_t TreeCore::readable_length(SequenceIndex s) const noexcept {
  const SequenceRecord& record = sequences[s];
  return readable_end(record.tail, (std::min)(topology.written_end(record.tail), record.size));
}

template <class F>
void TreeCore::for_each_awaited(SequenceIndex s, const F& f) const {
  if (!sequences[s].may_wait) return;
  for (NodeIndex i = sequences[s].tail; i != root_node; i = topology.node(i).parent) {
    const TreeNode& n = topology.node(i);
    if (n.writer != s && n.written < n.length) f(i);
  }
}

CHUNKATTN_FUNCTION std::int32_t TreeCore::num_pending(SequenceIndex s) const noexcept {
  std::int32_t pending = 0;
  for_each_awaited(
      s, [&](NodeIndex n) { pending += topology.node(n).length - topology.node(n).written; });
  return pending;
}

CHUNKATTN_FUNCTION SequenceIndex TreeCore::waits_for(SequenceIndex s) const noexcept {
  SequenceIndex writer = none;
  for_each_awaited(s, [&](NodeIndex n) { writer = topology.node(n).writer; });
  return writer;
}

CHUNKATTN_FUNCTION TokenRange TreeCore::loadable(SequenceIndex s) const noexcept {
  const SequenceRecord& record = sequences[s];
  std::int32_t begin = record.size, end = record.size;
  if (record.steps > 0) return {record.size, 0};
  for (NodeIndex i = record.tail; i != root_node; i = topology.node(i).parent) {
    const TreeNode& n = topology.node(i);
    const std::int32_t first = n.position + n.written;
    const std::int32_t last = (std::min)(n.end(), record.size);
    if (first >= last || n.writer != s) continue;
    if (begin != last) end = last;  // not in one run with what stands below
    begin = first;
  }
  return {begin, end - begin};
}

CHUNKATTN_FUNCTION AddOutcome TreeCore::find_missing(SequenceIndex s, std::int32_t& end) noexcept {
  AddOutcome outcome;
  bool waits = false;
  for_each_awaited(s, [&](NodeIndex index) {
    const TreeNode& n = topology.node(index);
    waits = true;
    if (n.position >= end || n.scheduled >= (std::min)(n.length, end - n.position)) return;
    end = n.position + n.scheduled;
    if (sequences[n.writer].state == SequenceState::live)
      outcome = {AddResult::Reason::waits_for_sequence, n.writer};
    else
      outcome = {AddResult::Reason::waits_for_step, none, steps.oldest_outstanding(n.writer)};
  });
  sequences[s].may_wait = waits;
  return outcome;
}

CHUNKATTN_FUNCTION std::int32_t TreeCore::take_over(SequenceIndex s) noexcept {
  SequenceRecord& record = sequences[s];
  std::int32_t taken = 0;
  for_each_awaited(s, [&](NodeIndex index) {
    TreeNode& n = topology.node(index);
    SequenceRecord& before = sequences[n.writer];
    // A step may be at it, or one that was dropped in flight.
    if (n.scheduled > n.written || (steps.any_void() && before.steps > 0)) return;
    const std::int32_t first = n.position + n.written;
    if (before.cursor >= first)
      before.cursor = (std::max)(before.cursor, (std::min)(n.end(), before.size - 1));
    before.may_wait = true;
    n.writer = s;
    record.cursor = (std::min)(record.cursor, first);
    taken += n.length - n.written;
  });
  if (taken > 0) ++stats.reassigned_nodes;
  return taken;
}

CHUNKATTN_FUNCTION void TreeCore::mark_loaded(SequenceIndex s, TokenRange range) {
  SequenceRecord& record = sequences[s];
  if (range.empty()) return;
  if (range.end() > record.size) [[unlikely]]
    fail_argument("range.end()", range.end(),
                  {"at most ", record.size, ", the sequence's known tokens"});
  check_argument(record.steps == 0, "sequence", "in a step",
                 "a sequence that no open step and no step in flight has");
  sequences.for_each_node(s, range, [&](NodeIndex i, std::int32_t offset, std::int32_t length) {
    check_loadable(s, range, topology.node(i), offset, offset + length);
  });
  sequences.for_each_node(s, range, [&](NodeIndex i, std::int32_t offset, std::int32_t length) {
    TreeNode& n = topology.node(i);
    if (n.written >= offset + length) return;
    n.scheduled = offset + length;
    n.set_written(offset + length);
  });
  if (range.begin <= record.cursor) record.cursor = (std::max)(record.cursor, range.end());
  topology.observers.notify([=](NodeObserver& observer) { observer.on_load(s, range); });
  notify_written(s, range.begin);
}

CHUNKATTN_FUNCTION void TreeCore::check_loadable(SequenceIndex s, TokenRange range,
                                                 const TreeNode& n, std::int32_t offset,
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

CHUNKATTN_FUNCTION void TreeCore::end_step_of(SequenceIndex s) noexcept {
  const SequenceRecord& record = sequences[s];
  if (record.state != SequenceState::leaving || record.steps > 0) return;
  for (NodeIndex n = record.tail; n != none; n = topology.node(n).parent)
    if (topology.node(n).writer == s) reassign(n);
}

CHUNKATTN_FUNCTION void TreeCore::give_to_successor(NodeIndex index) noexcept {
  TreeNode& pending = topology.node(index);
  pending.writer = find_successor(index);
  SequenceRecord& successor = sequences[pending.writer];
  successor.cursor = (std::min)(successor.cursor, pending.position + pending.written);
  ++stats.reassigned_nodes;
}

// A node with a live sequence at or below it.
CHUNKATTN_FUNCTION SequenceIndex TreeCore::find_successor(NodeIndex n) const noexcept {
  const auto is_live = [&](SequenceIndex s) {
    return s != none && sequences[s].state == SequenceState::live;
  };
  while (true) {
    if (is_live(topology.node(n).tail_of)) return topology.node(n).tail_of;
    NodeIndex child = topology.node(n).first_child;
    while (topology.node(child).live == 0) child = topology.node(child).next_sibling;
    n = child;
    // The writer below continues, so that one sequence writes a run from its start to its end.
    if (is_live(topology.node(n).writer)) return topology.node(n).writer;
  }
}

CHUNKATTN_FUNCTION void TreeCore::set_scheduled(const StepEntry& entry, bool scheduled) noexcept {
  sequences.for_each_node(
      entry.sequence, {entry.begin, entry.length},
      [&](NodeIndex index, std::int32_t offset, std::int32_t length) {
        TreeNode& n = topology.node(index);
        if (n.writer != entry.sequence) return;
        const std::int32_t limit = (std::max)(n.written, scheduled ? offset + length : offset);
        n.scheduled = scheduled ? (std::max)(n.scheduled, limit) : (std::min)(n.scheduled, limit);
      });
}

CHUNKATTN_FUNCTION void TreeCore::mark_written(const StepEntry& entry,
                                               SequenceRecord& record) noexcept {
  record.computed = (std::max)(record.computed, entry.end());
  const std::int32_t end = (std::min)(entry.end(), record.size);  // known tokens
  sequences.for_each_node(
      entry.sequence, {entry.begin, end - entry.begin},
      [&](NodeIndex index, std::int32_t offset, std::int32_t length) {
        TreeNode& n = topology.node(index);
        if (n.writer == entry.sequence && n.written >= offset && n.written < offset + length)
          n.set_written(offset + length);
      });
}

[[gnu::noinline]] CHUNKATTN_FUNCTION StepEntry* TreeCore::mark_decoded(StepEntry* entry,
                                                                       StepEntry* end,
                                                                       SequenceRecord* records,
                                                                       TreeNode* nodes) noexcept {
  for (; entry != end; ++entry) {
    SequenceRecord& record = records[entry->sequence];
    const std::int32_t size = entry->begin + 1;
    if (entry->chunk == no_chunk || record.state != SequenceState::live ||
        record.epoch != entry->epoch || record.size != size) [[unlikely]]
      break;
    TreeNode& tail = nodes[record.tail];
    if (tail.writer != entry->sequence || tail.written != entry->begin - tail.position) [[unlikely]]
      break;
    tail.written += 1;  // it stays the writer: the output's slot is its own too
    record.steps -= 1;
    record.computed = (std::max)(record.computed, size);
  }
  return entry;
}

CHUNKATTN_FUNCTION void TreeCore::cancel_entry(const StepEntry& entry) noexcept {
  SequenceRecord& record = sequences[entry.sequence];
  --record.steps;
  if (take_back(entry,
                record))  // nothing was scheduled after it, and no earlier step uses its slots
    sequences.shrink_reserved(record, record.reserved - entry.drafts - 1, /*keep_chunks=*/false);
}

CHUNKATTN_FUNCTION bool TreeCore::take_back(const StepEntry& entry,
                                            SequenceRecord& record) noexcept {
  // Superseded rows may be known tokens too, where several void steps end in any order.
  record.cursor = (std::min)(record.cursor, entry.begin);
  set_scheduled(entry, false);
  const bool counts = entry.epoch == record.epoch;
  if (!counts) --record.superseded;
  return counts && entry.has_output;
}

// ---- copies -----------------------------------------------------------------------------------

/// Where `pending` is to write the row at `offset`, `copy` reads what that one reads. Else it
/// ends where `pending` begins.
inline bool redirect(PendingCopy& copy, const PendingCopy& pending, std::int32_t offset) noexcept {
  const std::int32_t into = offset - pending.rows.target_begin;
  if (into >= 0 && into < pending.rows.length) {
    copy.rows.source_chunk = pending.rows.source_chunk;
    copy.rows.source_begin = pending.rows.source_begin + into;
    copy.rows.length = (std::min)(copy.rows.length, pending.rows.length - into);
    copy.source = pending.source;
    return true;
  }
  if (into < 0) copy.rows.length = (std::min)(copy.rows.length, -into);
  return false;
}

CHUNKATTN_FUNCTION void TreeCore::request_copies(SequenceIndex source, SequenceIndex target,
                                                 const TreeNode& from, const TreeNode& to,
                                                 std::int32_t count) noexcept {
  topology.for_each_run(
      from, 0, count,
      [&](ChunkIndex chunk, std::int32_t offset, std::int32_t run, std::int32_t done) {
        const std::size_t older = chunk_table[chunk].pending_copies > 0 ? pending_copies.size() : 0;
        for (std::int32_t i = 0; i < run;) {
          PendingCopy copy{{chunk, offset + i, to.first_chunk, to.begin + done + i, run - i},
                           source,
                           target,
                           to.position + done + i};
          for (std::size_t k = 0; k < older; ++k)
            if (pending_copies[k].rows.target_chunk == chunk &&
                redirect(copy, pending_copies[k], offset + i))
              break;
          request_copy(copy);
          i += copy.rows.length;
        }
      });
}

CHUNKATTN_FUNCTION void TreeCore::request_copy(const PendingCopy& copy) noexcept {
  ++sequences[copy.source].copies;
  ++sequences[copy.target].copies;
  ++chunk_table[copy.rows.target_chunk].pending_copies;
  pending_copies.push_back(copy);
}

CHUNKATTN_FUNCTION void TreeCore::carry_copies(std::uint64_t step, Array<RowCopy>& rows) {
  rows.clear();
  for (PendingCopy& copy : pending_copies) {
    if (copy.step != 0 && copy.step != step && !steps.is_void(copy.step)) continue;
    rows.push_back(copy.rows);
    copy.step = step;
  }
}

template <class F>
void TreeCore::erase_copies(const F& done) noexcept {
  pending_copies.erase_if([&](const PendingCopy& copy) {
    if (!done(copy)) return false;
    --sequences[copy.source].copies;
    --sequences[copy.target].copies;
    --chunk_table[copy.rows.target_chunk].pending_copies;
    return true;
  });
}

CHUNKATTN_FUNCTION void TreeCore::cancel_copies(SequenceIndex s) noexcept {
  TreeNode& tail = sequences.tail(s);
  const std::uint64_t oldest = steps.oldest_outstanding();
  erase_copies([&](const PendingCopy& copy) {
    const std::int32_t first = copy.position - tail.position;  // below 0: split off, and shared
    if (copy.target != s || first < 0 || copy.step >= oldest) return false;
    tail.written = (std::min)(tail.written, first);
    tail.scheduled = (std::min)(tail.scheduled, first);
    return true;
  });
}

CHUNKATTN_FUNCTION void TreeCore::forget_copies() noexcept {
  if (sequences.num_live() == 0 && !pending_copies.empty() &&
      steps.oldest_outstanding() == StepTable::no_step)
    erase_copies([](const PendingCopy&) { return true; });
}

CHUNKATTN_FUNCTION std::int32_t TreeCore::readable_end(NodeIndex last,
                                                       std::int32_t end) const noexcept {
  for (const PendingCopy& copy : pending_copies) {
    if (copy.position >= end) continue;
    NodeIndex i = last;  // what a copy writes is on no path but those that have its first row
    while (topology.node(i).position > copy.position) i = topology.node(i).parent;
    const TreeNode& n = topology.node(i);
    const std::int32_t slot = n.begin + copy.position - n.position;
    if (topology.chunk_of(n, slot) == copy.rows.target_chunk &&
        topology.geometry.offset(slot) == copy.rows.target_begin)
      end = copy.position;
  }
  return end;
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END
