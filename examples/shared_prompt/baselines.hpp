// Baselines. All of them read the same K/V values and answer the same queries.
//
// - naive: K/V of each sequence dense, [sequence][head][token][head_dim], no sharing; scores, then
//   softmax, then the weighted sum, each a pass of its own.
// - paged, nothing shared: the library's own sequence-first kernel over the same memory seen as
//   pages. Each sequence has pages of its own; a head's tokens are contiguous.
// - paged, shared pages (the paper's PagedAttn*): the same kernel over the pages of the prefix
// tree:
//   memory is shared, but every sequence reads the shared pages for itself.
//
// The paged ones differ from ours by the plan alone: one segment for each row, never shared.
#pragma once

#include <algorithm>
#include <bit>
#include <chunkattn/chunkattn.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "../support/huge_buffer.hpp"
#include "../support/machine_limits.hpp"

namespace shared_prompt {

/// A plan of no tree's step.
struct OwnedPlan : chunkattn::PlanView::Arrays {
  [[nodiscard]] chunkattn::LiveView view() const {
    return chunkattn::LiveView::unchecked(Arrays::view());
  }
};

/// The pieces of one row's path from the root on, cut to what the row sees; neighbours inside a
/// chunk are joined.
inline std::vector<chunkattn::Piece> path_pieces(const chunkattn::PlanView& plan, int row) {
  std::vector<std::int32_t> path;
  for (std::int32_t s = plan.row_segment[row]; s >= 0; s = plan.segments[s].parent)
    path.push_back(s);
  std::reverse(path.begin(), path.end());
  std::vector<chunkattn::Piece> pieces;
  for (const std::int32_t s : path)
    for (std::int32_t i = 0; i < plan.segments[s].num_pieces; ++i) {
      chunkattn::Piece piece = plan.pieces[plan.segments[s].piece_begin + i];
      piece.length = chunkattn::visible_length(piece, plan.row_kv_len[row]);
      if (piece.length == 0) continue;
      if (!pieces.empty() && pieces.back().chunk == piece.chunk &&
          pieces.back().begin + pieces.back().length == piece.begin)
        pieces.back().length += piece.length;
      else
        pieces.push_back(piece);
    }
  return pieces;
}

/// One unshared segment for each of the rows [first, first + count) of `plan`.
template <class PiecesOfRow>
OwnedPlan unshared_plan(const chunkattn::PlanView& plan, int first, int count,
                        std::uint64_t segments_version, PiecesOfRow&& pieces_of_row) {
  OwnedPlan out;
  out.chunk_size = plan.chunk_size;
  out.segments_version = out.pieces_version = segments_version;
  for (int i = 0; i < count; ++i) {
    const std::vector<chunkattn::Piece> pieces = pieces_of_row(first + i);
    const std::int32_t kv_len = plan.row_kv_len[first + i];
    out.segments.push_back({.row_begin = i,
                            .row_end = i + 1,
                            .piece_begin = static_cast<std::int32_t>(out.pieces.size()),
                            .num_pieces = static_cast<std::int32_t>(pieces.size()),
                            .position = 0,
                            .length = kv_len,
                            .parent = -1,
                            .num_sequences = 1});
    for (const chunkattn::Piece& piece : pieces) out.pieces.push_back(piece);
    out.row_token.push_back(count == plan.num_rows ? plan.row_token[first + i] : i);
    out.row_kv_len.push_back(kv_len);
    out.row_segment.push_back(i);
    out.writes.push_back({chunkattn::no_chunk, 0});
  }
  return out;
}

/// "paged, shared pages": the chunks of the tree, each sequence by itself.
inline OwnedPlan shared_pages_plan(const chunkattn::PlanView& plan) {
  return unshared_plan(plan, 0, plan.num_rows, 1, [&](int row) { return path_pieces(plan, row); });
}

/// K and V of every row's path copied out: [row][kv_head][token][head_dim] for K, and for V.
template <class T>
class DenseKv {
 public:
  template <class Exec>
  DenseKv(Exec& executor, const chunkattn::KvView<T>& kv, const chunkattn::PlanView& plan)
      : rows_(plan.num_rows),
        heads_(kv.num_kv_heads),
        head_dim_(kv.head_dim),
        chunk_size_(plan.chunk_size),
        kv_len_(plan.row_kv_len, plan.row_kv_len + plan.num_rows) {
    const int longest = *std::max_element(kv_len_.begin(), kv_len_.end());
    chunks_ = (longest + chunk_size_ - 1) / chunk_size_;
    memory_ = examples::HugeBuffer(2 * tensor_size() * sizeof(T));
    k_ = memory_.as<T>();
    v_ = k_ + tensor_size();
    executor.parallel_for(rows_ * heads_, [&](int i) {
      const int row = i / heads_, head = i % heads_;
      for (const chunkattn::Piece& piece : path_pieces(plan, row)) {
        const std::size_t bytes = static_cast<std::size_t>(piece.length * head_dim_) * sizeof(T);
        const std::size_t to = offset(row, head, piece.position);
        std::memcpy(k_ + to, kv.k_row(piece.chunk, head, piece.begin), bytes);
        std::memcpy(v_ + to, kv.v_row(piece.chunk, head, piece.begin), bytes);
      }
    });
    const int per_row = static_cast<int>(std::bit_ceil(static_cast<unsigned>(chunks_)));
    slab_shift_ = std::countr_zero(static_cast<unsigned>(per_row));
    for (int row = 0; row < rows_; ++row) {
      k_slabs_.push_back(k_ + offset(row, 0, 0));
      v_slabs_.push_back(v_ + offset(row, 0, 0));
    }
  }

  [[nodiscard]] const T* k_head(int row, int head) const { return k_ + offset(row, head, 0); }
  [[nodiscard]] const T* v_head(int row, int head) const { return v_ + offset(row, head, 0); }
  [[nodiscard]] std::size_t bytes() const { return memory_.bytes(); }
  [[nodiscard]] const char* data() const { return memory_.as<char>(); }

  /// The same memory as pages: page j of row r is chunk r * 2^slab_shift + j.
  [[nodiscard]] chunkattn::KvView<T> paged_view() {
    chunkattn::KvView<T> view;
    view.k_slabs = k_slabs_.data();
    view.v_slabs = v_slabs_.data();
    view.slab_shift = slab_shift_;
    view.num_chunks = rows_ << slab_shift_;
    view.num_kv_heads = heads_;
    view.head_dim = head_dim_;
    view.chunk_size = chunk_size_;
    view.stride_token = head_dim_;
    view.stride_chunk = view.stride_token * chunk_size_;
    view.stride_head = view.stride_chunk * chunks_;
    return view;
  }

  [[nodiscard]] OwnedPlan paged_plan(const chunkattn::PlanView& plan) const {
    return unshared_plan(plan, 0, plan.num_rows, 2, [&](int row) {
      std::vector<chunkattn::Piece> pieces;
      const std::int32_t kv_len = kv_len_[static_cast<std::size_t>(row)];
      for (std::int32_t at = 0; at < kv_len; at += chunk_size_)
        pieces.push_back({.chunk = (row << slab_shift_) + at / chunk_size_,
                          .begin = 0,
                          .length = std::min(chunk_size_, kv_len - at),
                          .position = at});
      return pieces;
    });
  }

 private:
  [[nodiscard]] std::size_t tensor_size() const { return offset(rows_, 0, 0); }
  [[nodiscard]] std::size_t offset(int row, int head, int token) const {
    const auto tokens = static_cast<std::size_t>(chunks_ * chunk_size_);
    return ((static_cast<std::size_t>(row) * static_cast<std::size_t>(heads_) +
             static_cast<std::size_t>(head)) *
                tokens +
            static_cast<std::size_t>(token)) *
           static_cast<std::size_t>(head_dim_);
  }

  std::int32_t rows_, heads_, head_dim_, chunk_size_;
  std::vector<std::int32_t> kv_len_;
  std::int32_t chunks_ = 0, slab_shift_ = 0;
  examples::HugeBuffer memory_;
  T *k_ = nullptr, *v_ = nullptr;
  std::vector<T*> k_slabs_, v_slabs_;
};

namespace detail {

/// A register of elements as floats, converted the way the machine does it best.
template <class T>
examples::FloatLanes load_lanes(const T* from) {
  examples::FloatLanes lanes;
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(&lanes, from, sizeof lanes);
  } else if constexpr (std::is_same_v<T, chunkattn::bfloat16>) {
    using Bits = std::uint16_t __attribute__((vector_size(examples::vector_bytes / 2)));
    using Words = std::uint32_t __attribute__((vector_size(examples::vector_bytes)));
    Bits bits;
    std::memcpy(&bits, from, sizeof bits);
    const Words words = __builtin_convertvector(bits, Words) << 16;
    std::memcpy(&lanes, &words, sizeof lanes);
  } else {
#if defined(__AVX512F__)
    __m256i bits;
    std::memcpy(&bits, from, sizeof bits);
    const __m512 floats = _mm512_maskz_cvtph_ps(0xffff, bits);
    std::memcpy(&lanes, &floats, sizeof lanes);
#elif defined(__F16C__)
    __m128i bits;
    std::memcpy(&bits, from, sizeof bits);
    const __m256 floats = _mm256_cvtph_ps(bits);
    std::memcpy(&lanes, &floats, sizeof lanes);
#else
    for (std::size_t i = 0; i < examples::num_lanes; ++i) lanes[i] = chunkattn::to_float(from[i]);
#endif
  }
  return lanes;
}

/// One query over one dense head: three passes. head_dim = HeadDim, a multiple of 16.
template <int HeadDim, class T>
void naive_head(const float* q, const T* k, const T* v, std::size_t kv_len, float sm_scale,
                float* weights, float* out) {
  constexpr std::size_t parts = HeadDim / examples::num_lanes, together = 4;
  using Lanes = examples::FloatLanes;
  const auto dot = [&](const T* row) {
    Lanes sums[2] = {};
    for (std::size_t i = 0; i < parts; ++i)
      sums[i % 2] +=
          load_lanes(q + i * examples::num_lanes) * load_lanes(row + i * examples::num_lanes);
    return Lanes(sums[0] + sums[1]);
  };
  const auto add_up = [](Lanes lanes) {
    float sum = 0;
    for (std::size_t i = 0; i < examples::num_lanes; ++i) sum += lanes[i];
    return sum;
  };
  std::size_t t = 0;
  for (; t + together <= kv_len; t += together) {
    Lanes sums[together];
    for (std::size_t j = 0; j < together; ++j) {
      __builtin_prefetch(k + (t + j) * HeadDim + 4096 / sizeof(T), 0, 2);
      sums[j] = dot(k + (t + j) * HeadDim);
    }
    for (std::size_t j = 0; j < together; ++j) weights[t + j] = add_up(sums[j]) * sm_scale;
  }
  for (; t < kv_len; ++t) weights[t] = add_up(dot(k + t * HeadDim)) * sm_scale;

  float largest = weights[0], sum = 0;
  for (t = 1; t < kv_len; ++t) largest = std::max(largest, weights[t]);
  for (t = 0; t < kv_len; ++t) sum += weights[t] = std::exp(weights[t] - largest);

  Lanes accumulated[parts] = {};
  for (t = 0; t < kv_len; ++t)
    for (std::size_t i = 0; i < parts; ++i)
      accumulated[i] += load_lanes(v + t * HeadDim + i * examples::num_lanes) * weights[t];
  for (std::size_t i = 0; i < parts; ++i) {
    const Lanes scaled = accumulated[i] * (1.0f / sum);
    std::memcpy(out + i * examples::num_lanes, &scaled, sizeof scaled);
  }
}

}  // namespace detail

/// Three passes for each (row, query head). q, out: [tokens][num_qo_heads][HeadDim], the caller's
/// order.
template <int HeadDim, class Exec, class T>
void naive_attention(Exec& executor, const DenseKv<T>& kv, const chunkattn::PlanView& plan,
                     int num_qo_heads, int num_kv_heads, std::span<const float> q,
                     std::span<float> out) {
  const float sm_scale = 1.0f / std::sqrt(static_cast<float>(HeadDim));
  executor.parallel_for(plan.num_rows * num_kv_heads, [&](int i) {
    thread_local std::vector<float> weights;
    const int row = i / num_kv_heads, kv_head = i % num_kv_heads;
    const int group = num_qo_heads / num_kv_heads;
    const auto kv_len = static_cast<std::size_t>(plan.row_kv_len[row]);
    if (weights.size() < kv_len) weights.resize(kv_len);
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const auto at = static_cast<std::size_t>(plan.row_token[row] * num_qo_heads + head) * HeadDim;
      detail::naive_head<HeadDim>(q.data() + at, kv.k_head(row, kv_head), kv.v_head(row, kv_head),
                                  kv_len, sm_scale, weights.data(), out.data() + at);
    }
  });
}

}  // namespace shared_prompt
