// Who follows tiers: of every block that was expected an observer knows which tiers have it.
#include "tests/support/tier_observer.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "chunkattn/tiers/tiers.hpp"
#include "tests/support/faulty_tier.hpp"
#include "tests/support/random.hpp"
#include "tests/support/steps.hpp"
#include "tests/support/tier_bench.hpp"

using namespace chunkattn;
using namespace test::tier_bench;
using test::FaultyTier;
using test::iota;
using test::TierFault;

namespace {

using Observer = test::RecordingObserver<Bench::TreeTiers>;

/// A tree over tiers that an observer follows.
struct Followed {
  explicit Followed(std::vector<std::shared_ptr<TierStore>> stores, Bench::Options options = {},
                    std::size_t chunks = 32)
      : b(std::move(stores), with_observer(std::move(options)), chunks) {}
  Bench::Options with_observer(Bench::Options options) {
    options.observer = observer;
    return options;
  }
  void store(const std::vector<int>& prompt, const InsertOptions& how = {}) {
    b.run(prompt, how);
    b.evict_all();
    b.tiers->flush();
  }
  /// Of all blocks that were expected, a store has those that it was seen to have.
  void check_holds(std::size_t tier, TierStore& store) const {
    for (const auto& [text, block] : observer->blocks())
      CHECK(observer->has(tier, block.key) == store.contains(block.key));
  }

  std::shared_ptr<Observer> observer = std::make_shared<Observer>();
  Bench b;
};

}  // namespace

TEST_CASE("a block is expected with its path before it is stored, and until it is") {
  auto store = memory();
  Followed f({store}, {.threads = false});
  const auto prompt = iota(0, 30);
  const InsertOptions how{.name_space = {.tenant = 7, .adapter = 3}, .public_length = 8};
  f.b.run(prompt, how);
  CHECK(f.observer->blocks().empty());
  f.b.evict_all();
  // Eviction goes from the end, so the longest path comes first.
  CHECK(f.observer->path_lengths() == std::vector<std::size_t>{3, 2, 1});
  const auto blocks = f.observer->blocks();
  REQUIRE(blocks.size() == 3);
  std::array<TierStore::Key, 3> keys;
  for (const auto& [text, block] : blocks) {
    CHECK(text == block.key.text());
    REQUIRE(block.position % chunk == 0);
    const auto position = static_cast<std::size_t>(block.position);
    keys.at(position / chunk) = block.key;
    CHECK(std::ranges::equal(block.tokens, std::span(prompt).subspan(position, chunk)));
    CHECK(block.name_space == (position == 0 ? Namespace{.adapter = 3, .is_public = true}
                                             : Namespace{.tenant = 7, .adapter = 3}));
  }
  CHECK(f.observer->num_expected() == 3);  // nothing is stored yet
  for (const auto& key : keys) CHECK_FALSE(f.observer->has(0, key));
  f.b.tiers->flush();
  CHECK(f.observer->num_expected() == 0);
  for (const auto& key : keys) {
    CHECK(store->contains(key));
    CHECK(f.observer->has(0, key));
  }
}

TEST_CASE("what is loaded is expected until it has come, and promoted where that is slower") {
  const auto prompt = iota(0, 30);
  auto fast = memory(), slow = memory();
  Followed f({fast, slow}, {.threads = false});
  f.store(prompt);
  for (const auto& [text, block] : f.observer->blocks()) fast->erase(block.key);
  auto s = f.b.tree.insert(prompt);
  {
    auto load = f.b.tiers->load(s);
    CHECK(f.observer->path_lengths().back() == 3);
    CHECK(f.observer->num_expected() == 1);
    while (f.b.tiers->stats().tiers[1].loaded < 3) REQUIRE(f.b.tiers->work());
  }
  CHECK(f.observer->num_expected() == 1);  // of a record that is on its way to the first tier
  f.b.tiers->flush();
  CHECK(f.observer->num_expected() == 0);
  f.check_holds(0, *fast);
  f.check_holds(1, *slow);
  const auto blocks = f.observer->blocks();
  CHECK(std::ranges::all_of(blocks,
                            [&](const auto& one) { return f.observer->has(0, one.second.key); }));
}

TEST_CASE("a load that begins within a path is expected from the start of that") {
  auto store = memory();
  Followed f({store}, {}, 64);
  f.store(iota(0, 64));
  f.b.run(iota(0, 20));
  auto s = f.b.tree.insert(iota(0, 64));
  CHECK(s.num_written() == 20);
  auto load = f.b.tiers->load(s);
  CHECK(f.observer->path_lengths().back() == 8);
  load.wait(s);
  CHECK(s.num_written() == 63);
  CHECK(f.b.model.error(s, f.b.cache) == 0);
  CHECK(f.observer->blocks().size() == 8);
  f.b.model.compute(s, f.b.cache);
}

TEST_CASE("whatever happens, what a tier was seen to have is what it has") {
  for (const std::uint64_t seed : {1u, 2u, 3u, 4u, 5u, 6u}) {
    CAPTURE(seed);
    test::Random random(seed);
    const auto below = [&](int n) { return random.uniform(0, n - 1); };
    const std::size_t bytes = 4000 + 9000 * seed;
    auto small = std::make_shared<MemoryTier>(bytes);
    auto large = std::make_shared<MemoryTier>(4 * bytes);
    Followed f({small, large},
               {.block_tokens = seed % 2 == 0 ? 5 : chunk,
                .write_through = seed % 3 == 0,
                .threads = seed > 4},
               /*chunks=*/20);
    for (int round = 0; round < 300; ++round) {
      std::vector<int> prompt;
      for (int i = 0, n = 4 + below(70); i < n; ++i) prompt.push_back(i % 20 == 0 ? below(3) : i);
      const InsertOptions how{.name_space = {.tenant = static_cast<std::uint64_t>(below(2))},
                              .public_length = static_cast<std::size_t>(below(3) * 13)};
      {
        auto s = f.b.tree.insert(prompt, how);
        auto load = f.b.tiers->load(s);
        if (below(5) > 0) load.wait(s);
        load.cancel();
        f.b.model.compute(s, f.b.cache);
        CHECK(f.b.model.error(s, f.b.cache) == 0);
      }
      if (below(4) == 0) (void)f.b.tiers->advance();
      if (below(60) == 0) f.b.tiers->store_all();
      if (below(100) == 0) {
        f.b.tree.clear();
        f.b.tiers->reopen("after " + std::to_string(round));  // other weights: nothing fits
      }
      if (below(10) > 0) continue;
      f.b.tiers->flush();
      f.check_holds(0, *small);
      f.check_holds(1, *large);
    }
    f.b.tiers->flush();
    CHECK(f.observer->num_lost() > 100);
    f.b.tiers.reset();
    CHECK(f.observer->num_expected() == 0);
  }
}

TEST_CASE("what is in a directory is seen when it is looked for") {
  const auto folder = std::filesystem::temp_directory_path() /
                      ("chunkattn-tier-observer-" + std::to_string(std::random_device()()));
  const auto prompt = iota(0, 64);
  {
    Bench b({std::make_shared<FileTier>(folder.string(), 1 << 20)});
    b.run(prompt);
    b.evict_all();
    b.tiers->flush();
  }
  auto files = std::make_shared<FileTier>(folder.string(), 1 << 20);
  {
    Followed f({files});
    CHECK(f.b.load(iota(0, 30)) == 24);
    f.b.tiers->flush();
    CHECK(f.observer->num_stored(0) == 3);
    f.check_holds(0, *files);
    SUBCASE("before it would be put there") {
      f.store(prompt);
      CHECK(f.observer->num_stored(0) == 8);
      CHECK(f.b.tiers->stats().tiers[0].stored == 0);
      f.check_holds(0, *files);
    }
    SUBCASE("also that another process removed it") {
      std::filesystem::remove_all(folder);
      f.b.evict_all();
      f.b.tiers->flush();
      CHECK(f.observer->num_stored(0) == 3);
      CHECK(f.b.load(iota(0, 30)) == 0);
      f.b.tiers->flush();
      CHECK(f.observer->num_stored(0) == 2);
    }
  }
  SUBCASE("and at once that files make room") {
    const std::uint64_t size = files->num_bytes() / 8;
    files.reset();
    auto few = std::make_shared<FileTier>(folder.string(), 4 * size);
    Followed f({few});
    for (int i = 0; i < 10; ++i) f.store(iota(1000 * i, 40));
    CHECK(f.observer->num_lost() > 10);
    f.check_holds(0, *few);
  }
  std::filesystem::remove_all(folder);
}

TEST_CASE("of a store that publishes nothing itself its answers count") {
  auto silent = std::make_shared<FaultyTier>();
  silent->notifies = false;
  Followed f({silent});
  const auto prompt = iota(0, 64);
  f.store(prompt);
  CHECK(f.observer->num_stored(0) == 8);
  f.check_holds(0, *silent);
  silent->lose_all();
  CHECK(f.b.load(prompt) == 0);
  f.b.tiers->flush();
  CHECK(f.observer->num_stored(0) == 7);  // the first was asked for, no other
  silent->next = [](std::uint64_t&) { return TierFault::full; };
  f.store(iota(500, 64));
  CHECK(f.observer->num_stored(0) == 7);
}

TEST_CASE("a store that answers wrongly, or not at all") {
  auto faulty = std::make_shared<FaultyTier>();
  Followed f({faulty});
  const auto prompt = iota(0, 64);
  f.store(prompt);
  REQUIRE(f.observer->num_stored(0) == 8);
  faulty->next = [](std::uint64_t&) { return TierFault::fails; };
  CHECK(f.b.load(prompt) == 0);
  f.b.evict_all();
  f.b.tiers->flush();
  CHECK(f.observer->num_stored(0) == 8);  // no call said that it is not there
  faulty->next = [](std::uint64_t&) { return TierFault::truncated; };
  CHECK(f.b.load(prompt) == 0);
  f.b.tiers->flush();
  CHECK(f.observer->num_stored(0) == 7);  // damaged: it was erased
  CHECK(f.observer->num_lost() == 1);
  f.check_holds(0, *faulty);
}

TEST_CASE("that nothing of before is found is said at once") {
  auto store = memory();
  Followed f({store});
  f.store(iota(0, 64));
  CHECK(f.observer->num_cleared() == 0);
  f.b.tree.clear();
  CHECK(f.observer->num_cleared() == 1);
  f.b.tiers->reopen("m2");
  CHECK(f.b.load(iota(0, 64)) == 0);
  CHECK(f.observer->num_cleared() == 1);
  CHECK(f.observer->num_stored(0) == 8);  // and no call says that they are not there
}

TEST_CASE("what is there is reported again where the same model continues") {
  Followed f({memory()});
  f.store(iota(0, 64));
  f.b.tree.clear();  // the observer has forgotten all blocks
  f.b.tiers->reopen("m1");
  f.store(iota(0, 64));
  CHECK(f.b.tiers->stats().gathered == 16);
  CHECK(f.b.tiers->stats().tiers[0].stored == 8);
}

TEST_CASE("two trees share a store: each observer sees what becomes of its blocks") {
  auto store = std::make_shared<MemoryTier>(std::size_t{20} * (chunk * 2 * 2 * 2 * 8 * 4 + 900));
  {
    Followed a({store}), b({store});
    for (int i = 0; i < 40; ++i) {
      Followed& one = i % 2 == 0 ? a : b;
      one.b.run(iota(100 * (i / 3), 40));
      one.b.evict_all();
      if (i % 5 == 0) one.b.tiers->flush();
    }
    for (Followed* one : {&a, &b}) one->b.tiers->flush();
    a.check_holds(0, *store);
    b.check_holds(0, *store);
    CHECK(a.observer->num_lost() > 0);
  }
  CHECK(store->put({1, 2}, std::make_shared<const std::vector<std::byte>>(10),
                   {}));  // without a subscriber
}

TEST_CASE("a path that is public is so to its last block") {
  Followed f({memory()});
  const InsertOptions how{.name_space = {.tenant = 7, .adapter = 3}, .public_length = 30};
  f.store(iota(0, 30), how);
  CHECK(f.observer->blocks().size() == 3);
  for (const auto& [text, block] : f.observer->blocks())
    CHECK(block.name_space == Namespace{.adapter = 3, .is_public = true});
}

TEST_CASE("the last 16384 keys are known") {
  detail::KnownKeys known;
  constexpr std::uint64_t most = 16384;
  const auto key = [](std::uint64_t n) { return TierStore::Key{n * 0x9e3779b97f4a7c15u, n}; };
  for (std::uint64_t n = 0; n < most; ++n)
    for (int i = 0; i < 3; ++i) known.add(key(n));  // more than once is as once
  CHECK(known.has(key(0)));
  known.remove(key(0));
  known.add(key(0));  // now it is the last that came
  for (std::uint64_t n = most; n < 2 * most - 1; ++n) known.add(key(n));
  CHECK(known.has(key(0)));
  CHECK_FALSE(known.has(key(1)));
  CHECK_FALSE(known.has(key(most - 1)));
  CHECK(known.has(key(most)));
  known.add(key(2 * most));
  CHECK_FALSE(known.has(key(0)));
}

TEST_CASE("what a store says while it is asked counts for more than its answer") {
  std::vector<std::pair<TierStore::Key, bool>> seen;
  detail::StoreWatch watch(
      [&](const TierStore::Key& key, bool is_stored) { seen.emplace_back(key, is_stored); });
  const TierStore::Key key{1, 2}, other{1, 3};
  const auto seen_after = [&](const TierStore::Key& meanwhile) {
    seen.clear();
    watch.changed(key, true);
    watch.asking(key);
    watch.changed(meanwhile, true);
    watch.changed(meanwhile, false);
    watch.saw(true);
    return seen.back();
  };
  CHECK(seen_after(other) == std::pair(key, true));
  CHECK(seen_after(key) == std::pair(key, false));  // which of them came last is not known
  watch.asking(key);
  watch.saw(true);
  CHECK(seen.back() == std::pair(key, true));
}

TEST_CASE("what the last tier lost is offloaded again") {
  const auto prompt = iota(0, 64);
  const auto down = [](Bench& b, const std::vector<int>& tokens) {
    b.run(tokens);
    b.evict_all();
    b.tiers->flush();
  };
  SUBCASE("it made room for others") {
    auto few = std::make_shared<FaultyTier>();
    few->max_records = 8;
    Bench b({few});
    for (int i = 0; i < 4; ++i) down(b, iota(1000 * i, 64));
    few->lose_all();
    for (int i = 0; i < 4; ++i) {
      down(b, iota(1000 * i, 64));
      CHECK(few->size() == 8);
    }
  }
  SUBCASE("a full tier of the library") {
    const auto large = memory();
    Bench measured({large});
    down(measured, prompt);
    Bench b({memory(large->num_bytes())});  // of one prompt
    for (int round = 0; round < 3; ++round) {
      for (const auto& one : {iota(1000, 64), prompt}) {
        down(b, one);
        CHECK(b.load(one) == 63);
        b.evict_all();
      }
    }
  }
  SUBCASE("as soon as it came") {
    auto none = std::make_shared<FaultyTier>();
    none->max_records = 0;
    Bench b({none});
    down(b, prompt);
    none->max_records = 8;
    down(b, prompt);
    CHECK(b.load(prompt) == 63);
  }
  SUBCASE("a faster one still has it") {
    auto last = std::make_shared<FaultyTier>();
    Bench b({memory(), last});
    down(b, prompt);
    REQUIRE(last->size() == 8);
    last->lose_all();
    CHECK(b.load(prompt) == 63);
    b.evict_all();
    b.tiers->flush();
    CHECK(last->size() == 8);
  }
  SUBCASE("it did not say so: that is seen when it is asked") {
    auto silent = std::make_shared<FaultyTier>();
    silent->notifies = false;
    Bench b({silent});
    down(b, prompt);
    silent->lose_all();
    CHECK(b.load(prompt) == 0);
    b.evict_all();
    b.tiers->flush();
    CHECK(b.load(prompt) == 8);  // the first was asked for, no other
  }
  SUBCASE("what is there is not copied again") {
    auto store = std::make_shared<FaultyTier>();
    Bench b({store});
    for (int round = 0; round < 3; ++round) down(b, prompt);
    CHECK(b.tiers->stats().gathered == 8);
    store->lose_all();
    for (int round = 0; round < 3; ++round) down(b, prompt);
    CHECK(b.tiers->stats().gathered == 16);
  }
}
