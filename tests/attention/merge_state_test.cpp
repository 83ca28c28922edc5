// Results over disjoint sets of tokens become the result over all of them: against the definition,
// and by running attention over a context that is cut anywhere.
#include "chunkattn/merge_state.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "chunkattn/detail/attention/state.hpp"
#include "support/attention_case.hpp"

using namespace chunkattn;
using doctest::Approx;
using test::Random;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

/// What several states of one query-head row are together; `base` is that of the logarithms.
struct Expected {
  std::vector<double> out;
  double lse = -std::numeric_limits<double>::infinity();

  Expected(std::span<const float> outs, std::span<const float> lses, double base)
      : out(outs.size() / lses.size(), 0.0) {
    double sum = 0;
    for (std::size_t s = 0; s < lses.size(); ++s) {
      if (lses[s] < -3e38f) continue;
      const double weight = std::pow(base, static_cast<double>(lses[s]));
      sum += weight;
      for (std::size_t i = 0; i < out.size(); ++i)
        out[i] += weight * static_cast<double>(outs[s * out.size() + i]);
    }
    if (sum == 0) return;
    for (double& x : out) x /= sum;
    lse = std::log(sum) / std::log(base);
  }
};

template <LseBase Base>
void check_definition(std::uint64_t stream, double base) {
  Random random(stream);
  for (int round = 0; round < 100; ++round) {
    const int dim = random.uniform(1, 40);
    const int states = random.uniform(1, 5);
    const auto size = static_cast<std::size_t>(dim);
    std::vector<float> outs(size * static_cast<std::size_t>(states));
    std::vector<float> lses(static_cast<std::size_t>(states));
    random.fill(std::span(outs));
    for (std::size_t s = 0; s < lses.size(); ++s) {
      lses[s] = random.chance(0.3) ? random.pick({-infinity, -3.1e38f}) : 4 * random.normal();
      if (lses[s] < -3e38f)  // these do not matter
        for (std::size_t i = 0; i < size; ++i) outs[s * size + i] = not_a_number;
    }
    const Expected expected(outs, lses, base);
    const auto check = [&](std::span<const float> out, float lse) {
      for (std::size_t i = 0; i < size; ++i)
        CHECK(static_cast<double>(out[i]) == Approx(expected.out[i]).epsilon(1e-5));
      if (std::isinf(expected.lse))
        CHECK(lse == -infinity);
      else
        CHECK(static_cast<double>(lse) == Approx(expected.lse).epsilon(1e-5));
    };
    std::vector<float> out(size, 7.0f), lse(1, 7.0f);
    merge_states<Base>(std::span<const float>(outs), lses, states, out, lse);
    check(out, lse[0]);

    // One after the other, in place: whole results, and as a kernel would.
    std::vector<float> whole(size, not_a_number), line(size, not_a_number);
    std::vector<float> whole_lse(1, -infinity);
    float line_lse = -infinity;
    for (std::size_t s = 0; s < lses.size(); ++s) {
      const std::span<const float> other(&outs[s * size], size);
      merge_state<Base>(std::span(whole), whole_lse, other, std::span(lses).subspan(s, 1));
      merge_state<Base>(line.data(), line_lse, other.data(), lses[s], dim);
    }
    check(whole, whole_lse[0]);
    CHECK(line == whole);
    CHECK(line_lse == whole_lse[0]);
  }
}

}  // namespace

TEST_CASE("states merge as the definition says, in both bases") {
  check_definition<LseBase::e>(1, std::exp(1.0));
  check_definition<LseBase::two>(2, 2.0);
}

TEST_CASE("states of several rows and heads stand where they should") {
  Random random(3);
  constexpr std::size_t lines = 6, dim = 20, states = 3;
  std::vector<half> outs(states * lines * dim), out(lines * dim);
  std::vector<float> lses(states * lines), lse(lines);
  random.fill(std::span(outs));
  random.fill(std::span(lses), 3.0f);
  merge_states(std::span<const half>(outs), lses, states, out, lse);
  for (std::size_t line = 0; line < lines; ++line) {
    std::vector<float> line_outs, line_lses;
    for (std::size_t s = 0; s < states; ++s) {
      line_lses.push_back(lses[s * lines + line]);
      for (std::size_t i = 0; i < dim; ++i)
        line_outs.push_back(to_float(outs[(s * lines + line) * dim + i]));
    }
    const Expected expected(line_outs, line_lses, std::exp(1.0));
    CHECK(static_cast<double>(lse[line]) == Approx(expected.lse).epsilon(1e-5));
    for (std::size_t i = 0; i < dim; ++i)
      CHECK(static_cast<double>(to_float(out[line * dim + i])) ==
            Approx(expected.out[i]).epsilon(2e-3));
  }
}

TEST_CASE("a context cut in two, grouped heads: the parts' results become the whole's") {
  Random random(4);
  constexpr int dim = 64;
  for (int round = 0; round < test::scaled(12); ++round) {
    const int group = random.pick({1, 4, 6});
    const int heads = random.uniform(1, 2);
    test::RandomPlanOptions options;
    options.share = test::Share::none;
    options.num_sequences = 1;
    options.max_queries = random.pick({1, 5});
    options.max_length = random.pick({40, 3000});
    const test::AttentionCase<float> problem(random, options, dim, heads, group);

    // The same pieces, cut at a position: tokens before it, and those from it on.
    const auto part = [&](int begin, int end) {
      test::RandomPlan plan;
      plan.chunk_size = options.chunk_size;
      plan.row_token = problem.plan.row_token;
      plan.row_segment = problem.plan.row_segment;
      plan.writes = problem.plan.writes;
      PlanView::Segment segment = problem.plan.segments[0];
      segment.position = 0;
      segment.piece_begin = 0;
      segment.num_pieces = 0;
      segment.length = 0;
      for (int p = 0; p < problem.plan.segments[0].num_pieces; ++p) {
        const Piece& piece =
            problem.plan.pieces[static_cast<std::size_t>(problem.plan.segments[0].piece_begin + p)];
        const int from = std::max(begin, piece.position);
        const int to = std::min(end, piece.position + piece.length);
        if (from >= to) continue;
        plan.pieces.push_back(
            {piece.chunk, piece.begin + from - piece.position, to - from, from - begin});
        segment.length += to - from;
        ++segment.num_pieces;
      }
      plan.segments.push_back(segment);
      for (const std::int32_t kv_len : problem.plan.row_kv_len)
        plan.row_kv_len.push_back(std::clamp(kv_len, begin, end) - begin);
      return plan;
    };
    const int length = problem.plan.segments[0].length;
    const int at = random.uniform(0, problem.plan.row_kv_len.back());
    CpuOptions cut_walks;
    cut_walks.tuning.min_tasks = random.pick({1, 64});
    ChunkAttention<Cpu, dim> attention(2, cut_walks);
    test::Answer<> answer(problem);
    std::vector<float> outs, lses;
    for (const test::RandomPlan& plan : {part(0, at), part(at, length)}) {
      if (plan.pieces.empty()) continue;
      attention.run(problem.kv.view, plan.view(), problem.q, answer.out, {.lse = answer.lse});
      outs.insert(outs.end(), answer.out.begin(), answer.out.end());
      lses.insert(lses.end(), answer.lse.begin(), answer.lse.end());
    }
    const int parts = static_cast<int>(lses.size() / answer.lse.size());
    merge_states(std::span<const float>(outs), lses, parts, answer.out, answer.lse);
    CHECK(compare_with_reference(problem.reference, std::span<const float>(answer.out)).ok());
    CHECK(test::worst_lse(problem.reference, answer.lse) <= 1.0);
  }
}

TEST_CASE("empty states: they count for nothing, and together they are empty") {
  float out[2] = {not_a_number, 5.0f}, lse = -infinity;
  const float other[2] = {not_a_number, not_a_number};
  merge_state(out, lse, other, -infinity, 2);
  CHECK(out[0] == 0.0f);
  CHECK(out[1] == 0.0f);
  CHECK(lse == -infinity);
  merge_state(out, lse, other, -3.0e38f, 2);
  CHECK(lse == -infinity);
  const float some[2] = {3.0f, -7.0f};
  merge_state(out, lse, some, -2.9e38f, 2);  // not empty: the only one that holds anything
  CHECK(out[0] == 3.0f);
  CHECK(out[1] == -7.0f);
  CHECK(lse == -2.9e38f);
  merge_state(out, lse, other, -infinity, 2);
  CHECK(out[0] == 3.0f);
  CHECK(out[1] == -7.0f);
  CHECK(lse == -2.9e38f);
  const float equal[2] = {5.0f, 7.0f};
  merge_state(out, lse, equal, -2.9e38f, 2);  // of equal weight
  CHECK(out[0] == 4.0f);
  CHECK(out[1] == 0.0f);
}

TEST_CASE("huge and far apart: no overflow, nothing lost") {
  float out[1] = {2.0f}, lse = 3.0e38f;
  const float other[1] = {4.0f};
  merge_state(out, lse, other, -2.0e38f, 1);
  CHECK(out[0] == 2.0f);
  CHECK(lse == 3.0e38f);
  merge_state(out, lse, other, 3.0e38f, 1);
  CHECK(out[0] == 3.0f);
  CHECK(lse == 3.0e38f);
}

#if !defined(__FINITE_MATH_ONLY__) || !__FINITE_MATH_ONLY__
TEST_CASE("an lse of NaN or infinity makes the output NaN, an element itself alone") {
  for (const float broken : {not_a_number, -not_a_number, infinity}) {
    for (const float whole : {1.0f, detail::empty_lse()}) {
      for (const bool swapped : {false, true}) {
        float out[2] = {1.0f, 2.0f}, lse = swapped ? whole : broken;
        const float other[2] = {3.0f, 4.0f};
        merge_state(out, lse, other, swapped ? broken : whole, 2);
        CHECK(!(lse < infinity));
        CHECK(std::isnan(out[0]));
        CHECK(std::isnan(out[1]));
      }
    }
  }
  float out[2] = {not_a_number, 2.0f}, lse = 0.0f;
  const float other[2] = {3.0f, 4.0f};
  merge_state(out, lse, other, 0.0f, 2);
  CHECK(std::isnan(out[0]));
  CHECK(out[1] == 3.0f);
  CHECK(lse == Approx(std::log(2.0f)));
}
#endif

#if CHUNKATTN_EXCEPTIONS
TEST_CASE("sizes that do not fit are refused before anything is written") {
  std::vector<float> out(8, 1.0f), lse(2, 1.0f);
  const std::vector<float> outs(16), lses(4);
  const auto merge = [&](std::size_t out_size, std::size_t lse_size, std::size_t outs_size,
                         std::size_t lses_size, int states) {
    merge_states(std::span<const float>(outs).first(outs_size),
                 std::span<const float>(lses).first(lses_size), states,
                 std::span(out).first(out_size), std::span(lse).first(lse_size));
  };
  CHECK_THROWS_WITH(merge(8, 0, 16, 4, 2), "lse.size() = 0: expected at least one query head");
  CHECK_THROWS_WITH(merge(7, 2, 14, 4, 2),
                    "out.size() = 7: expected a positive multiple of lse.size() = 2");
  CHECK_THROWS_WITH(merge(8, 2, 16, 4, 0), "num_states = 0: expected at least one");
  CHECK_THROWS_WITH(merge(8, 2, 15, 4, 2),
                    "outs.size() = 15: expected num_states * out.size() = 2 * 8");
  CHECK_THROWS_WITH(merge(8, 2, 16, 3, 2),
                    "lses.size() = 3: expected num_states * lse.size() = 2 * 2");
  CHECK_THROWS_WITH(merge_state(std::span(out), lse, std::span<const float>(outs).first(7), lses),
                    "other_out.size() = 7: expected out.size() = 8");
  CHECK_THROWS_WITH(merge_state(std::span(out), lse, std::span<const float>(outs).first(8), lses),
                    "other_lse.size() = 4: expected lse.size() = 2");
  CHECK(out == std::vector<float>(8, 1.0f));
  CHECK(lse == std::vector<float>(2, 1.0f));
}
#endif
