// Block tables of trees with TreeOptions::Sharing::chunk, checked against the tokens that the pages
// hold.
#include "chunkattn/interop/block_table.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "support/random.hpp"
#include "support/steps.hpp"

using namespace chunkattn;
using Tree = PrefixTree<int, 4>;

TEST_CASE("a small table, written out") {
  Tree tree(PoolAllocator{}, {.sharing = TreeOptions::Sharing::chunk});
  auto a = tree.insert(std::vector<int>{1, 2, 3, 4, 5, 6});
  auto b = tree.insert(std::vector<int>{1, 2, 3, 4, 5, 7, 8, 9});
  BlockTable table;
  table.add(a);
  table.add(b);
  table.add(b, 5);
  CHECK(table.indptr() == std::vector<std::int32_t>{0, 2, 4, 6});
  CHECK(table.indices() == std::vector<std::int32_t>{0, 1, 0, 2, 0, 2});
  CHECK(table.last_page_len() == std::vector<std::int32_t>{2, 4, 1});
  CHECK(table.padded(3, -1) == std::vector<std::int32_t>{0, 1, -1, 0, 2, -1, 0, 2, -1});
  CHECK(table.padded(2) == std::vector<std::int32_t>{0, 1, 0, 2, 0, 2});  // just wide enough
  CHECK_THROWS_AS((void)table.padded(1), InvalidArgument);
  CHECK_THROWS_AS(table.add(a, 0), InvalidArgument);
  CHECK_THROWS_AS(table.add(a, 7), InvalidArgument);
  CHECK(table.indptr().size() == 4);
  auto step = tree.begin_step();
  CHECK(step.add(a, 100, {.tokens = std::vector<int>{7, 8}}));
  table.clear();
  table.add(a);     // what the step computes is part of the table: drafts too
  table.add(a, 9);  // and if asked for the slot of the output
  CHECK(table.indptr() == std::vector<std::int32_t>{0, 2, 5});
  CHECK(table.last_page_len() == std::vector<std::int32_t>{4, 1});
}

TEST_CASE("a matrix that no memory can hold is refused") {
  Tree tree(PoolAllocator{}, {.sharing = TreeOptions::Sharing::chunk});
  auto a = tree.insert(std::vector<int>{1, 2, 3});
  BlockTable table;
  CHECK(table.padded(std::size_t{1} << 63).empty());
  table.add(a);
  table.add(a);
  CHECK_THROWS_AS((void)table.padded(std::size_t{1} << 63), InvalidArgument);
  CHECK_THROWS_AS((void)table.padded((std::size_t{1} << 63) + 1), InvalidArgument);
  CHECK_THROWS_AS((void)table.padded(~std::size_t{0}), InvalidArgument);
  CHECK(table.padded(2, -1) == std::vector<std::int32_t>{0, -1, 0, -1});
}

TEST_CASE("Sharing::token is refused where a path leaves a page early, and only there") {
  Tree tree;
  auto a = tree.insert(std::vector<int>{1, 2, 3, 4, 5, 6});
  BlockTable table;
  table.add(a);  // alone it is aligned
  auto b = tree.insert(std::vector<int>{1, 2, 3, 9, 9});
  std::string message;
  try {
    table.add(b);
  } catch (const InvalidArgument& error) {
    message = error.what();
  }
  CHECK(message.find("position 3") != std::string::npos);
  CHECK(message.find("Sharing::chunk") != std::string::npos);
  CHECK(table.indptr() == std::vector<std::int32_t>{0, 2});
  CHECK(table.indices().size() == 2);
  table.add(b, 3);
  CHECK(table.last_page_len() == std::vector<std::int32_t>{2, 3});
  // The first page of a is cut in two by now, which is no reason to name it twice.
  table.add(a);
  CHECK(table.indptr() == std::vector<std::int32_t>{0, 2, 3, 5});
  CHECK(table.indices()[3] == table.indices()[0]);
  CHECK(table.indices()[4] == table.indices()[1]);
  CHECK_THROWS_AS(table.add(b), InvalidArgument);
  CHECK(table.indices().size() == 5);
  auto c = tree.insert(std::vector<int>{1, 8});  // cuts it after its first token as well
  table.add(a);
  CHECK(table.indices().size() == 7);
}

TEST_CASE("a step's query tokens: how many, over how much K/V, and where theirs goes") {
  Tree tree(PoolAllocator{}, {.sharing = TreeOptions::Sharing::chunk});
  AttentionPlan plan;
  auto a = tree.insert(std::vector<int>{1, 2, 3, 4, 5, 6});
  auto step = tree.begin_step();
  CHECK(step.add(a));
  (void)plan.build(step);
  (void)std::move(step).finish();
  a.append(7);  // decodes; b has the first page, and computes a part of its prompt; c all of it
  auto b = tree.insert(std::vector<int>{1, 2, 3, 4, 9, 9, 9, 9, 9, 9});
  auto c = tree.insert(std::vector<int>{1, 2, 3, 4}, {.max_reuse = 2});
  BlockTable table;
  step = tree.begin_step();
  const AddResult rows[] = {step.add(a), step.add(b, 3), step.add(c)};
  table.add(a, rows[0].row());
  table.add(b, rows[1].row());
  table.add(c, rows[2].row());
  const auto view = plan.build(step);
  CHECK(table.qo_indptr() == std::vector<std::int32_t>{0, 1, 4, 6});
  CHECK(table.seq_lens() == std::vector<std::int32_t>{7, 7, 4});
  CHECK(table.indptr() == std::vector<std::int32_t>{0, 2, 4, 5});
  CHECK(table.indices() == std::vector<std::int32_t>{0, 1, 0, 2, 0});
  CHECK(table.last_page_len() == std::vector<std::int32_t>{3, 3, 4});
  CHECK(BlockTable::slot_mapping(view) == std::vector<std::int64_t>{6, 8, 9, 10, -1, -1});
  CHECK(BlockTable::slot_mapping(view, 99).back() == 99);
  CHECK(BlockTable::slot_mapping({}).empty());
  CHECK(test::refused([&] { table.add(a, rows[1].row()); }).find("row = of another sequence") == 0);
  table.add(a);  // without query tokens
  CHECK(table.qo_indptr() == std::vector<std::int32_t>{0, 1, 4, 6, 6});
  CHECK(table.seq_lens() == std::vector<std::int32_t>{7, 7, 4, 7});
  table.clear();
  CHECK(table.qo_indptr() == std::vector<std::int32_t>{0});
  CHECK(table.seq_lens().empty());
  // Beyond 2^31 slots.
  const PlanView::WriteTarget far{1 << 30, 3};
  PlanView large;
  large.num_rows = 1;
  large.chunk_size = 64;
  large.writes = &far;
  CHECK(BlockTable::slot_mapping(large) == std::vector<std::int64_t>{(std::int64_t{1} << 36) + 3});
}

TEST_CASE("drafts are query tokens; of a tree the longest branch has pages") {
  Tree tree(PoolAllocator{}, {.sharing = TreeOptions::Sharing::chunk});
  auto a = tree.insert(std::vector<int>{1, 2, 3});
  auto b = tree.insert(std::vector<int>{5, 6, 7});
  BlockTable table;
  auto step = tree.begin_step();
  table.add(a, step.add(a, 100, {.tokens = std::vector<int>{7, 8}}).row());
  const std::vector<std::int32_t> parents{-1, 0, -1};
  table.add(b, step.add(b, 100, {.tokens = std::vector<int>{1, 2, 3}, .parents = parents}).row());
  CHECK(table.seq_lens() == std::vector<std::int32_t>{5, 5});
  CHECK(table.qo_indptr() == std::vector<std::int32_t>{0, 5, 11});
}

TEST_CASE("random steps: each query token's slot is that of its position in the table") {
  test::Random random(43);
  Tree tree(PoolAllocator{.max_chunks = 400}, {.sharing = TreeOptions::Sharing::chunk});
  AttentionPlan plan;
  std::vector<Tree::Sequence> sequences;
  BlockTable table;
  int written = 0;
  for (int round = 0; round < test::scaled(300) || (written <= 100 && round < 3000); ++round) {
    if (random.uniform(0, 3) == 0) {
      std::vector<int> prompt(static_cast<std::size_t>(random.uniform(1, 20)));
      for (int& token : prompt) token = random.uniform(0, 1);
      if (auto joined = tree.try_insert(prompt)) sequences.push_back(std::move(*joined));
    }
    if (sequences.size() > 8) sequences.erase(sequences.begin());
    auto step = tree.begin_step();
    table.clear();
    for (auto& sequence : sequences) {
      const auto added = step.add(sequence, static_cast<std::size_t>(random.uniform(1, 7)));
      if (added) table.add(sequence, added.row());
    }
    const auto view = plan.build(step);
    const auto mapping = BlockTable::slot_mapping(view);
    const auto positions = view.positions();
    REQUIRE(mapping.size() == static_cast<std::size_t>(table.qo_indptr().back()));
    for (std::size_t i = 0; i < table.seq_lens().size(); ++i) {
      const auto end = static_cast<std::size_t>(table.qo_indptr()[i + 1]);
      REQUIRE(positions[end - 1] == table.seq_lens()[i] - 1);
      for (auto row = static_cast<std::size_t>(table.qo_indptr()[i]); row < end; ++row) {
        const std::int32_t p = positions[row];
        const auto page = static_cast<std::size_t>(table.indptr()[i] + p / 4);
        if (mapping[row] == -1) continue;
        REQUIRE(mapping[row] == std::int64_t{table.indices()[page]} * 4 + p % 4);
        ++written;
      }
    }
    auto done = std::move(step).finish();
    for (const auto row : done.rows()) done.commit(row, random.uniform(0, 1));
  }
  CHECK(written > 100);
}

namespace {

// A path made of these pieces, whatever tree would have it.
struct Path {
  static constexpr int chunk_size = 4;
  std::vector<Piece> pieces;

  [[nodiscard]] std::size_t size() const { return 4 * pieces.size(); }
  [[nodiscard]] std::size_t num_reserved() const { return 0; }
  [[nodiscard]] std::size_t num_scheduled() const { return size(); }
  template <class F>
  void for_each_run(TokenRange, const F& f) const {
    for (const Piece& piece : pieces) f(piece);
  }
};

}  // namespace

TEST_CASE("the first slot that does not fit is named, be it the first of all") {
  const auto message = [](const Path& path) {
    BlockTable table;
    try {
      table.add(path);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  CHECK(message({{{5, 0, 4, 0}, {6, 0, 4, 4}}}) == "");
  CHECK(message({{{5, 0, 1, 0}, {5, 1, 3, 1}}}) == "");
  CHECK(message({{{5, 1, 3, 0}, {6, 0, 4, 3}}}).find("position 0 ") != std::string::npos);
  CHECK(message({{{5, 0, 4, 0}, {6, 1, 3, 4}, {7, 0, 1, 7}}}).find("position 4 ") !=
        std::string::npos);
  // The right slot in a page, but of a page that the path was not in before.
  CHECK(message({{{5, 0, 1, 0}, {6, 1, 3, 1}}}).find("position 1 ") != std::string::npos);
}

TEST_CASE("random trees: page p, offset o holds token p * page + o") {
  test::Random random(41);
  Tree tree(PoolAllocator{.max_chunks = 400}, {.sharing = TreeOptions::Sharing::chunk});
  std::vector<Tree::Sequence> sequences;
  BlockTable table;
  for (int round = 0; round < test::scaled(400); ++round) {
    const int what = random.uniform(0, 9);
    if (what < 4 || sequences.empty()) {
      std::vector<int> prompt(static_cast<std::size_t>(random.uniform(1, 20)));
      for (int& token : prompt) token = random.uniform(0, 1);
      auto joined = tree.try_insert(prompt);
      if (joined && joined->num_pending() == 0) {
        test::load(*joined);
        sequences.push_back(std::move(*joined));
      }
    } else {
      const std::size_t i = random.index(sequences.size());
      if (what < 7) {
        const std::size_t n = static_cast<std::size_t>(random.uniform(1, 6));
        if (sequences[i].try_append(std::vector<int>(n, random.uniform(0, 1))))
          test::load(sequences[i]);
      } else if (what < 9) {
        if (auto fork = sequences[i].try_fork()) sequences.push_back(std::move(*fork));
      } else {
        sequences.erase(sequences.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    table.clear();
    for (const auto& sequence : sequences) table.add(sequence);
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      const std::vector<int> tokens = sequences[i].tokens();
      const auto begin = static_cast<std::size_t>(table.indptr()[i]);
      const auto pages = static_cast<std::size_t>(table.indptr()[i + 1]) - begin;
      REQUIRE(pages == (tokens.size() + 3) / 4);
      REQUIRE(static_cast<std::size_t>(table.last_page_len()[i]) ==
              tokens.size() - 4 * (pages - 1));
      for (std::size_t at = 0; at < tokens.size(); ++at)
        REQUIRE(chunkattn::detail::TreeAccess::tree(tree).token_at(
                    table.indices()[begin + at / 4], static_cast<std::int32_t>(at % 4)) ==
                tokens[at]);
    }
  }
}
