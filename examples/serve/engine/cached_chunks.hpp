// The full chunks at the start of prompts that a tree finds, by matching every path that it has.
#pragma once

#include <chunkattn/chunkattn.hpp>
#include <chunkattn/debug/tree.hpp>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "engine.hpp"

namespace serve {

/// Chunks of sequences in name spaces of their own, which no other prompt finds, are left out.
template <class Tree>
std::vector<CachedChunk> cached_chunks_of(const Tree& tree) {
  constexpr std::size_t size = Tree::chunk_size;
  std::vector<CachedChunk> chunks;
  std::map<std::tuple<int, std::uint64_t, std::vector<int>>, int> known;
  std::map<int, std::vector<int>> paths;
  chunkattn::for_each_node(tree, std::numeric_limits<std::int32_t>::max(), [&](const auto& node) {
    std::vector<int> path = node.parent == 0 ? std::vector<int>{} : paths[node.parent];
    path.insert(path.end(), node.first_tokens.begin(), node.first_tokens.end());
    if (node.name_space.adapter == 0) {
      const std::size_t cached = tree.match_prefix(path, {.name_space = node.name_space}).cached;
      int parent = -1;
      for (std::size_t begin = 0; begin + size <= cached; begin += size) {
        const auto first = path.begin() + static_cast<std::ptrdiff_t>(begin);
        CachedChunk chunk{parent, node.name_space.tenant, {first, first + size}};
        const auto [at, is_new] = known.try_emplace({parent, chunk.tenant, chunk.tokens},
                                                    static_cast<int>(chunks.size()));
        if (is_new) chunks.push_back(std::move(chunk));
        parent = at->second;
      }
    }
    paths[node.id] = std::move(path);
  });
  return chunks;
}

}  // namespace serve
