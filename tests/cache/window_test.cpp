// Layers with windows: what they hold, where prompts are resumed, what is refused.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/windowed_layers.hpp"
#include "chunkattn/detail/kv/checks.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/counted_new.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::refused;

namespace {

using Tokens = std::vector<int>;

std::size_t to_size(int n) {
  return static_cast<std::size_t>(n);
}

Tokens random_tokens(test::Random& random, std::size_t count) {
  Tokens tokens(count);
  for (int& token : tokens) token = random.uniform(0, 1000);
  return tokens;
}

/// The group's pieces are those of the tree's plan, in the group's chunks; the windows of all rows
/// are among them, and no piece lies behind the block in which the first one begins. Segments of a
/// path follow one another.
template <class Layers>
void check_pieces(const Layers& layers, const PlanView& tree, const PlanView& near) {
  const auto& chunks = detail::WindowAccess::group(layers).chunks();
  REQUIRE(near.num_rows == tree.num_rows);
  REQUIRE(near.num_segments == tree.num_segments);
  for (int row = 0; row < near.num_rows; ++row) {
    const int end = near.row_kv_len[row], begin = std::max(0, end - layers.options().window);
    int seen = 0;
    for (int s = near.row_segment[row]; s >= 0; s = near.segments[s].parent)
      for (int i = 0; i < near.segments[s].num_pieces; ++i) {
        const Piece& piece = near.pieces[near.segments[s].piece_begin + i];
        const auto& of_tree = tree.segments[s];
        const auto* const first = tree.pieces + of_tree.piece_begin;
        const auto* const same =
            std::find_if(first, first + of_tree.num_pieces, [&](const Piece& p) {
              return p.position == piece.position && p.length == piece.length &&
                     p.begin == piece.begin;
            });
        REQUIRE(same != first + of_tree.num_pieces);
        const int part =
            std::min(end, piece.position + piece.length) - std::max(begin, piece.position);
        if (part <= 0) continue;
        seen += part;
        REQUIRE(piece.chunk == chunks.find(same->chunk));
      }
    REQUIRE(seen == end - begin);
  }
  static std::vector<int> lowest;  // kept: some callers count allocations
  lowest.assign(static_cast<std::size_t>(near.num_segments), 1 << 30);
  for (int row = 0; row < near.num_rows; ++row)
    for (int s = near.row_segment[row]; s >= 0; s = near.segments[s].parent)
      lowest[static_cast<std::size_t>(s)] =
          std::min(lowest[static_cast<std::size_t>(s)], near.row_kv_len[row]);
  for (int s = 0; s < near.num_segments; ++s) {
    const auto& segment = near.segments[s];
    const Piece* const first = near.pieces + segment.piece_begin;
    const int begin =
        std::max(0, lowest[static_cast<std::size_t>(s)] - layers.options().window) / 64 * 64;
    REQUIRE((segment.num_pieces == 0 || first->position + first->length > begin));
    REQUIRE((segment.num_pieces == 0 || first->position == segment.position));
    if (segment.parent < 0) continue;
    const auto& parent = near.segments[segment.parent];
    const int end = parent.position + parent.length;
    REQUIRE(
        (begin > tree.segments[s].position ? segment.position >= end : segment.position == end));
  }
}

/// A tree, a group, and an engine without kernels.
template <class Tree>
struct Model {
  Tree tree;
  WindowedLayers<Tree> layers;
  AttentionPlan plan;
  std::size_t rows = 0;  // computed so far

  explicit Model(int window, std::size_t max_chunks = 1000000, std::size_t tree_chunks = 1000000)
      : tree({.max_chunks = tree_chunks}),
        layers(tree, {.window = window, .max_chunks = max_chunks}) {}

  /// Computes what is not computed of a sequence; the last row's output is committed.
  void run(typename Tree::Sequence& sequence, std::size_t max_tokens, int output = 5000) {
    while (sequence.num_uncomputed() > 0) {
      auto step = tree.begin_step();
      REQUIRE(step.add(sequence, max_tokens));
      const auto view = plan.build(step);
      rows += static_cast<std::size_t>(view.num_rows);
      check_pieces(layers, view, layers.view(view));
      auto finished = std::move(step).finish();
      for (const auto& row : finished.rows()) return finished.commit(row, output);
    }
  }
  typename Tree::Sequence join(const Tokens& prompt, std::size_t max_tokens = 2048) {
    auto sequence = tree.insert(prompt);
    layers.resume(sequence);
    run(sequence, max_tokens);
    return sequence;
  }
};

}  // namespace

TEST_CASE("a sequence holds what the window of its next token touches") {
  using Tree = PrefixTree<int, 64>;
  test::Random random(1);
  const int window = random.uniform(1, 2000);
  const auto chunks = static_cast<std::size_t>(window / 64 + 2);
  Model<Tree> model(window);
  const Tokens text = random_tokens(random, 32768);
  auto one = model.join(text);
  CHECK(model.layers.stats().used_chunks <= chunks);
  CHECK(model.layers.stats().peak_used_chunks <= chunks + 2048 / 64 + 1);
  for (int i = 0; i < 500; ++i) model.run(one, 1, i);     // decode
  CHECK(model.layers.stats().used_chunks <= 2 * chunks);  // the prompt's end stays
  CHECK(model.layers.stats().used_chunks - model.layers.stats().cached_chunks <= chunks);
  CHECK(model.tree.stats().used_chunks == (32768 + 501 + 63) / 64);
}

TEST_CASE("sequences that share a prefix hold the same chunks of it") {
  using Tree = PrefixTree<int, 64>;
  test::Random random(2);
  Model<Tree> model(1024);
  const Tokens shared = random_tokens(random, 32768 - 512);
  std::vector<typename Tree::Sequence> live;
  for (int i = 0; i < 8; ++i) {
    Tokens text = shared;
    for (int t = 0; t < 512; ++t) text.push_back(random.uniform(0, 1000));
    live.push_back(model.join(text));
  }
  const auto stats = model.layers.stats();
  // 512 tokens of their own each, 512 of the prefix, and the window before it.
  CHECK(stats.used_chunks - stats.cached_chunks <= 8 * 9 + 9);
  CHECK(stats.used_chunks <= 8 * 9 + 17);
}

TEST_CASE("eight texts over 8,192 tokens compute the shared ones twice") {
  using Tree = PrefixTree<int, 64>;
  test::Random random(3);
  Model<Tree> model(1024);
  const Tokens shared = random_tokens(random, 7680);
  std::vector<typename Tree::Sequence> live;
  for (int i = 0; i < 8; ++i) {
    Tokens text = shared;
    for (int t = 0; t < 512; ++t) text.push_back(random.uniform(0, 1000));
    live.push_back(model.join(text));
  }
  // The first, the second, and 512 of each other: the window before the junction is there then.
  CHECK(model.rows <= 8192 + 8192 + 6 * 513);
  CHECK(model.layers.stats().recomputed_tokens <= 7680);
}

TEST_CASE("a text that parts anywhere is resumed at the last position whose window is there") {
  using Tree = PrefixTree<int, 16>;
  test::Random random(4);
  const Tokens prompt = random_tokens(random, 300);
  for (std::size_t fork = 0; fork <= prompt.size(); ++fork) {
    Model<Tree> model(64);
    {
      auto first = model.join(prompt);
    }
    Tokens second(prompt.begin(), prompt.begin() + static_cast<std::ptrdiff_t>(fork));
    second.resize(320, 2000);
    Tokens third = second;
    for (std::size_t i = fork; i < third.size(); ++i) third[i] = 3000;
    // Of the first, what its last token needs stays, by whole chunks: from 224 on.
    const std::size_t before = model.rows, found = model.layers.find(second);
    CHECK(found == (fork >= 224 + 63 ? fork : 0));
    {
      auto sequence = model.join(second);
    }
    CHECK(model.rows - before == second.size() - found);
    const std::size_t again = model.rows;
    CHECK(model.layers.find(third) == fork);
    {
      auto sequence = model.join(third);
    }
    CHECK(model.rows - again == third.size() - fork);
  }
}

TEST_CASE("windows of the least used prompts go first") {
  using Tree = PrefixTree<int, 16>;
  test::Random random(5);
  Model<Tree> model(64, /*max_chunks=*/30);
  const Tokens a = random_tokens(random, 200), b = random_tokens(random, 200);
  {
    auto one = model.join(a, 32);
  }
  {
    auto one = model.join(b, 32);
  }
  CHECK(model.layers.find(a) == 200);
  CHECK(model.layers.find(b) == 200);
  {
    auto one = model.join(a, 32);
  }  // is used again
  for (int i = 0; i < 4; ++i) {
    auto one = model.join(random_tokens(random, 200), 32);
  }
  CHECK(model.layers.find(a) + model.layers.find(b) == 200);
  CHECK(model.layers.stats().evicted_chunks > 0);
}

TEST_CASE("a live sequence holds no chunk more than its window touches") {
  using Tree = PrefixTree<int, 16>;
  test::Random random(6);
  const int window = random.uniform(2, 100);
  Model<Tree> model(window);
  auto one = model.join(random_tokens(random, to_size(random.uniform(1, 300))));
  for (int i = 0; i < 200; ++i) {
    // Of the window of the next row all but its own position, which is in no step yet.
    const int next = static_cast<int>(one.size()) - 1, first = std::max(0, next - window + 1);
    const auto stats = model.layers.stats();
    const std::size_t touched = next == 0 ? 0 : to_size((next - 1) / 16 - first / 16 + 1);
    CHECK(stats.used_chunks - stats.cached_chunks == touched);
    CHECK(stats.peak_used_chunks >= stats.used_chunks);
    model.run(one, 1, i);
  }
  const auto stats = model.layers.stats();
  CHECK(stats.peak_used_chunks <= to_size(2 * window / 16 + 4 + 300 / 16));
}

TEST_CASE(
    "the next turn of a chat goes on where the last one ended, and its prompt is still there") {
  using Tree = PrefixTree<int, 16>;
  test::Random random(7);
  const int length = random.uniform(104, 119);
  for (const int size :
       {length, 119}) {  // 119: the window of the last token begins in a chunk before
    Model<Tree> model(40);
    const Tokens prompt = random_tokens(random, to_size(size));
    auto one = model.join(prompt);
    for (int i = 0; i < 150; ++i) model.run(one, 1, i);
    {  // while the chat goes on: all but its last token, which is computed in any case
      auto again = model.tree.insert(prompt);
      CHECK(model.layers.window_end(again, Tree::Sequence::whole) == prompt.size() - 1);
    }
    Tokens turn = one.tokens();
    turn.pop_back();  // whose K/V is not computed
    {
      auto gone = std::move(one);
    }
    CHECK(model.layers.find(turn) == turn.size());
  }
}

TEST_CASE("no more windows are cached than there may be") {
  using Tree = PrefixTree<int, 16>;
  test::Random random(8);
  Tree tree({.max_chunks = 1000});
  WindowedLayers<Tree> layers(tree, {.window = 40, .max_chunks = 100, .max_cached_chunks = 7});
  AttentionPlan plan;
  for (int i = 0; i < 5; ++i) {
    auto one = tree.insert(random_tokens(random, 100));
    layers.resume(one);
    auto step = tree.begin_step();
    REQUIRE(step.add(one));
    const auto view = plan.build(step);
    (void)layers.view(view);
    {
      auto finished = std::move(step).finish();
    }
    {
      auto gone = std::move(one);
    }
    CHECK(layers.stats().used_chunks <= 7);
    CHECK(layers.stats().cached_chunks == layers.stats().used_chunks);
  }
  CHECK(layers.stats().cached_chunks == 7);
  CHECK(layers.stats().evicted_chunks > 0);
}

TEST_CASE("a fork has what its copies bring") {
  using Tree = PrefixTree<int, 16>;
  test::Random random(9);
  Model<Tree> model(40);
  auto one = model.join(random_tokens(random, 32 + 5));  // a tail that forks copy
  for (int i = 0; i < 2; ++i) model.run(one, 1, i);
  auto early = one.fork();
  const auto end = early.num_scheduled();
  CHECK(model.layers.window_end(early, Tree::Sequence::whole) == end);
  CHECK(model.layers.resume(early) == end);
  // A step that was built while a fork had no chunks has made its copies for the tree alone.
  auto late = one.fork();
  auto step = model.tree.begin_step();
  REQUIRE(step.add(one));
  auto view = model.plan.build(step);
  REQUIRE(view.num_copies > 0);
  const LiveView near = model.layers.view(view);
  CHECK(near.num_copies == static_cast<int>(end - 37));  // row by row
  CHECK(model.layers.window_end(late, Tree::Sequence::whole) < end);
  {
    auto finished = std::move(step).finish();
  }
  CHECK(model.layers.window_end(late, Tree::Sequence::whole) < end);
  CHECK(model.layers.resume(late) < end);
  CHECK(model.layers.is_ready(early));
}

TEST_CASE("what a fork is to copy stays until it is copied") {
  using Tree = PrefixTree<int, 16>;
  for (const std::size_t max_chunks : {2, 3}) {
    Tree tree({}, {.min_run = 16});
    WindowedLayers<Tree> layers(tree, {.window = 4, .max_chunks = max_chunks});
    AttentionPlan plan;
    const auto step_of = [&](auto& sequence) {
      auto step = tree.begin_step();
      REQUIRE(step.add(sequence, 16));
      const auto view = plan.build(step);
      const int copies = layers.view(view).num_copies;
      auto finished = std::move(step).finish();
      for (const auto& row : finished.rows()) finished.commit(row, 1);
      return copies;
    };
    auto one = tree.insert(test::iota(0, 37));
    layers.resume(one);
    while (one.size() < 52) step_of(one);
    // The chunk of 32 to 47 is cached, for the end of the prompt; that of 48 to 50 is held.
    REQUIRE(layers.stats().used_chunks == 2);
    REQUIRE(layers.stats().cached_chunks == 1);
    auto twin = one.fork(44);
    REQUIRE(twin.num_shared() == 37);
    const auto end = layers.window_end(twin, Tree::Sequence::whole);
    REQUIRE(end == 43);
    if (max_chunks == 2) {
      CHECK_THROWS_AS((void)layers.resume(twin), const OutOfChunks&);
      CHECK(layers.window_end(twin, Tree::Sequence::whole) == end);
      CHECK(layers.stats().cached_chunks == 1);
      continue;
    }
    layers.resume(twin);
    CHECK(layers.stats().cached_chunks == 0);
    auto other = tree.insert(test::iota(100, 5));
    layers.resume(other);
    {
      auto step = tree.begin_step();
      REQUIRE(step.add(other));
      const auto view = plan.build(step);
      CHECK_THROWS_AS((void)layers.view(view), const OutOfChunks&);
    }
    CHECK(step_of(twin) == 7);  // of 37 to 43
    CHECK(layers.window_end(twin, Tree::Sequence::whole) == 44);
    CHECK(layers.stats().cached_chunks == 1);
  }
}

TEST_CASE("copies are made by the first step that runs, whoever has left") {
  using Tree = PrefixTree<int, 16>;
  test::Random random(10);
  Model<Tree> model(20);
  auto one = model.join(random_tokens(random, 32), 16);  // its tail has a chunk of its own
  for (int i = 0; i < 3; ++i) model.run(one, 1, i);
  auto twin = one.fork();
  REQUIRE(model.layers.resume(twin) == twin.num_scheduled());
  {
    auto gone = std::move(one);
  }
  const auto num_written = [&] {
    const auto& chunks = detail::WindowAccess::group(model.layers).chunks();
    int count = 0;
    for (int c = 0; c < static_cast<int>(chunks.high_water()); ++c)
      count += std::popcount(chunks.written({c, 0, ~std::uint64_t{0}}));
    return count;
  };
  const int before = num_written();
  auto other = model.tree.insert(random_tokens(random, 64));
  model.layers.resume(other);
  {
    auto step = model.tree.begin_step();
    REQUIRE(step.add(other, 32));
    const auto view = model.plan.build(step);
    CHECK(model.layers.view(view).num_copies == 3);
  }
  {
    auto step = model.tree.begin_step();
    REQUIRE(step.add(twin));
    const auto view = model.plan.build(step);
    CHECK(model.layers.view(view).num_copies == 3);  // again: that step did not run
  }
  CHECK(num_written() == before);  // nor did this one
}

TEST_CASE("a fork gets no rows that its source has for full layers alone") {
  using Tree = PrefixTree<int, 16>;
  test::Random random(15);
  Tree tree({}, {.min_run = 16});
  WindowedLayers<Tree> layers(tree, {.window = 40, .max_chunks = 100});
  AttentionPlan plan;
  auto one = tree.insert(random_tokens(random, 16));
  REQUIRE(one.try_append(random_tokens(random, 10)));
  one.mark_loaded({0, 25});
  REQUIRE(layers.resume(one) == 0);
  const auto compute = [&](auto& sequence, std::size_t rows) {
    auto step = tree.begin_step();
    REQUIRE(step.add(sequence, rows));
    const auto view = plan.build(step);
    const int copies = layers.view(view).num_copies;
    auto finished = std::move(step).finish();
    return copies;
  };
  compute(one, 20);
  auto twin = one.fork();
  CHECK(layers.resume(twin) == 20);
  CHECK(compute(twin, 1) == 4);  // of those from 16 on
  CHECK(layers.window_end(one, Tree::Sequence::whole) == 20);
}

TEST_CASE("rows of a step that is not over are no window to resume at") {
  using Tree = PrefixTree<int, 16>;
  test::Random random(11);
  Model<Tree> model(40);
  const Tokens prompt = random_tokens(random, 200);
  {
    auto one = model.join(prompt);
  }
  Tokens second(prompt.begin(), prompt.begin() + 100), third = second;
  second.resize(150, 2000), third.resize(150, 3000);
  auto a = model.tree.insert(second), b = model.tree.insert(third);
  REQUIRE(model.layers.resume(a) == 0);
  auto step = model.tree.begin_step();
  REQUIRE(step.add(a, 100));
  const auto view = model.plan.build(step);
  (void)model.layers.view(view);
  CHECK(model.layers.window_end(b, Tree::Sequence::whole) == 0);
  {
    auto lost = std::move(step).submit();
  }
  CHECK(model.layers.window_end(b, Tree::Sequence::whole) == 0);
  // What the lost step was to write nobody has, what the next one is to write nobody else writes.
  Tokens fourth = third;
  for (std::size_t i = 100; i < 150; ++i) fourth[i] = 4000;
  auto c = model.tree.insert(fourth);
  const auto num_writes = [](const LiveView& plan) {
    return std::count_if(plan.writes, plan.writes + plan.num_rows,
                         [](const auto& write) { return write.chunk != no_chunk; });
  };
  REQUIRE(model.layers.resume(b) == 0);
  auto of_b = model.tree.begin_step();
  REQUIRE(of_b.add(b, 100));
  CHECK(num_writes(model.layers.view(model.plan.build(of_b))) == 100);
  auto running = std::move(of_b).submit();
  model.tree.device_idle();  // the lost step is over
  REQUIRE(model.layers.resume(c) == 0);
  AttentionPlan plan;
  auto of_c = model.tree.begin_step();
  REQUIRE(of_c.add(c, 100));
  CHECK(num_writes(model.layers.view(plan.build(of_c))) == 0);
  auto last = std::move(of_c).submit();
  {
    auto finished = std::move(running).finish();
  }
  {
    auto finished = std::move(last).finish();
  }
  CHECK(model.layers.window_end(c, Tree::Sequence::whole) == 100);
}

TEST_CASE("what is resumed again, dropped or planned again holds nothing twice") {
  using Tree = PrefixTree<int, 16>;
  test::Random random(12);
  Model<Tree> model(40);
  auto one = model.join(random_tokens(random, 200));
  const auto held = [&] {
    return model.layers.stats().used_chunks - model.layers.stats().cached_chunks;
  };
  const std::size_t before = held();
  const auto position = one.num_scheduled();
  for (int i = 0; i < 5; ++i) CHECK(model.layers.resume(one) == position);
  CHECK(held() == before);
  REQUIRE(one.try_append(random_tokens(random, 100)));
  for (int i = 0; i < 5; ++i) {
    auto step = model.tree.begin_step();
    REQUIRE(step.add(one, to_size(random.uniform(1, 100))));
    for (int k = 0; k < 2; ++k) (void)model.layers.view(model.plan.build(step));
  }
  {
    auto step = model.tree.begin_step();
    REQUIRE(step.add(one, 1));
    (void)model.layers.view(model.plan.build(step));
    auto finished = std::move(step).finish();
  }
  CHECK(held() <= before + 1);
  {
    auto gone = std::move(one);
  }
  CHECK(held() == 0);
}

TEST_CASE("K/V that was loaded has no window") {
  using Tree = PrefixTree<int, 16>;
  test::Random random(13);
  Model<Tree> model(40);
  const Tokens prompt = random_tokens(random, 100);
  auto one = model.tree.insert(prompt);
  model.layers.resume(one);
  one.mark_loaded({0, 99});
  CHECK_FALSE(model.layers.is_ready(one));
  CHECK(model.layers.resume(one) == 0);
  CHECK(model.layers.stats().recomputed_tokens == 99);
  model.run(one, 16);
  CHECK(model.rows == 100);
  CHECK(model.layers.find(prompt) == 100);
}

TEST_CASE("a sequence stays ready where K/V is loaded that the tree has") {
  using Tree = PrefixTree<int, 16>;
  Model<Tree> model(40);
  auto one = model.join(test::iota(0, 20));
  one.mark_loaded({0, 10});
  CHECK(model.layers.is_ready(one));
}

TEST_CASE("K/V of rejected drafts is not that of tokens loaded in their place") {
  using Tree = PrefixTree<int, 16>;
  Model<Tree> model(40);
  auto one = model.join(test::iota(0, 20));
  auto step = model.tree.begin_step();
  const int drafts[] = {70, 71, 72};
  REQUIRE(step.add(one, 10, {.tokens = drafts}));
  (void)model.layers.view(model.plan.build(step));
  {
    auto finished = std::move(step).finish();
    for (const auto& row : finished.rows()) finished.commit(row, 80);
  }
  REQUIRE(one.size() == 22);
  REQUIRE(one.try_append({81, 82, 83}));
  one.mark_loaded({21, 3});
  CHECK(model.layers.window_end(one, Tree::Sequence::whole) == 21);
}

TEST_CASE("tokens that are loaded over rejected drafts or rows of a dropped step are not ready") {
  using Tree = PrefixTree<int, 16>;
  Model<Tree> model(40);
  auto one = model.tree.insert(test::iota(0, 20));
  model.layers.resume(one);
  {
    auto step = model.tree.begin_step();
    const int drafts[] = {70, 71, 72};
    REQUIRE(step.add(one, 100, {.tokens = drafts}));
    (void)model.layers.view(model.plan.build(step));
    auto finished = std::move(step).finish();
    for (const auto& row : finished.rows()) finished.commit(row, 80);
  }
  CHECK(model.layers.is_ready(one));
  one.append({81, 82, 83});
  SUBCASE("loaded") {
    one.mark_loaded({20, 3});
  }
  SUBCASE("computed without a view") {
    auto step = model.tree.begin_step();
    REQUIRE(step.add(one, 3));
    (void)model.plan.build(step);
    auto finished = std::move(step).finish();
  }
  CHECK(one.num_scheduled() == 23);
  CHECK_FALSE(model.layers.is_ready(one));
  CHECK(model.layers.resume(one) == 20);

  auto two = model.tree.insert(test::iota(100, 20));
  model.layers.resume(two);
  {
    auto step = model.tree.begin_step();
    REQUIRE(step.add(two));
    (void)model.layers.view(model.plan.build(step));
  }
  CHECK(model.layers.is_ready(two));
  two.mark_loaded({0, 19});
  CHECK_FALSE(model.layers.is_ready(two));
}

TEST_CASE("a group's cache checks what the group writes") {
  using Tree = PrefixTree<int, 16>;
  Tree tree;
  WindowedLayers<Tree> layers(tree, {.window = 20, .max_chunks = 8});
  KvCache<Cpu, float> full(tree, {1, 1, 8, {}, false, true});
  KvCache<Cpu, float> near(layers, {1, 1, 8, {}, false, true});
  auto one = tree.insert(test::iota(0, 20));
  one.mark_loaded({0, 19});
  REQUIRE(layers.resume(one) == 0);
  AttentionPlan plan;
  auto step = tree.begin_step();
  REQUIRE(step.add(one, 10));  // which full layers have
  const auto view = plan.build(step);
  const LiveView near_view = layers.view(view);
  CHECK_FALSE(view.writes_anything());
  CHECK(refused([&] { (void)std::move(step).finish(); }).starts_with("layer = 0: expected step 1"));
  CHECK(refused([&] { mark_written(near.layer(0), view); }).starts_with("layer = of another tree"));
  mark_written(near.layer(0), near_view);
  {
    auto finished = std::move(step).finish();
  }
  // Of a step whose results are not used any more nothing is to be written.
  one.mark_loaded({10, 9});
  layers.resume(one);
  AttentionPlan plans[2];
  const auto plan_rows = [&](AttentionPlan& with, std::size_t rows, std::size_t drafts) {
    auto next = tree.begin_step();
    REQUIRE(next.add(one, rows + drafts, {.count = drafts}));
    const auto whole = with.build(next);
    mark_written(full.layer(0), whole);
    mark_written(near.layer(0), layers.view(whole));
    return next;
  };
  auto first = plan_rows(plans[0], one.num_uncomputed(), 2).submit();
  step = tree.begin_step();
  REQUIRE(step.add(one, 1));
  {
    auto finished = std::move(first).finish();
    for (const auto& row : finished.rows()) finished.commit(row, 7);  // rejects both
  }
  CHECK_FALSE(layers.view(plan.build(step)).writes_anything());
  auto finished = std::move(step).finish();
}

TEST_CASE("a plan covers windows that are far apart, and those of a sequence that goes back") {
  using Tree = PrefixTree<int, 16>;
  Model<Tree> model(20);
  const Tokens prompt = test::iota(0, 400);
  {  // K/V of full layers alone: both compute the group's again
    auto loaded = model.tree.insert(prompt);
    loaded.mark_loaded({0, 400});
  }
  Tokens first = prompt, second = prompt;
  first.push_back(500);
  second.push_back(600);
  auto one = model.tree.insert(first), two = model.tree.insert(second);
  model.layers.resume(one);
  model.layers.resume(two);
  const auto step = [&](Tree::Sequence& a, std::size_t rows, Tree::Sequence* b) {
    auto next = model.tree.begin_step();
    REQUIRE(next.add(a, rows));
    if (b != nullptr) REQUIRE(next.add(*b, rows));
    const auto view = model.plan.build(next);
    check_pieces(model.layers, view, model.layers.view(view));
    const auto finished = std::move(next).finish();
  };
  step(two, 35, nullptr);
  step(one, 300, nullptr);
  for (int i = 0; i < 3; ++i) step(one, 1, nullptr);
  REQUIRE(model.layers.resume(one, 35) == 35);        // by what the other has
  for (int i = 0; i < 3; ++i) step(one, 1, nullptr);  // the same rows of the same sequence
  for (auto* const ahead : {&one, &two}) {
    step(*ahead, 150, nullptr);
    for (int i = 0; i < 3; ++i) step(one, 5, &two);
    for (int i = 0; i < 3; ++i) step(two, 5, &one);
  }
}

TEST_CASE("chunks may have one token") {
  using Tree = PrefixTree<int, 1>;
  Model<Tree> model(3);
  auto one = model.join(test::iota(0, 9));
  CHECK(model.layers.find(test::iota(0, 9)) == 9);
  CHECK(model.layers.stats().used_chunks == 3);
}

TEST_CASE("a step whose view was not taken leaves sequences not ready") {
  using Tree = PrefixTree<int, 16>;
  Model<Tree> model(40);
  auto one = model.tree.insert(test::iota(0, 50));
  model.layers.resume(one);
  auto step = model.tree.begin_step();
  REQUIRE(step.add(one, 20));
  (void)model.plan.build(step);
  {
    auto finished = std::move(step).finish();
  }
  CHECK_FALSE(model.layers.is_ready(one));
  CHECK(model.layers.resume(one) == 0);
  step = model.tree.begin_step();
  REQUIRE(step.add(one, 20));
  (void)model.layers.view(model.plan.build(step));
  (void)model.plan.build(step);  // whose view is not taken
  {
    auto finished = std::move(step).finish();
  }
  CHECK(model.layers.window_end(one, Tree::Sequence::whole) == 0);
  CHECK_FALSE(model.layers.is_ready(one));
}

TEST_CASE("a step whose view was not taken leaves others what they hold") {
  using Tree = PrefixTree<int, 16>;
  Model<Tree> model(40);
  auto one = model.join(test::iota(0, 100)), two = model.tree.insert(test::iota(0, 120));
  const auto end = one.num_scheduled();
  REQUIRE(model.layers.window_end(one, Tree::Sequence::whole) == end);
  CHECK(model.layers.resume(two, 0) == 0);
  auto step = model.tree.begin_step();
  REQUIRE(step.add(two, 110));
  (void)model.plan.build(step);
  {
    auto finished = std::move(step).finish();
  }
  CHECK_FALSE(model.layers.is_ready(two));
  CHECK(model.layers.is_ready(one));
  CHECK(model.layers.window_end(one, Tree::Sequence::whole) == end);
  CHECK(model.layers.window_end(two, Tree::Sequence::whole) == end);
}

TEST_CASE("where memory runs out nothing has changed") {
  using Tree = PrefixTree<int, 16>;
  test::Random random(14);
  const Tokens prompt = random_tokens(random, 200);
  int failures = 0;
  for (int n = 0, failed = 1; failed != 0; ++n) {
    failed = 0;
    Model<Tree> model(40);
    const auto& group = detail::WindowAccess::group(model.layers);
    const auto attempt = [&](const auto& f) {
      test::heap.fail_in = n;
      try {
        f();
      } catch (const std::bad_alloc&) {
        test::heap.fail_in = -1;
        ++failed;
        CHECK(group.is_consistent());
        f();
      }
      test::heap.fail_in = -1;
    };
    auto one = model.tree.insert(prompt);
    attempt([&] { model.layers.resume(one); });
    auto step = model.tree.begin_step();
    REQUIRE(step.add(one));
    const auto view = model.plan.build(step);
    attempt([&] { (void)model.layers.view(view); });
    {
      auto finished = std::move(step).finish();
    }
    CHECK(group.is_consistent());
    failures += failed;
  }
  CHECK(failures > 5);
}

TEST_CASE("decoding allocates nothing, however long it is") {
  using Tree = PrefixTree<int, 16>;
  Model<Tree> model(40);
  auto one = model.join(test::iota(0, 10));
  for (int i = 0; i < 3000; ++i) model.run(one, 1, i);
  const auto before = test::heap.allocations;
  for (int i = 0; i < 500; ++i) model.run(one, 1, i);
  CHECK(detail::WindowAccess::group(model.layers).is_consistent());
  CHECK(test::heap.allocations - before <= 4);  // records of the tree and the pool that double
}

TEST_CASE("a plan that is gone leaves nothing in the group") {
  using Tree = PrefixTree<int, 16>;
  Model<Tree> model(40);
  auto one = model.join(test::iota(0, 10));
  std::int64_t before = 0;
  for (int i = 0; i < 30; ++i) {
    auto step = model.tree.begin_step();
    REQUIRE(step.add(one));
    AttentionPlan plan;
    (void)model.layers.view(plan.build(step));
    if (i == 5) before = test::heap.outstanding;
  }
  CHECK(test::heap.outstanding <= before);
}

TEST_CASE("resuming allocates nothing once the arrays have grown") {
  using Tree = PrefixTree<int, 16>;
  Model<Tree> model(40);
  auto one = model.join(test::iota(0, 50));
  for (int i = 0; i < 5; ++i) model.run(one, 1, i);
  std::vector<typename Tree::Sequence> live;
  std::uint64_t allocations = 0;
  for (int round = 0; round < 3; ++round) {
    live.clear();
    for (int i = 0; i < 20; ++i)
      live.push_back(i % 2 == 0 ? one.fork() : model.tree.insert(test::iota(0, 50)));
    allocations = test::heap.allocations;
    for (auto& sequence : live) model.layers.resume(sequence);
    allocations = test::heap.allocations - allocations;
  }
  CHECK(allocations == 0);
}

TEST_CASE("what does not fit is refused before anything changes") {
  using Tree = PrefixTree<int, 16>;
  using Layers = WindowedLayers<Tree>;
  Tree tree, other;
  CHECK(refused([&] { Layers(tree, {.window = 0, .max_chunks = 1}); }) ==
        "window = 0: expected at least 1 key");
  CHECK(refused([&] { Layers(tree, {.window = 1, .max_chunks = 0}); }) ==
        "max_chunks = 0: expected 1 to 2^31 - 1");
  Layers layers(tree, {.window = 20, .max_chunks = 4});
  KvCache<Cpu, float> kv(layers, {1, 1, 8});
  auto stranger = other.insert({1, 2, 3});
  CHECK(refused([&] { layers.resume(stranger); }) ==
        "sequence = of another tree: expected one of this tree");

  auto one = tree.insert(test::iota(0, 40));
  auto twin = tree.insert(test::iota(0, 41));
  CHECK_FALSE(layers.is_ready(one));
  CHECK(refused([&] { layers.resume(twin); }) ==
        "num_pending() = 40: expected 0: other sequences are to write these tokens first");
  CHECK(refused([&] { layers.resume(one, 5); }) ==
        "position = 5: expected 0, before which the window is there");
  AttentionPlan plan;
  {
    auto step = tree.begin_step();
    REQUIRE(step.add(one, 10));
    const auto view = plan.build(step);
    CHECK(refused([&] { (void)layers.view(view); }) ==
          "position of a sequence's first row = 0: expected one whose window is there: call "
          "resume() before add() unless is_ready()");
    CHECK(layers.stats().used_chunks == 0);
  }
  layers.resume(one);
  CHECK(layers.is_ready(one));
  {
    auto step = tree.begin_step();
    REQUIRE(step.add(one, 40));
    CHECK(layers.chunks_needed(step) == 3);
    const auto view = plan.build(step);
    (void)layers.view(view);
    CHECK(layers.stats().used_chunks == 3);
    CHECK(refused([&] { layers.resume(one); }) ==
          "sequence = in a step, or its outputs are to come: expected one that goes on after "
          "resume() only");
    const auto stale = view;
    {  // a view of another tree, which has an open step of this number, too
      {
        auto skipped = other.begin_step();
      }
      auto of_other = other.begin_step();
      REQUIRE(of_other.number() == step.number());
      REQUIRE(of_other.add(stranger));
      AttentionPlan other_plan;
      const auto strange = other_plan.build(of_other);
      CHECK(refused([&] { (void)layers.view(strange); }) ==
            "view = of another tree: expected a plan's view of this tree");
    }
    const auto again = plan.build(step);
    (void)layers.view(again);
    CHECK(refused([&] { (void)layers.view(stale); }).starts_with("plan = out of date"));
    auto finished = std::move(step).finish();
    CHECK(refused([&] { (void)layers.view(again); }).starts_with("plan = out of date"));
    CHECK_FALSE(layers.is_ready(twin));
    CHECK(refused([&] { layers.resume(one); }).starts_with("sequence = in a step, or its outputs"));
    for (const auto& row : finished.rows()) finished.commit(row, 1);
  }
  CHECK(layers.is_ready(one));
  layers.resume(twin);
  {
    auto step = tree.begin_step();
    CHECK(layers.view(plan.build(step)).num_rows == 0);
    REQUIRE(step.add(twin));
    const auto view = plan.build(step);
    (void)layers.view(view);
    const auto flight = std::move(step).submit();
    CHECK(refused([&] { (void)layers.view(view); }).starts_with("step = "));
  }
  tree.device_idle();
  {  // 4 chunks are too few for 64 rows more
    auto step = tree.begin_step();
    REQUIRE(twin.try_append(test::iota(50, 64)));
    REQUIRE(step.add(twin));
    CHECK(layers.chunks_needed(step) > layers.chunks_available());
    const auto view = plan.build(step);
    const auto used = layers.stats().used_chunks;
    CHECK_THROWS_AS((void)layers.view(view), const OutOfChunks&);
    CHECK(layers.stats().used_chunks == used);
  }
  one.truncate(10);
  CHECK_FALSE(layers.is_ready(one));
  tree = Tree();
  CHECK(refused([&] { layers.resume(one); }).starts_with("windowed layers = orphaned"));
  CHECK(refused([&] {
          (void)layers.find(test::iota(0, 9));
        }).starts_with("windowed layers = orphaned"));
  CHECK(layers.stats().used_chunks > 0);
  CHECK(refused([&] { (void)kv.layer(0); }).starts_with("cache = orphaned"));
}

TEST_CASE("the memory of a group has an id of its own") {
  using Tree = PrefixTree<int, 16>;
  Tree tree;
  WindowedLayers<Tree> layers(tree, {.window = 20, .max_chunks = 4});
  KvCache<Cpu, float> full(tree, {1, 1, 8}), near(layers, {1, 1, 8});
  CHECK(near.tree_id() != full.tree_id());
  auto one = tree.insert({1, 2, 3});
  layers.resume(one);
  auto step = tree.begin_step();
  REQUIRE(step.add(one));
  AttentionPlan plan;
  const auto view = plan.build(step);
  CHECK(near.layer(0).num_chunks == 0);
  CHECK(layers.view(view).tree_id == near.tree_id());
  CHECK(near.layer(0).num_chunks >= 1);
}
