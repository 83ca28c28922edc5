// Merging, as both kinds of byte-pair tokenizers do it: of all pairs of neighbours the best is
// merged, until no pair is known.
#pragma once

#include <cstddef>
#include <optional>
#include <queue>
#include <vector>

namespace serve {

/// What a pair becomes; of several pairs the one of the lowest rank is merged first, of equal ones
/// the leftmost.
struct Merge {
  double rank;
  int token;
};

/// \param find  (left, right) -> std::optional<Merge>
///
/// Linear in the tokens but for a heap: a long text without spaces must not cost its square.
template <class Find>
void merge_pairs(std::vector<int>& tokens, const Find& find) {
  struct Candidate {
    Merge merge;
    std::size_t left;
    int left_token, right_token;  // as they were; others stand there now if it is out of date
    bool operator<(const Candidate& other) const {  // for a heap with the best one on top
      return merge.rank != other.merge.rank ? merge.rank > other.merge.rank : left > other.left;
    }
  };
  constexpr int gone = -1;
  const std::size_t size = tokens.size();
  std::vector<std::size_t> next(size), previous(size);  // of those that are not gone
  for (std::size_t i = 0; i < size; ++i) next[i] = i + 1, previous[i] = i - 1;
  std::priority_queue<Candidate> candidates;
  const auto consider = [&](std::size_t left, std::size_t right) {
    if (const auto merge = find(tokens[left], tokens[right]))
      candidates.push({*merge, left, tokens[left], tokens[right]});
  };
  for (std::size_t i = 0; i + 1 < size; ++i) consider(i, i + 1);
  while (!candidates.empty()) {
    const Candidate best = candidates.top();
    candidates.pop();
    const std::size_t left = best.left, right = next[left];
    if (tokens[left] != best.left_token || right >= size || tokens[right] != best.right_token)
      continue;
    tokens[left] = best.merge.token;
    tokens[right] = gone;
    next[left] = next[right];
    if (next[left] < size) {
      previous[next[left]] = left;
      consider(left, next[left]);
    }
    if (left != 0) consider(previous[left], left);
  }
  std::erase(tokens, gone);
}

}  // namespace serve
