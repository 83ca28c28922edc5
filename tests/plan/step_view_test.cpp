// What a view says of its step's tokens: of rows that count for nothing any more, of rows that were
// added after it was built, and after it was moved.
#include <doctest/doctest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/counted_new.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;

namespace {

using Tree = PrefixTree<int, 4, PoolAllocator, test::NoRetention>;
using Tokens = std::vector<int>;
using Parents = std::vector<std::int32_t>;

/// The rows that a view calls unknown, which must be those of its placeholders.
template <class View>
std::vector<std::int32_t> unknown_rows(const View& view) {
  std::vector<std::int32_t> named, placeholders;
  for (const auto& token : view.unknown_tokens()) {
    named.push_back(token.row);
    CHECK(token.position == view.positions()[static_cast<std::size_t>(token.row)]);
  }
  const Tokens tokens = view.tokens(-1);
  for (std::size_t r = 0; r < tokens.size(); ++r)
    if (tokens[r] == -1) placeholders.push_back(static_cast<std::int32_t>(r));
  CHECK(named == placeholders);
  return named;
}

/// A step in flight that computes 6 tokens, and one after it with drafts.
struct TwoSteps {
  explicit TwoSteps(const Parents& parents = {}) {
    auto step = tree.begin_step();
    REQUIRE(step.add(s));
    (void)plans[0].build(step);
    first.emplace(std::move(step).submit());
    step = tree.begin_step();
    REQUIRE((parents.empty()
                 ? step.add(s, 100, {.tokens = Tokens{20, 21, 22}})
                 : step.add(s, 100, {.tokens = Tokens{20, 21, 22}, .parents = parents})));
    view = plans[1].build(step);
    second.emplace(std::move(step).submit());
  }

  Tree tree;
  AttentionPlan plans[2];
  Tree::Sequence s = tree.insert(iota(0, 6));
  std::optional<Tree::InFlight> first, second;
  Tree::StepView view;
};

}  // namespace

TEST_CASE("known drafts after a step that was dropped in flight: theirs until they are discarded") {
  for (const Parents& parents : {Parents{}, Parents{-1, 0, 0}}) {
    CAPTURE(parents.size());
    TwoSteps t(parents);
    CHECK(t.view.tokens(-1) == Tokens{-1, 20, 21, 22});
    t.first.reset();  // both may still run
    CHECK(t.view.is_current());
    CHECK(t.view.tokens(-1) == Tokens{-1, 20, 21, 22});
    CHECK(unknown_rows(t.view) == std::vector<std::int32_t>{0});

    t.tree.device_idle();  // what the first was to give is discarded
    CHECK(t.view.is_current());
    CHECK(t.view.tokens(-1) == Tokens{-1, -1, -1, -1});
    CHECK(unknown_rows(t.view) == std::vector<std::int32_t>{0, 1, 2, 3});
    t.s.append(Tokens{70, 71});  // where the output and the first draft stood
    CHECK(t.view.tokens(-1) == Tokens{70, 71, -1, -1});
    CHECK(test::refused([&] { (void)t.view.tokens(); }) ==
          "token at position = 8: expected known tokens; this one is the output of a step that is "
          "not committed: use tokens(placeholder) and unknown_tokens()");
    check_invariants(t.tree);

    const auto finished = std::move(*t.second).finish();
    CHECK(finished.rows().begin() == finished.rows().end());
    CHECK(t.s.tokens() == Tokens{0, 1, 2, 3, 4, 5, 70, 71});
    CHECK(t.s.num_uncomputed() == 8);
  }
}

TEST_CASE("known drafts after a draft that was wrong") {
  Tree tree;
  AttentionPlan plans[2];
  auto s = tree.insert(iota(0, 6)), other = tree.insert(iota(50, 2));
  auto step = tree.begin_step();
  REQUIRE(step.add(s, 100, {.tokens = Tokens{20, 21}}));
  (void)plans[0].build(step);
  auto first = std::move(step).submit();
  step = tree.begin_step();
  REQUIRE(step.add(s, 100, {.tokens = Tokens{30, 31}}));
  REQUIRE(step.add(other, 100, {.tokens = Tokens{60}}));
  const auto view = plans[1].build(step);
  auto second = std::move(step).submit();
  CHECK(view.tokens(-1) == Tokens{-1, 30, 31, 50, 51, 60});
  auto finished = std::move(first).finish();
  finished.commit(*finished.rows().begin(), Tokens{20, 99});
  CHECK(s.size() == 8);
  // The second step's rows stand at positions 8, 9 and 10, after what the sequence is now.
  CHECK(view.tokens(-1) == Tokens{-1, -1, -1, 50, 51, 60});
  s.append(Tokens{80, 81});
  CHECK(view.tokens(-1) == Tokens{80, 81, -1, 50, 51, 60});
  CHECK(unknown_rows(view) == std::vector<std::int32_t>{2});
  const auto done = std::move(second).finish();
  CHECK((*done.rows().begin()).sequence == other.id());
}

TEST_CASE("a view has the rows for which it was built, whatever is added later") {
  Tree tree;
  AttentionPlan plan;
  auto s = tree.insert(iota(0, 3)), other = tree.insert(iota(50, 2));
  auto step = tree.begin_step();
  REQUIRE(step.add(s));
  auto view = plan.build(step);
  REQUIRE(step.add(other, 100, {.tokens = Tokens{60, 61}, .parents = Parents{-1, -1}}));
  CHECK(view.num_rows == 3);
  CHECK(view.tokens() == iota(0, 3));
  CHECK(view.positions() == iota(0, 3));
  CHECK(view.unknown_tokens().empty());
  view = plan.build(step);
  CHECK(view.tokens() == Tokens{0, 1, 2, 50, 51, 60, 61});
}

TEST_CASE("a view that was moved from is the view that it was") {
  Tree tree;
  AttentionPlan plan;
  auto s = tree.insert(iota(0, 3));
  auto step = tree.begin_step();
  REQUIRE(step.add(s));
  auto view = plan.build(step);
  const auto moved = std::move(view);
  CHECK(moved.tokens() == iota(0, 3));
  CHECK(view.is_current());  // NOLINT(bugprone-use-after-move)
  CHECK(view.tokens() == iota(0, 3));
  auto assigned = Tree::StepView();
  assigned = std::move(view);
  (void)std::move(step).finish();
  for (const auto& each : {moved, view, assigned}) CHECK_FALSE(each.is_current());
  CHECK(test::refused([&] { (void)view.tokens(); }).substr(0, 19) == "plan = out of date:");
}

TEST_CASE("tokens and positions go into the caller's memory, without an allocation") {
  Tree tree;
  AttentionPlan plan;
  std::vector<Tree::Sequence> sequences;
  for (int i = 0; i < 20; ++i) sequences.push_back(tree.insert(iota(100 * i, i % 7 + 1)));
  auto step = tree.begin_step();
  for (auto& s : sequences) REQUIRE(step.add(s, 100, {.count = s.size() % 3}));
  const auto view = plan.build(step);
  const auto rows = static_cast<std::size_t>(view.num_rows);
  Tokens tokens(rows, -9);
  std::vector<std::int32_t> positions(rows, -9);
  const std::uint64_t before = test::heap.allocations;
  view.copy_tokens(tokens, -1);
  view.copy_positions(positions);
  CHECK(test::heap.allocations == before);
  CHECK(tokens == view.tokens(-1));
  CHECK(positions == view.positions());
  CHECK(!unknown_rows(view).empty());

  const char* const unknown =
      "token at position = 1: expected known tokens; this one is the output of a step that is not "
      "committed: use tokens(placeholder) and unknown_tokens()";
  CHECK(test::refused([&] { view.copy_tokens(tokens); }) == unknown);
  const auto refuses_size = [&](const auto& f) {
    const std::string message = test::refused(f);
    const std::string expected = "expected num_rows, " + std::to_string(rows);
    CHECK_MESSAGE(message.find(expected) != std::string::npos, message);
  };
  Tokens shorter(rows - 1, -9), longer(rows + 1, -9);
  std::vector<std::int32_t> others(rows + 1, -9);
  refuses_size([&] { view.copy_tokens(shorter); });
  refuses_size([&] { view.copy_tokens(longer, -1); });
  refuses_size([&] { view.copy_positions(others); });
  CHECK(shorter == Tokens(rows - 1, -9));
  CHECK(longer == Tokens(rows + 1, -9));
  CHECK(others == std::vector<std::int32_t>(rows + 1, -9));

  {
    const auto cancelled = std::move(step);
  }
  CHECK_THROWS_AS(view.copy_positions(positions), InvalidArgument);
}

TEST_CASE("known tokens go into the caller's memory") {
  Tree tree;
  AttentionPlan plan;
  auto s = tree.insert(iota(0, 6)), other = tree.insert(iota(50, 2));
  auto step = tree.begin_step();
  REQUIRE(step.add(s));
  REQUIRE(step.add(other));
  const auto view = plan.build(step);
  Tokens tokens(8, -9);
  view.copy_tokens(tokens);
  CHECK(tokens == Tokens{0, 1, 2, 3, 4, 5, 50, 51});
}
