// What tiers know of a tree by its events, which are made up here.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "chunkattn/tiers/detail/spans.hpp"

using namespace chunkattn;
using Spans = detail::TierSpans<int>;

namespace {

/// Four tokens of a span, from a position on.
CacheEvent four(std::uint64_t span, std::uint64_t parent, std::int32_t position, ChunkIndex chunk,
                std::int32_t offset) {
  return {.kind = CacheEvent::Kind::stored,
          .span = span,
          .parent = parent,
          .position = position,
          .length = 4,
          .first_chunk = chunk,
          .first_offset = offset};
}
bool store(Spans& spans, const CacheEvent& event) {
  std::vector<int> tokens(static_cast<std::size_t>(event.length));
  std::iota(tokens.begin(), tokens.end(), event.position);
  return spans.store(event, tokens, [](std::size_t) {});
}

}  // namespace

TEST_CASE("what follows tokens that are not known is refused") {
  Spans spans(4);
  CHECK_FALSE(store(spans, four(7, 3, 4, 0, 0)));
  CHECK(spans.num_spans() == 0);
  CHECK(store(spans, four(3, 0, 0, 0, 0)));
  CHECK(store(spans, four(7, 3, 4, 1, 0)));
  CHECK_FALSE(store(spans, four(7, 7, 12, 1, 4)));  // 8 to 12 are missing
}

TEST_CASE("pieces of a block are adjacent within one chunk only") {
  const auto pieces_of = [](ChunkIndex next, std::int32_t offset) {
    Spans spans(8);
    REQUIRE(store(spans, four(1, 0, 0, 5, 0)));
    REQUIRE(store(spans, four(1, 1, 4, next, offset)));
    std::vector<Piece> pieces;
    spans.pieces_of(*spans.find(1, 0), 0, pieces);
    return pieces;
  };
  const auto together = pieces_of(5, 4), moved = pieces_of(6, 4), apart = pieces_of(5, 8);
  REQUIRE(together.size() == 1);
  CHECK(together[0].length == 8);
  REQUIRE(moved.size() == 2);
  CHECK(moved[0].chunk == 5);
  CHECK(moved[1].chunk == 6);
  CHECK(moved[1].begin == 4);
  CHECK(moved[1].position == 4);
  REQUIRE(apart.size() == 2);
  CHECK(apart[1].begin == 8);
}

TEST_CASE("what is not the end of a span does not go") {
  Spans spans(4);
  REQUIRE(store(spans, four(1, 0, 0, 5, 0)));
  REQUIRE(store(spans, four(1, 1, 4, 6, 0)));
  REQUIRE(store(spans, four(2, 1, 8, 7, 0)));
  const auto goes = [&](std::uint64_t span, std::int32_t position) {
    CacheEvent event = four(span, 0, position, 0, 0);
    event.kind = CacheEvent::Kind::evicted;
    return spans.evict(event, [](std::uint64_t, std::size_t) {});
  };
  CHECK_FALSE(goes(3, 0));
  CHECK_FALSE(goes(1, 0));
  CHECK_FALSE(goes(2, 6));
  CHECK_FALSE(goes(2, 4));
  CHECK(spans.find(1, 1) != nullptr);
  CHECK(spans.find(2, 2) != nullptr);
  CHECK(goes(2, 8));
  CHECK(spans.find(2, 2) == nullptr);
}

TEST_CASE("a piece goes with its tokens") {
  Spans spans(4);
  CacheEvent last = four(1, 1, 4, 6, 0);
  REQUIRE(store(spans, four(1, 0, 0, 5, 0)));
  REQUIRE(store(spans, last));
  const auto pieces_of = [&](std::size_t block) {
    std::vector<Piece> pieces;
    spans.pieces_of(*spans.find(1, block), block, pieces);
    return pieces;
  };
  REQUIRE(pieces_of(0).size() == 1);  // the other begins where it ends
  CHECK(pieces_of(0)[0].chunk == 5);
  CHECK(pieces_of(1)[0].chunk == 6);
  last.kind = CacheEvent::Kind::evicted;
  CHECK(spans.evict(last, [](std::uint64_t, std::size_t block) { CHECK(block == 1); }));
  REQUIRE(spans.find(1, 0) != nullptr);
  CHECK(spans.find(1, 0)->pieces.size() == 1);
  REQUIRE(store(spans, four(1, 1, 4, 7, 0)));
  REQUIRE(pieces_of(1).size() == 1);
  CHECK(pieces_of(1)[0].chunk == 7);
}
