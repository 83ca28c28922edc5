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

TEST_CASE("pieces of a block lie together within one chunk only") {
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
