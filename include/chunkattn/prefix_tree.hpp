// PrefixTree: finds shared prompt prefixes at run time and hands out the slots of their K/V
// (the paper's prefix-aware KV cache, section 3.1). It knows only tokens and slot indices.
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
#include "detail/base/config.hpp"
#include "detail/base/slot_source.hpp"
#include "detail/base/to_size.hpp"
#include "detail/tree/handles.hpp"
#include "detail/tree/inspect.hpp"
#include "detail/tree/token_tree.hpp"
#include "fwd.hpp"
#include "sequence.hpp"
#include "step.hpp"
#include "tree_options.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// A forest of prompts over one pool of slots, serving every layer of a model.
///
/// - `Token`: what a prompt is made of, usually an integer id.
/// - `ChunkSize`: tokens per slot, a power of two up to 1024.
/// - `Allocator`: hands out slot indices: PoolAllocator, FixedAllocator or your own.
/// - `Retention`: what happens to chunks nobody uses: NoRetention (the paper's), Lru, Priority.
///
/// One writer at a time: calls that change the tree or a sequence need an external lock. Const
/// queries may run at the same time as each other. Handles may be dropped on any thread, without
/// the lock only where that thread never calls the tree. A failed call leaves live sequences, their
/// handles and their K/V as they were (it may have evicted cache).
template <TokenType Token, int ChunkSize, ChunkAllocator Allocator, RetentionPolicy Retention>
class PrefixTree {
  static_assert(ChunkSize >= 1 && ChunkSize <= 1024 && (ChunkSize & (ChunkSize - 1)) == 0,
                "PrefixTree: ChunkSize must be a power of two from 1 to 1024, for example 64");
  using Tree = detail::TokenTree<Token, ChunkSize, Allocator, Retention>;
  using Shared = detail::SharedTree<Tree>;

 public:
  using token_type = Token;                     ///< what prompts are made of
  static constexpr int chunk_size = ChunkSize;  ///< tokens per slot

  using Sequence = chunkattn::Sequence<Tree>;  ///< handle of a sequence
  using Step = chunkattn::Step<Tree>;          ///< an open step
  using InFlight = chunkattn::InFlight<Tree>;  ///< a step on a device
  using Finished = chunkattn::Finished<Tree>;  ///< a step that has run
  using StepView = chunkattn::StepView<Tree>;  ///< what AttentionPlan::build() gives for a step

  /// A pinned prefix: its chunks are evicted only when nothing else is left to evict. Counted: a
  /// prefix stays pinned until all its pins are gone. Move-only; its destructor unpins.
  class Pin {
   public:
    Pin() = default;
    /// Leaves `other` empty.
    Pin(Pin&& other) noexcept = default;
    /// Unpins what it stood for, and takes over `other`.
    Pin& operator=(Pin&& other) noexcept = default;

    /// Whether anything is pinned.
    [[nodiscard]] explicit operator bool() const noexcept { return size() > 0; }
    /// Tokens that it pins: fewer than at first where even pinned chunks had to go, none after
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

  /// Throws InvalidArgument for options out of range.
  explicit PrefixTree(Allocator allocator = Allocator{}, TreeOptions options = {},
                      Retention retention = {})
      : shared_(std::make_shared<Shared>(std::move(allocator), options, std::move(retention))) {}
  /// Handles follow the tree to its new place.
  PrefixTree(PrefixTree&&) noexcept = default;
  /// Handles of the tree that stood here are orphaned.
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

  /// A sequence joins: the longest known prefix of the prompt is shared, the rest gets new slots.
  /// Throws OutOfChunks; InvalidArgument for an empty prompt.
  [[nodiscard]] Sequence insert(std::span<const Token> prompt, const InsertOptions& options = {}) {
    const detail::SequenceIndex index = insert_index(prompt, options);
    if (index == detail::none)
      detail::fail_out_of_chunks(core(), slots_needed(prompt, options), prompt.size());
    return Sequence(shared_, index);
  }
  /// The same for tokens that are written out: insert({1, 2, 3}).
  [[nodiscard]] Sequence insert(std::initializer_list<Token> prompt,
                                const InsertOptions& options = {}) {
    return insert(std::span<const Token>(prompt), options);
  }
  /// The same; nothing when the budget is too small.
  [[nodiscard]] std::optional<Sequence> try_insert(std::span<const Token> prompt,
                                                   const InsertOptions& options = {}) {
    const detail::SequenceIndex index = insert_index(prompt, options);
    if (index == detail::none) return std::nullopt;
    return Sequence(shared_, index);
  }
  /// The same for tokens that are written out.
  [[nodiscard]] std::optional<Sequence> try_insert(std::initializer_list<Token> prompt,
                                                   const InsertOptions& options = {}) {
    return try_insert(std::span<const Token>(prompt), options);
  }

  /// A prompt that waits for admission.
  struct Request {
    std::span<const Token> prompt;  ///< its tokens
    InsertOptions options{};        ///< how it joins
  };
  /// Admits requests in order until one does not fit beside `headroom` free or evictable slots, and
  /// returns the sequences that joined: those of the first requests. Later ones share what earlier
  /// ones brought.
  [[nodiscard]] std::vector<Sequence> admit(std::span<const Request> requests,
                                            std::size_t headroom = 0) {
    std::vector<Sequence> joined;
    joined.reserve(requests.size());
    for (const Request& request : requests) {
      const std::size_t needed = slots_needed(request.prompt, request.options);
      const std::size_t available = slots_available();
      if (needed > available || available - needed < headroom) break;
      auto sequence = try_insert(request.prompt, request.options);
      if (!sequence) break;
      joined.push_back(std::move(*sequence));
    }
    return joined;
  }

  /// Opens a step; add sequences to it, build a plan for it, run that, then tell the step. Throws
  /// InvalidArgument while another step is open or 4 are in flight.
  [[nodiscard]] Step begin_step() {
    Tree& tree = enter();
    shared_->expect_handle();
    return Step({shared_, tree.core.steps.begin()});
  }
  /// Says that no device runs any step of this tree, so that what steps that were dropped in flight
  /// held back can be used again. (The next step that finishes says as much of those before it.)
  void device_idle() { enter().core.results.device_idle(); }

  /// What of a prompt is there. (A sequence that joins computes its last token all the same, see
  /// InsertOptions::compute_last.)
  struct Match {
    std::size_t cached = 0;   ///< tokens whose K/V is written
    std::size_t pending = 0;  ///< further tokens whose K/V a live sequence is still to write
  };
  /// How much of a prompt insert() would find. Changes nothing.
  [[nodiscard]] Match match_prefix(std::span<const Token> prompt,
                                   const InsertOptions& options = {}) const {
    const detail::MatchResult found = tree().match_prefix(prompt, options);
    return {found.cached, found.pending};
  }
  /// The same for tokens that are written out.
  [[nodiscard]] Match match_prefix(std::initializer_list<Token> prompt,
                                   const InsertOptions& options = {}) const {
    return match_prefix(std::span<const Token>(prompt), options);
  }
  /// Slots that insert() would take from slots_available(): admission without an exception.
  [[nodiscard]] std::size_t slots_needed(std::span<const Token> prompt,
                                         const InsertOptions& options = {}) const {
    return tree().slots_needed(prompt, options);
  }
  /// The same for tokens that are written out.
  [[nodiscard]] std::size_t slots_needed(std::initializer_list<Token> prompt,
                                         const InsertOptions& options = {}) const {
    return slots_needed(std::span<const Token>(prompt), options);
  }
  /// Slots that are free or held by nothing but cache.
  [[nodiscard]] std::size_t slots_available() const { return core().slot_table.num_available(); }
  /// One more than the largest slot index handed out: K/V memory must cover [0, num_slots()).
  [[nodiscard]] std::size_t num_slots() const { return core().slot_table.allocator().high_water(); }

  /// Changes whenever a plan over live sequences may have to be rebuilt: join, leave, fork, a
  /// dropped reservation. Filling a chunk does not change it.
  [[nodiscard]] std::uint64_t version() const { return core().sequences.version(); }
  /// Counts since construction, and the present state.
  [[nodiscard]] TreeStats stats() const { return core().stats; }
  /// The options, with defaults resolved.
  [[nodiscard]] TreeOptions options() const { return core().options; }
  /// The allocator, for its own statistics.
  [[nodiscard]] const Allocator& allocator() const& { return tree().allocator(); }
  const Allocator& allocator() const&& = delete;  // a temporary tree takes it along

  /// Forgets all that is cached, pinned or not, after a change of weights. Live sequences go on,
  /// unshared by later ones.
  void clear() { enter().core.clear(); }

  /// Keeps the prefix of `tokens` that is written from eviction while anything else can go. The pin
  /// is empty where none is, or where the policy's max_pinned slots would be exceeded.
  [[nodiscard]] Pin pin(std::span<const Token> tokens, const InsertOptions& options = {}) {
    Tree& tree = enter();
    shared_->expect_handle();
    const std::int32_t index = tree.pin(tokens, options);
    return index == detail::none ? Pin() : Pin(shared_, index);
  }
  /// The same for tokens that are written out.
  [[nodiscard]] Pin pin(std::initializer_list<Token> tokens, const InsertOptions& options = {}) {
    return pin(std::span<const Token>(tokens), options);
  }
  /// Called with every slot that is given back to the allocator, just before. It must not throw nor
  /// call the tree. For debugging: `tree.set_free_sink([&](SlotIndex s) { cache.poison(s); })`.
  void set_free_sink(std::function<void(SlotIndex)> sink) {
    enter().core.slot_table.set_free_sink(std::move(sink));
  }
  /// Called when tokens become cache or stop being it. It must not throw nor call the tree.
  void set_event_sink(std::function<void(const CacheEvent&)> sink) {
    enter().core.retention.set_event_sink(std::move(sink));
  }

  /// A run of tokens that the same sequences have, as for_each_node() tells of it.
  struct Node {
    std::int32_t id = 0;        ///< of this tree, until the node is gone
    std::int32_t parent = 0;    ///< id of the node before it on the path; 0: none, it is a root
    std::int32_t position = 0;  ///< path position of the first token
    std::int32_t length = 0;    ///< tokens
    std::int32_t num_sequences = 0;   ///< live sequences that have it; 0: cached, or leaving
    bool cached = false;              ///< nobody uses it: it can be evicted
    Namespace name_space{};           ///< whose tokens these are
    std::vector<Token> first_tokens;  ///< the first of its tokens, as many as were asked for
  };

  /// Verifies every invariant by recounting; throws Error that names the first one broken. Linear
  /// in the size of the tree: for tests.
  void check_invariants() const { detail::TreeInspector(core()).check(); }

 private:
  friend struct detail::TreeAccess;
  friend struct detail::SlotAccess;
  // Where a K/V cache learns how many slots there are, wherever the tree is moved and even after it
  // is gone.
  [[nodiscard]] detail::SlotSource slot_source() const {
    return {shared_,
            [](const void* shared) -> std::size_t {
              const auto& tree = static_cast<const Shared*>(shared)->tree;
              return tree ? tree->core.slot_table.allocator().high_water() : 0;
            },
            core().id, core().steps.write_checks()};
  }
  [[nodiscard]] const detail::TreeCore& core() const { return tree().core; }
  [[nodiscard]] Tree& tree() const {
    detail::check_argument(shared_ != nullptr, "tree", "moved-from",
                           "a tree that was not moved from");
    return *shared_->tree;
  }
  detail::SequenceIndex insert_index(std::span<const Token> prompt, const InsertOptions& options) {
    Tree& tree = enter();
    shared_->expect_handle();
    return tree.insert(prompt, options);
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
  const detail::TreeCore& core = detail::TreeAccess::core(tree);
  typename Tree::Node info;
  detail::for_each_below_root(core, [&](detail::NodeIndex n, int) {
    const detail::TreeNode& node = core.topology.node(n);
    const std::int32_t known = detail::known_length(core, node);
    if (known <= 0) return;  // a sequence's tail before its first token
    info.id = n;
    info.parent = node.parent;
    info.position = node.position;
    info.length = known;
    info.num_sequences = node.live;
    info.cached = node.retained;
    info.name_space = node.name_space;
    info.first_tokens.clear();
    detail::for_first_tokens(tree, node, std::min(known, std::max(max_tokens, 0)),
                             [&](const auto& token) { info.first_tokens.push_back(token); });
    f(static_cast<const typename Tree::Node&>(info));
  });
}

/// The tree as indented text, one line per node: path positions, slots as slot[begin:end], who uses
/// it, and its first `max_tokens` tokens as `token_text(token)` writes them.
/// Linear in the size of the tree.
template <class Tree, class TokenText>
[[nodiscard]] std::string to_text(const Tree& tree, std::int32_t max_tokens,
                                  const TokenText& token_text) {
  const detail::TreeCore& core = detail::TreeAccess::core(tree);
  const TreeStats stats = tree.stats();
  std::string out = std::to_string(stats.live_sequences) + " sequences, " +
                    std::to_string(stats.nodes - 1) + " nodes, " +
                    std::to_string(stats.used_slots) + " slots (" +
                    std::to_string(stats.retained_slots) + " cached)\n";
  detail::for_each_below_root(core, [&](detail::NodeIndex n, int depth) {
    const detail::NodeText text = detail::describe(tree, n, max_tokens, token_text);
    out.append(static_cast<std::size_t>(2 * depth), ' ');
    out += "- " + text.range + "  " + text.where + "  (" + text.state + ")";
    if (!text.tokens.empty()) out += "  " + text.tokens;
    out += '\n';
  });
  return out;
}

/// The tree as indented text, with tokens as numbers, of a type that has none by their hashes.
template <class Tree>
[[nodiscard]] std::string to_text(const Tree& tree, std::int32_t max_tokens = 8) {
  return to_text(tree, max_tokens, detail::DefaultTokenText{});
}

/// The tree as a Graphviz graph (`dot -Tsvg`): cached nodes dashed, private tails rounded.
template <class Tree, class TokenText>
[[nodiscard]] std::string to_dot(const Tree& tree, std::int32_t max_tokens,
                                 const TokenText& token_text) {
  const detail::TreeCore& core = detail::TreeAccess::core(tree);
  std::string out =
      "digraph prefix_tree {\n  rankdir=LR;\n  node [shape=box, fontname=monospace];\n"
      "  n0 [label=root, shape=point];\n";
  detail::for_each_below_root(core, [&](detail::NodeIndex n, int) {
    const detail::NodeText text = detail::describe(tree, n, max_tokens, token_text);
    const std::string name = "n" + std::to_string(n);
    out += "  " + name + " [label=\"" + text.range + "\\n" + detail::quoted_for_dot(text.where) +
           "\\n" + detail::quoted_for_dot(text.state);
    if (!text.tokens.empty()) out += "\\n" + detail::quoted_for_dot(text.tokens);
    out += '"';
    if (core.topology.node(n).retained) out += ", style=dashed";
    if (core.topology.node(n).tail_of != detail::none) out += ", style=rounded";
    out += "];\n  n" + std::to_string(core.topology.node(n).parent) + " -> " + name + ";\n";
  });
  return out + "}\n";
}

/// The tree as a Graphviz graph, with tokens as in to_text().
template <class Tree>
[[nodiscard]] std::string to_dot(const Tree& tree, std::int32_t max_tokens = 8) {
  return to_dot(tree, max_tokens, detail::DefaultTokenText{});
}

CHUNKATTN_NAMESPACE_END
