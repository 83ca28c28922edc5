// KvView: where the K and V of one layer lie. It owns nothing; our KvCache is one provider, an
// engine's own memory another.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "allocator.hpp"
#include "detail/base/check.hpp"
#include "detail/base/config.hpp"
#include "detail/kv/dense_view.hpp"
#include "detail/kv/quantized.hpp"
#include "detail/kv/slot_base.hpp"
#include "element.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {
class WriteCheck;

/// The check of writes that a view of a KvCache leads to, or null.
struct WriteCheckOf {
  template <class View>
  [[nodiscard]] static auto& view(View& view) noexcept {
    return view.write_check_;
  }
};
}  // namespace detail

/// The K and V rows of one layer, [slot][kv_head][token][head_dim] up to strides (in elements; the
/// innermost is 1). With `k_slabs` the slots lie in slabs of 2^slab_shift slots each, so that a
/// growing pool never moves one; without, slot s starts at k + s * stride_slot. Rows of V are as
/// those of K unless `value_dim` is set: then they have so many elements and strides of their own.
/// A share of the heads is heads(first, count), for both kinds.
///
/// Rows of 8 bits have scales: k_i = k_scale * stored_i. That of (slot, kv_head, token) stands at
/// scale_stride_slot * slot + scale_stride_head * kv_head + token of `k_scale` or `v_scale`, or in
/// slabs, as the rows do. Rows of other elements have none.
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
  std::int32_t first_head = 0;    ///< of what the pointers lead to: head 0 of this view
  std::int64_t stride_slot = 0;   ///< elements from a slot to the next
  std::int64_t stride_head = 0;   ///< elements from a KV head to the next
  std::int64_t stride_token = 0;  ///< elements from a token to the next

  std::int32_t value_dim = 0;       ///< elements per row of V; 0: V's rows are as K's
  std::int64_t v_stride_slot = 0;   ///< V's strides, where value_dim is set
  std::int64_t v_stride_head = 0;   ///< elements from a KV head to the next
  std::int64_t v_stride_token = 0;  ///< elements from a token to the next

  float* k_scale = nullptr;  ///< scale of the K row (slot 0, head 0, token 0), unless in slabs
  float* v_scale = nullptr;  ///< that of the V row there
  float* const* k_scale_slabs = nullptr;  ///< first K scale of each slab, or null
  float* const* v_scale_slabs = nullptr;  ///< first V scale of each slab, or null
  std::int64_t scale_stride_slot = 0;     ///< floats from a slot to the next
  std::int64_t scale_stride_head = 0;     ///< floats from a KV head to the next

  std::int32_t layer = 0;     ///< of the KvCache
  std::uint64_t tree_id = 0;  ///< of the tree whose slots these are; 0: memory of an engine's own

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
    return detail::slot_base(k_scale, k_scale_slabs, slab_shift, slot, scale_stride_slot) +
           (first_head + kv_head) * scale_stride_head + token;
  }
  /// Scale of the V row of (slot, kv_head, token).
  [[nodiscard]] float* v_row_scale(SlotIndex slot, int kv_head, int token) const noexcept
    requires has_row_scales<T>
  {
    return detail::slot_base(v_scale, v_scale_slabs, slab_shift, slot, scale_stride_slot) +
           (first_head + kv_head) * scale_stride_head + token;
  }

 private:
  friend struct detail::WriteCheckOf;

  [[nodiscard]] bool is_dense() const noexcept {
    if constexpr (has_row_scales<T>)
      if (k_scale_slabs != nullptr || v_scale_slabs != nullptr) return false;
    return k_slabs == nullptr && v_slabs == nullptr;
  }

  detail::WriteCheck* write_check_ = nullptr;  // KvCacheOptions::check_writes; null: off
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

/// A view of an engine's own memory: K and V each [num_slots][num_kv_heads][chunk_size][head_dim]
/// (V: value_dim), densely packed. With a value_dim and v = k, V is in K: see
/// KvCacheOptions::v_in_k. 8-bit elements: see the overload with scales.
template <class T>
  requires(!has_row_scales<T>)
[[nodiscard]] KvView<T> make_kv_view(T* k, T* v, const KvGeometry& geometry) {
  return detail::dense_kv_view<KvView<T>>(k, v, geometry);
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
  KvView<T> view = detail::dense_kv_view<KvView<T>>(k, v, geometry);
  view.k_scale = k_scale;
  view.v_scale = v_scale;
  view.scale_stride_head = geometry.chunk_size;
  view.scale_stride_slot = view.scale_stride_head * geometry.num_kv_heads;
  return view;
}

/// Stores `count` floats in 8 bits and returns their scale: largest magnitude / 127 of
/// std::int8_t, / 448 of float8_e4m3, but no subnormal. The error of an element is at most half of
/// the scale in integers; in floats 2^-4 of the element, or 2^-10 of the scale where that is more.
/// A row of zeros has scale 0; a row with a NaN or an infinity has scale NaN and zeros, which
/// reaches the outputs as NaN.
template <class T>
  requires has_row_scales<T>
inline float quantize_row(const float* from, int count, T* to) noexcept {
  std::uint32_t largest = 0;  // magnitudes compare as their bits do, those of infinity and NaN too
  for (int i = 0; i < count; ++i) {
    const std::uint32_t size = std::bit_cast<std::uint32_t>(from[i]) & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  if (largest == 0 || largest >= 0x7f800000u) {
    for (int i = 0; i < count; ++i) to[i] = T{};
    return largest == 0 ? 0.0f : std::bit_cast<float>(0x7fc00000u);
  }
  constexpr float most = detail::largest_stored<T>;
  constexpr float smallest = most * 0x1p-126f;  // below, 1 / scale would be no number
  const float reach =
      std::bit_cast<float>(largest) > smallest ? std::bit_cast<float>(largest) : smallest;
  const float inverse = most / reach;
  for (int i = 0; i < count; ++i) detail::store_nearest(from[i] * inverse, to[i]);
  return reach / most;
}

CHUNKATTN_NAMESPACE_END
