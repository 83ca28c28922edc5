// K/V of windows that travels: a swapped sequence comes back ready, what is saved can be loaded,
// and nothing is put where another token's K/V is.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/windowed_kv.hpp"
#include "chunkattn/cache/windowed_layers.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/steps.hpp"
#include "tests/support/travellers.hpp"

using namespace chunkattn;
using test::iota;
using test::refused;

namespace {

using Tokens = std::vector<int>;
using test::travellers::Travellers;

std::size_t to_size(std::int64_t n) {
  return static_cast<std::size_t>(n);
}

using Tree16 = PrefixTree<int, 16>;
using Floats = Travellers<Tree16, float>;

/// Pushes all that is cached out of both pools.
template <class Model>
void forget_cache(Model& model) {
  for (int i = 0; i < 2; ++i) {
    const auto all = model.tree.try_insert(Tokens(16 * model.tree.chunks_available(), -1 - i));
    REQUIRE(all);
  }
  model.poison();
}

}  // namespace

TEST_CASE_TEMPLATE("a swapped sequence comes back ready, with its window alone", T, float,
                   std::int8_t) {
  Travellers<Tree16, T> model({40, 7}, 64);
  auto one = model.answer(iota(0, 300));
  for (int i = 0; i < 9; ++i) model.compute(one);
  REQUIRE(one.num_written() == 309);
  const std::size_t rows = model.num_rows;
  const auto swapped = swap_out(one, model.cache, model.companions);
  REQUIRE(swapped.companions.size() == 2);
  CHECK(swapped.companions[0].ranges == std::vector<TokenRange>{{309 - 39, 39}});
  CHECK(swapped.companions[1].ranges == std::vector<TokenRange>{{309 - 6, 6}});
  CHECK(swapped.companions[0].bytes.size() == 39 * kv_bytes(model.cache, 1));
  forget_cache(model);
  model.check();
  CHECK(model.groups[0]->layers.stats().used_chunks == 0);
  auto back = resume(model.tree, model.cache, swapped, model.companions);
  REQUIRE(back);
  CHECK(model.is_ready(*back));
  CHECK(back->num_written() == 309);
  CHECK(back->num_scheduled() == 309);
  model.check(*back);
  CHECK(model.num_rows_of(0, *back) == 39);
  model.compute(*back);
  CHECK(model.num_rows == rows + 1);
  CHECK(model.recomputed() == 0);
  model.check();
  model.check(*back);
}

TEST_CASE("without its window a swapped sequence is computed again") {
  Floats model({40}, 64);
  auto one = model.answer(iota(0, 300));
  const auto swapped = swap_out(one, model.cache);
  forget_cache(model);
  auto back = resume(model.tree, model.cache, swapped);
  REQUIRE(back);
  CHECK_FALSE(model.is_ready(*back));
  CHECK(model.end(*back) == 0);
}

TEST_CASE("a window travels also where K/V stays") {
  // Another one has all of these tokens, and its window is elsewhere.
  Floats model({40}, 64, 1000, /*max_cached=*/0);
  auto longer = model.answer(iota(0, 300));
  auto one = model.tree.insert(iota(0, 200));
  REQUIRE(model.step(one, 150));
  REQUIRE(model.step(one, 49));  // all of it but one, for its window
  CHECK(model.num_rows == 300 + 199);
  const auto swapped = swap_out(one, model.cache, model.companions);
  CHECK(swapped.shared == 200);
  CHECK(swapped.kv.empty());
  CHECK(swapped.companions[0].ranges == std::vector<TokenRange>{{200 - 40, 39}});
  CHECK(model.groups[0]->layers.find(iota(0, 200)) == 0);
  auto back = resume(model.tree, model.cache, swapped, model.companions);
  REQUIRE(back);
  CHECK(model.is_ready(*back));
  CHECK(back->num_scheduled() == 199);
  model.compute(*back);
  CHECK(model.num_rows == 300 + 200);
  model.check(*back);
  model.check(longer);
}

TEST_CASE("a sequence that is swapped out in the middle of its prompt goes on there") {
  Floats model({40}, 64);
  auto one = model.tree.insert(iota(0, 300));
  REQUIRE(model.step(one, 100));
  REQUIRE(model.step(one, 33));
  const auto swapped = swap_out(one, model.cache, model.companions);
  CHECK(swapped.companions[0].ranges == std::vector<TokenRange>{{133 - 39, 39}});
  forget_cache(model);
  auto back = resume(model.tree, model.cache, swapped, model.companions);
  REQUIRE(back);
  CHECK(model.is_ready(*back));
  CHECK(back->num_scheduled() == 133);
  model.compute(*back);
  CHECK(model.num_rows == 300);
  model.check(*back);
}

TEST_CASE("one whose output was not known yet comes back ready to compute it again") {
  Floats model({40, 7}, 64);
  auto one = model.tree.insert(iota(0, 300));
  SwappedSequence<int> swapped;
  REQUIRE(model.step(one, 1000, [&] {
    swapped = swap_out(one, model.cache, model.companions);
    return false;
  }));
  CHECK(swapped.options.compute_last);
  CHECK(swapped.companions[0].ranges == std::vector<TokenRange>{{299 - 39, 39}});
  forget_cache(model);
  auto back = resume(model.tree, model.cache, swapped, model.companions);
  REQUIRE(back);
  CHECK(model.is_ready(*back));
  CHECK(back->num_scheduled() == 299);
  model.compute(*back);
  CHECK(model.num_rows == 301);
  model.check(*back);
}

TEST_CASE("one that computes tokens again, for their windows, goes on where it was") {
  Floats model({40}, 64, 1000, /*max_cached=*/0);
  auto longer = model.answer(iota(0, 300));
  auto one = model.tree.insert(iota(0, 290));
  REQUIRE(model.step(one, 100));  // of 289 whose K/V there is
  CHECK(one.num_written() == 290);
  const auto swapped = swap_out(one, model.cache, model.companions);
  CHECK(swapped.companions[0].ranges == std::vector<TokenRange>{{100 - 39, 39}});
  auto back = resume(model.tree, model.cache, swapped, model.companions);
  REQUIRE(back);
  CHECK(model.is_ready(*back));
  CHECK(back->num_scheduled() == 100);
  model.check(*back);
}

TEST_CASE("where a pool is too small a swapped sequence stays where it is") {
  for (const bool of_tree : {true, false}) {
    CAPTURE(of_tree);
    Floats model({40, 7}, 64, 9);
    auto one = model.answer(iota(0, 300), 16);
    const auto swapped = swap_out(one, model.cache, model.companions);
    forget_cache(model);
    std::vector<Floats::Sequence> others;
    if (of_tree) {
      others.push_back(model.answer(iota(1000, 16 * 46), 16));
    } else {  // 3 windows of 3 chunks each
      for (int i = 1; i < 4; ++i) others.push_back(model.answer(iota(1000 * i, 48)));
      REQUIRE(model.groups[0]->layers.chunks_available() < 3);
    }
    const auto before = model.tree.stats();
    std::vector<std::size_t> used;
    for (const auto& group : model.groups)
      used.push_back(group->layers.stats().used_chunks - group->layers.stats().cached_chunks);
    CHECK(!resume(model.tree, model.cache, swapped, model.companions));
    CHECK(model.tree.stats().live_sequences == before.live_sequences);
    CHECK(model.tree.stats().used_chunks == before.used_chunks);
    for (std::size_t g = 0; g < 2; ++g) {
      const auto stats = model.groups[g]->layers.stats();
      CHECK(stats.used_chunks - stats.cached_chunks == used[g]);
    }
    model.check();
    for (const auto& other : others) model.check(other);
    others.pop_back();
    if (!of_tree) others.pop_back();
    auto back = resume(model.tree, model.cache, swapped, model.companions);
    REQUIRE(back);
    CHECK(model.is_ready(*back));
    CHECK(back->num_scheduled() == back->num_written());
    model.check(*back);
    for (auto& other : others) model.compute(other);
  }
}

TEST_CASE("windows are saved and loaded by hand") {
  Floats from({40}, 64), to({40}, 64);
  const auto shorter = from.answer(iota(0, 100));  // another window is kept before its end
  auto one = from.answer(iota(0, 300));
  const std::size_t written = one.num_written();
  const TokenRange range{0, static_cast<std::int32_t>(written)};
  std::vector<std::byte> kv(kv_bytes(from.cache, written));
  gather_kv(one, range, from.cache, kv);
  const CompanionRows rows = gather_rows(one, range, from.groups[0]->kv);
  CHECK(rows.ranges.size() == 2);
  CHECK(rows.ranges.back().end() == 300);

  auto same = to.tree.insert(iota(0, 300));
  CHECK(refused([&] {
          (void)scatter_rows(same, rows, to.groups[0]->kv);
        }).starts_with("rows.ranges = 99: expected positions of tokens whose K/V is in place"));
  scatter_kv(same, range, to.cache, kv);
  same.mark_loaded(range);
  REQUIRE(scatter_rows(same, rows, to.groups[0]->kv));
  CHECK_FALSE(to.is_ready(same));
  CHECK(to.end(same) == 300);
  to.groups[0]->layers.resume(same);
  CHECK(to.is_ready(same));
  CHECK(to.recomputed() == 0);
  to.check();
  to.check(same);

  // K/V that is loaded after the window was has no window.
  auto other = to.tree.insert(iota(500, 300));
  other.mark_loaded({0, 100});
  CompanionRows some = rows;
  some.ranges = {{50, 39}};
  some.bytes.resize(39 * some.bytes_per_token);
  REQUIRE(scatter_rows(other, some, to.groups[0]->kv));
  CHECK(to.end(other) == 89);
  other.mark_loaded({100, 100});
  CHECK(to.end(other) == 89);
  other.leave();
  to.check();
  CHECK(to.groups[0]->layers.stats().used_chunks == to.groups[0]->layers.stats().cached_chunks + 3);
}

TEST_CASE("where another has no rows, who computes them again reads its own") {
  Tree16 tree(PoolAllocator{.max_chunks = 100});
  WindowedLayers<Tree16> near(tree, {.window = 4, .max_chunks = 50});
  KvCache<Cpu, float> kv(near, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 8});
  WindowedKv travels(near, kv);
  AttentionPlan plan;
  // One has come with K/V of all its tokens, and with its window alone.
  auto ahead = tree.insert(iota(0, 100));
  ahead.mark_loaded({0, 90});
  CompanionRows rows;
  rows.format = travels.format();
  rows.bytes_per_token = travels.bytes_per_token();
  for (std::int32_t p = 86; p < 90; ++p) (void)rows.add(p);
  REQUIRE(scatter_rows(ahead, rows, travels));
  REQUIRE(near.resume(ahead) == 90);
  auto behind = tree.insert(iota(0, 50));
  REQUIRE(near.resume(behind) == 0);

  for (int steps = 0; steps < 5; ++steps) {  // the same segments, in each of them
    auto step = tree.begin_step();
    REQUIRE(step.add(ahead, 2));
    REQUIRE(step.add(behind, 8));
    const auto whole = plan.build(step);
    const LiveView view = near.view(whole);
    for (int row = 0; row < view.num_rows; ++row)
      for (int s = view.row_segment[row]; s >= 0; s = view.segments[s].parent) {
        const auto& segment = view.segments[s];
        for (int i = 0; i < segment.num_pieces; ++i) {
          const Piece& piece = view.pieces[segment.piece_begin + i];
          CHECK(piece.chunk >= 0);  // some kernels read it where every row is masked
          const int begin = std::max(piece.position, view.row_kv_len[row] - 4);
          const int end = std::min(piece.position + piece.length, view.row_kv_len[row]);
          if (begin >= end) continue;  // the row's window does not touch it
          ahead.for_each_run({piece.position, 1}, [&](const Piece& of_tree) {
            CHECK(piece.chunk == detail::WindowAccess::group(near).chunks().find(of_tree.chunk));
          });
        }
      }
    const auto finished = std::move(step).finish();
  }
}

TEST_CASE("rows wait for their sequence, whatever is cached meanwhile") {
  Floats model({40}, 64, 6, /*max_cached=*/0);
  auto one = model.tree.insert(iota(0, 100));
  one.mark_loaded({0, 100});
  CompanionRows rows;
  rows.format = model.groups[0]->kv.format();
  rows.bytes_per_token = model.groups[0]->kv.bytes_per_token();
  for (std::int32_t p = 50; p < 99; ++p) (void)rows.add(p);
  REQUIRE(scatter_rows(one, rows, model.groups[0]->kv));
  CHECK(model.groups[0]->layers.stats().used_chunks == 4);
  CHECK(model.end(one) == 99);
  {
    auto two = model.tree.insert(iota(200, 20));
    CHECK(model.step(two, 20));
  }
  CHECK(model.end(one) == 99);
  {
    auto two = model.tree.insert(iota(300, 40));
    CHECK_THROWS_AS(model.step(two, 40), const OutOfChunks&);
  }
  CHECK(model.end(one) == 99);
  // Loaded again, they are where they were.
  REQUIRE(scatter_rows(one, rows, model.groups[0]->kv));
  CHECK(model.groups[0]->layers.stats().used_chunks == 4);
  one.leave();
  CHECK(model.groups[0]->layers.stats().used_chunks == 0);
  model.check();
}

TEST_CASE("what a group has is not overwritten, and what it lacks is") {
  Floats model({40}, 64);
  auto one = model.answer(iota(0, 100));
  CompanionRows rows = gather_rows(one, {70, 20}, model.groups[0]->kv);
  REQUIRE(rows.ranges == std::vector<TokenRange>{{70, 20}});
  std::fill(rows.bytes.begin(), rows.bytes.end(), std::byte{0x11});
  auto other = model.tree.insert(iota(0, 100));
  REQUIRE(model.make_ready(other));
  REQUIRE(scatter_rows(other, rows, model.groups[0]->kv));
  CHECK_FALSE(model.is_ready(other));
  model.check(one);
  model.check(other);
  REQUIRE(model.make_ready(other));
  model.compute(other);
  model.check(other);
}

TEST_CASE("what a step is to write is left to it") {
  Floats model({40}, 64, 1000, /*max_cached=*/0);
  auto longer = model.answer(iota(0, 300));
  auto writes = model.tree.insert(iota(0, 200));
  auto loads = model.tree.insert(iota(0, 200));
  REQUIRE(model.make_ready(writes));
  CompanionRows rows = detail::no_rows_of(model.groups[0]->kv);
  for (std::int32_t p = 40; p < 60; ++p) (void)rows.add(p);
  {
    auto step = model.tree.begin_step();
    REQUIRE(step.add(writes, 50));
    const auto view = model.plan.build(step);
    (void)model.groups[0]->layers.view(view);
    REQUIRE(scatter_rows(loads, rows, model.groups[0]->kv));
    CHECK(gather_rows(loads, {0, 100}, model.groups[0]->kv).ranges ==
          std::vector<TokenRange>{{50, 10}});
  }  // dropped: they are still not there, and are nobody's to write
  CHECK(gather_rows(loads, {0, 100}, model.groups[0]->kv).ranges ==
        std::vector<TokenRange>{{50, 10}});
  REQUIRE(scatter_rows(loads, rows, model.groups[0]->kv));
  CHECK(gather_rows(loads, {0, 100}, model.groups[0]->kv).ranges ==
        std::vector<TokenRange>{{40, 20}});
}

TEST_CASE("what a step is to write is left to it, whatever void steps were to write there") {
  Floats model({40}, 64, 1000, /*max_cached=*/0);
  auto longer = model.answer(iota(0, 300));
  auto writes = model.tree.insert(iota(0, 200));
  auto loads = model.tree.insert(iota(0, 200)), other = model.tree.insert(iota(500, 200));
  REQUIRE(model.make_ready(other));
  CompanionRows rows = detail::no_rows_of(model.groups[0]->kv);
  for (std::int32_t p = 40; p < 60; ++p) (void)rows.add(p);
  AttentionPlan plans[3];
  const auto submit = [&](Floats::Sequence& one, AttentionPlan& plan) {
    REQUIRE(model.make_ready(one));
    auto step = model.tree.begin_step();
    REQUIRE(step.add(one, 50));
    (void)model.groups[0]->layers.view(plan.build(step));
    return std::move(step).submit();
  };
  {
    auto lost = submit(writes, plans[0]);
  }
  writes.leave();  // it cannot go on before the lost step is over
  writes = model.tree.insert(iota(0, 200));
  auto flight = submit(writes, plans[1]);
  {
    auto lost = submit(other, plans[2]);
  }
  REQUIRE(scatter_rows(loads, rows, model.groups[0]->kv));
  CHECK(gather_rows(loads, {0, 100}, model.groups[0]->kv).ranges ==
        std::vector<TokenRange>{{50, 10}});
}

TEST_CASE("what is not of the group, or cannot be loaded, is refused by name") {
  Floats model({40, 7}, 64);
  using Kv = WindowedKv<Tree16, Floats::Cache>;
  CHECK(refused([&] { Kv(model.groups[0]->layers, model.cache); }) ==
        "cache = of another tree or group: expected the K/V memory of the group");
  CHECK(refused([&] { Kv(model.groups[0]->layers, model.groups[1]->cache); }) ==
        "cache = of another tree or group: expected the K/V memory of the group");
  auto one = model.answer(iota(0, 100));
  const auto rows = gather_rows(one, {70, 20}, model.groups[0]->kv);
  auto step = model.tree.begin_step();
  REQUIRE(step.add(one));
  CHECK(refused([&] { (void)scatter_rows(one, rows, model.groups[0]->kv); }) ==
        "sequence = in a step, or its outputs are to come: expected one that goes on after "
        "resume() only");
  CHECK(refused([&] {
          model.groups[0]->kv.scatter(one, rows);
        }).starts_with("sequence = in a step, or its outputs are to come"));
  auto other = model.tree.insert(iota(0, 100));
  CHECK(refused([&] {
          (void)scatter_rows(other, rows, model.groups[1]->kv);
        }).starts_with("rows.format = windowed K/V 1 16909060 40 2 2 64 32 float: expected "));
  CHECK(model.groups[1]->kv.format() == "windowed K/V 1 16909060 7 2 2 64 32 float");
  Floats another({40}, 64);
  auto stranger = another.tree.insert(iota(0, 100));
  stranger.mark_loaded({0, 100});
  CHECK(refused([&] { (void)scatter_rows(stranger, rows, model.groups[0]->kv); }) ==
        "sequence = of another tree: expected one of this tree");
  CHECK(refused([&] { (void)swap_out(stranger, another.cache, model.companions); }) ==
        "sequence = of another tree: expected one of this tree");
  CHECK(stranger.size() == 100);
  // By itself reserve() is called with what has not been checked.
  CompanionRows beyond = rows;
  beyond.ranges = {{90, 20}};
  CHECK(refused([&] {
          (void)model.groups[0]->kv.reserve(other, beyond);
        }).starts_with("range.length = 20: expected an end within the sequence's 100"));
  CHECK(refused([&] {
          model.groups[0]->kv.scatter(other, beyond);
        }).starts_with("rows.ranges = 109: expected positions of tokens whose K/V is in place"));
}

namespace {

/// Returns how many sequences came back with all that had been swapped out.
template <class Tree>
std::size_t run_random(std::uint64_t stream, const std::vector<int>& windows,
                       std::size_t tree_chunks, std::size_t window_chunks,
                       std::optional<std::size_t> max_cached, int operations) {
  struct Away {
    SwappedSequence<int> swapped;
    std::size_t end;
  };
  test::Random random(stream);
  CAPTURE(stream);
  Travellers<Tree, float> model(windows, tree_chunks, window_chunks, max_cached);
  std::vector<Tokens> texts;
  for (int i = 0; i < 5; ++i) {
    Tokens text(to_size(random.uniform(20, 160)));
    for (int& token : text) token = random.uniform(0, 2);
    if (i > 0)
      std::copy_n(texts[0].begin(), std::min(texts[0].size(), text.size()) / 2, text.begin());
    texts.push_back(std::move(text));
  }
  using Sequence = typename Tree::Sequence;
  std::vector<Sequence> live;
  std::vector<Away> away;
  std::size_t came_back = 0;
  for (int i = 0; i < operations; ++i) {
    const int what = random.uniform(0, 99);
    if (what < 12 && live.size() < 6) {
      Tokens prompt = texts[random.index(texts.size())];
      prompt.resize(1 + random.index(prompt.size()));
      if (auto one = model.tree.try_insert(prompt)) live.push_back(std::move(*one));
    } else if (what < 16 && !live.empty()) {
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(random.index(live.size())));
    } else if (what < 20 && !live.empty() && live.size() < 6) {
      auto& one = live[random.index(live.size())];
      const std::size_t length =
          random.chance(0.5) ? Sequence::whole : 1 + random.index(one.size());
      if (auto twin = one.try_fork(length)) live.push_back(std::move(*twin));
    } else if (what < 30 && !live.empty() && away.size() < 4) {
      const std::size_t at = random.index(live.size());
      const std::size_t written = live[at].num_written();
      auto swapped = swap_out(live[at], model.cache, model.companions);
      std::size_t end = written;
      if (swapped.options.compute_last) end = std::min(end, swapped.tokens.size() - 1);
      for (std::size_t g = 0; g < windows.size(); ++g) {  // at most a window each
        const auto& rows = swapped.companions[g];
        REQUIRE(rows.bytes.size() < to_size(windows[g]) * rows.bytes_per_token);
        if (!rows.ranges.empty()) end = std::min(end, to_size(rows.ranges.back().end()));
        if (rows.ranges.empty() && windows[g] > 1) end = 0;
      }
      away.push_back({std::move(swapped), end});
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(at));
    } else if (what < 42 && !away.empty() && live.size() < 6) {
      const std::size_t at = random.index(away.size());
      const Away& one = away[at];
      const auto before = model.tree.stats();
      const std::size_t recomputed = model.recomputed();
      auto back = resume(model.tree, model.cache, one.swapped, model.companions);
      if (!back) {
        REQUIRE(model.tree.stats().live_sequences == before.live_sequences);
      } else {
        // Without tokens that others had, nothing is loaded.
        const bool is_there = back->num_written() >= std::max(one.end, one.swapped.shared) &&
                              back->num_pending() == 0 &&
                              one.swapped.weights_epoch == back->weights_epoch();
        if (is_there) {
          ++came_back;
          REQUIRE(model.is_ready(*back));
          REQUIRE(back->num_scheduled() >= one.end);
          if (back->num_scheduled() == back->num_written())
            REQUIRE(recomputed == model.recomputed());
        }
        live.push_back(std::move(*back));
        away.erase(away.begin() + static_cast<std::ptrdiff_t>(at));
      }
    } else if (what == 42 && random.chance(0.2)) {
      model.tree.clear();
    } else if (what == 43) {
      (void)model.tree.try_insert(Tokens(
          to_size(Tree::chunk_size) * std::max<std::size_t>(1, model.tree.chunks_available()), 9));
    } else if (!live.empty()) {
      auto& one = live[random.index(live.size())];
      try {
        (void)model.step(one, to_size(random.uniform(1, 30)));
      } catch (const OutOfChunks&) {  // of the group
      }
    }
    model.check();
    for (const auto& one : live) model.check(one);
  }
  live.clear();
  model.check();
  for (const auto& group : model.groups)
    CHECK(group->layers.stats().used_chunks == group->layers.stats().cached_chunks);
  return came_back;
}

}  // namespace

TEST_CASE("swapped at random, sequences come back with their windows") {
  const int n = test::scaled(600);
  std::size_t came_back = 0;
  came_back += run_random<PrefixTree<int, 16>>(1, {40}, 60, 1000, {}, n);
  came_back += run_random<PrefixTree<int, 16>>(2, {40, 7}, 40, 20, 6, n);
  came_back += run_random<PrefixTree<int, 16>>(3, {25}, 100, 14, 0, n);
  came_back += run_random<PrefixTree<int, 4>>(4, {1, 13}, 200, 60, {}, n);
  came_back += run_random<PrefixTree<int, 128>>(5, {50}, 12, 8, 2, n);
  CHECK(came_back > 0);
}
