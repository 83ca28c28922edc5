// Events of what windows and states are kept: by them a mirror knows where prompts can be resumed.
// tests/support/window_engine.hpp does the same at random.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/checkpoints.hpp"
#include "chunkattn/cache/windowed_groups.hpp"
#include "chunkattn/cache/windowed_kv.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/events/mirror.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "tests/support/counted_new.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;
using test::refused;

namespace {

using Tree = PrefixTree<int, 8>;
using Events = CacheEvents<Tree>;
using Kind = CacheEvent::Kind;

struct Heard {
  CacheEvent event;
  std::vector<int> tokens;
};

/// A model with groups of layers with windows, and what its events said.
struct Model {
  Tree tree{{.max_chunks = 400}};
  WindowedGroups<Tree> groups;
  AttentionPlan plan;
  std::vector<Heard> heard;
  std::map<std::pair<std::uint64_t, int>, std::pair<ChunkIndex, int>> places;

  explicit Model(const std::vector<int>& windows, std::size_t max_cached = 100)
      : groups(tree, options(windows, max_cached)) {}

  static std::vector<WindowedGroups<Tree>::Options> options(const std::vector<int>& windows,
                                                            std::size_t max_cached) {
    std::vector<WindowedGroups<Tree>::Options> all;
    for (const int window : windows)
      all.push_back({.window = window, .max_chunks = 100, .max_cached_chunks = max_cached});
    return all;
  }
  Events::Sink listen() {
    return [this](const CacheEvent& event, std::span<const int> tokens) {
      heard.push_back({event, {tokens.begin(), tokens.end()}});
    };
  }
  Tree::Finished step(Tree::Sequence& sequence, std::size_t rows) {
    auto step = tree.begin_step();
    REQUIRE(step.add(sequence, rows));
    const auto view = plan.build(step);
    for (std::size_t i = 0; i < groups.size(); ++i) (void)groups[i].view(view);
    return std::move(step).finish();
  }
  /// Computes a prompt, so many rows at a time, up to its first output.
  Tree::Sequence answer(const std::vector<int>& prompt, std::size_t rows = 64) {
    auto sequence = tree.insert(prompt);
    if (!groups.is_ready(sequence)) groups.resume(sequence);
    while (sequence.size() == prompt.size()) {
      auto finished = step(sequence, rows);
      for (const auto& row : finished.rows()) finished.commit(row, 9000);
    }
    return sequence;
  }
  [[nodiscard]] std::size_t count(Kind kind) const {
    return static_cast<std::size_t>(std::count_if(
        heard.begin(), heard.end(), [&](const Heard& one) { return one.event.kind == kind; }));
  }
  void tell(CacheMirror<Tree>& mirror) {
    for (const Heard& one : heard) {
      REQUIRE(mirror.apply(one.event, one.tokens) == CacheMirror<Tree>::Applied::changed);
      check_place(one.event);
    }
    heard.clear();
  }
  /// What is kept lies where it was stored.
  void check_place(const CacheEvent& event) {
    for (int i = 0; i < event.length; ++i) {
      const std::pair token(event.span, event.position + i);
      const std::pair place(event.first_chunk, event.first_offset + i);
      if (event.kind == Kind::stored) places[token] = place;
      if (event.kind == Kind::kept || event.kind == Kind::lost) REQUIRE(places.at(token) == place);
    }
  }
};

std::vector<int> joined(std::vector<int> a, const std::vector<int>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

TEST_CASE("a router knows where windows let a prompt be resumed") {
  Model model({6, 20});
  const Events events(model.tree, model.listen(), Events::new_stream(), model.groups);
  CacheMirror<Tree> mirror;
  mirror.load(events.snapshot());
  CHECK(events.snapshot().reach == std::vector<std::int32_t>{5, 19});
  const auto system = iota(0, 200);
  const auto ann = joined(system, iota(1000, 30)), bob = joined(system, iota(2000, 30));
  (void)model.answer(ann);
  model.tell(mirror);
  CHECK(mirror.match_prefix(ann) == 230);
  CHECK(mirror.find(ann) == 230);
  CHECK(mirror.match_prefix(bob) == 200);  // K/V is there, the window before it is not
  CHECK(mirror.find(bob) == 0);
  (void)model.answer(bob);
  model.tell(mirror);
  CHECK(mirror.find(joined(system, {7})) == 200);
  CHECK(mirror.find(joined(system, {7}), {.max_reuse = 150}) == 0);
  CHECK(mirror.find(joined(system, {7}), {.name_space = {.tenant = 1}}) == 0);
  CHECK(mirror.find({}) == 0);
  model.tree.clear();
  REQUIRE(model.heard.size() == 1);  // nothing is said of what goes with all the rest
  model.tell(mirror);
  CHECK(mirror.find(ann) == 0);
  (void)model.answer(ann);
  model.tell(mirror);
  CHECK(mirror.find(ann) == 230);
}

TEST_CASE("rows that fall behind while a prompt is computed are no event") {
  Model model({20});
  const Events events(model.tree, model.listen(), Events::new_stream(), model.groups);
  const auto prompt = iota(0, 512);
  const auto sequence = model.answer(prompt, 128);
  std::size_t kept = 0;
  for (const Heard& one : model.heard)
    if (one.event.kind == Kind::kept) kept += static_cast<std::size_t>(one.event.length);
  CHECK(model.count(Kind::stored) == 64);
  CHECK(kept <= 4 * 32);  // of each step the chunks that its last window touches
  CHECK(model.count(Kind::lost) <= 3 * 4);
}

TEST_CASE("what a group forgets of cached tokens, and what is loaded, is said at once") {
  Model model({5});
  const Events events(model.tree, model.listen(), Events::new_stream(), model.groups);
  CacheMirror<Tree> mirror, late;
  mirror.load(events.snapshot());
  const auto prompt = iota(0, 8);
  const auto check = [&](const std::vector<std::size_t>& ends) {
    model.tell(mirror);
    late.load(events.snapshot());
    for (std::size_t end = 1; end <= 8; ++end) {
      const auto first = std::span(prompt).first(end);
      CHECK(model.groups.find(first) == ends[end - 1]);
      CHECK(mirror.find(first) == ends[end - 1]);
      CHECK(late.find(first) == ends[end - 1]);
    }
  };
  auto sequence = model.answer(prompt);
  check({1, 2, 3, 4, 5, 6, 7, 8});
  sequence.mark_loaded({1, 1});  // K/V of full layers alone
  check({1, 1, 1, 1, 1, 6, 7, 8});
  sequence.mark_loaded({4, 1});
  check({1, 1, 1, 1, 1, 1, 1, 1});

  KvCache<Cpu, float> full(model.tree, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 8});
  KvCache<Cpu, float> near(model.groups[0], {.num_layers = 1, .num_kv_heads = 1, .head_dim = 8});
  WindowedKv travels(model.groups[0], near);
  const auto other = iota(100, 13);
  std::optional<Tree::Sequence> away(model.answer(other));
  const auto swapped = swap_out(*away, full, {&travels});
  away.reset();
  {
    auto again = model.tree.insert(other);
    again.mark_loaded({0, 13});
  }
  model.tell(mirror);
  CHECK(mirror.find(other) == 0);
  away = resume(model.tree, full, swapped, {&travels});
  REQUIRE(away);
  model.tell(mirror);
  CHECK(model.groups.find(other) == 13);
  CHECK(mirror.find(other) == 13);
}

TEST_CASE("who does not follow components hears of tokens alone") {
  Model model({20});
  const Events events(model.tree, model.listen());
  (void)model.answer(iota(0, 100), 30);
  model.tree.clear();
  CHECK(model.count(Kind::kept) + model.count(Kind::lost) == 0);
  CHECK(events.snapshot().reach.empty());
  CHECK(events.snapshot().kept.empty());
}

TEST_CASE("windows and states together are what a prompt is resumed by") {
  Model model({4});
  Checkpoints<Tree> states(model.tree, {.max_count = 2});
  const Events events(model.tree, model.listen(), Events::new_stream(), model.groups, states);
  CHECK(events.snapshot().reach == std::vector<std::int32_t>{3, 1});
  CacheMirror<Tree> mirror;
  mirror.load(events.snapshot());
  const auto prompt = iota(0, 40);
  auto sequence = model.answer(prompt);
  model.tell(mirror);
  CHECK(mirror.find(prompt) == 0);
  (void)states.save(sequence, 38, std::make_shared<int>());
  (void)states.save(sequence, 37, std::make_shared<int>());
  model.tell(mirror);
  CHECK(mirror.find(prompt) == 38);
  CHECK(mirror.find(iota(0, 37)) == 37);
  (void)states.save(sequence, 40, std::make_shared<int>());  // one too many
  model.tell(mirror);
  CHECK(mirror.find(iota(0, 39)) == 37);
  CHECK(mirror.find(prompt) == 40);
}

TEST_CASE("a component may end, and then nothing can be resumed by it") {
  std::optional<Events> events;
  Tree tree;
  CacheMirror<Tree> mirror;
  const auto sink = [&](const CacheEvent& event, std::span<const int> tokens) {
    REQUIRE(mirror.apply(event, tokens) == CacheMirror<Tree>::Applied::changed);
  };
  std::weak_ptr<const int> state;
  {
    WindowedLayers<Tree> near(tree, {.window = 4, .max_chunks = 20});
    Checkpoints<Tree> states(tree, {.max_count = 20});
    events.emplace(tree, sink, 1, near, states);
    mirror.load(events->snapshot());
    auto sequence = tree.insert(iota(0, 40));
    near.resume(sequence);
    AttentionPlan plan;
    auto step = tree.begin_step();
    REQUIRE(step.add(sequence, 40));
    (void)near.view(plan.build(step));
    (void)std::move(step).finish();
    const auto its = std::make_shared<const int>(1);
    state = its;
    CHECK(states.save(sequence, 40, its));
    CHECK(mirror.find(iota(0, 40)) == 40);
  }
  CHECK(state.expired());
  CHECK(mirror.match_prefix(iota(0, 40)) == 40);
  CHECK(mirror.find(iota(0, 40)) == 0);
  CHECK(events->snapshot().kept.empty());
  for (int i = 0; i < 100; ++i) {  // more nodes than there were
    auto sequence = tree.insert({1000 + i, i});
    test::load(sequence);
  }
  check_invariants(tree);
  CHECK(mirror.find({{1000, 0}}) == 0);
}

TEST_CASE("states end with their checkpoints, whoever follows them beyond their tree") {
  std::optional<Tree> tree(std::in_place);
  std::optional<Checkpoints<Tree>> states(std::in_place, *tree,
                                          Checkpoints<Tree>::Options{.max_count = 2});
  std::optional<WindowedLayers<Tree>> near(std::in_place, *tree,
                                           WindowedLayers<Tree>::Options{4, 20});
  const Events events(*tree, [](const CacheEvent&, std::span<const int>) {}, 1, *states, *near);
  std::weak_ptr<const int> state;
  {
    auto sequence = tree->insert(iota(0, 9));
    test::load(sequence);
    const auto its = std::make_shared<const int>(1);
    state = its;
    CHECK(states->save(sequence, 9, its));
  }
  tree.reset();
  CHECK_FALSE(state.expired());
  states.reset();
  near.reset();
  CHECK(state.expired());
}

TEST_CASE("components of another tree are refused") {
  Tree tree, other;
  const WindowedLayers<Tree> near(other, {.window = 4, .max_chunks = 20});
  const Checkpoints<Tree> states(other, {.max_count = 2});
  const WindowedGroups<Tree> groups(other, {{.window = 4, .max_chunks = 20}});
  const WindowedGroups<Tree> none(other, std::initializer_list<WindowedLayers<Tree>::Options>{});
  const auto follow = [&](const auto& component) {
    return refused([&] {
      const Events events(tree, [](const CacheEvent&, std::span<const int>) {}, 1, component);
    });
  };
  for (const std::string& text : {follow(near), follow(states), follow(groups), follow(none)})
    CHECK(text == "component = of another tree: expected one of this tree");
}

TEST_CASE("what is kept of no token is refused, and changes nothing") {
  CacheMirror<Tree> mirror;
  const auto tell = [&](CacheEvent event, const std::vector<int>& tokens = {}) {
    event.number = mirror.number() + 1;
    const std::string text = refused([&] { (void)mirror.apply(event, tokens); });
    if (text != "no error") CHECK(mirror.number() == event.number - 1);
    return text;
  };
  const auto kept = [&](std::uint64_t span, int position, int length, int group) {
    return tell(
        {.kind = Kind::kept, .span = span, .position = position, .length = length, .group = group});
  };
  CHECK(refused([&] {
          mirror.load({.spans = {}, .tokens = {}, .kept = {}, .reach = {3, -1}});
        }).find("snapshot.reach = -1") == 0);
  CHECK(refused([&] {
          mirror.load({.spans = {}, .tokens = {}, .kept = {{.kind = Kind::lost}}, .reach = {3}});
        }).find("snapshot.kept = an event of another kind") == 0);
  mirror.load({.spans = {}, .tokens = {}, .kept = {}, .reach = {3, 1}});
  CHECK(tell({.kind = Kind::stored, .span = 1, .length = 8}, iota(0, 8)) == "no error");
  CHECK(tell({.kind = Kind::stored, .span = 2, .parent = 1, .position = 4, .length = 4},
             iota(50, 4)) == "no error");
  CHECK(kept(3, 0, 1, 0).find("event.span = 3: expected a span that is stored") == 0);
  CHECK(kept(1, 0, 1, 2).find("event.group = 2: expected one of the snapshot's 2") == 0);
  CHECK(kept(1, 0, 1, -1).find("event.group = -1") == 0);
  CHECK(kept(1, 0, 0, 0).find("event.position = 0: expected event.length = 0, at least 1") == 0);
  CHECK(kept(1, 7, 2, 0).find("event.position = 7") == 0);
  CHECK(kept(2, 3, 1, 0).find("event.position = 3") == 0);
  CHECK(kept(2, 3, 2147483647, 0).find("event.position = 3") == 0);
  CHECK(kept(2, 2147483647, 2147483647, 0).find("event.position = 2147483647") == 0);
  CHECK(mirror.find(iota(0, 8)) == 0);
  CHECK(kept(1, 0, 6, 0) == "no error");
  CHECK(kept(1, 4, 2, 1) == "no error");
  CHECK(mirror.find(iota(0, 8)) == 6);
  CHECK(mirror.find(joined(iota(0, 4), iota(50, 4))) == 0);
  CHECK(kept(2, 4, 3, 1) == "no error");
  CHECK(mirror.find(joined(iota(0, 4), iota(50, 4))) == 0);
  CHECK(kept(2, 4, 1, 0) == "no error");
  CHECK(mirror.find(joined(iota(0, 4), iota(50, 4))) == 5);
}

TEST_CASE("what is kept goes with its tokens, of the same span or all of it") {
  CacheMirror<Tree> mirror;
  mirror.load({.spans = {}, .tokens = {}, .kept = {}, .reach = {1}});
  const auto tell = [&](CacheEvent event, const std::vector<int>& tokens = {}) {
    event.number = mirror.number() + 1;
    REQUIRE(mirror.apply(event, tokens) == CacheMirror<Tree>::Applied::changed);
  };
  tell({.kind = Kind::stored, .span = 1, .length = 8}, iota(0, 8));
  tell({.kind = Kind::kept, .span = 1, .position = 2, .length = 6});
  tell({.kind = Kind::evicted, .span = 1, .position = 4, .length = 4});
  tell({.kind = Kind::stored, .span = 1, .parent = 1, .position = 4, .length = 4}, iota(4, 4));
  CHECK(mirror.find(iota(0, 8)) == 4);
  tell({.kind = Kind::lost, .span = 1, .position = 3, .length = 5});
  CHECK(mirror.find(iota(0, 8)) == 3);
  tell({.kind = Kind::evicted, .span = 1, .position = 0, .length = 8});
  tell({.kind = Kind::stored, .span = 1, .length = 8}, iota(0, 8));
  CHECK(mirror.find(iota(0, 8)) == 0);
}

TEST_CASE("windows of paths that a merge has moved are evicted by name") {
  // Two equal answers: the second one's tokens merge into the first one's, and what it goes on with
  // stays behind them in its chunk.
  Model model({4}, 8);
  const Events events(model.tree, model.listen(), Events::new_stream(), model.groups);
  CacheMirror<Tree> mirror;
  mirror.load(events.snapshot());
  const auto grow = [&](Tree::Sequence& sequence, const std::vector<int>& outputs) {
    (void)model.groups.resume(sequence);
    for (const int output : outputs) {
      auto finished = model.step(sequence, 64);
      for (const auto& row : finished.rows()) finished.commit(row, output);
    }
  };
  {
    auto first = model.tree.insert(iota(0, 10));
    grow(first, {50, 51, 52, 53});
    auto second = model.tree.insert(iota(0, 10));
    grow(second, {50, 51, 60, 61});
  }
  const auto check = [&] {
    model.tell(mirror);
    check_invariants(model.tree);
    std::size_t found = 0;
    for (const auto& prompt :
         {joined(iota(0, 10), {50, 51, 52}), joined(iota(0, 10), {50, 51, 60}), iota(0, 10),
          joined(iota(0, 10), {50, 51, 1}), joined(iota(0, 10), {1})}) {
      CHECK(mirror.find(prompt) == model.groups.find(prompt));
      found += mirror.find(prompt);
    }
    return found;
  };
  CHECK(model.tree.stats().merged_tokens == 2);
  CHECK(check() > 40);
  for (int i = 1; i <= 12; ++i) (void)model.answer(iota(1000 * i, 200), 200);
  CHECK(check() == 0);
  CHECK(model.tree.match_prefix(iota(0, 10)).cached == 10);
}

TEST_CASE("an event of what is kept that there is no memory for changes nothing") {
  int failures = 0;
  for (bool failed = true; failed; ++failures) {
    CacheMirror<Tree> mirror;
    mirror.load({.spans = {}, .tokens = {}, .kept = {}, .reach = {1}});
    REQUIRE(mirror.apply({.kind = Kind::stored, .number = 1, .span = 1, .length = 8}, iota(0, 8)) ==
            CacheMirror<Tree>::Applied::changed);
    const CacheEvent kept{.kind = Kind::kept, .number = 2, .span = 1, .position = 2, .length = 3};
    failed = false;
    test::heap.fail_in = failures;
    try {
      (void)mirror.apply(kept, {});
    } catch (const std::bad_alloc&) {
      failed = true;
    }
    test::heap.fail_in = -1;
    if (!failed) break;
    CHECK(mirror.number() == 1);
    CHECK(mirror.find(iota(0, 8)) == 0);
    CHECK(mirror.apply(kept, {}) == CacheMirror<Tree>::Applied::changed);
    CHECK(mirror.find(iota(0, 8)) == 5);
  }
  CHECK(failures >= 2);
}
