// Small kernels around attention: K/V of new tokens to their places, row copies of forks, and the
// step from one token to the next without the host.
#pragma once

#include "device_plan.hpp"
#include "locate.hpp"
#include "merge.cuh"
#include "ptx.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace cuda_detail {

inline constexpr int small_threads = 256;

/// Eight 16-bit elements: one access.
struct alignas(16) Piece16 {
  std::uint32_t words[4];
};

template <class T, class X>
struct WriteArguments {
  PlanMemory plan;
  KvView<T> kv;
  const X* k;  ///< [num_rows][num_kv_heads][head_dim], the caller's order
  const X* v;
};

template <class T, class X>
CHUNKATTN_DEVICE Piece16 read_piece(const X* from) {
  if constexpr (std::is_same_v<X, T>) {
    return *reinterpret_cast<const Piece16*>(from);
  } else {
    Piece16 piece;
    const Float4 low = reinterpret_cast<const Float4*>(from)[0];
    const Float4 high = reinterpret_cast<const Float4*>(from)[1];
    piece.words[0] = ptx::pack<T>(low.v[0], low.v[1]);
    piece.words[1] = ptx::pack<T>(low.v[2], low.v[3]);
    piece.words[2] = ptx::pack<T>(high.v[0], high.v[1]);
    piece.words[3] = ptx::pack<T>(high.v[2], high.v[3]);
    return piece;
  }
}

/// Stores K and V of the plan's tokens, one each of many sequences or runs of many. X: T or float.
template <class T, class X>
CHUNKATTN_KERNEL write_kernel(const WriteArguments<T, X> args) {
  const int pieces = args.kv.head_dim / 8;
  const int per_token = args.kv.num_kv_heads * pieces;
  const std::int64_t items = std::int64_t{args.plan.header->num_rows} * per_token;
  const int stride = ptx::grid_size() * small_threads;
  for (std::int64_t i = ptx::block_index() * small_threads + ptx::thread_index(); i < items;
       i += stride) {
    const int token = static_cast<int>(i / per_token);
    const int rest = static_cast<int>(i % per_token);
    const int head = rest / pieces;
    const int piece = rest % pieces;
    const WriteTarget target = args.plan.writes[token];
    if (target.slot == no_slot) continue;
    *reinterpret_cast<Piece16*>(args.kv.k_row(target.slot, head, target.offset) + piece * 8) =
        read_piece<T>(args.k + i * 8);
    *reinterpret_cast<Piece16*>(args.kv.v_row(target.slot, head, target.offset) + piece * 8) =
        read_piece<T>(args.v + i * 8);
  }
}

template <class T>
struct CopyArguments {
  PlanMemory plan;
  KvView<T> first;          ///< used where `layers` is null
  const KvView<T>* layers;  ///< device array of num_layers views
  std::int32_t num_layers;
};

/// Performs the plan's row copies in every layer. A block takes (copy, layer, KV head) triples.
template <class T>
CHUNKATTN_KERNEL copy_rows_kernel(const CopyArguments<T> args) {
  const int heads = args.first.num_kv_heads;
  const int pieces = args.first.head_dim / 8;
  const int items = args.plan.header->num_copies * args.num_layers * heads;
  for (int item = ptx::block_index(); item < items; item += ptx::grid_size()) {
    const int head = item % heads;
    const int layer = item / heads % args.num_layers;
    const RowCopy copy = args.plan.copies[item / heads / args.num_layers];
    const KvView<T>& kv = args.layers != nullptr ? args.layers[layer] : args.first;
    for (int i = ptx::thread_index(); i < copy.length * pieces; i += small_threads) {
      const int row = i / pieces;
      const int piece = i % pieces * 8;
      const int from = copy.source_begin + row;
      const int to = copy.target_begin + row;
      *reinterpret_cast<Piece16*>(kv.k_row(copy.target_slot, head, to) + piece) =
          *reinterpret_cast<const Piece16*>(kv.k_row(copy.source_slot, head, from) + piece);
      *reinterpret_cast<Piece16*>(kv.v_row(copy.target_slot, head, to) + piece) =
          *reinterpret_cast<const Piece16*>(kv.v_row(copy.source_slot, head, from) + piece);
    }
  }
}

/// A decode step for every row: each sees one position more and writes to the next place.
template <class = void>  // a template: the header may be in several translation units
CHUNKATTN_KERNEL advance_kernel(const PlanMemory plan) {
  const int stride = ptx::grid_size() * small_threads;
  for (int row = ptx::block_index() * small_threads + ptx::thread_index();
       row < plan.header->num_rows; row += stride) {
    const std::int32_t kv_len = plan.row_kv_len[row] + 1;
    plan.row_kv_len[row] = kv_len;
    WriteTarget& target = plan.writes[plan.row_token[row]];
    if (target.slot != no_slot)
      target = locate(plan.segments, plan.pieces, plan.row_segment[row], kv_len - 1);
  }
}

}  // namespace cuda_detail
CHUNKATTN_NAMESPACE_END
