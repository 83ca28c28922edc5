// Between device and host: sequences that are swapped out and come back, and merge_states() on the
// (emulated) device.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "chunkattn/merge_state.hpp"
#include "chunkattn/transfer/transfer.hpp"
#include "simt/engine.hpp"

namespace {

using namespace chunkattn;
using simt::DeviceArray, simt::head_dim, simt::shuffled;

}  // namespace

TEST_CASE_TEMPLATE("a sequence that is swapped out comes back bit for bit", E, half, std::int8_t) {
  simt::EngineOf<head_dim, E> engine(91);
  shuffled(engine.random.bits());
  for (const int own : {40, 9}) {
    engine.sequences.push_back(engine.tree.insert(engine.prompt(70, own)));
    engine.prefill(engine.sequences.size() - 1);
  }
  engine.drain_and_check();
  const auto length = static_cast<std::int32_t>(engine.sequences[0].num_written());
  const TokenRange all{0, length};
  std::vector<std::byte> before(kv_bytes(engine.cache, static_cast<std::size_t>(length)));
  gather_kv(engine.sequences[0], all, engine.cache, before);
  CHECK(std::count(before.begin(), before.end(), std::byte{0xff}) <
        static_cast<std::ptrdiff_t>(before.size() / 4));  // fresh memory is full of these
  const auto swapped = swap_out(engine.sequences[0], engine.cache);
  CHECK(swapped.shared == 70);
  auto other = engine.tree.insert(engine.prompt(0, 60));  // takes its chunks
  engine.sequences.push_back(std::move(other));
  engine.prefill(engine.sequences.size() - 1);
  engine.drain_and_check();
  auto back = resume(engine.tree, engine.cache, swapped);
  REQUIRE(back.has_value());
  CHECK(back->num_written() >= static_cast<std::size_t>(length) - 1);
  engine.sequences[0] = std::move(*back);
  std::vector<std::byte> after(before.size());
  if (engine.sequences[0].num_written() == static_cast<std::size_t>(length)) {
    gather_kv(engine.sequences[0], all, engine.cache, after);
    CHECK(before == after);
  }
  for (int step = 0; step < 2; ++step) {
    engine.decode_plan();
    engine.enqueue();
    engine.submit();
    engine.drain_and_check();
  }
}

TEST_CASE("spans of a device's cache are where its kernels find the rows") {
  simt::Engine engine(92);
  simt::current_schedule() = {};
  engine.sequences.push_back(engine.tree.insert(engine.prompt(0, 50)));
  engine.prefill(0);
  engine.drain_and_check();
  const auto layer = engine.cache.layer(0);  // its tables are host memory here
  int rows = 0;
  for_each_kv_span(engine.sequences[0], {3, 40}, engine.cache, [&](const KvSpan<half>& span) {
    CHECK(span.k == layer.k_row(span.chunk, span.kv_head, span.begin));
    CHECK(span.v == layer.v_row(span.chunk, span.kv_head, span.begin));
    rows += span.length;
  });
  CHECK(rows == 40 * simt::kv_heads);
}

TEST_CASE_TEMPLATE("merge_states() on the device gives what it gives on the host", T, half,
                   bfloat16) {
  test::Random random(93);
  simt::Stream stream;
  for (int i = 0; i < test::scaled(20); ++i) {
    const int states = random.uniform(1, 5), dim = 8 * random.uniform(1, 20);
    const auto lines = static_cast<std::size_t>(random.uniform(1, 40));
    const std::size_t size = lines * static_cast<std::size_t>(dim);
    const auto count = static_cast<std::size_t>(states);
    DeviceArray<T> outs(count * size), out(size);
    DeviceArray<float> lses(count * lines), lse(lines);
    random.fill(outs.span());
    for (float& x : lses.span()) {
      x = 5 * random.normal();
      if (random.chance(0.2)) x = -INFINITY;
      if (random.chance(0.02)) x = NAN;
    }
    std::vector<T> expected(size);
    std::vector<float> expected_lse(lines);
    chunkattn::merge_states<LseBase::e, T>(outs.span(), lses.span(), states, expected,
                                           expected_lse);
    const bool in_place = random.chance(0.5);  // over the first state
    const auto to = in_place ? outs.span().first(size) : out.span();
    const auto to_lse = in_place ? lses.span().first(lines) : lse.span();
    shuffled(random.bits());
    chunkattn::merge_states<LseBase::e, T>(std::span<const T>(outs.span()), lses.span(), states, to,
                                           to_lse, &stream);
    stream.drain();
    int wrong = 0;
    const auto compare = [&](float got, float wanted, float bound) {
      if (std::isnan(wanted) || std::isinf(wanted))
        wanted == got || (std::isnan(wanted) && std::isnan(got)) ? 0 : ++wrong;
      else
        wrong += !(std::abs(got - wanted) <= bound);
    };
    for (std::size_t e = 0; e < size; ++e)
      compare(to_float(to[e]), to_float(expected[e]),
              static_cast<float>(2 * unit_roundoff<T>()) * (1 + std::abs(to_float(expected[e]))));
    for (std::size_t l = 0; l < lines; ++l)
      compare(to_lse[l], expected_lse[l], 1e-5f * (1 + std::abs(expected_lse[l])));
    CHECK(wrong == 0);
  }
  DeviceArray<T> out(16);
  DeviceArray<float> lse(2);
  CHECK_THROWS_WITH_AS(
      (chunkattn::merge_states<LseBase::e, T>(std::span<const T>(out.span()), lse.span(), 2,
                                              out.span(), lse.span(), &stream)),
      doctest::Contains("outs.size() = 16"), InvalidArgument);
}
