// The handle of a sequence in a prefix tree.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "allocator.hpp"
#include "detail/support/array.hpp"
#include "detail/support/check.hpp"
#include "detail/support/config.hpp"
#include "detail/tree/core.hpp"
#include "detail/tree/handles.hpp"
#include "plan_view.hpp"
#include "tree_options.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// A move-only handle of a sequence in the tree: one that was moved from is empty. Destroying it,
/// on any thread, or assigning another lets the sequence leave. It may outlive the tree; then only
/// destroying or assigning it is useful. Name the type as PrefixTree<...>::Sequence.
///
/// A sequence is a list of known tokens. The next steps compute those whose K/V is not computed yet
/// (Step::add()); outputs that are committed are added at its end. Every member but is_live() and
/// the assignments throws InvalidArgument for a handle that is empty, has left, or outlived its
/// tree.
template <class Tree>
class Sequence {
 public:
  using token_type = typename Tree::token_type;        ///< what prompts are made of
  static constexpr int chunk_size = Tree::chunk_size;  ///< tokens per chunk

  /// All of a sequence's tokens, for fork().
  static constexpr std::size_t whole = (std::numeric_limits<std::size_t>::max)();

  Sequence() = default;

  /// Whether its sequence has not left, and the tree still exists.
  [[nodiscard]] bool is_live() const noexcept { return handle_.has_tree(); }
  /// The sequence's number in the tree, which is never used again.
  [[nodiscard]] SequenceId id() const { return core().sequences.id_of(handle_.index); }

  /// Known tokens: the prompt and what was committed or appended.
  [[nodiscard]] std::size_t size() const { return detail::to_size(record().size); }
  /// Tokens of the prompt whose K/V was found written when it joined, so they need not be computed.
  [[nodiscard]] std::size_t num_cached() const { return detail::to_size(record().cached); }
  /// Known tokens that are in no step yet.
  [[nodiscard]] std::size_t num_uncomputed() const {
    const auto& r = record();
    return r.cursor < r.size ? detail::to_size(r.size - r.cursor) : 0;
  }
  /// Leading positions that are computed or in a step, drafts and expected outputs included.
  [[nodiscard]] std::size_t num_scheduled() const { return detail::to_size(record().cursor); }
  /// Leading tokens whose K/V is in place: written by finished steps, or loaded.
  [[nodiscard]] std::size_t num_written() const {
    return detail::to_size(core().readable_length(handle_.index));
  }
  /// Tokens of this sequence whose K/V another sequence has still to compute.
  [[nodiscard]] std::size_t num_pending() const {
    return detail::to_size(core().num_pending(handle_.index));
  }
  /// The sequence that has to compute the first of num_pending(); SequenceId::none if there are
  /// none.
  [[nodiscard]] SequenceId waits_for() const {
    const detail::SequenceIndex writer = core().waits_for(handle_.index);
    return writer == detail::none ? SequenceId::none : core().sequences.id_of(writer);
  }
  /// Leading tokens that other live sequences have, too: their K/V stays when this one leaves.
  [[nodiscard]] std::size_t num_shared() const {
    return (std::min)(size(), detail::to_size(core().sequences.num_shared(handle_.index)));
  }
  /// Positions from size() on that steps have reserved for drafts and expected outputs.
  [[nodiscard]] std::size_t num_reserved() const { return detail::to_size(record().reserved); }

  /// Adds known tokens at the end, whose K/V is still to be computed: a user's next message.
  /// \throws OutOfChunks      if there are fewer than chunks_needed() chunks, after eviction
  /// \throws InvalidArgument  for no tokens, and while an output is expected from a step
  void append(std::span<const token_type> tokens) {
    if (!try_append(tokens))
      detail::fail_out_of_chunks(core(), chunks_needed(tokens.size()), size() + tokens.size());
  }
  /// append() of tokens that are written out: append({1, 2, 3}).
  void append(std::initializer_list<token_type> tokens) { append(TokenSpan<token_type>(tokens)); }
  /// append() of one token.
  void append(const token_type& token) { append(std::span<const token_type>(&token, 1)); }
  /// append() that returns false and changes nothing where append() would throw OutOfChunks.
  [[nodiscard]] bool try_append(TokenSpan<token_type> tokens) {
    return tree().append(handle_.index, tokens);
  }

  /// Lets this sequence compute tokens that others have still to compute (num_pending()), except
  /// those that are in a step already. Returns their number; 0: wait for that step.
  std::size_t take_over() { return detail::to_size(core().take_over(handle_.index)); }

  /// The first consecutive positions whose K/V this sequence has to provide and that are in no
  /// step; empty if there are none.
  [[nodiscard]] TokenRange loadable() const { return core().loadable(handle_.index); }
  /// Says that the K/V of these positions is in place without a step: read from a file, received
  /// from another machine. If the last token's is, too, nothing is left to compute.
  /// \throws InvalidArgument for positions that another sequence has to compute or that leave a gap
  ///         without K/V before them, and for a sequence that is in a step
  void mark_loaded(TokenRange range) {
    detail::TreeCore& c = core();
    check_range(c.sequences[handle_.index], range);
    c.mark_loaded(handle_.index, range);
  }

  /// A second sequence with the first `length` tokens, by default all of them. It shares their K/V;
  /// only that of a short private tail (TreeOptions::min_run; with Sharing::chunk of the tail's
  /// last chunk, if that is not full) is copied, by the next step. With Sharing::chunk a part of a
  /// prompt's chunk is computed again. Unless it has all tokens and they are
  /// computed, its last token is computed again. What steps are computing, drafts and expected
  /// outputs stay with this sequence.
  /// \throws OutOfChunks      if a chunk for the copy is missing
  /// \throws InvalidArgument  unless `length` is from 1 to size(), or `whole`
  [[nodiscard]] Sequence fork(std::size_t length = whole) {
    if (auto forked = try_fork(length)) return *std::move(forked);
    detail::fail_out_of_chunks(core(), 1, size() + chunk_size);
  }
  /// fork() that returns nothing and changes nothing where fork() would throw OutOfChunks.
  [[nodiscard]] std::optional<Sequence> try_fork(std::size_t length = whole) {
    const detail::SequenceIndex forked = fork_index(length, false);
    if (forked == detail::none) return std::nullopt;
    return Sequence(handle_.shared, forked);
  }

  /// Goes back to the first `length` tokens, the last of which is computed again: for editing an
  /// earlier turn of a chat. Does nothing if there are no more tokens and no expected outputs. The
  /// sequence has a new id() afterwards; for steps in which it is, it has left.
  /// \throws OutOfChunks      with nothing changed
  /// \throws InvalidArgument  unless `length` is from 1 to size()
  void truncate(std::size_t length) {
    if (length == size() && num_reserved() == 0) return;
    const detail::SequenceIndex shorter = fork_index(length, /*compute_last=*/true);
    if (shorter == detail::none) detail::fail_out_of_chunks(core(), 1, size() + chunk_size);
    *this = Sequence(handle_.shared, shorter);
  }

  /// Leaves the tree; the handle is empty afterwards. Chunks that only this sequence used are freed
  /// or kept as cache, as the retention policy says; those that a step uses, when it has finished.
  void leave() {
    (void)core();  // throws for a dead handle
    handle_.shared->enter();
    handle_ = {};
  }

  /// The token at position `position`, counted from 0. Throws InvalidArgument from size() on.
  [[nodiscard]] token_type token(std::size_t position) const {
    if (position >= size()) [[unlikely]]
      detail::fail_argument("position", position, {"below the sequence's size, ", size()});
    return tree().token(handle_.index, static_cast<std::int32_t>(position));
  }
  /// All size() tokens.
  [[nodiscard]] std::vector<token_type> tokens() const {
    std::vector<token_type> all(size());
    copy_tokens({0, record().size}, all);
    return all;
  }
  /// The tokens at the positions `range` into memory of [range.length] tokens.
  /// \throws InvalidArgument for positions from size() on, and for another size
  void copy_tokens(TokenRange range, std::span<token_type> out) const {
    const std::int64_t end = std::int64_t{range.begin} + range.length;
    detail::check_argument(end <= record().size, "range.end()", end,
                           {"at most the sequence's size, ", record().size});
    detail::check_argument(out.size() == detail::to_size(range.length), "out.size()", out.size(),
                           {"range.length, ", range.length});
    for_each_run(range, [&](const Piece& piece) {
      const auto first = out.begin() + (piece.position - range.begin);
      for (std::int32_t i = 0; i < piece.length; ++i)
        first[i] = tree().token_at(piece.chunk, piece.begin + i);
    });
  }

  /// The namespace, public length and priority that it was inserted with, for inserting its tokens
  /// again: as preempted.
  [[nodiscard]] InsertOptions options() const {
    const detail::TreeCore& c = core();
    const auto& r = record();
    return {.name_space = c.topology.node(r.tail).name_space,
            .public_length = detail::to_size(c.sequences.public_length(handle_.index)),
            .priority = r.priority,
            .preempted = true};
  }

  /// Chunks that `n` further tokens would take from the tree's chunks_available().
  [[nodiscard]] std::size_t chunks_needed(std::size_t n) const {
    return core().sequences.chunks_needed(handle_.index, n);
  }

  /// Calls f(const Piece&) for each chunk, or part of one, that holds positions of `range`, in path
  /// order: to swap out, save and move K/V. Throws InvalidArgument for positions beyond
  /// size() + num_reserved().
  template <class F>
  void for_each_run(TokenRange range, const F& f) const {
    const detail::TreeCore& c = core();
    check_range(c.sequences[handle_.index], range);
    struct Part {
      detail::NodeIndex node;
      std::int32_t offset, length;
    };
    Array<Part> parts;  // last first
    c.sequences.for_each_node(handle_.index, range,
                              [&](detail::NodeIndex n, std::int32_t offset, std::int32_t length) {
                                parts.push_back({n, offset, length});
                              });
    for (std::size_t i = parts.size(); i-- > 0;) {
      const detail::TreeNode& n = c.topology.node(parts[i].node);
      c.topology.for_each_run(
          n, parts[i].offset, parts[i].length,
          [&](ChunkIndex s, std::int32_t offset, std::int32_t run, std::int32_t done) {
            f(Piece{s, offset, run, n.position + parts[i].offset + done});
          });
    }
  }

  /// The tree's number in the process.
  [[nodiscard]] std::uint64_t tree_id() const { return core().id; }
  /// Which of the model's weights its K/V is of, as far as the tree knows: 1 + the number of calls
  /// of clear(), or 0 if clear() was called since it joined.
  [[nodiscard]] std::uint64_t weights_epoch() const {
    const bool stale = core().topology.node(record().tail).state == detail::NodeState::stale;
    return stale ? 0 : core().stats.clears + 1;
  }

 private:
  template <TokenType, int, ChunkAllocator, RetentionPolicy>
  friend class PrefixTree;
  template <class>
  friend class Step;
  friend struct detail::TreeAccess;
  using Shared = detail::SharedTree<Tree>;

  Sequence(const std::shared_ptr<Shared>& shared, detail::SequenceIndex index)
      : handle_(shared, index) {}

  [[nodiscard]] Tree& tree() const { return handle_.tree(); }
  [[nodiscard]] detail::TreeCore& core() const { return tree().core; }
  [[nodiscard]] const detail::SequenceRecord& record() const {
    return core().sequences[handle_.index];
  }

  static void check_range(const detail::SequenceRecord& r, TokenRange range) {
    const std::int32_t end = r.size + r.reserved;
    if (range.begin < 0 || range.begin > end) [[unlikely]]
      detail::fail_argument("range.begin", range.begin, {"0 to the sequence's end, ", end});
    if (range.length < 0 || range.length > end - range.begin) [[unlikely]]
      detail::fail_argument("range.length", range.length,
                            {"an end within the sequence's ", end, " positions"});
  }

  detail::SequenceIndex fork_index(std::size_t length, bool compute_last) {
    detail::TreeCore& c = core();
    const std::size_t known = detail::to_size(c.sequences[handle_.index].size);
    if (length == whole && !compute_last) length = known;
    if (length < 1 || length > known) [[unlikely]]
      detail::fail_argument("length", length, {"1 to the sequence's ", known, " known tokens"});
    handle_.shared->expect_handle();
    return c.fork(handle_.index, static_cast<std::int32_t>(length), compute_last);
  }

  detail::Handle<Tree, detail::HandleKind::sequence> handle_;
};

CHUNKATTN_NAMESPACE_END
