// Row copies that forks and accepted drafts ask for, until a step has made them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../support/array.hpp"
#include "../support/config.hpp"
#include "core.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

CHUNKATTN_FUNCTION void TreeCore::reserve_copies(std::size_t rows) {
  if (pending_copies.capacity() - pending_copies.size() < rows)
    pending_copies.reserve(2 * pending_copies.capacity() + rows);
}

/// Where `pending` is to write the row at `offset`, `copy` reads what that one reads. Else it
/// ends where `pending` begins.
inline bool redirect(PendingCopy& copy, const PendingCopy& pending, std::int32_t offset) noexcept {
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
        return true;
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
    tail.written = std::min(tail.written, first);
    tail.scheduled = std::min(tail.scheduled, first);
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
