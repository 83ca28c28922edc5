// K/V of 8 bits on the (emulated) device: what write() stores, attention over it against the
// double-precision oracle, with variants, and row copies of forks.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "chunkattn/debug/attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "simt/engine.hpp"
#include "support/schedule_summary.hpp"

namespace {

using namespace chunkattn;
using simt::kv_heads, simt::head_dim, simt::shuffled;
constexpr auto dim = static_cast<std::size_t>(head_dim);

template <class E>
using Quantized = simt::EngineOf<head_dim, E>;

template <class E>
void fill(Quantized<E>& engine) {
  engine.sequences.push_back(engine.tree.insert(engine.prompt(150, 3)));
  engine.prefill(0);
  for (int i = 1; i < 5; ++i) {
    engine.sequences.push_back(engine.tree.insert(engine.prompt(150, 3 + 7 * i)));
    engine.prefill(engine.sequences.size() - 1);
  }
}

}  // namespace

TEST_CASE_TEMPLATE("attention over K/V of 8 bits agrees with the oracle", E, std::int8_t,
                   float8_e4m3) {
  Quantized<E> engine(81);
  shuffled(engine.random.bits());
  fill(engine);
  for (int step = 0; step < 3; ++step) {
    engine.decode_plan();
    engine.enqueue();
    engine.submit();
  }
  engine.drain_and_check();
}

TEST_CASE_TEMPLATE("tasks are cut for the bytes that elements of K and V have", E, half,
                   std::int8_t) {
  Quantized<E> engine(85);
  shuffled(engine.random.bits());
  fill(engine);
  engine.decode_plan();
  engine.enqueue();
  const auto summary = test::summarize(plan_upload_of(*engine.attention).scheduler(),
                                       plan_upload_of(*engine.attention).geometry());
  CHECK(summary.kv_bytes ==
        summary.kv_tokens * kv_heads * 2 * head_dim * static_cast<int>(sizeof(E)));
  engine.submit();
  engine.drain_and_check();
}

TEST_CASE_TEMPLATE("a launch has the shared memory that its elements of K and V need", E, half,
                   std::int8_t) {
  using detail::cuda::HeadDims;
  Quantized<E> engine(87);
  simt::current_schedule() = {};
  engine.sequences.push_back(engine.tree.insert(engine.prompt(0, 30)));
  engine.begin();
  engine.add(0, 40);
  engine.build();
  simt::Step& step = engine.new_step();
  const auto layer = engine.cache.layer(0);
  engine.attention->write(layer, engine.view, step.k->span(), step.v->span(), &engine.stream);
  engine.stream.drain();
  std::vector<simt::Launch> launches;
  engine.attention->run(layer, engine.view, step.q->span(), step.out->span(),
                        {.stream = &engine.stream});
  simt::device().gathered = &launches;
  engine.stream.drain();
  simt::device().gathered = nullptr;
  REQUIRE(launches.size() == 1);
  constexpr HeadDims dims{head_dim, head_dim, static_cast<int>(sizeof(E))};
  const int rows = simt::Engine::limits().max_rows * simt::qo_heads / kv_heads;
  const auto chosen = detail::cuda::choose_occupancy(dims, rows, simt::device().shared_per_block,
                                                     simt::device().shared_per_sm,
                                                     detail::cuda::wanted_blocks(dims));
  CHECK(launches[0].shared_bytes == static_cast<std::size_t>(detail::cuda::shared_bytes(
                                        dims, chosen.num_stages, chosen.tile_rows)));
  simt::launch_together(launches);
  engine.submit();
  engine.drain_and_check();
}

TEST_CASE_TEMPLATE("a token is stored as quantize_row() stores it", E, std::int8_t, float8_e4m3) {
  Quantized<E> engine(82);
  shuffled(engine.random.bits());
  engine.sequences.push_back(engine.tree.insert(engine.prompt(0, 30)));
  engine.begin();
  engine.add(0, 40);
  engine.build();
  simt::Step& step = engine.new_step();
  const auto k = step.k->span(), v = step.v->span();
  for (std::size_t i = 0; i < dim; ++i) {  // rows of zeros, of tiny numbers, and no numbers
    k[i] = to_half(0.0f);
    v[dim + i] = to_half(0x1p-24f * static_cast<float>(i % 3));
  }
  k[kv_heads * dim + 3] = to_half(NAN);
  v[5] = to_half(INFINITY);
  engine.attention->write(engine.cache.layer(0), engine.view, k, v, &engine.stream);
  engine.stream.drain();
  const auto layer = engine.cache.layer(0);
  const PlanView& plan = engine.view;
  int wrong = 0;
  const auto compare = [&](std::span<const half> from, const E* stored, const float* scale) {
    float row[head_dim];
    E expected[head_dim];
    for (int i = 0; i < head_dim; ++i) row[i] = to_float(from[static_cast<std::size_t>(i)]);
    const float expected_scale = quantize_row(row, head_dim, expected);
    wrong += std::memcmp(expected, stored, sizeof expected) != 0;
    wrong += std::memcmp(&expected_scale, scale, sizeof(float)) != 0;
  };
  for (int t = 0; t < plan.num_rows; ++t)
    for (int head = 0; head < kv_heads; ++head) {
      const auto& at = plan.writes[t];
      const auto line = static_cast<std::size_t>(t * kv_heads + head) * dim;
      compare(k.subspan(line, dim), layer.k_row(at.chunk, head, at.offset),
              layer.k_row_scale(at.chunk, head, at.offset));
      compare(v.subspan(line, dim), layer.v_row(at.chunk, head, at.offset),
              layer.v_row_scale(at.chunk, head, at.offset));
    }
  CHECK(wrong == 0);
  engine.steps.clear();
}

TEST_CASE_TEMPLATE("variants over K/V of 8 bits agree with the oracle", E, std::int8_t) {
  Quantized<E> engine(83);
  shuffled(engine.random.bits());
  fill(engine);
  engine.decode_plan();
  simt::Step& step = engine.new_step();
  const auto layer = engine.cache.layer(0);
  engine.attention->write(layer, engine.view, step.k->span(), step.v->span(), &engine.stream);
  engine.attention->prepare(layer, engine.view, combine(SoftCap{20}, SlidingWindow{50}),
                            &engine.stream);
  engine.attention->run(layer, engine.view, combine(SoftCap{20}, SlidingWindow{50}), step.q->span(),
                        step.out->span(), {.lse = step.lse->span(), .stream = &engine.stream});
  engine.stream.drain();
  ReferenceVariant definition;
  definition.logit = [](double logit, LogitIndex) { return 20 * std::tanh(logit / 20); };
  definition.visible = [](LogitIndex at) { return at.q_idx - at.kv_idx < 50; };
  const auto reference = reference_attention(layer, step.plan.view(),
                                             std::span<const half>(step.q->span()), {}, definition);
  CHECK(compare_with_reference(reference, std::span<const half>(step.out->span()), 0x1p-11).worst <=
        1.0);
  engine.steps.clear();
}

TEST_CASE("rows and scales of a cache do not overlap, whatever sizes its parts have") {
  KvCache<Cuda, std::int8_t> cache(3, {2, 1, 24, 8}, 2);  // 3 scales of a chunk's K
  struct Range {
    const std::byte *begin, *end;
  };
  std::vector<Range> ranges;
  const auto add = [&](const auto* first, std::size_t count) {
    ranges.push_back({reinterpret_cast<const std::byte*>(first),
                      reinterpret_cast<const std::byte*>(first + count)});
  };
  for (int l = 0; l < 2; ++l) {
    const auto layer = cache.layer(l);
    for (int chunk = 0; chunk < 2; ++chunk)
      for (int token = 0; token < 3; ++token) {
        add(layer.k_row(chunk, 0, token), 24);
        add(layer.v_row(chunk, 0, token), 8);
        add(layer.k_row_scale(chunk, 0, token), 1);
        add(layer.v_row_scale(chunk, 0, token), 1);
      }
  }
  std::ranges::sort(ranges, {}, &Range::begin);
  for (std::size_t i = 1; i < ranges.size(); ++i) CHECK(ranges[i - 1].end <= ranges[i].begin);
}

TEST_CASE("a scale of NaN reaches the rows that see its token, and no others") {
  Quantized<std::int8_t> engine(84);
  shuffled(engine.random.bits());
  for (int i = 0; i < 2; ++i) {
    engine.sequences.push_back(engine.tree.insert(engine.prompt(100, 20)));
    engine.prefill(static_cast<std::size_t>(i));
  }
  engine.decode_plan();
  simt::Step& step = engine.new_step();
  const std::size_t k_line = kv_heads * dim;  // of the second row
  step.v->span()[k_line] = to_half(NAN);
  const auto layer = engine.cache.layer(0);
  engine.attention->write(layer, engine.view, step.k->span(), step.v->span(), &engine.stream);
  engine.attention->run(layer, engine.view, step.q->span(), step.out->span(),
                        {.lse = step.lse->span(), .stream = &engine.stream});
  engine.stream.drain();
  const std::size_t row = simt::qo_heads * dim;
  int wrong = 0;
  for (std::size_t i = 0; i < 2 * row; ++i) {
    const float x = to_float(step.out->span()[i]);
    const bool sees = i >= row && i < row + row / kv_heads;  // heads of KV head 0
    wrong += (x != x) != sees;
  }
  CHECK(wrong == 0);
  engine.steps.clear();
}

TEST_CASE(
    "K/V of 8 bits, whose kernels have no large tiles, are not captured over a list of such") {
  simt::current_schedule() = {};
  const int sms = std::exchange(simt::device().sms, 1);
  {
    simt::Engine engine(86);
    KvCache<Cuda, std::int8_t> bytes(engine.tree, {1, kv_heads, head_dim});
    engine.sequences.push_back(engine.tree.insert(engine.prompt(0, 40)));
    engine.begin();
    engine.add(0, 40);
    engine.build();
    simt::Step& step = engine.new_step();
    const auto layer = bytes.layer(0);
    const auto run = [&] {
      engine.attention->run(layer, engine.view, std::span<const half>(step.q->span()),
                            step.out->span(), {.lse = step.lse->span(), .stream = &engine.stream});
    };
    engine.attention->write(layer, engine.view, step.k->span(), step.v->span(), &engine.stream);
    const auto& tasks = plan_upload_of(*engine.attention).scheduler().tasks();
    const auto is_large = [](const auto& task) {
      return task.tile_rows > detail::cuda::usual_tile_rows;
    };
    REQUIRE(std::any_of(tasks.begin(), tasks.end(), is_large));
    engine.stream.drain();
    {
      simt::Graph graph(engine.stream);
      CHECK_THROWS_WITH_AS(run(), doctest::Contains("stream = capturing: expected prepare(layer"),
                           InvalidArgument);
      CHECK_NOTHROW(graph.end());
      CHECK(graph.size() == 0);
    }
    engine.attention->prepare(layer, engine.view, NoVariant{}, &engine.stream);
    CHECK(std::none_of(tasks.begin(), tasks.end(), is_large));
    simt::Graph graph(engine.stream);
    run();
    graph.end();
    graph.replay();
    engine.stream.drain();
    const auto reference =
        reference_attention(layer, step.plan.view(), std::span<const half>(step.q->span()));
    CHECK(compare_with_reference(reference, std::span<const half>(step.out->span()), 0x1p-11).ok());
    engine.steps.clear();
  }
  simt::device().sms = sms;
}
