// to_text, to_dot and for_each_node: what a person or a program reads of a tree.
#include <doctest/doctest.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/retention.hpp"

using namespace chunkattn;
using Tree = PrefixTree<int, 4>;

TEST_CASE("the text tree names ranges, chunks, users and tokens") {
  Tree tree;
  auto a = tree.insert(std::vector<int>{1, 2, 3, 4, 5, 6});
  a.mark_loaded(a.loadable());
  auto b = tree.insert(std::vector<int>{1, 2, 3, 4, 5, 9});
  CHECK(to_text(tree) ==
        "2 sequences, 5 nodes, 3 chunks (0 cached)\n"
        "- 0..5  0[0:4] 1[0:1]  (2 sequences)  1 2 3 4 5\n"
        "  - 5..6  1[1:2]  (1 sequence)  6\n"
        "    - 6..6    (1 sequence, tail of #0)\n"
        "  - 5..6  2[0:1]  (1 sequence, 0 written)  9\n"
        "    - 6..6    (1 sequence, tail of #1)\n");
  b.leave();
  a.append(7);
  auto step = tree.begin_step();
  CHECK(step.add(a, 2, {.tokens = std::vector<int>{8}}));
  CHECK(to_text(tree).find("0 written, tail of #0)  7 +2 reserved\n") != std::string::npos);
  a.leave();
  CHECK(to_text(tree).find("(leaving") != std::string::npos);
  {
    const auto dropped = std::move(step);
  }
  CHECK(to_text(tree).find("(cached)") != std::string::npos);
  CHECK(to_text(tree, 2).find("  1 2 ...\n") != std::string::npos);
  CHECK(to_text(tree, 0).find(")  ...\n") != std::string::npos);
}

TEST_CASE("the text tree takes the caller's words for tokens and names namespaces") {
  PrefixTree<char, 4, PoolAllocator, test::NoRetention> tree;
  auto a = tree.insert(std::vector<char>{'h', 'i'}, {.name_space = {.tenant = 7, .adapter = 3}});
  const std::string text = to_text(tree, 8, [](char c) { return std::string("<") + c + ">"; });
  CHECK(text.find("<h> <i>") != std::string::npos);
  CHECK(text.find("tenant 7, adapter 3") != std::string::npos);
  CHECK(text.find("public") == std::string::npos);
  auto b = tree.insert(std::vector<char>{'o', 'k'}, {.public_length = 2});
  CHECK(to_text(tree).find(", public)") != std::string::npos);
}

TEST_CASE("the graph has one node and one edge per tree node, with quotes escaped") {
  PrefixTree<char, 4, PoolAllocator, test::NoRetention> tree;
  auto a = tree.insert(std::vector<char>{'a', '"', 'c'});
  auto b = tree.insert(std::vector<char>{'a', 'x'});
  const std::string dot = to_dot(tree, 8, [](char c) { return std::string(1, c); });
  CHECK(dot.starts_with("digraph prefix_tree {"));
  CHECK(dot.ends_with("}\n"));
  CHECK(dot.find("\\\"") != std::string::npos);
  std::size_t edges = 0, labels = 0;
  for (std::size_t at = dot.find(" -> "); at != std::string::npos; at = dot.find(" -> ", at + 1))
    ++edges;
  for (std::size_t at = dot.find("label="); at != std::string::npos;
       at = dot.find("label=", at + 1))
    ++labels;
  CHECK(edges == tree.stats().nodes - 1);
  CHECK(labels == tree.stats().nodes);

  const std::string lines = to_dot(tree, 8, [](char) { return std::string("a\nb\\"); });
  CHECK(lines.find("a\\nb\\\\") != std::string::npos);
}

TEST_CASE("of a long node three runs are named") {
  Tree tree;
  auto three = tree.insert(std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8, 9});
  CHECK(to_text(tree, 1).find("- 0..9  0[0:4] 1[0:4] 2[0:1]  (") != std::string::npos);
  auto five = tree.insert(std::vector<int>(20, 0));
  CHECK(to_text(tree, 1).find("- 0..20  3[0:4] 4[0:4] 5[0:4] ...  (") != std::string::npos);
}

TEST_CASE("the graph draws what is cached dashed and private tails rounded") {
  Tree tree;
  auto live = tree.insert(std::vector<int>{1, 2, 3});
  auto cached = tree.insert(std::vector<int>{7, 8});
  cached.mark_loaded(cached.loadable());
  cached.leave();
  int dashed = 0, rounded = 0;
  std::istringstream dot(to_dot(tree));
  for (std::string line; std::getline(dot, line);) {
    const auto says = [&](const char* text) { return line.find(text) != std::string::npos; };
    CHECK(says("style=dashed") == says("cached"));
    CHECK(says("style=rounded") == says("tail of"));
    dashed += says("style=dashed");
    rounded += says("style=rounded");
  }
  CHECK(dashed == 1);
  CHECK(rounded == 1);
}

TEST_CASE("an empty tree prints") {
  const Tree tree;
  CHECK(to_text(tree) == "0 sequences, 0 nodes, 0 chunks (0 cached)\n");
  CHECK(to_dot(tree).find("->") == std::string::npos);
}

TEST_CASE("a program visits each node: its sequence, its parent, how many share it") {
  Tree tree;
  auto a = tree.insert(std::vector<int>{1, 2, 3, 4, 5, 6}, {.name_space = {.tenant = 7}});
  a.mark_loaded(a.loadable());
  CHECK(a.num_shared() == 0);
  auto b = tree.insert(std::vector<int>{1, 2, 3, 4, 5, 9}, {.name_space = {.tenant = 7}});
  auto other = tree.insert(std::vector<int>{1, 2, 3});
  CHECK(a.num_shared() == 5);
  CHECK(b.num_shared() == 5);
  CHECK(other.num_shared() == 0);
  const auto nodes = [&] {
    std::vector<chunkattn::NodeInfo<int>> all;
    for_each_node(tree, 2, [&](const auto& node) { all.push_back(node); });
    return all;
  };
  const auto live = nodes();
  REQUIRE(live.size() == 4);
  CHECK(live[0].parent == 0);
  CHECK(live[0].length == 5);
  CHECK(live[0].num_sequences == 2);
  CHECK(live[0].name_space == Namespace{.tenant = 7});
  CHECK(live[0].first_tokens == std::vector<int>{1, 2});
  for (const int child : {1, 2}) {
    CHECK(live[child].parent == live[0].id);
    CHECK(live[child].position == 5);
    CHECK(live[child].num_sequences == 1);
    CHECK_FALSE(live[child].cached);
  }
  CHECK(live[1].first_tokens == std::vector<int>{6});
  CHECK(live[2].first_tokens == std::vector<int>{9});
  CHECK(live[3].length == 3);
  b.leave();
  CHECK(a.num_shared() == 0);
  a.leave();
  other.leave();
  const auto left = nodes();
  REQUIRE(left.size() == 2);  // only what was written stays
  for (const auto& node : left) CHECK((node.cached && node.num_sequences == 0));
}
