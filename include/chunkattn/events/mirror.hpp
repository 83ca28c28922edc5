// CacheMirror: what prompts can find in a tree, rebuilt elsewhere from its events, as a router
// does. CacheEvent and PrefixTree::set_event_sink() are the core's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../detail/support/check.hpp"
#include "../detail/support/config.hpp"
#include "../detail/tree/core.hpp"
#include "../detail/tree/depth_first.hpp"
#include "../tree_options.hpp"
#include "detail/token_mirror.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// What prompts can find: to begin with before events come, or after some were missed.
template <class Token>
struct CacheSnapshot {
  std::uint64_t number = 0;       ///< of the last event before it
  std::int32_t unit = 1;          ///< tokens that are found or not as one
  std::vector<CacheEvent> spans;  ///< all of them `stored`, each after its parent
  std::vector<Token> tokens;      ///< CacheEvent::length for each, one after the other
};

/// What can be found in a PrefixTree after its last event. Linear in the tree.
/// \throws InvalidArgument without an event sink
template <class Tree>
[[nodiscard]] CacheSnapshot<typename Tree::token_type> take_snapshot(const Tree& tree) {
  const auto& tokens = detail::TreeAccess::tree(tree);
  const detail::CacheNews& news = tokens.core.prefixes.news;
  detail::check_argument(news.any(), "event sink", "not set",
                         "set_event_sink() before take_snapshot()");
  CacheSnapshot<typename Tree::token_type> all;
  detail::for_each_below_root(tokens.core, [&](detail::NodeIndex n, int) {
    news.for_each_told(tokens.core.topology.node(n), [&](const CacheEvent& event) {
      const auto stored = tokens.tokens_of(event);
      all.spans.push_back(event);
      all.tokens.insert(all.tokens.end(), stored.begin(), stored.end());
    });
  });
  all.number = news.last_event();
  all.unit = tokens.core.prefixes.unit();
  return all;
}

/// What prompts can find in a tree of this type, rebuilt from a snapshot and events, or from the
/// events of a tree that had a sink from its beginning. Not for several threads at once.
template <class Tree>
class CacheMirror {
  using Token = typename Tree::token_type;

 public:
  /// What apply() made of an event.
  enum class Applied : std::uint8_t {
    changed,   ///< it was the next one
    repeated,  ///< it was there already, and is ignored
    missed     ///< others are missing before it: apply() them first, or load() a snapshot
  };

  /// \param sharing  that of the tree
  explicit CacheMirror(TreeOptions::Sharing sharing = TreeOptions::Sharing::token)
      : mirror_(sharing == TreeOptions::Sharing::token ? 1 : Tree::chunk_size) {}

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
  void load(const CacheSnapshot<Token>& snapshot) {
    mirror_ = detail::TokenMirror<Token>::of(snapshot, Tree::chunk_size);
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

CHUNKATTN_NAMESPACE_END
