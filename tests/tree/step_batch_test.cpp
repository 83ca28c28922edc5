// Many sequences in one call: the same tree and plan as one call for each, all of them or none, no
// allocation.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/counted_new.hpp"
#include "tests/support/random.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;
using test::refused;

namespace {

/// Chunks by the order in which they are first named: what was held and given back may have changed
/// which one comes next.
struct ChunkNames {
  bool keep = false;  ///< their own
  std::map<ChunkIndex, std::int64_t> names{{no_chunk, -1}};
  std::int64_t operator()(ChunkIndex chunk) {
    if (keep) return chunk;
    return names.emplace(chunk, static_cast<std::int64_t>(names.size())).first->second;
  }
};

/// All that can be seen of a tree and its sequences.
template <class Tree>
std::vector<std::int64_t> seen(const Tree& tree, const std::vector<typename Tree::Sequence>& all,
                               ChunkNames name = {.keep = true}) {
  std::vector<std::int64_t> values;
  const auto add = [&](auto value) { values.push_back(static_cast<std::int64_t>(value)); };
  for (const auto& s : all) {
    if (!s.is_live()) continue;
    add(s.id());
    add(s.size());
    add(s.num_uncomputed());
    add(s.num_scheduled());
    add(s.num_written());
    add(s.num_pending());
    add(s.num_reserved());
    add(s.loadable().begin);
    add(s.loadable().length);
    for (const int token : s.tokens()) add(token);
    s.for_each_run({0, static_cast<std::int32_t>(s.size() + s.num_reserved())},
                   [&](const Piece& piece) {
                     add(name(piece.chunk));
                     add(piece.begin);
                     add(piece.length);
                   });
  }
  const TreeStats stats = tree.stats();
  if (stats.retained_chunks == 0 && stats.evicted_chunks == 0) {  // a try may have evicted cache
    add(stats.stored_tokens);
    add(stats.used_chunks);
    add(stats.nodes);
  }
  add(stats.live_sequences);
  add(stats.leaving_sequences);
  add(tree.chunks_available());
  return values;
}

/// What each row of a plan reads and writes. (A plan that was rebuilt may hold more that no row
/// sees than one that advanced.)
std::vector<std::int64_t> seen(const PlanView& plan) {
  std::vector<std::int64_t> values;
  ChunkNames name;
  for (std::int32_t r = 0; r < plan.num_rows; ++r) {
    values.insert(values.end(), {plan.row_token[r], plan.row_kv_len[r], name(plan.writes[r].chunk),
                                 plan.writes[r].offset});
    for (std::int32_t s = plan.row_segment[r]; s >= 0; s = plan.segments[s].parent) {
      const PlanView::Segment& segment = plan.segments[s];
      values.insert(values.end(), {segment.row_begin, segment.row_end, segment.num_sequences});
      for (std::int32_t p = 0; p < segment.num_pieces; ++p) {
        const Piece& piece = plan.pieces[segment.piece_begin + p];
        const std::int32_t length = visible_length(piece, plan.row_kv_len[r]);
        if (length > 0)
          values.insert(values.end(), {name(piece.chunk), piece.begin, length, piece.position});
      }
    }
  }
  return values;
}

/// The same engine twice: one adds and commits by batches, the other by single calls.
template <class Tree>
struct Engine {
  Engine(std::size_t chunks, bool by_batches)
      : tree(PoolAllocator{.max_chunks = chunks}), batches(by_batches) {}

  /// Adds what is named; the index of the first that was held, or none.
  std::optional<std::size_t> add(typename Tree::Step& step, const std::vector<std::size_t>& who,
                                 std::size_t max_tokens) {
    std::vector<typename Tree::Sequence*> handles;
    for (const std::size_t i : who) handles.push_back(&live[i]);
    if (batches) {
      const AddResult result = step.add(handles, max_tokens);
      reason = result.reason();
      return result ? std::nullopt : std::optional(result.blocked_index());
    }
    for (std::size_t i = 0; i < who.size(); ++i) {
      const AddResult result = step.add(*handles[i], max_tokens);
      reason = result.reason();
      if (!result) return i;
    }
    return std::nullopt;
  }
  void commit(typename Tree::Finished& done, int salt) {
    std::vector<int> outputs;
    for (const ScheduledSequence row : done.rows())
      outputs.push_back((row.position * 7 + row.index + salt) % 3);
    if (batches) return done.commit(outputs);
    std::size_t next = 0;
    for (const ScheduledSequence row : done.rows()) done.commit(row, outputs[next++]);
  }

  Tree tree;
  AttentionPlan plan;
  std::vector<typename Tree::Sequence> live;
  std::deque<typename Tree::InFlight> flying;
  AddResult::Reason reason = AddResult::Reason::none;
  bool batches;
};

template <class Tree>
void compare(std::uint64_t seed, std::size_t chunks, int calls, int& held) {
  CAPTURE(seed);
  test::Random random(seed);
  Engine<Tree> one(chunks, true), other(chunks, false);
  const auto both = [&](const auto& f) {
    f(one);
    f(other);
  };
  const auto finish_oldest = [&] {
    const int salt = random.uniform(0, 2);
    both([&](auto& e) {
      auto done = std::move(e.flying.front()).finish();
      e.flying.pop_front();
      e.commit(done, salt);
    });
  };
  for (int call = 0; call < calls; ++call) {
    const int what = random.uniform(0, 99);
    if (one.live.empty() || (what < 10 && one.live.size() < 12)) {
      std::vector<int> prompt(static_cast<std::size_t>(random.uniform(1, 20)));
      for (int& token : prompt) token = random.uniform(0, 1);
      if (one.tree.chunks_needed(prompt) + 2 > one.tree.chunks_available()) continue;
      both([&](auto& e) { e.live.push_back(e.tree.insert(prompt)); });
    } else if (what < 15) {
      const std::size_t gone = random.index(one.live.size());
      both([&](auto& e) { e.live.erase(e.live.begin() + static_cast<std::ptrdiff_t>(gone)); });
    } else if (what < 20) {
      const std::size_t from = random.index(one.live.size());
      both([&](auto& e) {
        if (auto fork = e.live[from].try_fork()) e.live.push_back(std::move(*fork));
      });
    } else if (what < 24 && !one.live.empty()) {
      const std::size_t to = random.index(one.live.size());
      if (one.live[to].num_reserved() > 0) continue;
      both([&](auto& e) { (void)e.live[to].try_append(iota(0, 3)); });
    } else if (what < 30 || one.flying.size() == 3) {
      if (!one.flying.empty()) finish_oldest();
    } else {
      std::vector<std::size_t> who(one.live.size());
      for (std::size_t i = 0; i < who.size(); ++i) who[i] = i;
      for (std::size_t i = who.size(); i > 1; --i) std::swap(who[i - 1], who[random.index(i)]);
      who.resize(who.size() - random.index(std::min<std::size_t>(3, who.size())));
      const std::size_t max_tokens = random.chance(0.5) ? test::no_limit : 1 + random.index(6);
      const bool waits = random.chance(0.3);
      auto step = one.tree.begin_step();
      auto single = other.tree.begin_step();
      // Where one is held the batch is as before; without it the rest continues.
      for (;;) {
        const auto before = seen(one.tree, one.live);
        const auto first = one.add(step, who, max_tokens);
        if (!first) break;
        ++held;
        REQUIRE(step.num_rows() == 0);
        REQUIRE(seen(one.tree, one.live) == before);
        check_invariants(one.tree);
        // Single calls stop at the same one, for the same reason.
        {
          const auto stopped = other.add(single, who, max_tokens);
          REQUIRE(stopped == first);
          REQUIRE(other.reason == one.reason);
          {
            const auto dropped = std::move(single);
          }
          single = other.tree.begin_step();
          {
            const auto dropped = std::move(step);
          }
          step = one.tree.begin_step();
        }
        who.erase(who.begin() + static_cast<std::ptrdiff_t>(*first));
      }
      REQUIRE(!other.add(single, who, max_tokens));
      REQUIRE(step.num_rows() == single.num_rows());
      if (step.num_rows() == 0) continue;
      const auto view = one.plan.build(step), same = other.plan.build(single);
      REQUIRE(seen(view) == seen(same));
      REQUIRE(view.tokens(-1) == same.tokens(-1));
      one.flying.push_back(std::move(step).submit());
      other.flying.push_back(std::move(single).submit());
      while (!waits && !one.flying.empty()) finish_oldest();
    }
    REQUIRE(seen(one.tree, one.live, {}) == seen(other.tree, other.live, {}));
    if (call % 10 == 0) check_invariants(one.tree);
  }
  while (!one.flying.empty()) finish_oldest();
  REQUIRE(seen(one.tree, one.live, {}) == seen(other.tree, other.live, {}));
}

using Small = PrefixTree<int, 4, PoolAllocator, test::NoRetention>;

struct Bench {
  explicit Bench(std::size_t count, std::size_t chunks = 1000)
      : tree(PoolAllocator{.max_chunks = chunks}) {
    for (std::size_t i = 0; i < count; ++i)
      all.push_back(tree.insert(iota(static_cast<int>(i) * 100, 5 + i % 4)));
    auto done = test::run_step(tree, plan, all);
    done.commit(std::vector<int>(count, 1));
  }
  Small tree;
  AttentionPlan plan;
  std::vector<Small::Sequence> all;
};

/// Hands out `left` chunks, then throws once.
struct Failing {
  PoolAllocator pool{};
  int* left = nullptr;
  ChunkIndex allocate() {
    if (left != nullptr && (*left)-- == 0) throw std::runtime_error("no chunk");
    return pool.allocate();
  }
  void free(ChunkIndex chunk) noexcept { pool.free(chunk); }
  [[nodiscard]] std::size_t capacity() const noexcept { return pool.capacity(); }
  [[nodiscard]] std::size_t available() const noexcept { return pool.available(); }
  [[nodiscard]] std::size_t high_water() const noexcept { return pool.high_water(); }
};

}  // namespace

TEST_CASE("batches and single calls give the same tree and the same plan") {
  int held = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    compare<PrefixTree<int, 4, PoolAllocator, test::NoRetention>>(seed, 40, 150, held);
    compare<PrefixTree<int, 1, PoolAllocator, test::NoRetention>>(seed, 100, 100, held);
    compare<PrefixTree<int, 64, PoolAllocator, test::NoRetention>>(seed, 1000, 200, held);
    compare<PrefixTree<int, 4>>(seed, 40, 150, held);
  }
  CHECK(held > 1000);
}

TEST_CASE("a handle that is refused is named, and nothing has changed") {
  Bench b(6), other(1);
  Small::Sequence empty;
  auto step = b.tree.begin_step();
  const auto before = seen(b.tree, b.all);
  const auto untouched = [&] {
    CHECK(step.num_rows() == 0);
    CHECK(seen(b.tree, b.all) == before);
    check_invariants(b.tree);
  };
  const auto batch = [&](std::size_t at, Small::Sequence* handle) {
    std::vector<Small::Sequence*> handles;
    for (auto& s : b.all) handles.push_back(&s);
    handles[at] = handle;
    return refused([&] { (void)step.add(handles); });
  };
  CHECK(batch(5, &b.all[2]) ==
        "sequences[5] = added twice: expected each sequence at most once per step");
  untouched();
  CHECK(batch(4, &other.all[0]) ==
        "sequences[4] = of another tree: expected a sequence of the step's tree");
  untouched();
  CHECK(batch(3, &empty) ==
        "sequences[3] = not live: expected a live handle, not one moved from or used after "
        "leave()");
  untouched();
  CHECK(batch(0, nullptr) == "sequences[0] = null: expected a sequence");
  untouched();
  CHECK(refused([&] { (void)step.add(std::span(b.all), 0); }) ==
        "max_tokens = 0: expected at least one token");
  untouched();

  CHECK(step.add(std::span<Small::Sequence>()));  // none
  untouched();
  CHECK(step.add(b.all[1]));  // single calls and batches mix
  CHECK(refused([&] { (void)step.add(b.all); }) ==
        "sequences[1] = added twice: expected each sequence at most once per step");
  CHECK(step.num_rows() == 1);
  CHECK(step.add(std::span(b.all).subspan(2)));
  CHECK(step.num_rows() == 5);
}

TEST_CASE("a refused batch leaves the plan that was built as it was") {
  Bench b(3);
  auto step = b.tree.begin_step();
  REQUIRE(step.add(std::span(b.all).first(2)));
  const auto view = b.plan.build(step);
  CHECK(refused([&] { (void)step.add(b.all); }).starts_with("sequences[0] = added twice"));
  CHECK(view.is_current());
  auto done = std::move(step).finish();
  done.commit(std::vector<int>{1, 2});
  CHECK(b.all[1].token(b.all[1].size() - 1) == 2);
}

TEST_CASE("out of chunks in the middle: none is added, and all are where there is room") {
  Bench b(8, 20);  // two chunks each, but for some that have three
  const std::size_t spare = b.tree.chunks_available();
  auto step = b.tree.begin_step();
  for (int round = 0; round < 10; ++round) {
    const auto before = seen(b.tree, b.all);
    const auto added = step.add(b.all);
    if (!added) {
      CHECK(added.reason() == AddResult::Reason::out_of_chunks);
      CHECK(added.blocked_index() > 0);
      CHECK(step.num_rows() == 0);
      CHECK(seen(b.tree, b.all) == before);
      check_invariants(b.tree);
      b.all.erase(b.all.begin() + 2);  // one leaves, the rest fits
      continue;
    }
    REQUIRE(b.plan.build(step));
    auto done = std::move(step).finish();
    done.commit(std::vector<int>(b.all.size(), 1));
    step = b.tree.begin_step();
  }
  CHECK(b.all.size() < 8);
  CHECK(spare < 8);
}

TEST_CASE("an allocator that throws in the middle: none is added") {
  using Tree = PrefixTree<int, 4, Failing, test::NoRetention>;
  int left = 1000;
  Tree tree(Failing{.left = &left});
  std::vector<Tree::Sequence> all;
  for (int i = 0; i < 6; ++i) all.push_back(tree.insert(iota(i * 100, 4)));
  AttentionPlan plan;
  auto step = tree.begin_step();
  const auto before = seen(tree, all);
  left = 3;
  CHECK_THROWS_AS((void)step.add(all), std::runtime_error);
  CHECK(step.num_rows() == 0);
  CHECK(seen(tree, all) == before);
  check_invariants(tree);
  left = 1000;
  CHECK(step.add(all));
}

TEST_CASE("commit of all rows: as many outputs as rows, in the order of steps, or nothing") {
  Bench b(4);
  auto step = b.tree.begin_step();
  REQUIRE(step.add(b.all));
  REQUIRE(b.plan.build(step));
  auto first = std::move(step).submit();
  step = b.tree.begin_step();
  REQUIRE(step.add(b.all));
  REQUIRE(b.plan.build(step));
  auto second = std::move(step).submit();
  auto done = std::move(first).finish();
  auto later = std::move(second).finish();
  const auto before = seen(b.tree, b.all);
  CHECK(refused([&] { done.commit(std::vector<int>(3, 1)); }) ==
        "outputs.size() = 3: expected one for each of the 4 rows of Finished::rows()");
  CHECK(refused([&] { done.commit(std::vector<int>(5, 1)); }) ==
        "outputs.size() = 5: expected one for each of the 4 rows of Finished::rows()");
  CHECK(
      refused([&] {
        later.commit(std::vector<int>(4, 1));
      }).starts_with("position of the row's output = "));  // the outputs of the earlier step first
  CHECK(seen(b.tree, b.all) == before);
  b.all[1].leave();
  CHECK(refused([&] { done.commit(std::vector<int>(4, 1)); }) ==
        "outputs.size() = 4: expected one for each of the 3 rows of Finished::rows()");
  done.commit(*done.rows().begin(), 7);  // the rest then goes at once
  done.commit(std::vector<int>{8, 9});
  CHECK(b.all[0].token(b.all[0].size() - 1) == 7);
  CHECK(b.all[2].token(b.all[2].size() - 1) == 8);
  CHECK(b.all[3].token(b.all[3].size() - 1) == 9);
  CHECK(refused([&] { done.commit(std::vector<int>(1, 1)); }) ==
        "outputs.size() = 1: expected one for each of the 0 rows of Finished::rows()");
  later.commit(std::vector<int>{1, 2, 3});
  CHECK(b.all[3].token(b.all[3].size() - 1) == 3);
  check_invariants(b.tree);
}

TEST_CASE("one output for a row with drafts: the first draft was wrong") {
  Bench b(2);
  auto step = b.tree.begin_step();
  REQUIRE(step.add(b.all[0], 100, {.tokens = std::vector<int>{5, 6}}));
  REQUIRE(step.add(b.all[1]));
  REQUIRE(b.plan.build(step));
  const std::size_t size = b.all[0].size();
  auto done = std::move(step).finish();
  done.commit(std::vector<int>{7, 8});
  CHECK(b.all[0].size() == size + 1);
  CHECK(b.all[0].token(size) == 7);
  CHECK(b.all[0].num_reserved() == 0);
  check_invariants(b.tree);
}

TEST_CASE("10,000 staggered sequences: whole steps allocate nothing and rebuild nothing") {
  using Tree = PrefixTree<int, 64, FixedAllocator, test::NoRetention>;
  for (const std::size_t count : {std::size_t{256}, std::size_t{10000}}) {
    CAPTURE(count);
    Tree tree(FixedAllocator(5 * count));
    std::vector<Tree::Sequence> all;
    for (std::size_t i = 0; i < count; ++i) {
      std::vector<int> prompt(128 + 1 + i % 64, 1);
      prompt[128] = static_cast<int>(i);
      all.push_back(tree.insert(prompt));
    }
    AttentionPlan plan;
    const std::vector<int> outputs(count, 3);
    const auto run = [&] {
      auto step = tree.begin_step();
      REQUIRE(step.add(all));
      REQUIRE(plan.build(step));
      auto done = std::move(step).finish();
      done.commit(outputs);
    };
    run();
    run();
    run();
    const std::uint64_t rebuilds = plan.num_rebuilds(), allocations = test::heap.allocations;
    for (int i = 0; i < 70; ++i) run();
    CHECK(test::heap.allocations == allocations);
    CHECK(plan.num_rebuilds() == rebuilds);
    CHECK(all.back().size() == 128 + 1 + (count - 1) % 64 + 73);
    check_invariants(tree);
  }
}
