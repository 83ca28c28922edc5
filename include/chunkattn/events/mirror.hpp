// CacheMirror: what prompts can find in a tree, rebuilt elsewhere from its events, as a router
// does.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "../detail/support/config.hpp"
#include "../tree_options.hpp"
#include "cache_events.hpp"
#include "detail/token_mirror.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// What prompts can find in a tree of this type, rebuilt from a snapshot and events, or from the
/// events of a stream that began with an empty tree. Not for several threads at once.
template <class Tree>
class CacheMirror {
  using Token = typename Tree::token_type;

 public:
  /// What apply() made of an event.
  enum class Applied : std::uint8_t {
    changed,   ///< it was the next one
    repeated,  ///< it was there already, and is ignored
    /// Others are missing before it, or it is of another stream: apply() those first, or load() a
    /// snapshot.
    missed
  };

  /// \param sharing  that of the tree
  explicit CacheMirror(TreeOptions::Sharing sharing = TreeOptions::Sharing::token)
      : mirror_(sharing == TreeOptions::Sharing::token ? 1 : Tree::chunk_size) {}

  /// Takes over one event. Throws InvalidArgument, and is as before, for one that cannot follow
  /// those before it: it was damaged.
  [[nodiscard]] Applied apply(const CacheEvent& event, std::span<const Token> tokens) {
    if (stream_ && event.stream != *stream_) return Applied::missed;
    if (event.number <= number_) return Applied::repeated;
    if (event.number > number_ + 1) return Applied::missed;
    mirror_.apply(event, tokens);
    stream_ = event.stream;
    number_ = event.number;
    return Applied::changed;
  }
  /// Becomes what the snapshot says, whatever came before. Throws InvalidArgument, and is as
  /// before, for one that is damaged.
  void load(const CacheSnapshot<Token>& snapshot) {
    mirror_ = detail::TokenMirror<Token>::of(snapshot, Tree::chunk_size);
    stream_ = snapshot.stream;
    number_ = snapshot.number;
  }
  /// CacheEvent::stream of the events that it follows; nothing before the first one.
  [[nodiscard]] std::optional<std::uint64_t> stream() const noexcept { return stream_; }
  /// The number of the last event that it knows of: CacheEvents::last_event(), where it has missed
  /// none.
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
  /// Tokens that it holds, each once.
  [[nodiscard]] std::size_t num_tokens() const noexcept { return mirror_.num_tokens(); }
  /// How many tokens of a prompt the tree would find with their K/V: PrefixTree::match_prefix()
  /// without what is pending, and under Sharing::chunk in whole chunks.
  [[nodiscard]] std::size_t match_prefix(std::span<const Token> prompt,
                                         const InsertOptions& options = {}) const {
    return (std::min)(match(prompt, options).length, options.max_reuse);
  }
  /// Where a prompt would be resumed: not after what match_prefix() says, and where all components
  /// that the events follow have what their layers read, as their find() says.
  [[nodiscard]] std::size_t find(std::span<const Token> prompt,
                                 const InsertOptions& options = {}) const {
    const auto found = match(prompt, options);
    return mirror_.resume_point(found.last, (std::min)(found.length, options.max_reuse));
  }

 private:
  [[nodiscard]] auto match(std::span<const Token> prompt, const InsertOptions& options) const {
    return mirror_.match(prompt, options.name_space, options.public_length);
  }

  detail::TokenMirror<Token> mirror_;
  std::optional<std::uint64_t> stream_;
  std::uint64_t number_ = 0;
};

CHUNKATTN_NAMESPACE_END
