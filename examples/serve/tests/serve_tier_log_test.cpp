// Events of tiers: a subscriber that has only these holds what the stores hold, and finds what a
// load finds.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "engine/tier_log.hpp"
#include "tests/support/faulty_tier.hpp"
#include "tests/support/random.hpp"
#include "tests/support/steps.hpp"
#include "tests/support/tier_bench.hpp"
#include "tier_mirror.hpp"

using namespace chunkattn;
using namespace test::tier_bench;
using serve::TierEvent;
using serve::TierLog;
using serve::TierMirror;
using test::FaultyTier;
using test::iota;
using test::TierFault;
using Kind = TierEvent::Kind;
using Medium = TierEvent::Medium;

namespace {

constexpr Medium media[] = {Medium::memory, Medium::files};

/// A tree over tiers, all events, and a mirror of them.
struct Subscribed {
  explicit Subscribed(std::vector<std::shared_ptr<TierStore>> stores, Bench::Options options = {},
                      std::size_t chunks = 32)
      : mirror(static_cast<std::size_t>(options.block_tokens.value_or(chunk))),
        b(std::move(stores), with_log(std::move(options)), chunks) {}
  Bench::Options with_log(Bench::Options options) {
    options.observer = std::make_shared<serve::TierLogObserver<Bench::TreeTiers>>(log);
    return options;
  }
  void deliver() {
    log->deliver([&](const TierEvent& event, std::span<const int> tokens) {
      events.emplace_back(event, std::vector<int>(tokens.begin(), tokens.end()));
      mirror.apply(event, tokens);
    });
  }
  void flush() {
    b.tiers->flush();
    deliver();
  }
  /// A prompt runs and goes to the tiers.
  void store(const std::vector<int>& prompt, const InsertOptions& how = {}) {
    b.run(prompt, how);
    b.evict_all();
    flush();
  }
  [[nodiscard]] std::size_t count(Kind kind, std::size_t tier = 0) const {
    return static_cast<std::size_t>(
        std::count_if(events.begin(), events.end(), [&](const auto& one) {
          return one.first.kind == kind && one.first.medium == media[tier];
        }));
  }
  /// Of all blocks that were published for the weights of now, a store has those that the mirror
  /// holds.
  void check_holds(std::size_t tier, TierStore& store) const {
    std::map<std::string, TierStore::Key> published;
    for (const auto& [event, tokens] : events) {
      if (event.kind == Kind::cleared)
        published.clear();
      else
        published.emplace(event.block.text(), event.block);
    }
    std::size_t held = 0;
    for (const auto& [text, key] : published) {
      const bool has = mirror.has(media[tier], key);
      CHECK(has == store.contains(key));
      held += has ? 1 : 0;
    }
    CHECK(held == mirror.num_blocks(media[tier]));
  }

  std::vector<std::pair<TierEvent, std::vector<int>>> events;
  TierMirror mirror;
  std::shared_ptr<TierLog> log = std::make_shared<TierLog>(std::vector(media, media + 2));
  Bench b;
};

}  // namespace

TEST_CASE("a block that is offloaded is published, with its tokens and its parent") {
  auto store = memory();
  Subscribed f({store});
  const auto prompt = iota(0, 30);
  f.b.run(prompt);
  f.b.evict_all();
  CHECK(f.events.empty());
  f.flush();
  // Eviction goes from the end: the last block is stored first, when its parents are in no tier.
  REQUIRE(f.events.size() == 5);
  const std::vector<Kind> kinds{Kind::named, Kind::named, Kind::stored, Kind::stored, Kind::stored};
  const std::vector<int> positions{0, 8, 16, 8, 0};
  std::map<int, TierStore::Key> keys;
  for (std::size_t i = 0; i < 5; ++i) {
    CAPTURE(i);
    const auto& [event, tokens] = f.events[i];
    CHECK(event.kind == kinds[i]);
    CHECK(event.medium == Medium::memory);
    CHECK(event.position == positions[i]);
    CHECK(event.name_space == Namespace{});
    CHECK(tokens == std::vector<int>(prompt.begin() + event.position,
                                     prompt.begin() + event.position + chunk));
    if (event.position > 0) CHECK(event.parent == keys.at(event.position - chunk));
    keys[event.position] = event.block;
  }
  CHECK(store->contains(keys.at(16)));
  CHECK(f.mirror.num_blocks(Medium::memory) == 3);
  CHECK(f.mirror.match(prompt, 0) == 24);
  CHECK(f.mirror.match(prompt, 27) == 27);
  CHECK(f.mirror.match(iota(1, 30), 0) == 0);
  CHECK(f.mirror.match(prompt, 0, {.tenant = 1}) == 0);
  const std::size_t before = f.events.size();
  CHECK(f.b.load(prompt) == 24);
  f.deliver();
  CHECK(f.events.size() == before);  // it is still there
}

TEST_CASE("a full tier loses blocks, and keeps those that extend them") {
  auto small = std::make_shared<MemoryTier>(std::size_t{2} * (chunk * 2 * 2 * 2 * 8 * 4 + 700));
  auto large = memory();
  Subscribed f({small, large});
  const auto prompt = iota(0, 64);
  f.store(prompt);
  CHECK(f.count(Kind::stored, 0) == 8);
  CHECK(f.count(Kind::evicted, 0) == 6);
  CHECK(f.count(Kind::stored, 1) == 8);
  CHECK(f.count(Kind::evicted, 1) == 0);
  f.check_holds(0, *small);
  f.check_holds(1, *large);
  CHECK(f.b.load(prompt) == 63);
  f.flush();
  CHECK(f.count(Kind::stored, 0) > 8);  // what was found in the slower one came to this one again
  f.check_holds(0, *small);
  CHECK(f.mirror.match(prompt, 0) == 64);
}

TEST_CASE("whatever happens, the mirror holds what the stores hold and finds what a load finds") {
  std::size_t found = 0, compared = 0;  // of all seeds
  for (const std::uint64_t seed : {1u, 2u, 3u, 4u, 5u, 6u}) {
    CAPTURE(seed);
    test::Random random(seed);
    const auto below = [&](int n) { return random.uniform(0, n - 1); };
    const std::size_t bytes = 4000 + 9000 * seed;
    auto small = std::make_shared<MemoryTier>(bytes);
    auto large = std::make_shared<MemoryTier>(4 * bytes);
    Subscribed f({small, large},
                 {.block_tokens = seed % 2 == 0 ? 5 : chunk,
                  .write_through = seed % 3 == 0,
                  .threads = seed > 4},
                 /*chunks=*/20);
    const auto lost_so_far = [&] { return f.count(Kind::evicted, 0) + f.count(Kind::evicted, 1); };
    for (int round = 0; round < 400; ++round) {
      std::vector<int> prompt;
      for (int i = 0, n = 4 + below(70); i < n; ++i) prompt.push_back(i % 20 == 0 ? below(3) : i);
      const InsertOptions how{.name_space = {.tenant = static_cast<std::uint64_t>(below(2))},
                              .public_length = static_cast<std::size_t>(below(3) * 13)};
      f.flush();
      {
        auto s = f.b.tree.insert(prompt, how);
        const std::size_t cached = s.num_written();
        const std::size_t expected =
            std::min(f.mirror.match(prompt, cached, how.name_space, how.public_length),
                     std::max(cached, prompt.size() - 1));
        auto load = f.b.tiers->load(s);
        load.wait(s);
        const auto lost_before = lost_so_far();
        f.flush();
        // What is promoted may push out of the small tier what would have come next.
        if (lost_so_far() == lost_before) {
          CHECK(s.num_written() == expected);
          ++compared;
        } else {
          CHECK(s.num_written() <= expected);
        }
        found += s.num_written() - cached;
        f.b.model.compute(s, f.b.cache);
        CHECK(f.b.model.error(s, f.b.cache) == 0);
      }
      if (below(4) == 0) (void)f.b.tiers->advance();
      if (below(8) == 0) f.deliver();
      if (below(60) == 0) f.b.tiers->store_all();
      if (below(100) == 0) {
        f.b.tree.clear();
        f.b.tiers->reopen("after " + std::to_string(round));  // other weights: nothing fits
      }
    }
    f.flush();
    f.check_holds(0, *small);
    f.check_holds(1, *large);
    CHECK(lost_so_far() > 100);
    // Nothing is known for ever: when all is lost, nothing is left.
    f.b.tree.clear();
    f.deliver();
    CHECK(f.mirror.num_known() == 0);
  }
  CHECK(found > 1000);
  CHECK(compared > 500);
}

TEST_CASE("what a directory had before is published when it is found") {
  const auto folder = std::filesystem::temp_directory_path() /
                      ("serve-tier-log-" + std::to_string(std::random_device()()));
  const auto prompt = iota(0, 64);
  {
    Subscribed f({std::make_shared<FileTier>(folder.string(), 1 << 20)});
    f.store(prompt);
  }
  auto files = std::make_shared<FileTier>(folder.string(), 1 << 20);
  {
    Subscribed f({files});
    f.flush();
    CHECK(f.events.empty());
    CHECK(f.b.load(iota(0, 30)) == 24);
    f.flush();
    CHECK(f.mirror.num_blocks(Medium::memory) == 3);
    f.check_holds(0, *files);
    f.store(prompt);
    CHECK(f.mirror.num_blocks(Medium::memory) == 8);
    CHECK(f.b.tiers->stats().tiers[0].stored == 0);
    f.check_holds(0, *files);
  }
  std::filesystem::remove_all(folder);
}

TEST_CASE("of a store that publishes nothing itself its answers count") {
  auto silent = std::make_shared<FaultyTier>();
  silent->notifies = false;
  Subscribed f({silent});
  const auto prompt = iota(0, 64);
  f.store(prompt);
  CHECK(f.mirror.num_blocks(Medium::memory) == 8);
  f.check_holds(0, *silent);
  silent->lose_all();
  CHECK(f.b.load(prompt) == 0);
  f.flush();
  CHECK(f.mirror.match(prompt, 0) == 0);
  CHECK(f.mirror.num_blocks(Medium::memory) == 7);  // the first was asked for, no other
  CHECK(f.mirror.num_known() == 8);                 // but its parent is: the second extends it
  silent->next = [](std::uint64_t&) { return TierFault::full; };
  f.store(iota(500, 64));
  CHECK(f.mirror.match(iota(500, 64), 0) == 0);
}

TEST_CASE("a store that answers wrongly, or not at all") {
  auto faulty = std::make_shared<FaultyTier>();
  Subscribed f({faulty});
  const auto prompt = iota(0, 64);
  f.store(prompt);
  REQUIRE(f.mirror.num_blocks(Medium::memory) == 8);
  faulty->next = [](std::uint64_t&) { return TierFault::fails; };
  CHECK(f.b.load(prompt) == 0);
  f.b.evict_all();
  f.flush();
  CHECK(f.mirror.num_blocks(Medium::memory) == 8);  // nobody said that it is not there
  faulty->next = [](std::uint64_t&) { return TierFault::truncated; };
  CHECK(f.b.load(prompt) == 0);
  f.flush();
  CHECK(f.mirror.num_blocks(Medium::memory) == 7);  // damaged: it was erased
  f.check_holds(0, *faulty);
}

TEST_CASE("new weights clear what is published") {
  auto store = memory();
  Subscribed f({store});
  const auto prompt = iota(0, 64);
  f.b.run(prompt);
  f.b.evict_all();
  f.b.tree.clear();  // with all on its way
  f.b.tiers->reopen("m2");
  f.flush();
  REQUIRE(f.events.size() == 1);
  CHECK(f.events[0].first.kind == Kind::cleared);
  CHECK(store->num_bytes() > 0);  // records of the old ones are there, and found by no load
  f.store(prompt);
  CHECK(f.mirror.match(prompt, 0) == 64);
  f.b.tree.clear();
  f.b.tiers->reopen("m1");
  f.flush();
  CHECK(f.mirror.num_known() == 0);
  CHECK(f.b.load(prompt) == 63);  // with the first weights again it is found
  f.flush();
  CHECK(f.mirror.match(prompt, 0) == 64);
}

TEST_CASE("two trees share a store: each publishes what it knows") {
  auto store = std::make_shared<MemoryTier>(std::size_t{20} * (chunk * 2 * 2 * 2 * 8 * 4 + 900));
  Subscribed a({store}), b({store});
  for (int i = 0; i < 40; ++i) {
    Subscribed& one = i % 2 == 0 ? a : b;
    one.b.run(iota(100 * (i / 3), 40));
    one.b.evict_all();
    if (i % 5 == 0) one.flush();
  }
  for (int i = 0; i < 2; ++i)
    for (Subscribed* one : {&a, &b}) one->flush();  // also what the other's puts pushed out
  a.check_holds(0, *store);
  b.check_holds(0, *store);
  CHECK(a.count(Kind::evicted) > 0);
}

TEST_CASE("changes of more blocks than are kept are published as what holds then") {
  const auto log = std::make_shared<TierLog>(std::vector(media, media + 2));
  TierMirror mirror(1);
  std::size_t cleared = 0;
  const auto deliver = [&] {
    log->deliver([&](const TierEvent& event, std::span<const int> tokens) {
      if (event.kind == Kind::cleared) ++cleared;
      mirror.apply(event, tokens);
    });
  };
  const auto key_at = [](std::size_t n) { return TierStore::Key{n + 1, 7}; };
  const auto expect = [&](std::size_t num_blocks) {
    return log->expect(num_blocks, [&](std::size_t i) {
      return Bench::TreeTiers::Block{
          key_at(i), {}, static_cast<std::int32_t>(i), {static_cast<int>(i)}};
    });
  };
  auto hold = expect(4);
  for (std::size_t i = 0; i < 4; ++i) log->changed(0, key_at(i), true);
  deliver();
  CHECK(cleared == 0);
  CHECK(mirror.num_blocks(Medium::memory) == 4);
  for (int i = 0; i < (1 << 18) + 8; ++i)
    log->changed(static_cast<std::size_t>(i / 2 % 2), key_at(1), i % 2 != 0);
  log->changed(1, key_at(3), true);
  log->changed(0, key_at(0), false);
  deliver();
  CHECK(cleared == 1);
  CHECK(mirror.num_known() == 4);
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(mirror.has(Medium::memory, key_at(i)) == (i != 0));
    CHECK(mirror.has(Medium::files, key_at(i)) == (i == 1 || i == 3));
  }
  // Afterwards they are published one by one again, and forgotten where nothing is left.
  hold.reset();
  for (std::size_t i = 0; i < 4; ++i) {
    log->changed(0, key_at(i), false);
    log->changed(1, key_at(i), false);
  }
  deliver();
  CHECK(cleared == 1);
  CHECK(mirror.num_known() == 0);
  log->changed(0, key_at(2), true);  // nobody expects it any more
  deliver();
  CHECK(mirror.num_known() == 0);
}

TEST_CASE("a hold of before cleared() does not count after it") {
  const auto log = std::make_shared<TierLog>(std::vector(media, media + 2));
  const TierStore::Key key{1, 2};
  const auto expect = [&] {
    return log->expect(1, [&](std::size_t) { return Bench::TreeTiers::Block{key, {}, 0, {5}}; });
  };
  auto old = expect();
  log->cleared();
  const auto now = expect();
  old.reset();
  log->changed(0, key, true);
  std::vector<Kind> kinds;
  log->deliver([&](const TierEvent& event, std::span<const int>) { kinds.push_back(event.kind); });
  CHECK(kinds == std::vector{Kind::cleared, Kind::stored});
}
