// The tree for the page that draws it.
#pragma once

#include <string>

#include "../text/tokenizer.hpp"
#include "service.hpp"

namespace serve {

/// The text of /tree: counts, and nodes with their parents first, 1,000 at most.
/// \param texts  whether nodes come with how their text begins
[[nodiscard]] std::string tree_json(const ServiceCounters& counters, const TreeSnapshot& tree,
                                    const Tokenizer& tokenizer, bool texts);

/// Chunks that are cached, each with the index of the one before it or -1: [[-1, [token, ...]],
/// ...].
[[nodiscard]] std::string chunks_json(const std::vector<CachedChunk>& chunks,
                                      std::size_t chunk_size);
/// What a router asks of a worker: who waits and runs, and how full K/V is (SGLang's /v1/loads).
[[nodiscard]] std::string loads_json(const ServiceCounters& counters, const TreeSnapshot& tree,
                                     std::size_t max_requests);

}  // namespace serve
