// KvView: where the K and V of one layer lie. It owns nothing; our KvCache is one provider, an
// engine's own memory another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../base/config.hpp"
#include "../base/element.hpp"
#include "../base/error.hpp"
#include "../base/slot.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// The K and V rows of one layer, [slot][kv_head][token][head_dim] up to strides (in elements; the
/// innermost is 1). With `k_slabs` the slots lie in slabs of 2^slab_shift slots each, so that a
/// growing pool never moves one; without, slot s starts at k + s * stride_slot.
template <class T>
struct KvView {
  T* k = nullptr;                 ///< K of slot 0, unless in slabs
  T* v = nullptr;                 ///< V of slot 0, unless in slabs
  T* const* k_slabs = nullptr;    ///< first K element of each slab, or null
  T* const* v_slabs = nullptr;    ///< first V element of each slab, or null
  std::int32_t slab_shift = 0;    ///< log2 of the slots per slab
  std::int32_t num_slots = 0;     ///< slots that have memory
  std::int32_t num_kv_heads = 0;  ///< heads of K and of V
  std::int32_t head_dim = 0;      ///< elements per row
  std::int32_t chunk_size = 0;    ///< tokens per slot
  std::int64_t stride_slot = 0;   ///< elements from a slot to the next
  std::int64_t stride_head = 0;   ///< elements from a KV head to the next
  std::int64_t stride_token = 0;  ///< elements from a token to the next

  /// First element of K of (slot, kv_head, token).
  [[nodiscard]] CHUNKATTN_HD T* k_row(SlotIndex slot, int kv_head, int token) const noexcept {
    return slot_base(k, k_slabs, slot) + kv_head * stride_head + token * stride_token;
  }
  /// First element of V of (slot, kv_head, token).
  [[nodiscard]] CHUNKATTN_HD T* v_row(SlotIndex slot, int kv_head, int token) const noexcept {
    return slot_base(v, v_slabs, slot) + kv_head * stride_head + token * stride_token;
  }

 private:
  [[nodiscard]] CHUNKATTN_HD T* slot_base(T* base, T* const* slabs, SlotIndex slot) const noexcept {
    if (slabs == nullptr) return base + slot * stride_slot;
    const std::int32_t mask = (std::int32_t{1} << slab_shift) - 1;
    return slabs[slot >> slab_shift] + (slot & mask) * stride_slot;
  }
};

/// The most query heads of a call: what is counted per row and head then stays within 32 bits.
inline constexpr int max_qo_heads = 1 << 16;

namespace detail {

/// The query heads of q, [num_rows][num_qo_heads][head_dim], from its size alone.
[[nodiscard]] inline int count_qo_heads(std::size_t q_size, int num_rows, int head_dim) {
  const auto row = static_cast<std::size_t>(num_rows) * static_cast<std::size_t>(head_dim);
  if (q_size == 0 || row == 0 || q_size % row != 0) [[unlikely]]
    fail_argument("q.size()", q_size,
                  "a positive multiple of num_rows * head_dim = " + std::to_string(num_rows) +
                      " * " + std::to_string(head_dim));
  if (q_size / row > max_qo_heads) [[unlikely]]
    fail_argument("num_qo_heads", q_size / row,
                  "at most " + std::to_string(max_qo_heads) +
                      " from q.size() = " + std::to_string(q_size) + " / (num_rows * head_dim)");
  return static_cast<int>(q_size / row);
}

}  // namespace detail

/// A view of an engine's own memory: K and V each [num_slots][num_kv_heads][chunk_size][head_dim],
/// densely packed.
template <class T>
[[nodiscard]] KvView<T> make_kv_view(T* k, T* v, std::int32_t num_slots, std::int32_t num_kv_heads,
                                     std::int32_t chunk_size, std::int32_t head_dim) {
  detail::check_argument(k != nullptr, "k", static_cast<const void*>(k), "memory of K");
  detail::check_argument(v != nullptr, "v", static_cast<const void*>(v), "memory of V");
  detail::check_argument(num_slots >= 0, "num_slots", num_slots, "a count");
  detail::check_argument(num_kv_heads > 0, "num_kv_heads", num_kv_heads, "at least 1");
  detail::check_argument(chunk_size > 0, "chunk_size", chunk_size, "at least 1");
  detail::check_argument(head_dim > 0, "head_dim", head_dim, "at least 1");
  KvView<T> view;
  view.k = k;
  view.v = v;
  view.num_slots = num_slots;
  view.num_kv_heads = num_kv_heads;
  view.head_dim = head_dim;
  view.chunk_size = chunk_size;
  view.stride_token = head_dim;
  view.stride_head = view.stride_token * chunk_size;
  view.stride_slot = view.stride_head * num_kv_heads;
  return view;
}

CHUNKATTN_NAMESPACE_END
