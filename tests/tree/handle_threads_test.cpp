// Handles that are destroyed on another thread than the tree's act at the tree's next call, and the
// tree is only ever touched by the thread that calls it. (Run under ThreadSanitizer too.)
#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/admission.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;

namespace {

using Tree = PrefixTree<int, 4>;

/// Destroys it on another thread.
template <class T>
void drop_elsewhere(T&& handle) {
  std::thread([moved = std::make_unique<T>(std::move(handle))] {}).join();
}

}  // namespace

TEST_CASE("a sequence dropped by another thread leaves at the tree's next call") {
  for (const int call : {0, 1, 2, 3}) {
    CAPTURE(call);
    Tree tree({}, {}, RetentionOptions{.max_pinned = 8});
    auto s = tree.insert(iota(0, 6));
    auto other = tree.insert(iota(50, 6));
    drop_elsewhere(std::move(s));
    CHECK(tree.stats().live_sequences == 2);  // queries see it still
    CHECK(tree.stats().used_chunks == 4);
    other.append(1);  // neither does a call on another handle change the tree
    CHECK(tree.stats().live_sequences == 2);
    std::optional<Tree::Sequence> joined;
    if (call == 0) joined = tree.insert(iota(90, 4));
    if (call == 1) {
      const auto step = tree.begin_step();
    }
    if (call == 2) tree.clear();
    if (call == 3) (void)tree.pin(iota(0, 6));
    CHECK(tree.stats().live_sequences == (call == 0 ? 2u : 1u));
    CHECK(tree.stats().used_chunks == (call == 0 ? 3u : 2u));
    check_invariants(tree);
  }
}

TEST_CASE("the calls that look for handles that other threads dropped, and those that do not") {
  // Whether `call`, given the tree, a sequence and an open step that has it, lets the one leave
  // that was dropped elsewhere before.
  const auto applies_drops = [](const auto& call) {
    Tree tree({}, {}, RetentionOptions{.max_pinned = 8});
    auto dropped = tree.insert(iota(0, 6));
    auto kept = tree.insert(iota(50, 6));
    AttentionPlan plan;
    std::optional<Tree::Step> step = tree.begin_step();
    REQUIRE(step->add(kept));
    REQUIRE(plan.build(*step));
    drop_elsewhere(std::move(dropped));
    const auto leaves = tree.stats().leaves;
    call(tree, kept, step);
    return tree.stats().leaves > leaves;
  };
  using Sequence = Tree::Sequence;
  using Step = std::optional<Tree::Step>;
  const auto ends = [](Step& step) { step.reset(); };
  CHECK(applies_drops([](Tree& tree, Sequence&, Step&) { (void)tree.insert(iota(90, 4)); }));
  CHECK(applies_drops([](Tree& tree, Sequence&, Step&) { (void)tree.try_insert(iota(90, 4)); }));
  CHECK(applies_drops([](Tree& tree, Sequence&, Step&) {
    const auto prompt = iota(90, 4);
    AdmissionQueue<Tree> waiting;
    waiting.push({prompt});
    (void)waiting.admit(tree);
  }));
  CHECK(applies_drops([&](Tree& tree, Sequence&, Step& step) {
    ends(step);
    (void)tree.begin_step();
  }));
  CHECK(applies_drops([](Tree&, Sequence&, Step& step) { (void)std::move(*step).finish(); }));
  CHECK(applies_drops(
      [](Tree&, Sequence&, Step& step) { (void)std::move(*step).submit().finish(); }));
  CHECK(applies_drops([](Tree& tree, Sequence&, Step&) { (void)tree.pin(iota(0, 6)); }));
  CHECK(applies_drops([](Tree& tree, Sequence&, Step&) { tree.clear(); }));
  CHECK(applies_drops([](Tree& tree, Sequence&, Step&) { tree.device_idle(); }));
  CHECK(applies_drops([](Tree& tree, Sequence&, Step&) { tree.set_free_sink({}); }));
  std::size_t left = 0;  // Sequence::leave() is one more itself
  CHECK(applies_drops([&](Tree& tree, Sequence& kept, Step&) {
    kept.leave();
    left = tree.stats().leaves;
  }));
  CHECK(left == 2);

  CHECK_FALSE(applies_drops([](Tree& tree, Sequence&, Step&) {
    AdmissionQueue<Tree> waiting;
    (void)waiting.admit(tree);
  }));
  CHECK_FALSE(
      applies_drops([](Tree& tree, Sequence&, Step&) { (void)tree.match_prefix(iota(0, 6)); }));
  std::optional<Sequence> fork;  // outlives its tree
  CHECK_FALSE(applies_drops([&](Tree&, Sequence& kept, Step&) { fork = kept.fork(); }));
  CHECK_FALSE(applies_drops([](Tree&, Sequence&, Step& step) {
    AttentionPlan plan;
    (void)plan.build(*step);
  }));
  CHECK_FALSE(applies_drops([](Tree&, Sequence&, Step& step) { (void)std::move(*step).submit(); }));
  CHECK_FALSE(applies_drops([&](Tree&, Sequence& kept, Step& step) {
    ends(step);
    kept.append(1);
  }));
  CHECK_FALSE(applies_drops([&](Tree&, Sequence& kept, Step& step) {
    ends(step);
    kept.mark_loaded(kept.loadable());
  }));
  CHECK_FALSE(applies_drops([](Tree&, Sequence& kept, Step&) { (void)kept.take_over(); }));
}

TEST_CASE("steps and pins dropped by another thread") {
  Tree tree(PoolAllocator{.max_chunks = 8}, {}, RetentionOptions{.max_pinned = 8});
  AttentionPlan plan;
  auto s = tree.insert(iota(0, 6));
  auto step = tree.begin_step();
  REQUIRE(step.add(s));
  drop_elsewhere(std::move(step));
  CHECK(tree.stats().cancelled_steps == 0);
  CHECK(s.num_reserved() == 1);
  step = tree.begin_step();  // the one before is applied first
  CHECK(tree.stats().cancelled_steps == 1);
  CHECK(s.num_reserved() == 0);
  REQUIRE(step.add(s));
  (void)plan.build(step);
  drop_elsewhere(std::move(step).submit());
  CHECK(tree.stats().abandoned_steps == 0);
  tree.device_idle();
  CHECK(tree.stats().abandoned_steps == 1);
  CHECK(s.num_uncomputed() == 6);
  step = tree.begin_step();
  REQUIRE(step.add(s));
  (void)plan.build(step);
  drop_elsewhere(std::move(step).finish());
  CHECK(s.num_reserved() == 1);
  {
    const auto next = tree.begin_step();
  }
  CHECK(s.num_reserved() == 0);  // its output was discarded
  CHECK(s.num_written() == 6);
  auto pin = tree.pin(iota(0, 6));
  CHECK(pin.size() == 6);
  s.leave();
  drop_elsewhere(std::move(pin));
  {
    auto big = tree.insert(iota(500, 32));  // drops the pin, then evicts
    CHECK(big.size() == 32);
  }
  CHECK(tree.match_prefix(iota(0, 6)).cached == 0);
  check_invariants(tree);
}

TEST_CASE("a handle dropped elsewhere after its tree, and one replaced elsewhere") {
  std::optional<Tree> tree(std::in_place);
  auto s = tree->insert(iota(0, 6));
  auto t = tree->insert(iota(10, 6));
  drop_elsewhere(std::move(s));
  tree.reset();
  drop_elsewhere(std::move(t));
  CHECK_FALSE(t.is_live());  // NOLINT(bugprone-use-after-move)
}

TEST_CASE("a tree may change hands: the thread that calls it last is its own") {
  Tree tree;
  std::optional<Tree::Sequence> s;
  std::thread([&] { s = tree.insert(iota(0, 6)); }).join();
  auto t = tree.insert(iota(10, 6));  // this thread's now
  s.reset();
  CHECK(tree.stats().live_sequences == 1);
  std::thread([&] {
    (void)tree.match_prefix(iota(0, 6));
    {
      const auto step = tree.begin_step();
    }
    t.leave();  // on the tree's thread: at once
    CHECK(tree.stats().live_sequences == 0);
  }).join();
  check_invariants(tree);
}

TEST_CASE("a new thread is not taken for the tree's own that has ended") {
  Tree tree;
  std::optional<Tree::Sequence> s;
  std::thread([&] { s = tree.insert(iota(0, 6)); }).join();
  std::thread([&] { s.reset(); }).join();  // often at the same address as the first
  CHECK(tree.stats().live_sequences == 1);
  {
    const auto step = tree.begin_step();
  }
  CHECK(tree.stats().live_sequences == 0);
}

TEST_CASE("a plan may end on another thread than the step that was built with it") {
  Tree tree;
  auto s = tree.insert(iota(0, 6));
  for (int i = 0; i < 20; ++i) {
    std::optional<AttentionPlan> plan(std::in_place);
    auto step = tree.begin_step();
    REQUIRE(step.add(s));
    const auto view = plan->build(step);
    std::thread other([&] { plan.reset(); });
    {
      const auto dropped = std::move(step).submit();
    }
    other.join();
    CHECK_FALSE(view.is_current());
    tree.device_idle();
  }
}

TEST_CASE("an engine on one thread, its clients hanging up on others") {
  test::Random random(1);
  Tree tree(PoolAllocator{.max_chunks = 400}, {}, RetentionOptions{.max_pinned = 40});
  AttentionPlan plan;
  std::mutex mutex;
  std::deque<std::pair<Tree::Sequence, Tree::Pin>> hung_up;  // given to the clients' threads
  std::atomic<bool> done{false};
  std::vector<std::thread> clients;
  for (int c = 0; c < 3; ++c)
    clients.emplace_back([&] {
      while (true) {
        std::optional<std::pair<Tree::Sequence, Tree::Pin>> handles;
        const bool last = done.load();
        {
          const std::lock_guard guard(mutex);
          if (!hung_up.empty()) {
            handles.emplace(std::move(hung_up.front()));
            hung_up.pop_front();
          }
        }
        if (!handles && last) return;
        if (!handles) std::this_thread::yield();
      }
    });
  std::vector<Tree::Sequence> batch;
  std::size_t joined = 0;
  for (int i = 0; i < test::scaled(600); ++i) {
    std::vector<int> prompt(static_cast<std::size_t>(random.uniform(1, 30)));
    for (int& t : prompt) t = random.uniform(0, 1);
    if (auto s = tree.try_insert(prompt)) {
      batch.push_back(std::move(*s));
      ++joined;
    }
    test::decode(tree, plan, batch, [&](const ScheduledSequence&) { return random.uniform(0, 1); });
    while (batch.size() > 8) {
      auto& goes = batch[random.index(batch.size())];
      std::swap(goes, batch.back());
      auto pin = tree.pin(batch.back().tokens());
      const std::lock_guard guard(mutex);
      hung_up.emplace_back(std::move(batch.back()), std::move(pin));
      batch.pop_back();
    }
  }
  done = true;
  for (auto& client : clients) client.join();
  {
    const auto step = tree.begin_step();
  }  // drops take effect
  CHECK(tree.stats().live_sequences == batch.size());
  CHECK(tree.stats().leaves == joined - batch.size());
  check_invariants(tree);
  batch.clear();
  tree.clear();
  CHECK(tree.stats().used_chunks == 0);
}
