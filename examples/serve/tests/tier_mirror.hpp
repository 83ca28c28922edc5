// TierMirror: what subscribers of tiers' events know, each of which must be able to follow those
// before it.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.hpp"

namespace serve {

class TierMirror {
 public:
  using Key = chunkattn::TierStore::Key;
  using Medium = TierEvent::Medium;
  using Kind = TierEvent::Kind;

  explicit TierMirror(std::size_t block_tokens) : block_(block_tokens) {}

  void apply(const TierEvent& event, std::span<const int> tokens) {
    const std::string name = event.block.text();
    switch (event.kind) {
      case Kind::cleared:
        nodes_.clear();
        return;
      case Kind::evicted:
        CHECK(tokens.empty());
        REQUIRE(has(event.medium, event.block));
        nodes_.at(name).media &= ~bit(event.medium);
        return prune(name);
      case Kind::named:
      case Kind::stored:
        break;
    }
    REQUIRE(tokens.size() == block_);
    const bool is_stored = event.kind == Kind::stored;
    if (const auto found = nodes_.find(name); found != nodes_.end()) {
      REQUIRE(is_stored);
      REQUIRE_FALSE(has(event.medium, event.block));
      CHECK(std::ranges::equal(found->second.tokens, tokens));
      CHECK(found->second.space == event.name_space);
    } else {
      Node node{"", event.name_space, event.position, {tokens.begin(), tokens.end()}};
      if (event.position > 0) {
        node.parent = event.parent.text();
        REQUIRE(nodes_.contains(node.parent));
        Node& parent = nodes_.at(node.parent);
        REQUIRE(parent.position + static_cast<std::int32_t>(block_) == event.position);
        ++parent.children;
      }
      nodes_.emplace(name, std::move(node));
    }
    if (is_stored) nodes_.at(name).media |= bit(event.medium);
  }

  [[nodiscard]] bool has(Medium medium, const Key& key) const {
    const auto found = nodes_.find(key.text());
    return found != nodes_.end() && (found->second.media & bit(medium)) != 0;
  }
  [[nodiscard]] std::size_t num_blocks(Medium medium) const {
    return static_cast<std::size_t>(std::count_if(nodes_.begin(), nodes_.end(), [&](auto& node) {
      return (node.second.media & bit(medium)) != 0;
    }));
  }
  /// Blocks that are known, also those that are named only.
  [[nodiscard]] std::size_t num_known() const { return nodes_.size(); }
  /// How many leading tokens of a prompt a load would bring to, where the tree has `cached`.
  /// \param public_length  of all prompts of this public part
  [[nodiscard]] std::size_t match(std::span<const int> prompt, std::size_t cached,
                                  const chunkattn::Namespace& space = {},
                                  std::size_t public_length = 0) const {
    std::string last;
    public_length = std::min(public_length, prompt.size());
    for (std::size_t end = block_; end <= prompt.size(); end += block_) {
      const auto own = end <= public_length
                           ? chunkattn::Namespace{.adapter = space.adapter, .is_public = true}
                           : space;
      const auto found = std::find_if(nodes_.begin(), nodes_.end(), [&](const auto& one) {
        const Node& node = one.second;
        return node.parent == last && node.space == own &&
               node.position + static_cast<std::int32_t>(block_) ==
                   static_cast<std::int32_t>(end) &&
               std::ranges::equal(node.tokens, prompt.subspan(end - block_, block_));
      });
      if (found == nodes_.end() || (end > cached && found->second.media == 0)) break;
      if (end > cached) cached = end;
      last = found->first;
    }
    return cached;
  }

 private:
  struct Node {
    std::string parent;
    chunkattn::Namespace space{};
    std::int32_t position = 0;
    std::vector<int> tokens;
    unsigned media = 0;
    std::size_t children = 0;
  };
  [[nodiscard]] static unsigned bit(Medium medium) { return 1u << static_cast<unsigned>(medium); }
  void prune(std::string name) {
    while (!name.empty()) {
      const auto at = nodes_.find(name);
      if (at->second.media != 0 || at->second.children > 0) return;
      name = at->second.parent;
      nodes_.erase(at);
      if (!name.empty()) --nodes_.at(name).children;
    }
  }

  std::size_t block_;
  std::map<std::string, Node> nodes_;
};

}  // namespace serve
