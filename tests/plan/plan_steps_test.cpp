// Long decoding: no step after the warm-up allocates, and the segments are rebuilt exactly when a
// sequence joins, leaves or forks or the list of rows changes. And which sequences a step may have
// together.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/counted_new.hpp"
#include "tests/support/random.hpp"
#include "tests/support/retention.hpp"

using namespace chunkattn;

namespace {

using Tree = PrefixTree<std::int32_t, 64, FixedAllocator, test::NoRetention>;

std::vector<std::int32_t> prompt_of(std::size_t shared, std::size_t own, int who) {
  std::vector<std::int32_t> tokens(shared + own, 1);
  for (std::size_t i = shared; i < tokens.size(); ++i) tokens[i] = 100 + who;
  return tokens;
}

/// One step, for every sequence one token; returns the arrays as they were built.
template <class Batch>
PlanView decode_step(Tree& tree, AttentionPlan& plan, Batch&& batch) {
  auto step = tree.begin_step();
  for (auto& s : batch) REQUIRE(step.add(s));
  const PlanView arrays = plan.build(step);
  auto done = std::move(step).finish();
  for (const ScheduledSequence row : done.rows()) done.commit(row, 7);
  return arrays;
}

}  // namespace

TEST_CASE("640 decode steps with random chunk phases: no allocation, one version of segments") {
  test::Random random(1);
  for (const int b : {32, 256}) {
    CAPTURE(b);
    Tree tree(FixedAllocator(8192));
    AttentionPlan plan;
    std::vector<Tree::Sequence> batch;
    for (int i = 0; i < b; ++i) {
      batch.push_back(
          tree.insert(prompt_of(256, static_cast<std::size_t>(random.uniform(1, 200)), i)));
    }
    decode_step(tree, plan, batch);  // the prompts, each tail's first slot: the warm-up
    decode_step(tree, plan, batch);
    std::uint64_t pieces_version = decode_step(tree, plan, batch).pieces_version;
    const std::uint64_t rebuilds = plan.num_rebuilds(), version = tree.version();
    std::uint64_t steps_that_filled = 0;
    const std::uint64_t before = test::heap.allocations;
    for (int step = 0; step < 640; ++step) {
      const PlanView arrays = decode_step(tree, plan, batch);
      steps_that_filled += arrays.pieces_version != pieces_version ? 1 : 0;
      pieces_version = arrays.pieces_version;
    }
    CHECK(test::heap.allocations == before);
    CHECK(plan.num_rebuilds() == rebuilds);
    CHECK(tree.version() == version);
    CHECK(steps_that_filled >= (b == 256 ? 600u : 200u));  // boundaries are the common case
    CHECK(batch[0].size() > 640);
    check_invariants(tree);
  }
}

TEST_CASE("chunks of one token: a piece for each, and none beyond the sequence") {
  using Narrow = PrefixTree<std::int32_t, 1, FixedAllocator, test::NoRetention>;
  Narrow tree(FixedAllocator(200));
  AttentionPlan plan;
  std::vector<Narrow::Sequence> batch;
  batch.push_back(tree.insert(prompt_of(3, 2, 0)));
  batch.push_back(tree.insert(prompt_of(3, 4, 1)));
  for (int i = 0; i < 40; ++i) {
    auto step = tree.begin_step();
    for (auto& s : batch) REQUIRE(step.add(s));
    const PlanView view = plan.build(step);
    for (int row = 0; row < view.num_rows; ++row) {
      int seen = 0;
      for (int s = view.row_segment[row]; s >= 0; s = view.segments[s].parent) {
        const PlanView::Segment& segment = view.segments[s];
        for (int p = 0; p < segment.num_pieces; ++p) {
          const Piece& piece = view.pieces[segment.piece_begin + p];
          CHECK((piece.chunk >= 0 && piece.chunk < 200 && piece.length == 1));
          ++seen;
        }
      }
      CHECK(seen >= view.row_kv_len[row]);
    }
    auto done = std::move(step).finish();
    for (const ScheduledSequence row : done.rows()) done.commit(row, 7);
  }
  CHECK(plan.num_rebuilds() <= 3);
}

TEST_CASE("rebuilds equal joins, leaves, forks and row changes") {
  test::Random random(2);
  for (const int b : {32, 256}) {
    CAPTURE(b);
    Tree tree(FixedAllocator(16384));
    AttentionPlan plan, prefill;
    std::vector<Tree::Sequence> batch;
    const auto join = [&] {
      batch.push_back(tree.insert(
          prompt_of(256, static_cast<std::size_t>(random.uniform(1, 200)), random.uniform(0, 9))));
      decode_step(tree, prefill, std::span(&batch.back(), 1));
    };
    for (int i = 0; i < b; ++i) join();
    std::uint64_t pieces = decode_step(tree, plan, batch).pieces_version;
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
      const std::uint64_t now = decode_step(tree, plan, batch).pieces_version;
      boundaries += now != pieces ? 1 : 0;
      pieces = now;
      REQUIRE(plan.num_rebuilds() == expected);
      if (step % 64 == 0) check_invariants(tree);
    }
    CHECK(joins * leaves * forks * reorders > 0);
    CHECK(boundaries > 100);
    CHECK(plan.num_rebuilds() == 1 + static_cast<std::uint64_t>(joins + leaves + forks + reorders));
  }
}

TEST_CASE("a plan that is rebuilt holds no more than a fresh one") {
  Tree tree(FixedAllocator(256));
  AttentionPlan kept;
  std::vector<Tree::Sequence> batch;
  for (int i = 0; i < 8; ++i) {
    batch.push_back(tree.insert(prompt_of(100, 20, i)));  // each a rebuild
    auto step = tree.begin_step();
    for (auto& s : batch)
      if (s.num_uncomputed() > 0) REQUIRE(step.add(s));
    const PlanView ours = kept.build(step);
    AttentionPlan fresh;
    const PlanView theirs = fresh.build(step);
    CHECK(ours.num_pieces == theirs.num_pieces);
    CHECK(ours.num_segments == theirs.num_segments);
    CHECK(ours.num_rows == theirs.num_rows);
    auto done = std::move(step).finish();
    for (const ScheduledSequence row : done.rows()) done.commit(row, 7);
  }
  CHECK(kept.num_rebuilds() == 8);
}

TEST_CASE(
    "a sequence that reads what another writes comes after it, and each position is written once") {
  PrefixTree<int, 4, PoolAllocator, test::NoRetention> tree;
  AttentionPlan plan;
  const std::vector<int> prompt = {1, 2, 3, 4, 5, 6};
  auto a = tree.insert(prompt);
  auto second = tree.insert(std::vector<int>{1, 2, 3, 4, 5, 6, 7});
  CHECK(second.num_pending() == 6);
  CHECK(second.waits_for() == a.id());
  CHECK(second.num_uncomputed() == 1);
  const auto blocked = [&](AddResult result) {
    return result.reason() == AddResult::Reason::waits_for_sequence && result.waits_for() == a.id();
  };
  {
    auto step = tree.begin_step();
    CHECK(blocked(step.add(second)));
    CHECK(step.add(a, 5));  // not all of what the second reads
    CHECK(blocked(step.add(second)));
    CHECK(step.num_rows() == 5);
    auto done = (void(plan.build(step)), std::move(step).finish());
    CHECK(done.rows().begin() == done.rows().end());  // part of a prompt: nothing to sample
  }
  CHECK(second.num_pending() == 1);
  auto step = tree.begin_step();
  CHECK(blocked(step.add(second)));
  CHECK(step.add(a));
  CHECK(step.add(second));
  const auto view = plan.build(step);
  CHECK(view.num_rows == 2);
  CHECK(view.tokens() == std::vector<int>{6, 7});
  CHECK(view.positions() == std::vector<int>{5, 6});
  CHECK(view.writes[0].chunk != no_chunk);
  CHECK(view.writes[1].chunk != no_chunk);
  CHECK(view.writes[0].offset != view.writes[1].offset);
  auto done = std::move(step).finish();
  CHECK(second.num_pending() == 0);
  CHECK(second.waits_for() == SequenceId::none);
  std::vector<SequenceId> outputs;
  for (const ScheduledSequence row : done.rows()) outputs.push_back(row.sequence);
  CHECK(outputs == std::vector<SequenceId>{a.id(), second.id()});
  check_invariants(tree);
}

TEST_CASE("a row that another writes, or that is written, writes nowhere") {
  PrefixTree<int, 4, PoolAllocator, test::NoRetention> tree;
  AttentionPlan plan;
  const std::vector<int> prompt = {1, 2, 3, 4, 5, 6};
  auto a = tree.insert(prompt);
  auto second = tree.insert(prompt, {.max_reuse = 2});  // computes positions 2 to 5 a second time
  auto step = tree.begin_step();
  CHECK(step.add(a));
  CHECK(step.add(second));
  const PlanView view = plan.build(step);
  CHECK(view.num_rows == 6 + 4);
  for (int row = 0; row < 10; ++row) CHECK((view.writes[row].chunk != no_chunk) == (row < 6));
  {
    auto done = std::move(step).finish();
  }
  auto third = tree.insert(prompt, {.max_reuse = 3});
  step = tree.begin_step();
  CHECK(step.add(third));
  CHECK(plan.build(step).writes[0].chunk == no_chunk);
}

TEST_CASE("what a successor computes a second time it does not write a second time") {
  PrefixTree<int, 4, PoolAllocator, test::NoRetention> tree;
  AttentionPlan plan;
  const std::vector<int> prompt = {1, 2, 3, 4, 5, 6, 7, 8};
  auto a = tree.insert(prompt);
  a.mark_loaded({0, 5});
  auto successor = tree.insert(prompt, {.max_reuse = 2});
  a.leave();
  auto step = tree.begin_step();
  const ScheduledSequence row = step.add(successor).row();
  CHECK(row.position == 2);
  const PlanView view = plan.build(step);
  REQUIRE(view.num_rows == 6);
  for (int i = 0; i < 6; ++i) CHECK((view.writes[i].chunk != no_chunk) == (i >= 3));
  {
    auto done = std::move(step).finish();
  }
  CHECK(successor.num_written() == 8);
}

TEST_CASE("a plan that outlives its tree is not taken for one of the next tree at its address") {
  AttentionPlan plan;
  for (int round = 0; round < 3; ++round) {
    PrefixTree<int, 4, PoolAllocator, test::NoRetention> tree;
    auto s = tree.insert(std::vector<int>{1, 2, 3, 4, 5 + round});
    auto step = tree.begin_step();
    CHECK(step.add(s));
    CHECK(plan.build(step).tokens().back() == 5 + round);
    CHECK(plan.num_rebuilds() == static_cast<std::uint64_t>(round) + 1);
  }
}
