// TreeCore: the tree without its tokens' type. Its parts put together, and what happens to
// sequences between steps: join, grow, fork, leave, clear.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../../error.hpp"
#include "../../tree_options.hpp"
#include "../support/array.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"
#include "../support/to_size.hpp"
#include "additions.hpp"
#include "chunk_table.hpp"
#include "departures.hpp"
#include "pending.hpp"
#include "prefixes.hpp"
#include "results.hpp"
#include "retention.hpp"
#include "sequence_table.hpp"
#include "step_table.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

class TreeCore {
 public:
  TreeCore(AnyAllocator& allocator, Tokens& tokens, std::int32_t chunk_size,
           TreeOptions resolved_options, RetentionRules rules)
      : options(resolved_options),
        chunk_table(allocator, tokens, stats),
        topology(chunk_table, ChunkGeometry(chunk_size), stats),
        prefixes(topology, chunk_table, tokens, resolved_options.sharing),
        retention(topology, chunk_table, prefixes, rules, stats),
        sequences(topology, stats),
        steps(stats),
        copies(topology, chunk_table, sequences, steps),
        writers(topology, sequences, steps, stats),
        departures(topology, prefixes, retention, sequences, copies, writers),
        additions(topology, retention, sequences, steps, writers, departures),
        outputs(topology, sequences, copies),
        results(sequences, steps, copies, writers, departures, outputs, topology.observers),
        tokens_(tokens) {
    static std::atomic<std::uint64_t> trees{0};
    id = ++trees;
  }
  TreeCore(const TreeCore&) = delete;
  TreeCore& operator=(const TreeCore&) = delete;

  /// With defaults resolved.
  const TreeOptions options;
  TreeStats stats;
  ChunkTable chunk_table;
  Topology topology;
  Prefixes prefixes;
  Retention retention;
  SequenceTable sequences;
  StepTable steps;
  Copies copies;
  Writers writers;
  Departures departures;
  Additions additions;
  Outputs outputs;
  Results results;
  /// Tells the trees of a process apart, also one that took the place of another in memory. Nothing
  /// is decided by it.
  std::uint64_t id = 0;

  // ---- join ----------------------------------------------------------------------------------

  /// A prompt that is to join, without its tokens.
  struct Joining {
    std::int32_t size = 0;
    std::int32_t public_end = 0;     ///< tokens that every tenant of the adapter may share
    std::int32_t published_end = 0;  ///< tokens that others may find
    std::int32_t level = 0;          ///< of retention
  };

  /// Whose tokens these are at a position.
  static Namespace space_at(const InsertOptions& options, std::int32_t position,
                            std::int32_t public_end) noexcept {
    if (position >= public_end) return options.name_space;
    return {.adapter = options.name_space.adapter, .is_public = true};
  }

  /// Free slots in the last chunk of a match, for tokens after it.
  [[nodiscard]] std::int32_t room_at(const Match& match) const noexcept {
    if (match.used < topology.node(match.last).length) return 0;
    return topology.room_after(match.last);
  }

  /// The new sequence, or none when the budget is too small; then nothing has changed but what was
  /// cached and not in use. store(node, position) stores the prompt's tokens from `position` on at
  /// the node's slots.
  template <class Store>
  SequenceIndex join(Match match, const Joining& prompt, const InsertOptions& how,
                     const Store& store) {
    // Everything that may fail comes first: memory for the records, then chunks.
    prefixes.reserve_nodes(4);
    retention.reserve_level(prompt.level);
    sequences.reserve();
    departures.reserve();
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
    while (position <
           prompt.published_end) {  // at most twice: the public part and the tenant's own
      const std::int32_t end = position < prompt.public_end
                                   ? std::min(prompt.public_end, prompt.published_end)
                                   : prompt.published_end;
      last = topology.add(last, space_at(how, position, prompt.public_end), prompt.level,
                          NodeState::published);
      fill(last, index, end - position);
      store(topology.node(last), position);
      if (topology.node(last).state == NodeState::published) prefixes.publish(last);
      position = end;
    }
    sequences.add_tail(index, last, how.name_space);
    fill(record.tail, index, prompt.size - position);
    store(topology.node(record.tail), position);
    chunk_table.release();
    resolve_pending(index, match, how);
    sequences.change();
    return index;
  }

  // ---- grow ----------------------------------------------------------------------------------

  /// Throws InvalidArgument unless `count` known tokens can be appended.
  void check_append(SequenceIndex s, std::size_t count) const {
    const SequenceRecord& record = sequences[s];
    check_argument(count > 0, "tokens.size()", 0, "at least one token");
    check_argument(count <= to_size(max_length - record.size), "tokens.size()", count,
                   "a sequence of at most 2^30 tokens");
    check_argument(record.reserved == 0, "outputs to come", record.reserved,
                   "none: commit the outputs of finished steps, or drop them, before append()");
  }
  /// `count` slots for known tokens, which the caller then stores at the end of the tail.
  bool append(SequenceIndex s, std::int32_t count) {
    SequenceRecord& record = sequences[s];
    if (!retention.grow_tail(record.tail, count)) return false;
    topology.node(record.tail).writer = s;
    record.size += count;
    return true;
  }

  /// Leading tokens whose K/V can be read now: written, and not waiting for a fork's copy.
  [[nodiscard]] std::int32_t readable_length(SequenceIndex s) const noexcept {
    const SequenceRecord& record = sequences[s];
    return copies.readable_end(record.tail,
                               std::min(topology.written_end(record.tail), record.size));
  }

  // ---- fork ----------------------------------------------------------------------------------

  /// A second sequence with the first `length` tokens; none when the budget is too small for its
  /// short tail. With `compute_last` the last token is computed again in any case.
  SequenceIndex fork(SequenceIndex s, std::int32_t length, bool compute_last) {
    prefixes.reserve_nodes(3);
    sequences.reserve();
    departures.reserve();
    const ForkPlan plan = plan_fork(s, length);
    if (plan.copied > 0) {
      copies.reserve(to_size(topology.geometry.size));
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
    forked.cached = std::min(source.cached, length);
    forked.may_wait = source.may_wait || source.cursor < source.size || source.steps > 0;
    retention.use_path(parent);
    sequences.add_tail(index, parent, topology.node(source.tail).name_space);
    TreeNode& copy = topology.node(forked.tail);
    copy.state = topology.node(source.tail).state;  // stale stays stale, also right below the root
    forked.cursor = std::min(copy.position + plan.rows,
                             plan.is_computed && !compute_last ? length : length - 1);
    if (plan.copied > 0) {
      topology.extend_apart(forked.tail, plan.copied);
      copy.written = copy.scheduled = plan.rows;
      copy.writer = plan.rows < plan.copied ? index : none;
      const TreeNode& from = topology.node(plan.last);  // the lower part, if it was split
      copy_tokens(from, copy, plan.copied);
      if (plan.rows > 0) copies.request(s, index, from, copy, plan.rows);
      stats.copied_tokens += to_size(plan.rows);
    }
    sequences.change();
    ++stats.forks;
    return index;
  }

  // ---- leave ---------------------------------------------------------------------------------

  void leave(SequenceIndex s) noexcept {
    ++stats.leaves;
    departures.leave(s);
  }

  // ---- the cache as a whole ------------------------------------------------------------------

  /// Forgets everything cached. Live sequences stay, but nothing of theirs is found again.
  void clear() noexcept {
    topology.observers.notify([](NodeObserver& observer) { observer.on_clear(); });
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
    sequences.change();
    departures.clear();
  }

 private:
  /// Tokens that two sequences compute each for itself rather than one for both.
  static constexpr std::int32_t few_tokens = 4;

  /// How a fork divides the last node of its path.
  struct ForkPlan {
    NodeIndex last;       ///< the node that holds the last token
    std::int32_t shared;  ///< tokens of it that both share
    std::int32_t copied;  ///< tokens after them that become the new sequence's own
    std::int32_t rows;    ///< of these, with K/V to copy
    bool is_computed;     ///< nothing is left to compute
  };

  /// A few last tokens that are not computed yet are the new sequence's own to compute, so that
  /// neither waits for the other. Of the rest a short private tail is copied, a longer one shared.
  [[nodiscard]] ForkPlan plan_fork(SequenceIndex s, std::int32_t length) const noexcept {
    const SequenceRecord& source = sequences[s];
    const NodeIndex last = sequences.node_of(s, length - 1);
    const TreeNode& n = topology.node(last);
    const bool in_tail = last == source.tail;
    const std::int32_t known = length - n.position;
    const std::int32_t unwritten = std::max(0, known - n.written);
    const std::int32_t own = unwritten <= few_tokens ? unwritten : 0;
    std::int32_t copied = own;
    if (options.sharing == Sharing::chunk)
      copied = topology.geometry.offset(known);
    else if (in_tail && known - own < options.min_run && own == unwritten)
      copied = known;
    const std::int32_t rows = in_tail ? std::clamp(n.written - (known - copied), 0, copied) : 0;
    // Where all of a whole sequence is computed, its next token is another one.
    const bool is_computed = length == source.size && source.cursor >= length && copied == rows;
    return {last, known - copied, copied, rows, is_computed};
  }

  void copy_tokens(const TreeNode& from, const TreeNode& to, std::int32_t count) noexcept {
    topology.for_each_run(
        from, 0, count,
        [&](ChunkIndex chunk, std::int32_t offset, std::int32_t run, std::int32_t first) {
          topology.for_each_run(
              to, first, run,
              [&](ChunkIndex s, std::int32_t o, std::int32_t part, std::int32_t done) {
                tokens_.copy(chunk, offset + done, s, o, part);
                return true;
              });
          return true;
        });
  }

  /// Uses the matched path, so that it is not evicted for the chunks that `fresh` tokens after it
  /// take. False, and the path as before, where there are not enough.
  bool hold_while_acquiring(const Match& match, std::int32_t fresh) {
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

  /// Places for tokens that the sequence is to write.
  void fill(NodeIndex index, SequenceIndex s, std::int32_t count) noexcept {
    TreeNode& n = topology.node(index);
    n.live = 1;
    topology.extend(index, count);
    n.writer = count > 0 ? s : none;
  }

  /// What a sequence that left had not written is the new one's to write; what others are to write
  /// it waits for.
  void resolve_pending(SequenceIndex s, const Match& match, const InsertOptions& how) noexcept {
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
        std::min(how.max_reuse, to_size(how.compute_last ? record.size - 1 : record.size)));
    record.cached = std::min(written_end, limit);
    record.cursor = std::min(own_begin, limit);
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

  Tokens& tokens_;
};

/// \param length  slots that the operation's sequences would have in all
[[noreturn]] CHUNKATTN_COLD inline void fail_out_of_chunks(const TreeCore& core, std::size_t asked,
                                                           std::size_t length) {
  const auto chunk = static_cast<std::size_t>(core.topology.geometry.size);
  fail(OutOfChunks(asked, core.chunk_table.num_available(), core.chunk_table.allocator().capacity(),
                   (length + chunk - 1) / chunk));
}

/// What components see of a PrefixTree, and of a Sequence, beyond their public members.
struct TreeAccess {
  /// Its TokenTree.
  template <class Handle>
  [[nodiscard]] static const auto& tree(const Handle& handle) {
    return handle.tree();
  }
  /// What keeps the TokenTree of a PrefixTree, wherever that is moved, and says when it is gone.
  template <class Tree>
  [[nodiscard]] static const auto& shared(const Tree& tree) {
    (void)tree.tree();
    return tree.shared_;
  }
  template <class Handle>
  [[nodiscard]] static const TreeCore& core(const Handle& handle) {
    return tree(handle).core;
  }
  template <class Sequence>
  [[nodiscard]] static const SequenceRecord& record(const Sequence& sequence) {
    return sequence.record();
  }
  template <class Sequence>
  [[nodiscard]] static SequenceIndex index(const Sequence& sequence) {
    (void)sequence.tree();
    return sequence.handle_.index;
  }
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
