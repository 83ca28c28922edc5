// The kernels' outputs keep their digits at any length: a tile's products are added up apart from
// the running output, that goes to a compensated total after some tiles, and partial results are
// merged likewise (detail/cuda/README.md). Run on the host by tests/simt, whose tensor cores
// truncate.
//
// Outputs have 16 bits. So V is one of two neighbours in each column, so that the exact mean lies
// beside the middle of the two: by less and less from column to column. Which columns are rounded
// to the wrong neighbour says how far the mean was off before it was rounded.
//
// With CHUNKATTN_PRINT_ERRORS in the environment the errors of each path are printed.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "chunkattn/debug/reference.hpp"
#include "simt/attention.hpp"
#include "support/attention_case.hpp"
#include "support/random.hpp"

using namespace chunkattn;
using chunkattn::detail::cuda::HeadDims;
using test::Random;

namespace {

constexpr int chunk = 64;      // tokens
constexpr int period = 4096;   // tokens until K and V repeat
constexpr double goal = 2e-6;  // relative

/// `rows` rows that see `length` positions each, in chunks that repeat. Several rows share all but
/// the last chunk.
PlanView::Arrays long_plan(int rows, int length) {
  PlanView::Arrays plan;
  const int shared = rows > 1 ? length - chunk : 0;
  const auto add_segment = [&](int row_begin, int row_end, int begin, int end, int parent) {
    const auto first = static_cast<int>(plan.pieces.size());
    for (int t = begin; t < end; t += chunk)
      plan.pieces.push_back({t % period / chunk, 0, std::min(chunk, end - t), t});
    plan.segments.push_back({row_begin, row_end, first,
                             static_cast<int>(plan.pieces.size()) - first, begin, end - begin,
                             parent, row_end - row_begin});
  };
  if (rows > 1) add_segment(0, rows, 0, shared, -1);
  for (int r = 0; r < rows; ++r) {
    plan.row_token.push_back(r);
    plan.row_kv_len.push_back(length);
    plan.row_segment.push_back(rows > 1 ? r + 1 : 0);
    plan.writes.push_back({no_chunk, 0});
    add_segment(r, r + 1, shared, length, rows > 1 ? 0 : -1);
  }
  plan.chunk_size = chunk;
  plan.segments_version = plan.pieces_version = 1;
  return plan;
}

struct Path {
  const char* name;
  int rows, group;
  int blocks;         // for which the schedule is cut
  int tile_rows;      // of the highest tile of K/V that is streamed
  int pieces;         // partial results that a row merges, at least
  bool large = true;  // tiles of 128 lines are allowed
};

constexpr Path paths[] = {
    {"sequence-first, 16 lines", 1, 1, 1, 16, 0},
    {"sequence-first, 32 lines", 1, 20, 1, 32, 0},
    {"sequence-first, 64 lines", 1, 40, 1, 64, 0},
    {"chunk-first, 128 lines", 8, 16, 1, 128, 1},
    {"8 partial results", 1, 4, 16, 16, 8},
    {"hundreds of partial results", 1, 4, 1024, 16, 60},
    {"sequence-first, 128 lines", 1, 128, 1, 128, 0},
};

template <class T, HeadDims Dims, class V = NoVariant, class E = T>
simt::StepResult<half> run(const Path& path, const KvView<E>& kv, const PlanView& plan,
                           std::span<const half> q, const V& variant = {}) {
  detail::cuda::CostModel model = simt::eager_model();
  model.num_blocks = path.blocks;
  if (!path.large) model.most_tile_rows = detail::cuda::usual_tile_rows;
  simt::current_schedule() = {};
  const auto got = simt::attention_step<half, Dims>(kv, plan, q, model, 2, path.blocks == 1 ? 1 : 3,
                                                    0.0f, variant);
  int highest = 0, merges = 0;
  for (const detail::cuda::Task& task : got.scheduler.tasks()) {
    if (task.segment >= 0) highest = std::max(highest, task.tile_rows);
    merges = std::max(merges, task.merge_count);
  }
  CHECK(highest == path.tile_rows);
  CHECK(merges >= path.pieces);
  return got;
}

/// By how much an output is off before it is rounded, to a quarter of the goal; of up to 16
/// columns. All tokens but one of a period have the probability 1365/2048, which 16 bits hold,
/// relative to that one: their products have 22 bits, and the sums are not exact.
template <HeadDims Dims, class V = NoVariant>
double error_of_mean(const Path& path, int length, float value, const V& variant = {}) {
  constexpr double p = 1365.0 / 2048;
  const half low = from_float<half>(value);
  const half high{static_cast<std::uint16_t>(low.bits + 1)};
  const double gap = (double{to_float(high)} - to_float(low)) / to_float(low);
  const double weights = 1 + (period - 1) * p;
  const int many = std::max(1, static_cast<int>(goal / 4 * period / gap));  // tokens a column
  const auto high_tokens = [&](int column) {
    return static_cast<int>(weights / 2 / p) + (2 * (column % 16 - 8) + 1) * many / 2;
  };
  const float logit = static_cast<float>(std::log(p));
  const half large = from_float<half>(logit);
  const half rest = from_float<half>(logit - to_float(large));
  test::KvStorage<half> kv(period / chunk, 1, chunk, Dims.k, Dims.v);
  for (int t = 0; t < period; ++t) {
    half* const k = kv.view.k_row(t / chunk, 0, t % chunk);
    std::fill_n(k, Dims.k, half{});
    const int place = t * 1571 % period;  // those of one value are spread evenly
    if (place < period - 1) {
      k[0] = large;
      k[1] = rest;
    }
    for (int c = 0; c < Dims.v; ++c)
      kv.view.v_row(t / chunk, 0, t % chunk)[c] = place < high_tokens(c) ? high : low;
  }
  const PlanView::Arrays plan = long_plan(path.rows, length);
  const std::vector<half> q(static_cast<std::size_t>(path.rows * path.group * Dims.k),
                            from_float<half>(std::sqrt(static_cast<float>(Dims.k))));
  const auto got = run<half, Dims>(path, kv.view, plan.view(), std::span<const half>(q), variant);
  double worst = 0;
  for (std::size_t i = 0; i < got.out.size(); ++i) {
    const double off = (high_tokens(static_cast<int>(i % Dims.v)) * p / weights - 0.5) * gap;
    REQUIRE((got.out[i].bits == low.bits || got.out[i].bits == high.bits));
    if ((got.out[i].bits == high.bits) != (off > 0)) worst = std::max(worst, std::abs(off));
  }
  return worst;
}

bool print_errors() {
  return std::getenv("CHUNKATTN_PRINT_ERRORS") != nullptr;
}

}  // namespace

TEST_CASE("a sum keeps what its additions round away, and what it is multiplied with") {
  Random random(11);
  detail::cuda::ExactSum sum;
  double exact = 0;
  for (int i = 0; i < 100'000; ++i) {
    const float factor = i % 1000 == 999 ? 0.75f : i % 3 == 0 ? 1.0f - 0x1p-13f : 1.0f;
    const float x = 0.1f + 1e-5f * static_cast<float>(random.uniform(0, 1000));
    sum.add(factor, x, 0.7f);
    exact = exact * factor + double{x} * 0.7f;
    if (i > 100 && std::abs(sum.value() - exact) > 1.2e-7 * exact) FAIL("after ", i);
  }
}

TEST_CASE("a total of thousands of windows has lost nothing, and threads and rows have their own") {
  namespace cuda = detail::cuda;
  namespace ptx = detail::ptx;
  constexpr HeadDims dims{16};
  constexpr int windows = 5000, blocks = 2;
  std::vector<float> memory(blocks * cuda::total_bytes(dims) / sizeof(float), NAN);
  std::vector<std::int32_t> rows(16, 0);  // of the first block's warps all, of the others half
  std::vector<std::int32_t> half_of_rows = rows;
  std::fill(half_of_rows.begin() + 8, half_of_rows.end(), -1);
  std::vector<double> worst(blocks * 128, 0);
  simt::launch(blocks, 128, 0, [&] {
    const int block = ptx::block_index(), thread = ptx::thread_index();
    const cuda::RunningTotal<dims, 1, 16> total(memory.data(),
                                                (block == 0 ? rows : half_of_rows).data());
    const float part = 0.1f + 0.001f * static_cast<float>(thread + 128 * block);
    float max[2] = {}, sum[2], out[1][2][4];
    double exact = 0;
    for (int window = 0; window < windows; ++window) {
      for (float& x : sum) x = part;
      for (auto& columns : out[0])
        for (float& x : columns) x = 3 * part;
      if (window == windows / 2) {  // maxima rise by 1: weights before are halved
        max[0] = max[1] = 1;
        exact /= 2;
      }
      exact += part;
      total.add(window == 0, window == windows - 1, max, 1.0f, sum, out);
    }
    double& error = worst[static_cast<std::size_t>(128 * block + thread)];
    for (int half = 0; half < (block == 0 ? 2 : 1); ++half) {
      error = std::max(error, std::abs(sum[half] / exact - 1));
      for (const auto& columns : out[0])
        for (int i = 0; i < 2; ++i)
          error = std::max(error,
                           std::abs(columns[2 * half + i] / (double{3 * part} / part * exact) - 1));
    }
  });
  for (const double error : worst) CHECK(error <= 1.3e-7);
}

// Of 16 tokens each, which tensor cores truncate twice: at most 64 ulps of an output that grows.
// (As long a window in 16 bits has 1.15e-6.)
TEST_CASE("outputs that take every step of products go to their totals early") {
  using detail::cuda::ValueSums;
  constexpr HeadDims dims{128, 128, 1};
  using Warps = detail::cuda::WarpLayout<dims, 64, false>;
  using Sums = ValueSums<dims, Warps, true>;
  CHECK(!Sums::apart);
  CHECK(Sums::window_tiles * Warps::warp_tokens / 8 <= 64);
  CHECK(ValueSums<dims, Warps, false>::apart);
}

TEST_CASE("outputs keep their digits at any length") {
  for (const Path& path : paths) {
    CAPTURE(std::string(path.name));
    std::string line;
    for (const int length : {4096, 16384, 1'048'576}) {
      if (test::scaled(100) < 100 && length > 16384) continue;
      CAPTURE(length);
      double worst = error_of_mean<16>(path, length, 1.1f);
      if (length <= 16384)
        for (const float value : {0.3f, 0.7f, 1.3f, 1.7f})
          worst = std::max(worst, error_of_mean<16>(path, length, value));
      CHECK(worst <= goal);
      char text[16];
      std::snprintf(text, sizeof text, " | %.1e", worst);
      line += text;
    }
    if (print_errors()) std::printf("| %s%s |\n", path.name, line.c_str());
  }
}

TEST_CASE("so do those of variants, and of heads whose columns two warps share") {
  const Path& one = paths[0];
  CHECK(error_of_mean<16>(one, 7 * period, 1.1f, SlidingWindow{1 << 30, 0}) <= goal);
  Path lines = paths[2];
  CHECK(error_of_mean<16>(lines, 7 * period, 1.1f, SlidingWindow{1 << 30, 0}) <= goal);
  CHECK(error_of_mean<HeadDims{256, 64}>(one, 4 * period, 1.1f) <= goal);
}

TEST_CASE("softmax denominators keep their digits, too") {
  constexpr HeadDims dims{16};
  test::KvStorage<half> kv(period / chunk, 1, chunk, dims.k, dims.v);
  for (int t = 0; t < period; ++t) {
    std::fill_n(kv.view.v_row(t / chunk, 0, t % chunk), dims.v, from_float<half>(1.0f));
    std::fill_n(kv.view.k_row(t / chunk, 0, t % chunk), dims.k,
                from_float<half>(t == 100 ? 0.0f : -0.19f));
  }
  const double others = std::exp(4.0 * to_float(from_float<half>(-0.19f)));
  for (const Path& path : paths) {
    CAPTURE(std::string(path.name));
    const int longest = path.pieces > 1 ? 1'048'576 : 262'144;
    for (const int length : {16384, longest}) {
      if (test::scaled(100) < 100 && length > 16384) continue;
      CAPTURE(length);
      const PlanView::Arrays plan = long_plan(path.rows, length);
      const std::vector<half> q(static_cast<std::size_t>(path.rows * path.group * dims.k),
                                from_float<half>(1.0f));
      const auto got = run<half, dims>(path, kv.view, plan.view(), std::span<const half>(q));
      const double ones = length / period;
      const double exact = std::log(ones + (length - ones) * others);
      double worst = 0;
      for (const float lse : got.lse) worst = std::max(worst, std::abs(lse - exact));
      CHECK(worst <= goal);
      if (print_errors()) std::printf("lse, %s, %d tokens: %.1e\n", path.name, length, worst);
    }
  }
}

namespace {

enum class Logits { random, rising, falling };

// Windows in which maxima move, against the oracle.
template <HeadDims Dims, class E = half, class V = NoVariant>
void check_oracle(Random& random, const Path& path, Logits logits, const V& variant = {}) {
  constexpr int length = 2 * period + 5000;
  CAPTURE(std::string(path.name));
  CAPTURE(static_cast<int>(logits));
  test::Storage<E> kv(period / chunk, 1, chunk, Dims.k, Dims.v);
  for (int t = 0; t < period; ++t) {
    std::vector<float> k(Dims.k), v(Dims.v);
    random.fill(std::span<float>(k));
    random.fill(std::span<float>(v));
    const float at = static_cast<float>(t) / period;
    for (float& x : k)
      x = logits == Logits::random ? x : 0.1f * x + (logits == Logits::rising ? at : -at);
    E* const k_row = kv.view.k_row(t / chunk, 0, t % chunk);
    E* const v_row = kv.view.v_row(t / chunk, 0, t % chunk);
    if constexpr (has_row_scales<E>) {
      *kv.view.k_row_scale(t / chunk, 0, t % chunk) = quantize_row(k.data(), Dims.k, k_row);
      *kv.view.v_row_scale(t / chunk, 0, t % chunk) = quantize_row(v.data(), Dims.v, v_row);
    } else {
      for (int i = 0; i < Dims.k; ++i) k_row[i] = from_float<E>(k[static_cast<std::size_t>(i)]);
      for (int i = 0; i < Dims.v; ++i) v_row[i] = from_float<E>(v[static_cast<std::size_t>(i)]);
    }
  }
  const PlanView::Arrays plan = long_plan(path.rows, length);
  std::vector<half> q(static_cast<std::size_t>(path.rows * path.group * Dims.k));
  random.fill(std::span<half>(q));
  if (logits != Logits::random)
    for (half& x : q) x = from_float<half>(1.0f);
  const auto got = run<half, Dims>(path, kv.view, plan.view(), std::span<const half>(q), variant);
  ReferenceVariant definition;
  if constexpr (std::is_same_v<V, SoftCap>)
    definition.logit = [cap = double{variant.cap}](double logit, LogitIndex) {
      return cap * std::tanh(logit / cap);
    };
  const auto reference =
      reference_attention(kv.view, plan.view(), std::span<const half>(q), {}, definition);
  Rounding rounding = unit_roundoff<half>();
  if constexpr (has_row_scales<E>) rounding.p *= 2;  // V is rounded, too
  CHECK(compare_with_reference(reference, std::span<const half>(got.out), rounding).ok());
  CHECK(test::worst_lse(reference, got.lse) <= 1.0);
}

}  // namespace

TEST_CASE("maxima that move from window to window") {
  Random random(7);
  for (const Logits logits : {Logits::random, Logits::rising, Logits::falling}) {
    for (const Path& path : {paths[0], paths[1], paths[2], paths[3]})
      check_oracle<16>(random, path, logits);
    check_oracle<16>(random, paths[2], logits, SoftCap{20.0f});
    check_oracle<16, std::int8_t>(random, paths[0], logits);
  }
  check_oracle<HeadDims{256, 64}>(random, paths[0], Logits::rising);
}

TEST_CASE("NaN and infinities of one window are there at the end") {
  constexpr HeadDims dims{16};
  const int length = 3 * period;
  for (const Path& path : {paths[0], paths[2], paths[3], paths[4]}) {
    CAPTURE(std::string(path.name));
    test::KvStorage<half> kv(length / chunk, 1, chunk, dims.k, dims.v);
    std::fill(kv.k.begin(), kv.k.end(), half{});
    std::fill(kv.v.begin(), kv.v.end(), from_float<half>(1.0f));
    kv.view.v_row(0, 0, 5)[3] = half{0x7e00};
    kv.view.v_row(1, 0, 5)[4] = half{0x7c00};
    PlanView::Arrays plan = long_plan(path.rows, length);
    for (Piece& piece : plan.pieces) piece.chunk = piece.position / chunk;
    const std::vector<half> q(static_cast<std::size_t>(path.rows * path.group * dims.k));
    const auto got = run<half, dims>(path, kv.view, plan.view(), std::span<const half>(q));
    for (std::size_t i = 0; i < got.out.size(); ++i) {
      const float x = to_float(got.out[i]);
      if (i % 16 == 3)
        CHECK(std::isnan(x));
      else
        CHECK(x == (i % 16 == 4 ? std::numeric_limits<float>::infinity() : 1.0f));
    }
  }
}
