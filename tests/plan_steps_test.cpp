// Long decoding: no step after the warm-up allocates, and the topology is rebuilt exactly when a
// sequence joins, leaves or forks or the list of rows changes. And what a plan refuses.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/counted_new.hpp"
#include "tests/support/random.hpp"

using namespace chunkattn;

namespace {

using Tree = PrefixTree<std::int32_t, 64, FixedAllocator>;

std::vector<std::int32_t> prompt_of(std::size_t shared, std::size_t own, int who) {
  std::vector<std::int32_t> tokens(shared + own, 1);
  for (std::size_t i = shared; i < tokens.size(); ++i) tokens[i] = 100 + who;
  return tokens;
}

void decode_step(Tree& tree, AttentionPlan& plan, std::vector<Tree::Sequence>& batch) {
  plan.clear();
  for (auto& s : batch) plan.add(s, s.reserve(1));
  plan.update(tree);
  for (auto& s : batch) s.commit(7);
}

void prefill(Tree& tree, AttentionPlan& plan, Tree::Sequence& s) {
  if (s.next_uncomputed().empty()) return;  // all of it is cached
  plan.clear();
  plan.add(s, s.next_uncomputed());
  plan.update(tree);
  s.commit(s.next_uncomputed());
}

}  // namespace

TEST_CASE("640 decode steps with random chunk phases: no allocation, one topology") {
  test::Random random(1);
  for (const int b : {32, 256}) {
    CAPTURE(b);
    Tree tree(FixedAllocator(8192));
    AttentionPlan plan;
    std::vector<Tree::Sequence> batch;
    for (int i = 0; i < b; ++i) {
      batch.push_back(
          tree.insert(prompt_of(256, static_cast<std::size_t>(random.uniform(1, 200)), i)));
      prefill(tree, plan, batch.back());
    }
    decode_step(tree, plan, batch);  // each tail's first place: the warm-up
    decode_step(tree, plan, batch);
    const std::uint64_t rebuilds = plan.num_rebuilds(), version = tree.version();
    const std::uint64_t pieces_before = plan.view().pieces_version;
    std::uint64_t pieces_version = pieces_before, steps_that_filled = 0;
    const std::uint64_t before = test::heap.allocations;
    for (int step = 0; step < 640; ++step) {
      decode_step(tree, plan, batch);
      steps_that_filled += plan.view().pieces_version != pieces_version ? 1 : 0;
      pieces_version = plan.view().pieces_version;
    }
    CHECK(test::heap.allocations == before);
    CHECK(plan.num_rebuilds() == rebuilds);
    CHECK(tree.version() == version);
    CHECK(steps_that_filled >= (b == 256 ? 600u : 200u));  // boundaries are the common case
    CHECK(batch[0].size() > 640);
    tree.check_invariants();
  }
}

TEST_CASE("rebuilds equal joins, leaves, forks and row changes") {
  test::Random random(2);
  for (const int b : {32, 256}) {
    CAPTURE(b);
    Tree tree(FixedAllocator(16384));
    AttentionPlan plan, prefills;
    std::vector<Tree::Sequence> batch;
    const auto join = [&] {
      batch.push_back(tree.insert(
          prompt_of(256, static_cast<std::size_t>(random.uniform(1, 200)), random.uniform(0, 9))));
      prefill(tree, prefills, batch.back());
    };
    for (int i = 0; i < b; ++i) join();
    decode_step(tree, plan, batch);
    std::uint64_t expected = plan.num_rebuilds();
    int joins = 0, leaves = 0, forks = 0, reorders = 0, boundaries = 0;
    for (int step = 0; step < 640; ++step) {
      const int what = random.uniform(0, 99);  // at most one event per step
      if (what < 2) {
        join();
        ++joins, ++expected;
      } else if (what < 4) {
        batch.erase(batch.begin() + static_cast<std::ptrdiff_t>(random.index(batch.size())));
        ++leaves, ++expected;
      } else if (what < 6) {
        batch.push_back(batch[random.index(batch.size())].fork());
        ++forks, ++expected;
      } else if (what < 8) {
        std::swap(batch[0], batch[1]);
        ++reorders, ++expected;
      }
      const std::uint64_t pieces = plan.view().pieces_version;
      decode_step(tree, plan, batch);
      boundaries += plan.view().pieces_version != pieces ? 1 : 0;
      REQUIRE(plan.num_rebuilds() == expected);
      if (step % 64 == 0) tree.check_invariants();
    }
    CHECK(joins * leaves * forks * reorders > 0);
    CHECK(boundaries > 100);
    CHECK(plan.num_rebuilds() == 1 + static_cast<std::uint64_t>(joins + leaves + forks + reorders));
  }
}

namespace {

template <class F>
std::string refused(const F& f) {
  try {
    f();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE("what a plan refuses, and that it changes nothing") {
  using Small = PrefixTree<int, 4>;
  Small tree, other;
  AttentionPlan plan;
  const std::vector<int> prompt = {1, 2, 3, 4, 5, 6};
  auto a = tree.insert(prompt);
  auto twin = tree.insert(prompt);
  auto foreign = other.insert(prompt);
  CHECK(refused([&] { plan.update(tree); }) ==
        "rows = 0: expected at least one sequence: call add() first");
  CHECK(refused([&] {
          plan.add(a, TokenRange{0, 0});
        }) == "queries.length = 0: expected at least one query token");
  CHECK(refused([&] {
          plan.add(a, TokenRange{4, 3});
        }) ==
        "queries.end() = 7: expected positions within the 6 known and reserved tokens of the "
        "sequence");
  CHECK(refused([&] { plan.add(a, TokenRange{-1, 3}); }).find("queries.end() = 2") == 0);

  plan.clear();
  plan.add(foreign, foreign.next_uncomputed());
  CHECK(refused([&] { plan.update(tree); }).find("sequence = of another tree") == 0);
  plan.clear();
  plan.add(a, a.next_uncomputed());
  plan.add(a, TokenRange{0, 1});
  CHECK(refused([&] { plan.update(tree); }).find("sequence = added twice") == 0);

  // The twin's K/V is the first one's to write: not before it, but in the same step.
  CHECK(twin.num_pending() == 6);
  CHECK(twin.next_uncomputed().empty());
  const TokenRange next = twin.reserve(1);
  plan.clear();
  plan.add(twin, next);
  const std::uint64_t version = tree.version();
  CHECK(refused([&] { plan.update(tree); }) ==
        "queries.begin = 6: expected that the sequence which is to write positions 0 to 5 computes "
        "them in this step or has committed them");
  plan.add(a, TokenRange{0, 5});  // not all of them
  CHECK(refused([&] { plan.update(tree); }).find("queries.begin = 6") == 0);
  CHECK(tree.version() == version);
  CHECK(plan.num_rebuilds() == 0);
  plan.clear();
  plan.add(twin, next);
  plan.add(a, a.next_uncomputed());
  plan.update(tree);
  CHECK(plan.num_rows() == 7);
  CHECK(plan.num_rebuilds() == 1);
  // Each position is written once, by the first sequence; the twin writes only its own place.
  for (int i = 1; i < 7; ++i) CHECK(plan.view().writes[i].slot != no_slot);
  CHECK(plan.view().writes[0].slot != plan.view().writes[1].slot);
  a.commit(TokenRange{0, 6});
  twin.commit(9);
  CHECK(twin.num_pending() == 0);

  // A row may not run ahead of uncomputed tokens of its own sequence.
  a.append(std::vector<int>{7, 8, 9});
  plan.clear();
  plan.add(a, TokenRange{8, 1});
  CHECK(refused([&] { plan.update(tree); }).find("queries.begin = 8: expected at most 6") == 0);

  plan.clear();
  plan.add(a, a.next_uncomputed());
  a.leave();
  CHECK(refused([&] { plan.update(tree); }).find("sequence = left") == 0);
  plan.clear();
  const TokenRange draft = twin.reserve(3);
  plan.add(twin, draft);
  twin.commit(std::vector<int>{});  // the draft is rejected before the step
  CHECK(refused([&] { plan.update(tree); }).find("queries.end() = 10") == 0);
  tree.check_invariants();
}

TEST_CASE("a plan that outlives its tree is not taken for one of the next tree at its address") {
  AttentionPlan plan;
  for (int round = 0; round < 3; ++round) {
    PrefixTree<int, 4> tree;
    auto s = tree.insert(std::vector<int>{1, 2, 3, 4, 5 + round});
    plan.clear();
    plan.add(s, s.next_uncomputed());
    plan.update(tree);
    CHECK(plan.num_rebuilds() == static_cast<std::uint64_t>(round) + 1);
  }
}
