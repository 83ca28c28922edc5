// The example of the paper's Figure 2: three sequences S0, S1, S2 over eight chunks C0 to C7. The
// context that section 3.3 prints for it, (chunks, first sequence, last sequence), is
// (C0/C1/C2, 0, 2), (C3, 0, 0), (C4/C6, 1, 1), (C5/C7, 2, 2).
#include <doctest/doctest.h>

#include <cstddef>
#include <initializer_list>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "support/steps.hpp"
#include "tests/support/retention.hpp"

using namespace chunkattn;

namespace {

constexpr int chunk_size = 4;
using Tree = PrefixTree<int, chunk_size, PoolAllocator, test::NoRetention>;
using Context = std::tuple<std::string, int, int>;

/// So many chunks of tokens, less the last two: the first is the prefill's output, which the next
/// step computes, the second the slot of that step's output.
std::vector<int> prompt(int shared_chunks, int private_chunks, int who) {
  std::vector<int> tokens(
      static_cast<std::size_t>(chunk_size * (shared_chunks + private_chunks) - 2));
  std::iota(tokens.begin(), tokens.end(), 0);
  for (std::size_t i = static_cast<std::size_t>(chunk_size * shared_chunks); i < tokens.size(); ++i)
    tokens[i] += 1000 * (who + 1);
  return tokens;
}

std::vector<Context> contexts(const PlanView& view,
                              const std::map<ChunkIndex, std::string>& names) {
  std::vector<Context> all;
  for (int s = 0; s < view.num_segments; ++s) {
    const PlanView::Segment& segment = view.segments[s];
    std::string chunks;
    for (int p = 0; p < segment.num_pieces; ++p)
      chunks += (p > 0 ? "/" : "") + names.at(view.pieces[segment.piece_begin + p].chunk);
    all.emplace_back(chunks, segment.row_begin, segment.row_end - 1);
  }
  return all;
}

}  // namespace

TEST_CASE("the contexts of Figure 2") {
  for (const TreeOptions::Sharing sharing :
       {TreeOptions::Sharing::token, TreeOptions::Sharing::chunk}) {
    CAPTURE(static_cast<int>(sharing));
    Tree tree({}, {.sharing = sharing});
    std::vector<Tree::Sequence> s;
    s.push_back(tree.insert(prompt(3, 1, 0)));  // C0 C1 C2 C3
    s.push_back(tree.insert(prompt(3, 2, 1)));  // C0 C1 C2 C4 C6
    s.push_back(tree.insert(prompt(3, 2, 2)));  // C0 C1 C2 C5 C7
    CHECK(tree.stats().used_chunks == 8);

    AttentionPlan plan;
    test::decode(tree, plan, s,
                 [](const ScheduledSequence&) { return 7; });  // the prefill, in one step

    // Name the chunks as the figure does, by where each sequence's tokens lie.
    std::map<ChunkIndex, std::string> names;
    const std::vector<std::vector<std::string>> figure = {
        {"C0", "C1", "C2", "C3"}, {"C0", "C1", "C2", "C4", "C6"}, {"C0", "C1", "C2", "C5", "C7"}};
    for (std::size_t i = 0; i < s.size(); ++i)
      s[i].for_each_run({0, static_cast<int>(s[i].size())}, [&](const Piece& piece) {
        const auto index = static_cast<std::size_t>(piece.position / chunk_size);
        const auto [it, fresh] = names.emplace(piece.chunk, figure[i][index]);
        CHECK(it->second == figure[i][index]);
      });
    CHECK(names.size() == 8);

    const auto plan_of = [&](std::initializer_list<std::size_t> order, Tree::Step& step) {
      for (const std::size_t i : order) CHECK(step.add(s[i]));
      return plan.build(step);
    };
    {
      auto step = tree.begin_step();
      const std::vector<Context> expected = {
          {"C0/C1/C2", 0, 2}, {"C3", 0, 0}, {"C4/C6", 1, 1}, {"C5/C7", 2, 2}};
      CHECK(contexts(plan_of({0, 1, 2}, step), names) == expected);
      CHECK(tree.stats().used_chunks == 8);
      check_invariants(tree);
      auto done = std::move(step).finish();
      for (const ScheduledSequence row : done.rows()) done.commit(row, 7);
    }

    // In another batch order the rows are the caller's still, and the intervals stay contiguous.
    auto step = tree.begin_step();
    const PlanView view = plan_of({2, 0, 1}, step);
    CHECK(view.segments[0].row_begin == 0);
    CHECK(view.segments[0].row_end == 3);
    CHECK(view.segments[0].num_sequences == 3);
    for (int row = 0; row < 3; ++row) {
      const std::size_t i =
          std::vector<std::size_t>{2, 0, 1}[static_cast<std::size_t>(view.row_token[row])];
      CHECK(view.row_kv_len[row] == static_cast<int>(s[i].size()));
    }
  }
}
