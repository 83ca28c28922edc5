// A step of an engine: the tokens that it computes at once, from planning to their outputs.
//
//   Step            open: sequences are added, AttentionPlan::build() makes the kernels' arrays
//     submit()     the kernels are queued on a device that runs steps in this order
//   InFlight        the memory that the step reads and writes is reserved for it
//     finish()     the kernels have run (for a synchronous backend at once: Step::finish())
//   Finished        outputs are committed
//
// Each is move-only: what was moved from is empty, and what is assigned to ends as if destroyed.
// Destroying a Step cancels it. Destroying an InFlight discards its results; memory that it may
// touch is not used again until a later step has finished. Destroying a Finished discards the
// outputs that were not committed.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>

#include "allocator.hpp"
#include "detail/support/check.hpp"
#include "detail/support/config.hpp"
#include "detail/tree/core.hpp"
#include "detail/tree/handles.hpp"
#include "fwd.hpp"
#include "sequence.hpp"
#include "tree_options.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Drafts for Step::add(): guesses of the tokens after a sequence's last one.
template <class Token>
struct Drafts {
  std::span<const Token> tokens{};  ///< in the order of their rows
  /// How many there are where only the device knows their tokens; 0 where `tokens` has them.
  /// Whether accepted ones are the drafts is then the engine's word.
  std::size_t count = 0;
  /// [tokens.size() or count] of drafts that are a tree (EAGLE, Medusa): draft i follows draft
  /// parents[i], which stands before it, or, where that is -1, the sequence's last token. Empty:
  /// each follows the one before it.
  std::span<const std::int32_t> parents{};
};

/// A step that has finished: its K/V is written. Commit what was sampled, then drop it.
template <class Tree>
class [[nodiscard]] Finished {
 public:
  using token_type = typename Tree::token_type;  ///< what outputs are

  /// Its number, counted from 1 over all steps of the tree.
  [[nodiscard]] std::uint64_t number() const noexcept { return handle_.number; }

  /// The rows that are to be sampled from, in the order of add(), as a sized forward range of
  /// ScheduledSequence that is refused once this step's outputs are discarded. Whose row it is:
  /// `row.sequence` is Sequence::id(), and `row.index` counts the add() of this step, from 0. Not
  /// of a temporary: an object that is dropped gives them up.
  [[nodiscard]] auto rows() const& {
    return detail::OutputRows<Tree>(handle_.shared, handle_.record());
  }
  void rows() const&& = delete;  // keep the Finished in a variable, and commit through it

  /// Commits what was sampled from the logits of a row: the next step computes the last token of
  /// it. For a row with drafts: the accepted drafts, then one more token; the other drafts are
  /// rejected and have no effect. K/V of accepted drafts of a tree is copied to its place, where
  /// necessary, by the next step whose plan is built.
  ///
  /// \param row      a row of rows()
  /// \param outputs  a token, or a contiguous range of tokens
  /// \param leaf     for a tree of drafts: index of the last draft of the accepted branch, which
  ///                 `outputs` follows; -1: none is accepted, `outputs` is one token. Not needed
  ///                 for a chain
  /// \throws InvalidArgument for a row that rows() does not give (any more), for more outputs than
  ///         the row has, and for an accepted draft that differs from the token that was added
  template <class Outputs>
    requires std::convertible_to<const Outputs&, token_type> ||
             std::convertible_to<const Outputs&, std::span<const token_type>>
  CHUNKATTN_INLINE void commit(const ScheduledSequence& row, const Outputs& outputs,
                               std::optional<std::int32_t> leaf = std::nullopt) {
    if constexpr (std::convertible_to<const Outputs&, std::span<const token_type>>) {
      commit_row(row, outputs, leaf);
    } else {
      const token_type output = outputs;
      commit_row(row, std::span<const token_type>(&output, 1), leaf);
    }
  }
  /// Commits one output for each row of rows(), in that order: all of them or none.
  /// \throws InvalidArgument if there are more or fewer, or if an output of an earlier step has to
  ///         be committed first
  void commit(std::span<const token_type> outputs) {
    handle_.tree().commit(handle_.record(), outputs);
  }

 private:
  template <class>
  friend class Step;
  template <class>
  friend class InFlight;
  friend struct detail::TreeAccess;
  // Always inline: a program that never names a leaf is to have one caller of what commits a row.
  CHUNKATTN_INLINE void commit_row(const ScheduledSequence& row,
                                   std::span<const token_type> outputs,
                                   std::optional<std::int32_t> leaf) {
    detail::StepEntry& entry = entry_of(row);
    if (leaf)
      handle_.tree().commit(handle_.record(), entry, outputs, *leaf);
    else
      handle_.tree().commit(handle_.record(), entry, outputs);
  }
  detail::StepEntry& entry_of(const ScheduledSequence& row) const {
    detail::StepRecord& record = handle_.record();
    const auto index = static_cast<std::size_t>(row.index);
    if (row.index < 0 || index >= record.entries.size() ||
        record.entries[index].begin != row.position || record.entries[index].id() != row.sequence)
        [[unlikely]]
      detail::fail_argument("row", "of another step", "a row that rows() of this one gives");
    return record.entries[index];
  }
  explicit Finished(detail::StepHandle<Tree>&& handle) : handle_(std::move(handle)) {}

  detail::StepHandle<Tree> handle_;
};

/// A step that is queued on a device. Steps run in the order in which they were submitted; at most
/// 4 are in flight. Destroying it does not stop the device: its results are discarded, and memory
/// that it may touch is not used again until a later step has finished or PrefixTree::device_idle()
/// was called.
template <class Tree>
class [[nodiscard]] InFlight {
 public:
  /// Its number, counted from 1 over all steps of the tree.
  [[nodiscard]] std::uint64_t number() const noexcept { return handle_.number; }

  /// Says that the device has run the step: its K/V is written. Throws InvalidArgument, with
  /// nothing changed, while an earlier step is in flight, and with KvCacheOptions::check_writes for
  /// a layer that was not written.
  Finished<Tree> finish() && {  // not of a variable: write std::move(in_flight).finish()
    handle_.enter().finish(handle_.record());
    return Finished<Tree>(std::move(handle_));
  }

 private:
  template <class>
  friend class Step;
  explicit InFlight(detail::StepHandle<Tree>&& handle) : handle_(std::move(handle)) {}

  detail::StepHandle<Tree> handle_;
};

/// An open step; a tree has at most one. The memory that its rows read and write is reserved for it
/// from add() on, even if the sequences leave. Destroying it cancels it: the memory is free again
/// and the tokens are still to be computed.
template <class Tree>
class [[nodiscard]] Step {
 public:
  using token_type = typename Tree::token_type;        ///< what sequences are made of
  static constexpr int chunk_size = Tree::chunk_size;  ///< tokens per chunk

  /// Adds the next tokens of a sequence that are not computed yet, at most `max_tokens` of them. If
  /// they reach its end, its row has an output (ScheduledSequence::has_output), and `drafts` are
  /// computed after them, as far as `max_tokens` allows. If the sequence still expects an output
  /// of an earlier step, the token to compute is unknown (StepView::unknown_tokens()).
  ///
  /// If a sequence shares K/V that another one has to compute, add the other one first: only tokens
  /// whose K/V is written, or in a step, can be read. Nothing can be added to a step that was open
  /// when an earlier one was dropped in flight: its results are not used, drop or finish it. If the
  /// result is false, nothing has changed, except that cached chunks may have been evicted.
  ///
  /// A draft sees the sequence and its own branch; its position is that of the last token plus its
  /// depth. The K/V of the longest branch of a tree is written to slots of the sequence, that of
  /// the others to extra chunks, which all trees of drafts of the step share, until the step's
  /// outputs are committed and copied.
  ///
  /// \param max_tokens  at least 1
  /// \throws InvalidArgument for a sequence of another tree or one that is in this step already,
  /// `max_tokens` of 0, and drafts whose parents do not fit them
  [[nodiscard]] AddResult add(Sequence<Tree>& sequence,
                              std::size_t max_tokens = (std::numeric_limits<std::size_t>::max)(),
                              const Drafts<token_type>& drafts = {}) {
    const bool known = drafts.count == 0;
    if (!known || !drafts.parents.empty()) [[unlikely]]
      check_drafts(drafts);
    const std::size_t count = known ? (std::min)(drafts.tokens.size(), max_tokens) : drafts.count;
    return add_with(sequence, max_tokens, {limited(count), known, drafts.parents}, drafts.tokens);
  }

  /// Adds the next tokens of many sequences, at most `max_tokens` of each, as add() of one after
  /// the other in this order would; for thousands that decode. Either all are added or none; then
  /// AddResult::blocked_index() is the first that could not be.
  /// \throws InvalidArgument, with none added, as add() of one sequence; the message has its index
  [[nodiscard]] AddResult add(std::span<Sequence<Tree>> sequences,
                              std::size_t max_tokens = (std::numeric_limits<std::size_t>::max)()) {
    return add_all(sequences.size(), max_tokens,
                   [sequences](std::size_t i) -> Sequence<Tree>& { return sequences[i]; });
  }
  /// Adds the next tokens of many sequences, as the other overload does, where their handles are
  /// not in one array. None of the pointers may be null.
  [[nodiscard]] AddResult add(std::span<Sequence<Tree>* const> sequences,
                              std::size_t max_tokens = (std::numeric_limits<std::size_t>::max)()) {
    for (std::size_t i = 0; i < sequences.size(); ++i)
      if (sequences[i] == nullptr) [[unlikely]]
        fail_handle(i, "null", "a sequence");
    return add_all(sequences.size(), max_tokens,
                   [sequences](std::size_t i) -> Sequence<Tree>& { return *sequences[i]; });
  }

  /// Query tokens added so far: rows of q, k, v and out.
  [[nodiscard]] int num_rows() const { return handle_.record().num_rows; }
  /// Sequences added so far.
  [[nodiscard]] int num_sequences() const {
    return static_cast<int>(handle_.record().entries.size());
  }
  /// Its number, counted from 1 over all steps of the tree.
  [[nodiscard]] std::uint64_t number() const noexcept { return handle_.number; }

  /// Says that the kernels are queued. Throws InvalidArgument, with nothing changed, unless a plan
  /// was built after the last add().
  InFlight<Tree> submit() && {  // not of a variable: write std::move(step).submit()
    handle_.tree().core.steps.submit(handle_.record());
    return InFlight<Tree>(std::move(handle_));
  }
  /// Says that the kernels have run, for backends that wait: submit() and InFlight::finish()
  /// in one call, which throws what they throw.
  Finished<Tree> finish() && {  // not of a variable: write std::move(step).finish()
    handle_.enter().finish(handle_.record());
    return Finished<Tree>(std::move(handle_));
  }

 private:
  template <TokenType, int, ChunkAllocator, RetentionPolicy>
  friend class PrefixTree;
  friend class AttentionPlan;
  explicit Step(detail::StepHandle<Tree>&& handle) : handle_(std::move(handle)) {}

  AddResult add_with(Sequence<Tree>& sequence, std::size_t max_tokens,
                     const detail::NewDrafts& drafts, std::span<const token_type> tokens) {
    Tree& tree = handle_.tree();
    if (&sequence.tree() != &tree) [[unlikely]]
      detail::fail_argument("sequence", "of another tree", "a sequence of the step's tree");
    if (max_tokens < 1) [[unlikely]]
      detail::fail_argument("max_tokens", max_tokens, "at least one token");
    detail::StepRecord& record = handle_.record();
    const detail::AddOutcome outcome =
        tree.add(record, sequence.handle_.index, limited(max_tokens), drafts, tokens);
    AddResult result;
    set_status(result, outcome);
    if (outcome.reason == AddResult::Reason::none)
      result.row_ = detail::row_of(record, record.entries.size() - 1);
    return result;
  }

  CHUNKATTN_COLD static void check_drafts(const Drafts<token_type>& drafts) {
    detail::check_argument(drafts.count == 0 || drafts.tokens.empty(), "drafts.count", drafts.count,
                           "0 for drafts whose tokens are given");
    if (!drafts.parents.empty())
      detail::check_parents(drafts.parents, drafts.tokens.size() + drafts.count);
  }

  template <class At>
  AddResult add_all(std::size_t count, std::size_t max_tokens, At at) {
    Tree& tree = handle_.tree();
    if (max_tokens < 1) [[unlikely]]
      detail::fail_argument("max_tokens", max_tokens, "at least one token");
    detail::StepRecord& record = handle_.record();
    detail::TreeCore& core = tree.core;
    record.entries.reserve_more(count);
    struct Addition {  // takes out again what was added, unless all was
      detail::TreeCore& core;
      detail::StepRecord& record;
      std::size_t first = record.entries.size();
      bool built = record.built, all_added = false;
      ~Addition() {
        if (!all_added) core.take_out(record, first);
        record.built = built && !all_added;
      }
    } addition{core, record};
    const auto* const shared = handle_.shared.get();
    AddResult result;
    for (std::size_t i = 0;; ++i) {
      i = add_decoding(core.decoding(record), shared, at, i, count);
      if (i == count) break;
      const detail::AddOutcome outcome = add_general(at(i), i, max_tokens);
      if (outcome.reason != AddResult::Reason::none) [[unlikely]] {
        set_status(result, outcome);
        result.blocked_index_ = i;
        return result;
      }
    }
    addition.all_added = count > 0;
    return result;
  }
  /// Adds those of many from number i on that just decode. Returns the number of the first that
  /// does not, or `count`. A function of its own, so that the loop's variables stay in registers.
  template <class At>
  __attribute__((noinline)) static std::size_t add_decoding(detail::DecodingRun run,
                                                            const detail::SharedTree<Tree>* shared,
                                                            At at, std::size_t i,
                                                            std::size_t count) {
    for (; i < count; ++i) {
      const Sequence<Tree>& sequence = at(i);
      if (sequence.handle_.shared.get() != shared || !run.add(sequence.handle_.index, chunk_size))
          [[unlikely]]
        break;
    }
    run.store();
    return i;
  }
  /// One of many that is not just decoding, or that is refused.
  detail::AddOutcome add_general(const Sequence<Tree>& sequence, std::size_t index,
                                 std::size_t max_tokens) {
    if (!sequence.is_live()) [[unlikely]]
      fail_handle(index, "not live", "a live handle, not one moved from or used after leave()");
    if (sequence.handle_.shared != handle_.shared) [[unlikely]]
      fail_handle(index, "of another tree", "a sequence of the step's tree");
    detail::StepRecord& record = handle_.record();
    Tree& tree = handle_.tree();
    if (tree.core.sequences[sequence.handle_.index].last_step == record.number) [[unlikely]]
      fail_handle(index, "added twice", "each sequence at most once per step");
    return tree.add(record, sequence.handle_.index, limited(max_tokens), {}, {});
  }
  [[noreturn]] CHUNKATTN_COLD static void fail_handle(std::size_t index, const char* value,
                                                      const char* expected) {
    detail::fail_argument(detail::joined({"sequences[", index, "]"}), value, expected);
  }
  void set_status(AddResult& status, const detail::AddOutcome& outcome) const {
    status.reason_ = outcome.reason;
    status.step_ = outcome.step;
    if (outcome.waits_for != detail::none)
      status.waits_for_ = handle_.tree().core.sequences.id_of(outcome.waits_for);
  }
  static std::int32_t limited(std::size_t n) noexcept {
    return static_cast<std::int32_t>((std::min)(n, std::size_t{detail::max_length}));
  }

  detail::StepHandle<Tree> handle_;
};

CHUNKATTN_NAMESPACE_END
