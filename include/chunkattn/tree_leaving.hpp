// How a sequence of the prefix tree gets places and gives them up: the end of its private tail, the
// row copies that forks ask for, and what becomes of it when it leaves.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "config.hpp"
#include "tree_paths.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

template <TokenType Token, int ChunkSize, ChunkAllocator Allocator, RetentionPolicy Retention>
class TreeLeaving : public TreePaths<Token, ChunkSize, Allocator, Retention> {
  using Paths = TreePaths<Token, ChunkSize, Allocator, Retention>;
  using Storage = TreeStorage<Token, ChunkSize, Allocator, Retention>;

 public:
  using Paths::node, Paths::retains, Paths::sequence;
  using Paths::Paths;

  [[nodiscard]] std::uint64_t version() const noexcept { return version_; }
  [[nodiscard]] std::span<const PendingCopy> pending_copies() const noexcept { return copies_; }

  /// The sequence stops counting as live at once. Its places are given up when no step and no copy
  /// uses them any more.
  void leave(SequenceIndex s) noexcept {
    SequenceRecord& record = sequences_[at(s)];
    if (record.steps == 0) drop_reserved(record);
    record.state = SequenceState::leaving;
    ++record.generation;
    --stats_.live_sequences;
    ++stats_.leaving_sequences;
    ++stats_.leaves;
    ++version_;
    const bool had_copies = record.copies > 0;
    if (had_copies && record.steps == 0) cancel_copies(s);
    if constexpr (retains)
      if (record.steps == 0) this->publish_tail(s, /*may_merge=*/false);
    for (NodeIndex n = record.tail; n != none; n = node(n).parent) {
      --node(n).live;
      ++node(n).held;
      node(n).priority = std::max(node(n).priority, record.priority);
    }
    if (record.steps > 0) {
      leaving_.push_back(s);  // reserved by reserve_sequence(); it stays the writer for its steps
      return;
    }
    give_up_writing(s);
    if (record.copies > 0)
      leaving_.push_back(s);
    else
      finish(s);
    if (!had_copies && stats_.live_sequences > 0) return settle();
    if constexpr (!retains) forget_copies();
    finish_leaving();  // others may have waited for the copies
  }

 protected:
  using Paths::at, Paths::copies_, Paths::sequences_, Paths::slots_, Paths::stats_;

  // ---- the private tail --------------------------------------------------------------------

  bool grow_tail(SequenceRecord& record, std::int32_t count) {
    TreeNode& tail = node(record.tail);
    if (tail.length > 0 && count <= ChunkSize - this->end_offset(tail)) {
      tail.length += count;  // a tail that holds tokens owns the places behind them
      stats_.stored_tokens += at(count);
      return true;
    }
    const std::int32_t room = this->room(tail);
    if (!this->acquire(Storage::slots_for(count - room))) {
      ++stats_.failed_adds;
      return false;
    }
    this->extend(record.tail, count);
    this->release_scratch();
    return true;
  }

  /// Gives up the places behind the first `keep` reserved ones. Where a step still uses the tail,
  /// its slots stay with it.
  void shrink_reserved(SequenceRecord& record, std::int32_t keep) noexcept {
    record.reserved = keep;
    const std::int32_t end = record.size + keep;
    record.cursor = std::min(record.cursor, end);
    record.computed = std::min(record.computed, end);
    TreeNode& tail = node(record.tail);
    const std::int32_t length = end - tail.position;
    if (record.steps == 0) {
      if (this->release_places(record.tail, length)) ++version_;
      return;
    }
    stats_.stored_tokens -= at(tail.length - length);
    tail.last_slot = length > 0 ? this->slot_of(tail, tail.begin + length - 1) : tail.first_slot;
    tail.length = length;
    tail.scheduled = std::min(tail.scheduled, length);
    if (tail.written == length) tail.writer = none;
  }

  /// The outputs that are to come are given up: their places, and the steps in flight that start
  /// on them, count for nothing.
  void drop_reserved(SequenceRecord& record) noexcept {
    if (record.reserved == 0) return;
    ++record.epoch;
    record.superseded = record.steps;
    shrink_reserved(record, 0);
  }

  /// The whole tail of `s` becomes an inner node; the sequence goes on in an empty one.
  void retire_tail(SequenceIndex s) noexcept {
    SequenceRecord& record = sequences_[at(s)];
    const NodeIndex old = record.tail;
    if (record.steps == 0) this->release_places(old, node(old).length);
    const SlotIndex spare =
        this->owns_end(node(old)) ? this->next_slot(node(old).last_slot) : no_slot;
    const NodeIndex fresh =
        this->new_node(old, node(old).name_space, record.priority, NodeState::hidden);
    node(fresh).live = 1;
    node(old).tail_of = none;
    node(fresh).tail_of = s;
    record.tail = fresh;
    if (record.steps > 0 && this->end_offset(node(old)) < ChunkSize && this->owns_end(node(old))) {
      // Steps in flight may still write behind the tokens: nobody else gets these places.
      const SlotIndex last = node(old).last_slot;
      node(fresh).first_slot = node(fresh).last_slot = last;
      node(fresh).begin = this->end_offset(node(old));
      for (SlotIndex i = last; i != no_slot; i = this->next_slot(i)) slots_[at(i)].owner = fresh;
      this->add_node_to_slot(last, node(fresh));
      return;
    }
    if (spare == no_slot) return;
    slots_[at(node(old).last_slot)].next = no_slot;
    slots_[at(spare)].prev = no_slot;
    for (SlotIndex i = spare; i != no_slot; i = this->next_slot(i)) slots_[at(i)].owner = fresh;
    node(fresh).first_slot = node(fresh).last_slot = spare;
  }

  // ---- copies ------------------------------------------------------------------------------

  /// Asks for the K/V of the first `count` tokens of `from` at `to`. Rows that are themselves still
  /// to be copied are taken from where they come from, so that no copy depends on another.
  void emit_copies(SequenceIndex source, SequenceIndex target, const TreeNode& from,
                   const TreeNode& to, std::int32_t count) noexcept {
    this->for_each_run(
        from, 0, count,
        [&](SlotIndex slot, std::int32_t offset, std::int32_t run, std::int32_t done) {
          const std::size_t older = slots_[at(slot)].pending_copies > 0 ? copies_.size() : 0;
          for (std::int32_t i = 0; i < run;) {
            PendingCopy copy{
                {slot, offset + i, to.first_slot, to.begin + done + i, run - i}, source, target};
            for (std::size_t k = 0; k < older; ++k) {
              const RowCopy& pending = copies_[k].rows;
              if (pending.target_slot != slot) continue;
              const std::int32_t into = offset + i - pending.target_begin;
              if (into >= 0 && into < pending.length) {
                copy.rows.source_slot = pending.source_slot;
                copy.rows.source_begin = pending.source_begin + into;
                copy.rows.length = std::min(run - i, pending.length - into);
                copy.source = copies_[k].source;
                break;
              }
              if (into < 0) copy.rows.length = std::min(copy.rows.length, -into);
            }
            ++sequences_[at(copy.source)].copies;
            ++sequences_[at(copy.target)].copies;
            ++slots_[at(copy.rows.target_slot)].pending_copies;
            copies_.push_back(copy);
            i += copy.rows.length;
          }
          return true;
        });
  }

  /// No step that may still run has it.
  [[nodiscard]] bool is_idle(const PendingCopy& copy) const noexcept {
    return copy.last_step < oldest_step_;
  }

  template <class F>
  void erase_copies(const F& done) noexcept {
    std::erase_if(copies_, [&](const PendingCopy& copy) {
      if (!done(copy)) return false;
      --sequences_[at(copy.source)].copies;
      --sequences_[at(copy.target)].copies;
      --slots_[at(copy.rows.target_slot)].pending_copies;
      return true;
    });
  }

  /// Where nobody is left and no step is outstanding, nobody wants any copy, except the cache.
  void forget_copies() noexcept {
    if (stats_.live_sequences == 0 && oldest_step_ == no_step)
      erase_copies([](const PendingCopy&) { return true; });
  }

  /// A twin that leaves before its tail was copied takes the copy back, unless a running step may
  /// have it or another shares the tail.
  void cancel_copies(SequenceIndex s) noexcept {
    TreeNode& tail = node(sequence(s).tail);
    erase_copies([&](const PendingCopy& copy) {
      const bool own =  // not in a part that was split off and is shared
          copy.rows.target_slot == tail.first_slot && copy.rows.target_begin >= tail.begin;
      if (copy.target != s || !own || !is_idle(copy)) return false;
      tail.written = 0;
      return true;
    });
  }

  // ---- the end of a sequence ---------------------------------------------------------------

  /// What it had still to write becomes the job of a live sequence below.
  void give_up_writing(SequenceIndex s) noexcept {
    for (NodeIndex n = sequence(s).tail; n != none; n = node(n).parent)
      if (node(n).writer == s) this->hand_over(n);
  }

  /// Ends all that left and that nothing uses any more; then keeps to the watermarks.
  void finish_leaving() noexcept {
    // One that goes may release the last copy that another waits for: repeat while any goes.
    for (std::size_t before = 0; before != leaving_.size() && !leaving_.empty();) {
      before = leaving_.size();
      std::erase_if(leaving_, [&](SequenceIndex s) {
        if (sequence(s).copies > 0 || sequence(s).steps > 0) return false;
        finish(s);
        return true;
      });
    }
    settle();
  }

  void settle() noexcept {
    if constexpr (retains) {
      if (stats_.used_slots > this->retention_.high_watermark)
        while (stats_.used_slots > this->retention_.low_watermark && this->evict_one_slot()) {
        }
    }
  }

  void finish(SequenceIndex s) noexcept {
    SequenceRecord& record = sequences_[at(s)];
    drop_reserved(record);
    if constexpr (retains) this->publish_tail(s, /*may_merge=*/true);
    TreeNode& tail = node(record.tail);
    if (tail.tail_of == s) {  // published, perhaps with others below it: a node like any other
      this->release_places(record.tail, tail.length);
      tail.tail_of = none;
    }
    this->drop_path(record.tail, &TreeNode::held);
    record.tail = none;
    record.state = SequenceState::unused;
    record.next_free = free_sequences_;
    free_sequences_ = s;
    --stats_.leaving_sequences;
  }

  // ---- records -----------------------------------------------------------------------------

  void reserve_sequence() {
    if (sequences_.size() + 1 > sequences_.capacity())
      sequences_.reserve(std::max<std::size_t>(16, 2 * sequences_.capacity()));
    if (leaving_.capacity() < sequences_.capacity()) leaving_.reserve(sequences_.capacity());
  }

  SequenceIndex new_sequence() noexcept {
    SequenceIndex s = free_sequences_;
    if (s != none) {
      free_sequences_ = sequences_[at(s)].next_free;
      const std::uint32_t generation = sequences_[at(s)].generation;
      sequences_[at(s)] = SequenceRecord{};
      sequences_[at(s)].generation = generation;
    } else {
      s = static_cast<SequenceIndex>(sequences_.size());
      sequences_.emplace_back();
    }
    sequences_[at(s)].state = SequenceState::live;
    return s;
  }

  std::vector<SequenceIndex> leaving_;
  SequenceIndex free_sequences_ = none;
  std::uint64_t version_ = 1;
  std::uint64_t oldest_step_ = no_step;  ///< that may still run; no_step: none does
  static constexpr std::uint64_t no_step = std::numeric_limits<std::uint64_t>::max();
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
