// PrefixTree: finds shared prompt prefixes at run time and hands out the chunks of their K/V
// (the paper's prefix-aware KV cache, section 3.1). It knows only tokens and chunk indices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "allocator.hpp"
#include "detail/support/array.hpp"
#include "detail/support/check.hpp"
#include "detail/support/config.hpp"
#include "detail/tree/handles.hpp"
#include "detail/tree/token_tree.hpp"
#include "fwd.hpp"
#include "sequence.hpp"
#include "step.hpp"
#include "tree_options.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// A prefix tree of prompts over one pool of chunks (the paper's PAKV, section 3.1). One tree
/// serves every layer of a model; sequences of different namespaces share nothing.
///
/// Only one thread at a time may change the tree, its sequences or its steps; the caller locks.
/// Const queries may run at the same time as each other, but not during a change. Any thread may
/// destroy handles, but a thread that also calls the tree needs the lock for it: docs/cache.md,
/// "Threads". A call that fails leaves live sequences, their handles and their K/V as they were; it
/// may have evicted cache.
///
/// \tparam Token      what a prompt is made of, usually an integer id
/// \tparam ChunkSize  tokens per chunk, a power of two from 1 to 1024
/// \tparam Allocator  hands out chunk indices: PoolAllocator, FixedAllocator or your own
/// \tparam Retention  what becomes of chunks that no sequence uses: RetentionOptions, CachePolicy,
///                    ScoredPolicy, or your own
template <TokenType Token, int ChunkSize, ChunkAllocator Allocator, RetentionPolicy Retention>
class PrefixTree {
  static_assert(ChunkSize >= 1 && ChunkSize <= 1024 && (ChunkSize & (ChunkSize - 1)) == 0,
                "PrefixTree: ChunkSize must be a power of two from 1 to 1024, for example 64");
  using Tree = detail::TokenTree<Token, ChunkSize, Allocator, Retention>;
  using Shared = detail::SharedTree<Tree>;

 public:
  using token_type = Token;                     ///< what prompts are made of
  static constexpr int chunk_size = ChunkSize;  ///< tokens per chunk

  using Sequence = chunkattn::Sequence<Tree>;  ///< handle of a sequence
  using Step = chunkattn::Step<Tree>;          ///< an open step
  using InFlight = chunkattn::InFlight<Tree>;  ///< a step on a device
  using Finished = chunkattn::Finished<Tree>;  ///< a step that has run
  using StepView = chunkattn::StepView<Tree>;  ///< what AttentionPlan::build() gives for a step

  /// A pinned prefix: its chunks are evicted only when nothing else is left to evict (then each
  /// eviction of a node is O(pins)). A prefix may have several pins, and stays pinned until all of
  /// them are gone. Move-only: one that was moved from is empty. The destructor unpins, and so does
  /// assigning another pin.
  class Pin {
   public:
    Pin() = default;

    /// Whether anything is pinned.
    [[nodiscard]] explicit operator bool() const noexcept { return size() > 0; }
    /// Tokens that it pins. Fewer than at first if a live sequence needed even pinned chunks (no
    /// watermark does), 0 after clear().
    [[nodiscard]] std::size_t size() const noexcept {
      if (!handle_.has_tree()) return 0;
      const detail::TreeCore& core = handle_.shared->tree->core;
      const detail::NodeIndex last = core.retention.pinned(handle_.index);
      return last == detail::none ? 0 : detail::to_size(core.topology.node(last).end());
    }

   private:
    friend class PrefixTree;
    Pin(const std::shared_ptr<Shared>& shared, std::int32_t index) : handle_(shared, index) {}

    detail::Handle<Tree, detail::HandleKind::pin> handle_;
  };

  /// An empty tree. Throws InvalidArgument for options out of range.
  explicit PrefixTree(Allocator allocator = Allocator{}, TreeOptions options = {},
                      Retention retention = {})
      : shared_(std::make_shared<Shared>(std::move(allocator), options, std::move(retention))) {}
  /// Handles follow the tree to its new place.
  PrefixTree(PrefixTree&&) noexcept = default;
  /// Handles of the tree that was here become orphans: only destroying or assigning them is useful.
  PrefixTree& operator=(PrefixTree&& other) noexcept {
    if (this != &other) {
      if (shared_) shared_->tree.reset();
      shared_ = std::move(other.shared_);
    }
    return *this;
  }
  ~PrefixTree() {
    if (shared_) shared_->tree.reset();
  }

  /// Adds a sequence with the tokens of a prompt. It shares the K/V of the longest prefix that the
  /// tree has, and gets new chunks for the rest (the paper's section 3.1). O(prompt.size()).
  ///
  /// \throws OutOfChunks      if there are fewer than chunks_needed() chunks, after eviction
  /// \throws InvalidArgument  for an empty prompt, or one of more than 2^30 tokens
  [[nodiscard]] Sequence insert(TokenSpan<Token> prompt, const InsertOptions& options = {}) {
    if (auto sequence = try_insert(prompt, options)) return *std::move(sequence);
    detail::fail_out_of_chunks(core(), chunks_needed(prompt, options), prompt.size());
  }
  /// insert() that returns nothing where insert() would throw OutOfChunks.
  [[nodiscard]] std::optional<Sequence> try_insert(TokenSpan<Token> prompt,
                                                   const InsertOptions& options = {}) {
    Tree& tree = enter();
    shared_->expect_handle();
    const detail::SequenceIndex index = tree.insert(prompt, options);
    if (index == detail::none) return std::nullopt;
    return Sequence(shared_, index);
  }

  /// Opens a step: add sequences to it, build a plan for it, run the kernels, then call
  /// Step::finish() or Step::submit(). Throws InvalidArgument while another step is open or 4
  /// are in flight; one that was dropped in flight counts until device_idle(), or until a later one
  /// has finished.
  [[nodiscard]] Step begin_step() {
    Tree& tree = enter();
    shared_->expect_handle();
    return Step({shared_, tree.core.steps.open()});
  }
  /// Says that no device runs any step of this tree, so that memory of steps that were dropped in
  /// flight can be used again. (Otherwise when a later step has finished.)
  void device_idle() { enter().core.device_idle(); }

  /// What match_prefix() gives.
  struct Match {
    std::size_t cached;   ///< tokens whose K/V is written
    std::size_t pending;  ///< further tokens whose K/V a live sequence has still to compute
  };
  /// How many tokens of a prompt insert() would find. Changes nothing, not even what is evicted
  /// next.
  [[nodiscard]] Match match_prefix(TokenSpan<Token> prompt,
                                   const InsertOptions& options = {}) const {
    const auto [cached, pending] = tree().result_of(tree().find(prompt, options), options);
    return {cached, pending};
  }
  /// The most chunks that insert() would take from chunks_available(), for admission without
  /// exceptions.
  [[nodiscard]] std::size_t chunks_needed(TokenSpan<Token> prompt,
                                          const InsertOptions& options = {}) const {
    return tree().chunks_needed(tree().find(prompt, options), prompt.size(), options);
  }
  /// Chunks that are free or evictable.
  [[nodiscard]] std::size_t chunks_available() const { return core().chunk_table.num_available(); }
  /// One more than the largest chunk index handed out: K/V memory must cover [0, num_chunks()).
  [[nodiscard]] std::size_t num_chunks() const {
    return core().chunk_table.allocator().high_water();
  }

  /// A number that changes whenever a kept plan may have to be rebuilt: when a sequence joins,
  /// leaves or forks, or when reserved chunks are given back. Filling a chunk does not change it.
  [[nodiscard]] std::uint64_t version() const { return core().sequences.version(); }
  /// Counts since construction, and the present state. O(1).
  [[nodiscard]] TreeStats stats() const { return core().stats; }
  /// The options, with values in place of zeros that stand for defaults.
  [[nodiscard]] TreeOptions options() const { return core().options; }
  /// The allocator, for its own statistics.
  [[nodiscard]] const Allocator& allocator() const& { return tree().allocator(); }
  const Allocator& allocator() const&& = delete;  // a temporary tree takes it along

  /// Forgets all cached K/V, pinned or not, as weights change. Live sequences keep theirs alone. As
  /// trim(0), it lowers what a pool without a limit keeps.
  void clear() { enter().core.clear(); }
  /// Evicts cached tokens until at most `chunks` chunks are in use, or nothing is cached but what
  /// is pinned; a pool without a limit then keeps no more than that again, until live sequences
  /// need more. Returns the chunks freed, which new tokens take. K/V memory that a KvCache has
  /// allocated stays there.
  std::size_t trim(std::size_t chunks) { return enter().core.retention.trim(chunks); }
  /// Evicts cached tokens, but pinned ones, that were unused for the policy's ttl. Time is yours:
  /// it begins at 0 and does not go back (or InvalidArgument). Returns their number.
  std::size_t expire(std::uint64_t now) { return enter().core.retention.expire(now); }

  /// Protects the written prefix of `tokens` from eviction while anything else can be evicted. The
  /// pin is empty if no token is written, or if more than the policy's max_pinned chunks would be
  /// pinned. Throws InvalidArgument where that is 0, as it is by default.
  [[nodiscard]] Pin pin(TokenSpan<Token> tokens, const InsertOptions& options = {}) {
    Tree& tree = enter();
    shared_->expect_handle();
    const std::int32_t index = tree.pin(tokens, options);
    return index == detail::none ? Pin() : Pin(shared_, index);
  }
  /// `sink` is called with each chunk index just before the allocator gets it back, for debugging:
  /// `[&](ChunkIndex s) { cache.poison(s); }`. It must neither throw nor call the tree. Without a
  /// sink, `{}`, or with an empty std::function, none is called any more.
  template <class Sink = std::nullptr_t>
  void set_free_sink(Sink sink) {
    enter().core.chunk_table.set_free_sink(detail::make_free_sink(std::move(sink)));
  }

 private:
  friend struct detail::TreeAccess;
  friend struct detail::ChunkAccess;
  [[nodiscard]] const detail::TreeCore& core() const { return tree().core; }
  [[nodiscard]] Tree& tree() const {
    detail::check_argument(shared_ != nullptr, "tree", "moved-from",
                           "a tree that was not moved from");
    return *shared_->tree;
  }
  Tree& enter() {
    Tree& entered = tree();
    shared_->enter();
    return entered;
  }

  std::shared_ptr<Shared> shared_;
};

CHUNKATTN_NAMESPACE_END
