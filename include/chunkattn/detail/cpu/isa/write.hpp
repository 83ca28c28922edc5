// Storing new K and V rows, and the row copies that a fork asks for.
#ifndef CHUNKATTN_ISA_WRITE
#define CHUNKATTN_ISA_WRITE

#include "elements.hpp"
#include "pass.hpp"
#include "simd.hpp"

CHUNKATTN_PASS_BEGIN(VECTORS)

/// Stores one K or V row as T, rounding to nearest even. Equal types are copied bit for bit.
template <int Dim, class T, class X>
CHUNKATTN_INLINE void store_row(const X* from, T* to) noexcept {
  if constexpr (std::is_same_v<T, X>) {
    std::memcpy(to, from, Dim * sizeof(T));
  } else {
    constexpr int width = simd::width_for<Dim>;
    for (int i = 0; i < Dim; i += width)
      simd::store_narrowed<width>(to + i, simd::load_widened<width>(from + i));
  }
}

/// The same in 8 bits; returns the row's scale.
template <int Dim, class T, class X>
CHUNKATTN_INLINE float store_scaled_row(const X* from, T* to) noexcept {
  alignas(64) float row[to_size(Dim)];
  store_row<Dim>(from, row);
  return quantize_row(row, Dim, to);
}

/// Stores K of one token for one KV head.
/// \param k  [HeadDim] of that token and head
template <int HeadDim, class T, class X>
void write_k(const KvView<T>& kv, const WriteTarget& target, int kv_head, const X* k) noexcept {
  T* const to = kv.k_row(target.chunk, kv_head, target.offset);
  if constexpr (has_row_scales<T>)
    *kv.k_row_scale(target.chunk, kv_head, target.offset) = store_scaled_row<HeadDim>(k, to);
  else
    store_row<HeadDim>(k, to);
}

/// Stores V of one token for one KV head.
/// \param v  [ValueDim] of that token and head
template <int ValueDim, class T, class X>
void write_v(const KvView<T>& kv, const WriteTarget& target, int kv_head, const X* v) noexcept {
  T* const to = kv.v_row(target.chunk, kv_head, target.offset);
  if constexpr (has_row_scales<T>)
    *kv.v_row_scale(target.chunk, kv_head, target.offset) = store_scaled_row<ValueDim>(v, to);
  else
    store_row<ValueDim>(v, to);
}

/// Performs one row copy for one KV head.
template <int HeadDim, int ValueDim, class T>
void copy_rows(const KvView<T>& kv, const RowCopy& copy, int kv_head) noexcept {
  for (int i = 0; i < copy.length; ++i) {
    const int from = copy.source_begin + i;
    const int to = copy.target_begin + i;
    std::memmove(kv.k_row(copy.target_chunk, kv_head, to),
                 kv.k_row(copy.source_chunk, kv_head, from), HeadDim * sizeof(T));
    std::memmove(kv.v_row(copy.target_chunk, kv_head, to),
                 kv.v_row(copy.source_chunk, kv_head, from), ValueDim * sizeof(T));
    if constexpr (has_row_scales<T>) {
      *kv.k_row_scale(copy.target_chunk, kv_head, to) =
          *kv.k_row_scale(copy.source_chunk, kv_head, from);
      *kv.v_row_scale(copy.target_chunk, kv_head, to) =
          *kv.v_row_scale(copy.source_chunk, kv_head, from);
    }
  }
}

/// Performs the plan's row copies, then stores K and V of its query tokens; K alone if v has
/// no memory.
template <int HeadDim, int ValueDim, class T, class K, class V>
void write_rows(const ExecutorRef& executor, const KvView<T>& layer, const PlanView& plan,
                const HeadRows<const K>& k, const HeadRows<const V>& v) {
  const int heads = layer.num_kv_heads;
  if (plan.num_copies > 0) {
    executor.parallel_for(heads, [&](int head) {
      for (int c = 0; c < plan.num_copies; ++c)
        copy_rows<HeadDim, ValueDim>(layer, plan.copies[c], head);
    });
  }
  constexpr int part_rows = 8;  // small enough to balance, large enough to be worth a call
  const int parts = (plan.num_rows + part_rows - 1) / part_rows;
  executor.parallel_for(parts, [&](int part) {
    const int end = (std::min)(plan.num_rows, (part + 1) * part_rows);
    for (int row = part * part_rows; row < end; ++row) {
      const WriteTarget& target = plan.writes[row];
      if (target.chunk == no_chunk) continue;
      const K* key = k.row(row, 0);
      const V* value = v.row(row, 0);
      for (int head = 0; head < heads; ++head) {
        write_k<HeadDim>(layer, target, head, key);
        if (v.data != nullptr) write_v<ValueDim>(layer, target, head, value);
        key += k.stride_head;
        value += v.stride_head;
      }
    }
  });
}

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_WRITE
