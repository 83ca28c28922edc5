// 8-bit K/V whose scales are of a head, or of a whole layer: the bits of the same scales for each
// row, the oracle, what each share of heads sees, and who refuses such K/V by name.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "chunkattn/interop/paged_plan.hpp"
#include "chunkattn/interop/paged_view.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/runtime/any_attention.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "support/attention_case.hpp"
#include "support/page_batch.hpp"
#include "support/refused.hpp"

using namespace chunkattn;
using test::Random;
using test::Share;

namespace {

/// K/V of 8 bits with scales of heads or of the layer: those behind them are NaN.
template <class T>
struct Shared {
  std::vector<float> k_scale, v_scale;
  KvView<T> view;

  /// \param rows  K/V with a scale for each row, of which the elements are kept: all scales become
  ///              those that the result has
  Shared(Random& random, const KvView<T>& rows, KvScales scales) {
    const auto heads = static_cast<std::size_t>(rows.num_kv_heads);
    for (auto* all : {&k_scale, &v_scale}) {
      all->assign(heads + 1, std::numeric_limits<float>::quiet_NaN());
      const std::size_t used = scales == KvScales::per_head ? heads : 1;
      for (std::size_t i = 0; i < used; ++i)
        (*all)[i] = 0.002f + 0.01f * static_cast<float>(random.uniform(0, 100)) / 100;
    }
    view = rows;
    view.k_scale = k_scale.data();
    view.v_scale = v_scale.data();
    view.scale_stride_chunk = view.scale_stride_head = 0;
    view.scales = scales;
    for (int chunk = 0; chunk < rows.num_chunks; ++chunk)
      for (int head = 0; head < rows.num_kv_heads; ++head)
        for (int t = 0; t < rows.chunk_size; ++t) {
          const auto at = static_cast<std::size_t>(scales == KvScales::per_head ? head : 0);
          *rows.k_row_scale(chunk, head, t) = k_scale[at];
          *rows.v_row_scale(chunk, head, t) = v_scale[at];
        }
  }
};

template <class T, class X, int HeadDim, int ValueDim>
void check_scales(std::uint64_t stream) {
  Random random(stream);
  ChunkAttention<Cpu, HeadDim, ValueDim> attention(2);
  for (int i = 0; i < test::scaled(40); ++i) {
    test::RandomPlanOptions options;
    options.share = random.pick({Share::none, Share::some, Share::all});
    options.num_sequences = random.uniform(1, 12);
    options.chunk_size = random.pick({1, 4, 16, 64});
    options.max_length = random.pick({3, 40, 150});
    options.max_queries = random.pick({1, 1, 4, 30});
    const int kv_heads = random.uniform(1, 3), group = random.pick({1, 2, 4, 8});
    test::AttentionCase<T, X> problem(random, options, HeadDim, kv_heads, group,
                                      random.pick({1.0f, 20.0f}), ValueDim);
    const KvScales scales = random.pick({KvScales::per_head, KvScales::per_layer});
    CAPTURE(name_of(scales));
    CAPTURE(kv_heads);
    CAPTURE(group);
    const Shared<T> shared(random, problem.kv.view, scales);
    const PlanView& plan = problem.plan.view();
    const Reference reference =
        reference_attention(shared.view, plan, std::span<const X>(problem.q));
    CHECK(reference.out ==
          reference_attention(problem.kv.view, plan, std::span<const X>(problem.q)).out);
    test::Answer<X> of_rows(problem), answer(problem);
    attention.run(problem.kv.view, problem.plan.view(), problem.q, of_rows.out,
                  {.lse = of_rows.lse});
    attention.run(shared.view, problem.plan.view(), problem.q, answer.out, {.lse = answer.lse});
    CHECK(std::memcmp(answer.out.data(), of_rows.out.data(), of_rows.out.size() * sizeof(X)) == 0);
    CHECK(answer.lse == of_rows.lse);
    const Rounding rounding = test::rounding_in<T>(attention);
    CHECK(compare_with_reference(reference, std::span<const X>(answer.out), rounding).worst <= 1.0);
    CHECK(test::worst_lse(reference, answer.lse, rounding) <= 1.0);

    // A rank's share of the heads, and shares of it.
    const int first = random.uniform(0, kv_heads - 1);
    const KvView<T> share = shared.view.heads(first, kv_heads - first);
    const int last = random.uniform(0, share.num_kv_heads - 1);
    const KvView<T> one = share.heads(last, 1);
    const int chunk = random.uniform(0, one.num_chunks - 1);
    CHECK(one.k_scale_of(chunk, 0, 0) == shared.view.k_scale_of(chunk, first + last, 0));
    CHECK(one.v_scale_of(chunk, 0, 0) == shared.view.v_scale_of(chunk, first + last, 0));
    std::vector<T*> k_slabs, v_slabs;
    for (int c = 0; c < one.num_chunks; ++c) {
      k_slabs.push_back(shared.view.k_row(c, 0, 0));
      v_slabs.push_back(shared.view.v_row(c, 0, 0));
    }
    KvView<T> in_slabs = shared.view;
    in_slabs.k = in_slabs.v = nullptr;
    in_slabs.k_slabs = k_slabs.data();
    in_slabs.v_slabs = v_slabs.data();
    const KvView<T> other = in_slabs.heads(first, kv_heads - first).heads(last, 1);
    CHECK(*other.k_scale_of(chunk, 0, 0) == *one.k_scale_of(chunk, 0, 0));
    CHECK(*other.v_scale_of(chunk, 0, 0) == *one.v_scale_of(chunk, 0, 0));
    CHECK(other.k_row(chunk, 0, 0) == one.k_row(chunk, 0, 0));
  }
}

/// A batch of pages, joined and not.
template <class T>
void check_pages(std::uint64_t stream) {
  constexpr int dim = 32;
  Random random(stream);
  test::PageBatches batches(random, {.page_sizes = {1, 3, 16}, .max_tokens = 60, .num_pages = 0});
  ChunkAttention<Cpu, dim> attention(2);
  int joined = 0;
  for (int i = 0; i < test::scaled(30); ++i) {
    const test::PageBatch batch = batches.make();
    const PageGeometry& pages = batch.geometry;
    if (batch.num_rows() == 0) continue;
    // [page][token][head][dim], K and V apart
    std::vector<T> memory(2 * static_cast<std::size_t>(pages.num_pages * pages.page_size) * 2 *
                          dim);
    for (T& element : memory)
      element = test::stored<T>(static_cast<float>(random.uniform(-100, 100)));
    std::vector<float> scales{0.01f, 0.02f, 0.03f, 0.04f};
    const std::int64_t token = 2 * dim;
    const KvScales kind = random.pick({KvScales::per_head, KvScales::per_layer});
    const KvView<T> layer{.k = memory.data(),
                          .v = memory.data() + memory.size() / 2,
                          .num_chunks = pages.num_pages,
                          .num_kv_heads = 2,
                          .head_dim = dim,
                          .chunk_size = pages.page_size,
                          .stride_chunk = token * pages.page_size,
                          .stride_head = dim,
                          .stride_token = token,
                          .k_scale = scales.data(),
                          .v_scale = scales.data() + 2,
                          .scales = kind};
    CHECK(can_join_pages(layer));
    const KvView<T> used = pages.joined ? join_pages(layer) : layer;
    joined += pages.joined;
    PagedPlan plan(pages);
    const LiveView view = plan.build(batch.tables());
    std::vector<float> q(static_cast<std::size_t>(view.num_rows) * 4 * dim), out(q.size());
    random.fill(std::span(q));
    attention.run(used, view, q, out);
    const Reference reference = reference_attention(used, view, std::span<const float>(q));
    CHECK(compare_with_reference(reference, std::span<const float>(out),
                                 test::rounding_in<T>(attention))
              .worst <= 1.0);
  }
  CHECK(joined > 0);
}

}  // namespace

TEST_CASE("scales of heads and of layers: the bits of these scales for each row, and the oracle") {
  check_scales<std::int8_t, float, 64, 64>(1);
  check_scales<float8_e4m3, half, 64, 64>(2);
  check_scales<std::int8_t, bfloat16, 40, 24>(3);
}

TEST_CASE("pages of an engine with such scales") {
  check_pages<std::int8_t>(11);
  check_pages<float8_e4m3>(12);
}

#if CHUNKATTN_EXCEPTIONS

TEST_CASE("what keeps a scale for each row alone refuses others by name") {
  Random random(21);
  test::RandomPlanOptions options;
  test::AttentionCase<std::int8_t> problem(random, options, 16, 2, 2);
  const auto message = [&](const auto& change, KvScales scales = KvScales::per_head) {
    Shared<std::int8_t> shared(random, problem.kv.view, scales);
    change(shared.view);
    std::vector<float> out(problem.q.size(), 7.0f);
    const std::vector<float> before = out;
    ChunkAttention<Cpu, 16> attention(1);
    const std::string text =
        test::refused([&] { attention.run(shared.view, problem.plan.view(), problem.q, out); });
    if (text != "no error") CHECK(out == before);
    return text;
  };
  using View = KvView<std::int8_t>;
  CHECK(message([](View&) {}) == "no error");
  CHECK(message([](View& v) { v.scales = static_cast<KvScales>(3); }) ==
        "layer.scales = 3: expected KvScales::per_row, per_head or per_layer");
  CHECK(message([](View& v) { v.scales = KvScales::per_row; }) ==
        "layer.scale_stride_chunk = 0: expected elements from a chunk to the next");
  CHECK(message([](View& v) { v.scale_stride_chunk = 4; }) ==
        "layer.scale_stride_chunk = 4: expected 0 where scales are per_head");
  CHECK(message([](View& v) { v.scale_stride_head = 1; }, KvScales::per_layer) ==
        "layer.scale_stride_head = 1: expected 0 where scales are per_layer");
  CHECK(message([](View& v) { v.k_scale = nullptr; }) ==
        "layer.k_scale = null: expected memory of K's scales");
  CHECK(message([](View& v) { v.v_scale = nullptr; }) ==
        "layer.v_scale = null: expected memory of V's scales");
  float* const slabs[1] = {nullptr};
  CHECK(message([&](View& v) { v.k_scale_slabs = slabs; }) ==
        "layer.k_scale_slabs = given: expected null where scales are per_head");
  CHECK(message([&](View& v) { v.v_scale_slabs = slabs; }, KvScales::per_layer) ==
        "layer.v_scale_slabs = given: expected null where scales are per_layer");

  for (const KvScales scales : {KvScales::per_head, KvScales::per_layer}) {
    const Shared<std::int8_t> shared(random, problem.kv.view, scales);
    const std::vector<std::int8_t> k = problem.kv.k;
    const std::vector<float> given = shared.k_scale;
    const std::vector<float> rows(static_cast<std::size_t>(problem.plan.num_rows()) * 2 * 16, 1.0f);
    ChunkAttention<Cpu, 16> attention(1);
    CHECK(test::refused([&] { attention.write(shared.view, problem.plan.view(), rows, rows); }) ==
          std::string("layer.scales = ") + name_of(scales) +
              ": expected per_row: write() gives each row a scale of its own");
    CHECK(problem.kv.k == k);
    CHECK(std::memcmp(shared.k_scale.data(), given.data(), given.size() * sizeof(float)) == 0);

    PrefixTree<int, 64> tree;
    struct Provider {
      KvView<std::int8_t> views[2];
      KvView<std::int8_t> layer(int l) const { return views[l]; }
      static KvCacheOptions options() {
        return {.num_layers = 2, .num_kv_heads = 2, .head_dim = 16};
      }
    } provider{{problem.kv.view, shared.view}};
    provider.views[1].chunk_size = provider.views[0].chunk_size = 64;
    const auto sequence = tree.insert(std::vector<int>(3, 1));
    std::vector<std::byte> bytes(kv_bytes(provider, 3));
    CHECK(test::refused([&] {
            for_each_kv_span(sequence, {0, 3}, provider, [](const auto&) { FAIL("called"); });
          }) == std::string("layer.scales = ") + name_of(scales) +
                    ": expected per_row: what travels with a row is its own");

    std::vector<float8_e4m3> memory(2 * 3 * 4 * 8);
    float scale[3] = {1, 2, 3};
    const AnyKvView any = make_any_kv_view(ElementType::float8_e4m3, memory.data(),
                                           memory.data() + 96, {1, 3, 4, 8}, scale, scale, scales);
    const auto& view = any.as<float8_e4m3>();
    CHECK(view.scales == scales);
    CHECK(view.scale_stride_head == 0);
    CHECK(view.scale_stride_chunk == 0);
    CHECK(*any.heads(2, 1).as<float8_e4m3>().k_scale_of(0, 0, 3) ==
          (scales == KvScales::per_head ? 3.0f : 1.0f));
  }
}

#endif
