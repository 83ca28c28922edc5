// Events of what prompts can find: published when K/V is written, not when it is planned; and a
// mirror that is rebuilt from them. The engine simulation holds such a mirror against the tree at
// random.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/events/mirror.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;
using test::refused;

namespace {

using Tree = PrefixTree<int, 4>;
using Kind = CacheEvent::Kind;
using Applied = CacheMirror<Tree>::Applied;

struct Published {
  CacheEvent event;
  std::vector<int> tokens;
};

/// Takes what is published of the tree.
struct Listener {
  std::vector<Published> published;
  std::optional<std::uint64_t> last{};  // number of an event
  std::optional<CacheEvents<Tree>> events;
  void listen(Tree& tree) {
    last.reset();
    events.emplace(tree, [this](const CacheEvent& event, std::span<const int> tokens) {
      if (last) CHECK(event.number == *last + 1);
      last = event.number;
      published.push_back({event, {tokens.begin(), tokens.end()}});
    });
  }
  [[nodiscard]] auto snapshot() const { return events->snapshot(); }
  [[nodiscard]] std::vector<Published> take() { return std::exchange(published, {}); }
};

void pass(Tree& tree, const std::vector<int>& prompt, const InsertOptions& options = {}) {
  auto s = tree.insert(prompt, options);
  test::load(s);
}

std::vector<int> joined(std::vector<int> a, const std::vector<int>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

TEST_CASE("a prompt is published when its K/V is written, with its tokens, chunk by chunk") {
  Tree tree({.max_chunks = 1000});
  Listener listener;
  listener.listen(tree);
  AttentionPlan plan;
  std::vector<Tree::Sequence> batch;
  batch.push_back(tree.insert(iota(10, 7), {.name_space = {.tenant = 3}}));
  CHECK(listener.published.empty());  // planned
  {
    auto done = test::run_step(tree, plan, batch, 5);
  }
  const auto first = listener.take();
  REQUIRE(first.size() == 2);
  CHECK(first[0].event.kind == Kind::stored);
  CHECK(first[0].event.number == 1);
  CHECK(first[0].event.parent == 0);
  CHECK(first[0].event.name_space == Namespace{.tenant = 3});
  CHECK(first[0].event.position == 0);
  CHECK(first[0].tokens == iota(10, 4));
  CHECK(first[1].event.number == 2);
  CHECK(first[1].event.span == first[0].event.span);
  CHECK(first[1].event.parent == first[0].event.span);
  CHECK(first[1].event.position == 4);
  CHECK(first[1].tokens == iota(14, 1));
  CHECK(first[1].event.first_chunk != first[0].event.first_chunk);
  CHECK(first[1].event.first_offset == 0);
  {
    auto done = test::run_step(tree, plan, batch, 5);
  }
  const auto rest = listener.take();
  REQUIRE(rest.size() == 1);
  CHECK(rest[0].event.parent == first[0].event.span);
  CHECK(rest[0].event.position == 5);
  CHECK(rest[0].event.first_chunk == first[1].event.first_chunk);
  CHECK(rest[0].event.first_offset == 1);
  CHECK(rest[0].tokens == iota(15, 2));
}

TEST_CASE("generated tokens are published when their sequence leaves") {
  Tree tree({.max_chunks = 1000});
  Listener listener;
  listener.listen(tree);
  AttentionPlan plan;
  std::vector<Tree::Sequence> batch;
  batch.push_back(tree.insert(iota(10, 4)));
  test::decode(tree, plan, batch, [](ScheduledSequence) { return 50; });
  test::decode(tree, plan, batch, [](ScheduledSequence) { return 51; });
  REQUIRE(listener.take().size() == 1);
  batch.clear();
  const auto published = listener.take();
  REQUIRE(published.size() == 1);  // the last one was sampled, and not computed
  CHECK(published[0].tokens == std::vector<int>{50});
  CHECK(published[0].event.position == 4);
}

TEST_CASE("a fork that has left is published when the step that copies its rows has finished") {
  Tree tree({}, {.min_run = 4});  // shorter tails are copied
  Listener listener;
  listener.listen(tree);
  AttentionPlan plan;
  std::vector<Tree::Sequence> batch;
  batch.push_back(tree.insert(iota(10, 4)));
  for (int i = 0; i < 3; ++i)
    test::decode(tree, plan, batch, [i](ScheduledSequence) { return 50 + i; });
  auto fork = batch.front().fork();
  auto step = tree.begin_step();
  REQUIRE(step.add(batch.front()));
  REQUIRE(plan.build(step).num_copies > 0);
  auto flying = std::move(step).submit();
  (void)listener.take();
  fork.leave();
  CHECK(listener.take().empty());
  {
    auto done = std::move(flying).finish();
  }
  const auto published = listener.take();
  REQUIRE(published.size() == 1);
  CHECK(published[0].event.position == 4);
  CHECK(published[0].tokens == std::vector<int>{50, 51});
  check_invariants(tree);
}

TEST_CASE("a prompt that parts from another continues its span at that position") {
  Tree tree({.max_chunks = 1000});
  Listener listener;
  listener.listen(tree);
  pass(tree, iota(10, 6));
  const std::uint64_t first = listener.take()[0].event.span;
  pass(tree, joined(iota(10, 3), {7, 8}));
  const auto published = listener.take();
  REQUIRE(!published.empty());
  CHECK(published[0].event.parent == first);
  CHECK(published[0].event.span != first);
  CHECK(published[0].event.position == 3);
  CacheMirror<Tree> mirror;
  mirror.load(listener.snapshot());
  CHECK(mirror.match_prefix(joined(iota(10, 3), {7, 8, 9})) == 5);
  CHECK(mirror.match_prefix(iota(10, 9)) == 6);
  CHECK(mirror.match_prefix(iota(10, 9), {.max_reuse = 4}) == 4);
  CHECK(mirror.match_prefix(iota(10, 9), {.name_space = {.tenant = 1}}) == 0);
  CHECK(mirror.num_tokens() == 8);
}

TEST_CASE("a prompt that is written in part is left before and after that") {
  for (const std::size_t written : {std::size_t{2}, std::size_t{6}}) {
    CAPTURE(written);
    Tree tree({.max_chunks = 1000});
    Listener listener;
    listener.listen(tree);
    auto s = tree.insert(iota(10, 8));
    s.mark_loaded({0, static_cast<std::int32_t>(written)});
    auto t = tree.insert(joined(iota(10, 4), {7, 8}));
    check_invariants(tree);
    CacheMirror<Tree> mirror;
    mirror.load(listener.snapshot());
    CHECK(mirror.match_prefix(iota(10, 8)) == written);
    test::load(s);
    test::load(t);
    check_invariants(tree);
    mirror.load(listener.snapshot());
    CHECK(mirror.match_prefix(iota(10, 8)) == 8);
    CHECK(mirror.match_prefix(joined(iota(10, 4), {7, 8})) == 6);
  }
}

TEST_CASE("eviction goes from the ends; clear() is one event") {
  Tree tree(PoolAllocator{.max_chunks = 4});
  Listener listener;
  listener.listen(tree);
  pass(tree, iota(10, 16));
  (void)listener.take();
  pass(tree, iota(50, 8));
  auto published = listener.take();
  REQUIRE(published.size() == 4);  // two chunks go, two come
  CHECK(published[0].event.kind == Kind::evicted);
  CHECK(published[0].event.position == 12);
  CHECK(published[0].event.length == 4);
  CHECK(published[0].tokens.empty());
  CHECK(published[1].event.position == 8);
  CHECK(published[2].event.kind == Kind::stored);
  const auto live = tree.insert(iota(50, 8));
  tree.clear();
  published = listener.take();
  REQUIRE(published.size() == 1);
  CHECK(published[0].event.kind == Kind::cleared);
  CHECK(listener.snapshot().spans.empty());
  CHECK(listener.snapshot().number == published[0].event.number);
}

TEST_CASE("whole chunks are published as such") {
  Tree tree(PoolAllocator{}, {.sharing = TreeOptions::Sharing::chunk});
  Listener listener;
  listener.listen(tree);
  AttentionPlan plan;
  std::vector<Tree::Sequence> batch;
  batch.push_back(tree.insert(iota(10, 11)));
  {
    auto done = test::run_step(tree, plan, batch, 6);
  }
  CHECK(listener.take().size() == 1);
  {
    auto done = test::run_step(tree, plan, batch, 6);
  }
  CHECK(listener.take().size() == 1);
  CacheMirror<Tree> mirror(TreeOptions::Sharing::chunk);
  mirror.load(listener.snapshot());
  CHECK(mirror.match_prefix(iota(10, 11)) == 8);
  CHECK(mirror.match_prefix(iota(10, 7)) == 4);
}

TEST_CASE("a late subscriber begins with a snapshot, and one that missed a part finds a gap") {
  Tree tree({.max_chunks = 1000});
  pass(tree, iota(10, 6));
  Listener listener;
  listener.listen(tree);
  CHECK(listener.published.empty());
  CacheMirror<Tree> late, blind;
  late.load(listener.snapshot());
  CHECK(late.match_prefix(iota(10, 6)) == 6);
  pass(tree, iota(30, 2));
  const auto published = listener.take();
  REQUIRE(published.size() == 1);
  CHECK(blind.apply(published[0].event, published[0].tokens) == Applied::missed);
  CHECK(blind.num_tokens() == 0);
  CHECK(late.apply(published[0].event, published[0].tokens) == Applied::changed);
  CHECK(late.apply(published[0].event, published[0].tokens) == Applied::repeated);
  CHECK(late.num_tokens() == 8);
  CHECK(late.number() == listener.events->last_event());
  listener.events.reset();
  CHECK(detail::TreeAccess::core(tree).topology.observers.empty());
  pass(tree, iota(40, 2));
  CHECK(listener.published.empty());
  listener.listen(tree);
  CHECK(listener.events->stream() != late.stream());
  pass(tree, iota(60, 2));
  CHECK(late.apply(listener.published[0].event, listener.published[0].tokens) == Applied::missed);
  late.load(listener.snapshot());
  CHECK(late.num_tokens() == 12);
  check_invariants(tree);
}

TEST_CASE("a subscriber of a tree where nothing can be found yet has missed nothing") {
  Tree tree({.max_chunks = 1000});
  auto s = tree.insert(iota(0, 8));
  Listener listener;
  listener.listen(tree);
  CHECK(listener.snapshot().spans.empty());
  test::load(s);
  REQUIRE(!listener.published.empty());
  CHECK(listener.published[0].event.number == 1);
}

TEST_CASE("a mirror refuses what cannot follow, and stays as it was") {
  Tree tree({.max_chunks = 1000});
  Listener listener;
  listener.listen(tree);
  pass(tree, iota(10, 6));
  CacheMirror<Tree> mirror;
  for (const Published& published : listener.published)
    CHECK(mirror.apply(published.event, published.tokens) == Applied::changed);
  const CacheEvent good = listener.published.back().event;  // tokens 4 and 5
  const std::vector<int> two{1, 2};
  const auto says = [&](const auto& change, std::span<const int> tokens) {
    CacheEvent event = good;
    event.number = mirror.number() + 1;
    event.position = 6;
    change(event);
    const std::string text = refused([&] { (void)mirror.apply(event, tokens); });
    CHECK(mirror.number() == 2);
    CHECK(mirror.num_tokens() == 6);
    CHECK(mirror.match_prefix(iota(10, 6)) == 6);
    return text;
  };
  CHECK(says([](CacheEvent& e) { e.length = 3; }, two) ==
        "tokens.size() = 2: expected event.length = 3, at least 1");
  CHECK(says([](CacheEvent& e) { e.parent = 0; }, two) ==
        "event.position = 6: expected 0: no span stands before it");
  CHECK(says([](CacheEvent& e) { e.parent = 77; }, two) ==
        "event.parent = 77: expected a span that has the token before event.position");
  CHECK(says([](CacheEvent& e) { e.position = 7; }, two) ==
        "event.parent = 1: expected a span that has the token before event.position");
  CHECK(says([](CacheEvent& e) { e.position = 5; }, two) ==
        "event.position = 5: expected 6, the end of its span");
  CHECK(says([](CacheEvent& e) { e.parent = 0, e.position = 0; }, two) ==
        "event.span = 1: expected a new span, or event.parent, which it extends");
  const auto evicted = [](CacheEvent& e) { e.kind = Kind::evicted; };
  CHECK(says([&](CacheEvent& e) { evicted(e), e.span = 5; }, {}) ==
        "event.span = 5: expected a span that is stored");
  CHECK(says(evicted, {}) ==
        "event.position = 6: expected the last event.length = 2 tokens of a span that ends at 6");
  CHECK(says([](CacheEvent& e) { e.kind = static_cast<Kind>(9); }, {}) ==
        "event.kind = 9: expected stored, evicted, cleared, kept or lost");

  CacheSnapshot<Tree::token_type> damaged = listener.snapshot();
  damaged.tokens.pop_back();
  CHECK(refused([&] { mirror.load(damaged); }) ==
        "snapshot.tokens.size() = 5: expected as many as its spans have");
  damaged = listener.snapshot();
  damaged.unit = 0;
  CHECK(refused([&] { mirror.load(damaged); }) ==
        "snapshot.unit = 0: expected 1, or the chunk size, 4");
  CHECK(mirror.num_tokens() == 6);
  CacheMirror<Tree> whole(TreeOptions::Sharing::chunk);
  CHECK(refused([&] { (void)whole.apply(listener.published[1].event, two); }) ==
        "no error");  // missed
  CHECK(refused([&] {
          CacheEvent event = listener.published[1].event;
          event.number = 1;
          (void)whole.apply(event, two);
        }) == "event.length = 2: expected whole units of 4 tokens");
}

TEST_CASE("several streams of a tree know nothing of each other") {
  Tree tree(PoolAllocator{.max_chunks = 4});
  Listener first, second;
  first.listen(tree);
  pass(tree, iota(10, 6));
  second.listen(tree);
  CHECK(first.published.size() == 2);
  CHECK(second.published.empty());
  pass(tree, iota(30, 2));
  REQUIRE(second.published.size() == 1);
  CHECK(first.published.back().event.number == 3);
  CHECK(second.published[0].event.number == 2);  // the first is what was there: a gap
  CHECK(first.published.back().event.stream != second.published[0].event.stream);
  // Two streams number alike what is not the same: a mirror that follows one takes no other's.
  CacheMirror<Tree> mirror;
  mirror.load(second.snapshot());
  CHECK(mirror.stream() == second.events->stream());
  CHECK(mirror.apply(first.published.back().event, first.published.back().tokens) ==
        Applied::missed);
  CHECK(mirror.apply(second.published[0].event, second.published[0].tokens) == Applied::repeated);
  pass(tree, iota(50, 16));  // nodes are split, evicted and used again for both
  tree.clear();
  CHECK(first.snapshot().spans.empty());
  CHECK(second.snapshot().spans.empty());
  check_invariants(tree);
}

TEST_CASE("events are moved onto others, which end") {
  Tree tree({.max_chunks = 100});
  std::size_t first = 0, second = 0;
  CacheEvents<Tree> events(tree, [&](const CacheEvent&, std::span<const int>) { ++first; });
  CacheEvents<Tree> others(tree, [&](const CacheEvent&, std::span<const int>) { ++second; });
  events = std::move(others);
  auto& self = events;
  events = std::move(self);
  pass(tree, iota(10, 4));
  CHECK(first == 0);
  CHECK(second == 1);
  CHECK(events.last_event() == 1);
}

TEST_CASE("events end with the tree, or before it") {
  Listener listener, moved;
  {
    Tree tree({.max_chunks = 100});
    listener.listen(tree);
    Tree other = std::move(tree);  // they follow it
    pass(other, iota(10, 6));
    CHECK(listener.published.size() == 2);
    CacheEvents<Tree> kept = *std::exchange(listener.events, std::nullopt);
    pass(other, iota(30, 2));
    CHECK(listener.published.size() == 3);
    CHECK(kept.last_event() == 3);
    listener.events = std::move(kept);
    CHECK(refused([&] { (void)kept.last_event(); }) ==
          "events = moved-from: expected some that were not moved from");
    CHECK(refused([&] { CacheEvents<Tree>(other, nullptr); }) ==
          "sink = empty: expected what is to get the events");
    CHECK(refused([&] {
            CacheEvents<Tree>(other, [](const CacheEvent&, std::span<const int>) {}, 0);
          }) == "stream = 0: expected a number other than 0");
  }
  CHECK(listener.events->last_event() == 3);
  CHECK(refused([&] { (void)listener.snapshot(); }) ==
        "events = orphaned: expected events of a tree that still exists");
}
