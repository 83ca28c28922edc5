// Every heap allocation of a scripted scenario fails once: nothing is lost, leaked or half done.
// And copies that a device completes late and in any order.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "chunkattn/plan/attention_plan.hpp"
#include "chunkattn/tree/prefix_tree.hpp"
#include "tests/support/counted_new.hpp"

using namespace chunkattn;

namespace {

std::vector<int> iota(int first, std::size_t n) {
  std::vector<int> tokens(n);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

template <class Retention>
struct Scenario {
  using Tree = PrefixTree<int, 4, PoolAllocator, Retention>;
  using Sequence = typename Tree::Sequence;

  explicit Scenario(TreeOptions options)
      : tree(PoolAllocator{.max_chunks = 200}, options, Retention{{.max_pinned = 20}}) {}

  /// Runs `operation`; where an allocation fails, nothing may have changed, and it works again.
  template <class F>
  void step(const F& operation) {
    std::map<std::string, std::vector<int>> before;
    std::size_t reserved = 0;
    for (auto& [name, s] : live) {
      before[name] = s.tokens();
      reserved += s.num_reserved();
    }
    const TreeStats stats = tree.stats();
    test::heap.fail_in = countdown;  // counts on only within operations
    try {
      operation();
      countdown = test::heap.fail_in;
      test::heap.fail_in = -1;
    } catch (const std::bad_alloc&) {
      countdown = test::heap.fail_in = -1;
      tree.check_invariants();
      REQUIRE(live.size() == before.size());
      for (auto& [name, s] : live) {
        REQUIRE(s.tokens() == before.at(name));
        reserved -= s.num_reserved();
      }
      REQUIRE(reserved == 0);
      const TreeStats now = tree.stats();
      REQUIRE(now.live_sequences == stats.live_sequences);
      REQUIRE(now.stored_tokens == stats.stored_tokens);
      REQUIRE(now.used_slots == stats.used_slots);
      operation();
    }
    tree.check_invariants();
  }

  void join(const std::string& name, const std::vector<int>& prompt, InsertOptions o = {}) {
    std::optional<Sequence> s;
    step([&] { s = tree.try_insert(prompt, o); });
    live.emplace(name, std::move(*s));
  }
  void fork(const std::string& from, const std::string& to) {
    std::optional<Sequence> s;
    step([&] { s = live.at(from).try_fork(); });
    live.emplace(to, std::move(*s));
  }
  void run_all(std::size_t max) {
    step([&] {
      plan.clear();
      for (auto& [name, s] : live) {
        TokenRange next = s.next_uncomputed(max);
        if (next.empty() && s.num_reserved() > 0)
          next = {static_cast<int>(s.size()), static_cast<int>(s.num_reserved())};
        if (!next.empty()) plan.add(s, next);
      }
      plan.update(tree);
    });
    for (auto& [name, s] : live) step([&] { s.commit(s.next_uncomputed(max)); });
  }
  void decode(int steps) {
    for (int i = 0; i < steps; ++i) {
      for (auto& [name, s] : live) step([&] { s.reserve(1); });
      run_all(100);
      for (auto& [name, s] : live) step([&] { s.commit(1000 + i); });
    }
  }

  void run() {
    join("a", iota(0, 30));
    join("b", iota(0, 17));
    join("twin", iota(0, 30));
    run_all(100);
    decode(3);
    fork("a", "a2");
    fork("a2", "a3");
    decode(3);
    step([&] { live.at("b").append(iota(500, 9)); });
    run_all(100);
    fork("b", "b2");
    for (int i = 0; i < 3; ++i) step([&] { live.at("b").reserve(3); });
    step([&] { live.at("b").commit(iota(7, 1)); });
    join("tenant", iota(0, 30), {.name_space = {.tenant = 3}, .public_length = 10, .priority = 5});
    step([&] { tree.pin(iota(0, 11)); });
    run_all(5);
    for (const char* name : {"a", "twin", "b2"}) step([&] { live.erase(name); });
    if (tree.options().async_steps) step([&] { tree.retire(plan.step()); });
    for (int i = 0; i < 12; ++i) join("x" + std::to_string(i), iota(i % 5 * 100, 40));
    run_all(100);
    step([&] { tree.unpin(iota(0, 11)); });
    step([&] { tree.clear(); });
    for (int i = 0; i < 12; ++i) step([&] { live.erase("x" + std::to_string(i)); });
  }

  std::int64_t countdown = -1;
  Tree tree;
  AttentionPlan plan;
  std::map<std::string, Sequence> live;
};

template <class Retention>
void fail_everywhere(TreeOptions options) {
  std::uint64_t failures = 0;
  for (std::int64_t at = 0;; ++at) {
    const std::int64_t outstanding = test::heap.outstanding;
    const std::uint64_t failed = test::heap.failures;
    {
      Scenario<Retention> scenario(options);
      scenario.countdown = at;
      scenario.run();
      scenario.live.clear();
      scenario.tree.retire(scenario.plan.step());
      scenario.tree.clear();
      scenario.tree.check_invariants();
      REQUIRE(scenario.tree.stats().used_slots == 0);
      REQUIRE(scenario.tree.slots_available() == 200);
    }
    REQUIRE(test::heap.outstanding == outstanding);  // no leak
    if (test::heap.failures == failed) break;        // the scenario has no further allocation
    ++failures;
  }
  CHECK(failures > 50);
  std::printf("%llu allocations failed once each\n", static_cast<unsigned long long>(failures));
}

}  // namespace

TEST_CASE("every allocation of a scenario fails once") {
  fail_everywhere<NoRetention>({});
  fail_everywhere<Lru>({});
  fail_everywhere<Priority>({.min_run = 4, .async_steps = true});
  fail_everywhere<Lru>({.sharing = Sharing::chunk});
}

TEST_CASE("a constructor that runs out of memory leaks nothing") {
  using Tree = PrefixTree<int, 4, PoolAllocator, Priority>;
  for (std::int64_t at = 0;; ++at) {
    const std::int64_t outstanding = test::heap.outstanding;
    test::heap.fail_in = at;
    bool failed = false;
    try {
      Tree tree;
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    test::heap.fail_in = -1;
    REQUIRE(test::heap.outstanding == outstanding);
    if (!failed) break;
    CHECK(at < 20);
  }
}

TEST_CASE(
    "a copier that is late: both ends of a copy stay until the last step that has it is done") {
  using Tree = PrefixTree<int, 8>;
  Tree tree(PoolAllocator{.max_chunks = 64}, {.min_run = 8, .async_steps = true});
  AttentionPlan plan;
  const auto write_all = [&](Tree::Sequence& s) {
    plan.clear();
    plan.add(s, s.next_uncomputed());
    plan.update(tree);
    s.commit(s.next_uncomputed());
  };
  auto source = tree.insert(iota(0, 10));
  write_all(source);
  source.append(iota(50, 5));
  write_all(source);
  tree.retire(plan.step());

  auto twin = source.fork();      // 5 tokens are to be copied
  auto grandchild = twin.fork();  // copied from the source as well: no copy waits for another
  plan.clear();
  plan.add(twin, twin.reserve(1));
  plan.add(grandchild, grandchild.reserve(1));
  plan.update(tree);
  const std::uint64_t first = plan.step();
  std::vector<RowCopy> copies(plan.view().copies, plan.view().copies + plan.view().num_copies);
  REQUIRE(copies.size() == 2);
  CHECK(copies[0].length == 5);
  CHECK(copies[0].source_slot == copies[1].source_slot);
  CHECK(copies[0].source_begin == copies[1].source_begin);
  CHECK(copies[0].target_slot != copies[1].target_slot);

  plan.clear();
  plan.add(grandchild, grandchild.reserve(1));
  plan.update(tree);  // the second step carries both again, since the first is not done
  const std::uint64_t second = plan.step();
  CHECK(plan.view().num_copies == 2);
  source.leave();
  twin.leave();
  CHECK(tree.stats().retiring_sequences == 2);
  const std::size_t used = tree.stats().used_slots;
  tree.retire(first);
  tree.check_invariants();
  CHECK(tree.stats().used_slots == used);  // the second step may still copy
  std::vector<Tree::Sequence> others;      // nobody gets the places of a copy
  for (int i = 0; i < 20; ++i) {
    others.push_back(tree.insert(iota(1000 * (i + 1), 9)));
    others.back().for_each_run({0, 9}, [&](const Piece& piece) {
      for (const RowCopy& copy : copies) {
        CHECK(piece.slot != copy.source_slot);
        CHECK(piece.slot != copy.target_slot);
      }
    });
  }
  plan.clear();
  plan.add(grandchild, grandchild.reserve(1));
  plan.update(tree);
  CHECK(plan.view().num_copies == 0);  // known to be done
  tree.retire(second);
  tree.check_invariants();
  CHECK(tree.stats().retiring_sequences == 0);
}

TEST_CASE("a twin that leaves before its copy was made takes the copy back") {
  using Tree = PrefixTree<int, 8, PoolAllocator, Lru>;
  for (const bool async : {false, true}) {
    Tree tree(PoolAllocator{.max_chunks = 8}, {.min_run = 8, .async_steps = async});
    AttentionPlan plan;
    auto source = tree.insert(iota(0, 9));
    plan.add(source, source.next_uncomputed());
    plan.update(tree);
    source.commit(source.next_uncomputed());
    source.reserve(3);
    source.commit(iota(90, 3));
    tree.retire(plan.step());
    {
      auto twin = source.fork();
      CHECK(tree.core().copies.all().size() == 1);
    }
    tree.check_invariants();
    CHECK(tree.core().copies.all().empty());
    source.leave();
    CHECK(tree.stats().retiring_sequences == 0);
    // What the source wrote is cache; the twin's unwritten duplicate is not.
    std::vector<int> path = iota(0, 9);
    for (const int t : iota(90, 3)) path.push_back(t);
    CHECK(tree.match_prefix(path).cached == 12);
    CHECK(tree.stats().stored_tokens == 12);
  }
}
