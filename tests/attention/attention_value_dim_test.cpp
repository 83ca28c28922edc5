// Heads of V that are longer or shorter than those of K: every kernel against the oracle, and the
// oracle against halves of V by themselves.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "chunkattn/kv_cache.hpp"
#include "support/variant_cases.hpp"
#include "support/written_rows.hpp"

using namespace chunkattn;
using test::Random;
using test::Share;

namespace {

// Builds for one instruction set, with a matrix unit in software or a sanitizer run fewer: kernels
// take long to compile.
#if defined(CHUNKATTN_ISA) || defined(CHUNKATTN_SOFTWARE_TILES) || \
    defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool is_variant = true;
#else
constexpr bool is_variant = false;
#endif

template <int HeadDim, int ValueDim>
using Attention = ChunkAttention<Cpu, HeadDim, ValueDim>;

test::RandomPlanOptions random_shape(Random& random, Share share, int queries) {
  test::RandomPlanOptions options;
  const bool is_long = random.chance(0.1);  // walks that are cut
  options.share = share;
  options.num_sequences = is_long ? 2 : random.uniform(1, 12);
  options.chunk_size = random.pick({4, 16, 64});
  options.max_length = is_long ? 3000 : random.pick({3, 40, 150});
  options.max_queries = queries;
  return options;
}

/// Groups of 1, 4 and 6, nothing, some and all shared, decode and prefill, in all modes.
template <int HeadDim, int ValueDim, class T, class X = float>
void check_shapes(std::uint64_t stream) {
  Random random(stream);
  auto modes = test::variant_modes<HeadDim, ValueDim>();
  for (const int group : {1, 4, 6}) {
    for (const Share share : {Share::none, Share::some, Share::all}) {
      for (const int queries : {1, 30}) {
        const test::AttentionCase<T, X> problem(random, random_shape(random, share, queries),
                                                HeadDim, random.uniform(1, 2), group,
                                                random.pick({1.0f, 20.0f}), ValueDim);
        CAPTURE(HeadDim);
        CAPTURE(ValueDim);
        CAPTURE(group);
        CAPTURE(static_cast<int>(share));
        CAPTURE(queries);
        for (auto& attention : modes) {
          CAPTURE(static_cast<int>(attention.options().reduce));
          test::Answer<X> answer(problem);
          attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out,
                        {.lse = answer.lse});
          const Rounding rounding = test::rounding_in<T>(attention);
          CHECK(compare_with_reference(problem.reference, std::span<const X>(answer.out), rounding)
                    .worst <= 1.0);
          CHECK(test::worst_lse(problem.reference, answer.lse, rounding) <= 1.0);
        }
      }
    }
  }
}

template <int HeadDim, int ValueDim, class T, class X = float>
void check_more_shapes(std::uint64_t stream) {
  if constexpr (!is_variant) check_shapes<HeadDim, ValueDim, T, X>(stream);
}

}  // namespace

TEST_CASE("longer and shorter rows of V than of K, every type and mode") {
  check_more_shapes<192, 128, half>(1);
  check_more_shapes<128, 64, float>(2);
  check_shapes<64, 128, bfloat16>(3);
  check_more_shapes<80, 96, float, half>(4);
  check_shapes<96, 40, float8_e4m3>(5);
  check_more_shapes<64, 96, std::int8_t>(6);
}

TEST_CASE("masked keys, whose V may be NaN") {
  test::check_variant<test::MaskCase, bfloat16, 64, 96>(11);
}

TEST_CASE("the oracle: columns of V do not know of each other") {
  Random random(21);
  constexpr int dim = 24, value_dim = 40;
  const test::AttentionCase<float> whole(random, random_shape(random, Share::some, 3), dim, 2, 3,
                                         1.0f, value_dim);
  CHECK(whole.reference.value_dim == value_dim);
  const KvView<float>& kv = whole.kv.view;
  for (int begin = 0; begin + dim <= value_dim; begin += value_dim - dim) {
    test::KvStorage<float> part(kv.num_chunks, kv.num_kv_heads, kv.chunk_size, dim);
    for (int chunk = 0; chunk < kv.num_chunks; ++chunk)
      for (int head = 0; head < kv.num_kv_heads; ++head)
        for (int t = 0; t < kv.chunk_size; ++t) {
          std::copy_n(kv.k_row(chunk, head, t), dim, part.view.k_row(chunk, head, t));
          std::copy_n(kv.v_row(chunk, head, t) + begin, dim, part.view.v_row(chunk, head, t));
        }
    const Reference reference =
        reference_attention(part.view, whole.plan.view(), std::span<const float>(whole.q));
    CHECK(reference.lse == whole.reference.lse);
    for (std::size_t line = 0; line < reference.lse.size(); ++line)
      for (std::size_t i = 0; i < dim; ++i)
        CHECK(reference.out[line * dim + i] ==
              whole.reference.out[line * value_dim + static_cast<std::size_t>(begin) + i]);
  }
}

TEST_CASE("batch-invariant: the same bits for any number of threads, by products or streams") {
  Random random(31);
  for (int round = 0; round < 6; ++round) {
    const auto options = random_shape(random, Share::some, random.pick({1, 30}));
    const test::AttentionCase<bfloat16> problem(random, options, 64, 2, random.pick({1, 4}), 1.0f,
                                                128);
    test::Answer<> first(problem), answer(problem);
    for (const int threads : {1, 2, 5}) {
      Attention<64, 128> attention(threads,
                                   {.reduce = CpuOptions::Reduce::batch_invariant,
                                    .tuning = {.min_product_lines = random.pick({1, 20, 1000})}});
      attention.run(problem.kv.view, problem.plan.view(), problem.q, answer.out,
                    {.lse = answer.lse});
      if (threads == 1) first = answer;
      CHECK(std::memcmp(first.out.data(), answer.out.data(), first.out.size() * sizeof(float)) ==
            0);
      CHECK(first.lse == answer.lse);
    }
  }
}

TEST_CASE_TEMPLATE("what write() stores in a cache is what attention reads", T, bfloat16,
                   float8_e4m3) {
  constexpr int dim = has_row_scales<T> ? 96 : 64, value_dim = has_row_scales<T> ? 40 : 128;
  Random random(41);
  for (int round = 0; round < 4; ++round) {
    const test::RandomPlan plan = make_random_plan(
        random, random_shape(random, random.pick({Share::none, Share::some, Share::all}), 4));
    const int heads = random.uniform(1, 3);
    KvCache<Cpu, T> cache(plan.chunk_size,
                          {.num_kv_heads = heads, .head_dim = dim, .value_dim = value_dim},
                          static_cast<std::size_t>(plan.num_chunks));
    const KvView<T> layer = cache.layer(0);
    CHECK(layer.dim_of_v() == value_dim);
    test::poison_kv(layer);
    const test::WrittenRows rows(random, plan, heads, dim, has_row_scales<T> ? 448 : 0, value_dim);
    Attention<dim, value_dim> attention(2);
    rows.write(random, attention, layer);
    test::KvStorage<float> exact(plan.num_chunks, heads, plan.chunk_size, dim, value_dim);
    test::poison_kv(exact.view);
    rows.template store<T>(exact.view);
    const auto lines = static_cast<std::size_t>(plan.num_rows() * heads * 2);
    std::vector<float> q(lines * dim), out(lines * value_dim, 7.0f);
    random.fill(std::span(q));
    attention.run(layer, plan.view(), q, out);
    const Reference reference =
        reference_attention(exact.view, plan.view(), std::span<const float>(q));
    CHECK(compare_with_reference(reference, std::span<const float>(out),
                                 test::rounding_in<T>(attention))
              .worst <= 1.0);
  }
}

// Multi-head latent attention: 512 elements of latent vector, 64 of position, one KV head.
TEST_CASE_TEMPLATE("latent attention: V is the first elements of K, stored once", T, bfloat16,
                   float8_e4m3) {
  constexpr int dim = 576, value_dim = 512;
  Random random(61);
  Attention<dim, value_dim> attention(2, {.sm_scale = 0.072f});
  Attention<dim, value_dim> streamed(2,
                                     {.sm_scale = 0.072f, .tuning = {.min_product_lines = 1000}});
  for (int round = 0; round < 3; ++round) {
    const int queries = random.pick({1, 6});
    const test::RandomPlan plan = make_random_plan(
        random, random_shape(random, random.pick({Share::some, Share::all}), queries));
    KvCache<Cpu, T> cache(plan.chunk_size,
                          {.head_dim = dim, .value_dim = value_dim, .v_in_k = true},
                          static_cast<std::size_t>(plan.num_chunks));
    const KvView<T> layer = cache.layer(0);
    CHECK(layer.has_v_in_k());
    CHECK(layer.v_row(1, 0, 2) == layer.k_row(1, 0, 2));
    std::vector<T> memory(static_cast<std::size_t>(plan.chunk_size) * 2 * dim);
    float scales[1] = {};
    const KvGeometry geometry{2, 1, plan.chunk_size, dim, value_dim};
    const auto own = [&] {
      if constexpr (has_row_scales<T>)
        return make_kv_view(memory.data(), memory.data(), scales, scales, geometry);
      else
        return make_kv_view(memory.data(), memory.data(), geometry);
    }();
    CHECK(own.has_v_in_k());
    CHECK(own.v_row(1, 0, 2) == own.k_row(1, 0, 2));
    const std::size_t scale = has_row_scales<T> ? sizeof(float) : 0;
    CHECK(cache.bytes_per_chunk() ==
          static_cast<std::size_t>(plan.chunk_size) * (dim * sizeof(T) + scale));
    test::poison_kv(layer);
    const test::WrittenRows rows(random, plan, 1, dim, has_row_scales<T> ? 448 : 0, value_dim);
    rows.write_k(attention, layer);
    test::KvStorage<float> exact(plan.num_chunks, 1, plan.chunk_size, dim, value_dim);
    test::poison_kv(exact.view);
    rows.template store<T>(exact.view);
    plan.for_each_visible([&](int chunk, int offset) {
      std::copy_n(exact.view.k_row(chunk, 0, offset), value_dim,
                  exact.view.v_row(chunk, 0, offset));
    });
    const auto lines = static_cast<std::size_t>(plan.num_rows()) * 16;
    std::vector<float> q(lines * dim), out(lines * value_dim, 7.0f);
    random.fill(std::span(q));
    const Reference reference = reference_attention(
        exact.view, plan.view(), std::span<const float>(q), attention.options().sm_scale);
    for (auto* kernels : {&attention, &streamed}) {
      kernels->run(layer, plan.view(), q, out);
      CHECK(compare_with_reference(reference, std::span<const float>(out),
                                   test::rounding_in<T>(attention))
                .worst <= 1.0);
    }
  }
}

#if CHUNKATTN_EXCEPTIONS
TEST_CASE("what does not fit is named") {
  Random random(51);
  const test::AttentionCase<bfloat16> problem(random, random_shape(random, Share::some, 1), 64, 1,
                                              2, 1.0f, 128);
  const auto named = [](auto&& call) {
    try {
      call();
    } catch (const InvalidArgument& error) {
      const std::string text = error.what();
      return text.substr(0, text.find(" ="));
    }
    return std::string();
  };
  const auto plan = problem.plan.view();
  const auto rows = static_cast<std::size_t>(problem.plan.num_rows());
  Attention<64, 128> attention(1);
  std::vector<float> k(rows * 64), v(rows * 128), out(rows * 2 * 128);
  const auto& layer = problem.kv.view;
  CHECK(named([&] { attention.write(layer, plan, k, v); }) == "");
  CHECK(named([&] { attention.write(layer, plan, k, k); }) == "v.size()");
  CHECK(named([&] { attention.write(layer, plan, k); }) == "v");
  CHECK(named([&] { attention.run(layer, plan, problem.q, out); }) == "");
  CHECK(named([&] { attention.run(layer, plan, problem.q, k); }) == "out.size()");
  KvView<bfloat16> other = layer;
  other.value_dim = 0;
  CHECK(named([&] { attention.run(other, plan, problem.q, out); }) == "layer.value_dim");
  CHECK(named([] { KvCache<Cpu, half>(16, {.head_dim = 64, .value_dim = 12}); }) ==
        "options.value_dim");
  CHECK(named([] { KvCache<Cpu, half>(16, {.head_dim = 64, .value_dim = -8}); }) ==
        "options.value_dim");
  CHECK(named([] { KvCache<Cpu, half>(16, {.head_dim = 64, .value_dim = 64, .v_in_k = true}); }) ==
        "options.value_dim");
  float element = 0;
  CHECK(named([&] { static_cast<void>(make_kv_view(&element, &element, {1, 1, 1, 1, -1})); }) ==
        "geometry.value_dim");
}
#endif
