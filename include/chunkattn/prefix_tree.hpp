// PrefixTree: finds shared prompt prefixes at run time and hands out the slots of their K/V
// (the paper's prefix-aware KV cache, section 3.1). It knows only tokens and slot indices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunk_allocator.hpp"
#include "config.hpp"
#include "error.hpp"
#include "retention.hpp"
#include "tree_core.hpp"
#include "tree_invariants.hpp"
#include "tree_types.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// A forest of prompts over one pool of slots, serving every layer of a model.
///
/// - `Token`: what a prompt is made of, usually an integer id.
/// - `ChunkSize`: tokens per slot, a power of two up to 1024.
/// - `Allocator`: hands out slot indices: PoolAllocator, FixedAllocator or your own.
/// - `Retention`: what happens to chunks nobody uses: NoRetention (the paper's), Lru, Priority.
///
/// One writer at a time: calls that change the tree or a sequence need an external lock. Const
/// queries may run at the same time as each other. A failed call leaves live sequences, their
/// handles and their K/V as they were (it may have evicted cache).
template <TokenType Token, int ChunkSize = 64, ChunkAllocator Allocator = PoolAllocator,
          RetentionPolicy Retention = NoRetention>
class PrefixTree {
  static_assert(ChunkSize >= 1 && ChunkSize <= 1024 && (ChunkSize & (ChunkSize - 1)) == 0,
                "PrefixTree: ChunkSize must be a power of two from 1 to 1024, for example 64");
  using Core = detail::TreeCore<Token, ChunkSize, Allocator, Retention>;
  struct Shared {
    Shared(Allocator allocator, TreeOptions options, Retention retention)
        : core(std::in_place, std::move(allocator), options, std::move(retention)) {}
    std::optional<Core> core;  // empty once the tree is gone; handles may stay
  };

 public:
  using token_type = Token;                     ///< what prompts are made of
  static constexpr int chunk_size = ChunkSize;  ///< tokens per slot

  /// A sequence in the tree: a stable, move-only handle, valid while others join and leave. Its
  /// destructor leaves. It may outlive the tree; then only destroying or assigning to it is useful.
  class Sequence {
   public:
    using token_type = Token;                     ///< what prompts are made of
    static constexpr int chunk_size = ChunkSize;  ///< tokens per slot

    Sequence() = default;
    /// Leaves `other` empty.
    Sequence(Sequence&& other) noexcept
        : shared_(std::move(other.shared_)), index_(other.index_), generation_(other.generation_) {
      other.shared_.reset();
    }
    /// Leaves what it stood for, and takes over `other`.
    Sequence& operator=(Sequence&& other) noexcept {
      if (this != &other) {
        release();
        shared_ = std::move(other.shared_);
        other.shared_.reset();
        index_ = other.index_;
        generation_ = other.generation_;
      }
      return *this;
    }
    Sequence(const Sequence&) = delete;
    Sequence& operator=(const Sequence&) = delete;
    ~Sequence() { release(); }

    /// Whether the handle still stands for a sequence of a living tree.
    [[nodiscard]] bool is_live() const noexcept {
      return shared_ && shared_->core && shared_->core->is_live(index_, generation_);
    }

    /// Tokens known: the prompt and what was committed or appended.
    [[nodiscard]] std::size_t size() const { return to_size(record().size); }
    /// Prompt tokens that were found with their K/V written, so they need not be computed.
    [[nodiscard]] std::size_t num_cached() const { return to_size(record().cached); }
    /// Path tokens that another sequence has still to write: a step that runs this sequence must
    /// also run that one, or come after it.
    [[nodiscard]] std::size_t num_pending() const { return to_size(core().num_pending(index_)); }
    /// Places reserved and not committed.
    [[nodiscard]] std::size_t num_reserved() const { return to_size(record().reserved); }

    /// The next positions to compute, at most `max`; empty when all known tokens are.
    [[nodiscard]] TokenRange next_uncomputed(
        std::size_t max = std::numeric_limits<std::size_t>::max()) const {
      const auto& r = record();
      const auto left = to_size(r.size - r.cursor);
      return {r.cursor, static_cast<std::int32_t>(left < max ? left : max)};
    }

    /// Places for `n` further tokens, which may be unknown yet. Up to 4 reservations may be
    /// outstanding (asynchronous scheduling). Throws OutOfChunks.
    TokenRange reserve(std::size_t n) {
      const auto range = try_reserve(n);
      if (!range) core_fail(core().slots_needed(index_, n));
      return *range;
    }
    /// The same; nothing and no change when the budget is spent.
    std::optional<TokenRange> try_reserve(std::size_t n) {
      Core& c = core();
      const detail::SequenceRecord& r = c.sequence(index_);
      const std::int32_t begin = r.size + r.reserved;
      if (!c.reserve(index_, to_length(n, "n"))) return std::nullopt;
      return TokenRange{begin, static_cast<std::int32_t>(n)};
    }

    /// Adds known tokens whose K/V is still to be computed (a user's next message). The result is
    /// their range; next_uncomputed() returns it too. Throws OutOfChunks.
    TokenRange append(std::span<const Token> tokens) {
      Core& c = core();
      const std::int32_t begin = c.sequence(index_).size;
      if (!c.append(index_, tokens)) core_fail(c.slots_needed(index_, tokens.size()));
      return {begin, static_cast<std::int32_t>(tokens.size())};
    }
    /// The same with one token.
    TokenRange append(const Token& token) { return append(std::span<const Token>(&token, 1)); }

    /// Says that the K/V of these known positions is written in every layer: prefill progress.
    void commit(TokenRange computed) { core().commit(index_, computed); }
    /// Supplies the accepted tokens of the oldest reservation, whose K/V is written in every layer.
    /// The rest of that reservation is dropped, and then the later ones too.
    void commit(std::span<const Token> accepted) { core().commit(index_, accepted); }
    /// The same with one token.
    void commit(const Token& accepted) { commit(std::span<const Token>(&accepted, 1)); }

    /// A second sequence with the same tokens. Shared paths are not copied; a short private tail
    /// is (TreeOptions::min_run). Reserved places stay with this one. Throws OutOfChunks.
    [[nodiscard]] Sequence fork() {
      auto twin = try_fork();
      if (!twin) core_fail(1);
      return std::move(*twin);
    }
    /// The same; nothing and no change when the budget is spent.
    [[nodiscard]] std::optional<Sequence> try_fork() {
      const SequenceIndex twin = core().fork(index_);
      if (twin == detail::none) return std::nullopt;
      return Sequence(shared_, twin);
    }

    /// Leaves the tree; the handle is empty afterwards. What this sequence alone used is freed, or
    /// kept as cache, as the retention policy says.
    void leave() {
      (void)core();
      release();
    }

    /// The token at a path position below size().
    [[nodiscard]] Token token(std::size_t position) const {
      detail::check_argument(position < size(), "position", position, "below the sequence's size");
      return core().token(index_, static_cast<std::int32_t>(position));
    }
    /// All size() tokens, from the root.
    [[nodiscard]] std::vector<Token> tokens() const {
      std::vector<Token> all(size());
      for_each_run({0, record().size}, [&](const Piece& piece) {
        for (std::int32_t i = 0; i < piece.length; ++i)
          all[to_size(piece.position + i)] = core().token_at(piece.slot, piece.begin + i);
      });
      return all;
    }

    /// Slots that reserve(n) would take from the tree's slots_available().
    [[nodiscard]] std::size_t slots_needed(std::size_t n) const {
      return core().slots_needed(index_, n);
    }

    /// Calls f(const Piece&) for where the path positions of `range` lie, in path order: the walk
    /// for swapping out, saving and moving K/V.
    template <class F>
    void for_each_run(TokenRange range, const F& f) const {
      const Core& c = core();
      std::vector<Piece> nodes;  // (node, offset, length, -) last first
      c.for_each_node(index_, range, [&](NodeIndex n, std::int32_t offset, std::int32_t length) {
        nodes.push_back({n, offset, length, 0});
      });
      for (std::size_t i = nodes.size(); i-- > 0;)
        c.for_each_run(
            c.node(nodes[i].slot), nodes[i].begin, nodes[i].length,
            [&](SlotIndex s, std::int32_t offset, std::int32_t run, std::int32_t done) {
              f(Piece{s, offset, run, c.node(nodes[i].slot).position + nodes[i].begin + done});
              return true;
            });
    }

    /// Identity for plans: the tree's number in the process and the sequence's index in the tree.
    /// Throws if not live.
    [[nodiscard]] std::uint64_t tree_id() const { return core().id(); }
    /// The sequence's index in its tree, reused after it has left. Throws if not live.
    [[nodiscard]] SequenceIndex index() const {
      (void)core();
      return index_;
    }
    /// Tells sequences of the same index apart.
    [[nodiscard]] std::uint32_t generation() const noexcept { return generation_; }

   private:
    friend class PrefixTree;
    Sequence(std::shared_ptr<Shared> shared, SequenceIndex index)
        : shared_(std::move(shared)),
          index_(index),
          generation_(shared_->core->sequence(index).generation) {}

    [[nodiscard]] Core& core() const {
      detail::check_argument(shared_ != nullptr, "sequence", "empty",
                             "a live handle, not one moved from or used after leave()");
      detail::check_argument(shared_->core.has_value(), "sequence", "orphaned",
                             "a handle whose tree still exists");
      detail::check_argument(shared_->core->is_live(index_, generation_), "sequence", "left",
                             "a live handle");
      return *shared_->core;
    }
    [[nodiscard]] const detail::SequenceRecord& record() const { return core().sequence(index_); }
    void release() noexcept {
      if (is_live()) shared_->core->leave(index_);
      shared_.reset();
    }
    [[noreturn]] void core_fail(std::size_t asked) const {
      PrefixTree::fail_out_of_chunks(core(), asked);
    }

    std::shared_ptr<Shared> shared_;
    SequenceIndex index_ = detail::none;
    std::uint32_t generation_ = 0;
  };

  /// Throws InvalidArgument for options out of range.
  explicit PrefixTree(Allocator allocator = Allocator{}, TreeOptions options = {},
                      Retention retention = {})
      : shared_(std::make_shared<Shared>(std::move(allocator), options, std::move(retention))) {}
  /// Handles follow the tree to its new place.
  PrefixTree(PrefixTree&&) noexcept = default;
  /// Handles of the tree that stood here are orphaned.
  PrefixTree& operator=(PrefixTree&& other) noexcept {
    if (this != &other) {
      if (shared_) shared_->core.reset();
      shared_ = std::move(other.shared_);
    }
    return *this;
  }
  ~PrefixTree() {
    if (shared_) shared_->core.reset();
  }

  /// A sequence joins: the longest known prefix of the prompt is shared, the rest gets new slots.
  /// Throws OutOfChunks; InvalidArgument for an empty prompt.
  [[nodiscard]] Sequence insert(std::span<const Token> prompt, const InsertOptions& options = {}) {
    auto sequence = try_insert(prompt, options);
    if (!sequence) fail_out_of_chunks(core(), slots_needed(prompt, options));
    return std::move(*sequence);
  }
  /// The same; nothing when the budget is too small.
  [[nodiscard]] std::optional<Sequence> try_insert(std::span<const Token> prompt,
                                                   const InsertOptions& options = {}) {
    const SequenceIndex index = core().insert(prompt, options);
    if (index == detail::none) return std::nullopt;
    return Sequence(shared_, index);
  }

  /// How much of a prompt insert() would find. Changes nothing.
  [[nodiscard]] MatchResult match_prefix(std::span<const Token> prompt,
                                         const InsertOptions& options = {}) const {
    return core().match_prefix(prompt, options);
  }
  /// Slots that insert() would take from slots_available(): admission without an exception.
  [[nodiscard]] std::size_t slots_needed(std::span<const Token> prompt,
                                         const InsertOptions& options = {}) const {
    return core().slots_needed(prompt, options);
  }
  /// Slots that are free or held by nothing but cache.
  [[nodiscard]] std::size_t slots_available() const { return core().slots_available(); }
  /// One more than the largest slot index handed out: K/V memory must cover [0, num_slots()).
  [[nodiscard]] std::size_t num_slots() const {
    return static_cast<std::size_t>(core().allocator().high_water());
  }

  /// Changes whenever a plan over live sequences may have to be rebuilt: join, leave, fork, a
  /// dropped reservation. Filling a chunk does not change it.
  [[nodiscard]] std::uint64_t version() const { return core().version(); }
  /// Counts since construction, and the present state.
  [[nodiscard]] TreeStats stats() const { return core().stats(); }
  /// The options, with defaults resolved.
  [[nodiscard]] const TreeOptions& options() const { return core().options(); }
  /// The allocator, for its own statistics.
  [[nodiscard]] const Allocator& allocator() const { return core().allocator(); }

  /// With TreeOptions::async_steps: steps up to `step` (AttentionPlan::step()) are done on the
  /// device, so what they read may be reused.
  void retire(std::uint64_t step) { core().retire(step); }
  /// Forgets all that is cached, after a change of weights. Live sequences go on, unshared by later
  /// ones.
  void clear() { core().clear(); }

  /// Keeps the known prefix of `tokens` from eviction while anything else can go. Returns the
  /// tokens pinned, 0 if that would take more than the policy's max_pinned slots.
  std::size_t pin(std::span<const Token> tokens, const InsertOptions& options = {}) {
    return to_size(core().pin(tokens, options));
  }
  /// Undoes one pin() of the same tokens.
  void unpin(std::span<const Token> tokens, const InsertOptions& options = {}) {
    core().unpin(tokens, options);
  }
  /// Called with every slot that is given back to the allocator, just before. It must not throw nor
  /// call the tree. For debugging: `tree.set_free_sink([&](SlotIndex s) { cache.poison(s); })`.
  void set_free_sink(std::function<void(SlotIndex)> sink) { core().set_free_sink(std::move(sink)); }
  /// Called when tokens become cache or stop being it. It must not throw nor call the tree.
  void set_event_sink(std::function<void(const CacheEvent&)> sink) {
    core().set_event_sink(std::move(sink));
  }

  /// Verifies every invariant by recounting; throws Error that names the first one broken. Linear
  /// in the size of the tree: for tests.
  void check_invariants() const { detail::TreeInspector<Core>(core()).check(); }

  /// The tree's own records, read by AttentionPlan and by the printers in tree_view.hpp.
  [[nodiscard]] const Core& core() const {
    detail::check_argument(shared_ != nullptr, "tree", "moved-from", "a tree");
    return *shared_->core;
  }
  /// The same, for AttentionPlan.
  [[nodiscard]] Core& core() {
    detail::check_argument(shared_ != nullptr, "tree", "moved-from", "a tree");
    return *shared_->core;
  }

 private:
  static std::size_t to_size(std::int32_t n) noexcept { return static_cast<std::size_t>(n); }
  static std::int32_t to_length(std::size_t n, const char* name) {
    detail::check_argument(n <= (std::size_t{1} << 30), name, n, "at most 2^30");
    return static_cast<std::int32_t>(n);
  }
  [[noreturn]] static void fail_out_of_chunks(const Core& core, std::size_t asked) {
    detail::fail(OutOfChunks(asked, core.slots_available(),
                             static_cast<std::size_t>(core.allocator().capacity())));
  }

  std::shared_ptr<Shared> shared_;
};

CHUNKATTN_NAMESPACE_END
