// The arrays of a plan that is kept over many steps say the same as those of one that was rebuilt,
// and their numbers change whenever they do.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;

namespace {

/// For each query token, in the caller's order: the slots that it sees, by position, and where its
/// own K/V goes.
std::vector<std::vector<int>> meaning(const PlanView& view) {
  std::vector<std::vector<int>> rows(static_cast<std::size_t>(view.num_rows));
  for (int r = 0; r < view.num_rows; ++r) {
    std::map<int, std::pair<int, int>> slots;
    for (int s = view.row_segment[r]; s != -1; s = view.segments[s].parent) {
      const PlanView::Segment& segment = view.segments[s];
      REQUIRE((segment.row_begin <= r && r < segment.row_end));
      int length = 0;
      for (int p = 0; p < segment.num_pieces; ++p) {
        const Piece& piece = view.pieces[segment.piece_begin + p];
        REQUIRE(segment.piece_begin + p < view.num_pieces);
        REQUIRE(piece.begin + piece.length <= view.chunk_size);
        REQUIRE(piece.position == segment.position + length);
        length += piece.length;
        for (int i = 0; i < visible_length(piece, view.row_kv_len[r]); ++i)
          REQUIRE(
              slots.emplace(piece.position + i, std::pair(piece.chunk, piece.begin + i)).second);
      }
      REQUIRE(length == segment.length);
    }
    REQUIRE(slots.size() == static_cast<std::size_t>(view.row_kv_len[r]));  // no gap
    REQUIRE(slots.rbegin()->first == view.row_kv_len[r] - 1);
    auto& row = rows[static_cast<std::size_t>(view.row_token[r])];
    for (const auto& [position, slot] : slots) row.insert(row.end(), {slot.first, slot.second});
    const PlanView::WriteTarget& target = view.writes[view.row_token[r]];
    row.insert(row.end(), {target.chunk, target.chunk == no_chunk ? 0 : target.offset});
  }
  return rows;
}

/// What segments_version and pieces_version stand for.
struct Seen {
  std::vector<int> segments, pieces;
  bool operator==(const Seen&) const = default;
};
Seen seen(const PlanView& view) {
  Seen all;
  for (int r = 0; r < view.num_rows; ++r)
    all.segments.insert(all.segments.end(), {view.row_token[r], view.row_segment[r]});
  for (int s = 0; s < view.num_segments; ++s) {
    const PlanView::Segment& segment = view.segments[s];
    all.segments.insert(all.segments.end(), {segment.row_begin, segment.row_end, segment.parent,
                                             segment.position, segment.num_sequences});
    all.pieces.push_back(segment.length);
    for (int p = 0; p < segment.num_pieces; ++p) {
      const Piece& piece = view.pieces[segment.piece_begin + p];
      all.pieces.insert(all.pieces.end(), {piece.chunk, piece.begin, piece.length, piece.position});
    }
  }
  return all;
}

}  // namespace

TEST_CASE("tails that outgrow their room in the piece array several times") {
  for (const int sequences : {1, 3}) {
    CAPTURE(sequences);
    PrefixTree<int, 8, PoolAllocator, test::NoRetention>
        tree;  // room for 128 pieces, then for 384, for 896, ...
    AttentionPlan kept;
    std::vector<decltype(tree)::Sequence> batch;
    for (int i = 0; i < sequences; ++i) batch.push_back(tree.insert(std::vector<int>{1, 2, 3, i}));
    const std::vector<int> drafts(39, 5);
    std::vector<std::uint64_t> rebuilds;
    std::int32_t extent = 0;
    int moves = 0;
    for (int i = 0; i < 220; ++i) {
      auto step = tree.begin_step();
      for (auto& s : batch) REQUIRE(step.add(s, 1000, {.tokens = drafts}));
      const auto view = kept.build(step);
      const bool moved = i >= 2 && view.num_pieces > extent;
      moves += moved ? 1 : 0;
      extent = view.num_pieces;
      rebuilds.push_back(kept.num_rebuilds());
      if (moved || i % 10 == 0) {  // writing down what all rows see takes long
        const auto seen = meaning(view);
        AttentionPlan fresh;
        REQUIRE(seen == meaning(fresh.build(step)));
      }
      auto done = std::move(step).finish();
      std::vector<int> outputs = drafts;
      outputs.push_back(6);
      for (const ScheduledSequence row : done.rows()) done.commit(row, outputs);
    }
    CHECK(rebuilds.back() == rebuilds[2]);  // it was kept up to date, not rebuilt
    CHECK(moves >= 3);
  }
}

TEST_CASE("the versions of segments and pieces change whenever these do") {
  test::Random random(1);
  for (int round = 0; round < test::scaled(30); ++round) {
    PrefixTree<int, 4> tree;
    AttentionPlan plan;
    std::vector<decltype(tree)::Sequence> batch;
    std::map<std::pair<std::uint64_t, std::uint64_t>, Seen> all;
    std::map<std::uint64_t, std::vector<int>> segments_of;
    for (int i = 0; i < 120; ++i) {
      const int what = random.uniform(0, 9);
      if (batch.size() < 2 || (what == 0 && batch.size() < 8)) {
        std::vector<int> prompt(static_cast<std::size_t>(random.uniform(1, 12)));
        for (int& t : prompt) t = random.uniform(0, 1);
        batch.push_back(tree.insert(prompt));
      } else if (what == 1) {
        batch.erase(batch.begin());
      } else if (what == 2) {
        batch.push_back(batch[0].fork());
      } else if (what == 3) {
        random.shuffle(batch);
      }
      auto step = tree.begin_step();
      const std::vector<int> drafts(random.chance(0.3) ? 2 : 0, 5);
      for (auto& s : batch) (void)step.add(s, 100, {.tokens = drafts});
      const auto view = plan.build(step);
      const Seen now = seen(view);
      const auto expected = [&] {
        AttentionPlan fresh;
        return meaning(fresh.build(step));
      }();
      REQUIRE(meaning(view) == expected);
      const auto [at, fresh] =
          all.emplace(std::pair(view.segments_version, view.pieces_version), now);
      REQUIRE(at->second == now);
      REQUIRE(segments_of.emplace(view.segments_version, now.segments).first->second ==
              now.segments);
      (void)plan.build(step);  // again, since the other plan's was the last
      auto done = std::move(step).finish();
      for (const ScheduledSequence row : done.rows()) {
        std::vector<int> outputs(random.index(static_cast<std::size_t>(row.num_drafts) + 1), 5);
        outputs.push_back(random.uniform(0, 1));
        done.commit(row, outputs);
      }
    }
    CHECK(all.size() > segments_of.size());
    CHECK(segments_of.size() > 20);
    check_invariants(tree);
  }
}

TEST_CASE("a version of segments is of one plan of the process only") {
  PrefixTree<int, 4, PoolAllocator, test::NoRetention> tree;
  auto s = tree.insert(std::vector<int>{1, 2, 3});
  auto step = tree.begin_step();
  REQUIRE(step.add(s));
  std::set<std::uint64_t> numbers;
  for (int i = 0; i < 5; ++i) {
    AttentionPlan plan;
    numbers.insert(plan.build(step).segments_version);
  }
  CHECK(numbers.size() == 5);
}
