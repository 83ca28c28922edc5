#include "kv_tier_blocks.hpp"

#include <algorithm>
#include <utility>

namespace serve {

namespace {

constexpr Medium all_media[] = {Medium::memory, Medium::files};

Medium medium_of(TierEvent::Medium medium) {
  return medium == TierEvent::Medium::memory ? Medium::memory : Medium::files;
}
unsigned bit_of(Medium medium) {
  return 1u << static_cast<unsigned>(medium);
}

}  // namespace

void TierBlockTable::apply(const TierEvent& event, std::span<const int> tokens,
                           std::vector<BlockEvent>& changes) {
  const Medium medium = medium_of(event.medium);
  switch (event.kind) {
    case TierEvent::Kind::stored:
    case TierEvent::Kind::named: {
      Node* const node = find_or_add(event, tokens);
      if (node == nullptr || event.kind == TierEvent::Kind::named) return;
      node->media |= bit_of(medium);
      return add_stored(*node, medium, changes);
    }
    case TierEvent::Kind::evicted:
      if (const auto found = nodes_.find(event.block); found != nodes_.end())
        evict(found, medium, changes);
      return;
    case TierEvent::Kind::cleared:
      return remove_all(changes);
  }
}

/// Null where what it continues is not known: it was of before forget().
TierBlockTable::Node* TierBlockTable::find_or_add(const TierEvent& event,
                                                  std::span<const int> tokens) {
  if (const auto found = nodes_.find(event.block); found != nodes_.end()) return &found->second;
  Node node;
  node.position = event.position;
  if (event.position > 0) {
    const auto parent = nodes_.find(event.parent);
    if (parent == nodes_.end()) return nullptr;
    ++parent->second.children;
    node.parent = event.parent;
    node.parent_hash = parent->second.hash;
  }
  node.hash = hash_of_block(node.parent_hash, event.name_space.tenant, tokens);
  node.is_published = is_published(event.name_space, with_tenants_);
  node.tokens.assign(tokens.begin(), tokens.end());
  return &nodes_.emplace(event.block, std::move(node)).first->second;
}

void TierBlockTable::evict(Nodes::iterator at, Medium medium, std::vector<BlockEvent>& changes) {
  if ((at->second.media & bit_of(medium)) == 0) return;
  at->second.media &= ~bit_of(medium);
  add_removed(at->second, medium, changes);
  while (at->second.media == 0 && at->second.children == 0) {
    const bool is_first = at->second.position == 0;
    const Key parent = at->second.parent;
    nodes_.erase(at);
    if (is_first) return;
    at = nodes_.find(parent);
    --at->second.children;
  }
}

void TierBlockTable::add_stored(const Node& node, Medium medium, std::vector<BlockEvent>& changes) {
  if (!node.is_published) return;
  const bool goes_on = !changes.empty() && changes.back().kind == BlockEvent::Kind::stored &&
                       changes.back().medium == medium && node.parent_hash != 0 &&
                       changes.back().hashes.back() == node.parent_hash;
  if (!goes_on) {
    changes.push_back(
        {.kind = BlockEvent::Kind::stored, .medium = medium, .hashes = {}, .tokens = {}});
    changes.back().parent = node.parent_hash;
  }
  changes.back().hashes.push_back(node.hash);
  changes.back().tokens.insert(changes.back().tokens.end(), node.tokens.begin(), node.tokens.end());
}

void TierBlockTable::add_removed(const Node& node, Medium medium,
                                 std::vector<BlockEvent>& changes) {
  if (!node.is_published) return;
  if (changes.empty() || changes.back().kind != BlockEvent::Kind::removed ||
      changes.back().medium != medium)
    changes.push_back(
        {.kind = BlockEvent::Kind::removed, .medium = medium, .hashes = {}, .tokens = {}});
  changes.back().hashes.push_back(node.hash);
}

/// In the format there is no other word for one medium.
void TierBlockTable::remove_all(std::vector<BlockEvent>& changes) {
  for (const Medium medium : all_media)
    for (const auto& [key, node] : nodes_)
      if ((node.media & bit_of(medium)) != 0) add_removed(node, medium, changes);
  nodes_.clear();
}

std::vector<BlockEvent> TierBlockTable::all() const {
  std::vector<const Node*> order;
  for (const auto& [key, node] : nodes_) order.push_back(&node);
  std::sort(order.begin(), order.end(), [](const Node* a, const Node* b) {
    return std::pair(a->position, a->hash) < std::pair(b->position, b->hash);
  });
  std::vector<BlockEvent> stored;
  for (const Medium medium : all_media)
    for (const Node* const node : order)
      if ((node->media & bit_of(medium)) != 0) add_stored(*node, medium, stored);
  return stored;
}

}  // namespace serve
