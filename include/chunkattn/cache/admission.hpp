// AdmissionQueue: requests that wait, ranked by how much of each is cached and shared with what
// runs, so that an engine admits next who costs least.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "../detail/support/array.hpp"
#include "../detail/support/check.hpp"
#include "../detail/support/config.hpp"
#include "../detail/tree/core.hpp"
#include "../detail/tree/token_tree.hpp"
#include "../tree_options.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Requests that wait, in the order in which they came, with what a tree last said of each.
///
/// \tparam Tree  a PrefixTree
template <class Tree>
class AdmissionQueue {
  using Token = typename Tree::token_type;
  using Sequence = typename Tree::Sequence;

 public:
  /// A prompt that waits for admission.
  struct Request {
    std::span<const Token> prompt;  ///< its tokens, which stay there while it waits
    InsertOptions options{};        ///< as for insert()
  };
  /// What the tree says of a waiting request: see rank().
  struct Rank {
    std::uint64_t id = 0;     ///< as push() said
    std::size_t cached = 0;   ///< tokens whose K/V is written, as match_prefix() says
    std::size_t pending = 0;  ///< further tokens whose K/V a live sequence has still to compute
    std::size_t shared = 0;   ///< of both, the first that a running sequence has, too
    std::size_t chunks = 0;   ///< as chunks_needed() says
  };

  /// \param max_overtaken  so often next() lets later requests go before one
  explicit AdmissionQueue(std::size_t max_overtaken = 512) : max_overtaken_(max_overtaken) {}

  /// Adds a request after the others. Returns its id: 1, 2, 3, ...
  /// \throws InvalidArgument for a prompt that insert() would refuse
  std::uint64_t push(const Request& request) {
    detail::check_prompt(request.prompt);
    if (ranks_.size() == ranks_.capacity()) ranks_.reserve(2 * ranks_.size() + 8);
    entries_.push_back({request, {}, 0});
    ranks_.push_back({.id = ++last_id_});
    return last_id_;
  }
  /// A request was admitted: those that came before it were overtaken.
  /// \throws InvalidArgument for an id that is not queued, here and below
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
  /// The request to admit next: the one that shares most with what runs, of equals the first; but
  /// the first of all, if that was overtaken max_overtaken times. Null where none waits.
  [[nodiscard]] const Rank* next() const noexcept {
    if (empty()) return nullptr;
    if (entries_.front().overtaken >= max_overtaken_) return &ranks_.front();
    return &*std::ranges::max_element(ranks_, {}, &Rank::shared);
  }

  /// Asks a tree of all waiting requests what match_prefix() and chunks_needed() say, and what they
  /// share with the live sequences: afterwards ranks(). What was found of a request is kept for the
  /// next call, so that this is O(size()), and tokens are compared only of requests that are new,
  /// or that the tree has more or less of than before.
  void rank(const Tree& tree) {
    const detail::TreeCore& core = detail::TreeAccess::core(tree);
    rank_all(tree, [&](detail::NodeIndex n) { return core.topology.node(n).live > 0; });
  }
  /// rank() where only these sequences are said to run. Throws InvalidArgument for any that are of
  /// another tree, with the ranks as they were.
  void rank(const Tree& tree, std::span<const Sequence> running) {
    const detail::TreeCore& core = detail::TreeAccess::core(tree);
    marks_.resize((std::max)(marks_.size(), core.topology.num_indices()));
    const std::uint64_t mark = ++calls_;
    for (std::size_t i = 0; i < running.size(); ++i) {
      if (running[i].tree_id() != core.id) [[unlikely]]
        detail::fail_argument(detail::joined({"running[", i, "]"}), "of another tree",
                              "a sequence of this tree");
      for (detail::NodeIndex n = core.sequences[detail::TreeAccess::index(running[i])].tail;
           n != detail::none && std::exchange(marks_[detail::to_size(n)], mark) != mark;)
        n = core.topology.node(n).parent;
    }
    rank_all(tree, [&](detail::NodeIndex n) { return marks_[detail::to_size(n)] == mark; });
  }
  /// Ranks all, then inserts next() if it fits: its id, and its sequence. Nothing if it does not,
  /// or none waits. O(size()), so a loop that empties the queue is quadratic in it.
  /// \param headroom  chunks that are to stay free or evictable
  [[nodiscard]] std::optional<std::pair<std::uint64_t, Sequence>> admit(Tree& tree,
                                                                        std::size_t headroom = 0) {
    rank(tree);
    const Rank* const first = next();
    const std::size_t available = tree.chunks_available();
    if (first == nullptr || first->chunks > available || available - first->chunks < headroom)
      return std::nullopt;
    const Request& chosen = request(first->id);
    auto sequence = tree.try_insert(chosen.prompt, chosen.options);
    if (!sequence) return std::nullopt;
    const std::uint64_t id = first->id;
    admitted(id);
    return std::pair(id, std::move(*sequence));
  }

 private:
  struct Entry {
    Request request;
    detail::PathMatch match;       // what the tree last had of it
    std::uint32_t generation = 0;  // of the last node of that; 0: nothing is known
    std::size_t overtaken = 0;
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

  /// \param is_running  (node) of a node of a request's path
  template <class IsRunning>
  void rank_all(const Tree& tree, const IsRunning& is_running) {
    const auto& tokens = detail::TreeAccess::tree(tree);
    const detail::TreeCore& core = tokens.core;
    const std::uint64_t publications = core.prefixes.num_publications();
    const bool is_same = tree_ == core.id;
    const bool has_more = !is_same || publications_ != publications;
    for (std::size_t i = 0; i < size(); ++i) {
      Entry& entry = entries_[i];
      Rank& result = ranks_[i];
      const auto& [prompt, options] = entry.request;
      const bool is_kept = is_same && keep_what_is_left(core, entry);
      if (!is_kept) entry.match = {};
      if (!is_kept || has_more) entry.match = tokens.find(prompt, options, entry.match);
      entry.generation = core.topology.node(entry.match.last).generation;
      const detail::MatchResult found = tokens.result_of(entry.match, options);
      result.cached = found.cached;
      result.pending = found.pending;
      result.chunks = tokens.chunks_needed(entry.match, prompt.size(), options);
      detail::NodeIndex n = entry.match.last;
      while (n != detail::root_node && !is_running(n)) n = core.topology.node(n).parent;
      result.shared =
          (std::min)(detail::to_size(core.topology.node(n).end()), found.cached + found.pending);
    }
    tree_ = core.id;
    publications_ = publications;
  }
  /// Leaves of a match what the tree still has; false where nothing is known of that.
  [[nodiscard]] static bool keep_what_is_left(const detail::TreeCore& core, Entry& entry) noexcept {
    detail::PathMatch& match = entry.match;
    const detail::TreeNode* n = &core.topology.node(match.last);
    if (n->generation != entry.generation || n->state != detail::NodeState::published) return false;
    while (n->position >= match.length && match.last != detail::root_node) {
      match.last = n->parent;  // it was split, and its lower half has kept its name
      n = &core.topology.node(match.last);
    }
    match.used = (std::min)(match.length - n->position, n->length);  // its end may be evicted
    match.length = n->position + match.used;
    return true;
  }

  std::vector<Entry> entries_;
  std::vector<Rank> ranks_;           // of the same requests
  std::vector<std::uint64_t> marks_;  // by node of the tree: the call in which a path had it
  std::uint64_t last_id_ = 0, calls_ = 0;
  std::uint64_t tree_ = 0, publications_ = 0;  // of the last call
  std::size_t max_overtaken_;
};

CHUNKATTN_NAMESPACE_END
