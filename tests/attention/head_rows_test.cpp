// q, k, v and out at distances of their own: the bits of arrays without gaps, gaps that keep what
// they held, and what is refused.
#include "chunkattn/head_rows.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "chunkattn/kv_cache.hpp"
#include "support/attention_case.hpp"
#include "support/refused.hpp"

using namespace chunkattn;
using test::Random;
using test::Share;

namespace {

/// Memory of rows with gaps of NaN around each of them.
template <class X>
struct Apart {
  std::vector<X> memory;
  HeadRows<X> rows;

  Apart(Random& random, int tokens, int heads, int dim) {
    const auto gap = [&] { return random.pick({0, 0, 1, 8, random.uniform(1, 70)}); };
    rows = {.num_tokens = tokens, .num_heads = heads, .head_dim = dim};
    if (random.chance(0.5)) {
      rows.stride_head = dim + gap();
      rows.stride_token = (heads - 1) * rows.stride_head + dim + gap();
    } else {  // heads first
      rows.stride_token = dim + gap();
      rows.stride_head = (tokens - 1) * rows.stride_token + dim + gap();
    }
    // What a tensor says of an axis of one.
    if (tokens == 1) rows.stride_token = random.pick({-7, 0, 3});
    if (heads == 1) rows.stride_head = random.pick({-7, 0, 3});
    const std::int64_t span = (tokens - 1) * rows.stride_token + (heads - 1) * rows.stride_head;
    const int before = random.pick({0, 1, 3, 16});
    memory.assign(static_cast<std::size_t>(before + span + dim + random.pick({0, 5})), nan());
    rows.data = memory.data() + before;
  }
  static X nan() { return from_float<X>(std::numeric_limits<float>::quiet_NaN()); }

  void put(std::span<const X> dense) {
    for_each([&](X* row, std::size_t at) { std::copy_n(&dense[at], rows.head_dim, row); });
  }
  [[nodiscard]] std::vector<X> taken() const {
    std::vector<X> dense;
    for_each([&](X* row, std::size_t) { dense.insert(dense.end(), row, row + rows.head_dim); });
    return dense;
  }
  /// Everything but the rows.
  [[nodiscard]] std::vector<X> rest() const {
    std::vector<X> other = memory;
    for_each([&](X* row, std::size_t) {
      std::fill_n(other.begin() + (row - memory.data()), rows.head_dim, X{});
    });
    return other;
  }

 private:
  template <class F>
  void for_each(const F& f) const {
    std::size_t at = 0;
    for (int t = 0; t < rows.num_tokens; ++t)
      for (int h = 0; h < rows.num_heads; ++h, at += static_cast<std::size_t>(rows.head_dim))
        f(rows.row(t, h), at);
  }
};

template <class X>
bool same_bits(const std::vector<X>& a, const std::vector<X>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(X)) == 0;
}

test::RandomPlanOptions random_shape(Random& random) {
  test::RandomPlanOptions options;
  options.share = random.pick({Share::none, Share::some, Share::all});
  options.num_sequences = random.uniform(1, random.pick({1, 3, 12, 30}));
  options.chunk_size = random.pick({1, 16, 64});
  options.max_length = random.pick({3, 40, 150});
  options.max_queries = random.pick({1, 1, 4, 30});
  return options;
}

/// K/V of T, queries of X and results of Y: rows apart give the bits of rows without gaps, which
/// are the oracle's within its bounds.
template <int HeadDim, int ValueDim, class T, class X, class Y>
void check_rows_apart(std::uint64_t stream, int cases) {
  Random random(stream);
  for (int i = 0; i < test::scaled(cases); ++i) {
    const int kv_heads = random.uniform(1, 3), group = random.pick({1, 1, 2, 3, 4, 8});
    const test::AttentionCase<T, X> problem(random, random_shape(random), HeadDim, kv_heads, group,
                                            random.pick({1.0f, 20.0f}), ValueDim);
    ChunkAttention<Cpu, HeadDim, ValueDim> attention(
        random.uniform(1, 3),
        {.reduce = random.pick({CpuOptions::Reduce::deterministic, CpuOptions::Reduce::spin_lock,
                                CpuOptions::Reduce::batch_invariant})});
    const int rows = problem.plan.num_rows(), heads = kv_heads * group;
    CAPTURE(rows);
    CAPTURE(kv_heads);
    CAPTURE(group);
    test::Answer<Y> expected(problem), answer(problem);
    const bool ordered = attention.options().reduce != CpuOptions::Reduce::spin_lock;
    attention.run(problem.kv.view, problem.plan.view(), problem.q, expected.out,
                  {.lse = expected.lse});

    Apart<X> q(random, rows, heads, HeadDim);
    q.put(problem.q);
    Apart<Y> out(random, rows, heads, ValueDim);
    const std::vector<X> q_before = q.memory;
    const std::vector<Y> gaps = out.rest();
    // Sides without gaps and with them, in all combinations; queries that may not be written.
    const int way = random.uniform(0, 2);
    const HeadRows<const X> reading{q.rows.data,       rows, heads, HeadDim, q.rows.stride_token,
                                    q.rows.stride_head};
    std::vector<Y> got;
    if (way == 0)
      attention.run(problem.kv.view, problem.plan.view(), problem.q, out.rows, {.lse = answer.lse});
    else if (way == 1)
      attention.run(problem.kv.view, problem.plan.view(), reading, answer.out, {.lse = answer.lse});
    else
      attention.run(problem.kv.view, problem.plan.view(), reading, out.rows);
    if (way != 1) answer.out = out.taken();
    if (way == 2) answer.lse = expected.lse;
    if (ordered) {
      CHECK(same_bits(answer.out, expected.out));
      CHECK(same_bits(answer.lse, expected.lse));
    }
    CHECK(same_bits(q.memory, q_before));
    CHECK(same_bits(out.rest(), gaps));
    const Rounding rounding = test::rounding_in<T>(attention);
    CHECK(
        compare_with_reference(problem.reference, std::span<const Y>(answer.out), rounding).worst <=
        1.0);
    CHECK(test::worst_lse(problem.reference, answer.lse, rounding) <= 1.0);

    if constexpr (std::is_same_v<X, Y> && HeadDim == ValueDim) {  // in place
      const std::vector<X> around = q.rest();
      attention.run(problem.kv.view, problem.plan.view(), q.rows, q.rows);
      if (ordered) CHECK(same_bits(q.taken(), expected.out));
      CHECK(same_bits(q.rest(), around));
    }
  }
}

/// write() of rows apart stores what it stores of rows without gaps.
template <class T, class X>
void check_writes(std::uint64_t stream) {
  constexpr int dim = 40, value_dim = 24;
  Random random(stream);
  for (int i = 0; i < test::scaled(20); ++i) {
    const test::RandomPlan plan = make_random_plan(random, random_shape(random));
    const int rows = plan.num_rows(), heads = random.uniform(1, 4);
    const bool v_in_k = random.chance(0.3);
    const KvCacheOptions options{
        .num_kv_heads = heads, .head_dim = dim, .value_dim = value_dim, .v_in_k = v_in_k};
    const auto num_chunks = static_cast<std::size_t>(plan.num_chunks);
    KvCache<Cpu, T> dense(plan.chunk_size, options, num_chunks);
    KvCache<Cpu, T> apart(plan.chunk_size, options, num_chunks);
    for (int chunk = 0; chunk < plan.num_chunks; ++chunk) {
      dense.poison(chunk);
      apart.poison(chunk);
    }
    const auto size = static_cast<std::size_t>(rows) * static_cast<std::size_t>(heads);
    std::vector<X> k(size * dim), v(size * value_dim);
    random.fill(std::span(k));
    random.fill(std::span(v));
    Apart<X> keys(random, rows, heads, dim), values(random, rows, heads, value_dim);
    keys.put(k);
    values.put(v);
    ChunkAttention<Cpu, dim, value_dim> attention(2);
    if (v_in_k) {
      attention.write(dense.layer(0), plan.view(), k);
      attention.write(apart.layer(0), plan.view(), keys.rows);
    } else {
      attention.write(dense.layer(0), plan.view(), k, v);
      if (random.chance(0.5))
        attention.write(apart.layer(0), plan.view(), keys.rows, values.rows);
      else
        attention.write(apart.layer(0), plan.view(), keys.rows, v);
    }
    for (int chunk = 0; chunk < plan.num_chunks; ++chunk)
      CHECK(std::memcmp(dense.layer(0).k_row(chunk, 0, 0), apart.layer(0).k_row(chunk, 0, 0),
                        dense.bytes_per_chunk()) == 0);
  }
}

}  // namespace

TEST_CASE("rows apart: the bits of rows without gaps, and nothing between them touched") {
  check_rows_apart<64, 64, float, float, float>(1, 40);
  check_rows_apart<64, 64, bfloat16, bfloat16, bfloat16>(2, 40);
  check_rows_apart<40, 24, std::int8_t, half, float>(3, 30);
  check_rows_apart<32, 96, half, float, half>(4, 30);
}

TEST_CASE("rows of K and V apart are stored as rows without gaps are") {
  check_writes<float, float>(11);
  check_writes<bfloat16, float>(12);
  check_writes<half, half>(13);
  check_writes<std::int8_t, bfloat16>(14);
}

TEST_CASE("one fused array: q, k and v are read where they lie, and out lies where v was") {
  constexpr int dim = 32, kv_heads = 2, q_heads = 4, all_heads = q_heads + 2 * kv_heads;
  Random random(21);
  test::RandomPlanOptions options;
  options.max_queries = 3;
  options.share = Share::all;
  const test::AttentionCase<float> problem(random, options, dim, kv_heads, 2);
  const int rows = problem.plan.num_rows();
  std::vector<float> fused(static_cast<std::size_t>(rows) * all_heads * dim);
  random.fill(std::span(fused));
  const HeadRows<float> all{.data = fused.data(),
                            .num_tokens = rows,
                            .num_heads = all_heads,
                            .head_dim = dim,
                            .stride_token = all_heads * dim,
                            .stride_head = dim};
  const auto q = all.heads(0, q_heads), out = all.heads(q_heads, q_heads);
  for (int t = 0; t < rows; ++t)
    for (int h = 0; h < q_heads; ++h)
      std::copy_n(&problem.q[static_cast<std::size_t>((t * q_heads + h) * dim)], dim, q.row(t, h));
  test::Answer<> expected(problem);
  ChunkAttention<Cpu, dim> attention(2);
  attention.run(problem.kv.view, problem.plan.view(), problem.q, expected.out);
  attention.run(problem.kv.view, problem.plan.view(), q, out);
  for (int t = 0; t < rows; ++t)
    for (int h = 0; h < q_heads; ++h) {
      const auto at = static_cast<std::size_t>((t * q_heads + h) * dim);
      CHECK(std::equal(q.row(t, h), q.row(t, h) + dim, &problem.q[at]));
      CHECK(std::equal(out.row(t, h), out.row(t, h) + dim, &expected.out[at]));
    }
}

#if CHUNKATTN_EXCEPTIONS

TEST_CASE("rows that make no sense are refused by the name of what is wrong, nothing is touched") {
  Random random(31);
  test::RandomPlanOptions options;
  options.num_sequences = 5;
  options.share = Share::all;
  options.max_queries = 2;
  const int dim = 32, value_dim = 48, kv_heads = 2, heads = 6;
  const test::AttentionCase<half> problem(random, options, dim, kv_heads, 3, 1.0f, value_dim);
  const int rows = problem.plan.num_rows();
  const LiveView plan = problem.plan.view();
  ChunkAttention<Cpu, 32, 48> attention(1);
  const std::string n = std::to_string(rows);

  std::vector<half> memory(static_cast<std::size_t>(rows) * 1000, from_float<half>(1.0f));
  const std::vector<half> before = memory;
  const auto good = [&](int of, int row_dim) {
    return HeadRows<half>{.data = memory.data(),
                          .num_tokens = rows,
                          .num_heads = of,
                          .head_dim = row_dim,
                          .stride_token = of * row_dim + 8,
                          .stride_head = row_dim};
  };
  std::vector<half> target(memory.size());
  const auto run = [&](const HeadRows<half>& q, HeadRows<half> out) {
    if (out.data == memory.data()) out.data = target.data();
    return test::refused([&] { attention.run(problem.kv.view, plan, q, out); });
  };
  test::KvStorage<half> stored(problem.kv.view.num_chunks, kv_heads, problem.kv.view.chunk_size,
                               dim, value_dim);
  const auto write = [&](const HeadRows<half>& k, const HeadRows<half>& v) {
    return test::refused([&] { attention.write(stored.view, plan, k, v); });
  };
  REQUIRE(run(good(heads, dim), good(heads, value_dim)) == "no error");
  REQUIRE(write(good(kv_heads, dim), good(kv_heads, value_dim)) == "no error");
  stored = test::KvStorage<half>(problem.kv.view.num_chunks, kv_heads, problem.kv.view.chunk_size,
                                 dim, value_dim);
  const std::vector<half> untouched = stored.k;
  std::fill(target.begin(), target.end(), from_float<half>(7.0f));
  const std::vector<half> target_before = target;

  for (const std::string name : {"q", "k", "v", "out"}) {
    CAPTURE(name);
    const bool of_v = name == "v" || name == "out", of_kv = name == "k" || name == "v";
    const int row_dim = of_v ? value_dim : dim, count = of_kv ? kv_heads : heads;
    const auto failure = [&](const auto& change) {
      HeadRows<half> changed = good(count, row_dim);
      change(changed);
      if (name == "q") return run(changed, good(heads, value_dim));
      if (name == "out") return run(good(heads, dim), changed);
      if (name == "k") return write(changed, good(kv_heads, value_dim));
      return write(good(kv_heads, dim), changed);
    };
    using Rows = HeadRows<half>;
    const auto expect = [&](const auto& change, const std::string& text) {
      CHECK(failure(change) == name + text);
    };
    expect(
        [&](Rows& r) { r.num_tokens = rows + 1; },
        ".num_tokens = " + std::to_string(rows + 1) + ": expected the plan's query tokens, " + n);
    expect(
        [&](Rows& r) { r.num_tokens = rows - 1; },
        ".num_tokens = " + std::to_string(rows - 1) + ": expected the plan's query tokens, " + n);
    expect([](Rows& r) { r.head_dim = 40; },
           ".head_dim = 40: expected the size of the attention's heads there, " +
               std::to_string(row_dim));
    if (name == "q") {
      expect([](Rows& r) { r.num_heads = 0; }, ".num_heads = 0: expected 1 to 65536");
      expect([](Rows& r) { r.num_heads = 65537; }, ".num_heads = 65537: expected 1 to 65536");
      CHECK(failure([](Rows& r) { r.num_heads = 5; }) ==
            "num_qo_heads = 5: expected a multiple of layer.num_kv_heads, 2");
    } else {
      expect([](Rows& r) { r.num_heads = 4; },
             ".num_heads = 4: expected " +
                 (of_kv ? std::string("layer.num_kv_heads, 2") : "those of q, 6"));
    }
    expect([](Rows& r) { r.data = nullptr; }, ".data = null: expected memory");
    expect(
        [](Rows& r) {
          r.data = reinterpret_cast<half*>(reinterpret_cast<std::uintptr_t>(r.data) + 1);
        },
        ".data = misaligned: expected an address that is a multiple of the element's size");
    for (const std::int64_t stride : {std::int64_t{0}, std::int64_t{-64}, std::int64_t{row_dim} - 1,
                                      (std::numeric_limits<std::int64_t>::min)()}) {
      const std::string text = " = " + std::to_string(stride) + ": expected at least the row's " +
                               std::to_string(row_dim) + " elements";
      expect([=](Rows& r) { r.stride_token = stride; }, ".stride_token" + text);
      expect([=](Rows& r) { r.stride_head = stride; }, ".stride_head" + text);
    }
    for (const std::int64_t stride :
         {std::int64_t{1} << 60, (std::numeric_limits<std::int64_t>::max)()}) {
      const std::string text =
          " = " + std::to_string(stride) + ": expected rows within the address space";
      expect([=](Rows& r) { r.stride_token = stride; }, ".stride_token" + text);
      expect([=](Rows& r) { r.stride_head = stride; }, ".stride_head" + text);
    }
    // One element too few in both orders.
    const std::int64_t of_token = (count - 1) * 100 + row_dim;
    expect(
        [=](Rows& r) {
          r.stride_head = 100;
          r.stride_token = of_token - 1;
        },
        ".stride_token = " + std::to_string(of_token - 1) +
            ": expected rows that do not overlap: at least " + std::to_string(of_token) +
            ", all heads of a token, or with a stride_head of at least " +
            std::to_string((rows - 1) * (of_token - 1) + row_dim) + ", all tokens of a head");
    const std::int64_t of_head = (rows - 1) * row_dim + row_dim;
    expect(
        [=](Rows& r) {
          r.stride_token = row_dim;
          r.stride_head = of_head - 1;
        },
        ".stride_token = " + std::to_string(row_dim) +
            ": expected rows that do not overlap: at least " +
            std::to_string((count - 1) * (of_head - 1) + row_dim) +
            ", all heads of a token, or with a stride_head of at least " + std::to_string(of_head) +
            ", all tokens of a head");
    CHECK(same_bits(target, target_before));
    CHECK(same_bits(memory, before));
    CHECK(stored.k == untouched);
  }
  for (const auto& [first, count, text] :
       {std::tuple{-1, 1, "first = -1: expected a head, 0 to 5"},
        std::tuple{6, 1, "first = 6: expected a head, 0 to 5"},
        std::tuple{2, 0, "count = 0: expected from 1 to 4, the heads from first on"},
        std::tuple{2, 5, "count = 5: expected from 1 to 4, the heads from first on"}})
    CHECK(test::refused([&, first = first, count = count] {
            (void)good(heads, dim).heads(first, count);
          }) == text);
}

TEST_CASE("out and lse beside q: in its gaps, in none of its bytes") {
  Random random(41);
  constexpr int dim = 16;
  for (int i = 0; i < test::scaled(200); ++i) {
    test::RandomPlanOptions options;
    options.num_sequences = random.uniform(1, 3);
    options.max_length = 5;
    options.chunk_size = 16;
    const int heads = random.uniform(1, 3);
    const test::AttentionCase<float> problem(random, options, dim, 1, heads);
    const int rows = problem.plan.num_rows();
    Apart<float> q(random, rows, heads, dim), other(random, rows, heads, dim);
    std::vector<float> memory(q.memory.size() + other.memory.size() + 400, 3.0f);
    std::vector<int> uses(memory.size(), 0);
    const auto place = [&](HeadRows<float> rows_there, std::size_t at, int use) {
      rows_there.data = memory.data() + at;
      for (int t = 0; t < rows; ++t)
        for (int h = 0; h < heads; ++h)
          for (int e = 0; e < dim; ++e)
            uses[static_cast<std::size_t>(rows_there.row(t, h) - memory.data() + e)] |= use;
      return rows_there;
    };
    const auto query = place(q.rows, random.index(100), 1);
    HeadRows<float> result = random.chance(0.5) ? q.rows : other.rows;
    if (random.chance(0.2)) {
      result = query;
      place(query, static_cast<std::size_t>(query.data - memory.data()), 2);
    } else {
      const auto at_query = static_cast<std::size_t>(query.data - memory.data());
      result = place(result, random.chance(0.3) ? at_query : random.index(100), 2);
    }
    std::vector<float> own(static_cast<std::size_t>(rows * heads));
    const bool has_lse = random.chance(0.5);
    std::span<float> lse(own);
    if (has_lse) {
      const std::size_t at = random.index(query.row(rows - 1, heads - 1) - memory.data() + 60);
      lse = std::span(memory).subspan(at, own.size());
      for (std::size_t e = at; e < at + own.size(); ++e) uses[e] |= 4;
    }
    const auto both = [&](int bits) {
      return std::any_of(uses.begin(), uses.end(), [&](int use) { return (use & bits) == bits; });
    };
    const bool in_place = result.data == query.data &&
                          (rows == 1 || result.stride_token == query.stride_token) &&
                          (heads == 1 || result.stride_head == query.stride_head);
    const std::string expected =
        both(3) && !in_place ? "out = memory of q: expected memory of its own, or q itself if it "
                               "has as many bytes"
        : both(5)            ? "lse = memory of q: expected memory of its own"
        : both(6)            ? "lse = memory of out: expected memory of its own"
                             : "no error";
    ChunkAttention<Cpu, dim> attention(1);
    const std::vector<float> before = memory;
    CHECK(test::refused([&] {
            attention.run(problem.kv.view, problem.plan.view(), query, result, {.lse = lse});
          }) == expected);
    if (expected != "no error") CHECK(same_bits(memory, before));
  }
}

#endif
