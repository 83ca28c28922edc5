// What becomes of those that leave: of copies that were still to be made, of outputs that are to
// come, of tokens that another is writing; and in which order they go.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;
using test::refused;

TEST_CASE("what a copy was to write and did not is for its next writer, and no step has it") {
  using Tree = PrefixTree<int, 8>;
  Tree tree(PoolAllocator{.max_chunks = 16}, {.min_run = 8});
  AttentionPlan plan;
  std::vector<Tree::Sequence> batch;
  batch.push_back(tree.insert(iota(0, 8)));
  Tree::Sequence& s = batch.front();
  for (int i = 0; i < 2; ++i)
    test::decode(tree, plan, batch, [i](const ScheduledSequence&) { return 100 + i; });
  REQUIRE(s.num_written() == 9);
  {
    auto step = tree.begin_step();  // of the drafts, 201 and 202 are the main branch
    REQUIRE(step.add(s, 100,
                     {.tokens = std::vector<int>{200, 201, 202},
                      .parents = std::vector<std::int32_t>{-1, -1, 1}}));
    (void)plan.build(step);
    auto done = std::move(step).finish();
    done.commit(*done.rows().begin(), std::vector<int>{200, 300}, 0);  // 200 is to be copied
  }
  const std::vector<int> path = s.tokens();
  REQUIRE(path.size() == 12);
  REQUIRE(s.num_written() == 10);
  auto fork = s.fork();                        // its copies hold the end of s
  s.leave();                                   // and takes back the copy of 200
  CHECK(tree.stats().leaving_sequences == 2);  // and the one with the scratch slots
  CHECK(tree.match_prefix(path).cached == 10);
  CHECK(tree.match_prefix(path).pending == 0);  // what nobody writes
  CHECK(tree.match_prefix(std::span(path).first(9)).cached == 9);
  CHECK(tree.match_prefix(std::span(path).first(9)).pending == 0);
  auto writer = tree.insert(path);
  CHECK(writer.num_cached() == 10);
  auto reader = tree.insert(path);
  CHECK(reader.num_pending() == 2);
  CHECK(reader.waits_for() == writer.id());
  CHECK(reader.take_over() == 2);  // no step is at it
  check_invariants(tree);
}

TEST_CASE("what several generated is merged up to the first token that differs, and no further") {
  using Tree = PrefixTree<int, 4>;
  Tree tree(PoolAllocator{.max_chunks = 16}, {.min_run = 1});
  AttentionPlan plan;
  std::vector<Tree::Sequence> batch;
  for (int i = 0; i < 3; ++i) batch.push_back(tree.insert(iota(0, 4)));
  // 100, 101, … for all, but for the second's third.
  for (int t = 0; t < 9; ++t)
    test::decode(tree, plan, batch, [t](const ScheduledSequence& row) {
      return t == 2 && row.index == 1 ? 999 : 100 + t;
    });
  const std::vector<int> paths[] = {batch[0].tokens(), batch[1].tokens()};
  REQUIRE(paths[0] != paths[1]);
  batch.clear();
  for (const std::vector<int>& path : paths) CHECK(tree.match_prefix(path).cached == 12);
  CHECK(tree.stats().merged_tokens == 2 + 8);
  check_invariants(tree);
}

TEST_CASE("replicas whose sequences leave in another order hold the same tree") {
  using Tree = PrefixTree<int, 4, PoolAllocator, test::NoRetention>;
  const auto chunks_after = [](const std::vector<std::size_t>& order) {
    Tree tree;
    std::vector<Tree::Sequence> live;
    for (int i = 0; i < 4; ++i) live.push_back(tree.insert(iota(10 * i, 4)));
    std::thread([&] {
      for (const std::size_t i : order) live[i] = Tree::Sequence();
    }).join();
    auto next = tree.insert(iota(1000, 16));  // those that were dropped leave, then it takes theirs
    std::vector<ChunkIndex> chunks;
    next.for_each_run({0, 16}, [&](const Piece& piece) { chunks.push_back(piece.chunk); });
    CHECK(tree.stats().used_chunks == 4);
    return chunks;
  };
  const std::vector<ChunkIndex> chunks = chunks_after({0, 1, 2, 3});
  CHECK(chunks.size() == 4);
  CHECK(chunks_after({3, 2, 1, 0}) == chunks);
  CHECK(chunks_after({2, 0, 3, 1}) == chunks);
}

TEST_CASE("outputs of a whole step, one of whose sequences has left with the next one in flight") {
  using Tree = PrefixTree<int, 4, PoolAllocator, test::NoRetention>;
  Tree tree;
  AttentionPlan plans[2];
  std::vector<Tree::Sequence> batch;
  for (int i = 0; i < 3; ++i) batch.push_back(tree.insert(iota(10 * i, 5)));
  std::vector<Tree::InFlight> flying;
  for (AttentionPlan& plan : plans) {
    auto step = tree.begin_step();
    REQUIRE(step.add(batch));
    (void)plan.build(step);
    flying.push_back(std::move(step).submit());
  }
  auto done = std::move(flying[0]).finish();
  batch[1].leave();
  CHECK(refused([&] { done.commit(std::vector<int>{71, 72, 73}); }) ==
        "outputs.size() = 3: expected one for each of the 2 rows of Finished::rows()");
  done.commit(std::vector<int>{71, 73});
  CHECK(batch[0].token(5) == 71);
  CHECK(batch[2].token(5) == 73);
  check_invariants(tree);
}

TEST_CASE("tokens that another is still to write are not there to be merged with") {
  using Tree = PrefixTree<int, 4, PoolAllocator, test::ByPriority>;
  Tree tree(PoolAllocator{.max_chunks = 5});
  AttentionPlan plan;
  std::vector<Tree::Sequence> batch;
  batch.push_back(tree.insert(iota(0, 4), {.priority = 5}));
  for (int i = 0; i < 5; ++i)
    test::decode(tree, plan, batch, [i](const ScheduledSequence&) { return 100 + i; });
  const std::vector<int> path = batch.front().tokens();
  std::optional<Tree::Sequence> writer = tree.insert(path);  // the same, at the lowest priority
  REQUIRE(writer->num_pending() + writer->num_cached() == 4);
  batch.clear();  // what it generated goes with it
  CHECK(tree.stats().merged_tokens == 0);
  CHECK(tree.match_prefix(path).cached == 4);
  test::load(*writer);
  writer.reset();
  CHECK(tree.match_prefix(path).cached == 9);
  {
    auto important = tree.insert(iota(500, 8), {.priority = 3});
    test::load(important);
  }
  auto big = tree.insert(iota(900, 8));  // what had priority 0 goes first, 5 stays
  CHECK(tree.match_prefix(path).cached == 4);
  CHECK(tree.match_prefix(iota(500, 8)).cached == 8);
  check_invariants(tree);
}

TEST_CASE("a copier that is late: both ends of a copy stay until the step that has it is done") {
  using Tree = PrefixTree<int, 8, PoolAllocator, test::NoRetention>;
  Tree tree(PoolAllocator{.max_chunks = 64}, {.min_run = 8});
  AttentionPlan plan;
  auto source = tree.insert(iota(0, 10));
  source.append(iota(50, 5));
  source.mark_loaded({0, 15});

  auto fork = source.fork();      // 5 tokens are to be copied
  auto grandchild = fork.fork();  // copied from the source as well: no copy waits for another
  fork.append(7);
  grandchild.append(8);
  auto step = tree.begin_step();
  REQUIRE(step.add(fork));
  REQUIRE(step.add(grandchild));
  const auto view = plan.build(step);
  const std::vector<PlanView::RowCopy> copies(view.copies, view.copies + view.num_copies);
  REQUIRE(copies.size() == 2);
  CHECK(copies[0].length == 5);
  CHECK(copies[0].source_chunk == copies[1].source_chunk);
  CHECK(copies[0].source_begin == copies[1].source_begin);
  CHECK(copies[0].target_chunk != copies[1].target_chunk);
  auto first = std::move(step).submit();

  auto next = tree.begin_step();
  REQUIRE(next.add(grandchild));
  CHECK(plan.build(next).num_copies == 0);  // the step before has them
  auto second = std::move(next).submit();
  source.leave();
  fork.leave();
  CHECK(tree.stats().leaving_sequences == 2);
  std::vector<Tree::Sequence> others;  // no other sequence gets the slots of a copy
  for (int i = 0; i < 20; ++i) {
    others.push_back(tree.insert(iota(1000 * (i + 1), 9)));
    others.back().for_each_run({0, 9}, [&](const Piece& piece) {
      for (const PlanView::RowCopy& copy : copies) {
        CHECK(piece.chunk != copy.source_chunk);
        CHECK(piece.chunk != copy.target_chunk);
      }
    });
  }
  {
    auto done = std::move(first).finish();
  }
  check_invariants(tree);
  CHECK(tree.stats().leaving_sequences == 0);
  CHECK(chunkattn::detail::TreeAccess::core(tree).pending_copies.empty());
  {
    auto done = std::move(second).finish();
  }
  check_invariants(tree);
}

TEST_CASE("a fork that leaves before its copy was made takes the copy back") {
  using Tree = PrefixTree<int, 8>;
  for (const bool in_step : {false, true}) {
    Tree tree(PoolAllocator{.max_chunks = 8}, {.min_run = 8});
    AttentionPlan plan;
    auto source = tree.insert(iota(0, 9));
    source.append(iota(90, 3));
    source.mark_loaded({0, 12});
    {
      auto fork = source.fork();
      CHECK(chunkattn::detail::TreeAccess::core(tree).pending_copies.size() == 1);
      fork.append(5);
      auto step = tree.begin_step();
      if (in_step) REQUIRE(step.add(fork));
      fork.leave();
      CHECK(chunkattn::detail::TreeAccess::core(tree).pending_copies.size() ==
            (in_step ? 1 : 0));  // a step may read them
      const auto view = plan.build(step);
      CHECK(view.num_copies == (in_step ? 1 : 0));
      auto done = std::move(step).finish();
    }
    check_invariants(tree);
    CHECK(chunkattn::detail::TreeAccess::core(tree).pending_copies.empty());
    source.leave();
    CHECK(tree.stats().leaving_sequences == 0);
    std::vector<int> path = iota(0, 9);
    for (const int t : iota(90, 3)) path.push_back(t);
    CHECK(tree.match_prefix(path).cached == 12);
    // What the source wrote is cache; a fork's unwritten duplicate is not.
    if (!in_step) CHECK(tree.stats().stored_tokens == 12);
  }
}

TEST_CASE("a fork that leaves before its copy was made leaves it to forks that share the rows") {
  PrefixTree<int, 8> tree({}, {.min_run = 8});
  AttentionPlan plan;
  auto source = tree.insert(iota(0, 9));
  source.append(iota(90, 3));
  source.mark_loaded({0, 12});
  auto fork = source.fork();
  fork.append(iota(50, 5));
  auto twin = fork.fork();  // what is to be copied is long enough now to be shared
  std::vector<int> path = iota(0, 9);
  for (const int t : iota(90, 3)) path.push_back(t);
  fork.leave();
  CHECK(tree.match_prefix(path).cached == 9);  // what is to be copied is not there yet
  check_invariants(tree);
  auto step = tree.begin_step();
  REQUIRE(step.add(twin));
  CHECK(plan.build(step).num_copies == 1);
  (void)std::move(step).finish();
  CHECK(twin.num_written() == 17);
}

TEST_CASE("a copy that a step in flight makes holds both ends when all have left") {
  PrefixTree<int, 8, PoolAllocator, test::NoRetention> tree({}, {.min_run = 8});
  AttentionPlan plan;
  auto source = tree.insert(iota(0, 9));
  source.append(iota(90, 3));
  source.mark_loaded({0, 12});
  auto fork = source.fork();
  fork.append(7);
  auto step = tree.begin_step();
  REQUIRE(step.add(fork));
  CHECK(plan.build(step).num_copies == 1);
  auto flight = std::move(step).submit();
  fork.leave();
  source.leave();
  CHECK(tree.stats().leaving_sequences == 2);
  {
    auto done = std::move(flight).finish();
  }
  CHECK(tree.stats().leaving_sequences == 0);
  CHECK(tree.stats().used_chunks == 0);
}

TEST_CASE("a fork of a sequence that waits, and has nothing to compute, waits too") {
  PrefixTree<int, 8, PoolAllocator, test::NoRetention> tree;
  auto writer = tree.insert(iota(0, 16));
  auto waits = tree.insert(iota(0, 16), {.compute_last = false});
  CHECK(waits.num_uncomputed() == 0);
  auto fork = waits.fork();
  CHECK(fork.num_pending() == 16);
  fork.append(7);
  auto step = tree.begin_step();
  CHECK(step.add(fork).waits_for() == writer.id());
}

TEST_CASE("where a writer leaves, the writer of what comes after it continues") {
  PrefixTree<int, 8, PoolAllocator, test::NoRetention> tree;
  auto a = tree.insert(iota(0, 8));
  auto b = tree.insert(iota(0, 12));
  auto c = tree.insert(iota(0, 4));
  CHECK(c.take_over() == 4);
  CHECK(a.num_pending() == 4);
  c.leave();
  CHECK(a.num_pending() == 0);
  CHECK(a.num_uncomputed() == 8);
  CHECK(b.num_pending() == 8);
}

TEST_CASE("who has waited decodes like any other afterwards") {
  PrefixTree<int, 8, PoolAllocator, test::NoRetention> tree;
  AttentionPlan plan;
  auto a = tree.insert(iota(0, 12)), b = tree.insert(iota(0, 12));
  const auto& core = chunkattn::detail::TreeAccess::core(tree);
  const auto& record = core.sequences[chunkattn::detail::TreeAccess::index(b)];
  CHECK(record.may_wait);
  for (int i = 0; i < 2; ++i) {
    auto step = tree.begin_step();
    REQUIRE(step.add(a));
    REQUIRE(step.add(b));
    (void)plan.build(step);
    auto done = std::move(step).finish();
    done.commit(std::vector<int>{1, 2});
  }
  CHECK_FALSE(record.may_wait);  // DecodingRun takes it
}

TEST_CASE("after device_idle() steps overlap again") {
  PrefixTree<int, 8, PoolAllocator, test::NoRetention> tree;
  AttentionPlan plan;
  auto s = tree.insert(iota(0, 12));
  const auto submit = [&] {
    auto step = tree.begin_step();
    CHECK(step.add(s));
    (void)plan.build(step);
    return std::move(step).submit();
  };
  {
    const auto lost = submit();
  }
  tree.device_idle();
  auto first = submit();
  auto second = submit();
}

TEST_CASE("free slots after a tail that has gone are its parent's again") {
  PrefixTree<int, 8, PoolAllocator, test::NoRetention> tree;
  auto a = tree.insert(iota(0, 5)), b = tree.insert(iota(0, 5));
  a.append(7);
  CHECK(b.chunks_needed(3) == 1);
  a.leave();
  CHECK(b.chunks_needed(3) == 0);
  b.append(iota(50, 3));
  CHECK(tree.stats().used_chunks == 1);
  check_invariants(tree);
}

TEST_CASE("who is waited for is named, also after it has left a step in flight") {
  PrefixTree<int, 8, PoolAllocator, test::NoRetention> tree;
  AttentionPlan plan;
  auto a = tree.insert(iota(0, 5)), b = tree.insert(iota(0, 5));
  const SequenceId id = a.id();
  auto step = tree.begin_step();
  REQUIRE(step.add(a));
  (void)plan.build(step);
  const auto flight = std::move(step).submit();
  a.leave();
  CHECK(b.waits_for() == id);
}

TEST_CASE("a sequence waits for the step that has its discarded rows, not for any other") {
  PrefixTree<int, 8, PoolAllocator, test::NoRetention> tree;
  AttentionPlan plan;
  auto a = tree.insert(iota(0, 5)), b = tree.insert(iota(50, 5));
  const auto submit = [&](auto& s) {
    auto step = tree.begin_step();
    REQUIRE(step.add(s));
    (void)plan.build(step);
    return std::move(step).submit();
  };
  auto first = submit(b);
  const auto second = submit(a), third = submit(b);
  {
    auto done = std::move(first).finish();  // whose output is given up
  }
  b.append(9);
  auto step = tree.begin_step();
  CHECK(step.add(b).reason() == AddResult::Reason::waits_for_step);
  CHECK(step.add(b).step() == third.number());
}

TEST_CASE("rows of a step that is over are not those of the next one") {
  PrefixTree<int, 8, PoolAllocator, test::NoRetention> tree;
  AttentionPlan plan;
  auto s = tree.insert(iota(0, 5));
  const auto finish = [&] {
    auto step = tree.begin_step();
    REQUIRE(step.add(s));
    (void)plan.build(step);
    return std::move(step).finish();
  };
  std::optional done(finish());
  const auto rows = done->rows();
  CHECK(rows.size() == 1);
  done.reset();
  s.append(7);
  const auto next = finish();
  CHECK(next.rows().size() == 1);
  CHECK(refused([&] { (void)rows.begin(); }).starts_with("rows() = of a step that is over"));
}

TEST_CASE("nothing is evicted for what cannot fit") {
  PrefixTree<int, 4> tree(PoolAllocator{.max_chunks = 6});
  const std::vector<int> cached = iota(0, 8);
  tree.insert(cached).mark_loaded({0, 8});
  const auto live = tree.insert(iota(100, 8));
  CHECK_FALSE(tree.try_insert(iota(200, 20)));
  CHECK(tree.match_prefix(cached).cached == 8);
  CHECK(tree.stats().evicted_chunks == 0);
}

TEST_CASE("a plan follows a tail whose chunk was given back and is now another's") {
  PrefixTree<int, 4, PoolAllocator, test::NoRetention> tree;
  AttentionPlan plan;
  auto s = tree.insert(iota(0, 2)), other = tree.insert(iota(100, 4));
  s.append(7);
  s.mark_loaded({0, 2});
  const std::vector<int> drafts = iota(70, 3);
  for (int i = 0; i < 2; ++i) {
    auto step = tree.begin_step();
    REQUIRE(step.add(s, 50, {.tokens = drafts}));
    const auto view = plan.build(step);
    const int last = view.num_rows - 1;
    std::vector<ChunkIndex> read, own;
    for (std::int32_t n = view.row_segment[last]; n >= 0; n = view.segments[n].parent)
      for (int p = view.segments[n].num_pieces; p-- > 0;) {
        const Piece& piece = view.pieces[view.segments[n].piece_begin + p];
        if (visible_length(piece, view.row_kv_len[last]) > 0) read.push_back(piece.chunk);
      }
    s.for_each_run({0, view.row_kv_len[last]},
                   [&](const Piece& piece) { own.push_back(piece.chunk); });
    std::sort(read.begin(), read.end());
    std::sort(own.begin(), own.end());
    read.erase(std::unique(read.begin(), read.end()), read.end());
    own.erase(std::unique(own.begin(), own.end()), own.end());
    CHECK(read == own);
    auto done = std::move(step).finish();
    done.commit(*done.rows().begin(), 1);  // all drafts are wrong: the second chunk is free again
    other.append(5);                       // which changes no version, and takes it
  }
}

TEST_CASE(
    "free slots of a chunk are the last node's in it, where a merge has moved what was between") {
  using Tree = PrefixTree<int, 8>;
  Tree tree(PoolAllocator{.max_chunks = 6});
  AttentionPlan plan;
  const auto answer = [&](std::vector<Tree::Sequence>& batch, const std::vector<int>& outputs) {
    for (const int output : outputs)
      test::decode(tree, plan, batch, [&](const ScheduledSequence&) { return output; });
  };
  const auto prompt = iota(0, 9);  // one token of which is in the second chunk
  std::vector<Tree::Sequence> first, second;
  first.push_back(tree.insert(prompt));
  answer(first, {50, 51, 60, 61});  // behind the prompt
  second.push_back(tree.insert(prompt));
  answer(second, {50, 51, 70, 71});  // in a chunk of its own
  second.clear();
  first.clear();  // 50 and 51 are there already; 60 goes on after those
  REQUIRE(tree.stats().merged_tokens == 2);
  REQUIRE(tree.match_prefix(test::iota(0, 9)).cached == 9);
  check_invariants(tree);
  {
    auto again = prompt;  // which makes them younger than 60
    again.insert(again.end(), {50, 51, 70, 71, 1});
    (void)tree.insert(again);
  }
  CHECK(tree.stats().used_chunks == 3);
  (void)tree.insert(iota(1000, 8 * 4));  // takes a chunk from the cache
  check_invariants(tree);
  REQUIRE(tree.match_prefix(prompt).cached == 9);
  auto other = prompt;
  other.push_back(80);
  CHECK(tree.chunks_needed(other) == 2);  // both of them are the prompt's
}
