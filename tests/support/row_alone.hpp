// A row of a plan by itself, for tests of Reduce::batch_invariant.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "attention_case.hpp"
#include "random.hpp"

namespace test {

template <class T>
void copy_row(const chunkattn::KvView<T>& from, int from_chunk, int from_offset,
              const chunkattn::KvView<T>& to, int to_chunk, int to_offset) {
  const auto k_bytes = static_cast<std::size_t>(from.head_dim) * sizeof(T);
  const auto v_bytes = static_cast<std::size_t>(from.dim_of_v()) * sizeof(T);
  for (int head = 0; head < from.num_kv_heads; ++head) {
    std::memcpy(to.k_row(to_chunk, head, to_offset), from.k_row(from_chunk, head, from_offset),
                k_bytes);
    std::memcpy(to.v_row(to_chunk, head, to_offset), from.v_row(from_chunk, head, from_offset),
                v_bytes);
    if constexpr (chunkattn::has_row_scales<T>) {
      *to.k_row_scale(to_chunk, head, to_offset) = *from.k_row_scale(from_chunk, head, from_offset);
      *to.v_row_scale(to_chunk, head, to_offset) = *from.v_row_scale(from_chunk, head, from_offset);
    }
  }
}

/// One row of a plan by itself: a plan of one row, with a copy of the K and V that it sees.
template <class T>
struct RowAlone {
  chunkattn::PlanView::Arrays plan;
  Storage<T> kv;

  RowAlone(Random& random, const chunkattn::PlanView& all, const chunkattn::KvView<T>& from,
           int row)
      : RowAlone(random, all, from, row, random.pick({7, 16, 64, 100})) {}

 private:
  RowAlone(Random& random, const chunkattn::PlanView& all, const chunkattn::KvView<T>& from,
           int row, int chunk_size)
      : kv(all.row_kv_len[row] / chunk_size + 2, from.num_kv_heads, chunk_size, from.head_dim,
           from.dim_of_v()) {
    const int kv_len = all.row_kv_len[row];
    for (std::int32_t s = all.row_segment[row]; s >= 0; s = all.segments[s].parent) {
      const chunkattn::PlanView::Segment& segment = all.segments[s];
      for (int p = 0; p < segment.num_pieces; ++p) {
        const chunkattn::Piece& piece = all.pieces[segment.piece_begin + p];
        for (int t = 0; t < chunkattn::visible_length(piece, kv_len); ++t) {
          const int at = piece.position + t;
          copy_row(from, piece.chunk, piece.begin + t, kv.view, at / chunk_size, at % chunk_size);
        }
      }
    }
    // As one segment, or cut somewhere else.
    for (int begin = 0; begin < kv_len;) {
      const int end = random.chance(0.5) ? kv_len : random.uniform(begin + 1, kv_len);
      const auto piece_begin = static_cast<std::int32_t>(plan.pieces.size());
      for (int at = begin; at < end;) {
        const int count = std::min(end - at, chunk_size - at % chunk_size);
        plan.pieces.push_back({at / chunk_size, at % chunk_size, count, at});
        at += count;
      }
      const auto above = static_cast<std::int32_t>(plan.segments.size()) - 1;
      plan.segments.push_back({0, 1, piece_begin,
                               static_cast<std::int32_t>(plan.pieces.size()) - piece_begin, begin,
                               end - begin, above, 1});
      begin = end;
    }
    plan.chunk_size = chunk_size;
    plan.row_token.push_back(0);
    plan.row_kv_len.push_back(kv_len);
    plan.row_segment.push_back(static_cast<std::int32_t>(plan.segments.size()) - 1);
    plan.writes.push_back({chunkattn::no_chunk, 0});
  }
};

template <class T>
bool same_bits(std::span<const T> a, std::span<const T> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

}  // namespace test
