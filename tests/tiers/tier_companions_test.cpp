// What components keep of tokens goes to tiers with their K/V, as far as it is worth it, and comes
// back as it was: values of tokens, and K/V of windows, which says where a prompt can be resumed.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/tiers/tiers.hpp"
#include "tests/support/random.hpp"
#include "tests/support/refused.hpp"
#include "tests/support/steps.hpp"
#include "tests/support/tier_folder.hpp"
#include "tests/support/travellers.hpp"

using namespace chunkattn;
using test::iota;
using test::refused;

namespace {

using Tree = PrefixTree<int, 16>;
using Model = test::travellers::Travellers<Tree, float>;
using TreeTiers = Tiers<Tree, Model::Cache>;
using Tokens = std::vector<int>;

/// A model over one tier in memory, whose work is done when it is asked for.
struct Tiered {
  explicit Tiered(std::shared_ptr<MemoryTier> store, std::vector<int> windows = {32},
                  std::size_t window_chunks = 1000, std::optional<std::size_t> max_cached = {},
                  bool write_through = false, std::size_t tree_chunks = 64)
      : model(windows, tree_chunks, window_chunks, max_cached), tier(std::move(store)) {
    TreeTiers::Options options;
    options.threads = false;
    options.write_through = write_through;
    options.companions = model.companions;
    tiers.emplace(model.tree, model.cache, std::vector<std::shared_ptr<TierStore>>{tier}, options);
  }
  /// A prompt that is answered, and leaves.
  void answer(const Tokens& prompt, std::size_t rows = 1000) { (void)model.answer(prompt, rows); }
  /// All that is cached goes to the tier.
  void evict() {
    for (int i = 0; i < 2; ++i) {
      const auto all = model.tree.try_insert(Tokens(16 * model.tree.chunks_available(), -1 - i));
      REQUIRE(all);
    }
    tiers->flush();
    model.poison();
  }
  /// A prompt that has loaded what the tier has.
  Model::Sequence load(const Tokens& prompt) {
    auto sequence = model.tree.insert(prompt);
    auto load = tiers->load(sequence);
    load.wait(sequence);
    model.check();
    model.check(sequence);
    return sequence;
  }

  Model model;
  std::shared_ptr<MemoryTier> tier;
  std::optional<TreeTiers> tiers;
};

std::shared_ptr<MemoryTier> memory() {
  return std::make_shared<MemoryTier>(std::size_t{64} << 20);
}

}  // namespace

TEST_CASE("a prompt is resumed where its window was when it was evicted") {
  for (const bool restarted : {false, true}) {
    CAPTURE(restarted);
    const auto store = memory();
    std::optional<Tiered> first(std::in_place, store, std::vector<int>{32, 16});
    first->answer(iota(0, 300));
    first->evict();
    if (restarted) first.reset();
    std::optional<Tiered> second;
    if (restarted) second.emplace(store, std::vector<int>{32, 16});
    Tiered& now = restarted ? *second : *first;
    const std::size_t before = now.model.num_rows;
    auto again = now.load(iota(0, 300));
    CHECK(again.num_written() == 288);  // whole blocks
    CHECK(now.model.end(again) == 288);
    CHECK(now.model.num_rows_of(0, again) == 32);  // a row before the window, too
    now.model.compute(again);
    CHECK(now.model.num_rows == before + 12);
    CHECK(now.model.recomputed() == 0);
    now.model.check(again);
    again.leave();
    CHECK(now.model.groups[0]->layers.stats().used_chunks ==
          now.model.groups[0]->layers.stats().cached_chunks);
    now.evict();
    auto exact = now.load(iota(0, 288));  // its last token is computed in any case
    CHECK(exact.num_written() == 287);
    CHECK(now.model.end(exact) == 287);
  }
}

TEST_CASE("a sequence that was ready stays so where no tier has anything of it") {
  Tiered model(memory(), {32});
  auto one = model.model.tree.insert(iota(0, 40));
  REQUIRE(model.model.make_ready(one));
  auto load = model.tiers->load(one);
  load.wait(one);
  CHECK(model.model.is_ready(one));
}

namespace {

/// Has a row of so many bytes for every so many tokens.
class Rows final : public KvCompanion<Model::Sequence> {
 public:
  Rows(std::size_t width, int every) : width_(width), every_(every) {}
  [[nodiscard]] std::string format() const override { return "rows"; }
  [[nodiscard]] std::size_t bytes_per_token() const override { return width_; }
  void gather(std::span<const Piece> places, CompanionRows& rows) override {
    for (const Piece& piece : places)
      for (std::int32_t p = piece.position; p < piece.position + piece.length; ++p)
        if (p % every_ == 0) {
          std::byte* const row = rows.add(p);
          for (std::size_t i = 0; i < width_; ++i)
            row[i] = static_cast<std::byte>(7 * p + static_cast<int>(i));
        }
  }
  void scatter(Model::Sequence&, const CompanionRows&) override {}

 private:
  std::size_t width_;
  int every_;
};

}  // namespace

TEST_CASE("rows of any widths come back from a block as they were, up to a limit") {
  Rows few(7, 5), all(3, 1), none(2, 1000), wide(40, 2);
  const detail::TierCompanions<Model::Sequence> companions({&few, &all, &none, &wide}, 20);
  for (const std::int32_t begin : {0, 60}) {
    const std::vector<Piece> places{{3, 4, 12, begin + 1}, {9, 0, 7, begin + 13}};
    std::vector<std::byte> bytes;
    REQUIRE(companions.add_rows(places, begin + 1, bytes));
    CHECK(bytes.size() <= companions.shapes().most_bytes());
    for (const std::size_t limit : {1000, 11, 0}) {
      const std::size_t end = static_cast<std::size_t>(begin) + limit;
      auto taken = companions.no_rows();
      CHECK(companions.take(bytes, begin + 1, end, taken));
      std::size_t c = 0;
      for (Rows* const one : {&few, &all, &none, &wide}) {
        CompanionRows rows = detail::no_rows_of<Model::Sequence>(*one);
        one->gather(places, rows);
        detail::cut_rows(rows, end);
        CHECK(taken[c].ranges == rows.ranges);
        CHECK(taken[c++].bytes == rows.bytes);
      }
    }
  }
}

TEST_CASE("windows are stored where they are kept, and nowhere else") {
  const auto store = memory();
  Tiered with(store, {32});
  with.answer(iota(0, 300), 50);
  with.evict();
  Tiered without(memory(), {});
  without.answer(iota(0, 300), 50);
  without.evict();
  const std::size_t records = without.tiers->stats().tiers[0].stored;
  CHECK(records == with.tiers->stats().tiers[0].stored);
  const std::size_t row = with.model.groups[0]->kv.bytes_per_token();
  // A bit for each token, the text of the format, and two blocks of rows.
  const std::size_t more = with.tier->num_bytes() - without.tier->num_bytes();
  const std::size_t text = sizeof(std::uint64_t) + with.model.groups[0]->kv.format().size();
  CHECK(more == records * (2 + text) + 32 * row);
}

TEST_CASE("K/V without windows is no place to resume at") {
  Tiered model(memory(), {32}, 1000, /*max_cached=*/0);
  model.answer(iota(0, 300));
  model.evict();
  auto again = model.load(iota(0, 300));
  CHECK(again.num_written() == 288);
  CHECK(model.model.end(again) == 0);
  const std::size_t before = model.model.num_rows;
  model.model.compute(again);
  CHECK(model.model.num_rows == before + 300);
  model.model.check(again);
}

TEST_CASE("a prompt is resumed at a junction, and the window after it is not mistaken for one") {
  Tiered model(memory(), {32});
  Tokens one = iota(0, 300), two = iota(0, 320), three = iota(0, 310);
  std::fill(two.begin() + 160, two.end(), -5);
  std::fill(three.begin() + 160, three.end(), -6);
  model.answer(one);
  model.answer(two);
  model.answer(three);  // where prompts part, a window is kept
  model.evict();
  Tokens four = iota(0, 330);
  std::fill(four.begin() + 160, four.end(), -7);
  auto fourth = model.load(four);
  CHECK(fourth.num_written() == 160);
  CHECK(model.model.end(fourth) == 160);
  fourth.leave();
  // Its K/V goes on to 288, and of its windows the last one alone waits in the group's chunks.
  auto first = model.load(one);
  CHECK(first.num_written() == 288);
  CHECK(model.model.end(first) == 288);
  const auto stats = model.model.groups[0]->layers.stats();
  CHECK(stats.used_chunks - stats.cached_chunks <= 3);
}

TEST_CASE("rows that come and rows that there are make a window") {
  Tiered model(memory(), {32});
  model.answer(iota(0, 300));
  {
    const auto all = model.model.tree.try_insert(Tokens(16 * (64 - 17), -1));
    REQUIRE(all);
  }
  model.tiers->flush();
  REQUIRE(model.model.tree.match_prefix(iota(0, 300)).cached == 272);
  {
    auto other = model.model.tree.insert(iota(0, 300));
    CHECK(model.model.end(other) == 0);
  }
  auto again = model.load(iota(0, 300));
  CHECK(again.num_written() == 288);
  CHECK(model.model.end(again) == 288);
}

TEST_CASE("records of other companions are none") {
  for (const int other : {0, 16}) {
    CAPTURE(other);
    const auto store = memory();
    {
      Tiered first(store, {32});
      first.answer(iota(0, 300));
      first.evict();
    }
    Tiered second(store, other == 0 ? std::vector<int>{} : std::vector<int>{other});
    auto missed = second.load(iota(0, 300));
    CHECK(missed.num_written() == 0);
    CHECK(second.tiers->stats().tiers[0].missed > 0);
    CHECK(second.tiers->stats().tiers[0].refused == 0);
    missed.leave();
    Tiered third(store, {32});
    auto found = third.load(iota(0, 300));
    CHECK(found.num_written() == 288);
  }
  Tiered model(memory(), {});
  TreeTiers::Options options;
  options.companions = {nullptr};
  CHECK(refused([&] { TreeTiers(model.model.tree, model.model.cache, {memory()}, options); }) ==
        "companions = null: expected no null pointers");
}

TEST_CASE("a block that was stored before its window was kept is stored again with it") {
  for (const bool is_slow : {false, true}) {  // the tier
    CAPTURE(is_slow);
    Tiered model(memory(), {32}, 1000, {}, /*write_through=*/true);
    {
      auto one = model.model.tree.insert(iota(0, 300));
      for (int i = 0; i < 29; ++i) {
        REQUIRE(model.model.step(one, 10));
        (void)model.tiers->advance(100);
        if (!is_slow) model.tiers->flush();
      }
      CHECK(model.tiers->stats().gathered == 18);
      model.model.compute(one);
    }
    const std::size_t before = model.tier->num_bytes();
    model.evict();
    const std::size_t row = model.model.groups[0]->kv.bytes_per_token();
    CHECK(model.tier->num_bytes() >= before + 16 * row);
    CHECK(model.tiers->stats().tiers[0].stored <= 18 + 2);  // those alone
    if (!is_slow) CHECK(model.tiers->stats().gathered <= 18 + 2);
    {
      auto again = model.load(iota(0, 300));
      CHECK(again.num_written() == 288);
      CHECK(model.model.end(again) == 288);
      model.model.compute(again);
    }
    const auto stored = model.tiers->stats().tiers[0].stored;
    model.evict();  // and not once more
    CHECK(model.tiers->stats().tiers[0].stored == stored);
  }
}

TEST_CASE("what others have stored is not stored again") {
  const auto store = memory();
  for (const bool again : {false, true}) {
    Tiered model(store, {32});
    model.answer(iota(0, 300));
    model.evict();
    CHECK(model.tiers->stats().gathered == 18);
    CHECK(model.tiers->stats().tiers[0].stored == (again ? 0 : 18));
  }
}

TEST_CASE("a block that was loaded without its window gets it when it is evicted again") {
  const auto store = memory();
  {
    Tiered first(store, {32}, 1000, /*max_cached=*/0);
    first.answer(iota(0, 300));
    first.evict();
  }
  Tiered second(store, {32});
  {
    auto again = second.load(iota(0, 300));
    CHECK(second.model.end(again) == 0);
    second.model.compute(again);
  }
  second.evict();
  auto again = second.load(iota(0, 300));
  CHECK(again.num_written() == 288);
  CHECK(second.model.end(again) == 288);
}

TEST_CASE("a group without room takes no rows, and holds nothing for them") {
  Tiered model(memory(), {32}, 7);
  model.answer(iota(0, 300), 16);
  model.evict();
  std::vector<Model::Sequence> others;
  for (int i = 1; i < 4; ++i) others.push_back(model.model.answer(iota(1000 * i, 20), 16));
  REQUIRE(model.model.groups[0]->layers.chunks_available() == 1);
  const auto before = model.model.groups[0]->layers.stats();
  auto again = model.load(iota(0, 300));
  CHECK(again.num_written() == 288);
  CHECK(model.model.end(again) == 0);
  const auto after = model.model.groups[0]->layers.stats();
  CHECK(after.used_chunks - after.cached_chunks == before.used_chunks - before.cached_chunks);
  for (const auto& other : others) model.model.check(other);
}

TEST_CASE("rows of tokens whose K/V is not there yet are not put back") {
  Tiered model(memory(), {32});
  model.answer(iota(0, 300));
  model.evict();
  auto writer = model.model.tree.insert(iota(0, 40));
  auto waits = model.load(iota(0, 300));
  CHECK(waits.num_written() == 0);  // before what has come are 40 tokens that are to be computed
  CHECK(model.tiers->stats().loaded_tokens == 288 - 40);
  CHECK(model.model.end(waits) == 0);
  CHECK(model.model.groups[0]->layers.stats().used_chunks == 0);
}

TEST_CASE("rows lie in files as they are, beside K/V that is rounded") {
  const test::tier_folder::Folder folder;
  std::optional<CompanionRows> before;
  for (const bool again : {false, true}) {
    Model model({32, 16}, 64);
    TreeTiers::Options options;
    options.threads = false;
    options.stored_as = ElementType::int8;
    options.companions = model.companions;
    TreeTiers tiers(model.tree, model.cache,
                    {std::make_shared<FileTier>(folder.path, std::uint64_t{1} << 28)}, options);
    auto one = model.tree.insert(iota(0, 300));
    if (again) {
      auto load = tiers.load(one);
      load.wait(one);
      CHECK(one.num_written() == 288);
      CHECK(model.end(one) == 288);
    } else {
      model.compute(one);
    }
    const CompanionRows rows = gather_rows(one, {257, 31}, model.groups[0]->kv);
    CHECK(rows.ranges == std::vector<TokenRange>{{257, 31}});
    if (before) CHECK(rows.bytes == before->bytes);
    before = rows;
    one.leave();
    tiers.store_all();
    tiers.flush();
  }
}

TEST_CASE("rows of a block are what its mask says") {
  const detail::TierRowShapes shapes{.block = 10, .widths = {2, 3}};
  CHECK(shapes.most_bytes() == 2 + 20 + 2 + 30);
  CompanionRows one, two;
  one.bytes_per_token = 2;
  two.bytes_per_token = 3;
  for (const std::int32_t p : {40, 42, 49}) std::fill_n(one.add(p), 2, static_cast<std::byte>(p));
  for (const std::int32_t p : {41, 47, 48}) std::fill_n(two.add(p), 3, static_cast<std::byte>(p));
  std::vector<std::byte> bytes;
  detail::put_tier_rows(shapes, one, 40, bytes);
  detail::put_tier_rows(shapes, two, 40, bytes);
  CHECK(bytes.size() == 2 + 6 + 2 + 9);
  std::vector<std::size_t> found;
  const auto take = [&](std::size_t c, std::size_t i, const std::byte* row) {
    found.insert(found.end(), {c, i, static_cast<std::size_t>(row[1])});
  };
  CHECK(detail::for_each_tier_row_of(shapes, bytes, take));
  CHECK(found ==
        std::vector<std::size_t>{0, 0, 40, 0, 2, 42, 0, 9, 49, 1, 1, 41, 1, 7, 47, 1, 8, 48});
  const auto is_read = [&](std::vector<std::byte> damaged) {
    return detail::for_each_tier_row_of(shapes, damaged, [](auto...) {});
  };
  CHECK(is_read(bytes));
  for (std::size_t size = 0; size < bytes.size(); ++size)
    CHECK_FALSE(is_read(
        std::vector<std::byte>(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size))));
  std::vector<std::byte> longer = bytes;
  longer.push_back({});
  CHECK_FALSE(is_read(longer));
  std::vector<std::byte> beyond = bytes;  // a token that the block does not have
  beyond[1] = std::byte{0x04};
  CHECK_FALSE(is_read(beyond));
}

TEST_CASE("rows are dropped from either end") {
  CompanionRows rows;
  rows.bytes_per_token = 1;
  for (const std::int32_t p : {3, 4, 5, 9, 10, 20}) *rows.add(p) = static_cast<std::byte>(p);
  const auto left = [&](std::int32_t begin, std::size_t end) {
    CompanionRows some = rows;
    detail::drop_rows_before(some, begin);
    detail::cut_rows(some, end);
    std::vector<int> positions;
    some.for_each([&](std::int32_t position, const std::byte* row) {
      CHECK(static_cast<int>(*row) == position);
      positions.push_back(position);
    });
    CHECK(some.bytes.size() == positions.size());
    for (const TokenRange range : some.ranges) CHECK(range.length > 0);
    return positions;
  };
  const std::vector<int> all{3, 4, 5, 9, 10, 20};
  for (int begin = 0; begin < 23; ++begin)
    for (int end = 0; end < 23; ++end) {
      std::vector<int> expected;
      for (const int p : all)
        if (p >= begin && p < end) expected.push_back(p);
      CHECK(left(begin, static_cast<std::size_t>(end)) == expected);
    }
}

TEST_CASE("of windows that come the last whole one is kept, a row before, and what follows it") {
  Model model({10}, 64);
  auto& kv = model.groups[0]->kv;
  const auto trimmed = [&](std::vector<TokenRange> ranges) {
    CompanionRows rows = detail::no_rows_of(kv);
    for (const TokenRange range : ranges)
      for (std::int32_t p = range.begin; p < range.end(); ++p) (void)rows.add(p);
    kv.trim(rows);
    return rows.ranges;
  };
  using Ranges = std::vector<TokenRange>;
  CHECK(trimmed({{0, 30}}) == Ranges{{20, 10}});
  CHECK(trimmed({{0, 30}, {50, 8}}) == Ranges{{20, 10}, {50, 8}});
  CHECK(trimmed({{0, 30}, {50, 9}}) == Ranges{{50, 9}});
  CHECK(trimmed({{5, 3}, {20, 8}}) == Ranges{{5, 3}, {20, 8}});  // the pool may have those before
  CHECK(trimmed({{5, 3}, {20, 12}}) == Ranges{{22, 10}});
  CHECK(trimmed({{0, 4}}) == Ranges{{0, 4}});
  CHECK(trimmed({}).empty());
}

TEST_CASE("at random, what comes back from tiers is what went there") {
  test::Random random(7);
  std::size_t loaded = 0, resumed = 0;
  for (int round = 0; round < test::scaled(6); ++round) {
    const std::vector<int> windows =
        round % 2 == 0 ? std::vector<int>{32} : std::vector<int>{40, 7};
    Tiered model(std::make_shared<MemoryTier>(std::size_t{1} << random.uniform(16, 24)), windows,
                 static_cast<std::size_t>(random.uniform(30, 80)),
                 static_cast<std::size_t>(random.uniform(0, 30)), random.chance(0.5), 40);
    std::vector<Tokens> texts;
    for (int i = 0; i < 4; ++i) {
      Tokens text(static_cast<std::size_t>(random.uniform(60, 200)));
      for (int& token : text) token = random.uniform(0, 2);
      if (i > 0) std::copy_n(texts[0].begin(), 50, text.begin());
      texts.push_back(text);
    }
    std::vector<Model::Sequence> live;
    for (int i = 0; i < 300; ++i) {
      const int what = random.uniform(0, 9);
      if (what < 2 && live.size() < 4) {
        Tokens prompt = texts[random.index(texts.size())];
        prompt.resize(1 + random.index(prompt.size()));
        if (auto one = model.model.tree.try_insert(prompt)) {
          const std::size_t before = one->num_written();
          auto load = model.tiers->load(*one);
          for (int n = random.uniform(0, 40); n > 0 && load.poll(*one); --n)
            (void)model.tiers->work();
          load.cancel();
          loaded += one->num_written() - before;
          if (one->num_pending() == 0) resumed += model.model.end(*one) > before;
          live.push_back(std::move(*one));
        }
      } else if (what == 2 && !live.empty()) {
        live.erase(live.begin() + static_cast<std::ptrdiff_t>(random.index(live.size())));
      } else if (what == 3) {
        (void)model.tiers->advance(random.index(8));
        for (int n = random.uniform(0, 20); n > 0 && model.tiers->work();) --n;
      } else if (what == 4) {
        if (const std::size_t n = model.model.tree.chunks_available(); n > 0)
          (void)model.model.tree.try_insert(Tokens(16 * n, -1));
      } else if (!live.empty()) {
        try {
          (void)model.model.step(live[random.index(live.size())],
                                 static_cast<std::size_t>(random.uniform(1, 60)));
        } catch (const OutOfChunks&) {
          live.pop_back();
        }
      }
      model.model.check();
      for (const auto& one : live) model.model.check(one);
    }
  }
  CHECK(loaded > 0);
  CHECK(resumed > 0);
}
