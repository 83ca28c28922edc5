// A sequence leaves: what it had still to write is reassigned, its generated tokens become
// matchable or merge into an equal path, and its slots are discarded when nothing uses them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../support/config.hpp"
#include "core.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

CHUNKATTN_FUNCTION void TreeCore::leave(SequenceIndex s) noexcept {
  ++stats.leaves;
  begin_leaving(s);
}

CHUNKATTN_FUNCTION void TreeCore::clear() noexcept {
  topology.observers.notify_last_first([](NodeObserver& observer) { observer.on_clear(); });
  retention.unpin_all();
  retention.trim(0);
  for (std::size_t i = 1; i < topology.num_indices(); ++i) {
    const auto n = static_cast<NodeIndex>(i);
    if (topology.node(n).state == NodeState::published)
      prefixes.unpublish(n, NodeState::stale);
    else if (topology.node(n).state == NodeState::unpublished)
      topology.node(n).state = NodeState::stale;
  }
  ++stats.clears;
  forget_copies();
  finish_all_leaving();
}

CHUNKATTN_FUNCTION void TreeCore::begin_leaving(SequenceIndex s) noexcept {
  SequenceRecord& record = sequences[s];
  if (record.steps == 0) sequences.drop_reserved(record);
  sequences.leave(s);
  const bool had_copies = record.copies > 0;
  if (had_copies && record.steps == 0) cancel_copies(s);
  if (retains() && record.steps == 0) publish_tail(s, /*may_merge=*/false);
  const bool is_used = record.steps > 0;  // it stays the writer for its steps
  for (NodeIndex i = record.tail; i != none;) {
    TreeNode& n = topology.node(i);
    --n.live;
    ++n.held;
    n.level = (std::max)(n.level, record.level);
    if (n.writer == s && !is_used) reassign(i);
    i = n.parent;
  }
  if (is_used || record.copies > 0)
    leaving_.push_back(s);  // there is room, see reserve_joining()
  else
    finish_leaving(s);
  if (had_copies || sequences.num_live() == 0)
    finish_all_leaving();  // others may have waited for the copies
  else
    retention.keep_to_watermarks();
}

CHUNKATTN_FUNCTION void TreeCore::finish_all_leaving() noexcept {
  if (!retains()) forget_copies();
  leaving_.erase_if([&](SequenceIndex s) {
    if (sequences[s].copies > 0 || sequences[s].steps > 0) return false;
    finish_leaving(s);
    return true;
  });
  retention.keep_to_watermarks();
}

CHUNKATTN_FUNCTION void TreeCore::finish_leaving(SequenceIndex s) noexcept {
  SequenceRecord& record = sequences[s];
  sequences.drop_reserved(record);
  topology.observers.notify([=](NodeObserver& observer) { observer.on_leave(s); });
  if (retains()) publish_tail(s, /*may_merge=*/true);
  TreeNode& tail = topology.node(record.tail);
  if (tail.tail_of == s) {  // published, perhaps with others below it: a node like any other
    topology.release_slots(record.tail, tail.length);
    tail.tail_of = none;
  }
  retention.drop_path(record.tail, &TreeNode::held);
  sequences.remove(s);
}

CHUNKATTN_FUNCTION void TreeCore::publish_tail(SequenceIndex s, bool may_merge) noexcept {
  const NodeIndex tail = sequences[s].tail;
  const std::int32_t end = readable_end(tail, topology.written_end(tail));
  const std::int32_t unit = prefixes.unit();
  for (NodeIndex i = first_unpublished(s); i != none; i = first_unpublished(s)) {
    const TreeNode& n = topology.node(i);
    std::int32_t usable = (std::min)(n.length, end - n.position);
    usable -= (std::max)(0, usable) % unit;
    if (n.length == 0 || usable < unit) return;
    const NodeIndex equal = prefixes.find_equal(n);
    if (equal == none) {
      stats.published_tokens += to_size(usable);
      prefixes.publish(i);
      topology.observers.notify([=](NodeObserver& observer) { observer.on_written(i); });
      continue;
    }
    const bool shared = n.live > 0 || n.held > 1;
    if (!may_merge || shared) return;
    std::int32_t common = prefixes.common_length(topology.node(equal), n, usable);
    common -= common % unit;
    if (topology.node(equal).written < common || !prefixes.has_nodes(2)) return;
    merge_into(s, i, equal, common);
  }
}

CHUNKATTN_FUNCTION NodeIndex TreeCore::first_unpublished(SequenceIndex s) const noexcept {
  NodeIndex first = none;
  for (NodeIndex i = sequences[s].tail; i != root_node; i = topology.node(i).parent) {
    if (topology.node(i).state == NodeState::stale) return none;
    if (topology.node(i).state == NodeState::unpublished) first = i;
  }
  return first;
}

CHUNKATTN_FUNCTION void TreeCore::merge_into(SequenceIndex s, NodeIndex n, NodeIndex equal,
                                             std::int32_t common) noexcept {
  const NodeIndex target =
      common < topology.node(equal).length ? retention.split(equal, common) : equal;
  const NodeIndex duplicate = common < topology.node(n).length ? retention.split(n, common) : n;
  const NodeIndex rest = topology.node(duplicate).first_child;  // at most one is below
  if (!topology.node(target).active()) retention.activate(target);
  ++topology.node(target).held;
  topology.node(target).level =
      (std::max)(topology.node(target).level, topology.node(duplicate).level);
  if (rest != none)
    topology.move(rest, target);
  else
    sequences[s].tail = target;
  topology.observers.notify([=](NodeObserver& observer) { observer.on_merge(duplicate, target); });
  stats.merged_tokens += to_size(topology.node(duplicate).length);
  retention.remove(duplicate);
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END
