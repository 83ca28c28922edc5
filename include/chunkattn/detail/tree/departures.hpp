// What becomes of a sequence that leaves: its job is handed over, its generated tokens become
// matchable or merge into an equal path, and its places are given up when nothing uses them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../base/array.hpp"
#include "../base/config.hpp"
#include "copies.hpp"
#include "prefixes.hpp"
#include "sequences.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

class Departures {
 public:
  Departures(Topology& topology, Prefixes& prefixes, Sequences& sequences, Copies& copies,
             TreeStats& stats)
      : topology_(topology),
        prefixes_(prefixes),
        sequences_(sequences),
        copies_(copies),
        stats_(stats) {}

  /// Makes room for all sequences there can be, so that leave() cannot fail.
  void reserve() {
    if (leaving_.capacity() < sequences_.capacity()) leaving_.reserve(sequences_.capacity());
  }

  /// The sequence stops counting as live at once. Its places are given up when no step and no copy
  /// uses them any more.
  void leave(SequenceIndex s) noexcept {
    ++stats_.leaves;
    retire(s);
  }
  /// The same for one that was never anybody's.
  void retire(SequenceIndex s) noexcept {
    SequenceRecord& record = sequences_[s];
    if (record.steps == 0) sequences_.drop_reserved(record);
    record.state = SequenceState::leaving;
    ++record.generation;
    --stats_.live_sequences;
    ++stats_.leaving_sequences;
    sequences_.change();
    sequences_.give_up_outputs();
    const bool had_copies = record.copies > 0;
    if (had_copies && record.steps == 0) copies_.cancel(s);
    if (retains() && record.steps == 0) publish_tail(s, /*may_merge=*/false);
    const bool is_used = record.steps > 0;  // it stays the writer for its steps
    for (NodeIndex i = record.tail; i != none;) {
      TreeNode& n = topology_.node(i);
      --n.live;
      ++n.held;
      n.level = std::max(n.level, record.level);
      if (n.writer == s && !is_used) hand_over(i);
      i = n.parent;
    }
    if (is_used || record.copies > 0)
      leaving_.push_back(s);  // reserved by reserve()
    else
      finish(s);
    if (had_copies || stats_.live_sequences == 0)
      finish_all();  // others may have waited for the copies
    else
      prefixes_.keep_to_watermarks();
  }

  /// A step that had the sequence has ended: if it was the last, and the sequence has left, others
  /// go on writing what it had still to write.
  void end_step_of(SequenceIndex s) noexcept {
    const SequenceRecord& record = sequences_[s];
    if (record.state != SequenceState::leaving || record.steps > 0) return;
    for (NodeIndex n = record.tail; n != none; n = topology_.node(n).parent)
      if (topology_.node(n).writer == s) hand_over(n);
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
    prefixes_.keep_to_watermarks();
  }

 private:
  [[nodiscard]] bool retains() const noexcept { return prefixes_.rules().retains; }

  /// Where nobody is left, nobody wants any copy, except the cache.
  void forget_copies() noexcept {
    if (stats_.live_sequences == 0) copies_.forget_all();
  }

  /// Gives a pending node to a live sequence below it.
  void hand_over(NodeIndex index) noexcept {
    TreeNode& pending = topology_.node(index);
    pending.writer = none;
    if (pending.written == pending.length || pending.live == 0) return;
    pending.writer = find_heir(index);
    SequenceRecord& heir = sequences_[pending.writer];
    heir.cursor = std::min(heir.cursor, pending.position + pending.written);
    ++stats_.hand_overs;
  }
  [[nodiscard]] SequenceIndex find_heir(NodeIndex n) const noexcept {
    const auto is_live = [&](SequenceIndex s) {
      return s != none && sequences_[s].state == SequenceState::live;
    };
    while (true) {
      if (is_live(topology_.node(n).tail_of)) return topology_.node(n).tail_of;
      NodeIndex child = topology_.node(n).first_child;
      while (topology_.node(child).live == 0) child = topology_.node(child).next_sibling;
      n = child;
      // The writer below goes on, so that one sequence writes a run from its start to its end.
      if (is_live(topology_.node(n).writer)) return topology_.node(n).writer;
    }
  }

  void finish(SequenceIndex s) noexcept {
    SequenceRecord& record = sequences_[s];
    sequences_.drop_reserved(record);
    if (retains()) publish_tail(s, /*may_merge=*/true);
    TreeNode& tail = topology_.node(record.tail);
    if (tail.tail_of == s) {  // published, perhaps with others below it: a node like any other
      topology_.release_places(record.tail, tail.length);
      tail.tail_of = none;
    }
    prefixes_.drop_path(record.tail, &TreeNode::held);
    sequences_.remove(s);
  }

  /// Makes the generated tokens of a sequence that left matchable, from the first hidden node down.
  /// Where an equal path is already there the duplicate is dropped (if it may be: its places must
  /// not be in use) and the rest moves below that path.
  void publish_tail(SequenceIndex s, bool may_merge) noexcept {
    const std::int32_t end = prefixes_.written_end(sequences_[s].tail);
    const std::int32_t unit = prefixes_.unit();
    for (NodeIndex i = first_hidden(s); i != none; i = first_hidden(s)) {
      const TreeNode& n = topology_.node(i);
      std::int32_t usable = std::min(n.length, end - n.position);
      usable -= std::max(0, usable) % unit;
      if (n.length == 0 || usable < unit) return;
      const NodeIndex twin = prefixes_.find_twin(n);
      if (twin == none) {
        stats_.published_tokens += at(usable);
        prefixes_.publish(i);
        continue;
      }
      const bool shared = n.live > 0 || n.held > 1;
      if (!may_merge || shared) return;
      std::int32_t common = prefixes_.common_length(topology_.node(twin), n, usable);
      common -= common % unit;
      if (topology_.node(twin).written < common || !prefixes_.has_nodes(2)) return;
      merge_into(s, i, twin, common);
    }
  }
  /// The first hidden node of the path, below published ones; none also for stale paths.
  [[nodiscard]] NodeIndex first_hidden(SequenceIndex s) const noexcept {
    NodeIndex first = none;
    for (NodeIndex i = sequences_[s].tail; i != root_node; i = topology_.node(i).parent) {
      if (topology_.node(i).state == NodeState::stale) return none;
      if (topology_.node(i).state == NodeState::hidden) first = i;
    }
    return first;
  }
  /// Replaces the first `common` tokens of `n`, which only the leaving sequence `s` uses, by those
  /// of its published sibling `twin`; what follows moves below it.
  void merge_into(SequenceIndex s, NodeIndex n, NodeIndex twin, std::int32_t common) noexcept {
    const NodeIndex target =
        common < topology_.node(twin).length ? prefixes_.split(twin, common) : twin;
    const NodeIndex duplicate = common < topology_.node(n).length ? prefixes_.split(n, common) : n;
    const NodeIndex rest = topology_.node(duplicate).first_child;  // at most one is below
    if (!topology_.node(target).active()) prefixes_.activate(target);
    ++topology_.node(target).held;
    topology_.node(target).level =
        std::max(topology_.node(target).level, topology_.node(duplicate).level);
    if (rest != none)
      topology_.move(rest, target);
    else
      sequences_[s].tail = target;
    prefixes_.drop_duplicate(duplicate);
    stats_.merged_tokens += at(common);
  }

  Topology& topology_;
  Prefixes& prefixes_;
  Sequences& sequences_;
  Copies& copies_;
  TreeStats& stats_;
  Array<SequenceIndex> leaving_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
