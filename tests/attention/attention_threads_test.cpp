// Threads: the same bits for any number of them, merges under a contended lock, executors of other
// kinds and executors that fail.
#include <cstdlib>
#include <thread>

// Yields while the lock is held, so that other threads run into it.
inline void yield_under_lock() {
  static thread_local unsigned count = 0;
  if (++count % 3 == 0) std::this_thread::yield();
}
#define CHUNKATTN_SPIN_LOCK_HOOK() yield_under_lock()

#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>
#include <stdexcept>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "support/attention_case.hpp"
#include "tests/support/aligned_memory.hpp"

using namespace chunkattn;
using Reduce = CpuOptions::Reduce;
using test::Random;
using test::Share;

namespace {

std::atomic<long> allocations{0};

// Long enough that work is cut along KV into many splits.
test::RandomPlanOptions long_shapes(Random& random) {
  test::RandomPlanOptions options;
  options.share = random.pick({Share::none, Share::some, Share::all});
  const bool few = random.chance(0.5);  // only what is long and narrow is cut along KV
  options.num_sequences = random.uniform(1, few ? 3 : 24);
  options.chunk_size = random.pick({16, 64});
  options.max_length = few ? 8000 : 600;
  options.max_queries = random.pick({1, 1, 6});
  return options;
}

/// Runs the calls backwards, on the calling thread, and claims to be wide.
struct BackwardsExecutor {
  int width = 5;
  int concurrency() const { return width; }
  template <class F>
  void parallel_for(int n, F&& f) {
    for (int i = n; i-- > 0;) f(i);
  }
};

#if CHUNKATTN_EXCEPTIONS
/// Fails before its `good`-th call.
struct FailingExecutor {
  int good = 0;
  int concurrency() const { return 4; }
  template <class F>
  void parallel_for(int n, F&& f) {
    for (int i = 0; i < n; ++i) {
      if (i == good) throw std::runtime_error("executor stopped");
      f(i);
    }
  }
};
#endif

}  // namespace

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"  // both call malloc and free
#endif

// Counts every allocation of the program.
void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  std::abort();
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  const auto unit = static_cast<std::size_t>(alignment);
  if (void* memory = test::aligned_memory(unit, size)) return memory;
  std::abort();
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  test::free_aligned(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  test::free_aligned(memory);
}

TEST_CASE("deterministic mode: the same bits for 1, 2, 4 and 7 threads") {
  Random random(1);
  int cut = 0;
  for (int i = 0; i < test::scaled(6) || (cut == 0 && i < 60); ++i) {
    const test::AttentionCase<half> problem(random, long_shapes(random), 64, random.uniform(1, 2),
                                            random.pick({1, 2, 4}));
    test::Answer<> first(problem);
    ChunkAttention<Cpu, 64> alone(1);
    alone.run(problem.kv.view, problem.plan.view(), problem.q, first.out, {.lse = first.lse});
    CHECK(compare_with_reference(problem.reference, std::span<const float>(first.out),
                                 test::rounding_in<half>(alone))
              .ok());
    cut += schedule_of(alone).num_partial_rows() > 0 ? 1 : 0;
    for (const int threads : {2, 4, 7}) {
      ChunkAttention<Cpu, 64> attention(threads);
      for (int repeat = 0; repeat < 2; ++repeat) {
        test::Answer<> answer(problem);
        attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out,
                      {.lse = answer.lse});
        CHECK(std::memcmp(answer.out.data(), first.out.data(), 4 * first.out.size()) == 0);
        CHECK(std::memcmp(answer.lse.data(), first.lse.data(), 4 * first.lse.size()) == 0);
      }
    }
  }
  CHECK(cut > 0);  // otherwise nothing was merged and the test says little
}

namespace {

// A random problem without the oracle's answer, so that walks may be long enough for any cut.
template <class T, class V>
int check_bits(Random& random, const V& variant, int num_qo_heads) {
  constexpr int dim = 64;
  test::RandomPlanOptions options = long_shapes(random);
  int num_kv_heads = random.pick({1, 1, 2, 4});
  if (options.max_length > 600) {
    options.max_length = 16000;
    if (random.chance(0.5)) {  // splits of a part of the rows, with products
      options.share = Share::all;
      options.num_sequences = 3;
      num_kv_heads = 1;
    }
  } else if (random.chance(0.5)) {  // more rows than tasks are wanted
    options.share = Share::none;
    options.num_sequences = random.uniform(8, 20);
    options.max_length = 1500;
    options.max_queries = 12;
    num_kv_heads = 4;
  }
  const test::RandomPlan plan = make_random_plan(random, options);
  test::Storage<T> kv(plan.num_chunks, num_kv_heads, plan.chunk_size, dim);
  std::vector<float> some(4096);
  random.fill(std::span(some));
  for (auto* memory : {&kv.k, &kv.v})
    for (T& x : *memory) x = test::stored<T>(some[random.bits() % some.size()]);
  if constexpr (has_row_scales<T>)
    for (auto* memory : {&kv.k_scale, &kv.v_scale})
      for (float& x : *memory) x = 0.5f + std::abs(some[random.bits() % some.size()]);
  const auto rows = static_cast<std::size_t>(plan.num_rows());
  const auto heads = static_cast<std::size_t>(num_qo_heads);
  std::vector<float> q(rows * heads * dim), first, first_lse;
  random.fill(std::span(q));
  // Whether pairs compute a row block, all of its queries say: all are bfloat16, some or none.
  const std::size_t whole =
      random.pick({std::size_t{0}, q.size() / 2, q.size() / 2, q.size() - 1, q.size()});
  for (float& x : std::span(q).first(whole)) x = to_float(from_float<bfloat16>(x));
  int cut = 0;
  const auto check = [&](auto& attention) {
    std::vector<float> out(q.size(), 7), lse(rows * heads, 7);
    attention.run(kv.view, plan.view(), variant, q, out, {.lse = lse});
    cut = schedule_of(attention).num_partial_rows() > 0 ? 1 : 0;
    if (first.empty()) first = out, first_lse = lse;
    CHECK(std::memcmp(out.data(), first.data(), 4 * out.size()) == 0);
    CHECK(std::memcmp(lse.data(), first_lse.data(), 4 * lse.size()) == 0);
  };
  const CpuOptions deterministic{.reduce = Reduce::deterministic};
  for (const int threads : {1, random.uniform(2, 8)}) {
    CAPTURE(threads);
    ChunkAttention<Cpu, dim> attention(threads, deterministic);
    check(attention);
  }
  for (const int width : {random.uniform(1, 4), random.uniform(5, 16), random.uniform(17, 100)}) {
    CAPTURE(width);
    BackwardsExecutor backwards{width};
    ChunkAttention<Cpu, dim, dim, BackwardsExecutor> attention(backwards, deterministic);
    check(attention);
  }
  return cut;
}

}  // namespace

TEST_CASE("deterministic mode: the same bits for any threads, shape, element type and variant") {
  Random random(8);
  int cut = 0;
  for (int i = 0; i < test::scaled(8) || (cut == 0 && i < 60); ++i) {
    const int heads = random.pick({4, 16, 16});
    std::vector<float> sinks(static_cast<std::size_t>(heads));
    random.fill(std::span(sinks));
    const SlidingWindow window{random.pick({random.uniform(1, 2000), 1 << 20, 1 << 20}),
                               random.uniform(0, 200)};
    cut += check_bits<float>(random, NoVariant{}, heads);
    cut += check_bits<std::int8_t>(random, NoVariant{}, heads);
    cut += check_bits<bfloat16>(random, combine(window, SoftCap{30}, Sinks{sinks}), heads);
  }
  CHECK(cut > 0);
}

TEST_CASE("merges under a contended lock are exact") {
  Random random(2);
  int cut = 0;
  for (int i = 0; i < test::scaled(6) || (cut == 0 && i < 60); ++i) {
    const test::AttentionCase<float> problem(random, long_shapes(random), 32, 1,
                                             random.pick({1, 4}));
    ChunkAttention<Cpu, 32> attention(4,
                                      {.reduce = Reduce::spin_lock, .tuning = {.min_tasks = 64}});
    for (int repeat = 0; repeat < 3; ++repeat) {
      test::Answer<> answer(problem);
      attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out,
                    {.lse = answer.lse});
      CHECK(compare_with_reference(problem.reference, std::span<const float>(answer.out)).ok());
      CHECK(test::worst_lse(problem.reference, answer.lse) <= 1.0);
    }
    cut += schedule_of(attention).num_partial_rows() > 0 ? 1 : 0;
  }
  CHECK(cut > 0);
}

namespace {

// The same results where they take the place of the queries.
template <class T, class X, class Out>
void check_in_place(Random& random, CpuOptions options, int threads, int& cut) {
  options.tuning.min_tasks = 16;
  const test::AttentionCase<T, X> problem(random, long_shapes(random), 64, random.uniform(1, 2),
                                          random.pick({1, 2, 4}));
  ChunkAttention<Cpu, 64> attention(threads, options);
  test::Answer<Out> apart(problem);
  attention.run(problem.kv.view, problem.plan.view(), problem.q, apart.out, {.lse = apart.lse});
  cut += schedule_of(attention).num_partial_rows() > 0 ? 1 : 0;
  std::vector<X> memory = problem.q;
  std::vector<float> lse(apart.lse.size());
  attention.run(problem.kv.view, problem.plan.view(), memory,
                std::span(reinterpret_cast<Out*>(memory.data()), memory.size()), {.lse = lse});
  const std::span out(reinterpret_cast<const Out*>(memory.data()), memory.size());
  if (options.reduce != Reduce::spin_lock) {
    CHECK(std::memcmp(out.data(), apart.out.data(), out.size_bytes()) == 0);
    CHECK(lse == apart.lse);
  }
  CHECK(compare_with_reference(problem.reference, out, test::rounding_in<T>(attention)).ok());
}

}  // namespace

TEST_CASE("out may be q") {
  Random random(7);
  for (const Reduce reduce : {Reduce::deterministic, Reduce::spin_lock, Reduce::batch_invariant}) {
    int cut = 0;
    for (int i = 0; i < test::scaled(4) || (cut == 0 && i < 40); ++i) {
      check_in_place<half, float, float>(random, {.reduce = reduce}, 4, cut);
      check_in_place<bfloat16, half, bfloat16>(random, {.reduce = reduce}, 3, cut);
      check_in_place<std::int8_t, bfloat16, bfloat16>(random, {.reduce = reduce}, 1, cut);
      if (reduce == Reduce::batch_invariant) cut = 1;  // never
    }
    CHECK(cut > 0);
  }
}

TEST_CASE("few KV heads leave no thread without work") {
  Random random(3);
  test::RandomPlanOptions options;
  options.num_sequences = 1;
  options.share = Share::none;
  options.max_length = 20000;
  options.reserve_chance = 0;
  test::RandomPlan plan;
  do plan = make_random_plan(random, options);
  while (plan.row_kv_len[0] < 16000);
  test::KvStorage<half> kv(plan.num_chunks, 1, options.chunk_size, 128);
  fill_kv(random, plan, kv.view);
  std::vector<float> q(128), out(128);
  random.fill(std::span(q));
  ChunkAttention<Cpu, 128> attention(2);
  attention.run(kv.view, plan.view(), q, out);
  CHECK(compare_with_reference(reference_attention(kv.view, plan.view(), std::span<const float>(q)),
                               std::span<const float>(out), test::rounding_in<half>(attention))
            .ok());
  const auto& splits = schedule_of(attention).splits();
  CHECK(splits.size() >= 16);
  double total = 0;
  double largest = 0;
  for (const auto& split : splits) {
    total += split.cost;
    largest = split.cost > largest ? split.cost : largest;
  }
  CHECK(largest <= 1.5 * total / static_cast<double>(splits.size()));
}

TEST_CASE("other executors: serial, and one that runs everything backwards") {
  Random random(4);
  const test::AttentionCase<float> problem(random, long_shapes(random), 64, 2, 2);
  test::Answer<> expected(problem);
  SerialExecutor serial;
  ChunkAttention<Cpu, 64, 64, SerialExecutor>(serial).run(problem.kv.view, problem.plan.view(),
                                                          problem.q, expected.out);
  CHECK(compare_with_reference(problem.reference, std::span<const float>(expected.out)).ok());
  BackwardsExecutor backwards;
  test::Answer<> answer(problem);
  ChunkAttention<Cpu, 64, 64, BackwardsExecutor>(backwards).run(
      problem.kv.view, problem.plan.view(), problem.q, answer.out);
  CHECK(answer.out == expected.out);
}

#if CHUNKATTN_EXCEPTIONS
TEST_CASE("an executor that throws: K/V as before, and the next run is right") {
  Random random(5);
  for (const Reduce reduce : {Reduce::deterministic, Reduce::spin_lock}) {
    const test::AttentionCase<float> problem(random, long_shapes(random), 64, 2, 1);
    const std::vector<float> k = problem.kv.k;
    FailingExecutor executor;
    ChunkAttention<Cpu, 64, 64, FailingExecutor> attention(executor, {.reduce = reduce});
    for (int good = 0; good < 2; ++good) {
      executor.good = good;
      test::Answer<> answer(problem);
      CHECK_THROWS_AS(attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out),
                      std::runtime_error);
    }
    CHECK(std::memcmp(k.data(), problem.kv.k.data(), 4 * k.size()) == 0);
    executor.good = 1000;
    test::Answer<> answer(problem);
    attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out);
    CHECK(compare_with_reference(problem.reference, std::span<const float>(answer.out)).ok());
  }
}
#endif

TEST_CASE("nothing is allocated once the largest plan has been seen") {
  Random random(6);
  for (const Reduce reduce : {Reduce::deterministic, Reduce::spin_lock}) {
    const test::AttentionCase<half> problem(random, long_shapes(random), 64, 2, 2);
    ThreadPool pool(2);
    ChunkAttention<Cpu, 64> attention(pool, {.reduce = reduce});
    test::Answer<> answer(problem);
    attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out, {.lse = answer.lse});
    const long before = allocations.load();
    for (int i = 0; i < 5; ++i)
      attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out,
                    {.lse = answer.lse});
    CHECK(allocations.load() == before);
  }
}
