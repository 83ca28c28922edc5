// Masks as forests of segments: that each row of the plan sees the cells that the mask shows it,
// once each, whatever the mask; and that masks which are forests become one.
#include "examples/ggml/src/mask_forest.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "support/random.hpp"

namespace {

using chunkattn::PlanView;
using plugin::MaskForest;
using plugin::MaskView;

constexpr std::uint16_t shown = 0, minus_zero = 0x8000, masked = 0xfc00, one_half = 0x3800;

/// A mask [streams][rows][cells] with room after each row.
struct Mask {
  static constexpr int gap = 5;
  int streams, rows, cells;
  std::vector<std::uint16_t> bits;

  Mask(int num_streams, int num_rows, int num_cells)
      : streams(num_streams),
        rows(num_rows),
        cells(num_cells),
        bits(static_cast<std::size_t>(num_streams * num_rows * (num_cells + gap)), one_half) {
    for (int s = 0; s < streams; ++s)
      for (int r = 0; r < rows; ++r)
        for (int c = 0; c < cells; ++c) at(s, r, c) = masked;
  }
  std::uint16_t& at(int stream, int row, int cell) {
    return bits[static_cast<std::size_t>((stream * rows + row) * (cells + gap) + cell)];
  }
  [[nodiscard]] MaskView view() const {
    return {bits.data(), streams, rows, cells, cells + gap, std::int64_t{rows} * (cells + gap)};
  }
};

/// The cells that a row of the plan sees, in the order of its path.
std::vector<int> path_of(const PlanView& plan, int row, int stream) {
  std::vector<int> segments, cells;
  for (int s = plan.row_segment[row]; s >= 0; s = plan.segments[s].parent) segments.push_back(s);
  std::reverse(segments.begin(), segments.end());
  int position = 0;
  for (const int s : segments) {
    const PlanView::Segment& segment = plan.segments[s];
    REQUIRE(segment.position == position);
    REQUIRE(row >= segment.row_begin);
    REQUIRE(row < segment.row_end);
    int length = 0;
    for (int p = segment.piece_begin; p < segment.piece_begin + segment.num_pieces; ++p) {
      const chunkattn::Piece& piece = plan.pieces[p];
      REQUIRE(piece.position == position + length);
      REQUIRE(static_cast<int>(piece.chunk) == stream);
      REQUIRE(piece.length > 0);
      const int visible = chunkattn::visible_length(piece, plan.row_kv_len[row]);
      for (int i = 0; i < visible; ++i) cells.push_back(piece.begin + i);
      length += piece.length;
    }
    REQUIRE(length == segment.length);
    position += length;
  }
  REQUIRE(plan.row_kv_len[row] <= position);
  REQUIRE(plan.row_kv_len[row] == static_cast<int>(cells.size()));
  return cells;
}

/// What holds of the plan of any mask.
void check(Mask& mask, const MaskForest& forest) {
  const PlanView plan = forest.plan();
  REQUIRE(plan.num_rows == mask.streams * mask.rows);
  REQUIRE(plan.chunk_size == mask.cells);
  std::set<int> tokens;
  for (int row = 0; row < plan.num_rows; ++row) {
    const int token = plan.row_token[row];
    REQUIRE(tokens.insert(token).second);
    const int stream = token / mask.rows, r = token % mask.rows;
    std::vector<int> cells = path_of(plan, row, stream);
    std::sort(cells.begin(), cells.end());
    std::vector<int> expected;
    for (int c = 0; c < mask.cells; ++c) {
      const std::uint16_t bits = mask.at(stream, r, c);
      if (!forest.has_table()) {
        if (bits != masked) expected.push_back(c);
        continue;
      }
      const float value = forest.table()[static_cast<std::size_t>(token * mask.cells + c)];
      CHECK(value == (bits == masked     ? -std::numeric_limits<float>::infinity()
                      : bits == one_half ? 0.5f
                                         : 0.0f));
      if (c < static_cast<int>(cells.size())) expected.push_back(c);
      if (bits != masked) CHECK(c < static_cast<int>(cells.size()));
    }
    CHECK(cells == expected);
  }
  CHECK(*tokens.begin() == 0);
  CHECK(*tokens.rbegin() == plan.num_rows - 1);
  for (int s = 0; s < plan.num_segments; ++s) CHECK(plan.segments[s].parent < s);
}

/// Shows cells to rows as a random forest does: a set of rows gets some cells, its parts get
/// others.
void grow(Mask& mask, int stream, std::vector<int> rows, std::vector<int>& free_cells,
          test::Random& random) {
  const auto take = std::min<std::size_t>(free_cells.size(), random.index(9));
  for (std::size_t i = 0; i < take; ++i) {
    for (const int row : rows) mask.at(stream, row, free_cells.back()) = shown;
    free_cells.pop_back();
  }
  if (rows.size() < 2) return;
  random.shuffle(rows);
  while (!rows.empty() && !random.chance(0.125)) {
    const auto count = static_cast<std::ptrdiff_t>(1 + random.index(rows.size()));
    const std::vector<int> part(rows.end() - count, rows.end());
    rows.erase(rows.end() - count, rows.end());
    grow(mask, stream, part, free_cells, random);
  }
}

/// Whether the sets of rows that see each cell are nested or disjoint.
bool is_forest(Mask& mask) {
  for (int s = 0; s < mask.streams; ++s)
    for (int a = 0; a < mask.cells; ++a)
      for (int b = 0; b < a; ++b) {
        bool only_a = false, only_b = false, both = false;
        for (int r = 0; r < mask.rows; ++r) {
          const bool sees_a = mask.at(s, r, a) != masked, sees_b = mask.at(s, r, b) != masked;
          only_a |= sees_a && !sees_b;
          only_b |= sees_b && !sees_a;
          both |= sees_a && sees_b;
        }
        if (only_a && only_b && both) return false;
      }
  return true;
}

TEST_CASE("random forests are found, whatever the order of cells and rows") {
  test::Random random(1);
  for (int round = 0; round < test::scaled(300); ++round) {
    Mask mask(random.uniform(1, 3), random.uniform(1, 12), random.uniform(1, 80));
    for (int s = 0; s < mask.streams; ++s) {
      std::vector<int> rows, cells;
      for (int r = 0; r < mask.rows; ++r) rows.push_back(r);
      for (int c = 0; c < mask.cells; ++c) cells.push_back(c);
      random.shuffle(cells);
      cells.resize(random.index(cells.size() + 1));                 // the others are seen by no row
      if (random.chance(0.25) && rows.size() > 2) rows.pop_back();  // sees nothing
      grow(mask, s, rows, cells, random);
    }
    MaskForest forest;
    REQUIRE(forest.update(mask.view()));
    CHECK(!forest.has_table());
    check(mask, forest);
  }
}

TEST_CASE("random masks become a forest if they are one, else a table") {
  test::Random random(2);
  int forests = 0, tables = 0;
  MaskForest forest;
  for (int round = 0; round < 2000; ++round) {
    Mask mask(random.uniform(1, 2), random.uniform(1, 4), random.uniform(1, 6));
    for (int s = 0; s < mask.streams; ++s)
      for (int r = 0; r < mask.rows; ++r)
        for (int c = 0; c < mask.cells; ++c)
          if (random.chance(0.5)) mask.at(s, r, c) = random.chance(0.5) ? shown : minus_zero;
    const bool expected = is_forest(mask);
    forest.update(mask.view());
    CHECK(forest.has_table() == !expected);
    check(mask, forest);
    ++(expected ? forests : tables);
    mask.at(0, 0, 0) = one_half;
    REQUIRE(forest.update(mask.view()));
    CHECK(forest.has_table());
    check(mask, forest);
  }
  CHECK(forests > 100);
  CHECK(tables > 100);
}

TEST_CASE("a causal prompt after a shared prefix is few segments") {
  Mask mask(1, 200, 700);
  for (int r = 0; r < 200; ++r)
    for (int c = 0; c <= 500 + r; ++c) mask.at(0, r, c) = shown;
  MaskForest forest;
  forest.update(mask.view());
  CHECK(!forest.has_table());
  CHECK(forest.plan().num_segments <= 5);
  check(mask, forest);
}

TEST_CASE("decoding sequences that share a prompt: one segment for it, one for each tail") {
  // Cells after the prompt are the sequences' in turn, as llama.cpp fills them.
  constexpr int sequences = 8, prompt = 300, steps = 5;
  Mask mask(1, sequences, prompt + sequences * steps + 16);
  for (int r = 0; r < sequences; ++r) {
    for (int c = 0; c < prompt; ++c) mask.at(0, r, c) = shown;
    for (int step = 0; step < steps; ++step) mask.at(0, r, prompt + step * sequences + r) = shown;
  }
  MaskForest forest;
  forest.update(mask.view());
  const PlanView plan = forest.plan();
  CHECK(!forest.has_table());
  REQUIRE(plan.num_segments == 1 + sequences);
  CHECK(plan.segments[0].num_sequences == sequences);
  CHECK(plan.segments[0].num_pieces == 1);
  CHECK(plan.segments[0].length == prompt);
  check(mask, forest);
}

TEST_CASE("a window that moves is no forest") {
  Mask mask(1, 10, 30);
  for (int r = 0; r < 10; ++r)
    for (int c = r; c < r + 15; ++c) mask.at(0, r, c) = shown;
  MaskForest forest;
  forest.update(mask.view());
  CHECK(forest.has_table());
  check(mask, forest);
  CHECK(forest.plan().row_kv_len[0] == 24);  // no row sees the cells after it
}

TEST_CASE("a plan is kept while the mask has the same bits") {
  Mask mask(2, 3, 20);
  for (int r = 0; r < 3; ++r)
    for (int c = 0; c < 10 + r; ++c) mask.at(0, r, c) = mask.at(1, r, c) = shown;
  MaskForest forest;
  CHECK(forest.update(mask.view()));
  CHECK(!forest.update(mask.view()));
  const Mask same = mask;
  CHECK(!forest.update(same.view()));
  mask.at(1, 2, 12) = shown;
  CHECK(forest.update(mask.view()));
  check(mask, forest);
  MaskView narrower = mask.view();
  --narrower.cells;
  CHECK(forest.update(narrower));
  MaskView one_for_all = mask.view();
  one_for_all.stream_stride = 0;
  CHECK(forest.update(one_for_all));
  MaskView none = mask.view();
  none.bits = nullptr;
  CHECK(forest.update(none));
  CHECK(!forest.update(none));
  CHECK(!forest.has_table());
  for (int row = 0; row < 6; ++row) CHECK(forest.plan().row_kv_len[row] == 20);
}

}  // namespace
