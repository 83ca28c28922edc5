// Blocks in the lower tiers of a tree, in the terms of kv_blocks.hpp. A tier may lose a block and
// keep what extends it: each is an element of the set by itself.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <chunkattn/tiers/tier_store.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "engine/engine.hpp"
#include "kv_blocks.hpp"

namespace serve {

class TierBlockTable {
 public:
  /// \param with_tenants  whether blocks of tenants with a salt count, too
  explicit TierBlockTable(bool with_tenants) : with_tenants_(with_tenants) {}

  /// Appends what the event changes to `changes`.
  /// \pre the events are those of one tree's tiers, in order and without gaps
  void apply(const TierEvent& event, std::span<const int> tokens, std::vector<BlockEvent>& changes);
  /// As if all blocks had been removed. What follows begins with TierEvent::cleared.
  void forget() { nodes_.clear(); }
  /// All blocks, as if they were stored now. Where a block's parent is in the same medium, it
  /// stands before it.
  [[nodiscard]] std::vector<BlockEvent> all() const;

 private:
  using Key = chunkattn::TierStore::Key;
  struct KeyHash {
    std::size_t operator()(const Key& key) const noexcept {
      return static_cast<std::size_t>(key.high ^ key.low);
    }
  };
  struct Node {
    std::uint64_t hash = 0, parent_hash = 0;
    Key parent{};
    std::int32_t position = 0;
    bool is_published = false;
    unsigned media = 0;  ///< a bit for each that has it
    std::size_t children = 0;
    std::vector<int> tokens;
  };
  using Nodes = std::unordered_map<Key, Node, KeyHash>;

  Node* find_or_add(const TierEvent& event, std::span<const int> tokens);
  void evict(Nodes::iterator at, Medium medium, std::vector<BlockEvent>& changes);
  static void add_stored(const Node& node, Medium medium, std::vector<BlockEvent>& changes);
  static void add_removed(const Node& node, Medium medium, std::vector<BlockEvent>& changes);
  void remove_all(std::vector<BlockEvent>& changes);

  const bool with_tenants_;
  Nodes nodes_;
};

}  // namespace serve
