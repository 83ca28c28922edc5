// What has gone takes nothing: no memory for handles, steps, drafts, pins and caches that were
// there, however many, and no chunk.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/counted_new.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;

namespace {

/// What `work` allocates when it is done a thousand times more, after it was done ten times.
template <class F>
std::uint64_t allocations_of(const F& work) {
  for (int i = 0; i < 10; ++i) work();
  const std::uint64_t before = test::heap.allocations;
  for (int i = 0; i < 1000; ++i) work();
  return test::heap.allocations - before;
}

const std::vector<int> drafts{70, 71, 72};
const std::vector<std::int32_t> parents{-1, -1, -1};

/// A step of a sequence with three drafts, each of them a branch.
template <class Tree>
typename Tree::Finished step_with_drafts(Tree& tree, AttentionPlan& plan,
                                         typename Tree::Sequence& s) {
  auto step = tree.begin_step();
  REQUIRE(step.add(s, 50, {.tokens = drafts, .parents = parents}));
  (void)plan.build(step);
  return std::move(step).finish();
}

}  // namespace

TEST_CASE("handles that have gone take no memory") {
  PrefixTree<int, 4> tree(PoolAllocator{.max_chunks = 64});
  const std::vector<int> prompt = iota(0, 9);
  tree.insert(prompt).mark_loaded({0, 9});
  CHECK(allocations_of([&] { tree.insert(prompt).leave(); }) == 0);
  CHECK(allocations_of([&] { (void)tree.insert(prompt).fork(); }) == 0);
  CHECK(allocations_of([&] { (void)tree.begin_step(); }) == 0);
  CHECK(allocations_of([&] {
          auto s = tree.insert(prompt);
          s.truncate(5);
        }) == 0);
  PrefixTree<int, 4> pinned(PoolAllocator{.max_chunks = 64}, {}, {.max_pinned = 8});
  pinned.insert(prompt).mark_loaded({0, 9});
  CHECK(allocations_of([&] { CHECK(pinned.pin(prompt).size() == 9); }) == 0);
}

TEST_CASE("handles that another thread dropped take no memory once the tree is called") {
  PrefixTree<int, 4> tree;
  const std::vector<int> prompt = iota(0, 9);
  const auto come_and_go = [&] {
    std::vector<decltype(tree.insert(prompt))> all;
    for (int i = 0; i < 100; ++i) all.push_back(tree.insert(prompt));
    std::thread([&] { all.clear(); }).join();
    CHECK(tree.match_prefix(prompt).pending > 0);  // they are there until the tree is called
    tree.device_idle();
    CHECK(tree.stats().live_sequences == 0);
    all.shrink_to_fit();
  };
  for (int i = 0; i < 4; ++i) come_and_go();
  const std::uint64_t before = test::heap.allocations;
  come_and_go();
  const std::uint64_t once = test::heap.allocations - before;
  for (int i = 0; i < 30; ++i) come_and_go();
  CHECK(test::heap.allocations - before == 31 * once);
}

TEST_CASE("chunks of drafts are free again as soon as the step's outputs are committed") {
  PrefixTree<int, 4> tree;
  AttentionPlan plan;
  auto s = tree.insert(iota(0, 5));
  {
    auto done = step_with_drafts(tree, plan, s);
    CHECK(tree.stats().used_chunks == 3);  // two for the tokens, one for drafts beside the first
    CHECK(tree.stats().leaving_sequences == 1);
    done.commit(*done.rows().begin(), 1, -1);
  }
  CHECK(tree.stats().used_chunks == 2);
  CHECK(tree.stats().leaving_sequences == 0);
  {
    auto done = step_with_drafts(tree, plan, s);
    done.commit(*done.rows().begin(), std::vector<int>{71, 1}, 1);
  }
  CHECK(tree.stats().used_chunks == 3);  // the next step copies draft 1 from there
  auto step = tree.begin_step();
  REQUIRE(step.add(s));
  CHECK(plan.build(step).num_copies == 1);
  (void)std::move(step).finish();
  CHECK(tree.stats().used_chunks == 2);
  CHECK(tree.stats().leaving_sequences == 0);
  check_invariants(tree);
}

TEST_CASE("a sequence whose drafts were rejected goes on like any other") {
  PrefixTree<int, 16> tree;
  AttentionPlan plan;
  auto s = tree.insert(iota(0, 5));
  {
    auto step = tree.begin_step();
    REQUIRE(step.add(s, 50, {.tokens = drafts}));
    (void)plan.build(step);
    auto done = std::move(step).finish();
    done.commit(*done.rows().begin(), 1);
  }
  CHECK(s.loadable().begin == 5);
  CHECK(s.loadable().length == 1);
  auto twin = s.fork();  // shares what is not written: it is no step's
  CHECK(twin.num_pending() == 0);
  s.append(iota(50, 8));
  auto third = s.fork();
  CHECK(third.num_pending() == 9);
  CHECK(third.take_over() == 9);
  check_invariants(tree);
}

TEST_CASE("caches that check writes take nothing of their tree once they have gone") {
  PrefixTree<int, 4> tree;
  const auto make = [&] {
    const KvCache<Cpu, float> cache(
        tree, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 8, .check_writes = true});
  };
  for (int i = 0; i < 10; ++i) make();
  const std::uint64_t before = test::heap.allocations;
  make();
  const std::uint64_t once = test::heap.allocations - before;
  for (int i = 0; i < 200; ++i) make();
  CHECK(test::heap.allocations - before == 201 * once);
}

TEST_CASE("steps that were dropped in flight take nothing of a cache that checks writes") {
  PrefixTree<int, 4> tree;
  const KvCache<Cpu, float> cache(
      tree, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 8, .check_writes = true});
  AttentionPlan plan;
  auto s = tree.insert(iota(0, 5));
  const auto lose = [&] {
    {
      auto step = tree.begin_step();
      REQUIRE(step.add(s));
      (void)plan.build(step);
      const auto lost = std::move(step).submit();
    }
    tree.device_idle();
  };
  for (int i = 0; i < 10; ++i) lose();
  const std::int64_t before = test::heap.outstanding;
  for (int i = 0; i < 100; ++i) lose();
  CHECK(test::heap.outstanding == before);
}
