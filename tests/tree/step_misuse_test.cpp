// Every misuse of a step is refused by name, and nothing has changed.
#include <doctest/doctest.h>

#include <cstddef>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunkattn/chunkattn.hpp"
#include "chunkattn/debug/tree.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;
using test::refused;

namespace {

using Tree = PrefixTree<int, 4, PoolAllocator, test::NoRetention>;

static_assert(!std::is_copy_constructible_v<Tree::Step> && !std::is_copy_assignable_v<Tree::Step>);
static_assert(!std::is_copy_constructible_v<Tree::InFlight> &&
              !std::is_copy_assignable_v<Tree::InFlight>);
static_assert(!std::is_copy_constructible_v<Tree::Finished> &&
              !std::is_copy_assignable_v<Tree::Finished>);
static_assert(!std::is_convertible_v<PlanView, LiveView>);

// What refers to an object is not had from a temporary; what can be had is a value.
template <class T>
concept HasRows = requires(T&& finished) { std::forward<T>(finished).rows(); };
static_assert(HasRows<Tree::Finished&> && HasRows<const Tree::Finished&>);
static_assert(!HasRows<Tree::Finished> && !HasRows<const Tree::Finished>);
static_assert(std::is_same_v<decltype(std::declval<AddResult>().row()), ScheduledSequence>);
static_assert(std::is_same_v<decltype(std::declval<const Tree&>().options()), TreeOptions>);
template <class T>
concept HasAllocator = requires(T&& tree) { std::forward<T>(tree).allocator(); };
static_assert(HasAllocator<const Tree&> && !HasAllocator<Tree>);

bool starts(const std::string& text, const char* with) {
  CAPTURE(text);
  return text.find(with) == 0;
}

struct Bench {
  /// An open step with one sequence, built.
  Tree::Step open(Tree::Sequence& s, const std::vector<int>& drafts = {}) {
    auto step = tree.begin_step();
    REQUIRE(step.add(s, 1000, {.tokens = drafts}));
    view = plan.build(step);
    return step;
  }
  Tree::Finished run(Tree::Sequence& s, const std::vector<int>& drafts = {}) {
    return open(s, drafts).finish();
  }

  Tree tree;
  AttentionPlan plan;
  Tree::StepView view;
};

ScheduledSequence first_row(const Tree::Finished& done) {
  return *done.rows().begin();
}

}  // namespace

TEST_CASE("commit: twice, of another step or tree, of what has no output") {
  Bench b;
  auto s = b.tree.insert(iota(1, 6)), other = b.tree.insert(iota(50, 6));
  auto done = b.run(s);
  const ScheduledSequence row = first_row(done);
  done.commit(row, 7);
  const std::string gone =
      "row = without output: expected a row of Finished::rows(): live, not superseded, not "
      "committed yet";
  CHECK(refused([&] { done.commit(row, 7); }) == gone);
  CHECK(s.size() == 7);

  auto next = b.run(other);
  CHECK(refused([&] { next.commit(row, 7); }) ==
        "row = of another step: expected a row that rows() of this one gives");
  CHECK(refused([&] { done.commit(first_row(next), 7); }) ==
        "row = of another step: expected a row that rows() of this one gives");
  auto after = b.run(s);  // the same sequence, at the same position in the batch
  CHECK(refused([&] { after.commit(row, 7); }) ==
        "row = of another step: expected a row that rows() of this one gives");
  CHECK(first_row(after).position == 6);
  ScheduledSequence none;
  none.index = 1;
  CHECK(refused([&] { next.commit(none, 7); }) ==
        "row = of another step: expected a row that rows() of this one gives");
  none.index = -1;
  CHECK(refused([&] { next.commit(none, 7); }) ==
        "row = of another step: expected a row that rows() of this one gives");

  Bench c;  // a tree of the same shape: only the tree id distinguishes its rows
  auto foreign = c.tree.insert(iota(50, 6));
  auto theirs = c.run(foreign);
  theirs.commit(first_row(theirs), 8);
  CHECK(other.num_reserved() == 1);
  other.leave();
  ScheduledSequence left;
  left = {SequenceId::none, 0, 0, 0, 6, 0, true};
  CHECK(refused([&] { next.commit(left, 7); }) ==
        "row = of another step: expected a row that rows() of this one gives");
  CHECK(next.rows().begin() == next.rows().end());

  auto part = b.tree.insert(iota(80, 6));
  auto step = b.tree.begin_step();
  const ScheduledSequence chunk = step.add(part, 4).row();
  (void)b.plan.build(step);
  auto prefill = std::move(step).finish();
  CHECK(refused([&] { prefill.commit(chunk, 7); }) == gone);
  check_invariants(b.tree);
}

TEST_CASE("commit: as many outputs as the row has, drafts as they were") {
  Bench b;
  auto s = b.tree.insert(iota(1, 6));
  auto done = b.run(s, {7, 8, 9});
  const ScheduledSequence row = first_row(done);
  CHECK(row.num_drafts == 3);
  const auto commit = [&](std::vector<int> outputs) {
    return refused([&] { done.commit(row, outputs); });
  };
  CHECK(commit({}) == "outputs.size() = 0: expected 1 to 4, the row's drafts and one more");
  CHECK(commit({7, 8, 9, 10, 11}) ==
        "outputs.size() = 5: expected 1 to 4, the row's drafts and one more");
  CHECK(commit({7, 5, 9}) ==
        "outputs[1] = another token than the draft in its place: expected accepted drafts as they "
        "were added, then one token more");
  CHECK(starts(commit({6, 8}), "outputs[0] = another token than the draft"));
  CHECK(s.tokens() == iota(1, 6));
  CHECK(s.num_reserved() == 4);
  CHECK(commit({7, 8, 4}) == "no error");
  CHECK(s.tokens() == std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8, 4});
  CHECK(starts(commit({7}), "row = without output"));
  check_invariants(b.tree);

  // Drafts that only the device knows are not compared, but counted.
  auto step = b.tree.begin_step();
  REQUIRE(step.add(s, 1000, {.count = 2}));
  (void)b.plan.build(step);
  auto unknown = std::move(step).finish();
  const ScheduledSequence last = first_row(unknown);
  CHECK(starts(refused([&] { unknown.commit(last, iota(0, 4)); }), "outputs.size() = 4"));
  unknown.commit(last, iota(0, 3));
  CHECK(s.size() == 12);
}

TEST_CASE("trees of drafts: parents before children, and one branch") {
  Bench b;
  auto s = b.tree.insert(iota(1, 6));
  {
    auto step = b.tree.begin_step();
    using Parents = std::vector<std::int32_t>;
    const auto add = [&](std::size_t drafts, const Parents& parents) {
      return refused(
          [&] { (void)step.add(s, 1000, {.tokens = iota(20, drafts), .parents = parents}); });
    };
    CHECK(add(3, {-1, 0}) == "parents.size() = 2: expected one for each of the 3 drafts");
    CHECK(add(3, {-1, 1, 0}) ==
          "parents[1] = 1: expected -1, the sequence's last token, or an earlier draft, below 1");
    CHECK(starts(add(1, {-2}), "parents[0] = -2"));
    CHECK(starts(add(1, {0}), "parents[0] = 0"));
    const Parents late{-1, 0, 0, 7};
    CHECK(starts(refused([&] { (void)step.add(s, 7, {.count = 4, .parents = late}); }),
                 "parents[3] = 7"));
    CHECK(step.num_rows() == 0);
    check_invariants(b.tree);
    // Beyond max_tokens the last ones are left out: here a chain is left.
    const ScheduledSequence row =
        step.add(s, 8, {.tokens = iota(20, 4), .parents = Parents{-1, 0, 0, 1}}).row();
    CHECK(row.num_drafts == 2);
    CHECK(row.num_rows == 8);
  }
  auto step = b.tree.begin_step();
  const std::vector<int> drafts{7, 8, 9, 10};  // 7 8 and 7 9 10
  REQUIRE(step.add(s, 1000, {.tokens = drafts, .parents = std::vector<std::int32_t>{-1, 0, 0, 2}}));
  b.view = b.plan.build(step);
  CHECK(b.view.tokens() == std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
  CHECK(b.view.positions() == std::vector<std::int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 7, 8});
  auto done = std::move(step).finish();
  const ScheduledSequence row = first_row(done);
  CHECK(row.num_drafts == 4);
  CHECK(row.output_row() == 5);
  const auto commit = [&](std::vector<int> outputs, std::int32_t leaf) {
    return refused([&] { done.commit(row, outputs, leaf); });
  };
  CHECK(commit({7, 9, 3}, 4) == "leaf = 4: expected -1, none, or one of the row's drafts, below 4");
  CHECK(starts(commit({7, 9, 3}, -2), "leaf = -2"));
  CHECK(commit({7, 3}, 2) ==
        "outputs.size() = 2: expected 3, the drafts up to leaf = 2 and one more");
  CHECK(commit({}, -1) == "outputs.size() = 0: expected 1, as leaf = -1 says: no draft was right");
  CHECK(commit({7, 8, 3}, 2) ==
        "outputs[1] = another token than the draft in its place: expected accepted drafts as they "
        "were added, then one token more");
  CHECK(refused([&] { done.commit(row, std::vector<int>{7, 8, 3}); }) ==
        "outputs.size() = 3: expected 1, or commit(row, outputs, leaf): the row's drafts are a "
        "tree");
  CHECK(s.tokens() == iota(1, 6));
  CHECK(commit({7, 9, 3}, 2) == "no error");
  CHECK(s.tokens() == std::vector<int>{1, 2, 3, 4, 5, 6, 7, 9, 3});
  CHECK(starts(commit({7, 9, 3}, 2), "row = without output"));
  check_invariants(b.tree);

  // The leaf of a chain is counted in the same way.
  auto chain = b.run(s, {4, 5});
  CHECK(starts(refused([&] { chain.commit(first_row(chain), iota(4, 2), 1); }),
               "outputs.size() = 2"));
  chain.commit(first_row(chain), iota(4, 2), 0);
  CHECK(s.size() == 11);

  // Drafts that only the device knows.
  auto last = b.tree.begin_step();
  REQUIRE(last.add(s, 1000, {.count = 2, .parents = std::vector<std::int32_t>{-1, -1}}));
  b.view = b.plan.build(last);
  REQUIRE(b.view.unknown_tokens().size() == 2);
  CHECK(b.view.unknown_tokens()[1].row == 2);
  CHECK(b.view.unknown_tokens()[1].position == 11);
  auto unknown = std::move(last).finish();
  unknown.commit(first_row(unknown), iota(60, 2), 1);
  CHECK(s.size() == 13);
  check_invariants(b.tree);
}

TEST_CASE("what was computed after a main branch is superseded by another branch of its length") {
  for (const std::int32_t leaf : {1, 3}) {  // the main branch, and the other one
    Bench b;
    auto s = b.tree.insert(iota(1, 6));
    auto step = b.tree.begin_step();
    REQUIRE(step.add(s, 1000,
                     {.tokens = std::vector<int>{7, 8, 9, 10},
                      .parents = std::vector<std::int32_t>{-1, 0, -1, 2}}));
    b.view = b.plan.build(step);
    auto first = std::move(step).submit();
    auto second = b.open(s).submit();
    auto done = std::move(first).finish();
    auto later = std::move(second).finish();
    const std::vector<int> outputs = leaf == 1 ? std::vector<int>{7, 8, 5} : iota(9, 3);
    done.commit(first_row(done), outputs, leaf);
    CHECK((later.rows().begin() != later.rows().end()) == (leaf == 1));
    CHECK(s.num_uncomputed() == (leaf == 1 ? 0 : 1));
    check_invariants(b.tree);
  }
}

TEST_CASE("commit: of a row without drafts, what is expected is said without counting to one") {
  Bench b;
  auto s = b.tree.insert(iota(1, 6));
  auto done = b.run(s);
  const ScheduledSequence row = first_row(done);
  CHECK(refused([&] { done.commit(row, std::vector<int>{1, 2}); }) ==
        "outputs.size() = 2: expected 1: the row has no drafts");
  CHECK(refused([&] { done.commit(row, std::vector<int>{}); }) ==
        "outputs.size() = 0: expected 1: the row has no drafts");
  CHECK(refused([&] { done.commit(row, std::vector<int>{1, 2}, 0); }) ==
        "leaf = 0: expected -1: the row has no drafts");
  CHECK(refused([&] { done.commit(row, std::vector<int>{1, 2}, -1); }) ==
        "outputs.size() = 2: expected 1, as leaf = -1 says: no draft was right");
  CHECK(s.size() == 6);
  done.commit(row, 7);
}

TEST_CASE("rows: by any kind of loop, and not once their step's outputs are discarded") {
  Bench b;
  auto s = b.tree.insert(iota(1, 6)), other = b.tree.insert(iota(50, 6));
  auto step = b.tree.begin_step();
  REQUIRE(step.add(s));
  REQUIRE(step.add(other));
  b.view = b.plan.build(step);
  std::optional<Tree::Finished> done = std::move(step).finish();
  int seen = 0;
  for (auto row : done->rows()) seen += row.index;
  for (auto& row : done->rows()) seen += 10 * row.index;
  for (const auto& row : done->rows()) seen += 100 * row.index;
  for (auto&& row : done->rows()) seen += 1000 * row.index;
  CHECK(seen == 1111);
  auto& first = *done->rows().begin();  // a value that lives on
  CHECK(first.sequence == s.id());

  const auto rows = done->rows();
  std::optional<Tree::Finished> moved = std::move(*done);
  CHECK((*rows.begin()).sequence == s.id());
  moved->commit(*rows.begin(), 7);
  CHECK((*rows.begin()).sequence == other.id());
  moved.reset();
  const std::string over =
      "rows() = of a step that is over: expected a Finished that is still there: keep it while "
      "going over its rows";
  CHECK(refused([&] { (void)rows.begin(); }) == over);
  CHECK(refused([&] { (void)rows.end(); }) == over);
  step = b.tree.begin_step();  // the same record, for another step
  CHECK(refused([&] { (void)rows.begin(); }) == over);
  b.tree = Tree();
  CHECK(refused([&] { (void)rows.begin(); }) == over);
}

TEST_CASE("commit: in the order of the steps, and no row that started on what was rejected") {
  Bench b;
  auto s = b.tree.insert(iota(1, 6));
  auto first = b.open(s, {7, 8}).submit();
  auto second = b.open(s).submit();
  CHECK(b.view.unknown_tokens().size() == 1);
  auto done = std::move(first).finish();
  auto later = std::move(second).finish();
  CHECK(
      refused([&] { later.commit(first_row(later), 1); }) ==
      "position of the row's output = 9: expected 6: commit the outputs of the earlier step first, "
      "or drop its Finished");
  const ScheduledSequence superseded = first_row(later);
  done.commit(first_row(done), std::vector<int>{7, 5});  // the second draft was wrong
  CHECK(later.rows().begin() == later.rows().end());
  CHECK(starts(refused([&] { later.commit(superseded, 1); }), "row = without output"));
  CHECK(s.tokens() == std::vector<int>{1, 2, 3, 4, 5, 6, 7, 5});
  CHECK(s.num_uncomputed() == 1);
  check_invariants(b.tree);
}

TEST_CASE("finished and submitted: in order, and after build") {
  Bench b;
  auto s = b.tree.insert(iota(1, 6)), other = b.tree.insert(iota(50, 6));
  auto step = b.tree.begin_step();
  REQUIRE(step.add(s));
  const std::string unbuilt =
      "step = 1: expected AttentionPlan::build() after the last add(): the kernels have no plan of "
      "what to compute";
  CHECK(refused([&] { (void)std::move(step).finish(); }) == unbuilt);
  CHECK(refused([&] { (void)std::move(step).submit(); }) == unbuilt);
  CHECK(b.plan.build(step));
  REQUIRE(step.add(other));
  CHECK(refused([&] { (void)std::move(step).finish(); }) == unbuilt);
  CHECK(refused([&] { (void)std::move(step).submit(); }) == unbuilt);
  CHECK(step.num_sequences() == 2);  // the step is still there
  CHECK(b.plan.build(step));
  std::optional<Tree::InFlight> first = std::move(step).submit();
  auto second = b.open(s).submit();
  const std::string early =
      "step = 2: expected step 1 first: steps finish in the order they were submitted";
  CHECK(refused([&] { (void)std::move(second).finish(); }) == early);
  CHECK(starts(refused([&] { (void)b.open(other).finish(); }), "step = 3: expected step 1 first"));
  {
    const auto done = std::move(*first).finish();
  }
  CHECK(refused([&] { (void)std::move(second).finish(); }) == "no error");
  step = b.tree.begin_step();  // without rows there is nothing to build
  CHECK(refused([&] { (void)std::move(step).finish(); }) == "no error");
  check_invariants(b.tree);
}

TEST_CASE("one open step, four in flight") {
  Bench b;
  auto s = b.tree.insert(iota(1, 6));
  std::vector<Tree::InFlight> flying;
  for (int i = 0; i < 3; ++i) flying.push_back(b.open(s).submit());
  {
    const auto open = b.tree.begin_step();
    CHECK(
        refused([&] { (void)b.tree.begin_step(); }) ==
        "begin_step() = a second open step: expected that step 4 is submitted, finished or dropped "
        "first");
  }
  flying.push_back(b.open(s).submit());
  CHECK(refused([&] { (void)b.tree.begin_step(); }) ==
        "steps in flight = 4: expected fewer than 4: finish the oldest first, or, where steps were "
        "dropped in flight, call device_idle() when the device is idle");
  flying.clear();  // dropped: the device may still run them
  CHECK(starts(refused([&] { (void)b.tree.begin_step(); }), "steps in flight = 4"));
  b.tree.device_idle();
  CHECK(refused([&] { (void)b.tree.begin_step(); }) == "no error");
  CHECK(s.num_uncomputed() == 6);
  check_invariants(b.tree);
}

TEST_CASE("add: of a sequence that is not there, of another tree, twice, of nothing") {
  Bench b, c;
  auto s = b.tree.insert(iota(1, 6)), left = b.tree.insert(iota(1, 6));
  auto foreign = c.tree.insert(iota(1, 6));
  auto step = b.tree.begin_step();
  CHECK(refused([&] { (void)step.add(foreign); }) ==
        "sequence = of another tree: expected a sequence of the step's tree");
  CHECK(refused([&] { (void)step.add(s, 0); }) == "max_tokens = 0: expected at least one token");
  auto moved = std::move(s);
  CHECK(starts(refused([&] { (void)step.add(s); }), "sequence = empty"));  // NOLINT
  left.leave();
  CHECK(starts(refused([&] { (void)step.add(left); }), "sequence = empty"));
  CHECK(step.num_rows() == 0);
  REQUIRE(step.add(moved));
  CHECK(refused([&] { (void)step.add(moved); }) ==
        "sequence = added twice: expected each sequence at most once per step");
  CHECK(step.num_rows() == 6);
  (void)b.plan.build(step);
  {
    const auto done = std::move(step).finish();
  }
  step = b.tree.begin_step();
  const AddResult nothing = step.add(moved);  // its output was discarded
  CHECK_FALSE(nothing);
  CHECK(nothing.reason() == AddResult::Reason::nothing_to_compute);
  CHECK(
      refused([&] { (void)nothing.row(); }) ==
      "row() = of a sequence that was not added: expected a result that is true; reason() says why "
      "this one is not");
  check_invariants(b.tree);
}

TEST_CASE("a view ends with its step and when its plan builds another") {
  Bench b;
  auto s = b.tree.insert(iota(1, 6)), other = b.tree.insert(iota(50, 6));
  KvCache<Cpu, float> cache(b.tree, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 8});
  ChunkAttention<Cpu, 8> attention(1);
  const std::vector<float> rows(6 * 8, 1.0f);
  const std::string stale =
      "plan = out of date: expected the view that its plan built last, of a step that is open or "
      "in "
      "flight";
  const auto check = [&](const auto& view, bool current) {
    std::vector<float> out(rows.size());
    const std::string text = current ? "no error" : stale;
    CHECK(view.is_current() == current);
    CHECK(refused([&] { attention.write(cache.layer(0), view, rows, rows); }) == text);
    CHECK(refused([&] { attention.run(cache.layer(0), view, rows, out); }) == text);
    CHECK(refused([&] { (void)view.tokens(); }) == text);
    CHECK(refused([&] { (void)view.positions(); }) == text);
    CHECK(refused([&] { (void)view.unknown_tokens(); }) == text);
  };
  auto step = b.open(s);
  auto kept = b.view;
  check(kept, true);
  auto flight = std::move(step).submit();
  check(kept, true);
  {
    const auto done = std::move(flight).finish();
  }
  check(kept, false);
  {
    const auto cancelled = b.open(other);
    check(b.view, true);
  }
  check(b.view, false);
  {
    const auto lost = b.open(other).submit();
    check(b.view, true);
  }
  check(b.view, false);
  b.tree.device_idle();
  step = b.open(other);
  kept = b.view;
  b.view = b.plan.build(step);  // the same again
  check(kept, false);
  check(b.view, true);
  AttentionPlan moved = std::move(b.plan);
  check(b.view, true);  // continues with the plan
  {
    const AttentionPlan last = std::move(moved);
    check(b.view, true);
  }
  check(b.view, false);  // its plan is gone
  b.plan = AttentionPlan();
  b.view = b.plan.build(step);
  check(b.view, true);
  b.plan = AttentionPlan();  // replaced
  check(b.view, false);
  std::optional<Tree> tree(std::in_place);
  auto last = tree->insert(iota(50, 6));
  auto open = tree->begin_step();
  REQUIRE(open.add(last));
  const auto orphan = b.plan.build(open);
  tree.reset();
  check(orphan, false);
  check(StepView(b.view), false);
}

TEST_CASE("handles of steps that were moved from, or whose tree is gone") {
  std::optional<Tree> tree(std::in_place);
  AttentionPlan plan;
  auto s = tree->insert(iota(1, 6));
  auto step = tree->begin_step();
  auto moved = std::move(step);
  const std::string from = "step = moved-from: expected a step that was not moved from";
  CHECK(refused([&] { (void)step.add(s); }) == from);  // NOLINT(bugprone-use-after-move)
  CHECK(refused([&] { (void)step.num_rows(); }) == from);
  CHECK(refused([&] { (void)step.num_sequences(); }) == from);
  CHECK(refused([&] { (void)plan.build(step); }) == from);
  CHECK(refused([&] { (void)std::move(step).submit(); }) == from);
  CHECK(refused([&] { (void)std::move(step).finish(); }) == from);
  REQUIRE(moved.add(s));
  (void)plan.build(moved);
  auto flight = std::move(moved).submit();
  CHECK(refused([&] { (void)std::move(moved).finish(); }) == from);  // NOLINT
  auto done = std::move(flight).finish();
  CHECK(refused([&] { (void)std::move(flight).finish(); }) == from);  // NOLINT
  auto last = std::move(done);
  CHECK(refused([&] { (void)done.rows(); }) == from);  // NOLINT
  const ScheduledSequence row = first_row(last);
  CHECK(refused([&] { done.commit(row, 1); }) == from);
  step = tree->begin_step();
  tree.reset();
  const std::string gone = "step = orphaned: expected a step whose tree still exists";
  CHECK(refused([&] { (void)last.rows(); }) == gone);
  CHECK(refused([&] { last.commit(row, 1); }) == gone);
  CHECK(refused([&] { (void)step.num_rows(); }) == gone);
  CHECK(refused([&] { (void)plan.build(step); }) == gone);
}
