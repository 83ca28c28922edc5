// KvView: where the K and V of one layer lie. It owns nothing; our KvCache is one provider, an
// engine's own memory another.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "allocator.hpp"
#include "detail/base/check.hpp"
#include "detail/base/config.hpp"
#include "element.hpp"
#include "error.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

class WriteCheck;

/// Where slot `slot` begins: at start + slot * stride, or in its slab.
template <class P>
[[nodiscard]] CHUNKATTN_HD P* slot_base(P* start, P* const* slabs, std::int32_t slab_shift,
                                        SlotIndex slot, std::int64_t stride) noexcept {
  if (slabs == nullptr) return start + slot * stride;
  const std::int32_t mask = (std::int32_t{1} << slab_shift) - 1;
  return slabs[slot >> slab_shift] + (slot & mask) * stride;
}

}  // namespace detail

/// The scales of 8-bit rows, so that k_i = k_scale * stored_i; nothing for other elements. The
/// scale of (slot, kv_head, token) stands at scale_stride_slot * slot + scale_stride_head * kv_head
/// + token of `k_scale` or `v_scale` (in floats; in slabs where `k_scale_slabs` is set, as for the
/// values).
template <class T, bool = has_row_scales<T>>
struct KvScales {};

/// The scales of 8-bit rows.
template <class T>
struct KvScales<T, true> {
  float* k_scale = nullptr;  ///< scale of the K row (slot 0, head 0, token 0), unless in slabs
  float* v_scale = nullptr;  ///< the same for V
  float* const* k_scale_slabs = nullptr;  ///< first K scale of each slab, or null
  float* const* v_scale_slabs = nullptr;  ///< first V scale of each slab, or null
  std::int64_t scale_stride_slot = 0;     ///< floats from a slot to the next
  std::int64_t scale_stride_head = 0;     ///< floats from a KV head to the next
};

/// The K and V rows of one layer, [slot][kv_head][token][head_dim] up to strides (in elements; the
/// innermost is 1). With `k_slabs` the slots lie in slabs of 2^slab_shift slots each, so that a
/// growing pool never moves one; without, slot s starts at k + s * stride_slot. Rows of V are as
/// those of K unless `value_dim` is set: then they have so many elements and strides of their own.
/// A share of the heads is heads(first, count), for both kinds.
template <class T>
struct KvView : KvScales<T> {
  T* k = nullptr;                 ///< K of slot 0, unless in slabs
  T* v = nullptr;                 ///< V of slot 0, unless in slabs
  T* const* k_slabs = nullptr;    ///< first K element of each slab, or null
  T* const* v_slabs = nullptr;    ///< first V element of each slab, or null
  std::int32_t slab_shift = 0;    ///< log2 of the slots per slab
  std::int32_t num_slots = 0;     ///< slots that have memory
  std::int32_t num_kv_heads = 0;  ///< heads of K and of V
  std::int32_t head_dim = 0;      ///< elements per row
  std::int32_t chunk_size = 0;    ///< tokens per slot
  std::int32_t first_head = 0;    ///< of what the pointers lead to: head 0 of this view
  std::int64_t stride_slot = 0;   ///< elements from a slot to the next
  std::int64_t stride_head = 0;   ///< elements from a KV head to the next
  std::int64_t stride_token = 0;  ///< elements from a token to the next

  std::int32_t value_dim = 0;       ///< elements per row of V; 0: V's rows are as K's
  std::int64_t v_stride_slot = 0;   ///< V's strides, where value_dim is set
  std::int64_t v_stride_head = 0;   ///< elements from a KV head to the next
  std::int64_t v_stride_token = 0;  ///< elements from a token to the next

  std::int32_t layer = 0;     ///< of the KvCache
  std::uint64_t tree_id = 0;  ///< of the tree whose slots these are; 0: memory of an engine's own
  detail::WriteCheck* write_check = nullptr;  ///< KvCacheOptions::check_writes; null: off

  /// The KV heads [first, first + count) as a view: the share of a tensor-parallel rank. Its head 0
  /// is head `first` of this one. Throws InvalidArgument for heads that this view does not have.
  [[nodiscard]] KvView heads(int first, int count) const {
    if (first < 0 || first >= num_kv_heads) [[unlikely]]
      detail::fail_argument("first", first, {"a KV head of the view, which has ", num_kv_heads});
    if (count < 1 || count > num_kv_heads - first) [[unlikely]]
      detail::fail_argument(
          "count", count, {"from 1 to ", num_kv_heads - first, ", the view's heads from first on"});
    KvView share = *this;
    share.num_kv_heads = count;
    if (is_dense()) {  // so that k + s * stride_slot stays right for an engine's own kernels
      share.k = k_row(0, first, 0);
      share.v = v_row(0, first, 0);
      if constexpr (has_row_scales<T>) {
        share.k_scale = k_row_scale(0, first, 0);
        share.v_scale = v_row_scale(0, first, 0);
      }
    } else {
      share.first_head += first;
    }
    return share;
  }

  /// First element of K of (slot, kv_head, token).
  [[nodiscard]] CHUNKATTN_HD T* k_row(SlotIndex slot, int kv_head, int token) const noexcept {
    return detail::slot_base(k, k_slabs, slab_shift, slot, stride_slot) +
           (first_head + kv_head) * stride_head + token * stride_token;
  }
  /// First element of V of (slot, kv_head, token).
  [[nodiscard]] CHUNKATTN_HD T* v_row(SlotIndex slot, int kv_head, int token) const noexcept {
    if (value_dim == 0) return v_row_as_k(slot, kv_head, token);
    return detail::slot_base(v, v_slabs, slab_shift, slot, v_stride_slot) +
           (first_head + kv_head) * v_stride_head + token * v_stride_token;
  }
  /// The same for kernels that are compiled for views without value_dim.
  [[nodiscard]] CHUNKATTN_HD T* v_row_as_k(SlotIndex slot, int kv_head, int token) const noexcept {
    return detail::slot_base(v, v_slabs, slab_shift, slot, stride_slot) +
           (first_head + kv_head) * stride_head + token * stride_token;
  }
  /// Whether rows of V are the first value_dim elements of K's: latent attention stores one vector.
  [[nodiscard]] bool has_v_in_k() const noexcept {
    return value_dim != 0 && v == k && v_slabs == k_slabs;
  }
  /// Elements per row of V.
  [[nodiscard]] CHUNKATTN_HD std::int32_t dim_of_v() const noexcept {
    return value_dim != 0 ? value_dim : head_dim;
  }
  /// Elements from a token of V to the next.
  [[nodiscard]] std::int64_t token_stride_of_v() const noexcept {
    return value_dim != 0 ? v_stride_token : stride_token;
  }
  /// Scale of the K row of (slot, kv_head, token); those of the next tokens follow.
  [[nodiscard]] float* k_row_scale(SlotIndex slot, int kv_head, int token) const noexcept
    requires has_row_scales<T>
  {
    return detail::slot_base(this->k_scale, this->k_scale_slabs, slab_shift, slot,
                             this->scale_stride_slot) +
           (first_head + kv_head) * this->scale_stride_head + token;
  }
  /// Scale of the V row of (slot, kv_head, token).
  [[nodiscard]] float* v_row_scale(SlotIndex slot, int kv_head, int token) const noexcept
    requires has_row_scales<T>
  {
    return detail::slot_base(this->v_scale, this->v_scale_slabs, slab_shift, slot,
                             this->scale_stride_slot) +
           (first_head + kv_head) * this->scale_stride_head + token;
  }

 private:
  [[nodiscard]] bool is_dense() const noexcept {
    if constexpr (has_row_scales<T>)
      if (this->k_scale_slabs != nullptr || this->v_scale_slabs != nullptr) return false;
    return k_slabs == nullptr && v_slabs == nullptr;
  }
};

/// K and V memory of a model's layers: KvCache, or an engine's own.
///
/// - `layer(l)`: the KvView of layer l. `options()`: the KvCacheOptions, or what has its fields.
template <class C>
concept KvProvider = requires(C& cache, const C& constant) {
  cache.layer(0).k_row(SlotIndex{0}, 0, 0);
  { constant.options().num_layers } -> std::convertible_to<int>;
  { constant.options().num_kv_heads } -> std::convertible_to<int>;
  { constant.options().head_dim } -> std::convertible_to<int>;
};

/// The shape of one layer's K, and of its V.
struct KvGeometry {
  std::int32_t num_slots = 0;     ///< slots that have memory
  std::int32_t num_kv_heads = 0;  ///< heads of K and of V
  std::int32_t chunk_size = 0;    ///< tokens per slot
  std::int32_t head_dim = 0;      ///< elements per row
  std::int32_t value_dim = 0;     ///< elements per row of V; 0: as many as of K
};

/// The most query heads of a call: what is counted per row and head then stays within 32 bits.
inline constexpr int max_qo_heads = 1 << 16;

namespace detail {

/// The query heads of q, [num_rows][num_qo_heads][head_dim], from its size alone.
[[nodiscard]] inline int count_qo_heads(std::size_t q_size, int num_rows, int head_dim) {
  const auto row = static_cast<std::size_t>(num_rows) * static_cast<std::size_t>(head_dim);
  if (q_size == 0 || row == 0 || q_size % row != 0) [[unlikely]]
    fail_argument("q.size()", q_size,
                  {"a positive multiple of num_rows * head_dim = ", num_rows, " * ", head_dim});
  if (q_size / row > max_qo_heads) [[unlikely]]
    fail_argument(
        "num_qo_heads", q_size / row,
        {"at most ", max_qo_heads, " from q.size() = ", q_size, " / (num_rows * head_dim)"});
  return static_cast<int>(q_size / row);
}

/// Rows of `dim` elements at k and at v have some of them in common.
template <class T>
[[nodiscard]] bool rows_overlap(const T* k, const T* v, std::int32_t dim) noexcept {
  const auto at_k = reinterpret_cast<std::uintptr_t>(k), at_v = reinterpret_cast<std::uintptr_t>(v);
  const std::uintptr_t distance = at_k < at_v ? at_v - at_k : at_k - at_v;
  return distance < static_cast<std::uintptr_t>(dim) * sizeof(T);
}

template <class T>
[[nodiscard]] KvView<T> dense_kv_view(T* k, T* v, const KvGeometry& geometry) {
  check_argument(k != nullptr, "k", static_cast<const void*>(k), "memory of K");
  check_argument(v != nullptr, "v", static_cast<const void*>(v), "memory of V");
  check_argument(geometry.num_slots >= 0, "geometry.num_slots", geometry.num_slots, "a count");
  check_argument(geometry.num_kv_heads > 0, "geometry.num_kv_heads", geometry.num_kv_heads,
                 "at least 1");
  check_argument(geometry.chunk_size > 0, "geometry.chunk_size", geometry.chunk_size, "at least 1");
  check_argument(geometry.head_dim > 0, "geometry.head_dim", geometry.head_dim, "at least 1");
  check_argument(geometry.value_dim >= 0, "geometry.value_dim", geometry.value_dim,
                 "at least 1, or 0 for head_dim");
  const bool v_in_k = v == k && geometry.value_dim != 0 && geometry.value_dim < geometry.head_dim;
  check_argument(v != k || v_in_k, "v", "k",
                 "memory of V of its own, or a geometry.value_dim less than head_dim: V in K");
  check_argument(v_in_k || !rows_overlap(k, v, geometry.head_dim), "v", "within rows of K",
                 "memory of V of its own");
  KvView<T> view;
  view.k = k;
  view.v = v;
  view.num_slots = geometry.num_slots;
  view.num_kv_heads = geometry.num_kv_heads;
  view.head_dim = geometry.head_dim;
  view.chunk_size = geometry.chunk_size;
  view.stride_token = geometry.head_dim;
  view.stride_head = view.stride_token * geometry.chunk_size;
  view.stride_slot = view.stride_head * geometry.num_kv_heads;
  if (geometry.value_dim != 0 && geometry.value_dim != geometry.head_dim) {
    view.value_dim = geometry.value_dim;
    view.v_stride_token = v_in_k ? geometry.head_dim : geometry.value_dim;
    view.v_stride_head = view.v_stride_token * geometry.chunk_size;
    view.v_stride_slot = view.v_stride_head * geometry.num_kv_heads;
  }
  return view;
}

}  // namespace detail

/// A view of an engine's own memory: K and V each [num_slots][num_kv_heads][chunk_size][head_dim]
/// (V: value_dim), densely packed. With a value_dim and v = k, V is in K: see
/// KvCacheOptions::v_in_k. 8-bit elements: see the overload with scales.
template <class T>
  requires(!has_row_scales<T>)
[[nodiscard]] KvView<T> make_kv_view(T* k, T* v, const KvGeometry& geometry) {
  return detail::dense_kv_view(k, v, geometry);
}

/// The same for 8-bit elements, with scales each [num_slots][num_kv_heads][chunk_size].
template <class T>
  requires has_row_scales<T>
[[nodiscard]] KvView<T> make_kv_view(T* k, T* v, float* k_scale, float* v_scale,
                                     const KvGeometry& geometry) {
  detail::check_argument(k_scale != nullptr, "k_scale", static_cast<const void*>(k_scale),
                         "memory of K's scales");
  detail::check_argument(v_scale != nullptr, "v_scale", static_cast<const void*>(v_scale),
                         "memory of V's scales");
  KvView<T> view = detail::dense_kv_view(k, v, geometry);
  view.k_scale = k_scale;
  view.v_scale = v_scale;
  view.scale_stride_head = geometry.chunk_size;
  view.scale_stride_slot = view.scale_stride_head * geometry.num_kv_heads;
  return view;
}

CHUNKATTN_NAMESPACE_END
