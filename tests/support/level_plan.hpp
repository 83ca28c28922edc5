// Plans of prefix trees that are given by their levels, as published workloads give theirs.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "random_plan.hpp"

namespace test {

/// nodes[l] nodes of tokens[l] tokens on level l, children divided as evenly as possible among
/// their parents; every node of the last level is a sequence whose last `queries` tokens are query
/// tokens, of which each sees its path up to itself. Levels without tokens only branch.
inline RandomPlan make_level_plan(const std::vector<int>& nodes, const std::vector<int>& tokens,
                                  int queries = 1) {
  constexpr int chunk_size = 64;
  RandomPlan plan;
  plan.chunk_size = chunk_size;
  const int rows = nodes.back() * queries;
  std::vector<std::int32_t> above;  // segment of each node of the level above
  int position = 0;
  for (std::size_t l = 0; l < nodes.size(); ++l) {
    // Node n holds the rows from the first that is its own on: sequence s lies below node s * nodes
    // / sequences.
    const auto first_row = [&](std::int64_t n) {
      return static_cast<std::int32_t>((n * nodes.back() + nodes[l] - 1) / nodes[l]) * queries;
    };
    std::vector<std::int32_t> here;
    for (int n = 0; n < nodes[l]; ++n) {
      const std::int32_t begin = first_row(n);
      const std::int32_t end = first_row(n + 1);
      const std::int32_t parent =
          l == 0 ? -1 : above[static_cast<std::size_t>(std::int64_t{begin} * nodes[l - 1] / rows)];
      if (tokens[l] == 0) {
        here.push_back(parent);
        continue;
      }
      chunkattn::PlanView::Segment segment{begin,
                                           end,
                                           static_cast<std::int32_t>(plan.pieces.size()),
                                           0,
                                           position,
                                           tokens[l],
                                           parent,
                                           (end - begin) / queries};
      for (int done = 0; done < tokens[l]; done += chunk_size, ++segment.num_pieces)
        plan.pieces.push_back(
            {plan.num_chunks++, 0, std::min(chunk_size, tokens[l] - done), position + done});
      here.push_back(static_cast<std::int32_t>(plan.segments.size()));
      plan.segments.push_back(segment);
    }
    position += tokens[l];
    above = here;
  }
  for (int row = 0; row < rows; ++row) {
    plan.row_segment.push_back(above[static_cast<std::size_t>(row / queries)]);
    plan.row_kv_len.push_back(position - queries + 1 + row % queries);
    plan.row_token.push_back(row);
    plan.writes.push_back({chunkattn::no_chunk, 0});
  }
  return plan;
}

/// One shared prefix, then `private_tokens` of each sequence's own.
inline RandomPlan make_two_level_plan(int sequences, int shared, int private_tokens) {
  return make_level_plan({1, sequences}, {shared, private_tokens});
}

}  // namespace test
