// KvView: a share of the KV heads, V in K's memory, and whose chunks a view describes.
#include "chunkattn/kv_view.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "support/refused.hpp"
#include "tests/support/retention.hpp"

using namespace chunkattn;

namespace {

using Tree = PrefixTree<int, 16, PoolAllocator, test::NoRetention>;

// Every row of heads(first, count) is that of the whole view, some heads further on.
template <class T>
void check_share(const KvView<T>& whole, int first, int count) {
  const KvView<T> share = whole.heads(first, count);
  CHECK(share.num_kv_heads == count);
  CHECK(share.has_v_in_k() == whole.has_v_in_k());
  for (ChunkIndex chunk = 0; chunk < whole.num_chunks; ++chunk) {
    for (int head = 0; head < count; ++head) {
      for (const int token : {0, whole.chunk_size - 1}) {
        CHECK(share.k_row(chunk, head, token) == whole.k_row(chunk, first + head, token));
        CHECK(share.v_row(chunk, head, token) == whole.v_row(chunk, first + head, token));
        if (whole.value_dim == 0)
          CHECK(share.v_row_as_k(chunk, head, token) == whole.v_row(chunk, first + head, token));
        if constexpr (has_row_scales<T>) {
          CHECK(share.k_row_scale(chunk, head, token) ==
                whole.k_row_scale(chunk, first + head, token));
          CHECK(share.v_row_scale(chunk, head, token) ==
                whole.v_row_scale(chunk, first + head, token));
        }
      }
    }
  }
}

template <class T>
void check_shares(const KvView<T>& whole) {
  for (int first = 0; first < whole.num_kv_heads; ++first)
    for (int count = 1; count <= whole.num_kv_heads - first; ++count)
      check_share(whole, first, count);
  // A share of a share.
  const KvView<T> last = whole.heads(1, 3).heads(1, 2).heads(1, 1);
  CHECK(last.k_row(1, 0, 2) == whole.k_row(1, 3, 2));
}

}  // namespace

TEST_CASE_TEMPLATE("a share of the heads of a cache, whatever its V", T, float, std::int8_t) {
  KvCacheOptions options{.num_layers = 2, .num_kv_heads = 4, .head_dim = 16};
  check_shares(KvCache<Cpu, T>(8, options, 3).layer(1));
  options.value_dim = 8;
  check_shares(KvCache<Cpu, T>(8, options, 3).layer(1));
  options.v_in_k = true;
  check_shares(KvCache<Cpu, T>(8, options, 3).layer(1));
}

TEST_CASE("a share of the heads of dense memory keeps its plain addresses") {
  std::vector<float> k(3 * 4 * 8 * 16), v(k.size());
  for (const std::optional<int> value_dim : {std::optional<int>{}, {8}}) {
    const auto whole = make_kv_view(k.data(), v.data(), {3, 4, 8, 16, value_dim});
    check_shares(whole);
    // For kernels of an engine's own, which count from `k` on.
    const auto share = whole.heads(2, 2);
    CHECK(share.k + share.stride_chunk + share.stride_head + share.stride_token ==
          whole.k_row(1, 3, 1));
  }
  check_shares(make_kv_view(k.data(), k.data(), {3, 4, 8, 16, 8}));
  std::vector<std::int8_t> k8(k.size()), v8(k.size());
  std::vector<float> k_scale(3 * 4 * 8), v_scale(k_scale.size());
  const auto whole =
      make_kv_view(k8.data(), v8.data(), k_scale.data(), v_scale.data(), {3, 4, 8, 16});
  check_shares(whole);
  CHECK(whole.heads(1, 1).v_scale == whole.v_row_scale(0, 1, 0));
  // Values in slabs, scales not.
  std::int8_t* slabs[] = {k8.data()};
  KvView<std::int8_t> mixed = whole;
  mixed.k = mixed.v = nullptr;
  mixed.k_slabs = mixed.v_slabs = slabs;
  mixed.slab_shift = 2;
  check_shares(mixed);
}

#if CHUNKATTN_EXCEPTIONS
static_assert(std::is_aggregate_v<KvView<half>>);

TEST_CASE("heads that a view does not have") {
  KvCache<Cpu, float> cache(8, {.num_layers = 1, .num_kv_heads = 4, .head_dim = 16}, 3);
  const auto view = cache.layer(0);
  const auto refused = [&](int first, int count) {
    return test::refused([&] { (void)view.heads(first, count); });
  };
  CHECK(refused(-1, 1) == "first = -1: expected 0 to 3, a KV head of the view");
  CHECK(refused(4, 1) == "first = 4: expected 0 to 3, a KV head of the view");
  CHECK(refused(1, 0) == "count = 0: expected from 1 to 3, the view's heads from first on");
  CHECK(refused(1, 4) == "count = 4: expected from 1 to 3, the view's heads from first on");
  CHECK(refused(1, 3) == "no error");
}

TEST_CASE("V in K's memory, where it would overwrite K") {
  std::vector<float> m(2 * 2 * 8 * 16 * 2);
  const auto refused = [&](float* k, float* v, std::optional<int> value_dim = {}) {
    return test::refused([&] { (void)make_kv_view(k, v, {2, 2, 8, 16, value_dim}); });
  };
  CHECK(refused(m.data(), m.data()).find("v = k: expected memory of V of its own") == 0);
  CHECK(refused(m.data(), m.data(), 16).find("v = k: expected memory of V of its own") == 0);
  CHECK(refused(m.data(), m.data() + 15).find("v = within rows of K") == 0);
  CHECK(refused(m.data() + 15, m.data()).find("v = within rows of K") == 0);
  CHECK(refused(m.data(), m.data() + 16) == "no error");  // strides may follow
  CHECK(refused(m.data(), m.data(), 8) == "no error");
  std::vector<std::int8_t> m8(m.size());
  std::vector<float> scales(2 * 2 * 8);
  CHECK(test::refused([&] {
          (void)make_kv_view(m8.data(), m8.data(), scales.data(), scales.data(), {2, 2, 8, 16});
        }).find("v = k: expected") == 0);
}

TEST_CASE("V has scales of its own, in K those of K") {
  Tree tree;
  auto sequence = tree.insert({1, 2, 3});
  auto step = tree.begin_step();
  REQUIRE(step.add(sequence));
  AttentionPlan plan;
  const auto view = plan.build(step);
  const std::vector<float> rows(3 * 16, 1.0f);
  std::vector<std::int8_t> k(16 * 16), v(k);
  std::vector<float> k_scale(16), v_scale(16);

  ChunkAttention<Cpu, 16> attention(1);
  auto layer = make_kv_view(k.data(), v.data(), k_scale.data(), k_scale.data(), {1, 1, 16, 16});
  const auto refused = [&] {
    return test::refused([&] { attention.write(layer, view, rows, rows); });
  };
  CHECK(refused() ==
        "layer.v_scale = K's scales: expected memory of V's scales of its own, or K's scales if V "
        "is in K");
  CHECK(k == std::vector<std::int8_t>(k.size()));
  layer.v_scale = v_scale.data();
  CHECK(refused() == "no error");
  KvCache<Cpu, std::int8_t> cache(tree, {.num_layers = 1, .num_kv_heads = 1, .head_dim = 16});
  layer = cache.layer(0);
  layer.v_scale_slabs = layer.k_scale_slabs;
  CHECK(refused().find("layer.v_scale = K's scales: expected ") == 0);
  layer.v_scale_slabs = cache.layer(0).v_scale_slabs;
  CHECK(refused() == "no error");

  ChunkAttention<Cpu, 16, 8> latent(1);
  layer = make_kv_view(k.data(), k.data(), k_scale.data(), v_scale.data(), {1, 1, 16, 16, 8});
  const auto refused_in_k = [&] { return test::refused([&] { latent.write(layer, view, rows); }); };
  CHECK(refused_in_k().find("layer.v_scale = apart: expected ") == 0);
  layer.v_scale = layer.k_scale;
  CHECK(refused_in_k() == "no error");
}
#endif

namespace {

struct Fixture {
  Tree tree;
  AttentionPlan plan;
  ChunkAttention<Cpu, 16> attention{1};
  std::vector<Tree::Sequence> sequences;

  Tree::StepView build(Tree::Step& step) {
    std::vector<int> prompt(20, 7);
    sequences.push_back(tree.insert(prompt));
    CHECK(step.add(sequences.back()));
    return plan.build(step);
  }
  std::string of_write(const KvView<float>& layer, const LiveView& view) {
    const std::vector<float> k(20 * static_cast<std::size_t>(layer.num_kv_heads) * 16);
    return test::refused([&] { attention.write(layer, view, k, k); });
  }
  std::string of_run(const KvView<float>& layer, const LiveView& view) {
    std::vector<float> q(20 * static_cast<std::size_t>(layer.num_kv_heads) * 16), out(q.size());
    return test::refused([&] { attention.run(layer, view, q, out); });
  }
  std::string of_both(const KvView<float>& layer, const LiveView& view) {
    const std::string of_layer = of_write(layer, view);
    CHECK(of_run(layer, view) == of_layer);
    return of_layer;
  }
};

constexpr KvCacheOptions shape{.num_layers = 2, .num_kv_heads = 4, .head_dim = 16};

}  // namespace

TEST_CASE_FIXTURE(Fixture, "two ranks, each with half of the heads, whose values differ") {
  KvCache<Cpu, float> cache(tree, shape);
  auto step = tree.begin_step();
  const auto view = build(step);
  constexpr std::size_t rows = 20, dim = 16, heads = 4, group = 2;
  std::vector<float> k(rows * heads * dim), v(k.size()), q(rows * heads * group * dim),
      out(q.size());
  for (std::size_t i = 0; i < k.size(); ++i) {
    k[i] = static_cast<float>(i * 37 % 101) / 101;
    v[i] = static_cast<float>(i / dim % heads * 1000 + i % 13);  // each head its thousands
  }
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i * 53 % 97) / 97;
  attention.write(cache.layer(0), view, k, v);
  attention.run(cache.layer(0), view, q, out);

  const auto part = [](const std::vector<float>& all, std::size_t rank) {
    std::vector<float> half;
    const std::size_t row = all.size() / rows, begin = rank * row / 2;
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t i = begin; i < begin + row / 2; ++i) half.push_back(all[r * row + i]);
    return half;
  };
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const auto layer = cache.layer(1).heads(static_cast<int>(rank) * 2, 2);
    attention.write(layer, view, part(k, rank), part(v, rank));
    std::vector<float> own(out.size() / 2);
    attention.run(layer, view, part(q, rank), own);
    const std::vector<float> expected = part(out, rank);
    for (std::size_t i = 0; i < own.size(); ++i)
      REQUIRE(own[i] == doctest::Approx(expected[i]).epsilon(1e-5));
  }
  // What the ranks wrote is the layer as a whole.
  for (int head = 0; head < 4; ++head)
    CHECK(cache.layer(1).v_row(0, head, 3)[5] == cache.layer(0).v_row(0, head, 3)[5]);
}

#if CHUNKATTN_EXCEPTIONS
TEST_CASE_FIXTURE(Fixture, "a shifted pointer of a view in slabs is refused") {
  KvCache<Cpu, float> cache(tree, shape);
  auto step = tree.begin_step();
  const auto view = build(step);
  float elsewhere = 0;
  auto layer = cache.layer(0);
  layer.k = &elsewhere;
  CHECK(of_both(layer, view)
            .find("layer.k = non-null: expected null, since K lies in slabs: a "
                  "share of the heads is heads(first, count)") == 0);
  layer = cache.layer(0);
  layer.v = &elsewhere;
  CHECK(of_both(layer, view).find("layer.v = non-null: expected null, since V lies in slabs") == 0);
}

TEST_CASE_FIXTURE(Fixture, "K/V of another tree") {
  auto step = tree.begin_step();
  const auto view = build(step);
  Tree other_tree;
  const auto other = other_tree.insert(std::vector<int>(20, 7));
  KvCache<Cpu, float> wrong(other_tree, shape), own(tree, shape);
  CHECK(wrong.layer(0).tree_id == other.tree_id());
  CHECK(view.tree_id == sequences[0].tree_id());
  CHECK(
      of_both(wrong.layer(0), view) ==
      "layer = of another tree: expected the K/V memory of the plan's tree: a KvCache made for it");
  CHECK(of_both(wrong.layer(0).heads(1, 1), view).find("layer = of another tree") == 0);
  CHECK(of_both(own.layer(0), view) == "no error");
  // The tree may have been moved meanwhile.
  Tree moved = std::move(tree);
  CHECK(of_both(own.layer(0), view) == "no error");
  // What follows no tree, and arrays made by hand, stand for any.
  KvCache<Cpu, float> free(16, shape, 2);
  CHECK(free.layer(0).tree_id == 0);
  CHECK(of_both(free.layer(0), view) == "no error");
  std::vector<float> k(std::size_t{2} * 4 * 16 * 16), v(k.size());
  CHECK(of_both(make_kv_view(k.data(), v.data(), {2, 4, 16, 16}), view) == "no error");
  PlanView by_hand = view;
  by_hand.tree_id = 0;
  CHECK(of_both(wrong.layer(0), LiveView::unchecked(by_hand)) == "no error");
  tree = std::move(moved);
}

TEST_CASE_FIXTURE(Fixture, "a cache without chunks is not one without memory") {
  KvCache<Cpu, float> empty(16, shape), early(tree, shape);
  const auto before = early.layer(0);
  auto step = tree.begin_step();
  const auto view = build(step);
  for (const auto& layer : {empty.layer(0), before})
    CHECK(
        of_both(layer, view) ==
        "layer.num_chunks = 0: expected memory for the plan's chunks: take the layer's view after "
        "the step is built, of a cache that follows its tree or was grown");
  CHECK(of_both(early.layer(0), view) == "no error");
  auto broken = early.layer(0);
  broken.k_slabs = nullptr;
  CHECK(of_both(broken, view).find("layer.k = null") == 0);
}

TEST_CASE_FIXTURE(Fixture, "a layout of one's own: [chunk][token][K heads, then V heads]") {
  auto step = tree.begin_step();
  const auto view = build(step);
  const auto chunks = static_cast<std::int32_t>(tree.num_chunks());
  constexpr std::int32_t heads = 4, dim = 16;
  std::vector<float> fused(static_cast<std::size_t>(chunks * Tree::chunk_size * 2 * heads * dim));
  const KvView<float> own{.k = fused.data(),
                          .v = fused.data() + heads * dim,
                          .num_chunks = chunks,
                          .num_kv_heads = heads,
                          .head_dim = dim,
                          .chunk_size = Tree::chunk_size,
                          .stride_chunk = Tree::chunk_size * 2 * heads * dim,
                          .stride_head = dim,
                          .stride_token = 2 * heads * dim};
  KvCache<Cpu, float> cache(tree, shape);
  std::vector<float> k(20 * heads * dim), v(k.size()), q(k.size());
  for (std::size_t i = 0; i < k.size(); ++i) {
    k[i] = static_cast<float>(i % 7);
    v[i] = static_cast<float>(i % 11);
    q[i] = static_cast<float>(i % 3) * 0.1f;
  }
  std::vector<float> expected(q.size()), out(q.size());
  attention.write(cache.layer(0), view, k, v);
  attention.run(cache.layer(0), view, q, expected);
  attention.write(own, view, k, v);
  attention.run(own, view, q, out);
  CHECK(out == expected);
  CHECK(own.v_row(1, 2, 3) == fused.data() + ((16 + 3) * 2 * heads + heads + 2) * dim);
  CHECK(own.v_row(1, 2, 3)[5] == v[((16 + 3) * heads + 2) * dim + 5]);
}

TEST_CASE_FIXTURE(Fixture, "memory of one's own that is too small") {
  auto step = tree.begin_step();
  const auto view = build(step);  // of 20 tokens, 16 to a chunk
  std::vector<float> k(std::size_t{2} * 4 * 16 * 16), v(k.size());
  CHECK(
      of_both(make_kv_view(k.data(), v.data(), {1, 4, 16, 16}), view) ==
      "layer.num_chunks = 1: expected at least 2, which this plan needs: memory of your own, or a "
      "cache without a tree, is to have tree.num_chunks() chunks in each step");
  KvCache<Cpu, float> cache(tree, shape);
  auto early = cache.layer(0);
  early.num_chunks = 1;
  CHECK(of_both(early, view) ==
        "layer.num_chunks = 1: expected at least 2, which this plan needs: take the layer's view "
        "after the step is built");
  // What is copied to or from counts, too.
  auto layer = make_kv_view(k.data(), v.data(), {2, 4, 16, 16});
  for (const auto& [from, to] : {std::pair{0, 6}, std::pair{8, 0}}) {
    const PlanView::RowCopy copies[] = {{0, 0, 3, 0, 1}, {from, 0, to, 0, 1}};
    PlanView copying = view;
    copying.copies = copies;
    copying.num_copies = 2;
    CHECK(of_write(layer, LiveView::unchecked(copying))
              .find("layer.num_chunks = 2: expected at least " +
                    std::to_string(std::max(from, to) + 1)) == 0);
  }
  layer.stride_token = 0;
  CHECK(of_both(layer, view) ==
        "layer.stride_token = 0: expected elements from a token to the next");
  layer.stride_token = 16;
  layer.stride_chunk = 0;
  CHECK(of_both(layer, view) ==
        "layer.stride_chunk = 0: expected elements from a chunk to the next");
}

TEST_CASE_FIXTURE(Fixture, "out is q, or memory of its own") {
  KvCache<Cpu, float> cache(tree, shape);
  auto step = tree.begin_step();
  const auto view = build(step);
  const std::size_t size = 20 * 4 * 16;
  std::vector<float> k(size, 1.0f), memory(3 * size, 1.0f);
  attention.write(cache.layer(0), view, k, k);
  const auto of_run = [&](std::size_t q_at, auto* out) {
    return test::refused([&] {
      attention.run(cache.layer(0), view, std::span(memory).subspan(q_at, size),
                    std::span(out, size));
    });
  };
  const std::string overlap =
      "out = memory of q: expected memory of its own, or q itself if it has as many bytes";
  CHECK(of_run(size, memory.data()) == "no error");
  CHECK(of_run(size, memory.data() + size) == "no error");
  CHECK(of_run(size, memory.data() + 2 * size) == "no error");
  const std::vector<float> before = memory;
  CHECK(of_run(size, memory.data() + 1) == overlap);
  CHECK(of_run(size, memory.data() + 2 * size - 1) == overlap);
  CHECK(of_run(size, reinterpret_cast<half*>(memory.data() + size)) == overlap);
  CHECK(of_run(0, reinterpret_cast<bfloat16*>(memory.data()) + 2 * size - 1) == overlap);
  CHECK(memory == before);
}

TEST_CASE_FIXTURE(Fixture, "write: V in K's memory of a view made by hand") {
  KvCache<Cpu, float> cache(tree, shape);
  auto step = tree.begin_step();
  const auto view = build(step);
  auto layer = cache.layer(0);
  layer.v_slabs = layer.k_slabs;
  CHECK(of_write(layer, view).find("layer.v = K's memory: expected memory of V of its own") == 0);
}
#endif
