// Tiers below a tree: what is evicted comes back bit for bit, to whom it belongs and to no
// other; whatever a tier does wrong costs time only.
#include "chunkattn/tiers/tiers.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/events/mirror.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/tiers/detail/queue.hpp"
#include "chunkattn/tiers/detail/spans.hpp"
#include "tests/support/counted_new.hpp"
#include "tests/support/faulty_tier.hpp"
#include "tests/support/random.hpp"
#include "tests/support/steps.hpp"
#include "tests/support/tier_bench.hpp"

using namespace chunkattn;
using namespace test::tier_bench;
using test::FaultyTier;
using test::iota;
using test::refused;
using test::TierFault;

TEST_CASE("what was evicted comes back bit for bit") {
  for (const bool threads : {true, false}) {
    Bench b({memory()}, {.threads = threads});
    const auto prompt = iota(0, 101);
    b.run(prompt);
    b.evict_all();
    b.tiers->flush();
    CHECK(b.tiers->stats().gathered == 12);
    CHECK(b.load(prompt) == 96);
    CHECK(b.tiers->stats().loaded_tokens == 96);
    CHECK(b.load(iota(0, 96)) == 96);  // cached now
    b.evict_all();
    CHECK(b.load(iota(0, 96)) == 95);  // its last token is computed
    CHECK(b.load(iota(1, 60)) == 0);
    check_invariants(b.tree);
  }
}

TEST_CASE("a part of a block is loaded where the rest is cached") {
  Bench b({memory()});
  auto long_one = iota(0, 64);
  b.run(long_one);
  b.evict_all();
  b.tiers->flush();
  for (std::size_t cut = 1; cut < 64; cut += 3) {
    const auto prompt = iota(0, cut);
    b.run(prompt);  // the rest is in the tier
    CHECK(b.load(long_one) == 63);
    b.evict_all();
  }
  // Where a prompt leaves the other in a block, that block is not found.
  auto other = iota(0, 30);
  other.resize(64, 7);
  CHECK(b.load(other) == 24);
}

TEST_CASE("blocks need not be chunks") {
  for (const int block : {1, 3, 8, 20, 64}) {
    Bench b({memory()}, {.block_tokens = block});
    const auto prompt = iota(0, 100);
    b.run(iota(0, 37));  // so that chunks are cut
    b.run(prompt);
    b.evict_all();
    b.tiers->flush();
    CHECK(b.load(prompt) == std::min<std::size_t>(99, 100 / static_cast<std::size_t>(block) *
                                                          static_cast<std::size_t>(block)));
  }
}

TEST_CASE("tenants and adapters find their own only, and what is public") {
  auto store = memory();
  Bench b({store});
  const auto prompt = iota(0, 64);
  const InsertOptions mine{.name_space = {.tenant = 1}, .public_length = 29};
  b.run(prompt, mine);
  b.evict_all();
  b.tiers->flush();
  CHECK(b.load(prompt, mine) == 63);
  b.evict_all();
  CHECK(b.load(prompt, {.name_space = {.tenant = 2}, .public_length = 29}) == 24);
  b.evict_all();
  CHECK(b.load(prompt, {.name_space = {.tenant = 1}}) == 0);
  b.evict_all();
  CHECK(b.load(prompt, {.name_space = {.tenant = 1, .adapter = 1}, .public_length = 29}) == 0);
  b.evict_all();
  CHECK(b.load(prompt, {.name_space = {.tenant = 1}, .public_length = 40}) == 24);
  b.evict_all();
  CHECK(b.load(prompt, {.name_space = {.tenant = 3}, .public_length = 8}) == 8);
}

TEST_CASE("tenants that have no name in common are not stored") {
  Bench b({memory()}, {.identity = [](const Namespace& space) -> std::optional<std::string> {
            if (space.tenant == 9) return std::nullopt;
            return space.tenant < 3 ? "a" : "b";  // those with the same name share
          }});
  const auto prompt = iota(0, 64);
  for (const std::uint64_t tenant : {std::uint64_t{9}, std::uint64_t{1}}) {
    b.run(prompt, {.name_space = {.tenant = tenant}});
    b.evict_all();
  }
  b.tiers->flush();
  CHECK(b.tiers->stats().gathered == 8);
  CHECK(b.load(prompt, {.name_space = {.tenant = 9}}) == 0);
  b.evict_all();
  CHECK(b.load(prompt, {.name_space = {.tenant = 3}}) == 0);
}

TEST_CASE_TEMPLATE("K/V of 16 bits, and rounded to 8", T, half, bfloat16, float) {
  const auto prompt = iota(0, 64);
  for (const auto stored : {std::optional<ElementType>(), std::optional(ElementType::int8),
                            std::optional(ElementType::float8_e4m3)}) {
    auto store = memory();
    BenchOf<T> b({store}, {.stored_as = stored});
    b.run(prompt);
    b.evict_all();
    b.tiers->flush();
    // Of rows up to 8: half a step of 8 / 127, or of 3 bits after the point.
    const double tolerance = !stored                        ? 0
                             : *stored == ElementType::int8 ? 8.0 / 127 / 2 + 0.05
                                                            : 8.0 / 16 + 0.05;
    CHECK(b.load(prompt, {}, tolerance) == 63);
    if (stored) CHECK(store->num_bytes() < 8 * (chunk * 2 * 2 * 2 * (8 + 4) + 600));
  }
}

TEST_CASE("a row that 8 bits cannot hold is not stored") {
  Bench b({memory()}, {.stored_as = ElementType::int8});
  {
    auto s = b.tree.insert(iota(0, 16));
    b.model.each(s, {0, 16}, b.cache, [](float& element, float) { element = INFINITY; });
    s.mark_loaded({0, 16});
  }
  b.evict_all();
  b.tiers->flush();
  CHECK(b.tiers->stats().tiers[0].put_failed == 2);
  CHECK(b.load(iota(0, 16)) == 0);
}

TEST_CASE("rows of zeros, or of next to nothing, come back from 8 bits") {
  for (const ElementType stored : {ElementType::int8, ElementType::float8_e4m3})
    for (const float value : {0.0f, 1e-44f}) {
      CAPTURE(value);
      Bench b({memory()}, {.stored_as = stored});
      {
        auto s = b.tree.insert(iota(0, 16));
        b.model.each(s, {0, 16}, b.cache, [&](float& element, float) { element = value; });
        s.mark_loaded({0, 16});
      }
      b.evict_all();
      b.tiers->flush();
      auto s = b.tree.insert(iota(0, 16));
      auto loading = b.tiers->load(s);
      loading.wait(s);
      CHECK(s.num_written() == 15);
      b.model.each(s, {0, static_cast<std::int32_t>(s.num_written())}, b.cache,
                   [](float& element, float) { CHECK(std::abs(element) <= 0x1p-126f); });
    }
}

TEST_CASE("a tenant's chunks are found where the public part ends within one") {
  Bench b({memory()}, {}, 32, {.sharing = TreeOptions::Sharing::chunk});
  const auto prompt = iota(0, 64);
  const InsertOptions how{.name_space = {.tenant = 1}, .public_length = 29};
  b.run(prompt, how);
  b.evict_all();
  b.tiers->flush();
  CHECK(b.load(prompt, how) > 55);
}

TEST_CASE("a block lies where it was stored again after a part of it went") {
  for (const std::int32_t gone : {1, 2}) {
    CAPTURE(gone);
    const std::int32_t kept = 6 - gone;
    detail::TierSpans<int> spans(chunk);
    const auto ignore = [](auto&&...) {};
    CacheEvent event{.kind = CacheEvent::Kind::stored, .span = 1, .length = 6, .first_chunk = 5};
    REQUIRE(spans.store(event, iota(0, 6), ignore));
    event = {.kind = CacheEvent::Kind::evicted, .span = 1, .position = kept, .length = gone};
    REQUIRE(spans.evict(event, ignore));
    event = {.kind = CacheEvent::Kind::stored,
             .span = 1,
             .parent = 1,
             .position = kept,
             .length = 4,
             .first_chunk = 5,
             .first_offset = 6};
    REQUIRE(spans.store(event, iota(100, 4), ignore));
    const auto* const span = spans.find(1, 0);
    REQUIRE(span != nullptr);
    std::vector<Piece> pieces;
    spans.pieces_of(*span, 0, pieces);
    REQUIRE(pieces.size() == 2);
    CHECK(pieces[0].begin == 0);
    CHECK(pieces[0].length == kept);
    CHECK(pieces[1].begin == 6);
    CHECK(pieces[1].length == chunk - kept);
    CHECK(pieces[1].position == kept);
  }
}

TEST_CASE("others wait for what a sequence loads") {
  auto store = std::make_shared<FaultyTier>();
  Bench b({store}, {.threads = false});
  const auto prompt = iota(0, 64);
  b.run(prompt);
  b.evict_all();
  b.tiers->flush();
  auto first = b.tree.insert(prompt), second = b.tree.insert(prompt);
  auto loading = b.tiers->load(first);
  REQUIRE(loading);
  CHECK_FALSE(b.tiers->load(second));  // it has nothing to load
  CHECK(second.num_pending() > 0);
  CHECK(second.waits_for() == first.id());
  {
    auto step = b.tree.begin_step();
    const AddResult added = step.add(second);
    CHECK(added.reason() == AddResult::Reason::waits_for_sequence);
    CHECK(added.waits_for() == first.id());
  }
  for (int i = 0; loading.poll(first); ++i) {
    REQUIRE(i < 100);
    (void)b.tiers->work();
  }
  CHECK(first.num_written() == 63);
  CHECK(second.num_pending() == 1);
  CHECK(b.model.error(second, b.cache) == 0);
  CHECK(second.num_written() == 63);
}

TEST_CASE("a load that is cancelled leaves its sequence to computing") {
  auto store = std::make_shared<FaultyTier>();
  Bench b({store}, {.threads = false});
  const auto prompt = iota(0, 64);
  b.run(prompt);
  b.evict_all();
  b.tiers->flush();
  SUBCASE("the load goes") {
    auto s = b.tree.insert(prompt);
    {
      auto loading = b.tiers->load(s);
    }
    b.tiers->flush();
    CHECK(store->gets == 0);
    b.model.compute(s, b.cache);
    CHECK(b.model.error(s, b.cache) == 0);
  }
  SUBCASE("the sequence is added to a step") {
    AttentionPlan plan;
    auto s = b.tree.insert(prompt);
    auto loading = b.tiers->load(s);
    b.tiers->flush();
    auto step = b.tree.begin_step();
    REQUIRE(step.add(s));
    CHECK_FALSE(loading.poll(s));
    CHECK(b.tiers->stats().loaded_tokens == 0);
    (void)plan.build(step);
    (void)std::move(step).finish();
    check_invariants(b.tree);
  }
  SUBCASE("the sequence becomes another") {
    auto s = b.tree.insert(prompt);
    auto loading = b.tiers->load(s);
    b.tiers->flush();
    s.truncate(20);
    s.append(iota(500, 44));
    CHECK_FALSE(loading.poll(s));
    CHECK(s.num_written() == 0);
  }
  SUBCASE("new weights") {
    auto s = b.tree.insert(prompt);
    auto loading = b.tiers->load(s);
    b.tiers->flush();
    b.tree.clear();
    CHECK_FALSE(loading.poll(s));
    CHECK(s.num_written() == 0);
  }
  SUBCASE("the tiers go") {
    auto s = b.tree.insert(prompt);
    auto loading = b.tiers->load(s);
    b.tiers.reset();
    CHECK_FALSE(loading.poll(s));
    auto other = std::move(loading);
    other.cancel();
  }
  SUBCASE("a part is there") {
    auto s = b.tree.insert(prompt);
    auto loading = b.tiers->load(s);
    b.tiers->flush();
    (void)loading.poll(s);
    const std::size_t there = s.num_written();
    CHECK(there > 0);
    loading.cancel();
    b.model.compute(s, b.cache);
    CHECK(b.model.error(s, b.cache) == 0);
  }
}

TEST_CASE("a load that another is moved onto is cancelled") {
  const auto store = std::make_shared<FaultyTier>();
  Bench b({store}, {.threads = false});
  const auto prompt = iota(0, 64), other = iota(1000, 64);
  b.run(prompt);
  b.run(other);
  b.evict_all();
  b.tiers->flush();
  auto first = b.tree.insert(prompt), second = b.tree.insert(other);
  auto loading = b.tiers->load(first);
  loading = b.tiers->load(second);
  auto& self = loading;
  loading = std::move(self);
  loading.wait(second);
  CHECK(first.num_written() == 0);
  CHECK(second.num_written() == 63);
  CHECK(store->gets == 8);
}

TEST_CASE("a load ends where its sequence was cut back before what comes") {
  Bench b({memory()}, {.max_prefetched = 2, .threads = false});
  const auto prompt = iota(0, 64);
  b.run(prompt);
  b.evict_all();
  b.tiers->flush();
  auto s = b.tree.insert(prompt);
  auto loading = b.tiers->load(s);
  while (s.num_written() < 24) {
    CHECK(b.tiers->work());
    REQUIRE(loading.poll(s));
  }
  s.truncate(12);
  for (const int token : iota(500, 52)) s.append(token);
  loading.wait(s);
  CHECK(s.num_written() == 12);
  b.model.compute(s, b.cache);
  CHECK(b.model.error(s, b.cache) == 0);
}

TEST_CASE("a load ends where its sequence has to provide what is before what comes") {
  Bench b({memory()}, {.threads = false});
  const auto prompt = iota(0, 64);
  b.run(prompt);
  b.evict_all();
  b.tiers->flush();
  auto first = b.tree.insert(iota(0, 24)), second = b.tree.insert(prompt);
  REQUIRE(second.loadable().begin == 24);
  auto loading = b.tiers->load(second);
  first.leave();  // it has not computed what both have
  REQUIRE(second.loadable().begin == 0);
  loading.wait(second);
  CHECK(second.num_written() == 0);
  CHECK(b.tiers->stats().loaded_tokens == 0);
  b.model.compute(second, b.cache);
  CHECK(b.model.error(second, b.cache) == 0);
}

TEST_CASE("a load continues where its sequence got some K/V in another way") {
  for (const std::int32_t elsewhere : {12, 16, 20}) {
    CAPTURE(elsewhere);
    Bench b({memory()}, {.threads = false});
    const auto prompt = iota(0, 64);
    b.run(prompt);
    b.evict_all();
    b.tiers->flush();
    auto s = b.tree.insert(prompt);
    auto loading = b.tiers->load(s);
    b.model.each(s, {0, elsewhere}, b.cache, [](float& element, float x) { element = x; });
    s.mark_loaded({0, elsewhere});
    loading.wait(s);
    CHECK(s.num_written() == 63);
    CHECK(b.tiers->stats().loaded_tokens == static_cast<std::uint64_t>(63 - elsewhere));
    CHECK(b.model.error(s, b.cache) == 0);
  }
}

TEST_CASE("after clear() nothing is stored or found until it is said what weights there are") {
  Bench b({memory()});
  const auto prompt = iota(0, 64);
  b.run(prompt);
  b.evict_all();
  b.tiers->flush();
  b.tree.clear();
  CHECK(b.load(prompt) == 0);
  b.model.weights = 2;
  b.tree.clear();
  b.tiers->reopen("m2");
  CHECK(b.load(prompt) == 0);  // stored by another model
  b.evict_all();
  b.tiers->flush();
  CHECK(b.load(prompt) == 63);
  b.tree.clear();
  b.model.weights = 1;
  b.tiers->reopen("m1");
  CHECK(b.load(prompt) == 63);
}

TEST_CASE("a load that clear() interrupts is cancelled, whatever weights there are then") {
  Bench b({memory()}, {.threads = false});
  const auto prompt = iota(0, 64);
  b.run(prompt);
  b.evict_all();
  b.tiers->flush();
  auto s = b.tree.insert(prompt);
  auto loading = b.tiers->load(s);
  b.tree.clear();
  b.tiers->reopen("m2");
  loading.wait(s);
  CHECK(s.num_written() == 0);
}

TEST_CASE("after clear() nothing is stored, also where events before it got lost") {
  const auto store = memory();
  Bench b({store});
  {
    auto s = b.tree.insert(iota(0, 64));
    b.model.each(s, s.loadable(), b.cache, [](float& element, float x) { element = x; });
    test::heap.fail_in = 0;  // what this call reports cannot be noted
    s.mark_loaded(s.loadable());
    test::heap.fail_in = -1;
    REQUIRE(test::heap.failures > 0);
  }
  b.tree.clear();
  b.model.weights = 2;
  (void)b.tiers->advance();  // the rest is followed again
  b.run(iota(1000, 64));
  b.evict_all();
  b.tiers->flush();
  CHECK(store->num_bytes() == 0);
  b.tiers->reopen("m2");
  b.run(iota(2000, 64));
  b.evict_all();
  b.tiers->flush();
  CHECK(store->num_bytes() > 0);
}

TEST_CASE("what was not noted for want of memory is noted later, whatever came between") {
  Bench b({memory()});
  {
    auto s = b.tree.insert(iota(0, 64));
    b.model.each(s, s.loadable(), b.cache, [](float& element, float x) { element = x; });
    test::heap.fail_in = 0;
    s.mark_loaded(s.loadable());
    test::heap.fail_in = -1;
    REQUIRE(test::heap.failures > 0);
  }
  b.run(iota(1000, 64));
  CHECK(b.tiers->advance() == 0);
  b.evict_all();
  b.tiers->flush();
  CHECK(b.load(iota(0, 64)) == 63);
  CHECK(b.load(iota(1000, 64)) == 63);
}

TEST_CASE("what is cached is offloaded before it is evicted, if asked for") {
  auto store = memory();
  Bench b({store}, {.write_through = true});
  b.run(iota(0, 64));
  CHECK(b.tiers->advance(3) == 5);
  CHECK(b.tiers->advance(100) == 0);
  b.tiers->flush();
  CHECK(b.tiers->stats().tiers[0].stored == 8);
  b.evict_all();
  CHECK(b.tiers->stats().gathered == 8);  // it is known to be there
  CHECK(b.load(iota(0, 64)) == 63);
  CHECK(b.tiers->advance(100) == 0);
  CHECK(b.tiers->stats().gathered == 8);
  b.run(iota(100, 64));
  CHECK(b.tiers->advance(0) == 8);
  b.tree.clear();
  CHECK(b.tiers->advance(0) == 0);
}

TEST_CASE("all that is cached is offloaded at the end, also what was there before") {
  auto store = memory();
  const auto prompt = iota(0, 64);
  {
    Tree tree;
    KvCache<Cpu, float> cache(tree, geometry);
    Model<float> model;
    {
      auto s = tree.insert(prompt);
      model.compute(s, cache);
    }
    Tiers<Tree, KvCache<Cpu, float>> tiers(tree, cache, {store},
                                           {.model = "m1", .max_queued_bytes = 5000});
    tiers.store_all();
    tiers.flush();
    CHECK(tiers.stats().tiers[0].stored == 8);
  }
  Bench b({store});
  CHECK(b.load(prompt) == 63);
}

TEST_CASE("what is too much for the queue is not stored") {
  auto store = std::make_shared<FaultyTier>();
  Bench b({store}, {.max_queued_bytes = 3 * 2048, .threads = false});
  b.run(iota(0, 64));
  b.evict_all();
  CHECK(b.tiers->stats().gathered == 3);
  CHECK(b.tiers->stats().dropped == 5);
  b.tiers->flush();
  CHECK(store->size() == 3);

  // One block always has room, whatever the limit is.
  auto other = std::make_shared<FaultyTier>();
  Bench narrow({other}, {.max_queued_bytes = 1, .threads = false});
  narrow.run(iota(0, 64));
  narrow.evict_all();
  CHECK(narrow.tiers->stats().gathered == 1);
  CHECK(narrow.tiers->stats().dropped == 7);
  narrow.tiers->flush();
  CHECK(other->size() == 1);
}

TEST_CASE("memory is bounded, and keeps what was used last") {
  auto store = memory(20000);
  Bench b({store});
  for (int i = 0; i < 20; ++i) {
    b.run(iota(0, 8));
    b.run(iota(1000 * i + 1000, 16));
    b.evict_all();
    b.tiers->flush();
    CHECK(store->num_bytes() <= 20000);
    CHECK(b.load(iota(0, 8)) == 7);
    b.evict_all();
    b.tiers->flush();
  }
  CHECK(b.load(iota(1000, 16)) == 0);
  CHECK_FALSE(store->put({1, 2}, std::make_shared<std::vector<std::byte>>(20001), false));
  CHECK(store->put({1, 2}, std::make_shared<std::vector<std::byte>>(20000), false));
  CHECK(store->num_bytes() == 20000);
}

TEST_CASE("faster tiers get what was found in slower ones") {
  auto fast = memory(), slow = memory();
  const auto prompt = iota(0, 64);
  Bench b({fast, slow}, {.threads = false});
  b.run(prompt);
  b.evict_all();
  b.tiers->flush();
  CHECK(fast->num_bytes() == slow->num_bytes());
  const std::size_t all = fast->num_bytes();
  Bench c({memory(), slow}, {.threads = false});
  CHECK(c.load(prompt) == 63);
  c.tiers->flush();
  c.evict_all();
  auto stats = c.tiers->stats();
  CHECK(stats.tiers[0].stored == 8);
  CHECK(stats.tiers[0].stored_bytes == all);
  CHECK(stats.tiers[1].loaded == 8);
  CHECK(c.load(prompt) == 63);
  stats = c.tiers->stats();
  CHECK(stats.tiers[0].loaded == 8);
  CHECK(stats.tiers[1].loaded == 8);
}

namespace {

std::shared_ptr<detail::TierLoad> load_of_one_block() {
  auto load = std::make_shared<detail::TierLoad>();
  load->keys.resize(1);
  return load;
}

}  // namespace

TEST_CASE("a tier that was not asked yet is not passed over") {
  const auto first = std::make_shared<FaultyTier>(), second = std::make_shared<FaultyTier>();
  detail::TierQueue<int> queue({first, second}, {}, /*prefetch=*/1, /*max_bytes=*/1000,
                               /*hang_seconds=*/1, /*threads=*/false, {});
  const auto load = load_of_one_block();
  queue.start(load);
  queue.pass_over(load, 1.0);
  CHECK(queue.work());
  CHECK(first->gets == 1);
  CHECK(second->gets == 0);
}

TEST_CASE("cancelling a load that is over counts against no tier") {
  using Queue = detail::TierQueue<int>;
  const auto store = std::make_shared<FaultyTier>();
  Queue queue({store}, {}, /*prefetch=*/1, /*max_bytes=*/1000, /*hang_seconds=*/1,
              /*threads=*/false, {});
  const auto over = load_of_one_block(), running = load_of_one_block(), next = load_of_one_block();
  const auto stalled = load_of_one_block();  // it waits to be polled
  stalled->is_stalled = true;
  queue.start(over);
  CHECK(queue.work());
  CHECK(over->is_over);
  queue.start(running);
  bool asked = false;
  store->next = [&](std::uint64_t&) {
    if (!std::exchange(asked, true)) {
      for (const auto& load : {over, stalled}) queue.cancel(load, /*too_late=*/true);
      queue.start(next);
    }
    return TierFault::none;
  };
  CHECK(queue.work());
  CHECK_FALSE(next->is_over);
  CHECK(queue.work());
  CHECK(next->is_over);
  CHECK(queue.counts()[0].not_worth == 0);
  CHECK(store->gets == 3);
}

TEST_CASE("a record that a tier has no memory for leaves it as it was") {
  const auto record = [](std::size_t bytes) {
    return std::make_shared<const std::vector<std::byte>>(bytes);
  };
  const std::atomic<bool> cancelled{false};
  for (const std::uint64_t key : {1, 2})  // takes the place of record 1, whose key it has, or not
    for (int fail_in = 0, failures = 1; failures > 0; ++fail_in) {
      MemoryTier tier(100);
      CHECK(tier.put({0, 1}, record(60), cancelled));
      const TierStore::Record other = record(50);
      const auto before = test::heap.failures;
      test::heap.fail_in = fail_in;
      try {
        (void)tier.put({0, key}, other, cancelled);
      } catch (const std::bad_alloc&) {
      }
      test::heap.fail_in = -1;
      failures = static_cast<int>(test::heap.failures - before);
      CHECK(tier.num_bytes() == (failures > 0 ? 60 : 50));
      CHECK(tier.contains({0, 1}) == (failures > 0 || key == 1));
      CHECK(tier.contains({0, 2}) == (failures == 0 && key == 2));
      for (std::uint64_t next = 3; next < 9; ++next)
        CHECK(tier.put({0, next}, record(50), cancelled));
      CHECK(tier.num_bytes() == 100);
    }
}

TEST_CASE("a load ends with the block that there is no memory for") {
  // Whether the one allocation fails that comes `fail_in` ones after the first `before` blocks.
  const auto fails = [](int before, std::int64_t fail_in) {
    CAPTURE(before);
    CAPTURE(fail_in);
    const auto store = std::make_shared<FaultyTier>();
    Bench b({store}, {.max_prefetched = 100, .threads = false});
    const auto prompt = iota(0, 200);
    b.run(prompt);
    b.evict_all();
    b.tiers->flush();
    auto s = b.tree.insert(prompt);
    auto loading = b.tiers->load(s);
    for (int i = 0; i < before; ++i) CHECK(b.tiers->work());
    const std::uint64_t failures = test::heap.failures;
    test::heap.fail_in = fail_in;
    CHECK(b.tiers->work());
    test::heap.fail_in = -1;
    if (test::heap.failures == failures) return false;
    while (b.tiers->work()) {
    }
    CHECK(store->gets == before + 1);
    CHECK_FALSE(loading.poll(s));
    CHECK(s.num_written() >= static_cast<std::size_t>(before * chunk));
    CHECK(b.model.error(s, b.cache) == 0);
    return true;
  };
  for (int before = 0; before < 20; ++before) {  // the queue of what is ready has to grow
    std::int64_t fail_in = 0;
    while (fails(before, fail_in)) ++fail_in;
    CHECK(fail_in > 2);
  }
}

TEST_CASE("a load that there is no memory to wait in ends at once, others continue") {
  using Queue = detail::TierQueue<int>;
  Queue queue({memory()}, {}, /*prefetch=*/1, /*max_bytes=*/1000, /*hang_seconds=*/1,
              /*threads=*/false, {});
  std::vector<std::shared_ptr<detail::TierLoad>> loads(100);
  for (auto& load : loads) load = load_of_one_block();
  std::uint64_t ended = 0;
  for (std::size_t i = 0; i < loads.size(); ++i) {
    const std::uint64_t before = test::heap.failures;
    test::heap.fail_in = i % 50 == 0 ? -1 : 0;  // those that there was memory for leave room
    queue.start(loads[i]);
    test::heap.fail_in = -1;
    const bool failed = test::heap.failures != before;
    CHECK(loads[i]->is_over == failed);
    ended += failed ? 1u : 0u;
  }
  CHECK(ended > 0);
  CHECK(ended < loads.size());
  while (queue.work()) {
  }
  for (const auto& load : loads) CHECK(load->is_over);
  CHECK(queue.counts()[0].missed == loads.size() - ended);
}

TEST_CASE("whatever a tier gives, no token gets another's K/V") {
  for (int fault = 0; fault < static_cast<int>(TierFault::count); ++fault)
    for (const bool threads : {false, true}) {
      auto store = std::make_shared<FaultyTier>();
      Bench b({store}, {.max_wait_seconds = 0.05, .threads = threads});
      store->delay = std::chrono::milliseconds(10);
      std::atomic<bool> is_on = false;
      std::atomic<std::uint64_t> calls = test::run_seed();
      store->next = [&](std::uint64_t& where) {
        const std::uint64_t call = (calls += 0x9e3779b97f4a7c15u);
        where = call ^ (call >> 29);
        return is_on && where % 3 == 0 ? static_cast<TierFault>(fault) : TierFault::none;
      };
      const auto prompt = iota(0, 64), other = iota(300, 64);
      for (int round = 0; round < 6; ++round) {
        is_on = round > 0;
        b.run(round % 2 == 0 ? prompt : other);
        b.evict_all();
        b.tiers->flush();
        for (const auto& one : {prompt, other})
          for (const std::uint64_t tenant : {std::uint64_t{0}, std::uint64_t{1}}) {
            const std::size_t found = b.load(one, {.name_space = {.tenant = tenant}});
            CHECK((found == 63 || found % chunk == 0));
            b.evict_all();
            b.tiers->flush();
          }
      }
      check_invariants(b.tree);
    }
}

TEST_CASE("a record of as many tokens of another prompt is refused") {
  std::size_t there = 0;
  for (const std::uint64_t which : {0u, 1u}) {  // one of them is the right one
    auto store = std::make_shared<FaultyTier>();
    Bench b({store}, {.threads = false});
    for (const int first : {0, 300}) b.run(iota(first, chunk + 1));
    b.evict_all();
    b.tiers->flush();
    REQUIRE(store->size() == 2);
    store->next = [which](std::uint64_t& where) {
      where = which;
      return TierFault::other;
    };
    there += b.load(iota(0, chunk + 1));
  }
  CHECK(there == chunk);
}

TEST_CASE("a tier that is slower than computing is passed over, and asked no more") {
  auto store = std::make_shared<FaultyTier>();
  Bench b({store});
  const auto prompt = iota(0, 64);
  b.run(prompt);
  b.evict_all();
  b.tiers->flush();
  store->delay = std::chrono::seconds(20);
  store->next = [](std::uint64_t&) { return TierFault::slow; };
  b.tiers->computed(1000, 0.5);  // 32 ms for the prompt
  const auto start = std::chrono::steady_clock::now();
  CHECK(b.load(prompt) == 0);
  CHECK(b.tiers->stats().loads_late == 1);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  CHECK(took.count() < 10);
  while (store->cancelled_gets == 0) std::this_thread::yield();  // it sees that no load waits
  for (int i = 0; i < 20; ++i) {  // its thread has learnt how long that took
    b.evict_all();
    b.tiers->flush();
    CHECK(b.load(prompt) == 0);
  }
  CHECK(store->cancelled_gets.load() == store->gets.load());
  CHECK(store->gets.load() < 4);
  CHECK(b.tiers->stats().tiers[0].not_worth > 10);
}

TEST_CASE("a tier that is slow to say that it has nothing is asked no more, either") {
  auto store = std::make_shared<FaultyTier>();
  Bench b({store}, {.threads = false});
  store->delay = std::chrono::milliseconds(2);
  store->next = [](std::uint64_t&) { return TierFault::slow; };
  b.tiers->computed(8000, 0.1);  // a block: 0.1 ms
  for (int i = 0; i < 10; ++i) CHECK(b.load(iota(1000 * i, 64)) == 0);
  CHECK(store->gets == 1);
}

TEST_CASE("loading is chosen where it beats computing") {
  auto store = std::make_shared<FaultyTier>();
  Bench b({store}, {.threads = false});
  store->delay = std::chrono::milliseconds(2);
  store->next = [](std::uint64_t&) { return TierFault::slow; };
  const auto prompt = iota(0, 64);
  b.run(prompt);
  b.evict_all();
  b.tiers->flush();
  b.tiers->computed(8, 1.0);  // a block: 1 s
  CHECK(b.load(prompt) == 63);
  b.evict_all();
  b.tiers->computed(8000, 0.1);  // once is not believed
  CHECK(b.load(prompt) == 63);
  b.evict_all();
  for (int i = 0; i < 200; ++i) b.tiers->computed(8000, 0.1);  // a block: 0.1 ms
  const int gets = store->gets;
  CHECK(b.load(prompt) == 0);
  CHECK(store->gets == gets);
  for (int i = 0; i < 70 && store->gets == gets; ++i) {  // it is looked at again
    b.evict_all();
    (void)b.load(prompt);
  }
  CHECK(store->gets > gets);
}

TEST_CASE("the first time that computing took counts in full") {
  constexpr double seconds = 0.2;  // of computing a block; a tenth of it is less than loading takes
  for (bool is_seen = false; !is_seen;) {
    auto store = std::make_shared<FaultyTier>();
    Bench b({store}, {.threads = false});
    for (const int first : {0, 100}) b.run(iota(first, chunk + 1));
    b.evict_all();
    b.tiers->flush();
    store->delay = std::chrono::milliseconds(40);
    store->next = [](std::uint64_t&) { return TierFault::slow; };
    b.tiers->computed(chunk, seconds);
    const auto start = std::chrono::steady_clock::now();
    CHECK(b.load(iota(0, chunk + 1)) == chunk);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (took.count() >= seconds) continue;  // another program had the processor
    CHECK(b.load(iota(100, chunk + 1)) == chunk);
    is_seen = true;
  }
}

TEST_CASE("one load that is slower than computing is not believed") {
  constexpr double seconds = 0.08;  // of computing a block
  for (bool is_seen = false; !is_seen;) {
    auto store = std::make_shared<FaultyTier>();
    Bench b({store}, {.threads = false});
    for (int i = 0; i < 3; ++i) b.run(iota(100 * i, chunk + 1));
    b.evict_all();
    b.tiers->flush();
    b.tiers->computed(chunk, seconds);
    store->delay = std::chrono::milliseconds(100);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 2; ++i) {
      CHECK(b.load(iota(100 * i, chunk + 1)) == chunk);
      store->next = [](std::uint64_t&) { return TierFault::slow; };
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (took.count() >= 3 * seconds) continue;  // another program had the processor
    CHECK(b.load(iota(200, chunk + 1)) == chunk);
    is_seen = true;
  }
}

TEST_CASE("arguments") {
  Tree tree, other;
  KvCache<Cpu, float> cache(tree, geometry);
  KvCache<Cpu, std::int8_t> bytes(tree, geometry);
  using TreeTiers = Tiers<Tree, KvCache<Cpu, float>>;
  using OfBytes = Tiers<Tree, KvCache<Cpu, std::int8_t>>;
  CHECK(refused([&] { TreeTiers(tree, cache, {}, {}); }) ==
        "stores.size() = 0: expected at least one tier");
  CHECK(refused([&] { TreeTiers(tree, cache, {nullptr}, {}); }) == "stores = null: expected tiers");
  CHECK(refused([&] { TreeTiers(other, cache, {memory()}, {}); }) ==
        "cache = of another tree: expected the K/V memory of the tree");
  CHECK(refused([&] { TreeTiers(tree, cache, {memory()}, {.block_tokens = -1}); }) ==
        "options.block_tokens = -1: expected at least 1, or none for the tree's chunk size");
  CHECK(refused([&] { TreeTiers(tree, cache, {memory()}, {.max_prefetched = 0}); }) ==
        "options.max_prefetched = 0: expected at least 1");
  for (const double seconds : {0.0, -1.0, std::nan("")})
    CHECK(refused([&] {
            TreeTiers(tree, cache, {memory()}, {.max_wait_seconds = seconds});
          }).find("options.max_wait_seconds = ") == 0);
  CHECK(refused([&] { TreeTiers(tree, cache, {memory()}, {.stored_as = ElementType::half}); }) ==
        "options.stored_as = 1: expected int8 or float8_e4m3 for K/V of float, half or bfloat16; "
        "else nothing");
  CHECK(refused([&] { OfBytes(tree, bytes, {memory()}, {.stored_as = ElementType::int8}); }) ==
        "options.stored_as = 3: expected int8 or float8_e4m3 for K/V of float, half or bfloat16; "
        "else nothing");
  CHECK(refused([&] { FileTier("/dev/null/no", 10); }) ==
        "path = /dev/null/no: expected a directory that can be written, or can be made");
  CHECK(refused([&] { FileTier("/tmp", 0); }) == "max_bytes = 0: expected at least 1");
  // The tree is as before: nothing observes it.
  CHECK(detail::TreeAccess::core(tree).topology.observers.empty());
}
