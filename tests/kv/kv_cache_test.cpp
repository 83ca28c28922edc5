// KvCache and write(): the layout, growth that moves nothing, what is stored where.
#include "chunkattn/kv_cache.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "support/attention_case.hpp"
#include "support/counted_slabs.hpp"
#include "support/refused.hpp"
#include "tests/support/retention.hpp"

using namespace chunkattn;
using test::Random;

// Not under the classes themselves, where every program would pay for instantiating them.
static_assert(PlacedSequence<PrefixTree<int, 64, PoolAllocator, test::NoRetention>::Sequence>);
static_assert(KvProvider<KvCache<Cpu, float>>);

namespace {

template <class T>
std::uintptr_t address(const T* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

}  // namespace

TEST_CASE_TEMPLATE("K and V of one head are adjacent, chunks 64-byte aligned", T, float, half,
                   bfloat16, std::int8_t, float8_e4m3) {
  KvCache<Cpu, T> cache(64, {.num_layers = 2, .num_kv_heads = 3, .head_dim = 128}, 100);
  const KvView<T> view = cache.layer(1);
  CHECK(view.num_chunks == 100);
  for (const int chunk : {0, 1, 63, 99}) {
    for (int head = 0; head < 3; ++head) {
      CHECK(address(view.k_row(chunk, head, 0)) % 64 == 0);
      CHECK(view.k_row(chunk, head, 1) == view.k_row(chunk, head, 0) + 128);
      CHECK(view.v_row(chunk, head, 0) == view.k_row(chunk, head, 0) + 64 * 128);
      CHECK(view.v_row(chunk, head, 63) == view.v_row(chunk, head, 0) + 63 * 128);
      if constexpr (has_row_scales<T>) {
        CHECK(address(view.k_row_scale(chunk, head, 0)) ==
              address(view.v_row(chunk, head, 0) + 64 * 128));
        CHECK(view.v_row_scale(chunk, head, 0) == view.k_row_scale(chunk, head, 0) + 64);
      }
    }
  }
  CHECK(cache.layer(0).k_row(0, 0, 0) != view.k_row(0, 0, 0));
}

TEST_CASE("growth moves no chunk, keeps what it holds, and old views stay valid") {
  Random random;
  KvCache<Cpu, half> cache(16, {.num_layers = 3, .num_kv_heads = 2, .head_dim = 64}, 1);
  std::vector<const half*> where;
  std::vector<KvView<half>> old;
  std::size_t chunks = 1;
  for (int round = 0; round < 40; ++round) {
    const KvView<half> view = cache.layer(round % 3);
    old.push_back(cache.layer(2));
    for (std::size_t s = where.size(); s < chunks; ++s) {
      half* row = cache.layer(2).k_row(static_cast<int>(s), 1, 15);
      row[5].bits = static_cast<std::uint16_t>(s * 7);
      where.push_back(row);
    }
    chunks += static_cast<std::size_t>(random.uniform(0, 200));
    cache.grow(chunks);
    CHECK(view.num_chunks <= static_cast<int>(cache.num_chunks()));
  }
  CHECK(cache.bytes() >= where.size() * cache.bytes_per_chunk());
  for (std::size_t s = 0; s < where.size(); ++s) {
    CHECK(cache.layer(2).k_row(static_cast<int>(s), 1, 15) == where[s]);
    CHECK(where[s][5].bits == static_cast<std::uint16_t>(s * 7));
  }
  for (const KvView<half>& view : old)
    for (int s = 0; s < view.num_chunks && s < static_cast<int>(where.size()); s += 37)
      CHECK(view.k_row(s, 1, 15) == where[static_cast<std::size_t>(s)]);
}

TEST_CASE("growth through many slabs: their table grows too") {
  // A chunk is as large as a slab should be: each has one to itself. Only a few rows are touched.
  KvCache<Cpu, half> cache(128, {.num_layers = 2, .num_kv_heads = 32, .head_dim = 256}, 1);
  REQUIRE(cache.bytes_per_chunk() == std::size_t{2} << 22);
  const int others = test::num_slabs - 2;
  std::vector<half*> where;
  for (int chunks = 1; chunks <= 40; ++chunks) {
    cache.grow(static_cast<std::size_t>(chunks));
    CHECK(cache.bytes() == static_cast<std::size_t>(chunks) * cache.bytes_per_chunk());
    CHECK(test::num_slabs - others == 2 * chunks);
    const KvView<half> view = cache.layer(1);
    where.push_back(view.v_row(chunks - 1, 31, 0));
    where.back()->bits = static_cast<std::uint16_t>(chunks);
    for (int s = 0; s < chunks; ++s) {
      REQUIRE(view.v_row(s, 31, 0) == where[static_cast<std::size_t>(s)]);
      CHECK(view.v_row(s, 31, 0)->bits == s + 1);
    }
  }
}

TEST_CASE("a cache follows its tree") {
  PrefixTree<int, 16, PoolAllocator, test::NoRetention> tree;
  KvCache<Cpu, float> cache(tree, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 8});
  std::vector<int> prompt(1000);
  for (int i = 0; i < 1000; ++i) prompt[static_cast<std::size_t>(i)] = i;
  auto sequence = tree.insert(prompt);
  CHECK(cache.layer(0).num_chunks == static_cast<int>(tree.num_chunks()));
  CHECK(tree.num_chunks() >= 63);
}

TEST_CASE("a cache is refused once its tree has ended") {
  using Tree = PrefixTree<int, 16>;
  Tree moved;
  KvCache<Cpu, float> cache = [&] {
    Tree tree;
    KvCache<Cpu, float> made(tree, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 8});
    moved = std::move(tree);
    return made;
  }();
  {
    auto sequence = moved.insert({1, 2, 3});
    CHECK(cache.layer(0).num_chunks == 1);
  }
  const std::string text = "cache = orphaned: expected one whose tree still exists";
  moved = Tree();
  CHECK(test::refused([&] { (void)cache.layer(0); }) == text);
  cache.poison(0);
  cache.grow(2);
  CHECK(test::refused([&] { (void)cache.layer(0); }) == text);
  CHECK(test::refused([&] { (void)cache.layer(-1); }) ==
        "layer = -1: expected 0 to num_layers - 1, 0");
  const KvCache<Cpu, float> other(moved, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 8});
  CHECK(other.num_chunks() == 0);
}

TEST_CASE_TEMPLATE("write stores each row in its slot and touches nothing else", T, float, half,
                   bfloat16) {
  Random random;
  for (int round = 0; round < test::scaled(8); ++round) {
    test::RandomPlanOptions options;
    options.num_sequences = 12;
    options.max_length = 50;
    options.chunk_size = 16;
    options.max_queries = random.pick({1, 5});
    const test::RandomPlan plan = make_random_plan(random, options);
    constexpr int dim = 40;
    constexpr int heads = 3;
    test::KvStorage<T> kv(plan.num_chunks, heads, 16, dim);
    test::KvStorage<T> expected(plan.num_chunks, heads, 16, dim);
    random.fill(std::span(kv.k));
    random.fill(std::span(kv.v));
    expected.k = kv.k;
    expected.v = kv.v;
    std::vector<float> k(static_cast<std::size_t>(plan.num_rows()) * heads * dim), v(k.size());
    random.fill(std::span(k));
    random.fill(std::span(v));
    for (std::size_t row = 0; row < plan.writes.size(); ++row) {
      const PlanView::WriteTarget target = plan.writes[row];
      if (target.chunk == no_chunk) continue;
      for (int head = 0; head < heads; ++head) {
        for (int i = 0; i < dim; ++i) {
          const std::size_t at =
              (row * heads + static_cast<std::size_t>(head)) * dim + static_cast<std::size_t>(i);
          expected.view.k_row(target.chunk, head, target.offset)[i] = from_float<T>(k[at]);
          expected.view.v_row(target.chunk, head, target.offset)[i] = from_float<T>(v[at]);
        }
      }
    }
    ChunkAttention<Cpu, dim> attention(2);
    for (int twice = 0; twice < 2; ++twice) {
      attention.write(kv.view, LiveView::unchecked(plan.view()), k, v);
      CHECK(kv.k == expected.k);
      CHECK(kv.v == expected.v);
    }
  }
}

TEST_CASE("write performs the plan's row copies first, scales included") {
  Random random;
  test::RandomPlanOptions options;
  options.num_sequences = 1;
  options.share = test::Share::none;
  options.max_length = 5;
  options.unused_chunks = 6;
  test::RandomPlan plan = make_random_plan(random, options);
  std::vector<ChunkIndex> unused;
  for (int chunk = 0; chunk < plan.num_chunks && unused.size() < 2; ++chunk) {
    bool used = false;
    for (const Piece& piece : plan.pieces) used = used || piece.chunk == chunk;
    if (!used) unused.push_back(chunk);
  }
  plan.copies.push_back({unused[0], 10, unused[1], 3, 7});
  test::QuantizedStorage kv(plan.num_chunks, 2, options.chunk_size, 32);
  for (std::int8_t& value : kv.k) value = static_cast<std::int8_t>(random.bits() >> 56);
  for (std::int8_t& value : kv.v) value = static_cast<std::int8_t>(random.bits() >> 56);
  random.fill(std::span(kv.k_scale));
  random.fill(std::span(kv.v_scale));
  const std::vector<float> rows(static_cast<std::size_t>(plan.num_rows()) * 2 * 32, 0.5f);
  ChunkAttention<Cpu, 32>(1).write(kv.view, LiveView::unchecked(plan.view()), rows, rows);
  for (int head = 0; head < 2; ++head) {
    for (int t = 0; t < 7; ++t) {
      CHECK(std::memcmp(kv.view.k_row(unused[1], head, 3 + t),
                        kv.view.k_row(unused[0], head, 10 + t), 32) == 0);
      CHECK(std::memcmp(kv.view.v_row(unused[1], head, 3 + t),
                        kv.view.v_row(unused[0], head, 10 + t), 32) == 0);
      CHECK(*kv.view.k_row_scale(unused[1], head, 3 + t) ==
            *kv.view.k_row_scale(unused[0], head, 10 + t));
      CHECK(*kv.view.v_row_scale(unused[1], head, 3 + t) ==
            *kv.view.v_row_scale(unused[0], head, 10 + t));
    }
  }
  const PlanView::WriteTarget target = plan.writes[0];
  CHECK(kv.view.k_row(target.chunk, 1, target.offset)[7] == 127);
  CHECK(*kv.view.k_row_scale(target.chunk, 1, target.offset) == doctest::Approx(0.5 / 127));
}

#if CHUNKATTN_EXCEPTIONS
TEST_CASE_TEMPLATE("poison fills one chunk with NaN, in every layer", T, float, half, std::int8_t,
                   float8_e4m3) {
  constexpr int chunks = 3, chunk_size = 4, heads = 2, dim = 8;
  KvCache<Cpu, T> cache(chunk_size, {.num_layers = 2, .num_kv_heads = heads, .head_dim = dim},
                        chunks);
  const auto bytes_of = [&](int layer, ChunkIndex chunk) {
    const auto view = cache.layer(layer);
    return std::span(reinterpret_cast<unsigned char*>(view.k_row(chunk, 0, 0)),
                     static_cast<std::size_t>(view.stride_chunk) * sizeof(T));
  };
  const auto all_are = [](std::span<const unsigned char> bytes, unsigned char value) {
    return std::all_of(bytes.begin(), bytes.end(), [&](auto byte) { return byte == value; });
  };
  for (int l = 0; l < 2; ++l)
    for (ChunkIndex s = 0; s < chunks; ++s) std::ranges::fill(bytes_of(l, s), 0x11);
  cache.poison(1);
  cache.poison(static_cast<ChunkIndex>(1 << 20));  // no memory of this cache
  cache.poison(static_cast<ChunkIndex>(cache.bytes() / cache.bytes_per_chunk()));  // just behind it
  for (int l = 0; l < 2; ++l)
    for (ChunkIndex s = 0; s < chunks; ++s) CHECK(all_are(bytes_of(l, s), s == 1 ? 0xff : 0x11));
  const auto view = cache.layer(1);
  if constexpr (has_row_scales<T>)
    CHECK(std::isnan(*view.v_row_scale(1, 1, chunk_size - 1)));
  else
    CHECK(std::isnan(to_float(*view.v_row(1, 1, chunk_size - 1))));
}

TEST_CASE("bad geometry and layers") {
  const auto message = [](auto&& f) {
    try {
      f();
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  using Cache = KvCache<Cpu, float>;
  CHECK(message([] {
          Cache(64, {.num_layers = 0, .num_kv_heads = 1, .head_dim = 8});
        }).find("options.num_layers = 0") == 0);
  CHECK(message([] {
          Cache(64, {.num_layers = 1, .num_kv_heads = 0, .head_dim = 8});
        }).find("options.num_kv_heads = 0") == 0);
  CHECK(message([] {
          Cache(64, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 0});
        }).find("options.head_dim = 0") == 0);
  CHECK(message([] {
          Cache(64, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 12});
        }).find("options.head_dim = 12") == 0);
  CHECK(message([] {
          Cache(0, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 8});
        }).find("chunk_size = 0") == 0);
  // 2^61 bytes of K and V in a chunk are the most whose addresses can be counted.
  const Cache huge(32, {.num_layers = 1, .num_kv_heads = 1 << 28, .head_dim = 1 << 25});
  CHECK(huge.bytes_per_chunk() == std::size_t{1} << 61);
  Cache cache(64, {.num_layers = 2, .num_kv_heads = 1, .head_dim = 8}, 1);
  CHECK(message([&] {
          static_cast<void>(cache.layer(2));
        }).find("layer = 2: expected 0 to num_layers - 1, 1") == 0);
  CHECK(message([&] { static_cast<void>(cache.layer(-1)); }).find("layer = -1") == 0);
}
#endif

TEST_CASE("what 8-bit K and V cost: the error against attention over the values before") {
  Random random(9);
  test::RandomPlanOptions options;
  options.num_sequences = 8;
  options.max_length = 4096;
  const test::RandomPlan plan = make_random_plan(random, options);
  constexpr int heads = 2, dim = 128;
  test::KvStorage<float> exact(plan.num_chunks, heads, options.chunk_size, dim);
  test::QuantizedStorage kv(plan.num_chunks, heads, options.chunk_size, dim);
  fill_kv(random, plan, exact.view);
  plan.for_each_visible([&](int chunk, int offset) {
    for (int head = 0; head < heads; ++head) {
      *kv.view.k_row_scale(chunk, head, offset) = chunkattn::quantize_row(
          exact.view.k_row(chunk, head, offset), dim, kv.view.k_row(chunk, head, offset));
      *kv.view.v_row_scale(chunk, head, offset) = chunkattn::quantize_row(
          exact.view.v_row(chunk, head, offset), dim, kv.view.v_row(chunk, head, offset));
    }
  });
  std::vector<float> q(static_cast<std::size_t>(plan.num_rows()) * heads * dim), out(q.size());
  random.fill(std::span(q));
  ChunkAttention<Cpu, dim>(2).run(kv.view, LiveView::unchecked(plan.view()), q, out);
  const chunkattn::Reference reference =
      chunkattn::reference_attention(exact.view, plan.view(), std::span<const float>(q));
  double error = 0, size = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double difference = static_cast<double>(out[i]) - reference.out[i];
    error += difference * difference;
    size += reference.out[i] * reference.out[i];
  }
  const double relative = std::sqrt(error / size);
  MESSAGE("relative error of the outputs (root mean square): " << relative);
  // A row of 128 normal values has its largest near 2.8: steps of 2.8 / 127, uniformly rounded, are
  // 0.64 % of a value, once from V and about as much again from K through the logits.
  CHECK(relative > 0.002);
  CHECK(relative < 0.02);
}
