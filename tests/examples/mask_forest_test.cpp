// Masks as forests of segments: that each row of the plan sees the cells that the mask shows it,
// once each, whatever the mask; that masks which are forests become one; and when a plan is that of
// another layer.
#include "examples/ggml/src/mask_forest.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "examples/ggml/src/evaluations.hpp"
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
    const bool large = random.chance(0.1);
    Mask mask(random.uniform(1, 3), random.uniform(1, large ? 200 : 12),
              random.uniform(1, large ? 400 : 80));
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
    forest.build(mask.view());
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
    forest.build(mask.view());
    CHECK(forest.has_table() == !expected);
    check(mask, forest);
    ++(expected ? forests : tables);
    mask.at(0, 0, 0) = one_half;
    forest.build(mask.view());
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
  forest.build(mask.view());
  CHECK(!forest.has_table());
  CHECK(forest.plan().num_segments <= 5);
  CHECK(forest.plan().num_pieces == forest.plan().num_segments);  // not one for each token
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
  forest.build(mask.view());
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
  forest.build(mask.view());
  CHECK(forest.has_table());
  check(mask, forest);
  CHECK(forest.plan().row_kv_len[0] == 24);  // no row sees the cells after it
}

TEST_CASE("two prompts in one batch are a path each") {
  // Rows of 40 tokens of each after 100 cells of its own, as llama.cpp puts them after one another.
  Mask mask(1, 80, 300);
  for (int r = 0; r < 80; ++r) {
    const int prompt = r / 40;
    for (int c = 0; c < 100; ++c) mask.at(0, r, prompt * 100 + c) = shown;
    for (int c = 0; c <= r % 40; ++c) mask.at(0, r, 200 + prompt * 40 + c) = shown;
  }
  MaskForest forest;
  forest.build(mask.view());
  CHECK(!forest.has_table());
  CHECK(forest.plan().num_segments == 2);
  CHECK(forest.plan().num_pieces == 4);
  check(mask, forest);
}

TEST_CASE("one forest makes the plans of masks of any shape, one after another") {
  Mask mask(2, 3, 20);
  for (int r = 0; r < 3; ++r)
    for (int c = 0; c < 10 + r; ++c) mask.at(0, r, c) = mask.at(1, r, c) = shown;
  MaskForest forest;
  forest.build(mask.view());
  check(mask, forest);
  const std::uint64_t version = forest.plan().pieces_version;
  mask.at(1, 2, 12) = shown;
  forest.build(mask.view());
  CHECK(forest.plan().pieces_version > version);
  check(mask, forest);
  MaskView one_for_all = mask.view();
  one_for_all.stream_stride = 0;
  forest.build(one_for_all);
  for (int r = 0; r < 3; ++r) std::copy_n(&mask.at(0, r, 0), 20, &mask.at(1, r, 0));
  check(mask, forest);
  MaskView none = mask.view();
  none.bits = nullptr;
  forest.build(none);
  CHECK(!forest.has_table());
  for (int row = 0; row < 6; ++row) CHECK(forest.plan().row_kv_len[row] == 20);
}

// As ggml's scheduler does: it asks about the nodes of a graph, numbers the graph and its parts,
// and computes some of the parts with us, as often as it likes.
TEST_CASE("no two evaluations of graphs are taken for one, whichever parts are ours") {
  test::Random random(3);
  plugin::Evaluations evaluations;
  std::uint64_t numbers = 0, graphs = 0;
  int begun = 0, expected = 0;
  for (int graph = 0; graph < 1000; ++graph) {
    graphs += static_cast<std::uint64_t>(random.uniform(1, 40));
    ++numbers;
    std::vector<std::uint64_t> ours;
    for (int part = random.uniform(1, 9); part > 0; --part)
      if (++numbers; ours.empty() || random.chance(0.5)) ours.push_back(numbers);
    for (int again = random.uniform(1, 3); again > 0; --again) {
      const std::size_t computed = 1 + random.index(ours.size());  // the others: an error, an abort
      for (std::size_t i = 0; i < computed; ++i) {
        const bool begins = evaluations.begins(ours[i], graphs);
        CHECK(begins == (i == 0));
        begun += begins;
      }
      ++expected;
    }
  }
  CHECK(begun == expected);
}

TEST_CASE("what no scheduler has numbered is an evaluation of its own") {
  plugin::Evaluations evaluations;
  CHECK(evaluations.begins(0, 0));
  CHECK(evaluations.begins(0, 0));
  CHECK(evaluations.begins(7, 0));
  CHECK(!evaluations.begins(8, 0));
  CHECK(evaluations.begins(0, 0));
  CHECK(evaluations.begins(9, 0));
}

}  // namespace
