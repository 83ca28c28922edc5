// Layers with windows: what a step takes, steps without a view, copies of many forks, junctions.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/windowed_layers.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::refused;

namespace {

using Tree = PrefixTree<int, 16>;
using Layers = WindowedLayers<Tree>;

std::size_t to_size_of(int n) {
  return static_cast<std::size_t>(n);
}

/// A tree, a group, and steps that take the group's view.
struct Steps {
  Tree tree;
  Layers layers;
  AttentionPlan plan, second_plan;

  explicit Steps(int window, std::size_t max_chunks = 10000)
      : layers(tree, {.window = window, .max_chunks = max_chunks}) {}

  Tree::Sequence join(const std::vector<int>& prompt) {
    auto sequence = tree.insert(prompt);
    layers.resume(sequence);
    return sequence;
  }
  /// An open step with the next rows of a sequence, planned.
  Tree::Step step_of(Tree::Sequence& sequence, std::size_t rows, AttentionPlan& with,
                     std::span<const int> drafts = {}, bool takes_view = true) {
    auto step = tree.begin_step();
    REQUIRE(step.add(sequence, rows, {.tokens = drafts}));
    const auto view = with.build(step);
    if (takes_view) (void)layers.view(view);
    return step;
  }
  static void commit(Tree::Finished& finished, int output) {
    for (const auto& row : finished.rows()) return finished.commit(row, output);
  }
  void compute(Tree::Sequence& sequence, std::size_t rows, int output = 7) {
    auto finished = step_of(sequence, rows, plan).finish();
    commit(finished, output);
  }
  [[nodiscard]] const detail::WindowGroup& group() const {
    return detail::WindowAccess::group(layers);
  }
};

}  // namespace

TEST_CASE("a step without a view that is in flight is noticed when a later one is planned") {
  Steps model(40);
  auto one = model.join(test::iota(0, 20));
  {  // rejected drafts leave rows in the group beyond the next one
    const int drafts[] = {70, 71, 72};
    auto finished = model.step_of(one, 100, model.plan, drafts).finish();
    Steps::commit(finished, 80);
  }
  auto flight = model.step_of(one, 1, model.plan, {}, /*takes_view=*/false).submit();
  auto later = model.tree.begin_step();
  REQUIRE(later.add(one, 1));
  const auto view = model.second_plan.build(later);
  CHECK(refused([&] { (void)model.layers.view(view); }) ==
        "step in flight = 2: expected one of whose plan view() was called: finish it, then "
        "resume() what was in it");
  {
    auto dropped = std::move(later);
  }
  {
    auto finished = std::move(flight).finish();
    Steps::commit(finished, 81);
  }
  CHECK_FALSE(model.layers.is_ready(one));
  CHECK(model.layers.resume(one) == 20);
  model.compute(one, 10);
  CHECK(model.group().is_consistent());
}

TEST_CASE("a plan that was replaced has no view either; steps of others need none") {
  Steps model(40);
  auto one = model.join(test::iota(0, 20));
  auto two = model.join(test::iota(100, 20));
  auto step = model.step_of(one, 10, model.plan);
  AttentionPlan other_plan;
  AttentionPlan* replacing = nullptr;  // the same plan, or another that was built as often
  SUBCASE("by itself") {
    replacing = &model.plan;
  }
  SUBCASE("by another") {
    replacing = &other_plan;
  }
  (void)replacing->build(step);  // and no view()
  auto flight = std::move(step).submit();
  auto later = model.tree.begin_step();
  REQUIRE(later.add(two, 10));
  auto view = model.second_plan.build(later);
  CHECK(refused([&] { (void)model.layers.view(view); }).starts_with("step in flight = 1: "));
  {  // of a sequence that has left nothing is read
    auto gone = std::move(one);
  }
  (void)model.layers.view(view);
  auto second = std::move(later).submit();
  // Nor of one that the group never had.
  auto strange = model.tree.insert(test::iota(200, 20));
  AttentionPlan third_plan, fourth_plan;
  auto third = model.step_of(strange, 10, third_plan, {}, /*takes_view=*/false).submit();
  auto fourth = model.tree.begin_step();
  REQUIRE(fourth.add(two, 5));
  view = fourth_plan.build(fourth);
  (void)model.layers.view(view);
  {
    auto lost = std::move(third);
  }
  CHECK(model.group().is_consistent());
  {
    auto finished = std::move(flight).finish();  // what it was to write first is not planned
  }
  {
    auto finished = std::move(second).finish();
  }
  {
    auto dropped = std::move(fourth);
  }
  two.leave();
  CHECK(model.layers.stats().used_chunks == model.layers.stats().cached_chunks);
}

TEST_CASE("a step takes one chunk for rows that two sequences share") {
  Steps model(40, /*max_chunks=*/9);
  const auto prompt = test::iota(0, 96);
  {  // K/V of full layers alone: both compute the group's again
    auto loaded = model.tree.insert(prompt);
    loaded.mark_loaded({0, 96});
  }
  auto first = prompt, second = prompt;
  first.push_back(500);
  second.push_back(600);
  auto one = model.join(first), two = model.join(second);
  REQUIRE(one.num_scheduled() == 0);
  REQUIRE(two.num_scheduled() == 0);
  auto step = model.tree.begin_step();
  REQUIRE(step.add(one, 96));
  REQUIRE(step.add(two, 96));
  const auto view = model.plan.build(step);
  CHECK(model.layers.chunks_needed(step) == 6);
  (void)model.layers.view(view);
  CHECK(model.layers.stats().used_chunks == 6);
}

TEST_CASE("what a step lacks is said without counting a chunk twice") {
  Steps model(40, /*max_chunks=*/5);
  const auto prompt = test::iota(0, 96);
  {
    auto loaded = model.tree.insert(prompt);
    loaded.mark_loaded({0, 96});
  }
  auto first = prompt, second = prompt;
  first.push_back(500);
  second.push_back(600);
  auto one = model.join(first), two = model.join(second);
  auto step = model.tree.begin_step();
  REQUIRE(step.add(one, 96));
  REQUIRE(step.add(two, 96));
  const auto view = model.plan.build(step);
  std::size_t asked = 0;
  try {
    (void)model.layers.view(view);
  } catch (const OutOfChunks& error) {
    asked = error.asked();
  }
  CHECK(asked == 6);
  CHECK(model.layers.stats().used_chunks == 0);
}

TEST_CASE("the group's free sink is called with the group's chunks") {
  Steps model(20, /*max_chunks=*/7);
  KvCache<Cpu, float> cache(model.layers, {1, 1, 8});
  std::vector<ChunkIndex> freed;
  model.layers.set_free_sink([&](ChunkIndex c) {
    freed.push_back(c);
    cache.poison(c);
  });
  {
    auto one = model.join(test::iota(0, 100));
    for (int i = 0; i < 4; ++i) model.compute(one, 30);
    CHECK(freed.size() >= 2);  // of seven, those that the window has left
  }
  const std::size_t cached = model.layers.stats().used_chunks;
  CHECK(freed.size() + cached == 7);  // each was taken once
  freed.clear();
  model.tree.clear();
  CHECK(freed.size() == cached);
  CHECK(std::all_of(freed.begin(), freed.end(), [](ChunkIndex c) { return c >= 0 && c < 7; }));
  freed.clear();
  model.layers.set_free_sink({});
  const auto come_and_go = [&] {
    {
      auto one = model.join(test::iota(0, 50));
      model.compute(one, 50);
    }
    model.tree.clear();
  };
  come_and_go();
  model.layers.set_free_sink(std::function<void(ChunkIndex)>());
  come_and_go();
  CHECK(freed.empty());
}

TEST_CASE("copies of forks are found as if all were looked at") {
  test::Random random(50);
  Steps model(30, 400);
  std::vector<Tree::Sequence> live;
  std::size_t num_copies = 0;
  for (int i = test::scaled(400); i > 0; --i) {
    const int what = random.uniform(0, 9);
    if (live.empty() || (what == 0 && live.size() < 40)) {
      live.push_back(model.join(test::iota(random.uniform(0, 2), 33)));
      while (live.back().num_uncomputed() > 0 && live.back().size() == 33) {
        if (live.back().num_pending() > 0) break;
        model.compute(live.back(), 33, random.uniform(0, 2));
      }
    } else if (what < 6 && live.size() < 40) {
      auto& from = live[random.index(live.size())];
      live.push_back(from.fork());
      if (live.back().num_pending() == 0) model.layers.resume(live.back());
    } else if (what < 8) {
      auto& one = live[random.index(live.size())];
      if (one.num_pending() > 0) continue;
      if (!model.layers.is_ready(one)) model.layers.resume(one);
      auto step = model.step_of(one, 2, model.plan);
      if (random.chance(0.4)) continue;  // dropped
      auto finished = std::move(step).finish();
      Steps::commit(finished, random.uniform(0, 2));
    } else {
      std::swap(live.back(), live[random.index(live.size())]);
      live.pop_back();
    }
    const auto& core = detail::TreeAccess::core(model.tree);
    num_copies += core.pending_copies.size();
    const detail::WindowSearch fresh(core, model.group().chunks(), 29);
    for (const auto& one : live) {
      const auto& record = core.sequences[detail::TreeAccess::index(one)];
      CHECK(model.group().search().nearest(record.tail, record.cursor) ==
            fresh.nearest(record.tail, record.cursor));
    }
  }
  CHECK(num_copies > 0);
}

TEST_CASE("a fork among many looks at its own copies alone") {
  Steps model(30);
  auto one = model.join(test::iota(0, 32));
  model.compute(one, 32);
  model.compute(one, 1);
  std::vector<Tree::Sequence> forks;
  for (int i = 0; i < 100; ++i) forks.push_back(one.fork());
  const auto& core = detail::TreeAccess::core(model.tree);
  REQUIRE(core.pending_copies.size() == 100);
  detail::WindowCopies copies;
  const auto count = [&](std::size_t i) {
    std::size_t looks = 0;
    const ChunkIndex into = core.pending_copies[i].rows.target_chunk;
    copies.for_each(core, into, [&](const auto& copy) {
      ++looks;
      CHECK(copy.rows.target_chunk == into);
    });
    return looks;
  };
  CHECK(count(3) == 1);
  copies.update(core);
  for (std::size_t i = 0; i < 100; ++i) CHECK(count(i) == 1);
  forks.erase(forks.begin() + 50, forks.begin() + 60);  // the list is another one now
  REQUIRE(core.pending_copies.size() == 90);
  for (std::size_t i = 0; i < 90; ++i) CHECK(count(i) >= 1);
  copies.update(core);
  for (std::size_t i = 0; i < 90; ++i) CHECK(count(i) == 1);
}

TEST_CASE("a fork counts on no copy whose source may go before it is made") {
  using Short = PrefixTree<int, 16>;
  Short tree({}, {.min_run = 16});
  WindowedLayers<Short> layers(tree, {.window = 2, .max_chunks = 4});
  AttentionPlan plan;
  const auto compute = [&](Short::Sequence& sequence, std::size_t rows) {
    auto step = tree.begin_step();
    REQUIRE(step.add(sequence, rows));
    const auto view = plan.build(step);
    const LiveView near = layers.view(view);
    auto finished = std::move(step).finish();
    for (const auto& row : finished.rows()) return finished.commit(row, 7), near.num_copies;
    return near.num_copies;
  };
  auto one = tree.insert(test::iota(0, 15));
  layers.resume(one);
  for (const std::size_t rows : {15, 1, 1, 1, 1}) compute(one, rows);
  // Its tail is in two chunks, of which its own window needs the second.
  std::vector<Short::Sequence> forks;
  for (int i = 0; i < 3; ++i) {
    forks.push_back(one.fork(17));
    REQUIRE(forks.back().num_scheduled() == 16);
    if (i < 2)
      CHECK(layers.resume(forks.back()) == 16);
    else  // the first chunk of the tail is held, with the second and those of two forks
      CHECK_THROWS_AS(layers.resume(forks.back()), const OutOfChunks&);
  }
  forks.pop_back();
  const auto& group = detail::WindowAccess::group(layers);
  for (auto& fork : forks) {
    REQUIRE(layers.is_ready(fork));
    while (fork.size() == 17) compute(fork, 1);
    fork.for_each_run({15, 1}, [&](const Piece& piece) {
      const ChunkIndex c = group.chunks().find(piece.chunk);
      REQUIRE(c != no_chunk);
      CHECK(group.chunks().written(detail::WindowChunks::slot(c, piece.begin)) != 0);
    });
    fork.leave();
  }
}

TEST_CASE("what a step copied without a view, no fork has") {
  Steps model(40);
  auto one = model.join(test::iota(0, 32 + 5));
  for (int i = 0; i < 3; ++i) model.compute(one, 37, i);
  auto old = model.join(test::iota(200, 16));  // gives chunks back, of which the fork takes one
  while (old.size() < 92) model.compute(old, 16);
  auto fork = one.fork();
  const std::size_t end = fork.num_scheduled();
  REQUIRE(model.layers.resume(fork) == end);
  auto other = model.tree.insert(test::iota(100, 10));
  {
    auto finished = model.step_of(other, 10, model.plan, {}, /*takes_view=*/false).finish();
  }
  CHECK_FALSE(model.layers.is_ready(fork));
  CHECK(model.layers.is_ready(one));
  CHECK(model.layers.is_ready(old));
  CHECK(model.layers.resume(fork) < end);
  CHECK(model.layers.is_ready(fork));
  model.compute(fork, 40);
  CHECK(model.group().is_consistent());
}

TEST_CASE("a step that is not used any more, or of a sequence without window, needs no view") {
  Steps model(40);
  auto one = model.join(test::iota(0, 20)), two = model.join(test::iota(100, 40));
  model.compute(one, 20);
  const int drafts[] = {70, 71};
  auto first = model.step_of(one, 3, model.plan, drafts).submit();
  auto second = model.step_of(one, 1, model.second_plan, {}, /*takes_view=*/false).submit();
  {
    auto finished = std::move(first).finish();
    Steps::commit(finished, 80);  // rejects both drafts, after which the second was
  }
  AttentionPlan third_plan, fourth_plan;
  {
    auto gone = model.join(test::iota(200, 20));
  }
  auto strange = model.tree.insert(test::iota(300, 20));  // has its place
  auto third = model.step_of(strange, 10, third_plan, {}, /*takes_view=*/false).submit();
  auto fourth = model.step_of(two, 10, fourth_plan);
  CHECK(fourth.num_rows() == 10);
  CHECK(model.group().is_consistent());
}

TEST_CASE("drafts that are a tree are written nowhere once their results are not used any more") {
  Steps model(40);
  auto one = model.join(test::iota(0, 20)), two = model.join(test::iota(100, 40));
  model.compute(one, 20);
  const int drafts[] = {70, 71};
  const std::int32_t parents[] = {-1, -1};
  auto first = model.step_of(one, 3, model.plan, drafts).submit();
  auto second = model.tree.begin_step();
  REQUIRE(second.add(one, 3, {.tokens = drafts, .parents = parents}));
  REQUIRE(second.add(two, 10));
  REQUIRE(second.num_rows() == 13);
  (void)model.layers.view(model.second_plan.build(second));  // where they would be written
  {
    auto finished = std::move(first).finish();
    Steps::commit(finished, 80);  // rejects the drafts before them
  }
  const LiveView near = model.layers.view(model.second_plan.build(second));
  for (int row = 0; row < 13; ++row) CHECK((near.writes[row].chunk == no_chunk) == (row < 3));
}

TEST_CASE("what a step copied of drafts without a view, the sequence has not") {
  Steps model(40);
  auto one = model.join(test::iota(0, 20)), other = model.join(test::iota(100, 20));
  model.compute(one, 20);
  const int drafts[] = {70, 71, 72};
  const std::int32_t parents[] = {-1, 0, -1};
  auto step = model.tree.begin_step();
  REQUIRE(step.add(one, 4, {.tokens = drafts, .parents = parents}));
  (void)model.layers.view(model.plan.build(step));
  {
    auto finished = std::move(step).finish();
    const int accepted[] = {72, 80};
    for (const auto& row : finished.rows()) finished.commit(row, accepted, /*leaf=*/2);
  }
  REQUIRE(detail::TreeAccess::core(model.tree).pending_copies.size() == 1);
  const std::size_t end = one.num_scheduled();
  REQUIRE(model.layers.window_end(one, end) == end);
  {  // which are made here, for the tree alone
    auto finished = model.step_of(other, 10, model.plan, {}, /*takes_view=*/false).finish();
  }
  CHECK(model.layers.window_end(one, end) == 21);
  CHECK_FALSE(model.layers.is_ready(one));
}

TEST_CASE("rows of one step are there in all words of a chunk") {
  using Wide = PrefixTree<int, 256>;
  Wide tree;
  WindowedLayers<Wide> layers(tree, {.window = 300, .max_chunks = 100});
  AttentionPlan plan;
  auto one = tree.insert(test::iota(0, 200));
  layers.resume(one);
  for (const std::size_t rows : {30, 150, 20}) {
    auto step = tree.begin_step();
    REQUIRE(step.add(one, rows));
    (void)layers.view(plan.build(step));
    const auto finished = std::move(step).finish();
  }
  CHECK(layers.find(test::iota(0, 200)) == 200);
}

TEST_CASE("rows whose results are not used any more are written nowhere") {
  Steps model(40);
  auto one = model.join(test::iota(0, 20)), two = model.join(test::iota(100, 40));
  model.compute(one, 20);
  model.compute(two, 40);
  const int drafts[] = {70, 71};
  auto first = model.step_of(one, 3, model.plan, drafts).submit();
  auto second = model.tree.begin_step();
  REQUIRE(second.add(two, 1));
  REQUIRE(second.add(one, 1));  // after both drafts
  {
    auto finished = std::move(first).finish();
    Steps::commit(finished, 80);  // which are rejected
  }
  for (const bool again : {false, true}) {
    const auto view = model.second_plan.build(second);
    const LiveView near = model.layers.view(view);
    CHECK(near.writes[0].chunk != no_chunk);
    CHECK(near.writes[1].chunk == no_chunk);
    if (again) break;
  }
  {
    auto finished = std::move(second).finish();
    Steps::commit(finished, 90);
  }
  CHECK(model.layers.is_ready(one));
  CHECK(model.layers.window_end(one, Tree::Sequence::whole) == one.num_scheduled());
  model.compute(one, 5);
  CHECK(model.group().is_consistent());
}

TEST_CASE("a sequence looks for junctions on its own path, not on that of one that has left") {
  Steps model(30);
  const auto other = test::iota(1000, 400), prompt = test::iota(0, 400);
  auto parting = other;
  parting.resize(390);
  parting.push_back(5);
  {
    auto one = model.join(other);
    auto two = model.tree.insert(parting);  // a junction at 390
    model.compute(one, 50);
  }
  auto next = model.join(prompt);  // has the place of `one`
  auto part = prompt;
  part.resize(100);
  part.push_back(5);
  auto third = model.tree.insert(part);
  while (next.size() == 400) model.compute(next, 50);
  part.back() = 6;
  CHECK(model.layers.find(part) == 100);
}

TEST_CASE("windows are kept at junctions that come while a prompt is computed") {
  test::Random random(51);
  for (int round = test::scaled(40); round > 0; --round) {
    Steps model(30);
    std::vector<int> prompt = test::iota(0, 400);
    auto one = model.join(prompt);
    std::vector<Tree::Sequence> others;
    std::vector<std::size_t> junctions;
    while (one.size() == prompt.size()) {
      for (int n = random.uniform(0, 3); n > 0; --n) {  // ahead of it, or within what it has
        const std::size_t at = 1 + random.index(prompt.size() - 1);
        std::vector<int> other(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(at));
        other.push_back(1000 + static_cast<int>(junctions.size()));
        if (at > one.num_scheduled()) junctions.push_back(at);
        others.push_back(model.tree.insert(other));
        if (random.chance(0.3))
          others.erase(others.begin() + static_cast<std::ptrdiff_t>(random.index(others.size())));
      }
      model.compute(one, to_size_of(random.uniform(1, 120)));
    }
    // Whoever parts there, whether or not another still does, goes on from there; or from the row
    // before, for what it says of the token behind it.
    for (const std::size_t at : junctions) {
      std::vector<int> next(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(at));
      next.push_back(5000);
      CHECK(model.layers.find(next) == at);
      CHECK(model.layers.find(next, {.max_reuse = at - 1}) == at - 1);
    }
  }
}

TEST_CASE("the window before the last known token is kept, wherever steps end") {
  for (const std::size_t first : {57, 58, 59, 60}) {
    CAPTURE(first);
    Steps model(/*window=*/5);  // of 99 it begins in the chunk before that of 100
    auto text = test::iota(0, 50);
    {
      auto one = model.join(text);
      model.compute(one, 50);
      one.truncate(40);  // and goes on with other tokens, which are its own until it leaves
      text.resize(40);
      text.resize(100, 900);
      one.append(std::vector<int>(60, 900));
      const std::size_t begin = model.layers.resume(one);
      model.compute(one, 40 + first - begin - 1);
      while (one.size() < 160) model.compute(one, 100);
    }
    const auto again = model.tree.insert(text);
    CHECK(model.layers.window_end(again, Tree::Sequence::whole) == 99);
  }
}

TEST_CASE("what a step wrote after drafts that are rejected is not counted on") {
  Steps model(/*window=*/8);  // of 7 keys before a row: from 14 on at 21, from 17 on at 24
  auto one = model.join(test::iota(0, 20));
  model.compute(one, 20);
  const int drafts[] = {70, 71};
  auto first = model.step_of(one, 3, model.plan, drafts).submit();
  auto second = model.step_of(one, 1, model.second_plan).submit();  // after both drafts
  {
    auto finished = std::move(first).finish();
    Steps::commit(finished, 80);  // which are rejected
  }
  {
    auto finished = std::move(second).finish();
  }
  REQUIRE(one.num_scheduled() == 21);
  REQUIRE(model.layers.is_ready(one));
  one.for_each_run({14, 2},
                   [&](const Piece& piece) { CHECK(model.group().search().is_held(piece.chunk)); });
  CHECK(model.group().is_consistent());
}

TEST_CASE("a step's copies count, whatever becomes of its first row") {
  Steps model(40);
  auto one = model.join(test::iota(0, 20)), two = model.join(test::iota(100, 32 + 5));
  model.compute(one, 20);
  for (int i = 0; i < 3; ++i) model.compute(two, 37, i);
  const int drafts[] = {70, 71};
  auto first = model.step_of(one, 3, model.plan, drafts).submit();
  auto fork = two.fork();
  const std::size_t end = fork.num_scheduled();
  REQUIRE(model.layers.resume(fork) == end);
  auto step = model.tree.begin_step();
  REQUIRE(step.add(one, 1));  // after both drafts
  REQUIRE(step.add(fork, 1));
  const auto view = model.second_plan.build(step);
  REQUIRE(model.layers.view(view).num_copies > 0);
  auto second = std::move(step).submit();
  {
    auto finished = std::move(first).finish();
    Steps::commit(finished, 80);  // which are rejected
  }
  {
    auto finished = std::move(second).finish();
  }
  CHECK(model.layers.window_end(fork, end) == end);
}

TEST_CASE("copies of a step that is void are still to come") {
  Steps model(40);
  auto one = model.join(test::iota(0, 32 + 5)), other = model.join(test::iota(100, 20));
  for (int i = 0; i < 3; ++i) model.compute(one, 37, i);
  auto first = model.step_of(other, 10, model.plan).submit();
  auto fork = one.fork();
  const std::size_t end = fork.num_scheduled();
  auto second = model.step_of(other, 10, model.second_plan).submit();
  REQUIRE(model.layers.window_end(fork, end) < end);  // it makes them for the tree alone
  {
    auto lost = std::move(first);
  }
  CHECK(model.layers.window_end(fork, end) == end);
}

TEST_CASE("a copy brings the row that it copies, and no other") {
  using Wide = PrefixTree<int, 128>;
  Wide tree({}, {.min_run = 128});
  WindowedLayers<Wide> layers(tree, {.window = 9, .max_chunks = 100});
  AttentionPlan plan;
  auto one = tree.insert(test::iota(0, 5));
  layers.resume(one);
  while (one.size() < 120) {
    auto step = tree.begin_step();
    REQUIRE(step.add(one));
    (void)layers.view(plan.build(step));
    auto finished = std::move(step).finish();
    for (const auto& row : finished.rows()) finished.commit(row, 7);
  }
  auto fork = one.fork();
  const auto& copies = detail::TreeAccess::core(tree).pending_copies;
  REQUIRE(copies.size() == 1);
  REQUIRE(copies[0].rows.length > 100);
  const std::size_t end = fork.num_scheduled();
  CHECK(layers.window_end(fork, end) == end);
  CHECK(layers.window_end(fork, 40) == 40);
  auto& chunks = detail::WindowAccess::group(layers).chunks();  // loses the first 64 of its slots
  chunks.forget({chunks.find(copies[0].rows.source_chunk), 0, ~std::uint64_t{0}});
  CHECK(layers.window_end(fork, end) == end);
  CHECK(layers.window_end(fork, 40) == 0);
}

TEST_CASE("plans that are built in turn have views of their own") {
  Steps model(40);
  auto one = model.join(test::iota(0, 200)), two = model.join(test::iota(1000, 90));
  auto step = model.tree.begin_step();
  REQUIRE(step.add(one, 90));
  const LiveView first = model.layers.view(model.plan.build(step));
  const std::vector<Piece> pieces(first.pieces, first.pieces + first.segments[0].num_pieces);
  const std::vector<PlanView::WriteTarget> writes(first.writes, first.writes + 90);
  auto flight = std::move(step).submit();
  auto later = model.step_of(two, 90, model.second_plan);
  for (std::size_t i = 0; i < pieces.size(); ++i) CHECK(first.pieces[i].chunk == pieces[i].chunk);
  for (std::size_t i = 0; i < writes.size(); ++i) CHECK(first.writes[i].chunk == writes[i].chunk);
}

TEST_CASE("rows whose results are not used any more need no window") {
  Steps model(40);
  auto one = model.join(test::iota(0, 20)), two = model.join(test::iota(100, 40));
  model.compute(one, 20);
  const int drafts[] = {70, 71};
  auto first = model.step_of(one, 3, model.plan, drafts, /*takes_view=*/false).submit();
  auto second = model.tree.begin_step();
  REQUIRE(second.add(one, 1));  // after both drafts
  REQUIRE(second.add(two, 40));
  {
    auto finished = std::move(first).finish();
    Steps::commit(finished, 80);  // which are rejected
  }
  const LiveView near = model.layers.view(model.second_plan.build(second));
  CHECK(near.writes[0].chunk == no_chunk);
  CHECK(near.writes[1].chunk != no_chunk);
}

TEST_CASE("a segment without pieces lies where the one before it ends, or behind all windows") {
  Steps model(20);
  const auto prompt = test::iota(0, 96);
  {  // K/V of full layers alone: both compute the group's again
    auto loaded = model.tree.insert(prompt);
    loaded.mark_loaded({0, 96});
  }
  auto first = prompt, second = prompt;
  first.resize(200, 500);
  second.resize(200, 600);
  auto one = model.join(first), two = model.join(second);
  for (std::size_t rows : {10, 30, 60, 60, 39}) {
    auto step = model.tree.begin_step();
    REQUIRE(step.add(one, rows));
    REQUIRE(step.add(two, rows));
    const auto view = model.plan.build(step);
    const LiveView near = model.layers.view(view);
    REQUIRE(near.num_segments == 3);
    const auto& shared = near.segments[0];
    for (int s : {1, 2}) {
      REQUIRE(near.segments[s].parent == 0);
      if (near.segments[s].num_pieces == 0 || shared.num_pieces > 0)
        CHECK(near.segments[s].position == shared.position + shared.length);
    }
    if (shared.num_pieces == 0) CHECK(shared.position == view.segments[0].length);
    auto finished = std::move(step).finish();
    for (const auto& row : finished.rows()) finished.commit(row, 7);
  }
}
