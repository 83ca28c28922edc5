// Steps: what they keep and give back when they are cancelled, lost, or finished without outputs.
#include <doctest/doctest.h>

#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <ranges>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "tests/support/random.hpp"
#include "tests/support/retention.hpp"
#include "tests/support/step_device.hpp"
#include "tests/support/steps.hpp"

using namespace chunkattn;
using test::iota;

namespace {

using Tree = PrefixTree<int, 4, PoolAllocator, test::NoRetention>;
using CachingTree = PrefixTree<int, 4>;

/// A tree, its device and a plan.
template <class T>
struct Bench {
  explicit Bench(std::size_t chunks = max_pool_chunks)
      : tree(PoolAllocator{.max_chunks = chunks}) {}
  typename T::Finished finish(typename T::Step step) {
    return device.finish(plan, std::move(step));
  }
  /// One step of these alone; commits `output` where there is one.
  void run(std::initializer_list<typename T::Sequence*> sequences, int output = 9) {
    auto step = tree.begin_step();
    for (auto* s : sequences) REQUIRE(step.add(*s));
    auto done = finish(std::move(step));
    for (const ScheduledSequence row : done.rows()) done.commit(row, output);
  }
  typename T::InFlight submit(typename T::Step step) {
    device.queue(plan.build(step));
    return std::move(step).submit();
  }

  T tree;
  test::StepDevice<T> device{tree};
  AttentionPlan plan;
};

template <class Rows>
std::size_t count(Rows rows) {
  std::size_t n = 0;
  for (const ScheduledSequence row : rows) n += row.num_rows > 0 ? 1 : 0;
  CHECK(rows.size() == n);
  CHECK(rows.empty() == (n == 0));
  return n;
}

}  // namespace

TEST_CASE("one sequence: prefill in parts, then outputs, each the next step's token") {
  Bench<Tree> b;
  auto s = b.tree.insert(iota(1, 10));
  auto step = b.tree.begin_step();
  CHECK(step.number() == 1);
  const ScheduledSequence part = step.add(s, 7).row();
  CHECK(part.sequence == s.id());
  CHECK(part.num_rows == 7);
  CHECK_FALSE(part.has_output);
  CHECK(s.num_uncomputed() == 3);
  CHECK(s.num_scheduled() == 7);
  CHECK(s.num_written() == 0);
  CHECK(s.num_reserved() == 0);
  {
    const auto done = b.finish(std::move(step));
    CHECK(count(done.rows()) == 0);
  }
  CHECK(s.num_written() == 7);
  step = b.tree.begin_step();
  const ScheduledSequence rest = step.add(s).row();
  CHECK(rest.position == 7);
  CHECK(rest.output_row() == 2);
  CHECK(rest.has_output);
  CHECK(s.num_reserved() == 1);
  {
    auto done = b.finish(std::move(step));
    CHECK(s.num_written() == 10);
    for (const ScheduledSequence row : done.rows()) done.commit(row, 42);
    CHECK(count(done.rows()) == 0);
  }
  CHECK(s.tokens().back() == 42);
  CHECK(s.num_uncomputed() == 1);
  CHECK(s.num_written() == 10);
  CHECK(s.num_reserved() == 0);
  b.run({&s}, 43);
  CHECK(s.size() == 12);
  CHECK(b.device.wrong(s) == 0);
  CHECK(b.device.wrong_reads() == 0);
}

TEST_CASE("rows with outputs are a range that can be counted, and gone over again") {
  using Rows = decltype(std::declval<const Tree::Finished&>().rows());
  static_assert(std::ranges::forward_range<Rows> && std::ranges::sized_range<Rows>);
  static_assert(
      std::sized_sentinel_for<std::ranges::iterator_t<Rows>, std::ranges::iterator_t<Rows>>);
  Bench<Tree> b;
  std::vector<Tree::Sequence> all;
  for (int i = 0; i < 5; ++i) all.push_back(b.tree.insert(iota(10 * i, 3)));
  auto step = b.tree.begin_step();
  for (int i = 0; i < 5; ++i) REQUIRE(step.add(all[static_cast<std::size_t>(i)], i == 1 ? 2 : 9));
  auto done = b.finish(std::move(step));
  all[3].leave();
  const auto rows = done.rows();  // 0, 2 and 4: the others have no output
  CHECK(rows.size() == 3);
  CHECK(std::ranges::distance(rows) == 3);
  const std::vector<ScheduledSequence> kept(rows.begin(), rows.end());
  REQUIRE(kept.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {  // whose row it is
    CHECK(kept[i].index == 2 * static_cast<int>(i));
    CHECK(kept[i].sequence == all[2 * i].id());
  }
  auto second = rows.begin();
  CHECK((*second++).index == 0);
  CHECK(rows.end() - second == 2);
  CHECK(rows.begin() - second == -1);
  CHECK(second - second == 0);
  std::ptrdiff_t left = 3;
  for (auto row = rows.begin(); row != rows.end(); ++row, --left) {
    CHECK(rows.end() - row == left);
    done.commit(*row, 9);
    CHECK(rows.end() - row == left);  // as many steps of the loop as before
  }
  CHECK(left == 0);
  CHECK(rows.size() == 0);
  CHECK(rows.empty());
}

TEST_CASE("the same prompt twice: both have an output, the cached one for one row of work") {
  Bench<CachingTree> b;
  const std::vector<int> prompt = iota(1, 13);
  std::vector<CachingTree::Sequence> batch;
  for (int user = 0; user < 3; ++user) {
    auto& chat = batch.emplace_back(b.tree.insert(prompt));
    CHECK(chat.num_cached() == (user == 0 ? 0u : 12u));
    auto step = b.tree.begin_step();
    CHECK(step.add(chat).row().num_rows == (user == 0 ? 13 : 1));
    auto done = b.finish(std::move(step));
    REQUIRE(count(done.rows()) == 1);
    for (const ScheduledSequence row : done.rows()) done.commit(row, 100 + user);
  }
  for (int token = 0; token < 5; ++token)
    test::decode(b.tree, b.plan, batch, [&](const ScheduledSequence& row) { return row.index; });
  for (int user = 0; user < 3; ++user) {
    auto& chat = batch[static_cast<std::size_t>(user)];
    CHECK(chat.size() == 13 + 1 + 5);
    CHECK(chat.token(13) == 100 + user);
    CHECK(chat.token(18) == user);
  }
  CHECK(b.tree.stats().stored_tokens == 13u + 3u * 6u);  // the prompt is held once
  check_invariants(b.tree);
}

TEST_CASE("a dropped step gives its slots back, and nothing of it happened") {
  Bench<Tree> b;
  auto s = b.tree.insert(iota(1, 7));
  b.run({&s});
  const TreeStats before = b.tree.stats();
  {
    auto step = b.tree.begin_step();
    CHECK(step.add(s, 40, {.tokens = iota(50, 20)}));
    CHECK(s.num_reserved() == 21);
    CHECK(b.tree.stats().used_chunks == 8);
    const auto view = b.plan.build(step);
    CHECK(view.is_current());
    {
      const auto dropped = std::move(step);
    }
    CHECK_FALSE(view.is_current());
  }
  const TreeStats after = b.tree.stats();
  CHECK(after.used_chunks == before.used_chunks);
  CHECK(after.stored_tokens == before.stored_tokens);
  CHECK(after.cancelled_steps == before.cancelled_steps + 1);
  CHECK(s.num_reserved() == 0);
  CHECK(s.num_scheduled() == 7);
  CHECK(s.num_uncomputed() == 1);
  b.run({&s});
  CHECK(b.device.wrong(s) == 0);
  check_invariants(b.tree);
}

TEST_CASE("what a dropped step was to write cannot be read") {
  for (const bool lost : {false, true}) {
    CAPTURE(lost);
    Bench<Tree> b;
    auto writer = b.tree.insert(iota(1, 10)), second = b.tree.insert(iota(1, 10));
    {
      auto step = b.tree.begin_step();
      CHECK(step.add(writer));
      CHECK(step.add(second));
      (void)b.plan.build(step);
      if (lost) {
        const auto dropped = std::move(step).submit();
      }
    }
    auto third = b.tree.insert(iota(1, 12));  // no step had it
    auto step = b.tree.begin_step();
    CHECK(step.add(third).waits_for() == writer.id());
    const AddResult blocked = step.add(second);
    CHECK_FALSE(blocked);
    CHECK((blocked.reason() == AddResult::Reason::waits_for_sequence) == !lost);
    {
      const auto dropped = std::move(step);
    }
    b.tree.device_idle();
    step = b.tree.begin_step();
    CHECK(step.add(second).waits_for() == writer.id());
    CHECK(step.add(writer));
    CHECK(step.add(second));
    CHECK(step.add(third));
    {
      const auto done = b.finish(std::move(step));
    }
    CHECK(b.device.wrong_reads() == 0);
    CHECK(b.device.wrong(second) == 0);
    CHECK(b.device.wrong(third) == 0);
    CHECK(second.num_written() == 10);
  }
}

TEST_CASE("a step that rests on a lost one has no outputs") {
  Bench<Tree> b;
  auto s = b.tree.insert(iota(1, 7));
  auto step = b.tree.begin_step();
  CHECK(step.add(s, 3));
  std::optional<Tree::InFlight> lost = b.submit(std::move(step));
  step = b.tree.begin_step();
  CHECK(step.add(s));
  auto flight = b.submit(std::move(step));
  lost.reset();
  b.device.run_all();
  auto done = std::move(flight).finish();
  CHECK(count(done.rows()) == 0);
  CHECK_THROWS_AS(done.commit(std::vector<int>{9}), InvalidArgument);
  done.commit(std::vector<int>{});
  CHECK(s.size() == 7);
  CHECK(s.num_uncomputed() == 7);
  check_invariants(b.tree);
}

TEST_CASE("the last to leave takes along copies whose step was lost") {
  Bench<PrefixTree<int, 16, PoolAllocator, test::NoRetention>> b;
  auto other = b.tree.insert(iota(100, 3));
  auto s = b.tree.insert(iota(1, 6));
  for (int i = 0; i < 4; ++i) b.run({&s});  // a fork copies the K/V of three outputs
  auto fork = s.fork();
  CHECK(b.tree.stats().copied_tokens == 3);
  auto step = b.tree.begin_step();
  CHECK(step.add(fork));
  std::optional<PrefixTree<int, 16, PoolAllocator, test::NoRetention>::InFlight> lost =
      b.submit(std::move(step));
  step = b.tree.begin_step();
  CHECK(step.add(other));
  auto flight = b.submit(std::move(step));  // its plan does not carry the copy once more
  lost.reset();
  fork.leave();
  s.leave();
  b.device.run_all();
  {
    const auto done = std::move(flight).finish();
  }
  CHECK(b.tree.stats().leaving_sequences == 2);  // the copy is still to be made, for all we know
  other.leave();
  CHECK(b.tree.stats().leaving_sequences == 0);
  CHECK(b.tree.stats().used_chunks == 0);
  check_invariants(b.tree);
}

TEST_CASE("what no sequence is left to write has no writer, though a step still holds it") {
  Bench<Tree> b;
  auto first = b.tree.insert(iota(1, 20));
  std::vector<int> branch = iota(1, 8);
  branch.push_back(90);
  auto other = b.tree.insert(branch);  // now first's prompt is 8 tokens and 12
  auto step = b.tree.begin_step();
  CHECK(step.add(first, 3));
  auto flight = b.submit(std::move(step));
  auto second = b.tree.insert(iota(1, 20));
  CHECK(second.take_over() == 12);  // not the 8: a step is at them
  first.leave();
  second.leave();
  check_invariants(b.tree);
  auto stranger = b.tree.insert(iota(50, 6));
  auto third = b.tree.insert(iota(1, 20));
  {
    b.device.run_all();
    const auto done = std::move(flight).finish();
  }
  check_invariants(b.tree);
  b.run({&other, &third, &stranger});
  CHECK(third.num_written() == 20);
  CHECK(b.device.wrong(third) == 0);
  CHECK(b.device.wrong_reads() == 0);
}

TEST_CASE("device_idle() says nothing of a step that is still open") {
  Bench<Tree> b;
  auto other = b.tree.insert(iota(90, 3)), s = b.tree.insert(iota(1, 10));
  auto step = b.tree.begin_step();
  CHECK(step.add(other));
  auto flight = b.submit(std::move(step));
  step = b.tree.begin_step();
  CHECK(step.add(s));
  b.tree.device_idle();
  {
    const auto lost = b.submit(std::move(step));
  }
  s.leave();
  {
    const auto done = std::move(flight).finish();
  }
  CHECK(b.tree.stats().leaving_sequences == 1);  // the device may be writing its slots
  b.tree.device_idle();
  CHECK(b.tree.stats().leaving_sequences == 0);
}

TEST_CASE("a step that is assigned over is cancelled, one in flight is abandoned") {
  Bench<Tree> b;
  auto s = b.tree.insert(iota(1, 4));
  auto step = b.tree.begin_step();
  CHECK(step.add(s));
  Tree::Step other = std::move(step);
  auto flight = b.submit(std::move(other));
  Bench<Tree> c;
  auto t = c.tree.insert(iota(1, 4));
  auto second = c.tree.begin_step();
  CHECK(second.add(t));
  flight = c.submit(std::move(second));
  CHECK(b.tree.stats().abandoned_steps == 1);
  CHECK(c.tree.stats().abandoned_steps == 0);
  second = c.tree.begin_step();
  second = b.tree.begin_step();
  CHECK(c.tree.stats().cancelled_steps == 1);
}

TEST_CASE("leaving between build and write is harmless: the slots are the step's until it ends") {
  for (const bool in_flight : {false, true}) {
    CAPTURE(in_flight);
    Bench<Tree> b(5);  // so few chunks that what is freed is taken again at once
    auto a = b.tree.insert(iota(1, 6));
    auto goes = b.tree.insert(iota(1, 7));
    auto step = b.tree.begin_step();
    CHECK(step.add(a));
    CHECK(step.add(goes));
    b.device.queue(b.plan.build(step));
    goes.leave();
    auto eager = b.tree.insert(iota(90, 4));
    CHECK(b.tree.stats().leaving_sequences == 1);
    std::optional<Tree::InFlight> flight;
    if (in_flight) flight = std::move(step).submit();
    b.device.run_all();
    {
      auto done = in_flight ? std::move(*flight).finish() : std::move(step).finish();
      CHECK(count(done.rows()) == 1);
      for (const ScheduledSequence row : done.rows()) CHECK(row.sequence == a.id());
    }
    CHECK(b.tree.stats().leaving_sequences == 0);
    CHECK(b.device.wrong_reads() == 0);
    CHECK(b.device.wrong(a) == 0);
    CHECK(a.num_written() == 6);
    b.run({&eager});
    CHECK(b.device.wrong_reads() == 0);
    check_invariants(b.tree);
  }
}

TEST_CASE(
    "the only writer leaves while its step is open: who waits for it reads what was written") {
  Bench<Tree> b;
  auto writer = b.tree.insert(iota(1, 10));
  auto step = b.tree.begin_step();
  CHECK(step.add(writer, 6));
  auto second = b.tree.insert(iota(1, 10));
  writer.leave();
  auto flight = b.submit(std::move(step));
  step = b.tree.begin_step();
  const AddResult blocked = step.add(second);
  CHECK(blocked.reason() == AddResult::Reason::waits_for_step);
  CHECK(blocked.step() == 1);
  b.device.run_all();
  {
    const auto done = std::move(flight).finish();
  }
  CHECK(second.num_written() == 6);
  const AddResult added = step.add(second);
  REQUIRE(added);
  CHECK(added.row().position == 6);
  {
    const auto done = b.finish(std::move(step));
  }
  CHECK(b.device.wrong(second) == 0);
  CHECK(second.num_written() == 10);
  CHECK(b.tree.stats().reassigned_nodes == 1);
}

TEST_CASE("a step lost in flight holds what it may touch until a later one has finished") {
  for (const bool idle : {false, true}) {
    CAPTURE(idle);
    Bench<Tree> b(6);
    auto stays = b.tree.insert(iota(50, 3));
    {
      auto goes = b.tree.insert(iota(1, 10));
      auto step = b.tree.begin_step();
      CHECK(step.add(goes));
      {
        const auto lost = b.submit(std::move(step));
      }
      CHECK(b.tree.stats().abandoned_steps == 1);
      CHECK(goes.num_written() == 0);
    }
    CHECK(b.tree.stats().used_chunks == 4);
    CHECK(b.tree.stats().leaving_sequences == 1);
    CHECK_FALSE(b.tree.try_insert(iota(70, 12)));
    if (idle) {
      b.tree.device_idle();
    } else {
      auto step = b.tree.begin_step();
      CHECK(step.add(stays));
      const auto flight = [&] {
        auto f = b.submit(std::move(step));
        CHECK(b.tree.stats().used_chunks == 4);
        b.device.run_all();  // the device runs the lost one first
        return std::move(f).finish();
      }();
    }
    CHECK(b.tree.stats().used_chunks == 1);
    CHECK(b.tree.stats().leaving_sequences == 0);
    CHECK(b.tree.try_insert(iota(70, 12)));
    CHECK(b.device.wrong(stays) == 0);
    check_invariants(b.tree);
  }
}

TEST_CASE("what rests on a step that was lost counts for nothing and is computed again") {
  Bench<Tree> b;
  auto s = b.tree.insert(iota(1, 6));
  auto step = b.tree.begin_step();
  CHECK(step.add(s, 4));
  std::optional<Tree::InFlight> lost = b.submit(std::move(step));
  step = b.tree.begin_step();
  CHECK(step.add(s));
  auto later = b.submit(std::move(step));
  lost.reset();
  step = b.tree.begin_step();
  CHECK(step.add(s).reason() == AddResult::Reason::waits_for_step);
  b.device.run_all();
  const auto late = std::move(later).finish();
  CHECK(count(late.rows()) == 0);
  CHECK(s.num_written() == 0);
  CHECK(s.num_uncomputed() == 6);
  CHECK(s.num_reserved() == 0);
  CHECK(step.add(s).row().position == 0);
  auto done = b.finish(std::move(step));
  for (const ScheduledSequence row : done.rows()) done.commit(row, 1);
  CHECK(s.num_written() == 6);
  CHECK(b.device.wrong(s) == 0);
  check_invariants(b.tree);
}

TEST_CASE("a job that is taken over is left by the one that had it, and counted once") {
  for (const std::size_t done : {0u, 4u}) {
    CAPTURE(done);
    Bench<Tree> b;
    auto writer = b.tree.insert(iota(1, 10)), next = b.tree.insert(iota(1, 10));
    if (done > 0) {
      auto step = b.tree.begin_step();
      REQUIRE(step.add(writer, done));
      const auto finished = b.finish(std::move(step));
    }
    CHECK(writer.num_uncomputed() == 10 - done);
    CHECK(next.take_over() == 10 - done);
    CHECK(writer.num_uncomputed() == 1);  // its last token, for an output
    CHECK(next.num_uncomputed() == 10 - done);
    CHECK(b.tree.stats().reassigned_nodes == 1);
    CHECK(next.take_over() == 0);
    CHECK(b.tree.stats().reassigned_nodes == 1);
    b.run({&next});
    b.run({&writer});
    CHECK(b.device.wrong(writer) + b.device.wrong(next) == 0);
    check_invariants(b.tree);
  }
}

TEST_CASE("several steps lost, in any order: every token is computed again") {
  for (const bool oldest_first : {true, false})
    for (const bool idle : {true, false}) {
      CAPTURE(oldest_first);
      CAPTURE(idle);
      Bench<Tree> b;
      auto s = b.tree.insert(iota(1, 8)), other = b.tree.insert(iota(50, 9));
      std::vector<Tree::InFlight> flying;
      if (!oldest_first) {  // so that the tree's records of steps are used again from the last on
        for (int i = 0; i < 3; ++i) flying.push_back(b.submit(b.tree.begin_step()));
        for (auto& flight : flying) {
          const auto done = std::move(flight).finish();
        }
        flying.clear();
        b.device.reset();
      }
      for (int i = 0; i < 3; ++i) {
        auto step = b.tree.begin_step();
        CHECK(step.add(i == 0 ? other : s, 4));
        flying.push_back(b.submit(std::move(step)));
      }
      // Others may read the first positions of what was lost only when they are written.
      auto third = b.tree.insert(std::vector<int>{1, 2, 3, 4, 99});
      while (flying.size() > 1) flying.erase(oldest_first ? flying.begin() + 1 : flying.end() - 1);
      auto step = b.tree.begin_step();
      CHECK(step.add(third).waits_for() == s.id());
      b.device.run_next();
      b.device.reset();  // nothing of what was lost was ever run
      {
        const auto done = std::move(flying[0]).finish();
      }
      if (idle) b.tree.device_idle();
      CHECK(step.add(other));
      if (!idle) CHECK(step.add(s).reason() == AddResult::Reason::waits_for_step);
      {
        const auto done = b.finish(std::move(step));
      }
      CHECK(s.num_uncomputed() == 8);
      CHECK(s.num_reserved() == 0);
      step = b.tree.begin_step();
      CHECK(step.add(s).row().position == 0);
      CHECK(step.add(third));
      auto done = b.finish(std::move(step));
      CHECK(count(done.rows()) == 2);
      CHECK(b.device.wrong_reads() == 0);
      CHECK(b.device.wrong(s) + b.device.wrong(third) + b.device.wrong(other) == 0);
      check_invariants(b.tree);
    }
}

TEST_CASE("one step before the device: its tokens are the outputs to come") {
  Bench<Tree> b;
  std::vector<Tree::Sequence> batch;
  for (int i = 0; i < 3; ++i) batch.push_back(b.tree.insert(iota(10 * i, 5)));
  std::optional<Tree::InFlight> previous;
  const auto finish = [&] {
    b.device.run_next();
    auto done = std::move(*previous).finish();
    for (const ScheduledSequence row : done.rows()) done.commit(row, b.device.sampled(row, 0));
  };
  for (int i = 0; i < 20; ++i) {
    auto step = b.tree.begin_step();
    std::vector<ScheduledSequence> rows;
    for (auto& s : batch) rows.push_back(step.add(s).row());
    const auto view = b.plan.build(step);
    REQUIRE(view.unknown_tokens().size() == (i == 0 ? 0u : 3u));
    for (const auto& unknown : view.unknown_tokens())
      CHECK(unknown.position == rows[static_cast<std::size_t>(unknown.row)].position);
    b.device.queue(view);
    for (const ScheduledSequence& row : rows) b.device.name(row);
    auto flight = std::move(step).submit();
    if (previous) finish();
    previous = std::move(flight);
  }
  finish();
  for (auto& s : batch) {
    CHECK(s.size() == 25);
    CHECK(s.num_written() == 24);
    CHECK(b.device.wrong(s) == 0);
  }
  CHECK(b.device.wrong_reads() == 0);
  check_invariants(b.tree);
}

TEST_CASE(
    "outputs that are not committed are discarded, and with them the step that starts on them") {
  Bench<Tree> b;
  auto s = b.tree.insert(iota(1, 7));
  auto step = b.tree.begin_step();
  CHECK(step.add(s));
  auto first = b.submit(std::move(step));
  step = b.tree.begin_step();
  CHECK(step.add(s, 10, {.count = 3}));
  auto second = b.submit(std::move(step));
  b.device.run_next();
  {
    const auto done = std::move(first).finish();
  }  // a stop sequence: nothing more is wanted
  CHECK(s.num_reserved() == 0);
  CHECK(s.size() == 7);
  s.append(77);  // the user continues
  CHECK(s.num_uncomputed() == 1);
  step = b.tree.begin_step();
  const AddResult blocked = step.add(s);  // the second step still writes at the same slot
  CHECK(blocked.reason() == AddResult::Reason::waits_for_step);
  CHECK(blocked.step() == second.number());
  b.device.reset();
  const auto none = std::move(second).finish();
  CHECK(count(none.rows()) == 0);
  CHECK(step.add(s));
  auto done = b.finish(std::move(step));
  for (const ScheduledSequence row : done.rows()) done.commit(row, 5);
  CHECK(s.tokens() == std::vector<int>{1, 2, 3, 4, 5, 6, 7, 77, 5});
  CHECK(b.device.wrong(s) == 0);
  check_invariants(b.tree);
}

TEST_CASE(
    "a fork takes no slot that a step in flight still writes, though its output is discarded") {
  Bench<Tree> b;
  auto s = b.tree.insert(iota(1, 1));
  s.append(iota(2, 5));  // a private tail, long enough to be shared
  auto step = b.tree.begin_step();
  CHECK(step.add(s));
  auto first = b.submit(std::move(step));
  step = b.tree.begin_step();
  CHECK(step.add(s));  // writes after the tail, on an output to come
  auto second = b.submit(std::move(step));
  b.device.run_next();
  {
    const auto done = std::move(first).finish();
  }  // which is discarded
  auto fork = s.fork();
  CHECK(b.tree.stats().forks_shared == 1);
  fork.append(iota(70, 4));
  const TokenRange range = fork.loadable();
  b.device.load(fork, range);  // by the host, while the second step may run
  fork.mark_loaded(range);
  b.device.run_next();
  {
    const auto done = std::move(second).finish();
  }
  CHECK(fork.num_written() == 10);
  CHECK(b.device.wrong(fork) == 0);
  s.append(iota(80, 3));
  b.run({&s});
  CHECK(b.device.wrong(s) + b.device.wrong(fork) == 0);
  check_invariants(b.tree);
}

TEST_CASE("drafts: the accepted stay written, the rest are dropped, whatever the chunk borders") {
  test::Random random(5);
  for (int round = 0; round < test::scaled(60); ++round) {
    Bench<Tree> b;
    auto s = b.tree.insert(iota(1, static_cast<std::size_t>(random.uniform(1, 9))));
    for (int i = 0; i < 6; ++i) {
      const std::vector<int> drafts = iota(30, random.index(10));
      auto step = b.tree.begin_step();
      CHECK(step.add(s, 100, {.tokens = drafts}));
      auto done = b.finish(std::move(step));
      const std::size_t right = random.index(drafts.size() + 1), size = s.size();
      std::vector<int> outputs(drafts.begin(), drafts.begin() + static_cast<std::ptrdiff_t>(right));
      outputs.push_back(8);
      for (const ScheduledSequence row : done.rows()) done.commit(row, outputs);
      REQUIRE(s.size() == size + right + 1);
      REQUIRE(s.num_written() == s.size() - 1);
      REQUIRE(s.num_uncomputed() == 1);
      REQUIRE(s.num_reserved() == 0);
      REQUIRE(b.tree.stats().used_chunks == (s.size() + 3) / 4);
      REQUIRE(b.device.wrong(s) == 0);
      check_invariants(b.tree);
    }
  }
}

TEST_CASE("a refused tree of drafts gives back all of its slots beside those of others") {
  Tree tree(PoolAllocator{.max_chunks = 5});
  const std::vector<int> three{1, 2, 3}, four{5, 6, 7, 8}, other{9};
  const std::vector<int> two_drafts{1, 2}, four_drafts{1, 2, 3, 4};
  const std::vector<std::int32_t> two_roots{-1, -1}, four_roots{-1, -1, -1, -1};
  auto a = tree.insert(three), b = tree.insert(four), c = tree.insert(other);
  auto step = tree.begin_step();
  REQUIRE(step.add(
      a, 100,
      {.tokens = two_drafts,
       .parents = two_roots}));  // a chunk for the end of a, one of scratch slots for drafts
  CHECK(tree.stats().used_chunks == 5);
  CHECK_FALSE(step.add(b, 100, {.tokens = four_drafts, .parents = four_roots}));
  CHECK(tree.stats().used_chunks == 5);
  c.leave();
  // One chunk for the end of b. Its three drafts in scratch slots fit beside the one of a only
  // exactly.
  CHECK(step.add(b, 100, {.tokens = four_drafts, .parents = four_roots}));
  CHECK(tree.stats().used_chunks == 5);
}
