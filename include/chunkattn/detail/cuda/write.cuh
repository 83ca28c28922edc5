// Small kernels around attention: K/V of new tokens to their places, row copies of forks, and the
// step from one token to the next without the host.
#pragma once

#include "../../kv_view.hpp"
#include "device_plan.hpp"
#include "ptx.cuh"
#include "tile_layout.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

inline constexpr int small_threads = 256;

template <class T>
struct WriteArguments {
  PlanMemory plan;
  KvView<T> kv;
  const T* k;  ///< [num_rows][num_kv_heads][head_dim], the caller's order
  const T* v;  ///< [num_rows][num_kv_heads][value_dim], the caller's order
};

/// Elements of the 16 bytes that a thread moves at a time.
template <class T>
inline constexpr int piece_elements = 16 / static_cast<int>(sizeof(T));
template <class T>
CHUNKATTN_DEVICE void copy_piece(T* to, const T* from) {
  *reinterpret_cast<Words4*>(to) = *reinterpret_cast<const Words4*>(from);
}

/// Pieces of the longer of a token's two rows.
template <class T>
CHUNKATTN_DEVICE int most_pieces(const KvView<T>& kv) {
  return (kv.head_dim > kv.dim_of_v() ? kv.head_dim : kv.dim_of_v()) / piece_elements<T>;
}

/// Performs one row copy for one KV head, by the whole block.
template <class T>
CHUNKATTN_DEVICE void copy_rows(const KvView<T>& kv, const RowCopy& copy, int head) {
  const int pieces = most_pieces(kv);
  for (int i = ptx::thread_index(); i < copy.length * pieces; i += small_threads) {
    const int row = i / pieces;
    const int piece = i % pieces * piece_elements<T>;
    const int from = copy.source_begin + row;
    const int to = copy.target_begin + row;
    if (piece < kv.head_dim)
      copy_piece(kv.k_row(copy.target_chunk, head, to) + piece,
                 kv.k_row(copy.source_chunk, head, from) + piece);
    if (piece < kv.dim_of_v())
      copy_piece(kv.v_row(copy.target_chunk, head, to) + piece,
                 kv.v_row(copy.source_chunk, head, from) + piece);
  }
}

/// (token, KV head) pairs whose K and V one block stores at a time. `dim`: elements of the longer
/// one.
CHUNKATTN_HD constexpr int written_lines(int dim) noexcept {
  return small_threads / (dim / 8);
}

/// Stores K and V of the plan's tokens, one each of many sequences or runs of many, and performs
/// the plan's row copies. In any order: no row that is copied from or to is one that the step
/// writes.
template <class T>
CHUNKATTN_KERNEL write_kernel(const WriteArguments<T> args) {
  const int heads = args.kv.num_kv_heads;
  const int pieces = most_pieces(args.kv);
  const int lines_per_block = written_lines(pieces * 8);
  const int own_line = ptx::thread_index() / pieces;
  const int piece = ptx::thread_index() % pieces;
  // Lines fit 32 bits, one step beyond the last of them 32 without a sign.
  const int rows = args.k != nullptr ? args.plan.header->num_rows : 0;
  const auto lines = static_cast<std::uint32_t>(rows * heads);
  const auto stride = static_cast<std::uint32_t>(ptx::grid_size() * lines_per_block);
  auto line = static_cast<std::uint32_t>(ptx::block_index() * lines_per_block + own_line);
  if (own_line >= lines_per_block) line = lines;  // threads left over
  for (; line < lines; line += stride) {
    const WriteTarget target = args.plan.writes[line / static_cast<std::uint32_t>(heads)];
    if (target.chunk == no_chunk) continue;
    const int head = static_cast<int>(line % static_cast<std::uint32_t>(heads));
    const auto store = [&](T* to, const T* from, int dim) {
      if (piece * 8 < dim) copy_piece(to + piece * 8, from + std::int64_t{line} * dim + piece * 8);
    };
    store(args.kv.k_row(target.chunk, head, target.offset), args.k, args.kv.head_dim);
    store(args.kv.v_row(target.chunk, head, target.offset), args.v, args.kv.dim_of_v());
  }
  const int copies = args.plan.header->num_copies * heads;
  for (int i = ptx::block_index(); i < copies; i += ptx::grid_size())
    copy_rows(args.kv, args.plan.copies[i / heads], i % heads);
}

/// What comes before a step's launches. The tickets are to be zero: if launches have left others,
/// flags of the last one's number mean nothing, and none may have it again. With `Advance` a decode
/// step for every row: each sees one position more and writes to the next place.
template <bool Advance>
CHUNKATTN_KERNEL begin_step_kernel(const PlanMemory plan) {
  if (ptx::block_index() == 0 && ptx::thread_index() == 0 &&
      (plan.counters->next != 0 || plan.counters->left != 0)) {
    *plan.overlapped = 1;
    *plan.counters = {0, 0, plan.counters->launches + 1};
  }
  if constexpr (!Advance) return;
  const int stride = ptx::grid_size() * small_threads;
  for (int row = ptx::block_index() * small_threads + ptx::thread_index();
       row < plan.header->num_rows; row += stride) {
    const std::int32_t kv_len = plan.row_kv_len[row] + 1;
    plan.row_kv_len[row] = kv_len;
    WriteTarget& target = plan.writes[plan.row_token[row]];
    if (target.chunk != no_chunk)
      target = locate(plan.segments, plan.pieces, plan.row_segment[row], kv_len - 1);
  }
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
