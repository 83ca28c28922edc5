// Tiers with threads in a child of fork(), which has none of these: they refuse with the reason,
// hang nowhere and leave the tree as it is; those without threads continue.
#include <doctest/doctest.h>

#include <cstdio>

#if defined(__linux__)
#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "chunkattn/debug/tree.hpp"
#include "chunkattn/tiers/tiers.hpp"
#include "tests/support/forked.hpp"
#include "tests/support/hanging_tier.hpp"
#include "tests/support/random.hpp"
#include "tests/support/steps.hpp"
#include "tests/support/tier_bench.hpp"
#include "tests/support/tier_folder.hpp"
#include "tests/support/tier_observer.hpp"

using namespace chunkattn;
using namespace test::tier_bench;
using test::HangingTier;
using test::iota;
using test::tier_folder::Folder;

namespace {

const std::string reason =
    "tiers = made before fork(): expected some that this process made: the threads of these are "
    "its parent's";

/// The number of the first of the calls of tiers that is not refused with the reason; 0: all are.
int first_allowed(Bench& b, const Tree::Sequence& s) {
  int number = 0;
  for (const bool is_refused : {test::refused([&] { (void)b.tiers->load(s); }) == reason,
                                test::refused([&] { (void)b.tiers->advance(); }) == reason,
                                test::refused([&] { b.tiers->store_all(); }) == reason,
                                test::refused([&] { b.tiers->flush(); }) == reason,
                                test::refused([&] { (void)b.tiers->is_busy(); }) == reason,
                                test::refused([&] { (void)b.tiers->work(); }) == reason,
                                test::refused([&] { (void)b.tiers->stats(); }) == reason,
                                test::refused([&] { b.tiers->reopen("m2"); }) == reason}) {
    ++number;
    if (!is_refused) return number;
  }
  return 0;
}
bool can_fork() {
  if (!test::can_fork)
    std::printf("skipped: a child of fork(): ThreadSanitizer lets it start no threads\n");
  return test::can_fork;
}

}  // namespace

TEST_CASE("in a child tiers refuse with the reason, and the tree continues without them") {
  if (!can_fork()) return;
  const Folder folder;
  auto hanger = std::make_shared<HangingTier>();
  int num_events = 0;
  const auto observer = std::make_shared<test::RecordingObserver<Bench::TreeTiers>>();
  Bench b({hanger, std::make_shared<FileTier>(folder.path, 1 << 20)}, {.observer = observer});
  const CacheEvents events(b.tree, [&](const CacheEvent&, std::span<const int>) { ++num_events; });
  const auto prompt = iota(0, 64);
  b.run(prompt);
  b.evict_all();
  b.tiers->flush();
  // A thread is in the middle of a call, and of what the other does there is no saying.
  hanger->hangs = HangingTier::all;
  auto s = b.tree.insert(prompt);
  std::optional loading = b.tiers->load(s);
  auto other = b.tree.insert(iota(500, 64));
  auto not_polled = b.tiers->load(other);
  hanger->wait_until_it_hangs();
  const std::size_t num_paths = observer->path_lengths().size();
  CHECK(num_paths > 0);
  CHECK(test::in_child([&] { return first_allowed(b, s); }) == 0);
  CHECK(test::in_child([&] {
          num_events = 0;
          if (loading->poll(s)) return 1;
          loading.reset();
          loading.emplace();
          b.tiers->computed(100, 0.1);
          b.model.compute(s, b.cache);
          if (b.model.error(s, b.cache) != 0) return 2;
          {
            const auto gone = std::move(s);
          }
          not_polled.cancel();
          {
            const auto gone = std::move(other);
          }
          b.evict_all();
          if (num_events == 0 || observer->path_lengths().size() != num_paths) return 3;
          check_invariants(b.tree);
          b.tiers.reset();
          b.run(iota(900, 30));
          return 0;
        }) == 0);
  // Others, of stores that the child made, find what the parent stored.
  CHECK(test::in_child([&] {
          loading.reset();
          {
            const auto gone = std::move(s);
          }
          b.tiers.reset();
          b.tiers.emplace(b.tree, b.cache,
                          std::vector<std::shared_ptr<TierStore>>{
                              std::make_shared<FileTier>(folder.path, 1 << 20)},
                          Bench::Options{.model = "m1"});
          b.tree.clear();
          b.tiers->reopen("m1");
          return b.load(prompt) == 63 ? 0 : 1;
        }) == 0);
  // The parent has got no event of that.
  hanger->hangs = 0;
  loading->wait(s);
  CHECK(s.num_written() == 63);
  CHECK(b.model.error(s, b.cache) == 0);
}

TEST_CASE("a child may come at any moment of the threads") {
  if (!can_fork()) return;
  Bench b({memory(), memory()},
          {.observer = std::make_shared<test::RecordingObserver<Bench::TreeTiers>>()});
  const auto prompt = iota(0, 64);
  b.run(prompt);
  b.evict_all();
  b.tiers->flush();
  const int rounds = test::scaled(100);
  for (int i = 1; i <= rounds; ++i) {
    b.run(iota(1000 * i, 64));
    b.evict_all();  // it is offloaded meanwhile
    auto s = b.tree.insert(prompt);
    auto loading = b.tiers->load(s);
    CHECK(test::in_child([&] {
            if (first_allowed(b, s) != 0 || loading.poll(s)) return 1;
            {
              const auto gone = std::move(s);
            }
            b.evict_all();
            b.tiers.reset();
            return 0;
          }) == 0);
    loading.wait(s);
    CHECK(s.num_written() == 63);
  }
}

TEST_CASE("in a child nothing waits for locks that its parent's threads had") {
  if (!can_fork()) return;
  const auto observer = std::make_shared<test::RecordingObserver<Bench::TreeTiers>>();
  Bench b({memory()}, {.max_prefetched = 1, .observer = observer});
  const auto prompt = iota(0, 64);
  for (int i = 0; i < 20; ++i) {
    b.run(iota(1000 * i, 64));
    b.evict_all();
  }
  b.tiers->flush();
  auto s = b.tree.insert(prompt);
  auto loading = b.tiers->load(s);
  while (b.tiers->stats().tiers[0].loaded == 0) std::this_thread::yield();
  b.run(iota(500, 64));
  std::atomic<bool> is_over = false;
  std::thread other([&] {  // it mostly has the observer's lock
    while (!is_over) (void)observer->blocks();
  });
  for (int i = 0; i < 60; ++i)
    CHECK(test::in_child(
              [&] {
                loading.cancel();
                {
                  const auto gone = std::move(s);
                }
                b.evict_all();
                b.tiers.reset();
                return 0;
              },
              5) == 0);
  is_over = true;
  other.join();
}

TEST_CASE("tiers without threads continue in a child") {
  if (!can_fork()) return;
  Bench b({memory()}, {.threads = false});
  const auto prompt = iota(0, 64);
  b.run(prompt);
  b.evict_all();
  const auto goes_on = [&] {
    b.tiers->flush();
    if (b.load(prompt) != 63) return 1;
    b.tiers.reset();
    return 0;
  };
  CHECK(test::in_child(goes_on) == 0);
  CHECK(test::in_child([&] { return test::in_child(goes_on, 20); }) == 0);
  CHECK(goes_on() == 0);
}
#endif
