// TierMirror: what tiers hold, rebuilt from their events alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/support/to_size.hpp"
#include "../../tree_options.hpp"
#include "../tier_store.hpp"
#include "news.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// Blocks by their keys, and by what they continue and their tokens.
template <class Token>
class TierMirror {
 public:
  using Key = TierStore::Key;

  /// \param unit  tokens that are public or not as one
  /// \throws InvalidArgument unless both are at least 1
  TierMirror(std::int32_t block_tokens, std::int32_t unit) : block_(block_tokens), unit_(unit) {
    check_argument(block_tokens >= 1, "block_tokens", block_tokens, "at least 1");
  }
  [[nodiscard]] TierMirror empty_one() const { return TierMirror(block_, unit_); }

  template <class Event>
  void apply(const Event& event, std::span<const Token> tokens) {
    switch (event.kind) {
      case Event::Kind::stored:
      case Event::Kind::named:
        return store(event, tokens);
      case Event::Kind::evicted:
        return evict(event);
      case Event::Kind::cleared:
        nodes_.clear();
        children_.clear();
        counts_.clear();
        return;
    }
    fail_argument("event.kind", static_cast<int>(event.kind), "stored, evicted, cleared or named");
  }
  template <class Event>
  void apply_all(const std::vector<Event>& events, std::span<const Token> tokens) {
    check_argument(tokens.size() == events.size() * to_size(block_), "snapshot.tokens.size()",
                   tokens.size(), {block_, " for each of ", events.size(), " events"});
    for (std::size_t i = 0; i < events.size(); ++i)
      apply(events[i], tokens.subspan(i * to_size(block_), to_size(block_)));
  }

  [[nodiscard]] std::size_t num_blocks(std::size_t tier) const {
    return tier < counts_.size() ? counts_[tier] : 0;
  }
  [[nodiscard]] bool has(std::size_t tier, const Key& key) const {
    const auto found = nodes_.find(key);
    return found != nodes_.end() && tier < TierNews::most_tiers &&
           (found->second.tiers >> tier & 1) != 0;
  }
  [[nodiscard]] std::size_t match(std::span<const Token> prompt, std::size_t cached,
                                  const Namespace& name_space, std::size_t public_length) const {
    std::size_t public_end = std::min(public_length, prompt.size());
    public_end -= public_end % to_size(unit_);
    const std::size_t size = to_size(block_);
    Key last{};
    for (std::size_t end = size; end <= prompt.size(); end += size) {
      const bool is_public = end <= public_end;
      const Namespace space =
          is_public ? Namespace{.adapter = name_space.adapter, .is_public = true} : name_space;
      const auto child =
          find_child(last, space, is_public ? 0 : public_end, prompt.subspan(end - size, size));
      if (child == nodes_.end() || (end > cached && child->second.tiers == 0)) break;
      if (end > cached) cached = end;
      last = child->first;
    }
    return cached;
  }

 private:
  struct Node {
    Key parent{};
    Namespace name_space{};
    std::int32_t position = 0;
    std::size_t public_length = 0;
    std::vector<Token> tokens;
    std::uint64_t tiers = 0;
    std::size_t children = 0;
  };
  using Nodes = std::unordered_map<Key, Node, TierKeyHash>;

  template <class Event>
  void store(const Event& event, std::span<const Token> tokens) {
    check_argument(tokens.size() == to_size(block_), "tokens.size()", tokens.size(),
                   {block_, ", as many as a block has"});
    check_argument(event.position >= 0 && event.position % block_ == 0, "event.position",
                   event.position, {"a multiple of ", block_});
    check_argument(event.tier < TierNews::most_tiers, "event.tier", event.tier, "below 64");
    const auto parent = nodes_.find(event.parent);
    if (event.position > 0)
      check_argument(parent != nodes_.end() && parent->second.position == event.position - block_,
                     "event.parent", event.parent.text(), "the block before it, told of before");
    auto found = nodes_.find(event.block);
    const bool is_stored = event.kind == Event::Kind::stored;
    if (found != nodes_.end())
      check_argument(is_stored && !has(event.tier, event.block), "event.block", event.block.text(),
                     "one that this tier has not");
    else
      found = add(event, tokens);
    if (!is_stored) return;
    if (counts_.size() <= event.tier) counts_.resize(event.tier + 1);
    ++counts_[event.tier];
    found->second.tiers |= std::uint64_t{1} << event.tier;
  }
  template <class Event>
  typename Nodes::iterator add(const Event& event, std::span<const Token> tokens) {
    Node node{event.parent,
              event.name_space,
              event.position,
              to_size(event.public_length),
              std::vector<Token>(tokens.begin(), tokens.end()),
              0,
              0};
    if (counts_.size() <= event.tier) counts_.resize(event.tier + 1);
    const auto entry = children_.emplace(
        hash(event.position > 0 ? event.parent : Key{}, event.name_space, tokens), event.block);
    struct Guard {
      TierMirror& mirror;
      decltype(children_.begin()) entry;
      bool done = false;
      ~Guard() {
        if (!done) mirror.children_.erase(entry);
      }
    } guard{*this, entry};
    const auto made = nodes_.emplace(event.block, std::move(node)).first;
    guard.done = true;
    if (event.position > 0) ++nodes_.find(event.parent)->second.children;
    return made;
  }
  template <class Event>
  void evict(const Event& event) {
    check_argument(event.tier < TierNews::most_tiers && has(event.tier, event.block), "event.block",
                   event.block.text(), "one that this tier has");
    --counts_[event.tier];
    auto at = nodes_.find(event.block);
    at->second.tiers &= ~(std::uint64_t{1} << event.tier);
    while (at->second.tiers == 0 && at->second.children == 0) {
      const bool is_first = at->second.position == 0;
      const Key parent = is_first ? Key{} : at->second.parent;
      const auto [begin, end] =
          children_.equal_range(hash(parent, at->second.name_space, at->second.tokens));
      children_.erase(
          std::find_if(begin, end, [&](const auto& child) { return child.second == at->first; }));
      nodes_.erase(at);
      if (is_first) return;
      at = nodes_.find(parent);
      --at->second.children;
    }
  }

  [[nodiscard]] typename Nodes::const_iterator find_child(const Key& parent, const Namespace& space,
                                                          std::size_t public_length,
                                                          std::span<const Token> tokens) const {
    const auto [begin, end] = children_.equal_range(hash(parent, space, tokens));
    for (auto child = begin; child != end; ++child) {
      const auto found = nodes_.find(child->second);
      const Node& node = found->second;
      const bool is_first = node.position == 0;
      if ((is_first ? parent == Key{} : node.parent == parent) && node.name_space == space &&
          node.public_length == public_length &&
          std::equal(tokens.begin(), tokens.end(), node.tokens.begin()))
        return found;
    }
    return nodes_.end();
  }
  [[nodiscard]] static std::size_t hash(const Key& parent, const Namespace& space,
                                        std::span<const Token> tokens) {
    std::uint64_t value = parent.high ^ (parent.low * 0x9e3779b97f4a7c15u);
    const auto add = [&](std::uint64_t word) {
      value = (value + 1) * 0x9e3779b97f4a7c15u ^ word;
      value ^= value >> 29;
    };
    add(space.tenant);
    add(space.adapter + (space.is_public ? 1 : 0));
    for (const Token& token : tokens) add(std::hash<Token>{}(token));
    return static_cast<std::size_t>(value);
  }

  std::int32_t block_, unit_;
  Nodes nodes_;
  std::unordered_multimap<std::size_t, Key> children_;
  std::vector<std::size_t> counts_;  // by tier
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
