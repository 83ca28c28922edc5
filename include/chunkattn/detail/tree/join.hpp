// A prompt joins the tree, and a sequence grows or forks.
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

CHUNKATTN_FUNCTION SequenceIndex TreeCore::join(PathMatch match, const Joining& prompt,
                                                const InsertOptions& how) {
  // Everything that may fail comes first: memory for the records, then chunks.
  reserve_joining(4);  // split off, public part, own part, tail
  retention.reserve_level(prompt.level);
  if (match.used > 0 && match.used < topology.node(match.last).length)
    match.last = retention.split(match.last, match.used);
  if (!hold_while_acquiring(match, prompt.size - match.length)) {
    ++stats.failed_inserts;
    return none;
  }
  const SequenceIndex index = sequences.add();
  SequenceRecord& record = sequences[index];
  record.priority = how.priority;
  record.level = prompt.level;
  record.size = prompt.size;
  NodeIndex last = match.last;
  std::int32_t position = match.length;
  while (position < prompt.published_end) {  // at most twice: the public part and the tenant's own
    const std::int32_t end = position < prompt.public_end
                                 ? (std::min)(prompt.public_end, prompt.published_end)
                                 : prompt.published_end;
    last = topology.add(last, space_at(how, position, prompt.public_end), prompt.level,
                        NodeState::published);
    fill(last, index, end - position);
    position = end;
  }
  sequences.add_tail(index, last, how.name_space);
  fill(record.tail, index, prompt.size - position);
  chunk_table.release();
  resolve_pending(index, match, how);
  sequences.change();
  return index;
}

CHUNKATTN_FUNCTION void TreeCore::reserve_joining(std::size_t num_nodes) {
  prefixes.reserve_nodes(num_nodes);
  sequences.reserve();
  leaving_.reserve(sequences.capacity());
}

CHUNKATTN_FUNCTION bool TreeCore::append(SequenceIndex s, std::size_t count) {
  SequenceRecord& record = sequences[s];
  check_argument(count > 0, "tokens.size()", 0, "at least one token");
  check_argument(count <= to_size(max_length - record.size), "tokens.size()", count,
                 "a sequence of at most 2^30 tokens");
  check_argument(record.reserved == 0, "outputs to come", record.reserved,
                 "none: commit the outputs of finished steps, or drop them, before append()");
  const auto added = static_cast<std::int32_t>(count);
  if (!retention.grow_tail(record.tail, added)) return false;
  topology.node(record.tail).writer = s;
  record.size += added;
  return true;
}

CHUNKATTN_FUNCTION SequenceIndex TreeCore::fork(SequenceIndex s, std::int32_t length,
                                                bool compute_last) {
  reserve_joining(2);  // split off or retired tail, and the new tail
  const ForkPlan plan = plan_fork(s, length);
  if (plan.copied > 0) {
    pending_copies.reserve_more(to_size(topology.geometry.size));  // one per row at the most
    if (!retention.acquire(topology.geometry.chunks_for(plan.copied))) return none;
  }

  // Split what is shared off; its slots do not move.
  NodeIndex parent = plan.last;
  if (plan.shared == 0)
    parent = topology.node(plan.last).parent;
  else if (plan.shared < topology.node(plan.last).length)
    parent = retention.split(plan.last, plan.shared);
  else if (plan.last == sequences[s].tail)
    sequences.retire_tail(s);
  ++(plan.copied > 0 && plan.shared == 0 ? stats.forks_copied : stats.forks_shared);

  const SequenceIndex index = sequences.add();
  SequenceRecord& forked = sequences[index];
  const SequenceRecord& source = sequences[s];
  forked.priority = source.priority;
  forked.level = source.level;
  forked.size = length;
  forked.cached = (std::min)(source.cached, length);
  forked.may_wait = source.may_wait || source.cursor < source.size || source.steps > 0;
  retention.use_path(parent);
  sequences.add_tail(index, parent, topology.node(source.tail).name_space);
  TreeNode& copy = topology.node(forked.tail);
  copy.state = topology.node(source.tail).state;  // stale stays stale, also right below the root
  forked.cursor = (std::min)(copy.position + plan.rows,
                             plan.is_computed && !compute_last ? length : length - 1);
  if (plan.copied > 0) {
    topology.extend_apart(forked.tail, plan.copied);
    copy.written = copy.scheduled = plan.rows;
    copy.writer = plan.rows < plan.copied ? index : none;
    const TreeNode& from = topology.node(plan.last);  // the lower part, if it was split
    topology.for_each_common_run(
        from, copy, plan.copied,
        [&](ChunkIndex a, auto at_a, ChunkIndex b, auto at_b, std::int32_t run, auto) {
          tokens_.copy(a, at_a, b, at_b, run);
        });
    topology.observers.notify(
        [&](NodeObserver& observer) { observer.on_copy(plan.last, forked.tail, plan.copied); });
    if (plan.rows > 0) request_copies(s, index, from, copy, plan.rows);
    stats.copied_tokens += to_size(plan.rows);
  }
  sequences.change();
  ++stats.forks;
  return index;
}

CHUNKATTN_FUNCTION TreeCore::ForkPlan TreeCore::plan_fork(SequenceIndex s,
                                                          std::int32_t length) const noexcept {
  const SequenceRecord& source = sequences[s];
  const NodeIndex last = sequences.node_of(s, length - 1);
  const TreeNode& n = topology.node(last);
  const bool in_tail = last == source.tail;
  const std::int32_t known = length - n.position;
  const std::int32_t unwritten = (std::max)(0, known - n.written);
  // What is public stays so: a copy would be the tenant's own.
  const std::int32_t own = unwritten <= few_tokens && !n.name_space.is_public ? unwritten : 0;
  std::int32_t copied = own;
  if (options.sharing == Sharing::chunk)
    copied = topology.geometry.offset(known);
  else if (in_tail && known - own < *options.min_run && own == unwritten)
    copied = known;
  const std::int32_t rows = in_tail ? std::clamp(n.written - (known - copied), 0, copied) : 0;
  // Where all of a whole sequence is computed, its next token is another one.
  const bool is_computed = length == source.size && source.cursor >= length;
  return {last, known - copied, copied, rows, is_computed};
}

CHUNKATTN_FUNCTION bool TreeCore::hold_while_acquiring(const PathMatch& match, std::int32_t fresh) {
  struct Hold {
    Retention& retention;
    NodeIndex last;
    bool keep = false;
    ~Hold() {
      if (!keep) retention.drop_path(last, &TreeNode::live);
    }
  } hold{retention, match.last};
  retention.use_path(match.last);
  hold.keep = retention.acquire(topology.geometry.chunks_for(fresh - room_at(match)));
  return hold.keep;
}

CHUNKATTN_FUNCTION void TreeCore::fill(NodeIndex index, SequenceIndex s,
                                       std::int32_t count) noexcept {
  TreeNode& n = topology.node(index);
  n.live = 1;
  topology.extend(index, count);
  n.writer = count > 0 ? s : none;
}

CHUNKATTN_FUNCTION void TreeCore::resolve_pending(SequenceIndex s, const PathMatch& match,
                                                  const InsertOptions& how) noexcept {
  SequenceRecord& record = sequences[s];
  std::int32_t written_end = match.length, own_begin = match.length;
  for (NodeIndex i = match.last; i != root_node; i = topology.node(i).parent) {
    TreeNode& n = topology.node(i);
    if (n.written == n.length) continue;
    written_end = n.position + n.written;
    if (n.writer == none) n.writer = s;
    if (n.writer == s)
      own_begin = written_end;
    else
      record.may_wait = true;
  }
  const auto limit = static_cast<std::int32_t>(
      (std::min)(how.max_reuse, to_size(how.compute_last ? record.size - 1 : record.size)));
  record.cached = (std::min)(written_end, limit);
  record.cursor = (std::min)(own_begin, limit);
  ++stats.inserts;
  const std::size_t size = to_size(record.size), pending = to_size(own_begin - written_end);
  if (how.preempted) {
    ++stats.preempted_inserts;
    stats.preempted_tokens += size;
    stats.preempted_cached_tokens += to_size(record.cached) + pending;
    return;
  }
  stats.prompt_tokens += size;
  stats.cached_tokens += to_size(record.cached);
  stats.pending_tokens += pending;
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END
