// Storing K and V: each row of a batch of any size, 8-bit rows with their scales, and nothing else.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "support/attention_case.hpp"

using namespace chunkattn;

namespace {

constexpr int dim = 40, heads = 3;

test::RandomPlan plan_of(test::Random& random, int num_sequences, int max_queries) {
  test::RandomPlanOptions options;
  options.num_sequences = num_sequences;
  options.max_length = 40;
  options.chunk_size = 16;
  options.max_queries = max_queries;
  return make_random_plan(random, options);
}

std::vector<float> rows_of(test::Random& random, const test::RandomPlan& plan) {
  std::vector<float> rows(static_cast<std::size_t>(plan.num_rows()) * heads * dim);
  random.fill(std::span(rows));
  return rows;
}

/// 8-bit K/V in which every byte counts.
struct Memory8 : test::QuantizedStorage {
  explicit Memory8(int num_chunks) : ScaledStorage(num_chunks, heads, 16, dim) {}
  void fill(test::Random& random) {
    for (auto* values : {&k, &v})
      for (std::int8_t& value : *values) value = static_cast<std::int8_t>(random.bits() >> 56);
    for (auto* scales : {&k_scale, &v_scale}) random.fill(std::span(*scales));
  }
  void copy(const Memory8& other) {
    k = other.k;
    v = other.v;
    k_scale = other.k_scale;
    v_scale = other.v_scale;
  }
  void check_equal(const Memory8& other) const {
    CHECK(k == other.k);
    CHECK(v == other.v);
    CHECK(k_scale == other.k_scale);
    CHECK(v_scale == other.v_scale);
  }
};

}  // namespace

TEST_CASE("write stores every row of a batch, whatever its size") {
  test::Random random(61);
  for (int n = 1; n <= 40; ++n) {
    CAPTURE(n);
    test::RandomPlan plan = plan_of(random, n, 1);
    for (PlanView::WriteTarget& target : plan.writes)  // shared rows too: none is read here
      if (target.chunk == no_chunk) target = {plan.num_chunks - 1, 0};
    plan.writes.back() = {0, 15};
    test::KvStorage<float> kv(plan.num_chunks, heads, 16, dim);
    const std::vector<float> k = rows_of(random, plan), v = rows_of(random, plan);
    ChunkAttention<Cpu, dim>(2).write(kv.view, plan.view(), k, v);
    const std::size_t last = plan.writes.size() - 1;
    for (std::size_t i = 0; i < dim; ++i) {
      CHECK(kv.view.k_row(0, 2, 15)[i] == k[(last * heads + 2) * dim + i]);
      CHECK(kv.view.v_row(0, 2, 15)[i] == v[(last * heads + 2) * dim + i]);
    }
  }
}

TEST_CASE("8-bit rows: values and scales of K and of V each in their place, nothing else touched") {
  test::Random random(62);
  for (int round = 0; round < test::scaled(10); ++round) {
    const test::RandomPlan plan = plan_of(random, 12, random.pick({1, 4}));
    Memory8 kv(plan.num_chunks), expected(plan.num_chunks);
    kv.fill(random);
    expected.copy(kv);
    const std::vector<float> k = rows_of(random, plan), v = rows_of(random, plan);
    for (std::size_t row = 0; row < plan.writes.size(); ++row) {
      const PlanView::WriteTarget to = plan.writes[row];
      if (to.chunk == no_chunk) continue;
      for (int head = 0; head < heads; ++head) {
        const std::size_t at = (row * heads + static_cast<std::size_t>(head)) * dim;
        *expected.view.k_row_scale(to.chunk, head, to.offset) =
            quantize_row(&k[at], dim, expected.view.k_row(to.chunk, head, to.offset));
        *expected.view.v_row_scale(to.chunk, head, to.offset) =
            quantize_row(&v[at], dim, expected.view.v_row(to.chunk, head, to.offset));
      }
    }
    ChunkAttention<Cpu, dim>(2).write(kv.view, plan.view(), k, v);
    kv.check_equal(expected);
  }
}

TEST_CASE("row copies: those rows of every head, and nothing beside them") {
  test::Random random(63);
  for (int round = 0; round < test::scaled(20); ++round) {
    test::RandomPlan plan = plan_of(random, 2, 1);
    plan.num_chunks += 2;
    plan.writes.assign(plan.writes.size(), {no_chunk, 0});
    const int length = random.uniform(1, 16);
    const PlanView::RowCopy copy{plan.num_chunks - 1, random.uniform(0, 16 - length),
                                 plan.num_chunks - 2, random.uniform(0, 16 - length), length};
    plan.copies.push_back(copy);
    Memory8 kv(plan.num_chunks), expected(plan.num_chunks);
    kv.fill(random);
    expected.copy(kv);
    const KvView<std::int8_t>& view = expected.view;
    for (int head = 0; head < heads; ++head) {
      for (int t = 0; t < length; ++t) {
        const int from = copy.source_begin + t, to = copy.target_begin + t;
        std::copy_n(view.k_row(copy.source_chunk, head, from), dim,
                    view.k_row(copy.target_chunk, head, to));
        std::copy_n(view.v_row(copy.source_chunk, head, from), dim,
                    view.v_row(copy.target_chunk, head, to));
        *view.k_row_scale(copy.target_chunk, head, to) =
            *view.k_row_scale(copy.source_chunk, head, from);
        *view.v_row_scale(copy.target_chunk, head, to) =
            *view.v_row_scale(copy.source_chunk, head, from);
      }
    }
    const std::vector<float> rows = rows_of(random, plan);
    ChunkAttention<Cpu, dim>(2).write(kv.view, plan.view(), rows, rows);
    kv.check_equal(expected);
  }
}

#if CHUNKATTN_EXCEPTIONS
TEST_CASE("write refuses a layer that does not fit") {
  test::Random random(64);
  const test::RandomPlan plan = plan_of(random, 2, 1);
  test::KvStorage<float> kv(plan.num_chunks, heads, 16, dim);
  const std::vector<float> rows = rows_of(random, plan);
  ChunkAttention<Cpu, dim> attention(1);
  CHECK_NOTHROW(attention.write(kv.view, plan.view(), rows, rows));
  KvView<float> layer = kv.view;
  layer.chunk_size = 32;
  CHECK_THROWS_AS(attention.write(layer, plan.view(), rows, rows), InvalidArgument);
  layer = kv.view;
  layer.head_dim = 32;
  CHECK_THROWS_AS(attention.write(layer, plan.view(), rows, rows), InvalidArgument);
}
#endif
