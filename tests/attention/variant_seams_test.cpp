// Variants where several things meet: shared nodes, cut walks, rows that see nothing, values that
// are no numbers, other batches.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "chunkattn/debug/attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "support/tempered_case.hpp"
#include "support/variant_cases.hpp"

using namespace chunkattn;
using doctest::Approx;
using test::Random;
using test::Share;

namespace {

constexpr int dim = 32;
constexpr float infinity = std::numeric_limits<float>::infinity();

/// `sequences` rows that share `shared` tokens and have `own` each.
test::RandomPlan shared_plan(int sequences, int shared, int own, int chunk_size = 64) {
  test::RandomPlan plan;
  plan.chunk_size = chunk_size;
  const auto add = [&](int row_begin, int row_end, int position, int length, int parent) {
    PlanView::Segment segment{row_begin,
                              row_end,
                              static_cast<std::int32_t>(plan.pieces.size()),
                              0,
                              position,
                              length,
                              parent,
                              row_end - row_begin};
    for (int done = 0; done < length; done += chunk_size, ++segment.num_pieces)
      plan.pieces.push_back(
          {plan.num_chunks++, 0, std::min(chunk_size, length - done), position + done});
    plan.segments.push_back(segment);
  };
  add(0, sequences, 0, shared, -1);
  for (int i = 0; i < sequences; ++i) {
    add(i, i + 1, shared, own, 0);
    plan.row_token.push_back(sequences - 1 - i);
    plan.row_kv_len.push_back(shared + own);
    plan.row_segment.push_back(i + 1);
    plan.writes.push_back({no_chunk, 0});
  }
  return plan;
}

/// Only one row of a plan, for which other rows' segments are not there.
test::RandomPlan only_row(const test::RandomPlan& plan, std::size_t row) {
  test::RandomPlan alone;
  alone.chunk_size = plan.chunk_size;
  alone.num_chunks = plan.num_chunks;
  alone.pieces = plan.pieces;
  std::vector<int> path;
  for (int s = plan.row_segment[row]; s >= 0; s = plan.segments[static_cast<std::size_t>(s)].parent)
    path.insert(path.begin(), s);
  for (std::size_t i = 0; i < path.size(); ++i) {
    PlanView::Segment segment = plan.segments[static_cast<std::size_t>(path[i])];
    segment.row_begin = 0;
    segment.row_end = 1;
    segment.parent = static_cast<std::int32_t>(i) - 1;
    segment.num_sequences = 1;
    alone.segments.push_back(segment);
  }
  alone.row_token.push_back(0);
  alone.row_kv_len.push_back(plan.row_kv_len[row]);
  alone.row_segment.push_back(static_cast<std::int32_t>(path.size()) - 1);
  alone.writes.push_back({no_chunk, 0});
  return alone;
}

}  // namespace

TEST_CASE("a table by position is not read for lanes without a position") {
  Random random(8);
  const test::TemperedCase<bfloat16> of(random, dim);
  for (auto& attention : test::variant_modes<dim>()) {
    test::Answer<> answer(of.problem);
    attention.run(of.problem.kv.view, of.problem.plan.view(), of.variant, of.problem.q, answer.out,
                  {.lse = answer.lse});
    CHECK(compare_with_reference(of.reference, std::span<const float>(answer.out),
                                 test::rounding_in<bfloat16>(attention))
              .ok());
  }
}

TEST_CASE("functions are not called for keys after the query") {
  Random random;
  struct Recorded {
    std::atomic<bool>* asked_ahead;
    bool operator()(LogitIndex at) const {
      if (at.kv_idx > at.q_idx) asked_ahead->store(true, std::memory_order_relaxed);
      return true;
    }
  };
  test::RandomPlanOptions options;
  options.num_sequences = 9;
  options.max_queries = 5;
  const test::RandomPlan plan = test::make_random_plan(random, options);
  test::KvStorage<float> kv(plan.num_chunks, 1, plan.chunk_size, dim);
  std::vector<float> q(plan.row_kv_len.size() * 2 * dim, 1.0f), out(q.size());
  std::atomic<bool> asked_ahead = false;
  for (auto& attention : test::variant_modes<dim>())
    attention.run(kv.view, plan.view(), Mask<Recorded>{{&asked_ahead}}, q, out);
  CHECK_FALSE(asked_ahead.load());
}

TEST_CASE("sinks count once, whatever is shared and however walks are cut") {
  constexpr int sequences = 5, shared = 3000, own = 100, heads = 4;
  const test::RandomPlan plan = shared_plan(sequences, shared, own);
  test::KvStorage<float> kv(plan.num_chunks, 1, plan.chunk_size, dim);
  std::fill(kv.k.begin(), kv.k.end(), 0.0f);  // all tokens weigh the same
  std::fill(kv.v.begin(), kv.v.end(), 1.0f);
  const std::vector<float> sinks{0.0f, 7.0f, 20.0f, -infinity};
  const std::vector<float> q(sequences * heads * dim, 1.0f);
  for (auto& attention : test::variant_modes<dim>()) {
    std::vector<float> out(q.size()), lse(q.size() / dim);
    attention.run(kv.view, plan.view(), Sinks{sinks}, q, out, {.lse = lse});
    if (attention.options().reduce != CpuOptions::Reduce::batch_invariant)
      CHECK(schedule_of(attention).num_partial_rows() > 0);
    for (std::size_t line = 0; line < lse.size(); ++line) {
      const double others = std::exp(static_cast<double>(sinks[line % heads]));
      CHECK(static_cast<double>(lse[line]) == Approx(std::log(shared + own + others)));
      CHECK(static_cast<double>(out[line * dim]) ==
            Approx((shared + own) / (shared + own + others)));
    }
  }
}

TEST_CASE("nodes outside of every window are neither read nor listed") {
  Random random(2);
  constexpr int sequences = 6, shared = 2000;
  for (const int window : {1, 64, 100, 500, 5000}) {
    for (const int keep : {0, 4, 100}) {
      const int own = random.pick({3, 64, 300});
      const test::RandomPlan plan = shared_plan(sequences, shared, own, random.pick({16, 64}));
      test::KvStorage<float> kv(plan.num_chunks, 1, plan.chunk_size, dim);
      fill_kv(random, plan, kv.view);
      const int first = std::max(0, shared + own - window);  // that a row sees, besides `keep`
      for (const Piece& piece : plan.pieces)
        for (int t = 0; t < piece.length; ++t)
          if (piece.position + t >= keep && piece.position + t < first)
            std::fill_n(kv.view.v_row(piece.chunk, 0, piece.begin + t), dim, std::nanf(""));
      std::vector<float> q(std::size_t{sequences} * dim);
      random.fill(std::span(q));
      for (auto& attention : test::variant_modes<dim>()) {
        std::vector<float> out(q.size());
        attention.run(kv.view, plan.view(), SlidingWindow{window, keep}, q, out);
        for (const float x : out) CHECK(!std::isnan(x));
        const bool invariant = attention.options().reduce == CpuOptions::Reduce::batch_invariant;
        for (const detail::cpu::WorkItem& item : schedule_of(attention).items()) {
          const int position = plan.segments[static_cast<std::size_t>(item.segment)].position;
          const int begin = position + item.token_begin, end = position + item.token_end;
          const int slack = invariant ? 63 : 0;  // whole blocks there
          CHECK((end <= keep + slack || begin >= first - slack));
        }
      }
    }
  }
}

TEST_CASE("rows that see nothing: zeros, and an lse of minus infinity or of the sink") {
  Random random(3);
  test::RandomPlanOptions options;
  options.max_queries = 5;
  const test::AttentionCase<float> problem(random, options, dim, 1, 4);
  const Mask none{[](LogitIndex) { return false; }};
  const std::vector<float> sinks{1.0f, -2.0f, 300.0f, -infinity};
  for (auto& attention : test::variant_modes<dim>()) {
    test::Answer<> answer(problem);
    attention.run(problem.kv.view, problem.plan.view(), none, problem.q, answer.out,
                  {.lse = answer.lse});
    for (const float x : answer.out) CHECK(x == 0.0f);
    for (const float x : answer.lse) CHECK(x == -infinity);
    attention.run(problem.kv.view, problem.plan.view(), combine(none, Sinks{sinks}), problem.q,
                  answer.out, {.lse = answer.lse});
    for (const float x : answer.out) CHECK(x == 0.0f);
    for (std::size_t i = 0; i < answer.lse.size(); ++i) CHECK(answer.lse[i] == sinks[i % 4]);
  }
}

TEST_CASE("a NaN or infinity in V reaches the rows that see it, and no other") {
  Random random(4);
  for (int round = 0; round < test::scaled(8); ++round) {
    test::RandomPlanOptions options;
    options.share = Share::all;
    options.num_sequences = 6;
    options.max_queries = random.pick({1, 20});
    options.max_length = random.pick({30, 120});
    const test::AttentionCase<bfloat16> problem(random, options, dim, 1, 2);
    const test::MaskCase mask(random, {2});
    for (auto& attention : test::variant_modes<dim>()) {
      test::Answer<> before(problem), after(problem);
      const test::RandomPlan& plan = problem.plan;
      attention.run(problem.kv.view, plan.view(), mask.variant, problem.q, before.out);
      const std::size_t row = random.index(plan.row_kv_len.size());
      const Piece slot = test::place_of(plan, row, random.uniform(0, plan.row_kv_len[row] - 1));
      bfloat16* const v = problem.kv.view.v_row(slot.chunk, 0, slot.begin);
      const bfloat16 old = v[3];
      v[3] = from_float<bfloat16>(random.pick({std::nanf(""), infinity, -infinity}));
      attention.run(problem.kv.view, plan.view(), mask.variant, problem.q, after.out);
      v[3] = old;
      for (std::size_t r = 0; r < plan.row_kv_len.size(); ++r) {
        for (int head = 0; head < 2; ++head) {
          const int token = plan.row_token[r];
          const LogitIndex at{token, plan.row_kv_len[r] - 1, slot.position, head};
          const bool sees = slot.position <= at.q_idx && test::MaskCase::shows(at) &&
                            test::place_of(plan, r, slot.position).chunk == slot.chunk &&
                            test::place_of(plan, r, slot.position).begin == slot.begin;
          const std::size_t line = static_cast<std::size_t>(token * 2 + head) * dim;
          for (std::size_t i = 0; i < dim; ++i) {
            if (i == 3 && sees)
              CHECK(!std::isfinite(after.out[line + i]));
            else if (!sees && attention.options().reduce != CpuOptions::Reduce::spin_lock)
              CHECK(after.out[line + i] == before.out[line + i]);
            else
              CHECK(std::isfinite(after.out[line + i]));
          }
        }
      }
    }
  }
}

TEST_CASE("batch-invariant: a row has the bits that it has alone") {
  Random random(5);
  const std::vector<float> slopes{0.5f, 0.25f, 0.125f, 0.0625f};
  const auto rule = [](LogitIndex at) { return (at.q_idx - at.kv_idx + at.head) % 3 != 1; };
  const auto check = [&](const auto& variant) {
    for (int round = 0; round < test::scaled(3); ++round) {
      test::RandomPlanOptions options;
      options.share = Share::all;
      options.num_sequences = random.uniform(2, 12);
      options.max_queries = random.pick({1, 20});
      const test::AttentionCase<float> problem(random, options, dim, 1, 4);
      ChunkAttention<Cpu, dim> attention(2, {.reduce = CpuOptions::Reduce::batch_invariant});
      test::Answer<> together(problem);
      attention.run(problem.kv.view, problem.plan.view(), variant, problem.q, together.out,
                    {.lse = together.lse});
      for (std::size_t row = 0; row < problem.plan.row_kv_len.size(); ++row) {
        const auto token = static_cast<std::size_t>(problem.plan.row_token[row]);
        std::vector<float> out(4 * dim), lse(4);
        attention.run(problem.kv.view, only_row(problem.plan, row).view(), variant,
                      std::span(problem.q).subspan(token * 4 * dim, 4 * dim), out, {.lse = lse});
        CHECK(std::equal(out.begin(), out.end(), &together.out[token * 4 * dim]));
        CHECK(std::equal(lse.begin(), lse.end(), &together.lse[token * 4]));
      }
    }
  };
  check(combine(Alibi{slopes}, SoftCap{3.0f}, SlidingWindow{70, 3}));
  check(combine(Mask{rule}, Sinks{slopes}));
}

TEST_CASE("the same bits for any number of threads") {
  Random random(6);
  const test::RandomPlan plan = shared_plan(3, 4000, 900);
  test::KvStorage<half> kv(plan.num_chunks, 2, plan.chunk_size, dim);
  fill_kv(random, plan, kv.view);
  std::vector<float> q(3 * 8 * dim);
  random.fill(std::span(q));
  const auto variant = combine(SoftCap{5.0f}, SlidingWindow{4500});
  std::vector<float> expected;
  for (const int threads : {1, 2, 5}) {
    ChunkAttention<Cpu, dim> attention(threads);
    std::vector<float> out(q.size());
    attention.run(kv.view, plan.view(), variant, q, out);
    CHECK(schedule_of(attention).num_partial_rows() > 0);
    if (expected.empty()) expected = out;
    CHECK(out == expected);
  }
}

TEST_CASE("infinite logits: what a variant makes of them") {
  const test::RandomPlan plan = shared_plan(1, 10, 1);
  test::KvStorage<float> kv(plan.num_chunks, 1, plan.chunk_size, dim);
  std::fill(kv.k.begin(), kv.k.end(), 0.0f);
  std::fill(kv.v.begin(), kv.v.end(), 1.0f);
  kv.view.k_row(0, 0, 4)[0] = infinity;
  std::vector<float> q(dim, 1.0f), out(dim), lse(1);
  ChunkAttention<Cpu, dim> attention(1);
  attention.run(kv.view, plan.view(), SoftCap{2.0f}, q, out, {.lse = lse});
  CHECK(lse[0] == Approx(std::log(10.0 + std::exp(2.0))));
  kv.view.k_row(0, 0, 4)[0] = -infinity;
  attention.run(kv.view, plan.view(), SoftCap{2.0f}, q, out, {.lse = lse});
  CHECK(lse[0] == Approx(std::log(10.0 + std::exp(-2.0))));
  attention.run(kv.view, plan.view(),
                Bias{[](LogitIndex at) { return at.kv_idx == 6 ? -infinity : 0.0f; }}, q, out,
                {.lse = lse});
  CHECK(lse[0] == Approx(std::log(9.0)));  // neither 4 nor 6
  attention.run(kv.view, plan.view(),
                Bias{[](LogitIndex at) { return at.kv_idx == 6 ? infinity : 0.0f; }}, q, out,
                {.lse = lse});
  CHECK(std::isnan(lse[0]));
}

#if CHUNKATTN_EXCEPTIONS
TEST_CASE("members that make no sense are refused before anything is written") {
  const test::RandomPlan plan = shared_plan(2, 10, 1);
  test::KvStorage<float> kv(plan.num_chunks, 1, plan.chunk_size, dim);
  std::vector<float> q(2 * 3 * dim), out(q.size(), 7.0f);
  const std::vector<float> four(4);
  ChunkAttention<Cpu, dim> attention(1);
  const auto message = [&](const auto& variant) {
    try {
      attention.run(kv.view, plan.view(), variant, q, out);
      return std::string("nothing");
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
  };
  CHECK(message(SoftCap{0.0f}) == "SoftCap::cap = 0.000000: expected a positive finite bound");
  CHECK(message(SoftCap{-1.0f}) == "SoftCap::cap = -1.000000: expected a positive finite bound");
  CHECK(message(SoftCap{infinity}) == "SoftCap::cap = inf: expected a positive finite bound");
  CHECK(message(SlidingWindow{0}) == "SlidingWindow::size = 0: expected at least 1 key");
  CHECK(message(SlidingWindow{1, -1}) == "SlidingWindow::keep = -1: expected a count");
  CHECK(message(Sinks{four}) == "Sinks::logits.size() = 4: expected num_qo_heads = 3");
  CHECK(message(combine(SoftCap{1.0f}, Alibi{four})) ==
        "Alibi::slopes.size() = 4: expected num_qo_heads = 3");
  const std::span<const float> none(static_cast<const float*>(nullptr), 3);
  CHECK(message(Sinks{none}) == "Sinks::logits.data() = null: expected memory");
  CHECK(message(Alibi{none}) == "Alibi::slopes.data() = null: expected memory");
  for (const float slope : {0.0f, -0.5f, infinity, -infinity}) {
    const std::vector<float> slopes{0.5f, 0.25f, slope};
    const std::string wanted =
        "Alibi::slopes[2] = " + std::to_string(slope) + ": expected a positive finite slope";
    CHECK(message(Alibi{slopes}) == wanted);
    CHECK(message(combine(SoftCap{1.0f}, SlidingWindow{5}, Alibi{slopes})) == wanted);
    CHECK(message(combine(Alibi{slopes}, SoftCap{1.0f}, SlidingWindow{5})) == wanted);
  }
  CHECK(message(combine(SoftCap{0.0f}, Sinks{std::span(four).first(3)})) ==
        "SoftCap::cap = 0.000000: expected a positive finite bound");
  CHECK(out == std::vector<float>(out.size(), 7.0f));
}
#endif
