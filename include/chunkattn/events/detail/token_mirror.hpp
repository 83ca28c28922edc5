// TokenMirror: what prompts can find in a tree, rebuilt from its events alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../../detail/support/array.hpp"
#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../../tree_options.hpp"
#include "../cache_event.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Spans by their numbers, and where others leave them. A span is found by its
/// parent, the position, its namespace and its first tokens.
///
/// Events may come from anywhere: whatever is taken over leaves a tree in which every span has its
/// parent, and no two extend one alike. All spans begin and end at whole units.
template <class Token>
class TokenMirror {
 public:
  /// \param unit  tokens that are found or not as one: 1, or the tree's chunk size
  explicit TokenMirror(std::int32_t unit) : unit_(unit) {}
  /// What a snapshot says. Throws InvalidArgument for one that no tree of this chunk size gives.
  template <class Snapshot>
  [[nodiscard]] static TokenMirror of(const Snapshot& snapshot, std::int32_t chunk_size) {
    check_argument(snapshot.unit == 1 || snapshot.unit == chunk_size, "snapshot.unit",
                   snapshot.unit, {"1, or the chunk size, ", chunk_size});
    TokenMirror mirror(snapshot.unit);
    for (const std::int32_t reach : snapshot.reach)
      check_argument(reach >= 0, "snapshot.reach", reach, "numbers of tokens");
    mirror.reach_ = snapshot.reach;
    std::span<const Token> rest(snapshot.tokens);
    for (const CacheEvent& event : snapshot.spans) {
      check_argument(event.kind == CacheEvent::Kind::stored, "snapshot.spans",
                     "an event of another kind", "stored ones");
      const std::size_t length = to_size((std::max)(event.length, 0));  // store() refuses less
      check_argument(length <= rest.size(), "snapshot.tokens.size()", snapshot.tokens.size(),
                     "as many as its spans have");
      mirror.store(event, rest.first(length));
      rest = rest.subspan(length);
    }
    check_argument(rest.empty(), "snapshot.tokens.size()", snapshot.tokens.size(),
                   {"as many as its spans have, ", snapshot.tokens.size() - rest.size()});
    for (const CacheEvent& event : snapshot.kept) {
      check_argument(event.kind == CacheEvent::Kind::kept, "snapshot.kept",
                     "an event of another kind", "kept ones");
      mirror.keep(event);
    }
    return mirror;
  }

  /// Throws InvalidArgument for an event that cannot follow those before it; nothing has changed
  /// then.
  void apply(const CacheEvent& event, std::span<const Token> tokens) {
    switch (event.kind) {
      case CacheEvent::Kind::stored:
        return store(event, tokens);
      case CacheEvent::Kind::evicted:
        return evict(event);
      case CacheEvent::Kind::cleared:
        return clear();
      case CacheEvent::Kind::kept:
      case CacheEvent::Kind::lost:
        return keep(event);
    }
    fail_argument("event.kind", static_cast<int>(event.kind),
                  "stored, evicted, cleared, kept or lost");
  }
  void clear() noexcept {
    spans_.clear();
    children_.clear();
    num_tokens_ = 0;
  }

  /// Leading tokens of a prompt that are stored for this namespace, in whole units, and the span of
  /// the last of them.
  struct Match {
    std::size_t length = 0;
    std::uint64_t last = 0;
  };
  [[nodiscard]] Match match(std::span<const Token> prompt, const Namespace& name_space,
                            std::size_t public_length) const {
    std::size_t public_end = (std::min)(public_length, prompt.size());
    public_end -= public_end % to_size(unit_);
    Match match;
    while (prompt.size() - match.length >= to_size(unit_)) {
      const bool is_public = match.length < public_end;
      const Namespace space =
          is_public ? Namespace{.adapter = name_space.adapter, .is_public = true} : name_space;
      const auto rest = prompt.subspan(match.length);
      const Span* const next = find_child(match.last, match.length, space, rest);
      if (next == nullptr) break;
      match.last = next->number;
      match.length +=
          common(*next, rest.first((is_public ? public_end : prompt.size()) - match.length));
    }
    return match;
  }
  /// The last position up to `limit` of a path to a span before which all components keep what they
  /// reach back to.
  [[nodiscard]] std::size_t resume_point(std::uint64_t last, std::size_t limit) const {
    auto position = static_cast<std::int32_t>(limit);
    for (std::int32_t before = -1; before != position;) {
      before = position;
      for (std::size_t group = 0; group < reach_.size(); ++group)
        position = resume_point(group, last, position);
    }
    return to_size(position);
  }
  [[nodiscard]] std::size_t num_tokens() const noexcept { return num_tokens_; }

 private:
  struct Span {
    std::uint64_t number = 0;
    std::uint64_t parent = 0;
    Namespace name_space{};
    std::int32_t position = 0;
    std::vector<Token> tokens;
    std::vector<std::int32_t> left_at{};    // where other spans extend it, ascending
    std::vector<std::vector<bool>> kept{};  // by component: of the first tokens, at most
    [[nodiscard]] std::int32_t end() const noexcept {
      return position + static_cast<std::int32_t>(tokens.size());
    }
  };

  void store(const CacheEvent& event, std::span<const Token> tokens) {
    check_argument(event.length > 0 && tokens.size() == to_size(event.length), "tokens.size()",
                   tokens.size(), {"event.length = ", event.length, ", at least 1"});
    check_argument(event.length % unit_ == 0, "event.length", event.length,
                   {"whole units of ", unit_, " tokens"});
    check_argument(event.position >= 0 && event.position % unit_ == 0 &&
                       event.length <= max_length - event.position,
                   "event.position", event.position,
                   {"0 to 2^30 - event.length, in units of ", unit_});
    check_argument(event.span != 0, "event.span", 0, "the number of a span, at least 1");
    const auto found = spans_.find(event.parent);
    Span* const parent = found == spans_.end() ? nullptr : &found->second;
    if (event.parent == 0)
      check_argument(event.position == 0, "event.position", event.position,
                     "0: no span stands before it");
    else
      check_argument(parent != nullptr && extends(*parent, event), "event.parent", event.parent,
                     "a span that has the token before event.position");
    check_argument(!extends_alike(parent, event, tokens), "tokens", "as of another span",
                   "others than those that follow at event.position already");
    if (event.parent == event.span) {
      check_argument(event.position == parent->end(), "event.position", event.position,
                     {parent->end(), ", the end of its span"});
      parent->tokens.insert(parent->tokens.end(), tokens.begin(), tokens.end());
    } else {
      check_argument(!spans_.contains(event.span), "event.span", event.span,
                     "a new span, or event.parent, which it extends");
      add(parent, {event.span, event.parent, event.name_space, event.position,
                   std::vector<Token>(tokens.begin(), tokens.end())});
    }
    num_tokens_ += tokens.size();
  }
  /// Whether the event's first token stands after one of the span's, and may by its namespace.
  [[nodiscard]] static bool extends(const Span& span, const CacheEvent& event) noexcept {
    const Namespace &before = span.name_space, &own = event.name_space;
    const bool may_leave =
        event.span != span.number && before.is_public && before.adapter == own.adapter;
    return event.position > span.position && event.position <= span.end() &&
           (own == before || may_leave);
  }
  /// Whether what the event stores would be found as something else.
  [[nodiscard]] bool extends_alike(const Span* parent, const CacheEvent& event,
                                   std::span<const Token> tokens) const {
    if (parent != nullptr && event.position < parent->end() &&
        event.name_space == parent->name_space &&
        std::equal(tokens.begin(), tokens.begin() + unit_,
                   parent->tokens.begin() + (event.position - parent->position)))
      return true;
    return find_child(event.parent, to_size(event.position), event.name_space, tokens) != nullptr;
  }
  void add(Span* parent, Span&& span) {
    const std::uint64_t number = span.number;
    const std::int32_t position = span.position;
    const auto entry =
        children_.emplace(key_of(span.parent, position, span.name_space, span.tokens), number);
    try_or_undo([&] { spans_.emplace(number, std::move(span)); }, [&] { children_.erase(entry); });
    if (parent == nullptr) return;
    try_or_undo([&] { parent->left_at.insert(slot_of(*parent, position), position); },
                [&] {
                  spans_.erase(number);
                  children_.erase(entry);
                });
  }
  void evict(const CacheEvent& event) {
    const auto found = spans_.find(event.span);
    check_argument(found != spans_.end(), "event.span", event.span, "a span that is stored");
    Span& span = found->second;
    check_argument(
        event.length > 0 && event.length % unit_ == 0 && event.position >= span.position &&
            std::int64_t{event.position} + event.length == span.end(),
        "event.position", event.position,
        {"the last event.length = ", event.length, " tokens of a span that ends at ", span.end()});
    check_argument(span.left_at.empty() || span.left_at.back() <= event.position, "event.position",
                   event.position, "tokens that no other span extends");
    num_tokens_ -= to_size(event.length);
    if (event.position > span.position) {
      const std::size_t left = to_size(event.position - span.position);
      for (std::vector<bool>& kept : span.kept) kept.resize((std::min)(kept.size(), left));
      return span.tokens.resize(left);
    }
    if (const auto parent = spans_.find(span.parent); parent != spans_.end())
      parent->second.left_at.erase(slot_of(parent->second, span.position) - 1);
    const auto [begin, end] =
        children_.equal_range(key_of(span.parent, span.position, span.name_space, span.tokens));
    children_.erase(
        std::find_if(begin, end, [&](const auto& child) { return child.second == event.span; }));
    spans_.erase(found);
  }
  void keep(const CacheEvent& event) {
    const auto found = spans_.find(event.span);
    check_argument(found != spans_.end(), "event.span", event.span, "a span that is stored");
    Span& span = found->second;
    check_argument(to_size(event.group) < reach_.size(), "event.group", event.group,
                   {"one of the snapshot's ", reach_.size()});
    const std::int64_t first = std::int64_t{event.position} - span.position;
    check_argument(
        event.length > 0 && first >= 0 && first + event.length <= std::ssize(span.tokens),
        "event.position", event.position,
        {"event.length = ", event.length, ", at least 1, tokens of a span that has [",
         span.position, ", ", span.end(), ")"});
    span.kept.resize(reach_.size());
    std::vector<bool>& kept = span.kept[to_size(event.group)];
    if (kept.size() < to_size(first + event.length)) kept.resize(to_size(first + event.length));
    std::fill_n(kept.begin() + first, event.length, event.kind == CacheEvent::Kind::kept);
  }
  /// The same of one component: goes back until it has kept as many in a row as it reaches.
  [[nodiscard]] std::int32_t resume_point(std::size_t group, std::uint64_t last,
                                          std::int32_t position) const {
    const Span* span = nullptr;
    for (std::int32_t at = position; at > 0 && position - at < reach_[group];) {
      while (span == nullptr || span->position >= at) {
        span = &spans_.at(last);
        last = span->parent;
      }
      --at;
      const std::size_t token = to_size(at - span->position);
      if (span->kept.empty() || token >= span->kept[group].size() || !span->kept[group][token])
        position = at;
    }
    return position;
  }
  /// After the spans that leave this one at `position`, or before.
  [[nodiscard]] static auto slot_of(Span& span, std::int32_t position) noexcept {
    return std::ranges::upper_bound(span.left_at, position);
  }

  /// What extends with these tokens the first `length` of a path that ends in `last`: the
  /// same span, or another.
  [[nodiscard]] const Span* find_child(std::uint64_t last, std::size_t length,
                                       const Namespace& space,
                                       std::span<const Token> tokens) const {
    const auto [begin, end] =
        children_.equal_range(key_of(last, static_cast<std::int32_t>(length), space, tokens));
    for (auto child = begin; child != end; ++child) {
      const Span& span = spans_.at(child->second);
      if (span.parent == last && to_size(span.position) == length && span.name_space == space &&
          std::equal(tokens.begin(), tokens.begin() + unit_, span.tokens.begin()))
        return &span;
    }
    return nullptr;
  }
  [[nodiscard]] std::size_t common(const Span& span, std::span<const Token> tokens) const {
    const std::size_t limit = (std::min)(span.tokens.size(), tokens.size());
    const auto same = static_cast<std::size_t>(
        std::mismatch(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(limit),
                      span.tokens.begin())
            .first -
        tokens.begin());
    return same - same % to_size(unit_);
  }
  [[nodiscard]] std::size_t key_of(std::uint64_t parent, std::int32_t position,
                                   const Namespace& space, std::span<const Token> tokens) const {
    std::uint64_t hash = mix(mix(parent, static_cast<std::uint64_t>(position)), space.tenant);
    hash = mix(hash + (space.is_public ? 2 : 1), space.adapter);
    for (const Token& token : tokens.first(to_size(unit_)))
      hash = mix(hash, std::hash<Token>{}(token));
    return hash ^ (hash >> 32);
  }
  [[nodiscard]] static std::uint64_t mix(std::uint64_t hash, std::uint64_t value) noexcept {
    hash = (hash + 1) * 0x9e3779b97f4a7c15u ^ value;
    return hash ^ (hash >> 29);
  }
  /// Undoes what came before if `call` throws.
  template <class F, class Undo>
  static void try_or_undo(const F& call, const Undo& undo) {
    struct Guard {
      const Undo& undo;
      bool done = false;
      ~Guard() {
        if (!done) undo();
      }
    } guard{undo};
    call();
    guard.done = true;
  }

  std::int32_t unit_;
  std::vector<std::int32_t> reach_;  // of each component
  std::unordered_map<std::uint64_t, Span> spans_;
  std::unordered_multimap<std::size_t, std::uint64_t> children_;
  std::size_t num_tokens_ = 0;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
