// Plans from page tables, checked against the tables entry by entry. (What attention makes of them:
// paged_attention_test.)
#include "chunkattn/interop/paged_plan.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/interop/block_table.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "support/counted_new.hpp"
#include "support/page_batch.hpp"
#include "support/random.hpp"
#include "support/refused.hpp"

using namespace chunkattn;
using test::PageBatch;

namespace {

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

// The segments of a row's path, the first one first.
std::vector<int> path_of(const PlanView& plan, int row) {
  std::vector<int> path;
  for (int s = plan.row_segment[row]; s >= 0; s = plan.segments[s].parent) path.push_back(s);
  std::reverse(path.begin(), path.end());
  return path;
}

// The arrays hang together, whatever the tables say.
void check_arrays(const PlanView& plan) {
  std::vector<std::vector<int>> seen(at(plan.num_segments));
  for (int row = 0; row < plan.num_rows; ++row)
    for (const int s : path_of(plan, row)) seen[at(s)].push_back(row);
  for (int s = 0; s < plan.num_segments; ++s) {
    const PlanView::Segment& segment = plan.segments[s];
    REQUIRE(segment.parent < s);
    REQUIRE(segment.row_begin < segment.row_end);
    REQUIRE(seen[at(s)].size() == at(segment.row_end - segment.row_begin));
    REQUIRE(seen[at(s)].front() == segment.row_begin);
    REQUIRE(seen[at(s)].back() == segment.row_end - 1);
    const int above = segment.parent < 0 ? 0
                                         : plan.segments[segment.parent].position +
                                               plan.segments[segment.parent].length;
    REQUIRE(segment.position == above);
    REQUIRE(segment.num_pieces > 0);
    REQUIRE(segment.piece_begin + segment.num_pieces <= plan.num_pieces);
    int position = segment.position;
    for (int p = 0; p < segment.num_pieces; ++p) {
      const Piece& piece = plan.pieces[segment.piece_begin + p];
      REQUIRE(piece.position == position);
      REQUIRE(piece.length > 0);
      REQUIRE(piece.begin >= 0);
      REQUIRE(piece.begin <= plan.chunk_size - piece.length);
      position += piece.length;
    }
    REQUIRE(position == segment.position + segment.length);
  }
}

// What a sequence reads, as slots page * page_size + offset in path order.
std::vector<std::int64_t> slots_of(const PlanView& plan, const std::vector<int>& path) {
  std::vector<std::int64_t> slots;
  for (const int s : path)
    for (int p = 0; p < plan.segments[s].num_pieces; ++p) {
      const Piece& piece = plan.pieces[plan.segments[s].piece_begin + p];
      for (int t = 0; t < piece.length; ++t)
        slots.push_back(std::int64_t{piece.chunk} * plan.chunk_size + piece.begin + t);
    }
  return slots;
}

// The plan is that of the batch, and shares all that may be shared; if it was only updated, what it
// shared before. (Then a page that two sequences fill together may be shared and is not.)
void check_plan(const PageBatch& batch, const PlanView& plan, bool updated = false) {
  const PageGeometry& geometry = batch.geometry;
  check_arrays(plan);
  REQUIRE(plan.num_rows == batch.num_rows());
  REQUIRE(plan.num_copies == 0);
  REQUIRE(plan.chunk_size ==
          (geometry.joined ? geometry.page_size * geometry.num_pages : geometry.page_size));
  std::vector<int> row_of(at(plan.num_rows), -1);
  for (int row = 0; row < plan.num_rows; ++row) row_of[at(plan.row_token[row])] = row;
  REQUIRE(std::count(row_of.begin(), row_of.end(), -1) == 0);

  std::vector<std::vector<int>> paths(batch.sequences.size());
  for (std::size_t i = 0; i < batch.sequences.size(); ++i) {
    const PageBatch::Sequence& s = batch.sequences[i];
    const int first = batch.query_start_loc[i];
    for (int q = 0; q < s.num_queries; ++q) {
      const int row = row_of[at(first + q)];
      REQUIRE(row == row_of[at(first)] + q);
      REQUIRE(plan.row_segment[row] == plan.row_segment[row_of[at(first)]]);
      const int position = s.seq_len - s.num_queries + q;
      REQUIRE(plan.row_kv_len[row] == std::max(0, position + 1));
      {
        const PlanView::WriteTarget& target = plan.writes[first + q];
        std::int64_t expected = -1;
        if (!batch.slot_mapping.empty())
          expected = std::max<std::int64_t>(-1, batch.slot_mapping[at(first + q)]);
        else if (position >= 0 && s.pages[at(position / geometry.page_size)] != geometry.null_page)
          expected = batch.slot(s, position);
        if (expected < 0)
          REQUIRE(target.chunk == no_chunk);
        else
          REQUIRE(std::int64_t{target.chunk} * plan.chunk_size + target.offset == expected);
        REQUIRE(target.offset < plan.chunk_size);
      }
    }
    if (s.num_queries == 0) continue;
    paths[i] = path_of(plan, row_of[at(first)]);
    const std::vector<std::int64_t> slots = slots_of(plan, paths[i]);
    REQUIRE(slots.size() >= at(s.seq_len));
    for (int p = 0; p < s.seq_len; ++p) REQUIRE(slots[at(p)] == batch.slot(s, p));
  }

  // Of any two sequences just the common pages are in segments of both.
  for (std::size_t a = 0; a < paths.size(); ++a) {
    for (std::size_t b = 0; b < a; ++b) {
      const auto& [s, t] = std::pair(batch.sequences[a], batch.sequences[b]);
      if (s.num_queries == 0 || t.num_queries == 0) continue;
      int together = 0;
      for (std::size_t i = 0; i < std::min(paths[a].size(), paths[b].size()); ++i)
        if (paths[a][i] == paths[b][i]) together += plan.segments[paths[a][i]].length;
      const int common = batch.common_pages(s, t) * geometry.page_size;
      REQUIRE((together == common || (updated && together < common)));
    }
  }
  // A segment ends where its sequences part or one of them ends.
  std::vector<int> num_sequences(at(plan.num_segments), 0), children(num_sequences);
  for (const std::vector<int>& path : paths)
    for (const int s : path) ++num_sequences[at(s)];
  for (int s = 0; s < plan.num_segments; ++s) {
    REQUIRE(plan.segments[s].num_sequences == num_sequences[at(s)]);
    const int parent = plan.segments[s].parent;
    if (parent >= 0) REQUIRE(num_sequences[at(parent)] > num_sequences[at(s)]);
  }
}

// Pieces of joined pages are as long as can be.
void check_joined(const PlanView& plan) {
  for (int s = 0; s < plan.num_segments; ++s)
    for (int p = 1; p < plan.segments[s].num_pieces; ++p) {
      const Piece* const piece = plan.pieces + plan.segments[s].piece_begin + p;
      REQUIRE(piece->begin != piece[-1].begin + piece[-1].length);
    }
}

template <class T>
void require_equal(const T* a, const T* b, int count) {
  REQUIRE(std::equal(a, a + count, b,
                     [](const T& x, const T& y) { return std::memcmp(&x, &y, sizeof(T)) == 0; }));
}
void require_equal(const PlanView& a, const PlanView& b) {
  REQUIRE(a.num_rows == b.num_rows);
  REQUIRE(a.num_segments == b.num_segments);
  require_equal(a.segments, b.segments, a.num_segments);
  require_equal(a.row_token, b.row_token, a.num_rows);
  require_equal(a.row_kv_len, b.row_kv_len, a.num_rows);
  require_equal(a.row_segment, b.row_segment, a.num_rows);
  require_equal(a.writes, b.writes, a.num_rows);
  for (int s = 0; s < a.num_segments; ++s)
    require_equal(a.pieces + a.segments[s].piece_begin, b.pieces + b.segments[s].piece_begin,
                  a.segments[s].num_pieces);
}

// Small tables by hand.
struct Tables {
  std::vector<std::int32_t> table, seq_lens, query_start_loc;
  std::int64_t stride;
  std::vector<std::int64_t> slot_mapping;

  [[nodiscard]] PageTables view() const {
    return {table, stride, seq_lens, query_start_loc, slot_mapping};
  }
};

}  // namespace

TEST_CASE("three sequences, written out") {
  // Pages of 4. The second has the first's pages 7 and 8, the third page 7 alone: 9 is not full in
  // it, and 8 comes too late.
  const Tables tables{{7, 8, 1, -5,  //
                       7, 8, 2, 3,   //
                       7, 9, 8, -5},
                      {9, 15, 6},
                      {0, 1, 3, 4},
                      4,
                      {}};
  PagedPlan plan({.page_size = 4, .num_pages = 10});
  const LiveView view = plan.build(tables.view());
  REQUIRE(view.num_rows == 4);
  REQUIRE(view.num_segments == 5);
  const PlanView::Segment& all = view.segments[0];
  CHECK(all.num_sequences == 3);
  CHECK(all.length == 4);
  CHECK(all.row_end - all.row_begin == 4);
  CHECK(view.pieces[all.piece_begin].chunk == 7);
  const PlanView::Segment& two = view.segments[1];
  CHECK(two.num_sequences == 2);
  CHECK(two.position == 4);
  CHECK(two.length == 4);
  CHECK(two.parent == 0);
  CHECK(view.writes[0].chunk == 1);
  CHECK(view.writes[0].offset == 0);
  CHECK(view.writes[2].chunk == 3);
  CHECK(view.writes[2].offset == 2);
  CHECK(view.writes[3].chunk == 9);
  CHECK(plan.geometry().num_pages == 10);
}

TEST_CASE("sequences that have freed equally many pages share those behind them") {
  // Pages of 4, of which 0 stands for those that are free: the third has freed one less.
  const Tables tables{{0, 0, 7, 8,  //
                       0, 0, 7, 9,  //
                       0, 6, 7, 5},
                      {13, 14, 15},
                      {0, 1, 2, 3},
                      4,
                      {}};
  PagedPlan plan({.page_size = 4, .num_pages = 10, .null_page = 0});
  const LiveView view = plan.build(tables.view());
  REQUIRE(view.num_segments == 5);
  CHECK(view.segments[0].num_sequences == 3);
  CHECK(view.segments[0].length == 4);
  int two = 0;
  while (view.segments[two].num_sequences != 2) ++two;
  CHECK(view.segments[two].length == 8);
  CHECK(view.pieces[view.segments[two].piece_begin + 1].chunk == 7);
}

TEST_CASE("10,000 random tables: each row reads its own pages, and common ones are shared") {
  test::Random random(71);
  test::PageBatches batches(random, {});
  long shared = 0, rows = 0, padding = 0, joined = 0;
  for (int round = 0; round < test::scaled(10000); ++round) {
    const PageBatch batch = batches.make();
    PagedPlan plan(batch.geometry), of_indices(batch.geometry);
    const LiveView view = plan.build(batch.tables());
    check_plan(batch, view);
    if (batch.geometry.joined) check_joined(view);
    require_equal(view, of_indices.build(batch.csr()));
    for (int s = 0; s < view.num_segments; ++s)
      if (view.segments[s].num_sequences > 1) ++shared;
    for (int row = 0; row < view.num_rows; ++row)
      if (view.row_segment[row] < 0) ++padding;
    rows += view.num_rows;
    joined += batch.geometry.joined;
  }
  CHECK(shared > test::scaled(3000));
  CHECK(rows > test::scaled(100000));
  CHECK(padding > test::scaled(100));
  CHECK(joined > test::scaled(3000));
}

TEST_CASE("a plan kept over many steps is right, and is rebuilt where it must be alone") {
  test::Random random(72);
  std::uint64_t kept = 0, rebuilt = 0;
  for (int round = 0; round < test::scaled(300); ++round) {
    test::PageBatches batches(random, {.max_tokens = 60, .max_queries = 5});
    PageBatch batch = batches.make();
    PagedPlan plan(batch.geometry);
    const LiveView first = plan.build(batch.tables());
    std::uint64_t segments_version = first.segments_version;
    for (int step = 0; step < 30; ++step) {
      const std::uint64_t before = plan.num_rebuilds();
      batches.step(random.chance(0.2));
      const PageBatch& next = batches.batch();
      if (next.num_rows() > 0 && random.chance(0.2)) {  // refused in the middle, perhaps
        PageBatch bad = next;
        for (std::int32_t& page : bad.indices)
          if (random.chance(0.2)) page = bad.geometry.num_pages;
        try {
          (void)plan.build(bad.csr());
        } catch (const InvalidArgument&) {
        }
      }
      const LiveView view = random.chance(0.5) ? plan.build(next.tables()) : plan.build(next.csr());
      check_plan(next, view, plan.num_rebuilds() == before);
      (plan.num_rebuilds() == before ? kept : rebuilt) += 1;
      CHECK((view.segments_version != segments_version) == (plan.num_rebuilds() != before));
      segments_version = view.segments_version;
    }
  }
  MESSAGE(kept, " steps only updated, ", rebuilt, " rebuilt");
  CHECK(kept > rebuilt);
  CHECK(rebuilt > static_cast<std::uint64_t>(test::scaled(100)));
}

TEST_CASE("decoding sequences only update the plan, for 64 tokens or two pages") {
  for (const int page : {1, 3, 16, 64, 100}) {
    for (const bool joined : {false, true}) {
      Tables tables{{}, {5 * page, 3 * page - 1}, {0, 1, 2}, 2000, {}};
      for (int p = 0; p < 4000; ++p) tables.table.push_back(p < 2000 ? p : p - 2000 + (p > 2000));
      PagedPlan plan({.page_size = page, .num_pages = 2010, .joined = joined});
      (void)plan.build(tables.view());
      const int room = std::max(2, 64 / page) * page;
      for (int step = 1; step <= room; ++step) {
        for (std::int32_t& length : tables.seq_lens) ++length;
        (void)plan.build(tables.view());
      }
      CHECK(plan.num_rebuilds() == 1);
      for (std::int32_t& length : tables.seq_lens) ++length;
      (void)plan.build(tables.view());
      CHECK(plan.num_rebuilds() == 2);
      for (std::int32_t& length : tables.seq_lens) length -= page;  // rejected drafts
      const LiveView view = plan.build(tables.view());
      CHECK(plan.num_rebuilds() == 2);
      CHECK(view.row_kv_len[0] == 4 * page + room + 1);
    }
  }
}

TEST_CASE("a sequence grows: its pages are checked, and those beyond its end are not read") {
  for (const bool joined : {false, true}) {
    CAPTURE(joined);
    Tables tables{{3, 4, 5, 6}, {5}, {0, 1}, 4, {}};
    PagedPlan plan({.page_size = 4, .num_pages = 10, .joined = joined});
    CHECK(plan.build(tables.view()).segments[0].length == 8);
    tables.seq_lens[0] = 9;
    const LiveView view = plan.build(tables.view());
    CHECK(plan.num_rebuilds() == 1);
    CHECK(view.segments[0].length == 12);
    CHECK(view.segments[0].num_pieces == (joined ? 1 : 3));
    check_arrays(view);
    tables.seq_lens[0] = 13;
    tables.table[3] = 99;
    CHECK(test::refused([&] { (void)plan.build(tables.view()); }) ==
          "page 3 of sequence 0 = 99: expected from 0 to 9, one of num_pages");
    CHECK(view.is_current());
    CHECK(view.row_kv_len[0] == 9);  // as it was
    tables.table[3] = 7;
    const LiveView more = plan.build(tables.view());
    CHECK(plan.num_rebuilds() == 1);
    CHECK(more.segments[0].num_pieces == (joined ? 2 : 4));
    check_arrays(more);
  }
}

TEST_CASE("a sequence that ends in a shared segment, and grows or shrinks, ends that sharing") {
  for (const int length : {9, 7, 3}) {
    CAPTURE(length);
    Tables tables{{1, 2, 5, 1, 2, 6}, {8, 8}, {0, 1, 2}, 3, {}};
    PagedPlan plan({.page_size = 4, .num_pages = 10});
    CHECK(plan.build(tables.view()).segments[0].length == 8);
    tables.seq_lens[0] = length;
    const LiveView view = plan.build(tables.view());
    CHECK(plan.num_rebuilds() == 2);
    CHECK(view.row_kv_len[0] + view.row_kv_len[1] == length + 8);
    check_arrays(view);
  }
}

TEST_CASE("K/V that goes nowhere has no offset, either") {
  Tables tables{{2}, {3}, {0, 2}, 1, {-1, 9}};
  PagedPlan plan({.page_size = 4, .num_pages = 3});
  const LiveView view = plan.build(tables.view());
  CHECK(view.writes[0].chunk == no_chunk);
  CHECK(view.writes[0].offset == 0);
  CHECK(view.writes[1].chunk == 2);
  CHECK(view.writes[1].offset == 1);
}

TEST_CASE("joined pages: as many tokens as an index can count, and one more") {
  CHECK(PagedPlan({.page_size = 1, .num_pages = 2147483647, .joined = true}).num_rebuilds() == 0);
  CHECK(test::refused(
            [] { PagedPlan plan({.page_size = 2, .num_pages = 1073741824, .joined = true}); }) ==
        "geometry.joined = true: expected fewer than 2^31 tokens in all pages, or pages that "
        "are not joined");
}

TEST_CASE("versions: of segments with each rebuild, of pieces with each page") {
  Tables tables{{0, 1, 2, 3}, {5}, {0, 1}, 4, {}};
  PagedPlan plan({.page_size = 4, .num_pages = 4});
  const LiveView one = plan.build(tables.view());
  tables.seq_lens[0] = 8;
  const LiveView two = plan.build(tables.view());
  CHECK(two.segments_version == one.segments_version);
  CHECK(two.pieces_version == one.pieces_version);
  tables.seq_lens[0] = 9;
  const LiveView three = plan.build(tables.view());
  CHECK(three.segments_version == one.segments_version);
  CHECK(three.pieces_version != one.pieces_version);
  tables.table[0] = 3;
  const LiveView four = plan.build(tables.view());
  CHECK(four.segments_version != one.segments_version);
  CHECK(four.pieces_version != three.pieces_version);
  PagedPlan other({.page_size = 4, .num_pages = 4});
  CHECK(other.build(tables.view()).segments_version != four.segments_version);
  CHECK((four.segments_version >> 63) == 1);  // never that of a tree's plan
}

TEST_CASE("a view is up to date until its plan builds another one, moves on or ends") {
  const Tables tables{{0, 1, 2, 3}, {5}, {0, 1}, 4, {}};
  LiveView first, second, third;
  {
    PagedPlan plan({.page_size = 4, .num_pages = 4});
    first = plan.build(tables.view());
    CHECK(first.is_current());
    second = plan.build(tables.view());
    CHECK_FALSE(first.is_current());
    CHECK(second.is_current());
    PagedPlan moved(std::move(plan));
    CHECK(second.is_current());
    CHECK(second.pieces[0].chunk == 0);
    third = moved.build(tables.view());
    CHECK_FALSE(second.is_current());
    moved = PagedPlan({.page_size = 2, .num_pages = 4});
    CHECK_FALSE(third.is_current());
    third = moved.build(tables.view());
    CHECK(third.chunk_size == 2);
    PagedPlan& self = moved;
    moved = std::move(self);
    CHECK(third.is_current());
  }
  CHECK_FALSE(third.is_current());
}

TEST_CASE("what does not fit is refused by name, and the last plan stays") {
  const Tables good{{0, 1, 2, 3, 1, 2}, {9, 3}, {0, 1, 3}, 3, {4, -1, 3}};
  PagedPlan plan({.page_size = 4, .num_pages = 5});
  const LiveView view = plan.build(good.view());
  const auto refused = [&](const auto& change) {
    Tables bad = good;
    change(bad);
    const std::string message = test::refused([&] { (void)plan.build(bad.view()); });
    REQUIRE(view.is_current());
    REQUIRE(view.num_segments == 2);
    REQUIRE(view.pieces[2].chunk == 2);
    return message;
  };
  const auto says = [](const std::string& message, const char* text) {
    CAPTURE(message);
    CHECK(message.substr(0, message.find(" (")).find(text) == 0);
  };
  says(refused([](Tables& t) { t.seq_lens.push_back(1); }),
       "query_start_loc.size() = 3: expected one more than the 3 sequences");
  says(refused([](Tables& t) { t.query_start_loc[0] = 1; }), "query_start_loc[0] = 1: expected 0");
  says(refused([](Tables& t) { t.query_start_loc[1] = 4; }),
       "query_start_loc[2] = 3: expected at least the one before, 4");
  says(refused([](Tables& t) { t.seq_lens[1] = -1; }), "seq_lens[1] = -1: expected from 0 to ");
  says(refused([](Tables& t) { t.seq_lens[0] = std::numeric_limits<std::int32_t>::max() - 3; }),
       "seq_lens[0] = 2147483644: expected from 0 to 2147483643");
  says(refused([](Tables& t) { t.seq_lens[1] = 1; }),
       "seq_lens[1] = 1: expected at least its 2 query tokens, or 0 for padding");
  says(refused([](Tables& t) { t.stride = 2; }),
       "stride = 2: expected at least 3: the pages of sequence 0");
  says(refused([](Tables& t) { t.stride = -1; }), "stride = -1: expected at least 3");
  says(refused([](Tables& t) { t.table.resize(3); }),
       "table.size() = 3: expected stride * 1 + 1 or more, for the pages of sequence 1");
  says(refused([](Tables& t) { t.table.resize(2); }),
       "table.size() = 2: expected stride * 0 + 3 or more, for the pages of sequence 0");
  says(refused([](Tables& t) { t.stride = std::int64_t{1} << 62; }), "table.size() = 6: expected");
  says(refused([](Tables& t) { t.slot_mapping.pop_back(); }),
       "slot_mapping.size() = 2: expected 0, or at least the 3 query tokens");
  says(refused([](Tables& t) { t.slot_mapping[2] = 20; }),
       "slot_mapping[2] = 20: expected less than num_pages * page_size = 20");
  says(refused([](Tables& t) { t.table[1] = 5; }),
       "page 1 of sequence 0 = 5: expected from 0 to 4");
  says(refused([](Tables& t) { t.table[3] = -1; }),
       "page 0 of sequence 1 = -1: expected from 0 to 4");
  // Also where it would only be appended.
  says(refused([](Tables& t) { t.seq_lens = {9, 5}, t.table[4] = 7; }),
       "page 1 of sequence 1 = 7: expected from 0 to 4");
  // Just enough.
  Tables enough = good;
  enough.table.resize(4);
  CHECK(plan.build(enough.view()).num_rows == 3);
  CHECK_FALSE(view.is_current());
  enough.slot_mapping[2] = 19;
  CHECK(plan.build(enough.view()).writes[2].offset == 3);
  enough.seq_lens[1] = 2;
  CHECK(plan.build(enough.view()).num_rows == 3);
  enough.query_start_loc = {0, 0, 0};  // none is looked at
  enough.seq_lens = {-1, -1}, enough.table.clear(), enough.stride = -1;
  CHECK(plan.build(enough.view()).num_rows == 0);
}

TEST_CASE("a page that is not there is refused wherever it is in runs of pages") {
  constexpr std::int32_t count = 40, most = std::numeric_limits<std::int32_t>::max();
  std::vector<std::int32_t> run(count), backwards(count);
  std::iota(run.begin(), run.end(), 0);
  std::iota(backwards.rbegin(), backwards.rend(), 0);
  const auto refused = [](const std::vector<std::int32_t>& pages, std::int32_t num_pages,
                          bool joined) {
    PagedPlan plan({.page_size = 1, .num_pages = num_pages, .joined = joined});
    const Tables tables{pages, {count}, {0, 1}, count, {}};
    const std::string message = test::refused([&] { (void)plan.build(tables.view()); });
    return message.substr(0, message.find(':'));
  };
  const auto named = [](int page, std::int32_t id) {
    return "page " + std::to_string(page) + " of sequence 0 = " + std::to_string(id);
  };
  for (const bool joined : {false, true}) {
    for (const auto& pages : {run, backwards}) {
      REQUIRE(refused(pages, count, joined) == "no error");
      for (const std::int32_t outside : {-1, count, most, -most - 1})
        for (int page = 0; page < count; ++page) {
          auto bad = pages;
          bad[static_cast<std::size_t>(page)] = outside;
          REQUIRE(refused(bad, count, joined) == named(page, outside));
        }
    }
    for (int end = 1; end < count; ++end) REQUIRE(refused(run, end, joined) == named(end, end));
  }
}

TEST_CASE("tables in compressed rows are refused by name, too") {
  const std::vector<std::int32_t> indptr{0, 3, 4}, indices{0, 1, 2, 3}, last{1, 3}, qo{0, 1, 3};
  PagedPlan plan({.page_size = 4, .num_pages = 4});
  const auto refused = [&](const PageIndices& bad) {
    return test::refused([&] { (void)plan.build(bad); });
  };
  const auto of = [](const std::string& message) { return message.substr(0, message.find(" (")); };
  const std::vector<std::int32_t> falling{0, 3, 2}, from_one{1, 3, 4}, zero{0, 3}, five{1, 5};
  const auto three = std::span(indices).first(3);
  CHECK(refused({indptr, indices, last, qo}) == "no error");
  CHECK(of(refused({std::span(indptr).first(2), indices, last, qo})) ==
        "indptr.size() = 2: expected one more than the 2 sequences");
  CHECK(of(refused({indptr, indices, last, std::span(qo).first(2)})) ==
        "qo_indptr.size() = 2: expected one more than the 2 sequences");
  CHECK(of(refused({falling, indices, last, qo})) ==
        "indptr[2] = 2: expected at least the one before, 3");
  CHECK(of(refused({from_one, indices, last, qo})) == "indptr[0] = 1: expected 0");
  CHECK(of(refused({indptr, three, last, qo})) ==
        "indices.size() = 3: expected at least 4, the last of indptr");
  CHECK(of(refused({indptr, indices, zero, qo})) ==
        "last_page_len[0] = 0: expected from 1 to the page size, 4");
  CHECK(of(refused({indptr, indices, five, qo})) ==
        "last_page_len[1] = 5: expected from 1 to the page size, 4");
  const std::vector<std::int32_t> many{0, 1, 5}, none{0, 0, 1};
  CHECK(of(refused({indptr, indices, last, many})) ==
        "tokens of sequence 1 = 3: expected at least its 4 query tokens, or 0 for padding");
  // Without pages there is no last one.
  const std::vector<std::int32_t> nine{9, 3};
  const LiveView view = plan.build(PageIndices{none, indices, nine, qo});
  for (int row = 0; row < 3; ++row)
    CHECK(view.row_kv_len[row] == (view.row_token[row] == 0 ? 0 : view.row_token[row] + 1));
}

TEST_CASE("geometries that make no sense are refused") {
  const auto refused = [](const PageGeometry& geometry) {
    const std::string message = test::refused([&] { PagedPlan plan(geometry); });
    return message.substr(0, message.find(" ("));
  };
  CHECK(refused({.page_size = 0, .num_pages = 1}) == "geometry.page_size = 0: expected at least 1");
  CHECK(refused({.page_size = 1, .num_pages = 0}) == "geometry.num_pages = 0: expected at least 1");
  CHECK(refused({.page_size = 1, .num_pages = 3, .null_page = 3}) ==
        "geometry.null_page = 3: expected a page from 0 to 2, or -1");
  CHECK(refused({.page_size = 1, .num_pages = 3, .null_page = -2}) ==
        "geometry.null_page = -2: expected a page from 0 to 2, or -1");
  CHECK(refused({.page_size = 1, .num_pages = 3, .null_page = 2}) == "no error");
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  CHECK(refused({.page_size = 1, .num_pages = most, .joined = true}) == "no error");
  CHECK(refused({.page_size = 2, .num_pages = 1 << 30}) == "no error");
  CHECK(refused({.page_size = 2, .num_pages = 1 << 30, .joined = true}).find("geometry.joined") ==
        0);
}

TEST_CASE("sequences of which each is a prefix of the next") {
  for (const bool joined : {false, true}) {
    PageBatch batch;
    batch.geometry = {.page_size = 2, .num_pages = 400, .null_page = 399, .joined = joined};
    for (int i = 0; i < 300; ++i) {
      const int pages = (i * 7) % 300 + 1;
      PageBatch::Sequence sequence{{}, 2 * pages, 1};
      for (int p = 0; p < pages; ++p) sequence.pages.push_back((p * 3) % 400);
      batch.sequences.push_back(sequence);
    }
    test::Random random(73);
    batch.write_tables(random);
    PagedPlan plan(batch.geometry);
    const LiveView view = plan.build(batch.tables());
    check_plan(batch, view);
    CHECK(view.num_segments == 300);  // 399 is the 134th page: the rest is read by each
  }
}

TEST_CASE("a tree's own block table gives the segments of its own plan") {
  using Tree = PrefixTree<int, 4>;
  Tree tree(PoolAllocator{}, {.sharing = TreeOptions::Sharing::chunk});
  std::vector<Tree::Sequence> sequences;
  for (int i = 0; i < 6; ++i) {
    std::vector<int> prompt(13, 7);
    prompt[i < 3 ? 8 : 4] = i;
    sequences.push_back(tree.insert(prompt));
  }
  auto step = tree.begin_step();
  BlockTable table;
  for (auto& sequence : sequences) table.add(sequence, step.add(sequence).row());
  AttentionPlan of_tree;
  const auto expected = of_tree.build(step);
  PagedPlan plan({.page_size = 4, .num_pages = static_cast<int>(tree.num_chunks())});
  const auto slots = BlockTable::slot_mapping(expected);
  const LiveView view = plan.build(PageIndices{.indptr = table.indptr(),
                                               .indices = table.indices(),
                                               .last_page_len = table.last_page_len(),
                                               .qo_indptr = table.qo_indptr(),
                                               .slot_mapping = slots});
  check_arrays(view);
  REQUIRE(view.num_rows == expected.num_rows);
  require_equal(view.writes, expected.writes, view.num_rows);
  const auto shared = [](const PlanView& plan_view) {
    std::vector<std::pair<int, int>> all;
    for (int s = 0; s < plan_view.num_segments; ++s)
      if (plan_view.segments[s].num_sequences > 1)
        all.push_back({plan_view.segments[s].position, plan_view.segments[s].length});
    std::sort(all.begin(), all.end());
    return all;
  };
  CHECK(shared(view) == shared(expected));
  CHECK(shared(view).size() == 2);
}

TEST_CASE("an allocation that fails changes nothing; once warm, steps allocate nothing") {
  test::Random random(74);
  test::PageBatches batches(random, {.max_tokens = 60, .max_queries = 5});
  const Tables other{{0, 1, 2, 3, 4, 5, 6, 7, 8}, {1, 1, 1}, {0, 1, 2, 3}, 3, {}};
  int failures = 0;
  for (int round = 0; round < test::scaled(30); ++round) {
    const PageBatch batch = batches.make();
    PagedPlan plan(batch.geometry);
    const LiveView view = plan.build(batch.tables());
    bool failed = true;
    for (int allocation = 0; failed; ++allocation) {
      failed = false;
      test::heap.fail_in = allocation;
      try {
        (void)plan.build(other.view());
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      test::heap.fail_in = -1;
      failures += failed;
      REQUIRE(view.is_current() == failed);
      if (failed) check_plan(batch, view);
    }
    check_plan(batch, plan.build(batch.tables()));
    const std::uint64_t before = test::heap.allocations;
    (void)plan.build(other.view());
    (void)plan.build(batch.tables());
    (void)plan.build(batch.csr());
    CHECK(test::heap.allocations == before);
  }
  CHECK(failures > test::scaled(50));
}
