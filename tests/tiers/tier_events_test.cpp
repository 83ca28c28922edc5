// What is told of tiers: a mirror that has only the events holds what the stores hold, and finds
// what a load finds.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
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
#include "tests/support/refused.hpp"
#include "tests/support/steps.hpp"
#include "tests/support/tier_bench.hpp"

using namespace chunkattn;
using namespace test::tier_bench;
using test::FaultyTier;
using test::iota;
using test::TierFault;

namespace {

using Below = Bench::Below;
using Event = Below::Event;
using Mirror = Below::Mirror;

/// All events, and a mirror of them.
struct Followed {
  explicit Followed(std::int32_t block = chunk) : mirror(block) {}
  [[nodiscard]] std::function<void(const Event&, std::span<const int>)> sink() {
    return [this](const Event& event, std::span<const int> tokens) {
      events.emplace_back(event, std::vector<int>(tokens.begin(), tokens.end()));
      CHECK(mirror.apply(event, tokens) == Mirror::Applied::changed);
      CHECK(tokens.empty() ==
            (event.kind == Event::Kind::evicted || event.kind == Event::Kind::cleared));
    };
  }
  [[nodiscard]] std::size_t count(Event::Kind kind, std::size_t tier = 0) const {
    return static_cast<std::size_t>(std::count_if(
        events.begin(), events.end(),
        [&](const auto& told) { return told.first.kind == kind && told.first.tier == tier; }));
  }
  std::vector<std::pair<Event, std::vector<int>>> events;
  Mirror mirror;
};

/// Whether a call is refused for this argument.
template <class F>
bool names(const F& f, const char* argument) {
  return test::refused(f).find(argument) != std::string::npos;
}

/// Of all blocks that were told of for the weights of now, a store has those that the mirror holds.
void check_holds(const Followed& followed, std::size_t tier, TierStore& store) {
  std::map<std::string, TierStore::Key> told;
  for (const auto& [event, tokens] : followed.events) {
    if (event.kind == Event::Kind::cleared)
      told.clear();
    else
      told.emplace(event.block.text(), event.block);
  }
  std::size_t held = 0;
  for (const auto& [text, key] : told) {
    const bool has = followed.mirror.has(tier, key);
    CHECK(has == store.contains(key));
    held += has ? 1 : 0;
  }
  CHECK(held == followed.mirror.num_blocks(tier));
}

}  // namespace

TEST_CASE("a block that goes down is told of, with its tokens and what it continues") {
  Followed followed;
  auto store = memory();
  Bench b({store}, {.tier_sink = followed.sink()});
  const auto prompt = iota(0, 30);
  b.run(prompt);
  b.evict_all();
  CHECK(followed.events.empty());  // nothing is told but in calls of the tiers
  b.below->flush();
  // Eviction goes from the end: the last block goes down first, when its parents are in no tier.
  REQUIRE(followed.events.size() == 5);
  const std::vector<Event::Kind> kinds{Event::Kind::named, Event::Kind::named, Event::Kind::stored,
                                       Event::Kind::stored, Event::Kind::stored};
  const std::vector<int> positions{0, 8, 16, 8, 0};
  std::map<int, TierStore::Key> keys;
  for (std::size_t i = 0; i < 5; ++i) {
    CAPTURE(i);
    const auto& [event, tokens] = followed.events[i];
    CHECK(event.kind == kinds[i]);
    CHECK(event.number == i + 1);
    CHECK(event.tier == 0);
    CHECK(event.position == positions[i]);
    CHECK(tokens == std::vector<int>(prompt.begin() + event.position,
                                     prompt.begin() + event.position + chunk));
    if (event.position > 0) CHECK(event.parent == keys.at(event.position - chunk));
    keys[event.position] = event.block;
  }
  CHECK(store->contains(keys.at(16)));
  CHECK(followed.mirror.num_blocks(0) == 3);
  CHECK(followed.mirror.match_prefix(prompt, 0) == 24);
  CHECK(followed.mirror.match_prefix(prompt, 10) == 24);
  CHECK(followed.mirror.match_prefix(prompt, 27) == 27);
  CHECK(followed.mirror.match_prefix(iota(1, 30), 0) == 0);
  CHECK(followed.mirror.match_prefix(prompt, 0, {.name_space = {.tenant = 1}}) == 0);
  const std::size_t before = followed.events.size();
  CHECK(b.load(prompt) == 24);
  CHECK(b.below->advance() == 0);
  CHECK(followed.events.size() == before);  // it is still there
}

TEST_CASE("a tier without room tells what it loses, and keeps what continues that") {
  Followed followed;
  auto small = std::make_shared<MemoryTier>(std::size_t{2} * (chunk * 2 * 2 * 2 * 8 * 4 + 700));
  auto large = memory();
  Bench b({small, large}, {.tier_sink = followed.sink()});
  const auto prompt = iota(0, 64);
  b.run(prompt);
  b.evict_all();
  b.below->flush();
  CHECK(followed.count(Event::Kind::stored, 0) == 8);
  CHECK(followed.count(Event::Kind::evicted, 0) == 6);
  CHECK(followed.count(Event::Kind::stored, 1) == 8);
  CHECK(followed.count(Event::Kind::evicted, 1) == 0);
  check_holds(followed, 0, *small);
  check_holds(followed, 1, *large);
  CHECK(b.load(prompt) == 63);
  b.below->flush();
  CHECK(followed.count(Event::Kind::stored, 0) > 8);  // what was found below came up again
  check_holds(followed, 0, *small);
  CHECK(followed.mirror.match_prefix(prompt, 0) == 64);
}

TEST_CASE("whatever happens, the mirror holds what the stores hold and finds what a load finds") {
  std::size_t found = 0, compared = 0;  // of all seeds
  for (const std::uint64_t seed : {1u, 2u, 3u, 4u, 5u, 6u}) {
    CAPTURE(seed);
    test::Random random(seed);
    const auto below = [&](int n) { return random.uniform(0, n - 1); };
    Followed followed(seed % 2 == 0 ? 5 : chunk);
    const std::size_t bytes = 4000 + 9000 * seed;
    auto small = std::make_shared<MemoryTier>(bytes);
    auto large = std::make_shared<MemoryTier>(4 * bytes);
    Bench b({small, large},
            {.block_tokens = seed % 2 == 0 ? 5 : chunk,
             .write_through = seed % 3 == 0,
             .threads = seed > 4,
             .tier_sink = followed.sink()},
            /*chunks=*/20);
    const auto lost_so_far = [&] {
      return followed.count(Event::Kind::evicted, 0) + followed.count(Event::Kind::evicted, 1);
    };
    for (int round = 0; round < 400; ++round) {
      std::vector<int> prompt;
      for (int i = 0, n = 4 + below(70); i < n; ++i) prompt.push_back(i % 20 == 0 ? below(3) : i);
      const InsertOptions how{.name_space = {.tenant = static_cast<std::uint64_t>(below(2))},
                              .public_length = static_cast<std::size_t>(below(3) * 13)};
      b.below->flush();
      {
        auto s = b.tree.insert(prompt, how);
        const std::size_t cached = s.num_written();
        const std::size_t expected = std::min(followed.mirror.match_prefix(prompt, cached, how),
                                              std::max(cached, prompt.size() - 1));
        auto load = b.below->load(s);
        load.wait(s);
        const auto lost_before = lost_so_far();
        b.below->flush();
        // What comes up may push out of the small tier what would have come next.
        if (lost_so_far() == lost_before) {
          CHECK(s.num_written() == expected);
          ++compared;
        } else {
          CHECK(s.num_written() <= expected);
        }
        found += s.num_written() - cached;
        b.model.compute(s, b.cache);
        CHECK(b.model.error(s, b.cache) == 0);
      }
      if (below(4) == 0) (void)b.below->advance();
      if (below(60) == 0) b.below->store_all();
      if (below(100) == 0) {
        b.tree.clear();
        b.below->reopen("after " + std::to_string(round));  // other weights: nothing fits
      }
    }
    b.below->flush();
    check_holds(followed, 0, *small);
    check_holds(followed, 1, *large);
    CHECK(lost_so_far() > 100);
    // Who begins with a snapshot knows as much as who heard all.
    Mirror late(seed % 2 == 0 ? 5 : chunk);
    late.load(b.below->snapshot());
    CHECK(late.number() == followed.mirror.number());
    for (const auto& [event, tokens] : followed.events)
      for (std::size_t tier : {0u, 1u})
        CHECK(late.has(tier, event.block) == followed.mirror.has(tier, event.block));
    const auto prompt = iota(0, 64);
    const InsertOptions how{.public_length = 13};
    CHECK(late.match_prefix(prompt, 0, how) == followed.mirror.match_prefix(prompt, 0, how));
  }
  CHECK(found > 1000);
  CHECK(compared > 500);
}

TEST_CASE("what was there before is told of when it is found") {
  const auto folder = std::filesystem::temp_directory_path() /
                      ("chunkattn-tier-events-" + std::to_string(std::random_device()()));
  const auto prompt = iota(0, 64);
  {
    Bench b({std::make_shared<FileTier>(folder.string(), 1 << 20)});
    b.run(prompt);
    b.evict_all();
    b.below->flush();
  }
  Followed followed;
  auto files = std::make_shared<FileTier>(folder.string(), 1 << 20);
  Bench b({files}, {.tier_sink = followed.sink()});
  b.below->flush();
  CHECK(followed.events.empty());
  CHECK(b.load(iota(0, 30)) == 24);
  b.below->flush();
  CHECK(followed.mirror.num_blocks(0) == 3);
  check_holds(followed, 0, *files);
  SUBCASE("found when it would be put there") {
    b.run(prompt);
    b.evict_all();
    b.below->flush();
    CHECK(followed.mirror.num_blocks(0) == 8);
    CHECK(b.below->stats().tiers[0].stored == 0);
    check_holds(followed, 0, *files);
  }
  SUBCASE("another process removes it: that is seen when it is looked for") {
    std::filesystem::remove_all(folder);
    b.evict_all();
    b.below->flush();
    CHECK(followed.mirror.num_blocks(0) == 3);
    CHECK(b.load(iota(0, 30)) == 0);
    b.below->flush();
    CHECK(followed.mirror.match_prefix(iota(0, 30), 0) == 0);
  }
  SUBCASE("files make room") {
    const std::uint64_t size = files->num_bytes() / 8;
    FileTier other(folder.string(), 3 * size);  // as another process would have it
    FileTier same(folder.string(), 100 * size);
    files.reset();
    b.below.reset();
    Followed again;
    auto few = std::make_shared<FileTier>(folder.string(), 4 * size);
    Bench next({few}, {.tier_sink = again.sink()});
    for (int i = 0; i < 10; ++i) {
      next.run(iota(1000 * i, 40));
      next.evict_all();
      next.below->flush();
    }
    CHECK(again.count(Event::Kind::evicted) > 10);
    check_holds(again, 0, *few);
  }
  std::filesystem::remove_all(folder);
}

TEST_CASE("of a store that says nothing itself is told what its answers say") {
  Followed followed;
  auto silent = std::make_shared<FaultyTier>();
  silent->tells = false;
  Bench b({silent}, {.tier_sink = followed.sink()});
  const auto prompt = iota(0, 64);
  b.run(prompt);
  b.evict_all();
  b.below->flush();
  CHECK(followed.mirror.num_blocks(0) == 8);
  check_holds(followed, 0, *silent);
  silent->lose_all();
  CHECK(b.load(prompt) == 0);
  b.below->flush();
  CHECK(followed.mirror.match_prefix(prompt, 0) == 0);
  CHECK(followed.mirror.num_blocks(0) == 7);  // the first was asked for, no other
  silent->next = [](std::uint64_t&) { return TierFault::full; };
  b.run(iota(500, 64));
  b.evict_all();
  b.below->flush();
  CHECK(followed.mirror.match_prefix(iota(500, 64), 0) == 0);
}

TEST_CASE("what the last tier lost goes down again") {
  const auto prompt = iota(0, 64);
  const auto down = [](Bench& b, const std::vector<int>& tokens) {
    b.run(tokens);
    b.evict_all();
    b.below->flush();
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
    b.below->flush();
    CHECK(last->size() == 8);
  }
  SUBCASE("it did not say so: that is seen when it is asked") {
    auto silent = std::make_shared<FaultyTier>();
    silent->tells = false;
    Bench b({silent});
    down(b, prompt);
    silent->lose_all();
    CHECK(b.load(prompt) == 0);
    b.evict_all();
    b.below->flush();
    CHECK(b.load(prompt) == 8);  // the first was asked for, no other
  }
  SUBCASE("what is there is not copied again") {
    auto store = std::make_shared<FaultyTier>();
    Bench b({store});
    for (int round = 0; round < 3; ++round) down(b, prompt);
    CHECK(b.below->stats().gathered == 8);
    store->lose_all();
    for (int round = 0; round < 3; ++round) down(b, prompt);
    CHECK(b.below->stats().gathered == 16);
  }
}

TEST_CASE("a store that answers wrongly, or not at all") {
  Followed followed;
  auto faulty = std::make_shared<FaultyTier>();
  Bench b({faulty}, {.tier_sink = followed.sink()});
  const auto prompt = iota(0, 64);
  b.run(prompt);
  b.evict_all();
  b.below->flush();
  REQUIRE(followed.mirror.num_blocks(0) == 8);
  faulty->next = [](std::uint64_t&) { return TierFault::fails; };
  CHECK(b.load(prompt) == 0);
  b.evict_all();
  b.below->flush();
  CHECK(followed.mirror.num_blocks(0) == 8);  // nobody said that it is not there
  faulty->next = [](std::uint64_t&) { return TierFault::truncated; };
  CHECK(b.load(prompt) == 0);
  b.below->flush();
  CHECK(followed.mirror.num_blocks(0) == 7);  // damaged: it was erased
  check_holds(followed, 0, *faulty);
}

TEST_CASE("new weights clear what is told") {
  Followed followed;
  auto store = memory();
  Bench b({store}, {.tier_sink = followed.sink()});
  const auto prompt = iota(0, 64);
  b.run(prompt);
  b.evict_all();
  b.tree.clear();  // with all on its way
  b.below->reopen("m2");
  b.below->flush();
  REQUIRE(!followed.events.empty());
  CHECK(followed.events[0].first.kind == Event::Kind::cleared);
  CHECK(followed.events.size() == 1);
  CHECK(store->num_bytes() > 0);  // records of the old ones are there, and found by nobody
  CHECK(followed.mirror.match_prefix(prompt, 0) == 0);
  b.run(prompt);
  b.evict_all();
  b.below->flush();
  CHECK(followed.mirror.match_prefix(prompt, 0) == 64);
  b.tree.clear();
  b.below->reopen("m1");
  b.below->flush();
  CHECK(followed.mirror.num_blocks(0) == 0);
  CHECK(b.load(prompt) == 63);  // with the first weights again it is found
  b.below->flush();
  CHECK(followed.mirror.match_prefix(prompt, 0) == 64);
}

TEST_CASE("two trees share a store: each tells of what it knows") {
  Followed first, second;
  auto store = std::make_shared<MemoryTier>(std::size_t{20} * (chunk * 2 * 2 * 2 * 8 * 4 + 900));
  {
    Bench a({store}, {.tier_sink = first.sink()}), b({store}, {.tier_sink = second.sink()});
    for (int i = 0; i < 40; ++i) {
      Bench& one = i % 2 == 0 ? a : b;
      one.run(iota(100 * (i / 3), 40));
      one.evict_all();
      if (i % 5 == 0) one.below->flush();
    }
    for (Bench* one : {&a, &b}) one->below->flush();
    for (Bench* one : {&a, &b}) one->below->flush();  // also what the other's puts pushed out
    check_holds(first, 0, *store);
    check_holds(second, 0, *store);
    CHECK(first.count(Event::Kind::evicted) > 0);
  }
  CHECK(
      store->put({1, 2}, std::make_shared<const std::vector<std::byte>>(10), {}));  // nobody hears
}

TEST_CASE("what a call says counts, whatever another tier says of the block meanwhile") {
  using detail::TierNews;
  const auto news = std::make_shared<TierNews>();
  const TierStore::Key key{1, 2};
  const auto hold = TierNews::announce(
      news, 0, [&](std::size_t) { return key; }, [](std::size_t) { return detail::TierBlock{}; });
  TierNews::Listener first(news, 0), second(news, 1);
  const auto tiers_after = [&](TierNews::Listener& meanwhile) {
    first.changed(key, false);
    second.changed(key, false);
    {
      TierNews::Watch watch(news.get(), 0, key);
      meanwhile.changed(key, true);
      meanwhile.changed(key, false);
      watch.saw(true);
    }
    std::set<std::size_t> tiers;
    news->deliver([&](detail::TierChange change, std::size_t tier, auto&&...) {
      if (change == detail::TierChange::stored) tiers.insert(tier);
      if (change == detail::TierChange::evicted) tiers.erase(tier);
    });
    return tiers;
  };
  CHECK(tiers_after(second) == std::set<std::size_t>{0});
  CHECK(tiers_after(first).empty());  // which of them came last is not known
}

TEST_CASE("blocks of prompts that are public to another length are others") {
  Followed followed;
  Bench b({memory()}, {.tier_sink = followed.sink()});
  const auto prompt = iota(0, 64);
  const InsertOptions how{.name_space = {.tenant = 1}, .public_length = 4};
  b.run(prompt, how);
  b.evict_all();
  b.below->flush();
  CHECK(followed.mirror.match_prefix(prompt, 0, how) == 64);
  CHECK(followed.mirror.match_prefix(prompt, 0, {.name_space = {.tenant = 1}}) == 0);
  CHECK(b.load(prompt, {.name_space = {.tenant = 1}}) == 0);
}

TEST_CASE("an event that cannot follow is refused, and one that is missing is noticed") {
  Followed followed;
  Bench b({memory()}, {.tier_sink = followed.sink()});
  b.run(iota(0, 30));
  b.evict_all();
  b.below->flush();
  const auto& events = followed.events;
  Mirror mirror(chunk);
  CHECK(mirror.apply(events[1].first, events[1].second) == Mirror::Applied::missed);
  Event orphan = events[1].first;
  orphan.number = 1;
  CHECK(names([&] { (void)mirror.apply(orphan, events[1].second); }, "event.parent"));
  Event gone = events[0].first;
  gone.kind = Event::Kind::evicted;
  CHECK(names([&] { (void)mirror.apply(gone, {}); }, "event.block"));
  CHECK(names([&] { (void)mirror.apply(events[0].first, std::vector<int>(3)); }, "tokens.size()"));
  CHECK(mirror.number() == 0);
  for (const auto& [event, tokens] : events)
    CHECK(mirror.apply(event, tokens) == Mirror::Applied::changed);
  CHECK(mirror.apply(events[0].first, events[0].second) == Mirror::Applied::repeated);
  Event twice = events[4].first;
  ++twice.number;
  CHECK(names([&] { (void)mirror.apply(twice, events[4].second); }, "event.block"));
  CHECK(mirror.num_blocks(0) == 3);
  // A tier that nobody has holds nothing, whatever bits its number would be shifted to.
  CHECK(mirror.has(0, events[0].first.block));
  for (const std::size_t tier : {1u, 63u, 64u, 65u, 128u})
    CHECK_FALSE(mirror.has(tier, events[0].first.block));
  Bench unfollowed({memory()});
  CHECK(names([&] { (void)unfollowed.below->snapshot(); }, "options.tier_sink"));
  CHECK(names([&] { (void)Mirror(0); }, "block_tokens"));
}
