// Random trees of drafts, as their parents.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "random.hpp"

namespace test {

using Tokens = std::vector<int>;
using Parents = std::vector<std::int32_t>;

/// Parents of `count` drafts: a chain, a star, a beam of branches, or at random.
inline Parents random_parents(Random& random, int count) {
  Parents parents;
  const int kind = random.uniform(0, 3), width = random.uniform(2, 4);
  for (int i = 0; i < count; ++i)
    parents.push_back(kind == 0   ? i - 1
                      : kind == 1 ? -1
                      : kind == 2 ? std::max(-1, i - width)
                                  : random.uniform(-1, i - 1));
  return parents;
}

/// The drafts from the path down to `leaf`; none for -1.
inline std::vector<std::size_t> branch_of(const Parents& parents, std::int32_t leaf) {
  std::vector<std::size_t> branch;
  for (; leaf >= 0; leaf = parents[branch.back()]) branch.push_back(static_cast<std::size_t>(leaf));
  std::reverse(branch.begin(), branch.end());
  return branch;
}
inline Tokens branch_tokens(const Parents& parents, const Tokens& drafts, std::int32_t leaf) {
  Tokens tokens;
  for (const std::size_t d : branch_of(parents, leaf)) tokens.push_back(drafts[d]);
  return tokens;
}

}  // namespace test
