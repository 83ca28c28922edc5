// K/V of new tokens stored in 8 bits, a warp for each row, and row copies of forks with their
// scales.
#pragma once

#include "../../kv_view.hpp"
#include "write.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

template <class E, class T>
struct WriteQuantizedArguments {
  PlanMemory plan;
  KvView<E> kv;
  const T* k;  ///< [num_rows][num_kv_heads][head_dim], the caller's order
  const T* v;  ///< [num_rows][num_kv_heads][value_dim], the caller's order
};

/// What quantize_row() does, by the lanes of a warp: the same bits.
template <class E, class T>
CHUNKATTN_DEVICE void quantize_by_warp(const T* from, int count, E* to, float* scale) {
  const int lane = ptx::thread_index() % 32;
  std::uint32_t largest = 0;
  for (int i = lane; i < count; i += 32) {
    const std::uint32_t size = bit_cast<std::uint32_t>(to_float(from[i])) & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  largest = static_cast<std::uint32_t>(most_of_warp(static_cast<int>(largest)));
  const bool number = largest > 0 && largest < 0x7f800000u;
  constexpr float most = largest_stored<E>;
  constexpr float smallest = most * 0x1p-126f;
  const float size = bit_cast<float>(largest);
  const float reach = size > smallest ? size : smallest;
  const float inverse = most / reach;
  for (int i = lane; i < count; i += 32) {
    E stored{};
    if (number) store_nearest(to_float(from[i]) * inverse, stored);
    to[i] = stored;
  }
  if (lane == 0)
    *scale = number ? reach / most : largest == 0 ? 0.0f : bit_cast<float>(0x7fc00000u);
}

/// Performs one row copy for one KV head, by the whole block.
template <class E>
CHUNKATTN_DEVICE void copy_scales(const KvView<E>& kv, const RowCopy& copy, int head) {
  for (int row = ptx::thread_index(); row < copy.length; row += small_threads) {
    const int from = copy.source_begin + row;
    const int to = copy.target_begin + row;
    *kv.k_row_scale(copy.target_chunk, head, to) = *kv.k_row_scale(copy.source_chunk, head, from);
    *kv.v_row_scale(copy.target_chunk, head, to) = *kv.v_row_scale(copy.source_chunk, head, from);
  }
}

/// Stores K and V of the plan's tokens and performs its row copies, in any order, as write_kernel
/// does. A warp takes a (token, KV head, K or V) triple.
template <class E, class T>
CHUNKATTN_KERNEL write_quantized_kernel(const WriteQuantizedArguments<E, T> args) {
  const int heads = args.kv.num_kv_heads;
  const int rows = args.k != nullptr ? args.plan.header->num_rows : 0;
  const auto items = static_cast<std::uint32_t>(rows * heads) * 2;
  const int warps = small_threads / 32;
  auto item = static_cast<std::uint32_t>(ptx::block_index() * warps + ptx::thread_index() / 32);
  for (; item < items; item += static_cast<std::uint32_t>(ptx::grid_size() * warps)) {
    const std::uint32_t line = item / 2;
    const WriteTarget target = args.plan.writes[line / static_cast<std::uint32_t>(heads)];
    if (target.chunk == no_chunk) continue;
    const int head = static_cast<int>(line % static_cast<std::uint32_t>(heads));
    if (item % 2 == 0)
      quantize_by_warp(args.k + std::int64_t{line} * args.kv.head_dim, args.kv.head_dim,
                       args.kv.k_row(target.chunk, head, target.offset),
                       args.kv.k_row_scale(target.chunk, head, target.offset));
    else
      quantize_by_warp(args.v + std::int64_t{line} * args.kv.dim_of_v(), args.kv.dim_of_v(),
                       args.kv.v_row(target.chunk, head, target.offset),
                       args.kv.v_row_scale(target.chunk, head, target.offset));
  }
  const int copies = args.plan.header->num_copies * heads;
  for (int i = ptx::block_index(); i < copies; i += ptx::grid_size()) {
    copy_rows(args.kv, args.plan.copies[i / heads], i % heads);
    copy_scales(args.kv, args.plan.copies[i / heads], i % heads);
  }
}

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
