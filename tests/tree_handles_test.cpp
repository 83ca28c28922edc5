// Handles: moved from, used after leaving, of a tree that is gone. Each mistake is a clear error
// and changes nothing.
#include <doctest/doctest.h>

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/prefix_tree.hpp"

using namespace chunkattn;

namespace {

using Tree = PrefixTree<int, 4>;

template <class F>
std::string refused(const F& f) {
  try {
    f();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

const std::vector<int> prompt = {1, 2, 3, 4, 5, 6};

/// Every call that needs a live handle, refused with the same text.
void refuses_all(Tree::Sequence& s, const std::string& text) {
  CHECK_FALSE(s.is_live());
  CHECK(refused([&] { (void)s.size(); }) == text);
  CHECK(refused([&] { (void)s.num_cached(); }) == text);
  CHECK(refused([&] { (void)s.num_pending(); }) == text);
  CHECK(refused([&] { (void)s.next_uncomputed(); }) == text);
  CHECK(refused([&] { (void)s.reserve(1); }) == text);
  CHECK(refused([&] { (void)s.try_reserve(1); }) == text);
  CHECK(refused([&] { (void)s.append(1); }) == text);
  CHECK(refused([&] { s.commit(1); }) == text);
  CHECK(refused([&] { s.commit(TokenRange{0, 1}); }) == text);
  CHECK(refused([&] { (void)s.fork(); }) == text);
  CHECK(refused([&] { (void)s.try_fork(); }) == text);
  CHECK(refused([&] { s.leave(); }) == text);
  CHECK(refused([&] { (void)s.token(0); }) == text);
  CHECK(refused([&] { (void)s.tokens(); }) == text);
  AttentionPlan plan;
  CHECK(refused([&] { plan.add(s, TokenRange{0, 1}); }) == text);
}

const std::string empty_text =
    "sequence = empty: expected a live handle, not one moved from or used after leave()";

}  // namespace

TEST_CASE("an empty handle: never filled, moved from, or left") {
  Tree tree;
  Tree::Sequence none;
  refuses_all(none, empty_text);
  auto s = tree.insert(prompt);
  auto moved = std::move(s);
  refuses_all(s, empty_text);  // NOLINT(bugprone-use-after-move)
  CHECK(moved.is_live());
  CHECK(moved.size() == 6);
  moved.leave();
  refuses_all(moved, empty_text);
  CHECK(tree.stats().live_sequences == 0);
  CHECK(tree.stats().used_slots == 0);
  tree.check_invariants();
}

TEST_CASE("a handle that outlives its tree is harmless") {
  std::optional<Tree> tree(std::in_place);
  auto s = tree->insert(prompt);
  auto other = tree->insert(prompt);
  tree.reset();
  refuses_all(s, "sequence = orphaned: expected a handle whose tree still exists");
  s = std::move(other);
  Tree second;
  s = second.insert(prompt);
  CHECK(s.is_live());
  second = Tree();  // replaces the tree: its handles are orphans
  CHECK_FALSE(s.is_live());
  CHECK(second.stats().live_sequences == 0);
}

TEST_CASE("handles stay valid while others come and go, and while the tree is moved") {
  Tree tree;
  auto s = tree.insert(prompt);
  for (int i = 0; i < 1000; ++i) (void)tree.insert(std::vector<int>{1, 2, i});
  auto moved = std::move(tree);
  CHECK(s.tokens() == prompt);
  CHECK(refused([&] { (void)tree.num_slots(); }).find("tree = moved-from") == 0);  // NOLINT
  std::vector<Tree::Sequence> many;
  for (int i = 0; i < 1000; ++i) many.push_back(moved.insert(std::vector<int>{1, i}));
  s = std::move(many[500]);
  CHECK(s.tokens() == std::vector<int>{1, 500});
  CHECK(moved.stats().live_sequences == 1000 - 1 + 1);
  moved.check_invariants();
}

TEST_CASE("a leave and a join do not make an old handle valid again") {
  Tree tree;
  auto a = tree.insert(prompt);
  const auto index = a.index();
  const auto generation = a.generation();
  a.leave();
  auto b = tree.insert(prompt);
  CHECK(b.index() == index);
  CHECK(b.generation() != generation);
}

TEST_CASE("bad arguments are refused by name, and nothing changes") {
  Tree tree(PoolAllocator{.max_chunks = 4});
  auto s = tree.insert(prompt);
  const auto unchanged = [&] {
    tree.check_invariants();
    CHECK(s.tokens() == prompt);
    CHECK(s.num_reserved() == 0);
    CHECK(tree.stats().used_slots == 2);
    CHECK(tree.stats().live_sequences == 1);
  };
  CHECK(refused([&] { (void)tree.insert(std::vector<int>{}); }) ==
        "prompt.size() = 0: expected at least one token");
  CHECK(refused([&] { (void)tree.try_insert(std::vector<int>{}); }) ==
        "prompt.size() = 0: expected at least one token");
  CHECK(refused([&] { (void)s.reserve(0); }).find("n = 0: expected at least 1") == 0);
  CHECK(refused([&] { (void)s.reserve(std::size_t{1} << 40); }).find("n = 1099511627776") == 0);
  CHECK(refused([&] { (void)s.append(std::vector<int>{}); }) ==
        "tokens.size() = 0: expected at least one token");
  CHECK(refused([&] { s.commit(7); }) ==
        "reserved places = 0: expected a reservation: call reserve() first");
  CHECK(refused([&] {
          s.commit(TokenRange{1, 1});
        }) == "range.begin = 1: expected at most 0, the next position to compute");
  CHECK(refused([&] {
          s.commit(TokenRange{0, 7});
        }) == "range.length = 7: expected an end within the 6 known tokens");
  CHECK(refused([&] { (void)s.token(6); }).find("position = 6") == 0);
  unchanged();
  CHECK_FALSE(s.try_reserve(11).has_value());
  CHECK_FALSE(tree.try_insert(std::vector<int>(9, 3)).has_value());
  unchanged();
  try {
    (void)tree.insert(std::vector<int>(9, 3));
    FAIL("no error");
  } catch (const OutOfChunks& error) {
    CHECK(error.asked() == 3);
    CHECK(error.available() == 2);
    CHECK(error.capacity() == 4);
    CHECK(std::string(error.what()) ==
          "out of chunks: asked for 3, 2 available of 4; wait for a sequence to leave, or raise "
          "max_chunks");
  }
  CHECK_THROWS_AS((void)s.reserve(11), OutOfChunks);
  CHECK_THROWS_AS((void)s.append(std::vector<int>(11, 1)), OutOfChunks);
  unchanged();
  s.reserve(2);
  CHECK(refused([&] {
          s.commit(std::vector<int>{1, 2, 3});
        }).find("tokens.size() = 3: expected at most the 2 places") == 0);
  CHECK(refused([&] { s.commit(1); }).find("computed tokens = 0: expected all 6") == 0);
  CHECK(refused([&] { (void)s.append(1); }).find("reserved places = 2") == 0);
  s.commit(TokenRange{0, 6});
  s.commit(std::vector<int>{});
  CHECK(s.num_reserved() == 0);
  CHECK(refused([] { Tree bad({}, {.min_run = 5}); }) ==
        "min_run = 5: expected between 0 and ChunkSize");
  CHECK(refused([] {
          PrefixTree<int, 4, PoolAllocator, Lru> bad(
              {}, {}, Lru{{.high_watermark = 3, .low_watermark = 4}});
        }) == "low_watermark = 4: expected at most high_watermark");
}
