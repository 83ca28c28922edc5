// The tree for the page that draws it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "../text/tokenizer.hpp"
#include "service.hpp"

namespace serve {

/// What of the tree a client may see.
struct TreeRights {
  /// Whether nodes of a tenant come with how their text begins.
  std::function<bool(std::uint64_t tenant)> texts = [](std::uint64_t) { return false; };
  /// Whether there are nodes, and how much of prompts was cached: where they end, and how many
  /// there are, reveals a guess.
  bool matches = true;
  bool explains = false;     ///< whether requests may have explain_cache
  std::string failure = {};  ///< why the engine can do no more; empty while it can
};
/// The text of /tree: counts, and nodes with their parents first, 1,000 at most.
[[nodiscard]] std::string tree_json(const ServiceCounters& counters, const TreeSnapshot& tree,
                                    const Tokenizer& tokenizer, const TreeRights& rights);

/// Chunks that are cached, each with the index of the one before it or -1: [[-1, [token, ...]],
/// ...].
/// \param salted  whether chunks of tenants with a salt come with their tokens
[[nodiscard]] std::string chunks_json(const std::vector<CachedChunk>& chunks,
                                      std::size_t chunk_size, bool salted);
/// What a router asks of a worker: who waits and runs, and how full K/V is (SGLang's /v1/loads).
/// \param matches  whether it says how much of prompts was cached
[[nodiscard]] std::string loads_json(const ServiceCounters& counters, const TreeSnapshot& tree,
                                     std::size_t max_requests, bool matches);

}  // namespace serve
