// Typical errors of attention with variants, on the emulated GPU: variant_seams_test has the CPU's.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "chunkattn/debug/reference.hpp"
#include "simt/variants.hpp"
#include "support/level_plan.hpp"
#include "support/schedule_summary.hpp"
#include "support/tempered_case.hpp"

using namespace chunkattn;

namespace {

constexpr int dim = 16;
constexpr float infinity = std::numeric_limits<float>::infinity();

/// Half-precision queries, all ones.
std::vector<half> ones(std::size_t size) {
  return std::vector<half>(size, to_half(1.0f));
}

template <class V>
simt::StepResult<half> run(const test::RandomPlan& plan, const KvView<half>& kv,
                           std::span<const half> q, const V& variant,
                           const detail::cuda::CostModel& model = simt::eager_model()) {
  return simt::attention_step<half, dim>(kv, plan.view(), q, model, 2, 3, 0, variant);
}

/// A softmax with one more in the denominator.
struct OneMore {
  auto sink(lanes::At) const { return 0; }
};

struct Nobody {
  CHUNKATTN_HD bool operator()(LogitIndex) const { return false; }
};

}  // namespace

TEST_CASE("sinks count once, whatever is shared and however runs are cut") {
  constexpr int sequences = 5, shared = 700, own = 200, heads = 4;
  simt::current_schedule() = {};
  const test::RandomPlan plan = test::make_two_level_plan(sequences, shared, own);
  test::KvStorage<half> kv(plan.num_chunks, 1, plan.chunk_size, dim);
  std::fill(kv.k.begin(), kv.k.end(), to_half(0.0f));  // all tokens weigh the same
  std::fill(kv.v.begin(), kv.v.end(), to_half(1.0f));
  const std::vector<float> sinks{0.0f, 7.0f, 20.0f, -infinity};
  const auto q = ones(sequences * heads * dim);
  for (const bool share : {true, false}) {
    detail::cuda::CostModel model = simt::eager_model();
    model.num_blocks = 16;  // with more of them reading each branch takes no longer
    if (!share) model.wait_ps = std::int64_t{1} << 50;
    const auto got = run(plan, kv.view, q, Sinks{sinks}, model);
    const test::ScheduleSummary summary =
        test::summarize(got.scheduler, detail::cuda::Geometry{heads, 1, dim});
    CHECK((summary.num_shared > 0) == share);
    if (share) CHECK(summary.num_split > 0);
    for (std::size_t line = 0; line < got.lse.size(); ++line) {
      const double others = std::exp(static_cast<double>(sinks[line % heads]));
      const double all = shared + own + others;
      CHECK(static_cast<double>(got.lse[line]) == doctest::Approx(std::log(all)));
      CHECK(static_cast<double>(to_float(got.out[line * dim])) ==
            doctest::Approx((shared + own) / all).epsilon(0.002));
    }
  }
}

TEST_CASE("a sink may be a number") {
  simt::current_schedule() = {};
  const test::RandomPlan plan = test::make_two_level_plan(1, 10, 1);
  test::KvStorage<half> kv(plan.num_chunks, 1, plan.chunk_size, dim);
  std::fill(kv.k.begin(), kv.k.end(), to_half(0.0f));
  std::fill(kv.v.begin(), kv.v.end(), to_half(1.0f));
  const auto got = run(plan, kv.view, ones(dim), OneMore{});
  CHECK(got.lse[0] == doctest::Approx(std::log(12.0f)));
}

TEST_CASE("nodes outside of every window are neither read nor listed") {
  test::Random random(81);
  constexpr int sequences = 6, shared = 900;
  for (const int window : {1, 64, 100, 500, 5000}) {
    for (const int keep : {0, 4, 100}) {
      CAPTURE(window);
      CAPTURE(keep);
      const int own = random.pick({3, 64, 300});
      test::RandomPlan plan = test::make_two_level_plan(sequences, shared, own);
      test::KvStorage<half> kv(plan.num_chunks, 1, plan.chunk_size, dim);
      fill_kv(random, plan, kv.view);
      const int first = std::max(0, shared + own - window);  // that a row sees, besides `keep`
      std::vector<half> q(sequences * dim);
      random.fill(std::span(q));
      simt::shuffle_turns(random);
      const auto all = run(plan, kv.view, q, SlidingWindow{window, keep});
      // Whole tiles of 64 are read.
      for (Piece& piece : plan.pieces)
        if (piece.position >= keep + 63 && piece.position + piece.length <= first - 63)
          piece.chunk = 1 << 30;  // nowhere near the memory there is
      const auto got = run(plan, kv.view, q, SlidingWindow{window, keep});
      CHECK(got.out == all.out);
      const auto& schedule = got.scheduler;
      const std::int64_t seen = std::min(shared + own, keep + (shared + own - first));
      CHECK(test::summarize(schedule, detail::cuda::Geometry{1, 1, dim}).kv_tokens <=
            sequences * seen);
      if (first >= shared && keep == 0) CHECK(schedule.num_chunk_first() == 0);
      for (const auto& task : schedule.tasks())
        if (task.segment >= 0 && keep == 0) CHECK(task.position_begin >= first);
    }
  }
}

TEST_CASE("rows that see nothing: zeros, and an lse of minus infinity or of the sink") {
  test::Random random(82);
  simt::shuffle_turns(random);
  const test::RandomPlan plan = test::make_two_level_plan(4, 300, 100);  // empty + empty
  test::KvStorage<half> kv(plan.num_chunks, 1, plan.chunk_size, dim);
  fill_kv(random, plan, kv.view);
  const auto q = ones(4 * 4 * dim);
  const auto nothing = run(plan, kv.view, q, Mask<Nobody>{});
  CHECK(nothing.scheduler.num_partials() > 0);
  for (const half x : nothing.out) CHECK(to_float(x) == 0.0f);
  for (const float x : nothing.lse) CHECK(x == -infinity);
  const std::vector<float> sinks{1.0f, -2.0f, 300.0f, -infinity};
  const auto sink = run(plan, kv.view, q, combine(Mask<Nobody>{}, Sinks{sinks}));
  for (const half x : sink.out) CHECK(to_float(x) == 0.0f);
  for (std::size_t i = 0; i < sink.lse.size(); ++i) {
    if (i % 4 == 3)
      CHECK(sink.lse[i] == -infinity);
    else
      CHECK(sink.lse[i] == doctest::Approx(sinks[i % 4]));
  }
}

TEST_CASE("the running maximum outlasts tiles of which nothing is seen") {
  test::Random random(83);
  const test::RandomPlan plan = test::make_two_level_plan(3, 500, 10);
  test::KvStorage<half> kv(plan.num_chunks, 1, plan.chunk_size, dim);
  std::fill(kv.k.begin(), kv.k.end(), to_half(-5.0f));
  std::fill(kv.v.begin(), kv.v.end(), to_half(3.0f));
  std::fill_n(kv.view.k_row(0, 0, 0), dim, to_half(15.0f));  // a logit of 60, others of -20
  std::fill_n(kv.view.v_row(0, 0, 0), dim, to_half(7.0f));
  const auto q = ones(3 * dim);
  simt::shuffle_turns(random);
  const auto got = run(plan, kv.view, q, SlidingWindow{2, 1});
  for (const float x : got.lse) CHECK(x == doctest::Approx(60.0f));
  for (const half x : got.out) CHECK(to_float(x) == 7.0f);
}

TEST_CASE("a NaN or infinity in V reaches the rows that see it, and no other") {
  test::Random random(84);
  for (int round = 0; round < test::scaled(12); ++round) {
    test::RandomPlanOptions options;
    options.share = test::Share::all;
    options.num_sequences = 6;
    options.max_queries = random.pick({1, 20});
    options.max_length = random.pick({30, 120});
    const test::AttentionCase<half, half> problem(random, options, dim, 1, 2);
    const test::RandomPlan& plan = problem.plan;
    const test::MaskCase mask(random, {2});
    simt::shuffle_turns(random);
    const auto before = run(plan, problem.kv.view, problem.q, mask.variant);
    const std::size_t row = random.index(plan.row_kv_len.size());
    const Piece place = test::place_of(plan, row, random.uniform(0, plan.row_kv_len[row] - 1));
    problem.kv.view.v_row(place.chunk, 0, place.begin)[3] =
        from_float<half>(random.pick({std::nanf(""), infinity, -infinity}));
    const auto after = run(plan, problem.kv.view, problem.q, mask.variant);
    for (std::size_t r = 0; r < plan.row_kv_len.size(); ++r)
      for (int head = 0; head < 2; ++head) {
        const int token = plan.row_token[r];
        const Piece mine = test::place_of(plan, r, place.position);
        const bool sees =
            place.position < plan.row_kv_len[r] && mine.chunk == place.chunk &&
            mine.begin == place.begin &&
            test::MaskCase::shows({token, plan.row_kv_len[r] - 1, place.position, head});
        const std::size_t line = static_cast<std::size_t>(token * 2 + head) * dim;
        for (std::size_t i = 0; i < dim; ++i) {
          if (i == 3 && sees)
            CHECK(!std::isfinite(to_float(after.out[line + i])));
          else
            CHECK(after.out[line + i] == before.out[line + i]);
        }
      }
  }
}

TEST_CASE("infinite logits: what a soft cap makes of them") {
  simt::current_schedule() = {};
  const test::RandomPlan plan = test::make_two_level_plan(1, 10, 1);
  test::KvStorage<half> kv(plan.num_chunks, 1, plan.chunk_size, dim);
  std::fill(kv.k.begin(), kv.k.end(), to_half(0.0f));
  std::fill(kv.v.begin(), kv.v.end(), to_half(1.0f));
  for (const float sign : {1.0f, -1.0f}) {
    kv.view.k_row(0, 0, 4)[0] = to_half(sign * infinity);
    const auto got = run(plan, kv.view, ones(dim), SoftCap{2.0f});
    CHECK(static_cast<double>(got.lse[0]) == doctest::Approx(std::log(10 + std::exp(2.0 * sign))));
  }
}

TEST_CASE("a table by position is not read for lanes without a position") {
  test::Random random(85);
  const test::TemperedCase<half, half> of(random, dim);
  const auto got = run(of.problem.plan, of.problem.kv.view, of.problem.q, of.variant);
  CHECK(compare_with_reference(of.reference, std::span<const half>(got.out), unit_roundoff<half>())
            .ok());
}
