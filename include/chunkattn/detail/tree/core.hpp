// TreeCore: the tree without its tokens' type. Its records, and all that happens to a sequence
// from insert() to leave(), and to a step from begin_step() to the last commit().
//
// Each operation is defined in the file of its subject: join, add, finish and leave, in the order
// of a sequence's life; write says whose K/V is still to come, and which rows are still to be
// copied.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "../../error.hpp"
#include "../../plan_view.hpp"
#include "../../tree_options.hpp"
#include "../support/array.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"
#include "chunk_table.hpp"
#include "decoding_run.hpp"
#include "prefixes.hpp"
#include "retention.hpp"
#include "sequence_table.hpp"
#include "step_table.hpp"
#include "topology.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// A prompt that is to join, without its tokens.
struct Joining {
  std::int32_t size = 0;
  std::int32_t public_end = 0;     ///< tokens that every tenant of the adapter may share
  std::int32_t published_end = 0;  ///< tokens that others may find
  std::int32_t level = 0;          ///< of retention
};

/// A copy asked for by a fork, or for an accepted draft. The first step that is built after it
/// carries it; when that step has finished, the copy is done. Until then neither end is let go.
struct PendingCopy {
  RowCopy rows;
  SequenceIndex source = none, target = none;
  std::int32_t position = 0;  ///< path position of the first target row
  /// The last step that carried it, 0: none yet. It still does unless it is void or has ended.
  std::uint64_t step = 0;
};

class TreeCore {
 public:
  TreeCore(AnyAllocator& allocator, Tokens& tokens, std::int32_t chunk_size,
           TreeOptions resolved_options, const RetentionOptions& retention_options)
      : options(resolved_options),
        chunk_table(allocator, tokens, stats),
        topology(chunk_table, ChunkGeometry(chunk_size), stats),
        prefixes(topology, chunk_table, tokens, resolved_options.sharing),
        retention(topology, chunk_table, prefixes, retention_options, stats),
        sequences(topology, stats),
        steps(stats),
        tokens_(tokens) {}
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
  Array<PendingCopy> pending_copies;
  /// Tells the trees of a process apart, also one that took the place of another in memory. Nothing
  /// is decided by it.
  const std::uint64_t id = next_id();
  /// Another number of this kind, for K/V whose chunks are not the tree's.
  [[nodiscard]] static std::uint64_t next_id() noexcept {
    static std::atomic<std::uint64_t> last{0};
    return ++last;
  }

  // ---- join.hpp: a prompt joins, grows, forks ------------------------------------------------

  /// Whose tokens these are at a position.
  static Namespace space_at(const InsertOptions& options, std::int32_t position,
                            std::int32_t public_end) noexcept {
    if (position >= public_end) return options.name_space;
    return {.adapter = options.name_space.adapter, .is_public = true};
  }
  /// Free slots in the last chunk of a match, for tokens after it.
  [[nodiscard]] std::int32_t room_at(const PathMatch& match) const noexcept {
    if (match.used < topology.node(match.last).length) return 0;
    return topology.room_after(match.last);
  }
  /// The new sequence, or none when the budget is too small; then nothing has changed but what was
  /// cached and not in use. The caller then stores the tokens after the match, and publishes those
  /// of its new nodes that are to be found.
  SequenceIndex join(PathMatch match, const Joining& prompt, const InsertOptions& how);
  /// `count` slots for known tokens, which the caller then stores at the end of the tail. False,
  /// with nothing changed, when the budget is too small.
  bool append(SequenceIndex s, std::size_t count);
  /// A second sequence with the first `length` tokens; none when the budget is too small for its
  /// short tail. With `compute_last` the last token is computed again in any case.
  SequenceIndex fork(SequenceIndex s, std::int32_t length, bool compute_last);

  // ---- add.hpp: sequences are added to an open step ------------------------------------------

  /// Adds the next positions of a sequence, at most `max_tokens`, and after its last slot drafts
  /// as far as `max_tokens` allows. Either all of it happens or nothing does.
  AddOutcome add(StepRecord& step, SequenceIndex s, std::int32_t max_tokens,
                 const NewDrafts& drafts);
  /// What adds many sequences, as far as each just decodes; room for their entries comes first.
  [[nodiscard]] DecodingRun decoding(StepRecord& step) noexcept {
    const std::int32_t max_steps = step.is_void       ? 0
                                   : steps.any_void() ? 1
                                                      : StepTable::max_in_flight;
    return {topology, sequences, step, max_steps};
  }
  /// Takes the entries from `first` on out of an open step again, as if they had not been added:
  /// earlier steps of their sequences use no slot after those that were there before.
  void take_out(StepRecord& step, std::size_t first) noexcept;

  // ---- finish.hpp: a step ends, whether it has run or not ------------------------------------

  /// The device has run the step: the K/V of its positions is written.
  void finish(StepRecord& step);
  /// Nothing runs any more: steps that were dropped in flight hold nothing back.
  void device_idle() noexcept;
  /// The handle of a step is gone.
  void drop_step(std::int32_t index) noexcept;
  /// K/V of the sequence from this position on may be new: notifies the observers of nodes.
  void notify_written(SequenceIndex s, std::int32_t begin) noexcept;

  // ---- the same: the outputs of a finished step become known ---------------------------------

  /// Whether the entry's outputs can still be committed.
  [[nodiscard]] bool has_output(const StepEntry& entry) const noexcept {
    const SequenceRecord& record = sequences[entry.sequence];  // leaving raises the generation
    return entry.has_output && record.generation == entry.generation && record.epoch == entry.epoch;
  }
  /// How many entries has_output(). Throws InvalidArgument where one of them cannot be committed
  /// yet.
  [[nodiscard]] std::size_t count_outputs(const StepRecord& step) const;
  /// Throws InvalidArgument unless the entry's outputs can be committed now, `count` of them.
  void check_outputs(const StepEntry& entry, std::size_t count) const;
  /// Throws InvalidArgument unless outputs of the entry can be committed at some time.
  void check_output(const StepEntry& entry) const;
  /// How many drafts the branch has that ends with draft `leaf` of the entry; none: 0. Throws
  /// InvalidArgument where there is no such draft.
  static std::int32_t depth_of(const StepEntry& entry, std::span<const Draft> tree,
                               std::int32_t leaf);
  /// Asks for copies of what an accepted branch has in scratch slots to those after the known
  /// tokens; room for as many as its depth comes first. Returns whether there is any.
  bool move_branch(const StepRecord& step, const StepEntry& entry, std::span<const Draft> tree,
                   std::int32_t leaf) noexcept;
  /// The tokens that were stored from the entry's output position on are known: accepted drafts,
  /// then one more, which is the next to be computed.
  /// \param on_main_branch  the accepted drafts stand at these slots
  void commit(StepRecord& step, StepEntry& entry, std::int32_t count,
              bool on_main_branch = true) noexcept {
    SequenceRecord& record = sequences[entry.sequence];
    --step.num_outputs;
    if (count == 1 && is_plain_decode(entry, record)) return commit_decoded(entry, record);
    commit_general(entry, record, count, on_main_branch);
  }
  /// One output of each entry that has one, all of which count_outputs() has checked.
  /// \param store  store(entry) stores the next output; store.prefetch(entry) asks early for its
  /// slot
  template <class Store>
  void commit_all(StepRecord& step, Store store) {
    const bool all = has_all_outputs(step);
    StepEntry* const end = step.entries.end();
    for (StepEntry* entry = step.entries.begin();; ++entry) {
      if (all) {
        StepEntry* const first = entry;
        entry = commit_decoded(first, end, sequences.records(), store);
        step.num_outputs -= static_cast<std::int32_t>(entry - first);
      }
      if (entry == end) break;
      if (!all && !has_output(*entry)) continue;
      store(*entry);
      commit(step, *entry, 1);
    }
  }

  // ---- leave.hpp: a sequence leaves ----------------------------------------------------------

  /// The sequence stops counting as live at once. Its slots are discarded when no step and no copy
  /// uses them any more.
  void leave(SequenceIndex s) noexcept;

  /// Forgets everything cached. Live sequences stay, but nothing of theirs is found again.
  void clear() noexcept;

  // ---- write.hpp: whose K/V is still to come -------------------------------------------------

  /// Leading tokens whose K/V can be read now: written, and not waiting for a fork's copy.
  [[nodiscard]] std::int32_t readable_length(SequenceIndex s) const noexcept;
  /// Path positions that another sequence is to write.
  [[nodiscard]] std::int32_t num_pending(SequenceIndex s) const noexcept;
  /// Who is to write the first of these positions; none where there are none.
  [[nodiscard]] SequenceIndex waits_for(SequenceIndex s) const noexcept;
  /// The topmost run of positions that are this sequence's to write, empty while a step has it.
  [[nodiscard]] TokenRange loadable(SequenceIndex s) const noexcept;
  /// Makes the sequence the writer of what others are still to write on its path, where no step is
  /// at it. Returns the tokens that it got.
  std::int32_t take_over(SequenceIndex s) noexcept;
  /// K/V of these positions has come from elsewhere: a file, another machine, host memory.
  void mark_loaded(SequenceIndex s, TokenRange range);

  // ---- the same: rows that are still to be copied --------------------------------------------

  /// The copies that the step's plan must carry, which from now on it has: those that no step has
  /// but one that is void. (One that has ended without making them counts as void.)
  void carry_copies(std::uint64_t step, Array<RowCopy>& rows);

 private:
  // ---- join.hpp ------------------------------------------------------------------------------

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

  /// Makes room for a sequence and so many nodes, so that only chunks may be wanting, and nothing
  /// to leave(). Moves the records of nodes and sequences.
  void reserve_joining(std::size_t num_nodes);
  /// A few last tokens that are not computed yet, and not public, are the new sequence's own to
  /// compute, so that neither waits for the other. Of the rest a short private tail is copied, a
  /// longer one shared.
  [[nodiscard]] ForkPlan plan_fork(SequenceIndex s, std::int32_t length) const noexcept;
  /// Uses the matched path, so that it is not evicted for the chunks that `fresh` tokens after it
  /// take. False, and the path as before, where there are not enough.
  bool hold_while_acquiring(const PathMatch& match, std::int32_t fresh);
  /// Slots for tokens that the sequence is to write.
  void fill(NodeIndex index, SequenceIndex s, std::int32_t count) noexcept;
  /// What a sequence that left had not written is the new one's to write; what others are to write
  /// it waits for.
  void resolve_pending(SequenceIndex s, const PathMatch& match, const InsertOptions& how) noexcept;

  // ---- add.hpp -------------------------------------------------------------------------------

  AddOutcome add_general(StepRecord& step, SequenceIndex s, std::int32_t max_tokens,
                         const NewDrafts& drafts);
  void look_ahead(SequenceIndex s) const noexcept;
  /// The first `count` drafts of an entry that is to be added. StepRecord::drafts has them, after
  /// those of the step's trees, unless they are a chain.
  static DraftTree plant_drafts(StepRecord& step, std::span<const std::int32_t> parents,
                                std::int32_t count);
  /// Slots at the end of a live tail, and slots beside all paths for the step: those of a sequence
  /// that only the step knows of, and that has left already. So what leaves late, and discards its
  /// slots when no step and no copy uses them, has one mechanism. False, and nothing changed, where
  /// the budget is spent. reserve_joining() comes first.
  bool grow_with_scratch(StepRecord& step, NodeIndex tail, std::int32_t num_slots,
                         std::int32_t num_scratch);
  /// The step's next entry has the drafts: the main branch from slot `first` of the tail on, the
  /// others on the last scratch slots.
  void place_drafts(StepRecord& step, const DraftTree& tree, const TreeNode& tail,
                    std::int32_t first) noexcept;
  /// A sequence without tokens, found by no prompt, that has left and that one step uses.
  SequenceIndex add_scratch() noexcept;
  /// A step has no use for them any more: they are discarded by finish_all_leaving() as soon as no
  /// copy needs them. False where the step has none.
  bool release_scratch(SequenceIndex& scratch) noexcept;

  // ---- finish.hpp ----------------------------------------------------------------------------

  /// The step has run: what of the entry counts.
  void end_entry(StepRecord& step, StepEntry& entry, SequenceRecord& record) noexcept;
  /// The step does not run: its slots come back, its copies are still to be made.
  void cancel_step(StepRecord& step) noexcept;
  void notify_step_end(const StepRecord& step, bool has_run) noexcept {
    topology.observers.notify([&](NodeObserver& observer) { observer.on_step_end(step, has_run); });
  }
  /// The step's handle was lost in flight: until a later step has finished the device may still
  /// run it, and what was planned after it rests on it.
  void abandon_step(StepRecord& step) noexcept;
  /// The step has finished: what was not committed is discarded.
  void close_step(StepRecord& step) noexcept;
  /// Ends the abandoned steps before `before`, and those that an idle device ran before any step
  /// that is still to finish: no output is discarded before an earlier step has had its own.
  void resolve_abandoned(std::uint64_t before) noexcept {
    if (steps.any_void()) [[unlikely]]
      end_abandoned(before);
  }
  void end_abandoned(std::uint64_t before) noexcept;

  /// Whether nothing has come between the end of the step, when each of its entries had one output
  /// to come, and this.
  [[nodiscard]] bool has_all_outputs(const StepRecord& step) const noexcept {
    return step.all_outputs && to_size(step.num_outputs) == step.entries.size() &&
           step.discarded_outputs == sequences.discarded_outputs();
  }
  void check_output_order(const StepEntry& entry) const;
  /// Whether an output of the entry, which can be committed, only makes its sequence longer.
  [[nodiscard]] CHUNKATTN_INLINE static bool is_plain_decode(
      const StepEntry& entry, const SequenceRecord& record) noexcept {
    return entry.chunk != no_chunk && record.computed == record.size;
  }
  /// Commits it; its token stands after that of the row, in the same chunk.
  CHUNKATTN_INLINE static void commit_decoded(StepEntry& entry, SequenceRecord& record) noexcept {
    entry.has_output = false;
    record.size += 1;
    record.reserved -= 1;
  }
  /// Stores and commits one output of each entry, from `entry` on as far as it is plain. Returns
  /// the first that is not, or `end`.
  template <class Store>
  [[gnu::noinline]] static StepEntry* commit_decoded(StepEntry* entry, StepEntry* end,
                                                     SequenceRecord* records, Store& store) {
    Store next = store;  // in registers
    for (; entry != end; ++entry) {
      SequenceRecord& record = records[entry->sequence];
      if (!is_plain_decode(*entry, record)) [[unlikely]]
        break;
      if (end - entry > 16) next.prefetch(entry[16]);
      next(*entry);
      commit_decoded(*entry, record);
    }
    store = next;
    return entry;
  }
  void commit_general(StepEntry& entry, SequenceRecord& record, std::int32_t count,
                      bool on_main_branch) noexcept;

  // ---- leave.hpp -----------------------------------------------------------------------------

  [[nodiscard]] bool retains() const noexcept { return retention.options().retains; }
  /// leave() without counting it, for scratch sequences, too.
  void begin_leaving(SequenceIndex s) noexcept;
  /// Ends all that left and that nothing uses any more; then keeps to the watermarks.
  void finish_all_leaving() noexcept;
  /// Nothing uses the sequence, which has left, any more.
  void finish_leaving(SequenceIndex s) noexcept;
  /// Makes the generated tokens of a sequence that left matchable, from the first unpublished node
  /// down. Where an equal path is already there the duplicate is dropped (if it may be: its slots
  /// must not be in use) and the rest moves below that path.
  void publish_tail(SequenceIndex s, bool may_merge) noexcept;
  /// The first unpublished node of the path, below published ones; none also for stale paths.
  [[nodiscard]] NodeIndex first_unpublished(SequenceIndex s) const noexcept;
  /// Replaces the first `common` tokens of `n`, which only the leaving sequence `s` uses, by those
  /// of its published sibling `equal`; what follows moves below it.
  void merge_into(SequenceIndex s, NodeIndex n, NodeIndex equal, std::int32_t common) noexcept;

  // ---- write.hpp -----------------------------------------------------------------------------

  /// Calls f for the nodes of the path that another sequence has still to write, last first.
  template <class F>
  void for_each_awaited(SequenceIndex s, const F& f) const;
  /// Lowers `end` to the first position whose K/V is still to be written by another sequence that
  /// no step has, and says by whom. (Two sequences may each have to write what the other one reads:
  /// each goes as far as it can.)
  AddOutcome find_missing(SequenceIndex s, std::int32_t& end) noexcept;
  /// A step that had the sequence has ended: if it was the last, and the sequence has left, others
  /// continue writing what it had still to write.
  void end_step_of(SequenceIndex s) noexcept;
  /// The node's writer will not write the rest: a live sequence below gets it to do, if there is
  /// one.
  CHUNKATTN_INLINE void reassign(NodeIndex index) noexcept {
    TreeNode& n = topology.node(index);
    n.writer = none;
    if (n.written < n.length && n.live > 0) [[unlikely]]
      give_to_successor(index);
  }
  void give_to_successor(NodeIndex index) noexcept;
  [[nodiscard]] SequenceIndex find_successor(NodeIndex n) const noexcept;
  /// Marks those of the entry's positions that are its sequence's to write as scheduled, or takes
  /// that back: the step is void.
  void set_scheduled(const StepEntry& entry, bool scheduled) noexcept;
  /// The step has run: the K/V of the entry's positions is written.
  void mark_written(const StepEntry& entry, SequenceRecord& record) noexcept;
  /// The step has ended, for the entries from `entry` on as far as each just decodes, see
  /// StepEntry::chunk. Returns the first that does not, or `end`.
  static StepEntry* mark_decoded(StepEntry* entry, StepEntry* end, SequenceRecord* records,
                                 TreeNode* nodes) noexcept;
  /// The step does not run: it is as if the entry had not been added.
  void cancel_entry(const StepEntry& entry) noexcept;
  /// The entry's positions are to be computed again. Returns whether it has a slot for an output,
  /// which counted until now.
  bool take_back(const StepEntry& entry, SequenceRecord& record) noexcept;
  void check_loadable(SequenceIndex s, TokenRange range, const TreeNode& n, std::int32_t offset,
                      std::int32_t end) const;

  /// Asks for the K/V of the first `count` tokens of `from` at `to`, which has them in one chunk.
  /// Rows that are themselves still to be copied are taken from where they come from, so that no
  /// copy depends on another.
  void request_copies(SequenceIndex source, SequenceIndex target, const TreeNode& from,
                      const TreeNode& to, std::int32_t count) noexcept;
  void request_copy(const PendingCopy& copy) noexcept;
  /// Takes out the copies that are done(copy).
  template <class F>
  void erase_copies(const F& done) noexcept;
  /// A sequence that leaves before rows of its tail were copied takes the copies back, unless a
  /// step that may still run has them or another shares that part of the tail.
  void cancel_copies(SequenceIndex s) noexcept;
  /// Where no sequence is left, nothing needs a copy, except the cache: unless a step may still
  /// run, none is made.
  void forget_copies() noexcept;
  /// Shortens [0, end) of a path to what does not wait for a copy.
  [[nodiscard]] std::int32_t readable_end(NodeIndex last, std::int32_t end) const noexcept;

  Tokens& tokens_;
  Array<SequenceIndex> leaving_;  // left, but a step or a copy still uses them
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
  [[nodiscard]] static SequenceIndex index(const Sequence& sequence) {
    (void)sequence.tree();
    return sequence.handle_.index;
  }
  /// The record of a Finished, and whether it is of the tree that `shared` keeps.
  template <class Finished>
  [[nodiscard]] static const StepRecord& record(const Finished& finished) {
    return finished.handle_.record();
  }
  template <class Finished, class Shared>
  [[nodiscard]] static bool is_of(const Finished& finished, const Shared& shared) noexcept {
    return finished.handle_.shared == shared;
  }
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
