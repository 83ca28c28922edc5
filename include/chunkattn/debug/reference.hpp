// The oracle of tests: attention in double precision, row by row, by its definition. Kernels are
// compared with it element by element, against a bound that follows from their roundings.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#include "../attention_options.hpp"
#include "../detail/attention/qo_heads.hpp"
#include "../detail/support/check.hpp"
#include "../detail/support/config.hpp"
#include "../element.hpp"
#include "../kv_view.hpp"
#include "../plan_view.hpp"
#include "../variants.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// The rounding errors of a kernel beyond those of fp32: of each number relative to itself, and
/// where it computes with integers also relative to the largest of a row.
struct Rounding {
  double p;                     ///< of probabilities and values, as the product P·V gets them
  double logit;                 ///< of queries and keys, as the product Q·K gets them
  double p_of_largest = 0;      ///< of probabilities, as a part of a query-head row's largest one
  double query_of_largest = 0;  ///< of a query's elements, as a part of its largest one

  /// fp32 by default.
  constexpr Rounding(double p_ = 0x1p-24, double logit_ = 0) noexcept : p(p_), logit(logit_) {}
};

/// The largest rounding errors of products by tiles over K and V of T (see Accuracy). Two terms of
/// bfloat16 hold a float to 2^-17 of itself, and K and V exactly. If these are half, two terms
/// themselves, the product of both second terms is left out: another 2^-16.
template <class T>
[[nodiscard]] constexpr Rounding rounding_of(CpuOptions::Accuracy accuracy) noexcept {
  constexpr bool is_half = std::is_same_v<T, half>;
  if (std::is_same_v<T, float> || accuracy == CpuOptions::Accuracy::fp32) return {};
  const double u = accuracy == CpuOptions::Accuracy::two_terms ? (is_half ? 0x3p-17 : 0x1p-17)
                                                               : (is_half ? 0x2p-8 : 0x1p-8);
  return {u, u};
}

/// The definition of a variant, in double precision. Empty functions do nothing.
struct ReferenceVariant {
  std::function<double(double, LogitIndex)> logit;  ///< what replaces a scaled logit
  std::function<bool(LogitIndex)> visible;          ///< whether the row sees the key
  std::function<double(int)> sink;  ///< one more logit of a query head, without a value
  double gain = 1;                  ///< the most by which `logit` enlarges errors
};

/// What reference_attention() returns. Rows are in the caller's order.
struct Reference {
  int num_rows = 0;           ///< query tokens
  int num_qo_heads = 0;       ///< query heads
  int head_dim = 0;           ///< elements per head of q and K
  int value_dim = 0;          ///< elements per head of V and out
  std::vector<double> out;    ///< [num_rows][num_qo_heads][value_dim]
  std::vector<double> lse;    ///< [num_rows][num_qo_heads], natural log; -infinity for an empty row
  std::vector<double> abs_v;  ///< as `out`: sum p|v|, by which rounding errors of p are weighted
  /// As `lse`: the largest finite sm_scale * sum |q_i k_i| of any token; with a variant times its
  /// gain, plus the size of its logit. A sink has that of its logit.
  std::vector<double> logit_size;
  /// What errors relative to the largest probability are weighted by. As `out`:
  /// max(p * scale) * sum |v| / scale, with the scales of 8-bit rows.
  std::vector<double> coarse_v;
  /// And those relative to a query's largest element. As `lse`: the largest finite
  /// sm_scale * max |q| * sum |k_i| of any token, with a variant times its gain.
  std::vector<double> coarse_logit;
  std::vector<int> num_tokens;  ///< as `lse`: how many tokens the row sees

  /// The most that a kernel's output may differ from `out[index]`. The kernel rounds as `rounding`
  /// says, and its output by `u_out` (relative):
  ///   (u_out + sums) |out| + (e^(2 (u_p + delta)) - 1) sum p|v| + p_of_largest * coarse_v + 1e-6
  ///   delta = (u_logit + max(4, sqrt(head_dim)) * 2^-24) * logit_size
  ///           + query_of_largest * coarse_logit
  /// (delta: the logit's own rounding, and that of a sum of head_dim products in fp32, one after
  /// the other: sqrt(n) roundings of its size, Higham and Mary, SIAM J. Sci. Comput. 41, 2019).
  /// `sums` is sum_error(): of values of both signs it is a part of their small sum only. In
  /// fp32 one token dropped out of 4,096 of unit variance breaks it.
  [[nodiscard]] double bound(std::size_t index, double u_out, Rounding rounding = {}) const {
    const double delta = logit_error(index / static_cast<std::size_t>(value_dim), rounding);
    const double coarse = rounding.p_of_largest > 0 ? rounding.p_of_largest * coarse_v[index] : 0;
    const double of_values =  // a delta may be so large that its exponential is infinite
        abs_v[index] > 0 ? std::expm1(2 * (rounding.p + delta)) * abs_v[index] : 0;
    const double sums = sum_error(index / static_cast<std::size_t>(value_dim));
    return (u_out + sums) * std::abs(out[index]) + of_values + coarse + 1e-6;
  }

  /// How much of itself a sum over a query-head row's tokens may lose: 64 values are added one
  /// after the other, up to 96 such sums, and what these become with compensation. Equal values all
  /// lose the same way, n of them up to n / 2 roundings of the sum; half of that at any length (of
  /// 200,000 values the worst lost 30 of the 32 roundings that 4,096 or more are allowed).
  [[nodiscard]] double sum_error(std::size_t line) const {
    const double n = line < num_tokens.size() ? num_tokens[line] : 0;
    return ((std::min)(n, 64.0) + (std::min)(n / 64, 64.0)) / 4 * 0x1p-24;
  }

  /// The most that such a kernel's lse may differ: the roundings of the logit and of the sum.
  [[nodiscard]] double lse_bound(std::size_t index, Rounding rounding = {}) const {
    const double size = lse[index] > -1e300 ? std::abs(lse[index]) : 0.0;
    return logit_error(index, rounding) + 4 * 0x1p-24 * size + 2e-6;
  }

  /// The most that a logit of query-head row row * num_qo_heads + head may differ.
  [[nodiscard]] double logit_error(std::size_t line, Rounding rounding) const {
    const double sums = (std::max)(4.0, std::sqrt(static_cast<double>(head_dim))) * 0x1p-24;
    const double coarse =
        rounding.query_of_largest > 0 ? rounding.query_of_largest * coarse_logit[line] : 0;
    return (rounding.logit + sums) * logit_size[line] + coarse;
  }
};

/// The result of compare_with_reference().
struct OracleReport {
  /// The largest |out - ref| / bound; up to 1 is a pass. NaN in both counts as 0, NaN in one of
  /// them as huge.
  double worst = 0;
  double max_abs_error = 0;  ///< largest |out - ref|
  double rms = 0;            ///< root mean square of |out - ref| / bound, where that is a number
  std::size_t index = 0;     ///< where `worst` is
  /// Whether every element is within its bound.
  [[nodiscard]] bool ok() const noexcept { return worst <= 1.0; }
};

namespace detail {

/// By the bits, which -ffast-math leaves alone.
inline bool is_nan(double value) noexcept {
  return (std::bit_cast<std::uint64_t>(value) & 0x7fffffffffffffffu) > 0x7ff0000000000000u;
}

/// What the 8 bits of an element say.
inline double stored_number(std::int8_t value) noexcept {
  return value;
}
inline double stored_number(float8_e4m3 value) noexcept {
  return static_cast<double>(to_float(value));
}

/// Row `token` of K or V as doubles; returns its scale.
template <class T>
double load_row(const KvView<T>& kv, bool is_v, ChunkIndex chunk, int kv_head, int token,
                double* row) {
  const T* from = is_v ? kv.v_row(chunk, kv_head, token) : kv.k_row(chunk, kv_head, token);
  const int dim = is_v ? kv.dim_of_v() : kv.head_dim;
  if constexpr (has_row_scales<T>) {
    const double scale = static_cast<double>(is_v ? *kv.v_scale_of(chunk, kv_head, token)
                                                  : *kv.k_scale_of(chunk, kv_head, token));
    for (int i = 0; i < dim; ++i) row[i] = scale * stored_number(from[i]);
    return scale;
  } else {
    for (int i = 0; i < dim; ++i) row[i] = static_cast<double>(to_float(from[i]));
    return 1;
  }
}

/// K and V of what one row sees, for one KV head, leaf first.
struct SeenRows {
  std::vector<double> k, v;     ///< [count][head_dim], [count][value_dim]
  std::vector<double> v_scale;  ///< [count]
  std::vector<int> position;    ///< [count] path positions
  std::size_t count = 0;

  template <class T>
  void gather(const KvView<T>& kv, const PlanView& plan, int row, int kv_head) {
    const auto dim = static_cast<std::size_t>(kv.head_dim);
    const auto value_dim = static_cast<std::size_t>(kv.dim_of_v());
    count = 0;
    v_scale.clear();
    position.clear();
    for (int s = plan.row_segment[row]; s >= 0; s = plan.segments[s].parent) {
      const PlanView::Segment& segment = plan.segments[s];
      for (int p = 0; p < segment.num_pieces; ++p) {
        const Piece& piece = plan.pieces[segment.piece_begin + p];
        const int seen = visible_length(piece, plan.row_kv_len[row]);
        for (int t = 0; t < seen; ++t, ++count) {
          if (k.size() < (count + 1) * dim) {
            k.resize(2 * (count + 1) * dim);
            v.resize(2 * (count + 1) * value_dim);
          }
          load_row(kv, false, piece.chunk, kv_head, piece.begin + t, &k[count * dim]);
          v_scale.push_back(
              load_row(kv, true, piece.chunk, kv_head, piece.begin + t, &v[count * value_dim]));
          position.push_back(piece.position + t);
        }
      }
    }
  }
};

/// Query-head row `line` of the result from the query's `head_dim` elements.
/// \param at  the row's position and head; its key is not looked at
template <class X>
void reference_line(const X* query, const SeenRows& seen, double scale,
                    const ReferenceVariant& variant, LogitIndex at, std::size_t line,
                    Reference& result) {
  const auto dim = static_cast<std::size_t>(result.head_dim);
  const auto value_dim = static_cast<std::size_t>(result.value_dim);
  double* const out = &result.out[line * value_dim];
  double* const abs_v = &result.abs_v[line * value_dim];
  double* const coarse_v = &result.coarse_v[line * value_dim];
  std::vector<double> logits(seen.count);
  std::vector<bool> visible(seen.count, true);
  double largest_query = 0;
  for (std::size_t i = 0; i < dim; ++i)
    largest_query = (std::max)(largest_query, std::abs(static_cast<double>(to_float(query[i]))));
  double largest = -(std::numeric_limits<double>::max)();
  if (variant.sink && variant.sink(at.head) > largest) {
    largest = variant.sink(at.head);
    if (std::isfinite(largest)) result.logit_size[line] = std::abs(largest);
  }
  for (std::size_t t = 0; t < seen.count; ++t) {
    at.kv_idx = seen.position[t];
    if (variant.visible && !(visible[t] = variant.visible(at))) continue;
    double dot = 0;
    double size = 0;
    double keys = 0;
    for (std::size_t i = 0; i < dim; ++i) {
      const double product = static_cast<double>(to_float(query[i])) * seen.k[t * dim + i];
      dot += product;
      size += std::abs(product);
      keys += std::abs(seen.k[t * dim + i]);
    }
    logits[t] = dot * scale;
    if (variant.logit) logits[t] = variant.logit(logits[t], at);
    if (logits[t] > largest) largest = logits[t];
    size *= scale * variant.gain;  // an infinite one has no rounding error
    if (variant.logit) size += std::abs(logits[t]);
    if (size > result.logit_size[line] && size <= (std::numeric_limits<double>::max)())
      result.logit_size[line] = size;
    const double coarse = largest_query * keys * scale * variant.gain;
    if (coarse > result.coarse_logit[line] && coarse <= (std::numeric_limits<double>::max)())
      result.coarse_logit[line] = coarse;
  }
  result.num_tokens[line] = static_cast<int>(std::count(visible.begin(), visible.end(), true));
  double sum = variant.sink ? std::exp(variant.sink(at.head) - largest) : 0.0;
  double largest_weight = 0;
  for (std::size_t t = 0; t < seen.count; ++t) {
    if (!visible[t]) continue;
    const double p = std::exp(logits[t] - largest);
    sum += p;
    largest_weight = (std::max)(largest_weight, p * std::abs(seen.v_scale[t]));
    for (std::size_t i = 0; i < value_dim; ++i) {
      out[i] += p * seen.v[t * value_dim + i];
      abs_v[i] += p * std::abs(seen.v[t * value_dim + i]);
      if (seen.v_scale[t] != 0)
        coarse_v[i] += std::abs(seen.v[t * value_dim + i] / seen.v_scale[t]);
    }
  }
  if (sum == 0) return;
  for (std::size_t i = 0; i < value_dim; ++i) {
    out[i] /= sum;
    abs_v[i] /= sum;
    coarse_v[i] *= largest_weight / sum;
  }
  result.lse[line] = largest + std::log(sum);
}

}  // namespace detail

/// Attention of every row of `plan` in double precision. A row without a token of any weight (none
/// seen, or all logits -infinity) gives 0 and an lse of -infinity.
/// \param kv        K and V of one layer, in host memory
/// \param q         [num_rows][num_qo_heads][head_dim], the caller's row order
/// \param sm_scale  unset: 1 / sqrt(head_dim)
/// \param variant   what else is done to logits
/// \throws InvalidArgument where the sizes do not fit each other
template <class T, class X>
[[nodiscard]] Reference reference_attention(const KvView<T>& kv, const PlanView& plan,
                                            std::span<const X> q,
                                            std::optional<double> sm_scale = {},
                                            const ReferenceVariant& variant = {}) {
  detail::check_argument(plan.num_rows > 0, "plan.num_rows", plan.num_rows, "at least one row");
  detail::check_argument(kv.num_kv_heads > 0, "kv.num_kv_heads", kv.num_kv_heads, "at least 1");
  detail::check_argument(kv.head_dim > 0, "kv.head_dim", kv.head_dim, "at least 1");
  detail::check_argument(!sm_scale || (*sm_scale > 0 && std::isfinite(*sm_scale)), "sm_scale",
                         sm_scale.value_or(0),
                         "a positive finite factor, or none for 1 / sqrt(head_dim)");
  Reference result;
  result.num_rows = plan.num_rows;
  result.num_qo_heads = detail::count_qo_heads(q.size(), plan.num_rows, kv.head_dim);
  result.head_dim = kv.head_dim;
  result.value_dim = kv.dim_of_v();
  detail::check_argument(result.num_qo_heads % kv.num_kv_heads == 0, "num_qo_heads",
                         result.num_qo_heads, "a multiple of num_kv_heads");
  const int group = result.num_qo_heads / kv.num_kv_heads;
  const std::size_t dim = static_cast<std::size_t>(kv.head_dim);
  const double scale = sm_scale.value_or(1.0 / std::sqrt(static_cast<double>(dim)));
  const std::size_t lines = q.size() / dim;
  result.out.assign(lines * static_cast<std::size_t>(result.value_dim), 0.0);
  result.abs_v.assign(result.out.size(), 0.0);
  result.coarse_v.assign(result.out.size(), 0.0);
  result.coarse_logit.assign(lines, 0.0);
  // Minus infinity from its bits, which -ffast-math leaves alone.
  result.lse.assign(lines, std::bit_cast<double>(std::uint64_t{0xfff0000000000000u}));
  result.logit_size.assign(lines, 0.0);
  result.num_tokens.assign(lines, 0);

  const auto num_qo_heads = static_cast<std::size_t>(result.num_qo_heads);
  detail::SeenRows seen;
  for (int row = 0; row < plan.num_rows; ++row) {
    for (int head = 0; head < result.num_qo_heads; ++head) {
      if (head % group == 0) seen.gather(kv, plan, row, head / group);
      if (seen.count == 0 && !variant.sink) break;
      const std::size_t line = static_cast<std::size_t>(plan.row_token[row]) * num_qo_heads +
                               static_cast<std::size_t>(head);
      const LogitIndex at{plan.row_token[row], plan.row_kv_len[row] - 1, 0, head};
      detail::reference_line(&q[line * dim], seen, scale, variant, at, line, result);
    }
  }
  return result;
}

/// Compares a kernel's output with the reference, element by element.
/// \param out       [num_rows][num_qo_heads][value_dim], rounded to X
/// \param rounding  how else the kernel rounds: ChunkAttention::rounding()
template <class X>
[[nodiscard]] OracleReport compare_with_reference(const Reference& reference,
                                                  std::span<const X> out, Rounding rounding = {}) {
  detail::check_argument(out.size() == reference.out.size(), "out.size()", out.size(),
                         "num_rows * num_qo_heads * value_dim");
  OracleReport report;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double got = static_cast<double>(to_float(out[i]));
    double error = std::abs(got - reference.out[i]);
    double ratio = error / reference.bound(i, unit_roundoff<X>(), rounding);
    if (detail::is_nan(got) && detail::is_nan(reference.out[i]))
      ratio = error = 0;
    else if (detail::is_nan(ratio))
      ratio = (std::numeric_limits<double>::max)();
    if (ratio > report.worst) {
      report.worst = ratio;
      report.index = i;
    }
    if (error > report.max_abs_error) report.max_abs_error = error;
    report.rms += ratio * ratio;
  }
  if (!out.empty()) report.rms = std::sqrt(report.rms / static_cast<double>(out.size()));
  return report;
}

CHUNKATTN_NAMESPACE_END
