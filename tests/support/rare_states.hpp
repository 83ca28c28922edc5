// Rare states of attention, generated: numbers that are not finite, and such that a unit's integers
// or sums do not hold, where kernels change their way: at the ends of blocks, in single lines, with
// rows of K and V anywhere in memory. Each with the oracle's answer.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "chunkattn/debug/reference.hpp"
#include "chunkattn/kv_view.hpp"
#include "nan_place.hpp"
#include "random_plan.hpp"
#include "variant_cases.hpp"

namespace test {

/// K and V whose rows lie apart or together, tokens or heads beside each other, at any element.
template <class T>
struct ScatteredStorage {
  std::vector<T> k, v;
  std::vector<float> k_scale, v_scale;
  chunkattn::KvView<T> view;

  ScatteredStorage(Random& random, int num_chunks, int num_kv_heads, int chunk_size, int head_dim,
                   int value_dim) {
    const bool heads_beside = random.chance(0.3);
    const int first = random.pick({0, 0, 1});
    const auto lay_out = [&](std::vector<T>& memory, int dim, std::int64_t& chunk,
                             std::int64_t& head, std::int64_t& token) {
      const int row = dim + random.pick({0, 0, 1, 8});
      token = heads_beside ? row * num_kv_heads : row;
      head = heads_beside ? row : row * chunk_size;
      chunk = std::int64_t{row} * num_kv_heads * chunk_size;
      memory.resize(static_cast<std::size_t>(first + num_chunks * chunk));
      std::memset(static_cast<void*>(memory.data()), 0xff,
                  memory.size() * sizeof(T));  // NaN, if there is one
      return memory.data() + first;
    };
    view.num_chunks = num_chunks;
    view.num_kv_heads = num_kv_heads;
    view.chunk_size = chunk_size;
    view.head_dim = head_dim;
    view.value_dim = value_dim;
    view.k = lay_out(k, head_dim, view.stride_chunk, view.stride_head, view.stride_token);
    view.v = lay_out(v, value_dim, view.v_stride_chunk, view.v_stride_head, view.v_stride_token);
    if constexpr (chunkattn::has_row_scales<T>) {
      view.scale_stride_head = chunk_size;
      view.scale_stride_chunk = std::int64_t{chunk_size} * num_kv_heads;
      k_scale.resize(static_cast<std::size_t>(view.scale_stride_chunk * num_chunks));
      v_scale.resize(k_scale.size());
      view.k_scale = k_scale.data();
      view.v_scale = v_scale.data();
    }
  }
};

/// A problem with some rare numbers. In one of two kinds, since 0 times infinity is NaN: if logits
/// may be infinite, V is finite; if V may be other than finite, logits are.
template <class T, class Variant>
struct RareCase {
  static constexpr bool is_int8 = std::is_same_v<T, std::int8_t>;
  static constexpr bool scaled = chunkattn::has_row_scales<T>;
  static constexpr float inf = std::numeric_limits<float>::infinity();
  static constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  static constexpr int block = 64;  // tokens that kernels take at once

  int group, num_kv_heads, head_dim;
  RandomPlan plan;
  ScatteredStorage<T> kv;
  Variant variant;
  std::vector<float> q;
  bool infinite_logits;
  bool subnormal = false;  ///< a query is, and it matters: tiles and one term take it for zero
  chunkattn::Reference reference;

  RareCase(Random& random, int head_dim_, int value_dim)
      : group(random.pick({1, 2, 5, 16, 33})),
        num_kv_heads(random.uniform(1, 2)),
        head_dim(head_dim_),
        plan(random_plan(random)),
        kv(random, plan.num_chunks, num_kv_heads, plan.chunk_size, head_dim, value_dim),
        variant(random, VariantShape{num_qo_heads()}),
        q(size(plan.num_rows()) * size(num_qo_heads()) * size(head_dim)),
        infinite_logits(random.chance(0.5)) {
    fill_kv(random, plan, kv.view);
    random.fill(std::span(q));
    if (random.chance(0.6))  // units take queries that are bfloat16 by value
      for (float& x : q) x = chunkattn::to_float(chunkattn::from_float<chunkattn::bfloat16>(x));
    if constexpr (requires { variant.definition.visible; })
      poison_hidden(plan, kv.view, group, variant.definition);
    for (int events = random.pick({0, 1, 1, 2, 4, 8}); events > 0; --events)
      infinite_logits ? change_logits(random) : change_values(random);
    if (infinite_logits && random.chance(0.3)) huge_logit(random);
    reference = chunkattn::reference_attention(kv.view, plan.view(), std::span<const float>(q), {},
                                               variant.definition);
  }

  [[nodiscard]] int num_qo_heads() const { return num_kv_heads * group; }

  /// What is wrong with an answer; nothing: it is right.
  [[nodiscard]] std::string wrong(std::span<const float> out, std::span<const float> lse,
                                  chunkattn::Rounding rounding) const {
    std::string first;
    int more = -1;
    const auto check = [&](const char* name, std::size_t i, float got_, double expected,
                           double bound) {
      const auto got = static_cast<double>(got_);
      if (std::isnan(expected)   ? std::isnan(got)
          : std::isinf(expected) ? got == expected || std::isnan(got)  // as docs/cpu.md says
                                 : std::abs(got - expected) <= bound)
        return;
      if (++more > 0) return;
      char text[200];
      std::snprintf(text, sizeof text, "%s[%zu] = %g, expected %g within %g", name, i, got,
                    expected, bound);
      first = text;
    };
    for (std::size_t i = 0; i < lse.size(); ++i)
      check("lse", i, lse[i], reference.lse[i], reference.lse_bound(i, rounding));
    for (std::size_t i = 0; i < out.size(); ++i)
      check("out", i, out[i], reference.out[i], reference.bound(i, 0x1p-24, rounding));
    return more > 0 ? first + ", and " + std::to_string(more) + " more" : first;
  }

 private:
  static std::size_t size(int count) { return static_cast<std::size_t>(count); }

  // Mostly a few tokens; some blocks and many lines; now and then a walk that is cut along KV.
  RandomPlan random_plan(Random& random) const {
    RandomPlanOptions options;
    const bool is_long = group * num_kv_heads < 6 && random.chance(0.15);
    const bool is_short = random.chance(0.6);
    options.share = random.pick({Share::none, Share::some, Share::all, Share::all});
    options.chunk_size = random.pick({1, 3, 7, 9, 16, 31, 64, 100});
    options.max_length = is_long    ? 2000 + 24000 / static_cast<int>(sizeof(T) * 4)
                         : is_short ? random.pick({3, 12, 20})
                                    : random.pick({70, 200});
    options.max_queries = is_long ? 1 : random.pick({1, 1, 5, 40});
    const int most =
        is_long ? 2 : std::max(1, (is_short ? 40 : 96) / (group * options.max_queries));
    options.num_sequences = random.uniform(1, std::min(12, most));
    RandomPlan made = make_random_plan(random, options);
    for (std::int32_t& kv_len : made.row_kv_len)  // some see less than others of their block
      if (random.chance(0.1)) kv_len = random.uniform(1, kv_len);
    return made;
  }

  // A place that some row sees, often at the end of a block or of what the row sees.
  chunkattn::Piece place(Random& random, std::size_t row) const {
    const int last = plan.row_kv_len[row] - 1;
    const int any = random.uniform(0, last);
    const int begin = any / block * block;
    return place_of(plan, row,
                    random.pick({any, begin, std::min(begin + block - 1, last), last, last}));
  }
  float* query(std::size_t row, int qo_head) {
    return &q[(size(plan.row_token[row]) * size(num_qo_heads()) + size(qo_head)) * size(head_dim)];
  }
  template <class E>
  static void put(Random& random, E* row, int dim, float value, bool whole = false) {
    for (int i = 0; i < dim; ++i)
      if (whole) row[i] = chunkattn::from_float<E>(value);
    if (!whole) row[random.uniform(0, dim - 1)] = chunkattn::from_float<E>(value);
  }
  static float sign(Random& random, float x) { return random.chance(0.5) ? x : -x; }

  // Logits that are NaN, infinite or 0, and scales.
  void change_logits(Random& random) {
    const std::size_t row = random.index(plan.row_kv_len.size());
    const int head = random.uniform(0, num_qo_heads() - 1);
    const chunkattn::Piece at = place(random, row);
    if (random.chance(0.25))
      return put(random, query(row, head), head_dim, random.pick({nan, sign(random, inf), 0.0f}),
                 random.chance(0.3));
    if constexpr (scaled) {
      float* const scale = random.chance(0.3)
                               ? kv.view.v_row_scale(at.chunk, head / group, at.begin)
                               : kv.view.k_row_scale(at.chunk, head / group, at.begin);
      *scale = random.pick({-*scale, 0.0f, 1e-42f});
      if (random.chance(0.3)) *kv.view.k_row_scale(at.chunk, head / group, at.begin) = nan;
    } else {
      const float value = random.pick({nan, -inf, -inf, inf});
      const bool everywhere = random.chance(0.2);  // all logits of a line, if its q is of one sign
      if (everywhere) query(row, head)[0] = std::abs(query(row, head)[0]) + 0.5f;
      if (everywhere)
        for (int p = 0; p < plan.row_kv_len[row]; ++p) {
          const chunkattn::Piece each = place_of(plan, row, p);
          kv.view.k_row(each.chunk, head / group, each.begin)[0] = chunkattn::from_float<T>(-inf);
        }
      else
        put(random, kv.view.k_row(at.chunk, head / group, at.begin), head_dim, value);
    }
  }
  // One that fp32 holds, but not a unit that multiplies by sm_scale later, or that takes subnormal
  // numbers for zeros.
  void huge_logit(Random& random) {
    if constexpr (!scaled && !std::is_same_v<T, chunkattn::half>) {
      const std::size_t row = random.index(plan.row_kv_len.size());
      const int head = random.uniform(0, num_qo_heads() - 1), i = random.uniform(0, head_dim - 1);
      const chunkattn::Piece at = place(random, row);
      subnormal = random.chance(0.5);
      query(row, head)[i] = sign(random, subnormal ? 0x1p-127f : 0x1.34p64f);
      kv.view.k_row(at.chunk, head / group, at.begin)[i] =
          chunkattn::from_float<T>(subnormal ? 0x1p126f : 0x1.34p64f);
    }
  }
  // Values that are not finite, queries and scales of any size.
  void change_values(Random& random) {
    const std::size_t row = random.index(plan.row_kv_len.size());
    const int head = random.uniform(0, num_qo_heads() - 1);
    const chunkattn::Piece at = place(random, row);
    if (random.chance(0.2)) {
      const float size = random.pick({0.0f, 1e-41f, 1e-35f, 1e30f});
      const bool one = random.chance(0.5);  // or all that read these keys
      for (int i = 0; i < head_dim * (one ? 1 : group); ++i)
        query(row, one ? head : head / group * group)[i] *= size;
      return;
    }
    if (random.chance(0.2)) return put(random, query(row, head), head_dim, nan);
    const float value = random.pick({nan, inf, -inf});
    if constexpr (scaled) {
      if (is_int8 || random.chance(0.5)) {
        float* const scale = kv.view.v_row_scale(at.chunk, head / group, at.begin);
        *scale = random.pick({value, value, -*scale, 0.0f, 1e-42f, 1e30f});
        const float tiny = random.pick({1e-38f, 0x1p-108f, 0x1p-107f});  // of integers' scales
        if (*scale == 1e-42f)                                            // all of the line's
          for (int p = 0; p < plan.row_kv_len[row]; ++p) {
            const chunkattn::Piece each = place_of(plan, row, p);
            *kv.view.v_row_scale(each.chunk, head / group, each.begin) *= tiny;
          }
        return;
      }
    }
    if constexpr (!is_int8)
      put(random, kv.view.v_row(at.chunk, head / group, at.begin), kv.view.dim_of_v(), value,
          random.chance(0.3));
  }
};

/// Fills the stack below the caller with NaN, where kernels have scratch, too.
[[gnu::noinline]] inline void poison_stack() {
  volatile std::uint32_t words[1 << 14];
  for (volatile std::uint32_t& word : words) word = ~0u;
}

}  // namespace test
