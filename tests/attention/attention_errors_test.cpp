// Bad arguments: the message names the argument, its value and what was expected, and neither K/V
// nor the outputs have been touched.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "support/attention_case.hpp"
#include "support/refused.hpp"

using namespace chunkattn;
using Reduce = CpuOptions::Reduce;

#if CHUNKATTN_EXCEPTIONS

namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

struct Fixture {
  test::Random random;
  test::RandomPlanOptions options = [] {
    test::RandomPlanOptions made;
    made.num_sequences = 5;
    made.max_length = 90;
    return made;
  }();
  test::AttentionCase<float> problem{random, options, 32, 2, 3};
  std::vector<float> out = std::vector<float>(problem.q.size(), 7.0f);
  std::vector<float> lse = std::vector<float>(problem.q.size() / 32, 7.0f);
  ChunkAttention<Cpu, 32> attention{1};

  // Runs with changed arguments; the outputs must keep what they held.
  std::string failure(const KvView<float>& layer, const PlanView& plan,
                      const std::vector<float>& q) {
    const std::string message = test::refused(
        [&] { attention.run(layer, LiveView::unchecked(plan), q, out, {.lse = lse}); });
    for (float value : out) REQUIRE(value == 7.0f);
    for (float value : lse) REQUIRE(value == 7.0f);
    return message;
  }
};

}  // namespace

TEST_CASE_FIXTURE(Fixture, "run: the plan and the layer") {
  const PlanView plan = problem.plan.view();
  const KvView<float> layer = problem.kv.view;

  PlanView empty = plan;
  empty.num_rows = 0;
  CHECK(contains(failure(layer, empty, problem.q), "plan.num_rows = 0: expected at least one"));

  KvView<float> changed = layer;
  changed.head_dim = 64;
  CHECK(contains(failure(changed, plan, problem.q), "layer.head_dim = 64"));
  changed = layer;
  changed.chunk_size = 16;
  CHECK(contains(failure(changed, plan, problem.q), "layer.chunk_size = 16: expected the plan's"));
  changed = layer;
  changed.num_kv_heads = 0;
  CHECK(contains(failure(changed, plan, problem.q), "layer.num_kv_heads = 0"));
  changed = layer;
  changed.num_kv_heads = 4;
  CHECK(contains(failure(changed, plan, problem.q), "num_qo_heads = 6: expected a multiple"));
  changed = layer;
  changed.k = nullptr;
  CHECK(contains(failure(changed, plan, problem.q), "layer.k = null"));
  changed = layer;
  changed.v = nullptr;
  CHECK(contains(failure(changed, plan, problem.q), "layer.v = null"));
  changed = layer;
  changed.k = reinterpret_cast<float*>(reinterpret_cast<std::uintptr_t>(layer.k) + 1);
  CHECK(contains(failure(changed, plan, problem.q), "layer.k = misaligned: expected an address"));
  changed = layer;
  changed.num_chunks = 1;
  CHECK(contains(failure(changed, plan, problem.q), "layer.num_chunks = 1: expected at least "));

  Array<Piece> pieces = problem.plan.pieces;
  for (Piece& piece : pieces)
    if (piece.chunk >= 0) piece.begin = 60;
  for (Piece& piece : pieces) piece.length += 10;
  PlanView broken = plan;
  broken.pieces = pieces.data();
  CHECK(contains(failure(layer, broken, problem.q),
                 "piece.begin = 60: expected positions of a chunk, 0 to 63"));
}

TEST_CASE_FIXTURE(Fixture, "run: buffers") {
  const LiveView plan = problem.plan.view();
  std::vector<float> q = problem.q;
  q.pop_back();
  CHECK(contains(failure(problem.kv.view, plan, q), "q.size() = " + std::to_string(q.size())));
  CHECK(contains(failure(problem.kv.view, plan, {}),
                 "q.size() = 0: expected a positive multiple of num_rows * head_dim = " +
                     std::to_string(plan.num_rows) + " * 32"));

  q = problem.q;
  CHECK(contains(test::refused([&] {
                   attention.run(problem.kv.view, plan, q, std::span(out).first(32), {.lse = lse});
                 }),
                 "out.size() = 32: expected q.size()"));
  CHECK(contains(
      test::refused(
          [&] { attention.run(problem.kv.view, plan, q, out, {.lse = std::span(lse).first(1)}); }),
      "lse.size() = 1: expected 0 or num_rows * num_qo_heads = " + std::to_string(lse.size())));
  const std::span<const float> null_q(static_cast<const float*>(nullptr), q.size());
  CHECK(contains(
      test::refused([&] { attention.run(problem.kv.view, plan, null_q, out, {.lse = lse}); }),
      "q.data() = null"));
  const std::span<float> null_out(static_cast<float*>(nullptr), q.size());
  CHECK(contains(
      test::refused([&] { attention.run(problem.kv.view, plan, q, null_out, {.lse = lse}); }),
      "out.data() = null"));
  const std::span<float> null_lse(static_cast<float*>(nullptr), lse.size());
  CHECK(contains(
      test::refused([&] { attention.run(problem.kv.view, plan, q, out, {.lse = null_lse}); }),
      "lse.data() = null"));

  const auto run = [&](std::span<const float> from, std::span<float> to, std::span<float> sums) {
    return test::refused([&] { attention.run(problem.kv.view, plan, from, to, {.lse = sums}); });
  };
  const auto shifted = [](const std::vector<float>& array) {
    return std::span(reinterpret_cast<float*>(reinterpret_cast<std::uintptr_t>(array.data()) + 2),
                     array.size());
  };
  const std::string misaligned =
      ".data() = misaligned: expected an address that is a multiple of the element's size";
  CHECK(run(shifted(q), out, lse) == "q" + misaligned);
  CHECK(run(q, shifted(out), lse) == "out" + misaligned);
  CHECK(run(q, out, shifted(lse)) == "lse" + misaligned);
  const std::size_t last = q.size() - 1, size = lse.size();
  std::vector<float> both(q.size() + 2 * size, 7.0f);
  std::copy(q.begin(), q.end(), both.begin() + static_cast<std::ptrdiff_t>(size));
  const std::span<float> there = std::span(both).subspan(size, q.size());
  for (const std::size_t at : {std::size_t{1}, size, size + last}) {
    const std::span<float> over = std::span(both).subspan(at, size);
    CHECK(run(there, out, over) == "lse = memory of q: expected memory of its own");
    CHECK(run(q, there, over) == "lse = memory of out: expected memory of its own");
  }
  for (float value : out) CHECK(value == 7.0f);
  for (float value : lse) CHECK(value == 7.0f);
  CHECK(std::equal(q.begin(), q.end(), there.begin()));
  CHECK(run(there, out, std::span(both).first(size)) == "no error");  // beside it
  CHECK(run(there, out, std::span(both).last(size)) == "no error");
}

TEST_CASE_FIXTURE(Fixture, "run: more heads than an int holds, refused before memory is touched") {
  const LiveView plan = problem.plan.view();
  const auto row = static_cast<std::size_t>(plan.num_rows) * 32;
  for (const std::size_t heads : {std::size_t{1} << 32, (std::size_t{1} << 32) + 6,
                                  std::size_t{1} << 31, std::size_t{1} << 17}) {
    const std::span<const float> huge(problem.q.data(), row * heads);
    const std::span<float> huge_out(out.data(), row * heads);
    const std::string wanted = "num_qo_heads = " + std::to_string(heads) + ": expected at most";
    CHECK(contains(
        test::refused([&] { attention.run(problem.kv.view, plan, huge, huge_out, {.lse = lse}); }),
        wanted));
    CHECK(contains(
        test::refused([&] { attention.run(problem.kv.view, plan, huge, out, {.lse = lse}); }),
        wanted));
    CHECK(contains(test::refused([&] { (void)reference_attention(problem.kv.view, plan, huge); }),
                   wanted));
  }
  for (float value : out) REQUIRE(value == 7.0f);
  // The oracle's other arguments.
  const std::span<const float> q(problem.q);
  KvView<float> changed = problem.kv.view;
  changed.num_kv_heads = 0;
  CHECK(contains(test::refused([&] { (void)reference_attention(changed, plan, q); }),
                 "kv.num_kv_heads = 0"));
  CHECK(contains(test::refused([&] { (void)reference_attention(problem.kv.view, plan, q, -1.0); }),
                 "sm_scale = -1"));
  CHECK(contains(test::refused([&] { (void)reference_attention(problem.kv.view, plan, q, 0.0); }),
                 "sm_scale = 0"));
  changed.num_kv_heads = static_cast<int>(q.size()) + 1;
  CHECK(contains(test::refused([&] { (void)reference_attention(changed, plan, q); }),
                 "expected a multiple of num_kv_heads"));
}

TEST_CASE_FIXTURE(Fixture, "write: sizes, chunks and copies, before anything is stored") {
  PlanView plan = problem.plan.view();
  const std::vector<float> before = problem.kv.k;
  std::vector<float> k(static_cast<std::size_t>(plan.num_rows) * 2 * 32, 1.0f);
  const auto failure_of = [&](const PlanView& view, std::span<const float> k_rows,
                              std::span<const float> v_rows) {
    return test::refused(
        [&] { attention.write(problem.kv.view, LiveView::unchecked(view), k_rows, v_rows); });
  };
  const std::span<const float> rows(k);
  CHECK(contains(failure_of(plan, rows.first(64), rows),
                 "k.size() = 64: expected num_rows * num_kv_heads * head_dim = 320"));
  CHECK(contains(failure_of(plan, rows, rows.first(32)),
                 "v.size() = 32: expected num_rows * num_kv_heads * head_dim = 320"));
  CHECK(contains(failure_of(plan, {static_cast<const float*>(nullptr), k.size()}, rows),
                 "k.data() = null"));
  const std::span<const float> shifted(
      reinterpret_cast<const float*>(reinterpret_cast<std::uintptr_t>(k.data()) + 1), k.size());
  CHECK(contains(failure_of(plan, shifted, rows), "k.data() = misaligned"));
  CHECK(contains(failure_of(plan, rows, shifted), "v.data() = misaligned"));

  Array<PlanView::WriteTarget> writes = problem.plan.writes;
  writes.back() = {problem.kv.view.num_chunks, 0};
  plan.writes = writes.data();
  CHECK(contains(failure_of(plan, rows, rows), "layer.num_chunks = "));
  writes.back().chunk = -7;
  CHECK(contains(failure_of(plan, rows, rows), "plan's chunk = -7"));
  writes.back() = {0, 64};
  CHECK(contains(failure_of(plan, rows, rows), "plan's write offset = 64"));

  plan = problem.plan.view();
  const PlanView::RowCopy copy{0, 60, 1, 0, 5};
  plan.copies = &copy;
  plan.num_copies = 1;
  CHECK(contains(failure_of(plan, rows, rows), "plan's row copy = 5"));
  CHECK(std::memcmp(before.data(), problem.kv.k.data(), 4 * before.size()) == 0);
}

TEST_CASE_FIXTURE(Fixture, "one that was moved from is refused, its successor works") {
  const LiveView plan = problem.plan.view();
  std::vector<float> k(static_cast<std::size_t>(plan.num_rows) * 2 * 32, 1.0f);
  attention.run(problem.kv.view, plan, problem.q, out, {.lse = lse});
  const std::vector<float> expected = out;
  {
    ChunkAttention<Cpu, 32> successor(std::move(attention));
    successor.run(problem.kv.view, plan, problem.q, out, {.lse = lse});
    CHECK(out == expected);
  }
  // The successor and its threads are gone.
  const std::vector<float> before = problem.kv.k;
  out.assign(out.size(), 7.0f);
  lse.assign(lse.size(), 7.0f);
  const std::string wanted = "attention = moved-from: expected one that was not moved from";
  CHECK(failure(problem.kv.view, plan, problem.q) == wanted);
  CHECK(test::refused([&] { attention.write(problem.kv.view, plan, k, k); }) == wanted);
  CHECK(test::refused([&] { attention.write(problem.kv.view, plan, k); }) == wanted);
  CHECK(std::memcmp(before.data(), problem.kv.k.data(), 4 * before.size()) == 0);
  // One that uses the caller's executor is no exception.
  SerialExecutor serial;
  ChunkAttention<Cpu, 32, 32, SerialExecutor> other(serial), assigned(serial);
  assigned = std::move(other);
  CHECK(test::refused([&] { other.run(problem.kv.view, plan, problem.q, out, {.lse = lse}); }) ==
        wanted);
  assigned.run(problem.kv.view, plan, problem.q, out, {.lse = lse});
  CHECK(out == expected);
  // It can be given a new value.
  attention = ChunkAttention<Cpu, 32>(2);
  out.assign(out.size(), 7.0f);
  attention.run(problem.kv.view, plan, problem.q, out, {.lse = lse});
  CHECK(out == expected);
}

namespace {

/// Calls a function of the test's in the middle of each call of an attention's.
struct Interrupted {
  std::function<void()> interrupt;

  int concurrency() const { return 1; }
  template <class F>
  void parallel_for(int n, F&& f) {
    for (int i = 0; i < n; ++i) {
      interrupt();
      f(i);
    }
  }
};

}  // namespace

TEST_CASE_FIXTURE(Fixture, "a call while another one runs is refused, and neither is harmed") {
  const LiveView plan = problem.plan.view();
  const std::vector<float> k(static_cast<std::size_t>(plan.num_rows) * 2 * 32, 1.0f);
  attention.write(problem.kv.view, plan, k, k);
  attention.run(problem.kv.view, plan, problem.q, out, {.lse = lse});
  const std::vector<float> expected = out, written = problem.kv.k;

  const std::string wanted =
      "attention = in use by another call: expected one call at a time: an object for each thread, "
      "or a lock around it";
  Interrupted executor;
  ChunkAttention<Cpu, 32, 32, Interrupted> shared(executor);
  std::vector<float> other_out(out.size(), 7.0f), other_k(k.size(), 9.0f);
  int refusals = 0;
  const auto try_both = [&] {
    CHECK(test::refused([&] { shared.run(problem.kv.view, plan, problem.q, other_out); }) ==
          wanted);
    CHECK(test::refused([&] { shared.write(problem.kv.view, plan, other_k, other_k); }) == wanted);
    ++refusals;
  };
  executor.interrupt = [&] { std::thread(try_both).join(); };
  const auto check = [&] {
    CHECK(refusals > 0);
    refusals = 0;
    CHECK(out == expected);
    CHECK(std::memcmp(problem.kv.k.data(), written.data(), 4 * written.size()) == 0);
    for (const float value : other_out) REQUIRE(value == 7.0f);
  };
  out.assign(out.size(), 7.0f);
  shared.run(problem.kv.view, plan, problem.q, out);
  check();
  shared.write(problem.kv.view, plan, k, k);
  check();
  executor.interrupt = try_both;  // the same thread from inside the call
  out.assign(out.size(), 7.0f);
  shared.run(problem.kv.view, plan, problem.q, out);
  check();

  // A call that fails is over.
  executor.interrupt = [] { throw 1; };
  CHECK_THROWS_AS(shared.run(problem.kv.view, plan, problem.q, other_out), int);
  CHECK_THROWS_AS(shared.write(problem.kv.view, plan, k, k), int);
  executor.interrupt = [] {};
  out.assign(out.size(), 7.0f);
  shared.run(problem.kv.view, plan, problem.q, out);
  CHECK(out == expected);
}

TEST_CASE_FIXTURE(Fixture, "two threads in one object: each result is right or refused") {
  const LiveView plan = problem.plan.view();
  ChunkAttention<Cpu, 32> shared(2);
  shared.run(problem.kv.view, plan, problem.q, out, {.lse = lse});
  std::atomic<int> wrong{0}, calls{0};
  const auto work = [&] {
    std::vector<float> mine(out.size());
    for (int i = 0; i < 200; ++i) {
      mine.assign(mine.size(), 7.0f);
      const std::string text =
          test::refused([&] { shared.run(problem.kv.view, plan, problem.q, mine); });
      if (text == "no error") {
        ++calls;
        wrong += mine != out;
      } else {
        wrong += !contains(text, "attention = in use by another call");
        wrong += mine != std::vector<float>(mine.size(), 7.0f);
      }
    }
  };
  std::thread other(work);
  work();
  other.join();
  CHECK(wrong == 0);
  CHECK(calls > 0);
}

TEST_CASE_FIXTURE(Fixture, "options: the largest counts are as good as large ones") {
  const LiveView plan = problem.plan.view();
  constexpr int most = std::numeric_limits<int>::max();
  attention.run(problem.kv.view, plan, problem.q, out, {.lse = lse});
  const std::vector<float> expected = out;
  for (const Reduce reduce : {Reduce::deterministic, Reduce::spin_lock, Reduce::batch_invariant}) {
    for (const CpuOptions& extreme :
         {CpuOptions{.reduce = reduce, .tuning = {.min_tasks = most}},
          CpuOptions{.reduce = reduce, .tuning = {.max_task_heads = most}},
          CpuOptions{.reduce = reduce, .tuning = {.min_product_lines = most}}}) {
      ChunkAttention<Cpu, 32> other(2, extreme);
      out.assign(out.size(), 7.0f);
      other.run(problem.kv.view, plan, problem.q, out, {.lse = lse});
      for (std::size_t i = 0; i < out.size(); ++i)
        REQUIRE(out[i] == doctest::Approx(expected[i]).epsilon(1e-4));
    }
  }
}

TEST_CASE("more threads than there are CPUs anywhere are refused before one is started") {
  for (const int threads :
       {ThreadPool::max_threads + 1, 100'000, std::numeric_limits<int>::max()}) {
    const std::string wanted = "num_threads = " + std::to_string(threads) + ": expected at most " +
                               std::to_string(ThreadPool::max_threads);
    CHECK(contains(test::refused([&] { ChunkAttention<Cpu, 8> attention(threads); }), wanted));
    CHECK(contains(test::refused([&] { ThreadPool pool(threads); }), wanted));
  }
}

TEST_CASE("options and executors") {
  CHECK(contains(test::refused([] { ThreadPool pool(-1); }), "num_threads = -1"));
  CHECK(contains(test::refused([] {
                   ChunkAttention<Cpu, 8> attention(1, {.tuning = {.max_task_heads = -1}});
                 }),
                 "options.tuning.max_task_heads = -1"));
  CHECK(contains(
      test::refused([] { ChunkAttention<Cpu, 8> attention(1, {.tuning = {.min_tasks = -2}}); }),
      "options.tuning.min_tasks = -2"));
  CHECK(contains(test::refused([] {
                   ChunkAttention<Cpu, 8> attention(1, {.tuning = {.min_product_lines = -3}});
                 }),
                 "options.tuning.min_product_lines = -3: expected at least 1"));
  CHECK(contains(
      test::refused([] { ChunkAttention<Cpu, 8> attention(1, {.tuning = {.min_tasks = 0}}); }),
      "options.tuning.min_tasks = 0"));
  for (const float scale :
       {-1.0f, -0x1p-149f, 0.0f, -0.0f, std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN(),
        -std::numeric_limits<float>::quiet_NaN()}) {
    CAPTURE(scale);
    CHECK(contains(test::refused([&] { ChunkAttention<Cpu, 8> attention(1, {.sm_scale = scale}); }),
                   "options.sm_scale = "));
  }
  for (const int reduce : {-1, 3, 99})
    CHECK(contains(test::refused([&] {
                     ChunkAttention<Cpu, 8> attention(1, {.reduce = static_cast<Reduce>(reduce)});
                   }),
                   "options.reduce = " + std::to_string(reduce) + ": expected "));
  for (const int accuracy : {-1, 3, 77})
    CHECK(contains(test::refused([&] {
                     ChunkAttention<Cpu, 8> attention(
                         1, {.accuracy = static_cast<CpuOptions::Accuracy>(accuracy)});
                   }),
                   "options.accuracy = " + std::to_string(accuracy) + ": expected "));
}

#endif
