// What joins, forks and ends of steps leave behind: counts, levels, states of a fork, and what
// clear() lets go.
#include <doctest/doctest.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "support/steps.hpp"
#include "tests/support/retention.hpp"

using namespace chunkattn;
using test::iota;

namespace {

using Tree = PrefixTree<int, 4>;

/// Computes all of a sequence and generates `count` tokens, counting up from `first`.
template <class AnyTree>
void generate(AnyTree& tree, typename AnyTree::Sequence& s, int first, int count) {
  AttentionPlan plan;
  for (int i = 0; i < count; ++i) {
    auto step = tree.begin_step();
    REQUIRE(step.add(s));
    static_cast<void>(plan.build(step));
    auto done = std::move(step).finish();
    for (const auto row : done.rows()) done.commit(row, first + i);
  }
}

}  // namespace

TEST_CASE("joins are counted by what was found, those of preempted sequences apart") {
  Tree tree(PoolAllocator{.max_chunks = 4});
  auto a = tree.insert(iota(0, 8));
  test::load(a);
  auto b = tree.insert(iota(0, 6), {.preempted = true});
  TreeStats stats = tree.stats();
  CHECK(stats.inserts == 2);
  CHECK(stats.prompt_tokens == 8);
  CHECK(stats.cached_tokens == 0);
  CHECK(stats.preempted_inserts == 1);
  CHECK(stats.preempted_tokens == 6);
  CHECK(stats.preempted_cached_tokens == 5);  // the last one is computed
  auto c = b.fork();
  CHECK(tree.stats().forks == 1);
  CHECK_FALSE(tree.try_insert(iota(100, 40)));
  stats = tree.stats();
  CHECK(stats.failed_inserts == 1);
  CHECK(stats.inserts == 2);
  CHECK(stats.prompt_tokens == 8);
  check_invariants(tree);
}

TEST_CASE("a fork has its source's level, and what of its tokens was found") {
  PrefixTree<int, 4, PoolAllocator, test::ByPriority> tree(PoolAllocator{.max_chunks = 16});
  auto source = tree.insert(iota(0, 8), {.priority = 5});
  test::load(source);
  auto later = tree.insert(iota(0, 8), {.priority = 5});
  CHECK(later.num_cached() == 7);
  CHECK(later.fork().num_cached() == 7);
  CHECK(later.fork(3).num_cached() == 3);
  auto fork = source.fork();
  CHECK(fork.options().priority == 5);
  fork.append(iota(100, 8));
  test::load(fork);
  const std::vector<int> tokens = fork.tokens();
  fork.leave();
  {
    auto other = tree.insert(iota(200, 8), {.priority = 3});
    test::load(other);
  }
  tree.trim(tree.stats().used_chunks - 2);
  CHECK(tree.match_prefix(tokens).cached == 16);
  CHECK(tree.match_prefix(iota(200, 8)).cached == 0);
  check_invariants(tree);
}

TEST_CASE(
    "what is public of a sequence is public of its fork, computed or not, and found by others") {
  using Sharing = TreeOptions::Sharing;
  for (const Sharing sharing : {Sharing::token, Sharing::chunk})
    for (const int length : {1, 2, 3, 4, 5, 8, 11})
      for (int is_public = 0; is_public <= length + 1; ++is_public)
        for (int written = 0; written <= length; ++written)
          for (int forked = 1; forked <= length; ++forked) {
            CAPTURE(length);
            CAPTURE(is_public);
            CAPTURE(written);
            CAPTURE(forked);
            PrefixTree<int, 4> tree({}, {.sharing = sharing});
            const std::vector<int> prompt = iota(0, static_cast<std::size_t>(length));
            const InsertOptions options{.name_space = {.tenant = 1},
                                        .public_length = static_cast<std::size_t>(is_public)};
            auto s = tree.insert(prompt, options);
            s.mark_loaded({0, written});
            const auto twin = s.fork(static_cast<std::size_t>(forked));
            const int unit = sharing == Sharing::token ? 1 : 4;
            const int end = std::min(is_public, forked) / unit * unit;
            REQUIRE(twin.options().public_length == static_cast<std::size_t>(end));
            REQUIRE(twin.options().name_space == options.name_space);
            s.leave();
            const auto found = tree.match_prefix(
                prompt, {.name_space = {.tenant = 2}, .public_length = prompt.size()});
            REQUIRE(found.cached + found.pending >= static_cast<std::size_t>(end));
            check_invariants(tree);
          }
}

TEST_CASE("a fork of what clear() made stale is stale, right below the root too") {
  Tree tree({}, {.sharing = TreeOptions::Sharing::chunk});
  auto source = tree.insert(iota(0, 3));  // less than what is shared: a tail below the root
  test::load(source);
  CHECK(source.weights_epoch() == 1);
  tree.clear();
  CHECK(source.weights_epoch() == 0);
  auto fork = source.fork();
  CHECK(fork.weights_epoch() == 0);
  fork.append(3);
  generate(tree, fork, 4, 6);
  fork.leave();
  source.leave();
  CHECK(tree.match_prefix(iota(0, 10)).cached == 0);
  CHECK(tree.stats().used_chunks == 0);
  check_invariants(tree);
}

TEST_CASE("rows that were committed one by one are no rows of those committed at once") {
  Tree tree;
  auto a = tree.insert(iota(0, 2)), b = tree.insert(iota(10, 2));
  generate(tree, a, 2, 1), generate(tree, b, 12, 1);
  std::vector<Tree::Sequence> batch;
  batch.push_back(std::move(a)), batch.push_back(std::move(b));
  AttentionPlan plan;
  auto done = test::run_step(tree, plan, batch);
  done.commit(*done.rows().begin(), 3);
  CHECK(test::refused([&] { done.commit(std::vector<int>{4, 13}); }).find("outputs.size() = 2") ==
        0);
  done.commit(std::vector<int>{13});
  CHECK(batch[0].tokens() == iota(0, 4));
  CHECK(batch[1].tokens() == iota(10, 4));
}

TEST_CASE("a step that an idle device ran is over when the one before it has finished") {
  Tree tree;
  auto a = tree.insert(iota(0, 2)), b = tree.insert(iota(10, 2));
  AttentionPlan plan;
  auto first = tree.begin_step();
  REQUIRE(first.add(a));
  static_cast<void>(plan.build(first));
  auto running = std::move(first).submit();
  {
    auto second = tree.begin_step();
    REQUIRE(second.add(b));
    static_cast<void>(plan.build(second));
    auto dropped = std::move(second).submit();
  }
  tree.device_idle();
  CHECK(b.num_scheduled() == 2);  // its outputs wait for those of the first
  auto done = std::move(running).finish();
  CHECK(b.num_scheduled() == 0);
  CHECK(b.num_reserved() == 0);
  auto third = tree.begin_step();
  CHECK(third.add(b));
  check_invariants(tree);
}

TEST_CASE("clear() lets go of sequences that left and still waited for a copy") {
  Tree tree;
  auto source = tree.insert(iota(0, 4));
  generate(tree, source, 4, 2);
  auto fork = source.fork();  // its tail is short: to be copied
  AttentionPlan plan;
  {
    auto step = tree.begin_step();
    REQUIRE(step.add(fork));
    CHECK(plan.build(step).num_copies == 1);
    auto dropped = std::move(step).submit();
    source.leave();
    fork.leave();
  }
  tree.device_idle();
  CHECK(tree.stats().leaving_sequences == 2);
  check_invariants(tree);
  tree.clear();
  CHECK(tree.stats().leaving_sequences == 0);
  CHECK(tree.stats().used_chunks == 0);
  check_invariants(tree);
}
