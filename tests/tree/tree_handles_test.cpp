// Handles: moved from, used after leaving, of a tree that is gone. Each mistake is a clear error
// and changes nothing.
#include <doctest/doctest.h>

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "support/steps.hpp"
#include "tests/support/retention.hpp"

using namespace chunkattn;
using test::refused;

namespace {

using Tree = PrefixTree<int, 4, PoolAllocator, test::NoRetention>;

const std::vector<int> prompt = {1, 2, 3, 4, 5, 6};

/// Every call that needs a live handle, refused with the same text.
void refuses_all(Tree::Sequence& s, const std::string& text) {
  CHECK_FALSE(s.is_live());
  CHECK(refused([&] { (void)s.id(); }) == text);
  CHECK(refused([&] { (void)s.size(); }) == text);
  CHECK(refused([&] { (void)s.num_cached(); }) == text);
  CHECK(refused([&] { (void)s.num_uncomputed(); }) == text);
  CHECK(refused([&] { (void)s.num_scheduled(); }) == text);
  CHECK(refused([&] { (void)s.num_written(); }) == text);
  CHECK(refused([&] { (void)s.num_pending(); }) == text);
  CHECK(refused([&] { (void)s.num_reserved(); }) == text);
  CHECK(refused([&] { (void)s.waits_for(); }) == text);
  CHECK(refused([&] { s.append(1); }) == text);
  CHECK(refused([&] { (void)s.try_append(prompt); }) == text);
  CHECK(refused([&] { (void)s.take_over(); }) == text);
  CHECK(refused([&] { (void)s.loadable(); }) == text);
  CHECK(refused([&] { s.mark_loaded({0, 1}); }) == text);
  CHECK(refused([&] { (void)s.fork(); }) == text);
  CHECK(refused([&] { (void)s.try_fork(1); }) == text);
  CHECK(refused([&] { s.truncate(1); }) == text);
  CHECK(refused([&] { s.leave(); }) == text);
  CHECK(refused([&] { (void)s.token(0); }) == text);
  CHECK(refused([&] { (void)s.tokens(); }) == text);
  CHECK(refused([&] { (void)s.options(); }) == text);
  CHECK(refused([&] { (void)s.chunks_needed(1); }) == text);
  CHECK(refused([&] { s.for_each_run({0, 0}, [](const Piece&) {}); }) == text);
  CHECK(refused([&] { (void)s.tree_id(); }) == text);
  Tree tree;
  auto step = tree.begin_step();
  CHECK(refused([&] { (void)step.add(s); }) == text);
  CHECK(step.num_rows() == 0);
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
  CHECK(tree.stats().used_chunks == 0);
  check_invariants(tree);
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
  CHECK(refused([&] { (void)tree.num_chunks(); }).find("tree = moved-from") == 0);  // NOLINT
  std::vector<Tree::Sequence> many;
  for (int i = 0; i < 1000; ++i) many.push_back(moved.insert(std::vector<int>{1, i}));
  s = std::move(many[500]);
  CHECK(s.tokens() == std::vector<int>{1, 500});
  CHECK(moved.stats().live_sequences == 1000 - 1 + 1);
  check_invariants(moved);
}

TEST_CASE("a leave and a join do not make an old handle or name valid again") {
  Tree tree;
  auto a = tree.insert(prompt);
  const SequenceId id = a.id();
  CHECK(id != SequenceId::none);
  a.leave();
  auto b = tree.insert(prompt);
  CHECK(b.id() != id);
  const SequenceId before = b.id();
  b.truncate(6);  // nothing to do
  CHECK(b.id() == before);
  b.truncate(2);
  CHECK(b.id() != before);
  CHECK(b.tokens() == std::vector<int>{1, 2});
}

TEST_CASE("what another has written may be marked as loaded once more") {
  Tree tree;
  auto writer = tree.insert(prompt);
  writer.mark_loaded({0, 5});
  auto reader = tree.insert(prompt);
  reader.mark_loaded({0, 5});
  reader.mark_loaded({1, 3});
  CHECK(reader.num_written() == 5);
  CHECK(refused([&] { reader.mark_loaded({0, 6}); }).find("range.begin = 0") == 0);
  writer.mark_loaded({5, 1});
  reader.mark_loaded({0, 6});
  CHECK(reader.num_written() == 6);
  check_invariants(tree);
}

TEST_CASE("bad arguments are refused by name, and nothing changes") {
  Tree tree(PoolAllocator{.max_chunks = 4});
  auto s = tree.insert(prompt);
  const auto unchanged = [&] {
    check_invariants(tree);
    CHECK(s.tokens() == prompt);
    CHECK(s.num_reserved() == 0);
    CHECK(s.num_uncomputed() == 6);
    CHECK(tree.stats().used_chunks == 2);
    CHECK(tree.stats().live_sequences == 1);
  };
  CHECK(refused([&] { (void)tree.insert(std::vector<int>{}); }) ==
        "prompt.size() = 0: expected at least one token");
  CHECK(refused([&] { (void)tree.try_insert(std::vector<int>{}); }) ==
        "prompt.size() = 0: expected at least one token");
  CHECK(refused([&] { s.append(std::vector<int>{}); }) ==
        "tokens.size() = 0: expected at least one token");
  CHECK(refused([&] { s.mark_loaded({1, 1}); }) ==
        "range.begin = 1: expected at most 0, the first position without K/V");
  CHECK(refused([&] { s.mark_loaded({0, 7}); }) ==
        "range.length = 7: expected an end within the sequence's 6 positions");
  CHECK(refused([&] { s.append({}); }) == "tokens.size() = 0: expected at least one token");
  CHECK(refused([&] { (void)tree.insert({}); }) ==
        "prompt.size() = 0: expected at least one token");
  CHECK(refused([&] { s.mark_loaded({-1, 1}); }) ==
        "range.begin = -1: expected 0 to the sequence's end, 6");
  CHECK(refused([&] { (void)s.fork(0); }) ==
        "length = 0: expected 1 to the sequence's 6 known tokens");
  CHECK(refused([&] { s.truncate(7); }).find("length = 7: expected 1 to") == 0);
  CHECK(refused([&] { (void)s.token(6); }) ==
        "position = 6: expected below the sequence's size, 6");
  unchanged();
  CHECK_FALSE(s.try_append(std::vector<int>(11, 1)));
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
  CHECK_THROWS_AS(s.append(std::vector<int>(11, 1)), OutOfChunks);
  unchanged();
  const auto never = [&](const auto& operation) -> std::string {
    try {
      operation();
    } catch (const OutOfChunks& error) {
      unchanged();
      return (error.never_fits() ? "never, " : "now, ") + std::string(error.what());
    }
    return "no error";
  };
  const std::string wait = "; wait for a sequence to leave, or raise max_chunks";
  const std::string refuse = " even alone: refuse the request, or raise max_chunks";
  CHECK(never([&] { (void)tree.insert(std::vector<int>(16, 3)); }) ==
        "now, out of chunks: asked for 4, 2 available of 4" + wait);
  CHECK(never([&] { (void)tree.insert(std::vector<int>(17, 3)); }) ==
        "never, out of chunks: asked for 5, 2 available of 4; this never fits, as it takes 5" +
            refuse);
  CHECK(never([&] { s.append(std::vector<int>(11, 1)); }) ==  // together with what it has
        "never, out of chunks: asked for 3, 2 available of 4; this never fits, as it takes 5" +
            refuse);
  {
    auto other = tree.insert({7, 7, 7, 7, 7});
    std::string said;
    try {
      s.append({1, 1, 1});
    } catch (const OutOfChunks& error) {
      said = error.what();
      CHECK_FALSE(error.never_fits());
    }
    CHECK(said == "out of chunks: asked for 1, 0 available of 4" + wait);
    try {
      (void)s.fork(5);
    } catch (const OutOfChunks& error) {
      CHECK_FALSE(error.never_fits());
    }
  }
  unchanged();
  AttentionPlan plan;
  {
    auto step = tree.begin_step();
    CHECK(step.add(s, 10,
                   {.tokens = std::vector<int>(11, 1)}));  // 6 tokens and 4 drafts are max_tokens
    CHECK(s.num_reserved() == 5);
    CHECK(refused([&] { s.append(1); }) ==
          "outputs to come = 5: expected none: commit the outputs of finished steps, or drop them, "
          "before append()");
    CHECK(refused([&] { s.mark_loaded({0, 1}); }).find("sequence = in a step") == 0);
  }
  unchanged();
  {
    auto step = tree.begin_step();
    CHECK(step.add(s, 100, {.tokens = std::vector<int>(11, 1)}).reason() ==
          AddResult::Reason::out_of_chunks);
  }
  unchanged();
  CHECK(refused([] { Tree bad({}, {.min_run = 5}); }) ==
        "min_run = 5: expected between 1 and ChunkSize, 4");
  CHECK(refused([] { Tree bad({}, {.sharing = static_cast<TreeOptions::Sharing>(99)}); }) ==
        "sharing = 99: expected TreeOptions::Sharing::token or TreeOptions::Sharing::chunk");
  CHECK(refused([] {
          PrefixTree<int, 4> bad({}, {}, RetentionOptions{.high_watermark = 3, .low_watermark = 4});
        }) == "low_watermark = 4: expected at most high_watermark, 3");
}

TEST_CASE("tokens that are written out in a call") {
  Tree tree;
  auto s = tree.insert({1, 2, 3});
  CHECK(s.tokens() == std::vector<int>{1, 2, 3});
  s.append({4});
  s.append({5, 6});
  CHECK(s.try_append({7, 8}));
  CHECK(s.tokens() == std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8});
  s.mark_loaded(s.loadable());
  CHECK(tree.match_prefix({1, 2, 9}).cached == 2);
  CHECK(tree.match_prefix({1, 2, 9}, {.name_space = {.tenant = 1}}).cached == 0);
  CHECK(tree.chunks_needed({9, 9, 9, 9, 9}) == 2);
  auto limited = tree.try_insert({1, 2, 3}, {.max_reuse = 1});
  REQUIRE(limited.has_value());
  CHECK(limited->num_cached() == 1);
  PrefixTree<int, 4> keeps({}, {}, RetentionOptions{.max_pinned = 4});
  auto kept = keeps.insert({1, 2, 3});
  kept.mark_loaded(kept.loadable());
  CHECK(keeps.pin({1, 2}).size() == 2);
}

TEST_CASE("some of a sequence's tokens, into the caller's memory") {
  Tree tree;
  const auto first = tree.insert(test::iota(0, 11));  // shares a chunk with it
  auto sequence = tree.insert(test::iota(0, 6));
  sequence.append(test::iota(90, 7));
  const std::vector<int> all = sequence.tokens();
  for (int begin = 0; begin <= 13; ++begin)
    for (int length = 0; begin + length <= 13; ++length) {
      std::vector<int> some(static_cast<std::size_t>(length), -1);
      sequence.copy_tokens({begin, length}, some);
      CHECK(some == std::vector<int>(all.begin() + begin, all.begin() + begin + length));
    }
  std::vector<int> memory(4, -1);
  CHECK(refused([&] { sequence.copy_tokens({10, 4}, memory); }) ==
        "range.end() = 14: expected at most the sequence's size, 13");
  CHECK(refused([&] { sequence.copy_tokens({3, 3}, memory); }) ==
        "out.size() = 4: expected range.length, 3");
  CHECK(refused([&] { sequence.copy_tokens({-1, 4}, memory); }) ==
        "range.begin = -1: expected 0 to the sequence's end, 13");
  CHECK(memory == std::vector<int>(4, -1));
}
