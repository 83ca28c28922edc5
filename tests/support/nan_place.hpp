// One NaN put into q, K or V, and what must become of each row and head of the output.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "attention_case.hpp"
#include "chunkattn/debug/reference.hpp"

namespace test {

/// NaNs of both signs, quiet and signalling, with and without payload.
template <class T>
T some_nan(Random& random) {
  if constexpr (std::is_same_v<T, float>) {
    constexpr std::uint32_t bits[] = {0x7fc00000u, 0xffc00000u, 0xffffffffu, 0x7f800001u};
    return std::bit_cast<float>(random.pick(bits));
  } else if constexpr (std::is_same_v<T, chunkattn::half>) {
    constexpr std::uint16_t bits[] = {0x7e00u, 0xfe00u, 0xffffu, 0x7c01u};
    return {random.pick(bits)};
  } else if constexpr (std::is_same_v<T, chunkattn::float8_e4m3>) {
    constexpr std::uint8_t bits[] = {0x7fu, 0xffu};
    return {random.pick(bits)};
  } else {
    constexpr std::uint16_t bits[] = {0x7fc0u, 0xffc0u, 0xffffu, 0x7f81u};
    return {random.pick(bits)};
  }
}

/// Where the path of `row` has `position`, as a piece of one token.
inline chunkattn::Piece place_of(const RandomPlan& plan, std::size_t row, int position) {
  for (int s = plan.row_segment[row]; s >= 0;) {
    const auto& segment = plan.segments[static_cast<std::size_t>(s)];
    for (int p = 0; p < segment.num_pieces; ++p) {
      const auto& piece = plan.pieces[static_cast<std::size_t>(segment.piece_begin + p)];
      if (position >= piece.position && position < piece.position + piece.length)
        return {piece.chunk, piece.begin + position - piece.position, 1, position};
    }
    s = segment.parent;
  }
  return {chunkattn::no_chunk, 0, 0, 0};
}

/// The same K and V in memory of their own.
template <class T>
Storage<T> copy_of(const Storage<T>& from) {
  const auto& view = from.view;
  Storage<T> copy(view.num_chunks, view.num_kv_heads, view.chunk_size, view.head_dim,
                  view.dim_of_v());
  std::copy(from.k.begin(), from.k.end(), copy.k.begin());
  std::copy(from.v.begin(), from.v.end(), copy.v.begin());
  if constexpr (chunkattn::has_row_scales<T>) {
    std::copy(from.k_scale.begin(), from.k_scale.end(), copy.k_scale.begin());
    std::copy(from.v_scale.begin(), from.v_scale.end(), copy.v_scale.begin());
  }
  return copy;
}

/// A NaN somewhere that some row sees, often at the very last position that it sees.
struct NanPlace {
  enum Where { q, k, v };

  Where where;
  std::size_t row;        ///< a row that sees it; for q the only one
  chunkattn::Piece slot;  ///< the token, for K and V
  int head;               ///< query head, or KV head for K and V
  int element;            ///< the only one, or -1: the whole row

  /// Puts the NaN there.
  /// \param queries  [num_rows][num_qo_heads][head_dim]
  template <class T, class X>
  NanPlace(Random& random, Where where_, const RandomPlan& plan, const chunkattn::KvView<T>& kv,
           std::span<X> queries)
      : where(where_), row(random.index(plan.row_token.size())) {
    const auto dim = static_cast<std::size_t>(kv.head_dim);
    const std::size_t qo_heads = queries.size() / plan.row_token.size() / dim;
    const int kv_len = plan.row_kv_len[row];
    slot = place_of(plan, row, random.chance(0.5) ? kv_len - 1 : random.uniform(0, kv_len - 1));
    head = random.uniform(0, where == q ? static_cast<int>(qo_heads) - 1 : kv.num_kv_heads - 1);
    const int elements = where == v ? kv.dim_of_v() : kv.head_dim;
    element = random.chance(0.5) ? -1 : random.uniform(0, elements - 1);
    if (where == q) {
      const std::size_t line =
          static_cast<std::size_t>(plan.row_token[row]) * qo_heads + static_cast<std::size_t>(head);
      fill(random, &queries[line * dim], elements);
      return;
    }
    if constexpr (chunkattn::has_row_scales<T>) {
      if (std::is_same_v<T, std::int8_t> ||
          random.chance(0.5)) {  // the scale stands for the whole row
        element = -1;
        *(where == k ? kv.k_row_scale(slot.chunk, head, slot.begin)
                     : kv.v_row_scale(slot.chunk, head, slot.begin)) = some_nan<float>(random);
        return;
      }
    }
    if constexpr (!std::is_same_v<T, std::int8_t>)
      fill(random,
           where == k ? kv.k_row(slot.chunk, head, slot.begin)
                      : kv.v_row(slot.chunk, head, slot.begin),
           elements);
  }

  /// Whether query head `qo_head` of row `r` sees it.
  [[nodiscard]] bool reaches(const RandomPlan& plan, std::size_t r, int qo_head, int group) const {
    if (where == q) return r == row && qo_head == head;
    if (qo_head / group != head || slot.position >= plan.row_kv_len[r]) return false;
    const chunkattn::Piece other = place_of(plan, r, slot.position);
    return other.chunk == slot.chunk && other.begin == slot.begin;
  }

 private:
  template <class E>
  void fill(Random& random, E* values, int count) const {
    for (int i = 0; i < count; ++i)
      if (element < 0 || i == element) values[i] = some_nan<E>(random);
  }
};

/// How many elements of an answer are wrong: NaN where the NaN does not reach and then some number
/// outside the bounds of the clean problem's oracle, or a number where it does.
template <class X>
int wrong_elements(const NanPlace& nan, const RandomPlan& plan, const chunkattn::Reference& clean,
                   int num_kv_heads, std::span<const X> out, std::span<const float> lse,
                   chunkattn::Rounding rounding = {}) {
  int wrong = 0;
  const auto check = [&](double got, bool want_nan, double expected, double bound) {
    const bool right = want_nan ? std::isnan(got) : std::abs(got - expected) <= bound;
    wrong += right ? 0 : 1;
  };
  const int group = clean.num_qo_heads / num_kv_heads;
  for (std::size_t r = 0; r < plan.row_token.size(); ++r) {
    for (int h = 0; h < clean.num_qo_heads; ++h) {
      const bool reached = nan.reaches(plan, r, h, group);
      const std::size_t line = static_cast<std::size_t>(plan.row_token[r]) *
                                   static_cast<std::size_t>(clean.num_qo_heads) +
                               static_cast<std::size_t>(h);
      check(static_cast<double>(lse[line]), reached && nan.where != NanPlace::v, clean.lse[line],
            clean.lse_bound(line, rounding));
      for (int d = 0; d < clean.value_dim; ++d) {
        const std::size_t at =
            line * static_cast<std::size_t>(clean.value_dim) + static_cast<std::size_t>(d);
        const bool hit = nan.where != NanPlace::v || nan.element < 0 || nan.element == d;
        check(static_cast<double>(chunkattn::to_float(out[at])), reached && hit, clean.out[at],
              clean.bound(at, chunkattn::unit_roundoff<X>(), rounding));
      }
    }
  }
  return wrong;
}

/// How many rows and heads that the NaN does not reach have other bits than without it.
template <class X>
int changed_lines(const NanPlace& nan, const RandomPlan& plan, int num_kv_heads, int num_qo_heads,
                  int head_dim, std::span<const X> before, std::span<const X> after) {
  int changed = 0;
  for (std::size_t r = 0; r < plan.row_token.size(); ++r) {
    for (int h = 0; h < num_qo_heads; ++h) {
      if (nan.reaches(plan, r, h, num_qo_heads / num_kv_heads)) continue;
      const std::size_t line =
          static_cast<std::size_t>(plan.row_token[r]) * static_cast<std::size_t>(num_qo_heads) +
          static_cast<std::size_t>(h);
      const auto dim = static_cast<std::size_t>(head_dim);
      changed += std::memcmp(&before[line * dim], &after[line * dim], dim * sizeof(X)) != 0 ? 1 : 0;
    }
  }
  return changed;
}

}  // namespace test
