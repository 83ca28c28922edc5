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

}  // namespace serve
