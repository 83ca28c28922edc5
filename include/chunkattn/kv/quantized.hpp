// K and V in 8 bits: signed integers with one float scale per (token, head), so that
// k_i = k_scale * q_i. Half the bytes of fp16; the scale is applied to the logit and to the
// probability, so the integers go through the kernels exactly.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "../base/config.hpp"
#include "../base/element.hpp"
#include "../base/error.hpp"
#include "../base/slot.hpp"
#include "view.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// What the CPU backend reads K and V as: the float types, or std::int8_t with scales.
template <class T>
concept CpuKvElement = KvElement<T> || std::same_as<T, std::int8_t>;

/// KvView of 8-bit K and V. Values as in the general view; the scale of (slot, kv_head, token)
/// stands at scale_stride_slot * slot + scale_stride_head * kv_head + token of `k_scale` or
/// `v_scale` (in floats; in slabs where `k_scale_slabs` is set, as for the values).
template <>
struct KvView<std::int8_t> {
  std::int8_t* k = nullptr;               ///< K of slot 0, unless in slabs
  std::int8_t* v = nullptr;               ///< V of slot 0, unless in slabs
  std::int8_t* const* k_slabs = nullptr;  ///< first K element of each slab, or null
  std::int8_t* const* v_slabs = nullptr;  ///< first V element of each slab, or null
  std::int32_t slab_shift = 0;            ///< log2 of the slots per slab
  std::int32_t num_slots = 0;             ///< slots that have memory
  std::int32_t num_kv_heads = 0;          ///< heads of K and of V
  std::int32_t head_dim = 0;              ///< elements per row
  std::int32_t chunk_size = 0;            ///< tokens per slot
  std::int64_t stride_slot = 0;           ///< elements from a slot to the next
  std::int64_t stride_head = 0;           ///< elements from a KV head to the next
  std::int64_t stride_token = 0;          ///< elements from a token to the next
  float* k_scale = nullptr;  ///< scale of the K row (slot 0, head 0, token 0), unless in slabs
  float* v_scale = nullptr;  ///< the same for V
  float* const* k_scale_slabs = nullptr;  ///< first K scale of each slab, or null
  float* const* v_scale_slabs = nullptr;  ///< first V scale of each slab, or null
  std::int64_t scale_stride_slot = 0;     ///< floats from a slot to the next
  std::int64_t scale_stride_head = 0;     ///< floats from a KV head to the next

  /// First element of K of (slot, kv_head, token).
  [[nodiscard]] std::int8_t* k_row(SlotIndex slot, int kv_head, int token) const noexcept {
    return base(k, k_slabs, slot, stride_slot) + kv_head * stride_head + token * stride_token;
  }
  /// First element of V of (slot, kv_head, token).
  [[nodiscard]] std::int8_t* v_row(SlotIndex slot, int kv_head, int token) const noexcept {
    return base(v, v_slabs, slot, stride_slot) + kv_head * stride_head + token * stride_token;
  }
  /// Scale of the K row of (slot, kv_head, token); those of the next tokens follow.
  [[nodiscard]] float* k_row_scale(SlotIndex slot, int kv_head, int token) const noexcept {
    return base(k_scale, k_scale_slabs, slot, scale_stride_slot) + kv_head * scale_stride_head +
           token;
  }
  /// Scale of the V row of (slot, kv_head, token).
  [[nodiscard]] float* v_row_scale(SlotIndex slot, int kv_head, int token) const noexcept {
    return base(v_scale, v_scale_slabs, slot, scale_stride_slot) + kv_head * scale_stride_head +
           token;
  }

 private:
  template <class P>
  [[nodiscard]] P* base(P* start, P* const* slabs, SlotIndex slot,
                        std::int64_t stride) const noexcept {
    if (slabs == nullptr) return start + slot * stride;
    const std::int32_t mask = (std::int32_t{1} << slab_shift) - 1;
    return slabs[slot >> slab_shift] + (slot & mask) * stride;
  }
};

/// A view of an engine's own 8-bit memory: K and V each [num_slots][num_kv_heads][chunk_size]
/// [head_dim], scales each [num_slots][num_kv_heads][chunk_size], densely packed.
[[nodiscard]] inline KvView<std::int8_t> make_kv_view(
    std::int8_t* k, std::int8_t* v, float* k_scale, float* v_scale, std::int32_t num_slots,
    std::int32_t num_kv_heads, std::int32_t chunk_size, std::int32_t head_dim) {
  detail::check_argument(k != nullptr, "k", static_cast<const void*>(k), "memory of K");
  detail::check_argument(v != nullptr, "v", static_cast<const void*>(v), "memory of V");
  detail::check_argument(k_scale != nullptr, "k_scale", static_cast<const void*>(k_scale),
                         "memory of K's scales");
  detail::check_argument(v_scale != nullptr, "v_scale", static_cast<const void*>(v_scale),
                         "memory of V's scales");
  detail::check_argument(num_slots >= 0, "num_slots", num_slots, "a count");
  detail::check_argument(num_kv_heads > 0, "num_kv_heads", num_kv_heads, "at least 1");
  detail::check_argument(chunk_size > 0, "chunk_size", chunk_size, "at least 1");
  detail::check_argument(head_dim > 0, "head_dim", head_dim, "at least 1");
  KvView<std::int8_t> view;
  view.k = k;
  view.v = v;
  view.k_scale = k_scale;
  view.v_scale = v_scale;
  view.num_slots = num_slots;
  view.num_kv_heads = num_kv_heads;
  view.head_dim = head_dim;
  view.chunk_size = chunk_size;
  view.stride_token = head_dim;
  view.stride_head = view.stride_token * chunk_size;
  view.stride_slot = view.stride_head * num_kv_heads;
  view.scale_stride_head = chunk_size;
  view.scale_stride_slot = view.scale_stride_head * num_kv_heads;
  return view;
}

/// Stores `count` floats as 8-bit integers and returns their scale, largest magnitude / 127 but no
/// subnormal, so that the error of an element is at most half of it. A row of zeros has scale 0; a
/// row with a NaN or an infinity has scale NaN and zeros, which reaches the outputs as NaN.
inline float quantize_row(const float* from, int count, std::int8_t* to) noexcept {
  std::uint32_t largest = 0;  // magnitudes compare as their bits do, those of infinity and NaN too
  for (int i = 0; i < count; ++i) {
    const std::uint32_t size = std::bit_cast<std::uint32_t>(from[i]) & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  if (largest == 0 || largest >= 0x7f800000u) {
    for (int i = 0; i < count; ++i) to[i] = 0;
    return largest == 0 ? 0.0f : std::bit_cast<float>(0x7fc00000u);
  }
  constexpr float smallest = 127 * 0x1p-126f;  // below, 1 / scale would be no number
  const float reach =
      std::bit_cast<float>(largest) > smallest ? std::bit_cast<float>(largest) : smallest;
  const float inverse = 127.0f / reach;
  for (int i = 0; i < count; ++i)
    to[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(std::nearbyint(from[i] * inverse)));
  return reach / 127.0f;
}

namespace detail {

/// Row `token` of quantised K or V as doubles, for the oracle.
inline void load_row(const KvView<std::int8_t>& kv, bool is_v, SlotIndex slot, int kv_head,
                     int token, double* row) {
  const std::int8_t* from = is_v ? kv.v_row(slot, kv_head, token) : kv.k_row(slot, kv_head, token);
  const double scale = static_cast<double>(is_v ? *kv.v_row_scale(slot, kv_head, token)
                                                : *kv.k_row_scale(slot, kv_head, token));
  for (int i = 0; i < kv.head_dim; ++i) row[i] = scale * from[i];
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END
