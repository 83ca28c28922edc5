// Departures: a sequence that leaves. Its job is reassigned, its generated tokens become matchable
// or merge into an equal path, and its slots are discarded when nothing uses them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../support/array.hpp"
#include "../support/config.hpp"
#include "pending.hpp"
#include "prefixes.hpp"
#include "retention.hpp"
#include "sequence_table.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

class Departures {
 public:
  Departures(Topology& topology, Prefixes& prefixes, Retention& retention, SequenceTable& sequences,
             Copies& copies, Writers& writers)
      : topology_(topology),
        prefixes_(prefixes),
        retention_(retention),
        sequences_(sequences),
        copies_(copies),
        writers_(writers) {}

  /// Makes room for all sequences there can be, so that leave() cannot fail.
  void reserve() {
    if (leaving_.capacity() < sequences_.capacity()) leaving_.reserve(sequences_.capacity());
  }

  /// The sequence stops counting as live at once. Its slots are discarded when no step and no copy
  /// uses them any more.
  void leave(SequenceIndex s) noexcept {
    SequenceRecord& record = sequences_[s];
    if (record.steps == 0) sequences_.drop_reserved(record);
    sequences_.leave(s);
    const bool had_copies = record.copies > 0;
    if (had_copies && record.steps == 0) copies_.cancel(s);
    if (retains() && record.steps == 0) publish_tail(s, /*may_merge=*/false);
    const bool is_used = record.steps > 0;  // it stays the writer for its steps
    for (NodeIndex i = record.tail; i != none;) {
      TreeNode& n = topology_.node(i);
      --n.live;
      ++n.held;
      n.level = std::max(n.level, record.level);
      if (n.writer == s && !is_used) writers_.reassign(i);
      i = n.parent;
    }
    if (is_used || record.copies > 0)
      leaving_.push_back(s);  // reserved by reserve()
    else
      finish(s);
    if (had_copies || sequences_.num_live() == 0)
      finish_all();  // others may have waited for the copies
    else
      retention_.keep_to_watermarks();
  }

  /// Forgets copies that only the cache wants, then finish_all().
  void clear() noexcept {
    forget_copies();
    finish_all();
  }

  /// Ends all that left and that nothing uses any more; then keeps to the watermarks.
  void finish_all() noexcept {
    if (!retains()) forget_copies();
    // One that goes may release the last copy that another waits for: repeat while any goes.
    for (std::size_t before = 0; before != leaving_.size() && !leaving_.empty();) {
      before = leaving_.size();
      leaving_.erase_if([&](SequenceIndex s) {
        if (sequences_[s].copies > 0 || sequences_[s].steps > 0) return false;
        finish(s);
        return true;
      });
    }
    retention_.keep_to_watermarks();
  }

  // ---- scratch slots --------------------------------------------------------------------------

  /// Makes room for what ScratchSlots need, so that only chunks may be wanting. Moves the records
  /// of nodes and sequences.
  void reserve_scratch() {
    prefixes_.reserve_nodes(1);
    sequences_.reserve();
    reserve();
  }
  /// A step has no use for them any more: they are discarded by finish_all() as soon as no copy
  /// needs them. False where the step has none.
  bool release_scratch(SequenceIndex& scratch) noexcept {
    if (scratch == none) return false;
    --sequences_[scratch].steps;
    scratch = none;
    return true;
  }

 private:
  friend class ScratchSlots;

  [[nodiscard]] bool retains() const noexcept { return retention_.rules().retains; }

  /// Where nobody is left, nobody wants any copy, except the cache.
  void forget_copies() noexcept {
    if (sequences_.num_live() == 0) copies_.forget_all();
  }

  /// A sequence without tokens, found by nobody, that has left and that one step uses.
  SequenceIndex add_left() noexcept {
    const SequenceIndex s = sequences_.add();
    retention_.use_path(root_node);
    sequences_.add_tail(s, root_node, {});
    sequences_[s].steps = 1;
    leave(s);
    return s;
  }

  void finish(SequenceIndex s) noexcept {
    SequenceRecord& record = sequences_[s];
    sequences_.drop_reserved(record);
    if (retains()) publish_tail(s, /*may_merge=*/true);
    TreeNode& tail = topology_.node(record.tail);
    if (tail.tail_of == s) {  // published, perhaps with others below it: a node like any other
      topology_.release_slots(record.tail, tail.length);
      tail.tail_of = none;
    }
    retention_.drop_path(record.tail, &TreeNode::held);
    sequences_.remove(s);
  }

  /// Makes the generated tokens of a sequence that left matchable, from the first unpublished node
  /// down. Where an equal path is already there the duplicate is dropped (if it may be: its slots
  /// must not be in use) and the rest moves below that path.
  void publish_tail(SequenceIndex s, bool may_merge) noexcept {
    const NodeIndex tail = sequences_[s].tail;
    const std::int32_t end = copies_.readable_end(tail, topology_.written_end(tail));
    const std::int32_t unit = prefixes_.unit();
    for (NodeIndex i = first_unpublished(s); i != none; i = first_unpublished(s)) {
      const TreeNode& n = topology_.node(i);
      std::int32_t usable = std::min(n.length, end - n.position);
      usable -= std::max(0, usable) % unit;
      if (n.length == 0 || usable < unit) return;
      const NodeIndex equal = prefixes_.find_equal(n);
      if (equal == none) {
        retention_.publish_generated(i, usable);
        continue;
      }
      const bool shared = n.live > 0 || n.held > 1;
      if (!may_merge || shared) return;
      std::int32_t common = prefixes_.common_length(topology_.node(equal), n, usable);
      common -= common % unit;
      if (topology_.node(equal).written < common || !prefixes_.has_nodes(2)) return;
      merge_into(s, i, equal, common);
    }
  }
  /// The first unpublished node of the path, below published ones; none also for stale paths.
  [[nodiscard]] NodeIndex first_unpublished(SequenceIndex s) const noexcept {
    NodeIndex first = none;
    for (NodeIndex i = sequences_[s].tail; i != root_node; i = topology_.node(i).parent) {
      if (topology_.node(i).state == NodeState::stale) return none;
      if (topology_.node(i).state == NodeState::unpublished) first = i;
    }
    return first;
  }
  /// Replaces the first `common` tokens of `n`, which only the leaving sequence `s` uses, by those
  /// of its published sibling `equal`; what follows moves below it.
  void merge_into(SequenceIndex s, NodeIndex n, NodeIndex equal, std::int32_t common) noexcept {
    const NodeIndex target =
        common < topology_.node(equal).length ? retention_.split(equal, common) : equal;
    const NodeIndex duplicate = common < topology_.node(n).length ? retention_.split(n, common) : n;
    const NodeIndex rest = topology_.node(duplicate).first_child;  // at most one is below
    if (!topology_.node(target).active()) retention_.activate(target);
    ++topology_.node(target).held;
    topology_.node(target).level =
        std::max(topology_.node(target).level, topology_.node(duplicate).level);
    if (rest != none)
      topology_.move(rest, target);
    else
      sequences_[s].tail = target;
    topology_.observers.notify(
        [=](NodeObserver& observer) { observer.on_merge(duplicate, target); });
    retention_.drop_duplicate(duplicate);
  }

  Topology& topology_;
  Prefixes& prefixes_;
  Retention& retention_;
  SequenceTable& sequences_;
  Copies& copies_;
  Writers& writers_;
  Array<SequenceIndex> leaving_;
};

/// Takes slots beside all paths for one step, and gives them back unless keep() is called. They
/// are slots of a sequence that only the step knows of, and that has left already. So what leaves
/// late, and discards its slots when no step and no copy uses them, has one mechanism.
class ScratchSlots {
 public:
  /// \param scratch  that sequence; none: the step has no scratch slots yet
  ScratchSlots(Departures& departures, SequenceIndex& scratch)
      : departures_(departures), scratch_(scratch) {}
  ScratchSlots(const ScratchSlots&) = delete;
  ScratchSlots& operator=(const ScratchSlots&) = delete;
  ~ScratchSlots() {
    if (taken_ > 0) {
      SequenceRecord& record = departures_.sequences_[scratch_];
      departures_.sequences_.shrink_reserved(record, record.reserved - taken_,
                                             /*keep_chunks=*/false);
    }
    if (is_first_ && departures_.release_scratch(scratch_)) departures_.finish_all();
  }

  /// `count` more; false where the budget is spent. Departures::reserve_scratch() comes first.
  bool take(std::int32_t count) {
    if (count == 0) return true;
    is_first_ = scratch_ == none;
    if (is_first_) scratch_ = departures_.add_left();
    SequenceRecord& record = departures_.sequences_[scratch_];
    if (!departures_.retention_.grow_tail(record.tail, count)) return false;
    record.reserved += count;
    taken_ = count;
    return true;
  }
  void keep() noexcept {
    taken_ = 0;
    is_first_ = false;
  }

 private:
  Departures& departures_;
  SequenceIndex& scratch_;
  std::int32_t taken_ = 0;
  bool is_first_ = false;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
