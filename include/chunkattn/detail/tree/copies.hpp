// The row copies that forks and accepted drafts ask for, until a step has made them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "../../plan_view.hpp"
#include "../base/array.hpp"
#include "../base/config.hpp"
#include "sequences.hpp"
#include "slots.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// A copy asked for by a fork, or for an accepted draft. The first step that is built after it
/// carries it; when that step has finished, the copy is done. Until then neither end is let go.
struct PendingCopy {
  RowCopy rows;
  SequenceIndex source = none, target = none;
  std::int32_t position = 0;    ///< path position of the first target row
  std::uint64_t step = 0;       ///< the outstanding step that carries it, 0: none
  std::uint64_t last_step = 0;  ///< the last one that carried it
};

class Copies {
 public:
  Copies(Topology& topology, Slots& slot_table, Sequences& sequences)
      : topology_(topology), slots_(slot_table), sequences_(sequences) {}

  [[nodiscard]] std::span<const PendingCopy> all() const noexcept { return copies_; }
  [[nodiscard]] bool empty() const noexcept { return copies_.empty(); }

  /// Makes room for the copies of so many rows, so that request() cannot fail: one per row at the
  /// most.
  void reserve(std::size_t rows) {
    if (copies_.capacity() - copies_.size() < rows) copies_.reserve(2 * copies_.capacity() + rows);
  }
  /// Asks for the K/V of the first `count` tokens of `from` at `to`, which has them in one slot.
  /// Rows that are themselves still to be copied are taken from where they come from, so that no
  /// copy depends on another.
  void request(SequenceIndex source, SequenceIndex target, const TreeNode& from, const TreeNode& to,
               std::int32_t count) noexcept {
    topology_.for_each_run(
        from, 0, count,
        [&](SlotIndex slot, std::int32_t offset, std::int32_t run, std::int32_t done) {
          const std::size_t older = slots_[slot].pending_copies > 0 ? copies_.size() : 0;
          for (std::int32_t i = 0; i < run;) {
            PendingCopy copy{{slot, offset + i, to.first_slot, to.begin + done + i, run - i},
                             source,
                             target,
                             to.position + done + i};
            for (std::size_t k = 0; k < older; ++k)
              if (copies_[k].rows.target_slot == slot && redirect(copy, copies_[k], offset + i))
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

  /// Calls f(copy) for the copies that the step's plan must carry, and notes that it does: those
  /// that no step has but one for which is_void(step).
  template <class IsVoid, class F>
  void carry(std::uint64_t step, const IsVoid& is_void, const F& f) {
    for (PendingCopy& copy : copies_) {
      if (copy.step != 0 && copy.step != step && !is_void(copy.step)) continue;
      f(copy.rows);
      copy.step = copy.last_step = step;
    }
  }
  /// The step has made the copies that it carried.
  void complete(std::uint64_t step) noexcept {
    erase([&](const PendingCopy& copy) { return copy.step == step; });
  }
  /// The step made none: they are still to be made.
  void put_back(std::uint64_t step) noexcept {
    for (PendingCopy& copy : copies_)
      if (copy.step == step) copy.step = 0;
  }

  /// A sequence that leaves before rows of its tail were copied takes the copies back, unless a
  /// step that may still run has them or another shares that part of the tail.
  void cancel(SequenceIndex s) noexcept {
    TreeNode& tail = sequences_.tail(s);
    erase([&](const PendingCopy& copy) {
      const std::int32_t first = copy.position - tail.position;  // below 0: split off, and shared
      if (copy.target != s || first < 0 || !is_idle(copy)) return false;
      tail.written = std::min(tail.written, first);
      tail.scheduled = std::min(tail.scheduled, first);
      return true;
    });
  }
  /// Nobody wants any copy: unless a step may still run, none is made.
  void forget_all() noexcept {
    if (oldest_step_ == no_step) erase([](const PendingCopy&) { return true; });
  }

  /// Shortens [0, end) of a path to what does not wait for a copy.
  [[nodiscard]] std::int32_t readable_end(NodeIndex last, std::int32_t end) const noexcept {
    for (const PendingCopy& copy : copies_) {
      if (copy.position >= end) continue;
      NodeIndex i = last;  // what a copy writes is on no path but those that have its first row
      while (topology_.node(i).position > copy.position) i = topology_.node(i).parent;
      const TreeNode& n = topology_.node(i);
      const std::int32_t place = n.begin + copy.position - n.position;
      if (topology_.slot_of(n, place) == copy.rows.target_slot &&
          topology_.chunk.offset(place) == copy.rows.target_begin)
        end = copy.position;
    }
    return end;
  }

  static constexpr std::uint64_t no_step = std::numeric_limits<std::uint64_t>::max();
  /// The oldest step that may still run; no_step: none does.
  void set_oldest_step(std::uint64_t step) noexcept { oldest_step_ = step; }

 private:
  [[nodiscard]] bool is_idle(const PendingCopy& copy) const noexcept {
    return copy.last_step < oldest_step_;
  }

  /// Where `pending` is to write the row at `offset`, `copy` reads what that one reads. Else it
  /// ends where `pending` begins.
  static bool redirect(PendingCopy& copy, const PendingCopy& pending,
                       std::int32_t offset) noexcept {
    const std::int32_t into = offset - pending.rows.target_begin;
    if (into >= 0 && into < pending.rows.length) {
      copy.rows.source_slot = pending.rows.source_slot;
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
    ++slots_[copy.rows.target_slot].pending_copies;
    copies_.push_back(copy);
  }
  template <class F>
  void erase(const F& done) noexcept {
    copies_.erase_if([&](const PendingCopy& copy) {
      if (!done(copy)) return false;
      --sequences_[copy.source].copies;
      --sequences_[copy.target].copies;
      --slots_[copy.rows.target_slot].pending_copies;
      return true;
    });
  }

  Topology& topology_;
  Slots& slots_;
  Sequences& sequences_;
  Array<PendingCopy> copies_;
  std::uint64_t oldest_step_ = no_step;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
