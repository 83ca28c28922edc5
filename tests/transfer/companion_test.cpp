// What a component keeps of tokens travels with their K/V: only what there is, only of tokens whose
// K/V is there, and only in the shape that it had.
#include "chunkattn/transfer/companion.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;
using test::refused;

namespace {

using Tree = PrefixTree<int, 8, PoolAllocator, test::NoRetention>;
using Sequence = Tree::Sequence;
using Cache = KvCache<Cpu, float>;
constexpr KvCacheOptions geometry{.num_layers = 2, .num_kv_heads = 1, .head_dim = 8};

/// A number for each slot of a tree, perhaps.
class Marks final : public KvCompanion<Sequence> {
 public:
  std::map<std::pair<ChunkIndex, std::int32_t>, std::uint64_t> marks;
  std::string name = "marks 1";
  std::size_t room = 1000, last = Sequence::whole, multiple_of = 1;
  std::vector<std::size_t> resumed;

  [[nodiscard]] std::string format() const override { return name; }
  [[nodiscard]] std::size_t bytes_per_token() const override { return sizeof(std::uint64_t); }
  void gather(std::span<const Piece> places, CompanionRows& rows) override {
    for (const Piece& piece : places)
      for (std::int32_t i = 0; i < piece.length; ++i)
        if (const auto found = marks.find({piece.chunk, piece.begin + i}); found != marks.end())
          std::memcpy(rows.add(piece.position + i), &found->second, sizeof(found->second));
  }
  void scatter(Sequence& sequence, const CompanionRows& rows) override {
    rows.for_each([&](std::int32_t position, const std::byte* row) {
      sequence.for_each_run({position, 1}, [&](const Piece& piece) {
        std::uint64_t mark = 0;
        std::memcpy(&mark, row, sizeof(mark));
        marks.insert({{piece.chunk, piece.begin}, mark});
      });
    });
  }
  [[nodiscard]] bool reserve(Sequence&, const CompanionRows& rows) override {
    return rows.bytes.size() <= room * sizeof(std::uint64_t);
  }
  [[nodiscard]] std::size_t end(const Sequence&, std::size_t limit) const override {
    return std::min(limit, last) / multiple_of * multiple_of;
  }
  void resume(Sequence&, std::size_t position) override { resumed.push_back(position); }

  void set(const Sequence& sequence, std::int32_t position, std::uint64_t mark) {
    sequence.for_each_run({position, 1},
                          [&](const Piece& piece) { marks[{piece.chunk, piece.begin}] = mark; });
  }
  [[nodiscard]] std::uint64_t at(const Sequence& sequence, std::int32_t position) const {
    std::uint64_t mark = 0;
    sequence.for_each_run({position, 1}, [&](const Piece& piece) {
      const auto found = marks.find({piece.chunk, piece.begin});
      if (found != marks.end()) mark = found->second;
    });
    return mark;
  }
};

/// Says no more than it has to.
class Plain final : public KvCompanion<Sequence> {
 public:
  std::vector<TokenRange> scattered;

  [[nodiscard]] std::string format() const override { return "plain"; }
  [[nodiscard]] std::size_t bytes_per_token() const override { return 1; }
  void gather(std::span<const Piece> places, CompanionRows& rows) override {
    for (const Piece& piece : places)
      for (std::int32_t i = 0; i < piece.length; ++i) *rows.add(piece.position + i) = std::byte{9};
  }
  void scatter(Sequence&, const CompanionRows& rows) override { scattered = rows.ranges; }
};

struct Bench {
  Tree tree{PoolAllocator{.max_chunks = 32}};
  Cache cache{tree, geometry};
  Marks marks;

  /// A sequence of which so many tokens have K/V, every third of them a mark.
  Sequence computed(const std::vector<int>& tokens, std::size_t count) {
    Sequence sequence = tree.insert(tokens);
    TokenRange range = sequence.loadable();
    range.length = std::min(range.length, static_cast<std::int32_t>(count) - range.begin);
    for_each_kv_span(sequence, range, cache, [&](const KvSpan<float>& span) {
      for (int t = 0; t < span.length; ++t)
        for (int i = 0; i < geometry.head_dim; ++i)
          span.k[t * span.stride_token + i] = span.v[t * span.stride_token + i] =
              static_cast<float>(span.position + t);
    });
    if (!range.empty()) sequence.mark_loaded(range);
    for (std::int32_t p = 0; p < static_cast<std::int32_t>(count); p += 3)
      marks.set(sequence, p, 1000 + static_cast<std::uint64_t>(p));
    return sequence;
  }
  void forget() {
    tree.clear();
    marks.marks.clear();
  }
};

}  // namespace

TEST_CASE("a companion that says no more is whole wherever K/V is, and is waited for by nobody") {
  Bench b;
  Plain plain;
  auto goes = b.computed(iota(0, 30), 25);
  const auto swapped = swap_out(goes, b.cache, {&plain});
  CHECK(swapped.companions[0].ranges == std::vector<TokenRange>{{0, 25}});
  auto back = resume(b.tree, b.cache, swapped, {&plain});
  REQUIRE(back);
  CHECK(back->num_scheduled() == 25);
  CHECK(plain.scattered == std::vector<TokenRange>{{0, 25}});
  CHECK(plain.end(*back, 30) == 30);
  CompanionRows lasting = detail::no_rows_of<Tree::Sequence>(plain);
  plain.gather_lasting(std::vector<Piece>{{0, 0, 4, 0}}, lasting);
  CHECK(lasting.ranges == std::vector<TokenRange>{{0, 4}});
  KvCompanion<Tree::Sequence>& any = plain;
  any.trim(lasting);
  CHECK(lasting.bytes.size() == 4);
  REQUIRE(scatter_rows(*back, lasting, plain));
}

TEST_CASE("rows travel with a swapped sequence's own K/V, and only those that there are") {
  Bench b;
  const auto other = b.computed(iota(0, 10), 10);
  auto goes = b.computed(iota(0, 30), 25);
  auto swapped = swap_out(goes, b.cache, {&b.marks});
  REQUIRE(swapped.companions.size() == 1);
  const CompanionRows& rows = swapped.companions[0];
  CHECK(rows.format == "marks 1");
  CHECK(rows.ranges == std::vector<TokenRange>{{12, 1}, {15, 1}, {18, 1}, {21, 1}, {24, 1}});
  CHECK(rows.bytes.size() == 5 * sizeof(std::uint64_t));
  b.marks.marks.clear();
  auto back = resume(b.tree, b.cache, swapped, {&b.marks});
  REQUIRE(back);
  CHECK(back->num_written() == 25);
  CHECK(b.marks.at(*back, 9) == 0);  // the other one's
  CHECK(b.marks.at(*back, 12) == 1012);
  CHECK(b.marks.at(*back, 13) == 0);
  CHECK(b.marks.at(*back, 24) == 1024);
  CHECK(b.marks.resumed == std::vector<std::size_t>{25});
}

TEST_CASE("a row whose token is computed again stays behind") {
  Bench b;
  auto goes = b.computed(iota(0, 13), 13);  // row 12 has a mark
  auto swapped = swap_out(goes, b.cache, {&b.marks});
  swapped.options.compute_last = true;
  CHECK(swapped.companions[0].ranges.back() == TokenRange{12, 1});
  b.marks.marks.clear();
  auto back = resume(b.tree, b.cache, swapped, {&b.marks});
  REQUIRE(back);
  CHECK(back->num_written() == 12);
  CHECK(b.marks.at(*back, 9) == 1009);
  CHECK(b.marks.at(*back, 12) == 0);
  CHECK(b.marks.resumed == std::vector<std::size_t>{12});
}

TEST_CASE("all companions go on where the last of them can") {
  Bench b;
  Marks near;
  near.name = "near";
  near.last = 17;
  auto goes = b.computed(iota(0, 30), 25);
  const auto swapped = swap_out(goes, b.cache, {&b.marks, &near});
  CHECK(swapped.companions.size() == 2);
  CHECK(swapped.companions[1].ranges.empty());
  auto back = resume(b.tree, b.cache, swapped, {&b.marks, &near});
  REQUIRE(back);
  CHECK(b.marks.resumed == std::vector<std::size_t>{17});
  CHECK(near.resumed == std::vector<std::size_t>{17});
}

TEST_CASE("they go on where all can, wherever each could alone") {
  Bench b;
  Marks even, third;
  even.multiple_of = 2;
  third.multiple_of = 3;
  auto goes = b.computed(iota(0, 30), 23);  // 22, 21, 20, 18
  const auto swapped = swap_out(goes, b.cache, {&even, &third});
  auto back = resume(b.tree, b.cache, swapped, {&even, &third});
  REQUIRE(back);
  CHECK(even.resumed == std::vector<std::size_t>{18});
  CHECK(third.resumed == std::vector<std::size_t>{18});
}

TEST_CASE("they go on at a token that is computed again, although its K/V is there") {
  Bench b;
  const auto other = b.computed(iota(0, 13), 13);
  auto goes = b.computed(iota(0, 13), 13);
  auto swapped = swap_out(goes, b.cache, {&b.marks});
  swapped.options.compute_last = true;
  auto back = resume(b.tree, b.cache, swapped, {&b.marks});
  REQUIRE(back);
  CHECK(back->num_written() == 13);
  CHECK(b.marks.resumed == std::vector<std::size_t>{12});
}

TEST_CASE("a companion without room leaves a swapped sequence where it is") {
  Bench b;
  auto goes = b.computed(iota(0, 30), 25);
  const auto swapped = swap_out(goes, b.cache, {&b.marks});
  b.marks.marks.clear();
  b.marks.room = 8;
  const auto before = b.tree.stats();
  CHECK(!resume(b.tree, b.cache, swapped, {&b.marks}));
  CHECK(b.tree.stats().used_chunks == before.used_chunks);
  CHECK(b.tree.stats().live_sequences == 0);
  CHECK(b.marks.marks.empty());
  CHECK(b.marks.resumed.empty());
  b.marks.room = 9;
  CHECK(resume(b.tree, b.cache, swapped, {&b.marks}));
}

TEST_CASE("rows of old weights are not put back") {
  Bench b;
  auto goes = b.computed(iota(0, 30), 25);
  const auto swapped = swap_out(goes, b.cache, {&b.marks});
  b.forget();
  auto back = resume(b.tree, b.cache, swapped, {&b.marks});
  REQUIRE(back);
  CHECK(back->num_written() == 0);
  CHECK(b.marks.marks.empty());
}

TEST_CASE("rows that do not fit their companion are refused by name, with nothing changed") {
  Bench b;
  auto goes = b.computed(iota(0, 30), 25);
  const auto swapped = swap_out(goes, b.cache, {&b.marks});
  b.marks.marks.clear();
  const auto resumed = [&](auto change) {
    auto damaged = swapped;
    change(damaged);
    const auto said = refused([&] { (void)resume(b.tree, b.cache, damaged, {&b.marks}); });
    CHECK(b.tree.stats().live_sequences == 0);
    CHECK(b.marks.marks.empty());
    return said;
  };
  using Swapped = SwappedSequence<int>;
  CHECK(resumed([](Swapped& s) { s.companions.clear(); }) ==
        "swapped.companions.size() = 0: expected rows of each of the 1 companions");
  CHECK(resumed([](Swapped& s) { s.companions[0].format = "marks 2"; }) ==
        "rows.format = marks 2: expected the companion's format(), marks 1");
  CHECK(resumed([](Swapped& s) { s.companions[0].bytes_per_token = 4; }) ==
        "rows.bytes_per_token = 4: expected the companion's bytes_per_token(), 8");
  CHECK(resumed([](Swapped& s) { s.companions[0].bytes.pop_back(); }) ==
        "rows.bytes.size() = 71: expected 8 bytes for each of 9 tokens");
  CHECK(resumed([](Swapped& s) { s.companions[0].ranges.back().begin = 25; }) ==
        "rows.ranges = 25: expected positions of tokens whose K/V is in place, below 25");
  CHECK(resumed([](Swapped& s) { s.companions[0].ranges.back().length = 2147483647; }) ==
        "rows.ranges = 2147483670: expected positions of tokens whose K/V is in place, below 25");
  CHECK(resumed([](Swapped& s) { s.companions[0].ranges[3] = {6, 1}; }) ==
        "rows.ranges = 6: expected positions in order, none twice");
  CHECK(resumed([](Swapped& s) { s.companions[0].ranges[0] = {-1, 1}; }) ==
        "rows.ranges = -1: expected positions in order, none twice");
  CHECK(resumed([](Swapped& s) { s.companions[0].ranges[3].length = 0; }) ==
        "rows.ranges = 9: expected positions in order, none twice");
  CHECK(refused([&] { (void)resume(b.tree, b.cache, swapped); }) ==
        "swapped.companions.size() = 1: expected rows of each of the 0 companions");
  CHECK(refused([&] { (void)resume(b.tree, b.cache, swapped, {nullptr}); }) ==
        "companions = null: expected no null pointers");
  auto stays = b.computed(iota(0, 30), 25);
  CHECK(refused([&] { (void)swap_out(stays, b.cache, {nullptr}); }) ==
        "companions = null: expected no null pointers");
  CHECK(stays.size() == 30);
}

TEST_CASE("rows are saved and put back by hand, of tokens whose K/V is in place") {
  Bench b;
  auto from = b.computed(iota(0, 30), 25);
  const CompanionRows rows = gather_rows(from, {4, 20}, b.marks);
  CHECK(rows.ranges == std::vector<TokenRange>{{6, 1}, {9, 1}, {12, 1}, {15, 1}, {18, 1}, {21, 1}});
  CHECK(refused([&] {
          (void)gather_rows(from, {4, 22}, b.marks);
        }).starts_with("range.end() = 26: expected at most the sequence's num_written()"));
  CHECK(gather_rows(from, {4, 0}, b.marks).ranges.empty());
  auto to = b.tree.insert(iota(100, 30));
  CHECK(refused([&] { (void)scatter_rows(to, rows, b.marks); }) ==
        "rows.ranges = 6: expected positions of tokens whose K/V is in place, below 0");
  to.mark_loaded({0, 24});
  b.marks.room = 5;
  CHECK(!scatter_rows(to, rows, b.marks));
  CHECK(b.marks.at(to, 6) == 0);
  b.marks.room = 6;
  b.marks.set(to, 9, 5);
  CHECK(scatter_rows(to, rows, b.marks));
  CHECK(b.marks.at(to, 6) == 1006);
  CHECK(b.marks.at(to, 9) == 5);  // what is there stays
  CHECK(b.marks.at(to, 21) == 1021);
  CHECK(b.marks.at(to, 3) == 0);
  CHECK(b.marks.at(to, 24) == 0);
}

TEST_CASE("rows of neighbours are one range") {
  Bench b;
  auto one = b.computed(iota(0, 30), 25);
  b.marks.set(one, 7, 7);
  b.marks.set(one, 8, 8);  // in the next chunk
  const CompanionRows rows = gather_rows(one, {5, 6}, b.marks);
  CHECK(rows.ranges == std::vector<TokenRange>{{6, 4}});
  std::vector<std::uint64_t> found;
  rows.for_each([&](std::int32_t position, const std::byte* row) {
    std::uint64_t mark = 0;
    std::memcpy(&mark, row, sizeof(mark));
    found.insert(found.end(), {static_cast<std::uint64_t>(position), mark});
  });
  CHECK(found == std::vector<std::uint64_t>{6, 1006, 7, 7, 8, 8, 9, 1009});
}
