// Outputs keep their digits at any length: a block's values are added up apart from the running
// output, that goes to a compensated total after some blocks, and partial results are merged
// likewise. K and V are a few chunks that a plan made by hand repeats, so a million tokens take
// little memory and the exact answer is that of some tokens, each so many times.
//
// With CHUNKATTN_PRINT_ERRORS in the environment the errors of each path are printed (docs/cpu.md).
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/attention.hpp"
#include "chunkattn/debug/reference.hpp"
#include "support/attention_case.hpp"

using namespace chunkattn;
using Reduce = CpuOptions::Reduce;
using test::Random;

namespace {

constexpr int dim = 32;                // tiles take multiples of this
constexpr int chunk = 64;              // tokens
constexpr int period = 16384;          // tokens until K and V repeat
constexpr double goal = 2e-6;          // relative
constexpr float exact = 127.0f / 128;  // a byte whose scale is a power of two

#if defined(CHUNKATTN_SOFTWARE_TILES) || defined(CHUNKATTN_SOFTWARE_DOTS) || \
    defined(CHUNKATTN_TEST_PORTABLE)
constexpr int lengths[] = {4096, 16384, 65536};  // models of units take a while
#else
constexpr int lengths[] = {4096, 16384, 262'144, 1'048'576};
#endif

enum class Values { equal, positive, random };
/// Logits by position: all 0, random, or rising and falling by much in the course of a period.
enum class Logits { zero, random, rising, falling };

/// K and V of one period, a plan of `rows` rows that see `length` positions, or one less than the
/// row before, queries, and the exact answer.
template <class T>
struct LongCase {
  test::Storage<T> kv{period / chunk, 1, chunk, dim};
  PlanView::Arrays plan;
  std::vector<float> q;
  Reference reference;
  int rows, heads;
  int filled;  // tokens of the period that rows see

  LongCase(Random& random, int length, int rows_, int heads_, bool prefill, Values values,
           float value, Logits logits)
      : rows(rows_), heads(heads_), filled(std::min(period, length)) {
    std::vector<float> k_row(dim), v_row(dim);
    for (int t = 0; t < filled; ++t) {
      if (logits == Logits::random)
        random.fill(std::span(k_row));
      else
        std::fill_n(k_row.begin(), dim, slope(logits) * static_cast<float>(t) / period);
      for (float& v : v_row)
        v = values == Values::equal      ? value
            : values == Values::positive ? static_cast<float>(random.uniform(1, 1000)) * 0.001f
                                         : random.normal();
      set(t, k_row, v_row);
    }
    q.resize(static_cast<std::size_t>(rows * heads * dim));
    if (logits == Logits::random)
      random.fill(std::span(q));
    else
      std::fill(q.begin(), q.end(), logits == Logits::zero ? 0.0f : 1.0f);
    for (int r = 0; r < rows; ++r) {
      plan.row_token.push_back(r);
      plan.row_kv_len.push_back(length - (prefill ? rows - 1 - r : 0));
      plan.row_segment.push_back(0);
      plan.writes.push_back({no_chunk, 0});
    }
    for (int t = 0; t < length; t += chunk)
      plan.pieces.push_back(
          {static_cast<ChunkIndex>(t % period / chunk), 0, std::min(chunk, length - t), t});
    plan.segments.push_back(
        {0, rows, 0, static_cast<int>(plan.pieces.size()), 0, length, -1, prefill ? 1 : rows});
    plan.chunk_size = chunk;
    plan.segments_version = plan.pieces_version = 1;
    answer();
  }

 private:
  static float slope(Logits logits) {  // times sqrt(dim) in the logits
    return logits == Logits::rising ? 4.0f : logits == Logits::falling ? -4.0f : 0.0f;
  }
  void set(int t, const std::vector<float>& k_row, const std::vector<float>& v_row) {
    const auto c = static_cast<ChunkIndex>(t / chunk);
    T* const k = kv.view.k_row(c, 0, t % chunk);
    T* const v = kv.view.v_row(c, 0, t % chunk);
    if constexpr (has_row_scales<T>) {
      *kv.view.k_row_scale(c, 0, t % chunk) = quantize_row(k_row.data(), dim, k);
      *kv.view.v_row_scale(c, 0, t % chunk) = quantize_row(v_row.data(), dim, v);
    } else {
      for (int i = 0; i < dim; ++i) {
        k[i] = from_float<T>(k_row[static_cast<std::size_t>(i)]);
        v[i] = from_float<T>(v_row[static_cast<std::size_t>(i)]);
      }
    }
  }

  // The oracle's answer for some tokens with weights: each as often as its row sees it.
  void answer() {
    const auto lines = static_cast<std::size_t>(rows * heads);
    reference.num_rows = rows;
    reference.num_qo_heads = heads;
    reference.head_dim = reference.value_dim = dim;
    reference.out.resize(lines * dim);
    reference.abs_v = reference.coarse_v = reference.out;
    reference.lse.resize(lines);
    reference.logit_size = reference.coarse_logit = reference.lse;
    std::vector<Token> tokens(static_cast<std::size_t>(filled));
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      const auto c = static_cast<ChunkIndex>(t / chunk);
      const int at = static_cast<int>(t % chunk);
      detail::load_row(kv.view, false, c, 0, at, tokens[t].k);
      tokens[t].v_scale = detail::load_row(kv.view, true, c, 0, at, tokens[t].v);
    }
    Sums sums;
    double largest = 0;
    for (std::size_t line = 0; line < lines; ++line) {
      const float* const query = &q[line * dim];
      // What the line before has seen, this one sees, too: of the same query, only the rest is new.
      if (line == 0 || !std::equal(query, query + dim, query - dim)) {
        sums = {};
        largest = weigh(query, tokens);
      }
      const int length = plan.row_kv_len[line / static_cast<std::size_t>(heads)];
      sums.see(tokens, length);
      for (std::size_t i = 0; i < dim; ++i) {
        reference.out[line * dim + i] = sums.out[i] / sums.p;
        reference.abs_v[line * dim + i] = sums.abs_v[i] / sums.p;
        reference.coarse_v[line * dim + i] = sums.coarse_v[i] * sums.largest_weight / sums.p;
      }
      reference.lse[line] = largest + std::log(sums.p);
      reference.logit_size[line] = sums.logit_size;
      reference.coarse_logit[line] = sums.coarse_logit;
      reference.num_tokens.push_back(length);
    }
  }

  struct Token {
    double k[dim], v[dim], v_scale;
    double p, logit_size, coarse_logit;  // for one query
  };

  // Of each token its weight relative to the largest, whose logit is returned.
  static double weigh(const float* query, std::vector<Token>& tokens) {
    const double scale = 1 / std::sqrt(static_cast<double>(dim));
    double largest = -1e300, largest_query = 0;
    for (int i = 0; i < dim; ++i)
      largest_query = std::max(largest_query, static_cast<double>(std::abs(query[i])));
    for (Token& token : tokens) {
      double dot = 0, size = 0, keys = 0;
      for (int i = 0; i < dim; ++i) {
        const double product = static_cast<double>(query[i]) * token.k[i];
        dot += product;
        size += std::abs(product);
        keys += std::abs(token.k[i]);
      }
      token.p = dot * scale;
      token.logit_size = size * scale;
      token.coarse_logit = largest_query * keys * scale;
      largest = std::max(largest, token.p);
    }
    for (Token& token : tokens) token.p = std::exp(token.p - largest);
    return largest;
  }

  struct Sums {
    double out[dim] = {}, abs_v[dim] = {}, coarse_v[dim] = {};
    double p = 0, largest_weight = 0, logit_size = 0, coarse_logit = 0;
    int length = 0;

    void see(const std::vector<Token>& tokens, int new_length) {
      for (int t = 0; t < static_cast<int>(tokens.size()); ++t) {
        const auto times = [t](int n) { return n / period + (t < n % period ? 1 : 0); };
        const double count = times(new_length) - times(length);
        if (count == 0) continue;
        const Token& token = tokens[static_cast<std::size_t>(t)];
        p += count * token.p;
        largest_weight = std::max(largest_weight, token.p * token.v_scale);
        logit_size = std::max(logit_size, token.logit_size);
        coarse_logit = std::max(coarse_logit, token.coarse_logit);
        for (int i = 0; i < dim; ++i) {
          const double size = std::abs(token.v[i]);
          out[i] += count * token.p * token.v[i];
          abs_v[i] += count * token.p * size;
          coarse_v[i] += count * size / token.v_scale;
        }
      }
      length = new_length;
    }
  };
};

/// How attention over a long context is computed.
struct Path {
  const char* name;
  int rows;
  int heads;
  bool prefill;
  Reduce reduce;
  int min_product_lines;  // 1: products, as far as there are any
  std::optional<int> min_tasks;
};

constexpr Path paths[] = {
    {"stream, invariant", 1, 1, false, Reduce::batch_invariant, 1000, {}},
    {"stream, deterministic", 1, 1, false, Reduce::deterministic, 1000, {}},
    {"stream, spin lock", 1, 2, false, Reduce::spin_lock, 1000, 200},
    {"stream of 4, one task", 2, 2, false, Reduce::deterministic, 1000, 1},
    {"products, invariant", 8, 2, false, Reduce::batch_invariant, 1, {}},
    {"products, deterministic", 8, 2, false, Reduce::deterministic, 1, {}},
    {"products, spin lock", 8, 2, false, Reduce::spin_lock, 1, 200},
    {"products, one task", 5, 1, false, Reduce::deterministic, 1, 1},
    {"prefill, invariant", 70, 1, true, Reduce::batch_invariant, 1, {}},
    {"prefill, deterministic", 70, 1, true, Reduce::deterministic, 1, {}},
};

/// Of an answer: relative to the exact one, and as parts of the bounds.
struct Errors {
  double relative = 0;
  OracleReport report;
  double lse = 0;
  bool in_fp32 = true;  // nothing is rounded to fewer bits
};

template <class T>
Errors errors_of(const Path& path, const LongCase<T>& problem) {
  ChunkAttention<Cpu, dim> attention(
      2, {.reduce = path.reduce,
          .tuning = {.min_tasks = path.min_tasks, .min_product_lines = path.min_product_lines}});
  test::Answer<> answer(problem);
  attention.run(problem.kv.view, LiveView::unchecked(problem.plan.view()), problem.q, answer.out,
                {.lse = answer.lse});
  const Rounding rounding = test::rounding_in<T>(attention);
  Errors errors;
  for (std::size_t i = 0; i < answer.out.size(); ++i)
    errors.relative =
        std::max(errors.relative,
                 std::abs(static_cast<double>(answer.out[i]) / problem.reference.out[i] - 1));
  errors.report =
      compare_with_reference(problem.reference, std::span<const float>(answer.out), rounding);
  errors.in_fp32 = rounding.p == Rounding().p && rounding.p_of_largest == 0;
  errors.lse = test::worst_lse(problem.reference, answer.lse, rounding);
  return errors;
}

bool print_errors() {
  return std::getenv("CHUNKATTN_PRINT_ERRORS") != nullptr;
}

template <class T>
void check_lengths(const char* type, std::uint64_t stream) {
  Random random(stream);
  for (const Path& path : paths) {
    CAPTURE(path.name);
    std::string line;
    for (const int length : lengths) {
      if (path.prefill && length > 16384) continue;  // its blocks are those of products
      if (test::scaled(100) < 100 && length > 16384) continue;
      CAPTURE(length);
      const auto check = [&](Values values, float value, Logits logits) {
        CAPTURE(static_cast<int>(values));
        CAPTURE(static_cast<int>(logits));
        CAPTURE(value);
        const LongCase<T> problem(random, length, path.rows, path.heads, path.prefill, values,
                                  value, logits);
        const Errors errors = errors_of(path, problem);
        CHECK(errors.report.worst <= 1.0);
        CHECK(errors.lse <= 1.0);
        // Where all probabilities are 1, units of fewer bits are exact, too, but for scales.
        if (logits == Logits::zero && values != Values::random &&
            (errors.in_fp32 || !has_row_scales<T> || value == exact))
          CHECK(errors.relative <= goal);
        return errors.relative;
      };
      const double equal = check(Values::equal, 1.1f, Logits::zero);
      if (length <= 16384)
        for (const float value : {0.3f, 1.7f, 0.7f, 1.9394188f, exact})
          check(Values::equal, value, Logits::zero);
      check(Values::positive, 0, Logits::zero);
      check(Values::random, 0, Logits::random);
      check(Values::equal, 1.1f, Logits::rising);
      if (length <= 16384) check(Values::equal, 1.1f, Logits::falling);
      char text[16];
      std::snprintf(text, sizeof text, " | %.1e", equal);
      line += text;
    }
    if (print_errors()) std::printf("| %s, %s%s |\n", type, path.name, line.c_str());
  }
}

TEST_CASE("outputs keep their digits at any length") {
  SUBCASE("fp32") {
    check_lengths<float>("fp32", 1);
  }
  SUBCASE("half") {
    check_lengths<half>("fp16", 4);
  }
  SUBCASE("bfloat16") {
    check_lengths<bfloat16>("bf16", 2);
  }
  SUBCASE("int8") {
    check_lengths<std::int8_t>("int8", 3);
  }
}

// Rows that see a few tokens less or more than some windows, in one call, by products and by
// streams, and each alone: windows end at positions, whatever is read for others.
template <class V>
void check_alone(const LongCase<float>& problem, const V& variant) {
  const auto run = [&](const PlanView& plan, std::span<const float> q, int min_product_lines) {
    ChunkAttention<Cpu, dim> attention(
        1, {.reduce = Reduce::batch_invariant, .tuning = {.min_product_lines = min_product_lines}});
    std::vector<float> out(q.size());
    attention.run(problem.kv.view, LiveView::unchecked(plan), variant, q, out);
    return out;
  };
  const auto together = run(problem.plan.view(), problem.q, 1);
  CHECK(run(problem.plan.view(), problem.q, 1000) == together);
  for (int row = 0; row < problem.rows; row += 3) {
    CAPTURE(row);
    PlanView::Arrays alone = problem.plan;
    alone.row_token.resize(1);
    alone.row_kv_len.resize(1);
    alone.row_kv_len[0] = problem.plan.row_kv_len[static_cast<std::size_t>(row)];
    alone.row_segment.resize(1);
    alone.writes.resize(1);
    alone.segments[0].row_end = 1;
    const auto size = static_cast<std::size_t>(problem.heads * dim);
    const auto first = static_cast<std::size_t>(row) * size;
    const auto out =
        run(alone.view(), std::span(problem.q).subspan(first, size), row % 2 * 999 + 1);
    CHECK(
        std::equal(out.begin(), out.end(), together.begin() + static_cast<std::ptrdiff_t>(first)));
  }
}

TEST_CASE("a row's bits do not depend on windows that others enter") {
  Random random(5);
  for (const int length : {6144 + 35, 12288 + 40, 12288 + 6000}) {
    CAPTURE(length);
    const LongCase<float> problem(random, length, 70, 1, true, Values::random, 0, Logits::random);
    check_alone(problem, NoVariant{});
    check_alone(problem, SlidingWindow{length - 20, 0});
    check_alone(problem, SlidingWindow{40, 100});
    check_alone(problem, SlidingWindow{2000, 0});
  }
}

}  // namespace
