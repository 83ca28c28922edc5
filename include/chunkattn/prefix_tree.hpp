// PrefixTree: finds shared prompt prefixes at run time and hands out the chunks of their K/V
// (the paper's prefix-aware KV cache, section 3.1). It knows only tokens and chunk indices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "allocator.hpp"
#include "detail/base/check.hpp"
#include "detail/base/chunk_source.hpp"
#include "detail/base/config.hpp"
#include "detail/base/mirror.hpp"
#include "detail/base/to_size.hpp"
#include "detail/tree/handles.hpp"
#include "detail/tree/inspect.hpp"
#include "detail/tree/token_tree.hpp"
#include "fwd.hpp"
#include "sequence.hpp"
#include "step.hpp"
#include "tree_options.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// A prefix tree of prompts over one pool of chunks (the paper's PAKV, section 3.1). One tree
/// serves every layer of a model; it has a root for each namespace.
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
/// \tparam Retention  what becomes of chunks that no sequence uses: NoRetention (the paper's), Lru,
///                    Priority or your own
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

  /// A pinned prefix: its chunks are evicted only when nothing else is left to evict. A prefix may
  /// have several pins, and stays pinned until all of them are gone. Move-only; the destructor
  /// unpins.
  class Pin {
   public:
    Pin() = default;
    /// Leaves `other` empty.
    Pin(Pin&& other) noexcept = default;
    /// Unpins its own prefix, and takes over that of `other`.
    Pin& operator=(Pin&& other) noexcept = default;

    /// Whether anything is pinned.
    [[nodiscard]] explicit operator bool() const noexcept { return size() > 0; }
    /// Tokens that it pins. Fewer than at first if even pinned chunks had to be evicted, 0 after
    /// clear().
    [[nodiscard]] std::size_t size() const noexcept {
      if (!handle_.has_tree()) return 0;
      const detail::Retention& retention = handle_.shared->tree->core.retention;
      return detail::to_size(retention.pinned_length(handle_.index, handle_.generation));
    }

   private:
    friend class PrefixTree;
    Pin(const std::shared_ptr<Shared>& shared, std::int32_t index)
        : handle_(shared, index, shared->tree->core.retention.pin_generation(index)) {}

    detail::Handle<Tree, detail::Held::pin> handle_;
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
  [[nodiscard]] Sequence insert(std::span<const Token> prompt, const InsertOptions& options = {}) {
    if (auto sequence = try_insert(prompt, options)) return *std::move(sequence);
    detail::fail_out_of_chunks(core(), chunks_needed(prompt, options), prompt.size());
  }
  /// insert() of tokens that are written out: insert({1, 2, 3}).
  [[nodiscard]] Sequence insert(std::initializer_list<Token> prompt,
                                const InsertOptions& options = {}) {
    return insert(std::span<const Token>(prompt), options);
  }
  /// insert() that returns nothing where insert() would throw OutOfChunks.
  [[nodiscard]] std::optional<Sequence> try_insert(std::span<const Token> prompt,
                                                   const InsertOptions& options = {}) {
    Tree& tree = enter();
    shared_->expect_handle();
    const detail::SequenceIndex index = tree.insert(prompt, options);
    if (index == detail::none) return std::nullopt;
    return Sequence(shared_, index);
  }
  /// try_insert() of tokens that are written out.
  [[nodiscard]] std::optional<Sequence> try_insert(std::initializer_list<Token> prompt,
                                                   const InsertOptions& options = {}) {
    return try_insert(std::span<const Token>(prompt), options);
  }

  /// A prompt that waits for admission.
  struct Request {
    std::span<const Token> prompt;  ///< its tokens, which stay there while it waits
    InsertOptions options{};        ///< as for insert()
  };
  /// What the tree says of a waiting request: see rank().
  struct Rank {
    std::uint64_t id = 0;     ///< as Waiting::push() said
    std::size_t cached = 0;   ///< tokens whose K/V is written, as match_prefix() says
    std::size_t pending = 0;  ///< further tokens whose K/V a live sequence has still to compute
    std::size_t shared = 0;   ///< of both, the first that a running sequence has, too
    std::size_t chunks = 0;   ///< as chunks_needed() says
  };
  /// Requests that wait, in the order in which they came, with what a tree last said of each.
  class Waiting {
   public:
    /// \param max_overtaken  so often next() lets later requests go before one
    explicit Waiting(std::size_t max_overtaken = 512) : max_overtaken_(max_overtaken) {}

    /// Adds a request behind the others. Returns its id: 1, 2, 3, ...
    /// \throws InvalidArgument for a prompt that insert() would refuse
    std::uint64_t push(const Request& request) {
      Tree::check_prompt(request.prompt);
      entries_.push_back({request, {}, 0});
      ranks_.push_back({.id = ++last_id_});
      return last_id_;
    }
    /// A request was admitted: those that came before it were overtaken.
    /// \throws InvalidArgument for the id of none that waits, here and below
    void admitted(std::uint64_t id) {
      const std::size_t at = find(id);
      for (std::size_t i = 0; i < at; ++i) ++entries_[i].overtaken;
      erase(at);
    }
    /// A request does not wait any longer.
    void cancelled(std::uint64_t id) { erase(find(id)); }

    /// Requests that wait.
    [[nodiscard]] std::size_t size() const noexcept { return ranks_.size(); }
    /// Whether none does.
    [[nodiscard]] bool empty() const noexcept { return ranks_.empty(); }
    /// One of them.
    [[nodiscard]] const Request& request(std::uint64_t id) const {
      return entries_[find(id)].request;
    }
    /// As rank() has left them, in the order of arrival.
    [[nodiscard]] std::span<const Rank> ranks() const noexcept { return ranks_; }
    /// Whom to admit next: who shares most with what runs, of equals who came first; but the first
    /// of all, if that was overtaken max_overtaken times. Null where nobody waits.
    [[nodiscard]] const Rank* next() const noexcept {
      if (empty()) return nullptr;
      if (entries_.front().overtaken >= max_overtaken_) return &ranks_.front();
      return &*std::ranges::max_element(ranks_, {}, &Rank::shared);
    }

   private:
    friend class PrefixTree;
    struct Entry {
      Request request;
      detail::KeptMatch kept;
      std::size_t overtaken;
    };
    [[nodiscard]] std::size_t find(std::uint64_t id) const {
      const auto at = std::ranges::lower_bound(ranks_, id, {}, &Rank::id);
      detail::check_argument(at != ranks_.end() && at->id == id, "id", id,
                             "that of a request that waits");
      return static_cast<std::size_t>(at - ranks_.begin());
    }
    void erase(std::size_t at) {
      entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(at));
      ranks_.erase(ranks_.begin() + static_cast<std::ptrdiff_t>(at));
    }

    std::vector<Entry> entries_;
    std::vector<Rank> ranks_;           // of the same requests
    std::vector<std::uint64_t> marks_;  // by node of the tree: the call in which a path had it
    std::uint64_t last_id_ = 0, calls_ = 0;
    std::uint64_t tree_ = 0, publications_ = 0;  // of the last call
    std::size_t max_overtaken_;
  };
  /// Says of all waiting requests what match_prefix() and chunks_needed() say, and what they share
  /// with the live sequences: afterwards `waiting.ranks()`. What was found of a request is kept for
  /// the next call, so that this is O(waiting.size()), and tokens are compared only of requests
  /// that are new, or that the tree has more or less of than before.
  void rank(Waiting& waiting) const {
    rank_all(waiting, [&](detail::NodeIndex n) { return core().topology.node(n).live > 0; });
  }
  /// rank() where only these sequences are said to run. Throws InvalidArgument for any that are of
  /// another tree, with the ranks as they were.
  void rank(Waiting& waiting, std::span<const Sequence> running) const {
    std::vector<std::uint64_t>& marks = waiting.marks_;
    marks.resize(std::max(marks.size(), core().topology.num_indices()));
    const std::uint64_t mark = ++waiting.calls_;
    for (std::size_t i = 0; i < running.size(); ++i) {
      if (&running[i].tree() != &tree()) [[unlikely]]
        detail::fail_argument(detail::joined({"running[", i, "]"}), "of another tree",
                              "a sequence of this tree");
      for (detail::NodeIndex n = running[i].record().tail;
           n != detail::none && std::exchange(marks[detail::to_size(n)], mark) != mark;)
        n = core().topology.node(n).parent;
    }
    rank_all(waiting, [&](detail::NodeIndex n) { return marks[detail::to_size(n)] == mark; });
  }
  /// Ranks all, then inserts Waiting::next() if it fits: its id, and its sequence. Nothing if it
  /// does not, or nobody waits.
  /// \param headroom  chunks that are to stay free or evictable
  [[nodiscard]] std::optional<std::pair<std::uint64_t, Sequence>> admit(Waiting& waiting,
                                                                        std::size_t headroom = 0) {
    rank(waiting);
    const Rank* const next = waiting.next();
    const std::size_t available = chunks_available();
    if (next == nullptr || next->chunks > available || available - next->chunks < headroom)
      return std::nullopt;
    const Request& request = waiting.request(next->id);
    auto sequence = try_insert(request.prompt, request.options);
    if (!sequence) return std::nullopt;
    const std::uint64_t id = next->id;
    waiting.admitted(id);
    return std::pair(id, std::move(*sequence));
  }

  /// Opens a step: add sequences to it, build a plan for it, run the kernels, then call
  /// Step::finished() or Step::submitted(). Throws InvalidArgument while another step is open or 4
  /// are in flight; one that was dropped in flight counts until device_idle(), or until a later one
  /// has finished.
  [[nodiscard]] Step begin_step() {
    Tree& tree = enter();
    shared_->expect_handle();
    return Step({shared_, tree.core.steps.begin()});
  }
  /// Says that no device runs any step of this tree, so that memory of steps that were dropped in
  /// flight can be used again. (Otherwise when a later step has finished.)
  void device_idle() { enter().core.results.device_idle(); }

  /// How much of a prompt is cached. (Its last token is computed anyway: see InsertOptions.)
  struct Match {
    std::size_t cached = 0;      ///< tokens whose K/V is written
    std::size_t pending = 0;     ///< further tokens whose K/V a live sequence has still to compute
    std::size_t checkpoint = 0;  ///< position of the last checkpoint that is not behind `cached`
  };
  /// How many tokens of a prompt insert() would find. Changes nothing, not even what is evicted
  /// next.
  [[nodiscard]] Match match_prefix(std::span<const Token> prompt,
                                   const InsertOptions& options = {}) const {
    const detail::MatchResult found = tree().match_prefix(prompt, options);
    return {found.cached, found.pending, found.checkpoint};
  }
  /// match_prefix() of tokens that are written out.
  [[nodiscard]] Match match_prefix(std::initializer_list<Token> prompt,
                                   const InsertOptions& options = {}) const {
    return match_prefix(std::span<const Token>(prompt), options);
  }
  /// The most chunks that insert() would take from chunks_available(), for admission without
  /// exceptions.
  [[nodiscard]] std::size_t chunks_needed(std::span<const Token> prompt,
                                          const InsertOptions& options = {}) const {
    return tree().chunks_needed(prompt, options);
  }
  /// chunks_needed() of tokens that are written out.
  [[nodiscard]] std::size_t chunks_needed(std::initializer_list<Token> prompt,
                                          const InsertOptions& options = {}) const {
    return chunks_needed(std::span<const Token>(prompt), options);
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

  /// Forgets all cached K/V, pinned or not, as weights change. Live sequences keep theirs alone.
  void clear() { enter().core.clear(); }
  /// Evicts cached tokens, but pinned ones, that nobody used for the policy's ttl. Time is yours:
  /// it begins at 0 and does not go back (or InvalidArgument). Returns their number.
  std::size_t expire(std::uint64_t now) { return enter().core.retention.expire(now); }

  /// Protects the written prefix of `tokens` from eviction while anything else can be evicted. The
  /// pin is empty if no token is written, or if more than the policy's max_pinned chunks would be
  /// pinned (by default 0).
  [[nodiscard]] Pin pin(std::span<const Token> tokens, const InsertOptions& options = {}) {
    Tree& tree = enter();
    shared_->expect_handle();
    const std::int32_t index = tree.pin(tokens, options);
    return index == detail::none ? Pin() : Pin(shared_, index);
  }
  /// pin() of tokens that are written out.
  [[nodiscard]] Pin pin(std::initializer_list<Token> tokens, const InsertOptions& options = {}) {
    return pin(std::span<const Token>(tokens), options);
  }
  /// `sink` is called with each chunk index just before the allocator gets it back, for debugging:
  /// `[&](ChunkIndex s) { cache.poison(s); }`. It must neither throw nor call the tree.
  void set_free_sink(std::function<void(ChunkIndex)> sink) {
    enter().core.chunk_table.set_free_sink(std::move(sink));
  }
  /// `sink` is called with each change of what prompts can find, and with the tokens of a stored
  /// event. It must neither throw nor call the tree. What can be found already is in snapshot().
  void set_event_sink(std::function<void(const CacheEvent&, std::span<const Token>)> sink) {
    enter().set_event_sink(std::move(sink));
  }
  /// What prompts can find: to begin with before events come, or after some were missed.
  struct Snapshot {
    std::uint64_t number = 0;       ///< of the last event before it
    std::int32_t unit = 1;          ///< tokens that are found or not as one
    std::vector<CacheEvent> spans;  ///< all of them `stored`, each behind what it continues
    std::vector<Token> tokens;      ///< CacheEvent::length for each, one behind the other
  };
  /// The state behind the last event; without an event sink, InvalidArgument. Linear in the tree.
  [[nodiscard]] Snapshot snapshot() const {
    Snapshot all;
    all.number = detail::list_told(tree(), all.spans, all.tokens);
    all.unit = core().prefixes.unit();
    return all;
  }

  /// What prompts can find in such a tree, rebuilt elsewhere from a snapshot and events, or from
  /// the events of a tree that had a sink from its beginning. Not for several threads at once.
  class Mirror {
   public:
    /// What apply() made of an event.
    enum class Applied : std::uint8_t {
      changed,   ///< it was the next one
      repeated,  ///< it was there already, and is ignored
      missed     ///< others are missing before it: apply() them first, or load() a snapshot
    };

    /// \param sharing  that of the tree
    explicit Mirror(TreeOptions::Sharing sharing = TreeOptions::Sharing::token)
        : mirror_(sharing == TreeOptions::Sharing::token ? 1 : ChunkSize) {}

    /// Takes over one event. Throws InvalidArgument, and is as before, for one that cannot follow
    /// those before it: it is of another tree, or was damaged.
    Applied apply(const CacheEvent& event, std::span<const Token> tokens) {
      if (event.number <= number_) return Applied::repeated;
      if (event.number > number_ + 1) return Applied::missed;
      mirror_.apply(event, tokens);
      number_ = event.number;
      return Applied::changed;
    }
    /// Becomes what the snapshot says, whatever came before. Throws InvalidArgument, and is as
    /// before, for one that is damaged.
    void load(const Snapshot& snapshot) {
      mirror_ = detail::TokenMirror<Token>::of(snapshot, ChunkSize);
      number_ = snapshot.number;
    }
    /// The number of the last event that it knows of.
    [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
    /// Tokens that it holds, each once.
    [[nodiscard]] std::size_t num_tokens() const noexcept { return mirror_.num_tokens(); }
    /// How many tokens of a prompt the tree would find with their K/V: PrefixTree::match_prefix()
    /// without what is pending, and under Sharing::chunk in whole chunks.
    [[nodiscard]] std::size_t match_prefix(std::span<const Token> prompt,
                                           const InsertOptions& options = {}) const {
      return std::min(mirror_.match(prompt, options.name_space, options.public_length),
                      options.max_reuse);
    }

   private:
    detail::TokenMirror<Token> mirror_;
    std::uint64_t number_ = 0;
  };

  /// A node of the tree, for for_each_node(): consecutive tokens that the same sequences have.
  struct Node {
    std::int32_t id = 0;        ///< of this tree, until the node is gone
    std::int32_t parent = 0;    ///< id of the node before it on the path; 0: none, it is a root
    std::int32_t position = 0;  ///< path position of the first token
    std::int32_t length = 0;    ///< tokens
    std::int32_t num_sequences = 0;   ///< live sequences that have it; 0: cached, or leaving
    bool cached = false;              ///< used by no sequence: it can be evicted
    Namespace name_space{};           ///< whose tokens these are
    std::vector<Token> first_tokens;  ///< the first of its tokens, as many as were asked for
  };

  /// For tests: checks every invariant by counting again, and throws an Error that names the first
  /// one that is broken. Linear in the size of the tree.
  void check_invariants() const { detail::TreeInspector(core()).check(); }

 private:
  friend struct detail::TreeAccess;
  friend struct detail::ChunkAccess;
  [[nodiscard]] const detail::TreeCore& core() const { return tree().core; }
  [[nodiscard]] Tree& tree() const {
    detail::check_argument(shared_ != nullptr, "tree", "moved-from",
                           "a tree that was not moved from");
    return *shared_->tree;
  }
  template <class IsRunning>
  void rank_all(Waiting& waiting, const IsRunning& is_running) const {
    const Tree& t = tree();
    const std::uint64_t publications = t.core.prefixes.num_publications();
    const bool is_same = waiting.tree_ == t.core.id;
    const bool has_more = !is_same || waiting.publications_ != publications;
    for (std::size_t i = 0; i < waiting.size(); ++i) {
      auto& [request, kept, overtaken] = waiting.entries_[i];
      if (!is_same) kept = {};
      t.rank(request.prompt, request.options, kept, has_more, is_running, waiting.ranks_[i]);
    }
    waiting.tree_ = t.core.id;
    waiting.publications_ = publications;
  }
  Tree& enter() {
    Tree& entered = tree();
    shared_->enter();
    return entered;
  }

  std::shared_ptr<Shared> shared_;
};

/// Calls f(const PrefixTree::Node&) for every node that has tokens, parents first, older siblings
/// first. Linear in the size of the tree.
///
/// \param max_tokens  how many of its tokens each node shows
template <class Tree, class F>
void for_each_node(const Tree& tree, std::int32_t max_tokens, const F& f) {
  detail::visit_nodes(tree, max_tokens, f);
}

/// The tree as indented text, a line for each node: path positions, chunks as index[begin:end], the
/// number of sequences that use it, and its first `max_tokens` tokens as `token_text(token)` writes
/// them (integers as numbers). Linear in the size of the tree.
template <class Tree, class TokenText>
[[nodiscard]] std::string to_text(const Tree& tree, std::int32_t max_tokens,
                                  const TokenText& token_text) {
  return detail::text_of(tree, max_tokens, token_text);
}

/// The tree as indented text, with tokens as numbers, of a type that has none by their hashes.
template <class Tree>
[[nodiscard]] std::string to_text(const Tree& tree, std::int32_t max_tokens = 8) {
  return to_text(tree, max_tokens, detail::DefaultTokenText{});
}

/// The tree as a Graphviz graph (`dot -Tsvg`), with the text of to_text() in each node: cached
/// nodes are dashed, private tails rounded. Linear in the size of the tree.
template <class Tree, class TokenText>
[[nodiscard]] std::string to_dot(const Tree& tree, std::int32_t max_tokens,
                                 const TokenText& token_text) {
  return detail::dot_of(tree, max_tokens, token_text);
}

/// The tree as a Graphviz graph, with tokens as in to_text().
template <class Tree>
[[nodiscard]] std::string to_dot(const Tree& tree, std::int32_t max_tokens = 8) {
  return to_dot(tree, max_tokens, detail::DefaultTokenText{});
}

CHUNKATTN_NAMESPACE_END
