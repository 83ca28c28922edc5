// Layers with windows: the windows of pinned prompts go last.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/windowed_layers.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;

namespace {

struct PinnedPrompts {
  using Tree = PrefixTree<int, 16>;

  Tree tree;
  WindowedLayers<Tree> layers;
  AttentionPlan plan;

  PinnedPrompts(std::size_t max_chunks, std::size_t max_pinned)
      : tree({.max_chunks = 2000}, {}, {.max_pinned = max_pinned}),
        layers(tree, {.window = 40, .max_chunks = max_chunks}) {}

  /// Computes a prompt, in steps of 32 rows.
  Tree::Sequence join(const std::vector<int>& prompt) {
    auto sequence = tree.insert(prompt);
    layers.resume(sequence);
    while (sequence.size() == prompt.size()) compute(sequence);
    return sequence;
  }
  void compute(Tree::Sequence& sequence) {
    auto step = tree.begin_step();
    REQUIRE(step.add(sequence, 32));
    (void)layers.view(plan.build(step));
    auto finished = std::move(step).finish();
    for (const auto& row : finished.rows()) return finished.commit(row, 7);
  }
  /// Prompts that no other begins as, one after the other.
  void crowd(int count, int first) {
    for (int i = 0; i < count; ++i) {
      auto gone = join(test::iota(first + 1000 * i, 100));
    }
  }
  [[nodiscard]] const detail::WindowChunks& chunks() const {
    return detail::WindowAccess::group(layers).chunks();
  }
};

}  // namespace

TEST_CASE("a pinned prompt keeps the window before its end until it is unpinned") {
  PinnedPrompts model(/*max_chunks=*/16, /*max_pinned=*/20);
  const auto prompt = test::iota(0, 200), other = test::iota(500, 200);
  {
    auto one = model.join(prompt);
    auto two = model.join(other);
  }
  auto pin = model.tree.pin(prompt);
  REQUIRE(pin.size() == 200);
  model.crowd(12, 1000);
  CHECK(model.layers.find(prompt) >= 199);
  CHECK(model.layers.find(other) == 0);
  pin = {};
  CHECK(model.layers.find(prompt) >= 199);  // it is the youngest now
  model.crowd(12, 20000);
  CHECK(model.layers.find(prompt) == 0);
  CHECK(detail::WindowAccess::group(model.layers).is_consistent());
}

TEST_CASE("what is pinned while its prompt is computed keeps the window, too") {
  PinnedPrompts model(16, 20);
  const auto prompt = test::iota(0, 200);
  auto prefix = test::iota(0, 96);
  PinnedPrompts::Tree::Pin pin;
  {
    auto one = model.tree.insert(prompt);
    model.layers.resume(one);
    for (int i = 0; i < 3; ++i) model.compute(one);
    pin = model.tree.pin(prompt);
    while (one.size() == 200) model.compute(one);
  }
  REQUIRE(pin.size() == 96);
  model.crowd(12, 1000);
  prefix.push_back(5);
  CHECK(model.layers.find(prefix) == 96);
  CHECK(model.layers.find(prompt) == 96);  // all else is as others are
}

TEST_CASE("a pin keeps the whole window, also before a short branch") {
  PinnedPrompts model(16, 20);
  const auto prompt = test::iota(0, 200);
  PinnedPrompts::Tree::Pin pin;
  {
    auto one = model.tree.insert(prompt);
    model.layers.resume(one);
    for (int i = 0; i < 3; ++i) model.compute(one);
    auto part = test::iota(0, 90);  // parts six tokens before what is pinned, when that is passed
    part.push_back(5);
    (void)model.tree.insert(part);
    pin = model.tree.pin(prompt);
    while (one.size() == 200) model.compute(one);
  }
  REQUIRE(pin.size() == 96);
  model.crowd(12, 1000);
  auto prefix = test::iota(0, 96);
  prefix.push_back(5);
  CHECK(model.layers.find(prefix) == 96);
}

TEST_CASE("nothing is cached after clear(), also of what is pinned and still read") {
  PinnedPrompts model(16, 20);
  const auto prompt = test::iota(0, 100);
  auto one = model.join(prompt);
  const auto pin = model.tree.pin(prompt);
  for (int i = 0; i < 100; ++i) model.compute(one);
  REQUIRE(pin.size() == 100);
  REQUIRE(model.layers.stats().cached_chunks > 0);
  model.tree.clear();
  CHECK(model.layers.stats().cached_chunks == 0);
  CHECK(detail::WindowAccess::group(model.layers).is_consistent());
}

TEST_CASE("pinned windows go where live sequences need their chunks") {
  PinnedPrompts model(/*max_chunks=*/11, 100);
  const auto prompt = test::iota(0, 100);
  {
    auto one = model.join(prompt);
  }
  const auto pin = model.tree.pin(prompt);
  auto one = model.join(test::iota(1000, 100));
  auto two = model.join(test::iota(2000, 100));
  CHECK(model.layers.find(prompt) == 0);
  CHECK(pin.size() == 100);
  CHECK(model.layers.stats().evicted_chunks > 0);
}

TEST_CASE("no pinned window goes while another one is cached") {
  test::Random random(70);
  PinnedPrompts model(/*max_chunks=*/30, /*max_pinned=*/40);
  std::vector<PinnedPrompts::Tree::Sequence> live;
  std::vector<PinnedPrompts::Tree::Pin> pins;
  std::vector<std::vector<int>> prompts;
  std::size_t num_kept = 0;
  const auto cached = [&](bool pinned) {
    std::map<ChunkIndex, ChunkIndex> found;  // of the tree, and the group's
    const auto& core = detail::TreeAccess::core(model.tree);
    for (ChunkIndex c = 0; c < static_cast<ChunkIndex>(model.tree.num_chunks()); ++c)
      if (const ChunkIndex own = model.chunks().find(c); own != no_chunk &&
                                                         model.chunks().num_holds(own) == 0 &&
                                                         (core.chunk_table[c].pinned > 0) == pinned)
        found.insert({c, own});
    return found;
  };
  for (int i = test::scaled(400); i > 0; --i) {
    const auto pinned = cached(true), others = cached(false);
    const int what = random.uniform(0, 9);
    if (what < 4) {
      std::vector<int> prompt = test::iota(0, static_cast<std::size_t>(random.uniform(1, 150)));
      const int branch = random.uniform(0, 150);
      for (int p = branch; p < static_cast<int>(prompt.size()); ++p)
        prompt[static_cast<std::size_t>(p)] += 1000 * random.uniform(1, 4);
      prompts.push_back(prompt);
      if (live.size() < 3) live.push_back(model.join(prompt));
    } else if (what < 6 && !live.empty()) {
      model.compute(live[random.index(live.size())]);
    } else if (what < 8 && !live.empty()) {
      std::swap(live.back(), live[random.index(live.size())]);
      live.pop_back();
    } else if (what == 8 && !prompts.empty()) {
      pins.push_back(model.tree.pin(prompts[random.index(prompts.size())]));
    } else if (!pins.empty()) {
      std::swap(pins.back(), pins[random.index(pins.size())]);
      pins.pop_back();
      if (random.chance(0.05)) model.tree.clear();
      continue;
    }
    check_invariants(model.tree);
    REQUIRE(detail::WindowAccess::group(model.layers).is_consistent());
    // Of what was pinned before and still is, nothing has gone unless all others have.
    const auto& core = detail::TreeAccess::core(model.tree);
    const bool lost = std::any_of(pinned.begin(), pinned.end(), [&](const auto& one) {
      return core.chunk_table[one.first].pinned > 0 && model.chunks().find(one.first) != one.second;
    });
    const auto now = cached(false);
    const auto is_old = [&](const auto& one) {
      const auto before = others.find(one.first);
      return before != others.end() && before->second == one.second;
    };
    if (lost) CHECK(std::none_of(now.begin(), now.end(), is_old));
    num_kept += !lost && !pinned.empty() && model.layers.stats().evicted_chunks > 0;
  }
  CHECK(num_kept > 0);
}
