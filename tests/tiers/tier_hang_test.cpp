// Tiers of which one hangs: those beside it continue, loading and storing.
#include <doctest/doctest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "chunkattn/tiers/tiers.hpp"
#include "tests/support/hanging_tier.hpp"
#include "tests/support/steps.hpp"
#include "tests/support/tier_bench.hpp"

using namespace chunkattn;
using namespace test::tier_bench;
using test::HangingTier;
using test::iota;
using Clock = std::chrono::steady_clock;

namespace {

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}
/// Lets go before the tiers, which wait for their calls, go.
struct LetGo {
  explicit LetGo(HangingTier& tier) : tier_(tier) {}
  LetGo(const LetGo&) = delete;
  LetGo& operator=(const LetGo&) = delete;
  ~LetGo() { tier_.hangs = 0; }

 private:
  HangingTier& tier_;
};
/// What hung was let go: until all is done.
void wait_until_idle(Bench& b) {
  const auto start = Clock::now();
  while (b.tiers->is_busy() && seconds_since(start) < 20) std::this_thread::yield();
  CHECK_FALSE(b.tiers->is_busy());
}
/// All of a prompt is offloaded.
void put_down(Bench& b, const std::vector<int>& prompt) {
  b.run(prompt);
  b.evict_all();
  b.tiers->flush();
}

}  // namespace

TEST_CASE(
    "a load continues where the tier that hangs would have come first, and the next at once") {
  struct Way {
    HangingTier::Call call;
    bool listens;
  };
  for (const std::size_t hanging : {0u, 1u})  // of three; the last has it all
    for (const Way& way : {Way{HangingTier::gets, true}, Way{HangingTier::gets, false},
                           Way{HangingTier::puts, false}, Way{HangingTier::questions, false},
                           Way{HangingTier::erasures, false}}) {
      CAPTURE(hanging);
      CAPTURE(way.call);
      CAPTURE(way.listens);
      auto hanger = std::make_shared<HangingTier>();
      auto last = memory();
      std::vector<std::shared_ptr<TierStore>> stores{memory(), memory(), last};
      stores[hanging] = hanger;
      {
        Bench b({last});
        for (int i = 0; i < 9; ++i) put_down(b, iota(1000 * i, 160));
      }
      hanger->listens = way.listens;
      hanger->damages = way.call == HangingTier::erasures;
      Bench b(stores, {.max_wait_seconds = 0.6});
      const LetGo let_go(*hanger);
      hanger->hangs = way.call;
      if (way.call == HangingTier::puts || way.call == HangingTier::questions) {
        b.run(iota(20000, 16));  // what is on its way down holds it up
        b.evict_all();
        hanger->wait_until_it_hangs();
      }
      // Its part of the wait, once; then it is not waited for.
      CHECK(b.load(iota(0, 160)) == 159);
      CHECK(b.tiers->stats().tiers[hanging].not_worth == 19);
      b.evict_all();
      const int gets = hanger->num_gets;
      CHECK(b.load(iota(1000, 160)) == 159);
      CHECK(b.tiers->stats().tiers[hanging].not_worth == 39);
      CHECK(hanger->num_gets == gets);
      CHECK(b.tiers->stats().loads_late == 0);
      // Until it comes back.
      hanger->hangs = 0;
      b.evict_all();
      wait_until_idle(b);
      for (int i = 2; i < (way.call == HangingTier::gets ? 9 : 3); ++i) {
        CHECK(b.load(iota(1000 * i, 160)) == 159);
        b.evict_all();
        b.tiers->flush();
      }
      CHECK(hanger->num_gets >= gets + 20);
    }
}

TEST_CASE("puts that a tier takes do not hide that its gets hang") {
  auto hanger = std::make_shared<HangingTier>();
  auto last = memory();
  {
    Bench b({last});
    for (int i = 0; i < 3; ++i) put_down(b, iota(1000 * i, 160));
  }
  hanger->listens = true;
  Bench b({hanger, last}, {.max_wait_seconds = 0.4});
  const LetGo let_go(*hanger);
  hanger->hangs = HangingTier::gets;
  for (int i = 0; i < 3; ++i) {
    CHECK(b.load(iota(1000 * i, 160)) == 159);
    b.evict_all();
    b.tiers->flush();
  }
  CHECK(hanger->num_gets == 1);
  CHECK(b.tiers->stats().tiers[0].stored == 60);
}

TEST_CASE("what a cancelled call gives is not taken for the next block") {
  auto hanger = std::make_shared<HangingTier>();
  auto last = memory();
  const auto prompt = iota(0, 160);
  Bench b({hanger, last}, {.max_wait_seconds = 0.6});
  put_down(b, prompt);  // both have it
  const LetGo let_go(*hanger);
  hanger->hangs = HangingTier::gets;
  auto s = b.tree.insert(prompt);
  auto loading = b.tiers->load(s);
  hanger->wait_until_it_hangs();
  std::size_t there = 0;
  while (there == 0 && loading.poll(s)) there = s.num_written();
  CHECK(there > 0);
  hanger->hangs = 0;  // it has the first block, too late
  while (hanger->num_hanging > 0) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // until its thread has that
  loading.wait(s);
  CHECK(s.num_written() == 159);
  CHECK(b.model.error(s, b.cache) == 0);
  // What both have comes from the faster one again.
  const auto before = b.tiers->stats();
  CHECK(before.tiers[1].loaded > 0);
  b.model.compute(s, b.cache);
  {
    const auto gone = std::move(s);
  }
  b.evict_all();
  b.tiers->flush();
  CHECK(b.load(prompt) == 159);
  CHECK(b.tiers->stats().tiers[1].loaded == before.tiers[1].loaded);
}

TEST_CASE("the last tier hangs: a load is cancelled, others are not asked of it") {
  auto hanger = std::make_shared<HangingTier>();
  auto first = memory();
  {
    Bench b({first});
    for (int i = 0; i < 6; ++i) put_down(b, iota(1000 * i, 80));
  }
  Bench b({first, hanger}, {.max_wait_seconds = 0.3});
  const LetGo let_go(*hanger);
  hanger->hangs = HangingTier::all;
  for (int i = 0; i < 6; ++i) {
    CHECK(b.load(iota(1000 * i, 160)) == 80);
    b.evict_all();
    CHECK(b.tiers->stats().loads_late == 1);
    CHECK(b.tiers->stats().tiers[1].not_worth == static_cast<std::uint64_t>(i));
  }
  CHECK(hanger->num_gets == 1);
  CHECK(b.tiers->stats().tiers[0].loaded == 60);
}

TEST_CASE(
    "what is offloaded reaches the tiers beside the one that hangs, for as long as that lasts") {
  constexpr std::size_t block = std::size_t{chunk} * 2 * 2 * 2 * 8 * 4;
  for (const std::size_t hanging : {0u, 1u, 2u}) {
    CAPTURE(hanging);
    auto hanger = std::make_shared<HangingTier>();
    std::vector<std::shared_ptr<TierStore>> stores{memory(), memory(), memory()};
    stores[hanging] = hanger;
    hanger->hangs = hanging == 1 ? HangingTier::questions : HangingTier::puts;
    Bench b(stores, {.max_queued_bytes = 3 * 20 * block, .max_wait_seconds = 0.1});
    const LetGo let_go(*hanger);
    for (int round = 0; round < 8; ++round) {  // 8 times what a tier may have on its way
      b.run(iota(1000 * round, 160));
      b.evict_all();
      const auto start = Clock::now();
      b.tiers->flush();  // does not wait for it
      CHECK(seconds_since(start) < 5);
    }
    auto stats = b.tiers->stats();
    CHECK(stats.gathered == 160);
    CHECK(stats.dropped == 0);
    for (std::size_t t = 0; t < 3; ++t) {
      CHECK(stats.tiers[t].stored == (t == hanging ? 0 : 160));
      CHECK(stats.tiers[t].put_failed == (t == hanging ? 140 : 0));  // it has its share to do
    }
    CHECK(b.tiers->is_busy());
    hanger->hangs = 0;
    wait_until_idle(b);
    CHECK(b.tiers->stats().tiers[hanging].stored == 20);
  }
}

TEST_CASE("all that is cached is offloaded beside a tier that hangs") {
  constexpr std::size_t block = std::size_t{chunk} * 2 * 2 * 2 * 8 * 4;
  auto hanger = std::make_shared<HangingTier>();
  Bench b({memory(), hanger}, {.max_queued_bytes = 2 * 2 * block, .max_wait_seconds = 0.1});
  const LetGo let_go(*hanger);
  hanger->hangs = HangingTier::puts;
  b.run(iota(0, 160));
  b.tiers->store_all();
  b.tiers->flush();
  const auto stats = b.tiers->stats();
  CHECK(stats.tiers[0].stored == 20);
  CHECK(stats.tiers[0].put_failed == 0);
  CHECK(stats.tiers[1].put_failed == 18);
  CHECK(stats.dropped == 0);
}

TEST_CASE("what was found in a lower tier does not pile up before a tier that hangs") {
  constexpr std::size_t block = std::size_t{chunk} * 2 * 2 * 2 * 8 * 4;
  auto hanger = std::make_shared<HangingTier>();
  auto last = memory();
  const auto prompt = iota(0, 160);
  {
    Bench b({last});
    put_down(b, prompt);
  }
  Bench b({hanger, last}, {.max_queued_bytes = 2 * 3 * (block + 1000), .max_wait_seconds = 0.2});
  const LetGo let_go(*hanger);
  hanger->hangs = HangingTier::puts;
  for (int i = 0; i < 4; ++i) {
    CHECK(b.load(prompt) == 159);
    b.evict_all();
  }
  hanger->hangs = 0;
  wait_until_idle(b);
  CHECK(hanger->memory.num_bytes() > 2 * block);
  CHECK(hanger->memory.num_bytes() < 4 * (block + 1000));
}

TEST_CASE("tiers go while one hangs that sees that no load waits") {
  auto hanger = std::make_shared<HangingTier>();
  hanger->listens = true;
  hanger->hangs = HangingTier::puts | HangingTier::gets;
  const auto start = Clock::now();
  {
    Bench b({hanger, memory()});
    b.run(iota(0, 64));
    b.evict_all();
    hanger->wait_until_it_hangs();
  }
  {
    Bench b({hanger, memory()});
    auto s = b.tree.insert(iota(0, 64));
    auto loading = b.tiers->load(s);
    hanger->wait_until_it_hangs();
    b.tiers.reset();
    CHECK_FALSE(loading.poll(s));
  }
  CHECK(seconds_since(start) < 10);
}
