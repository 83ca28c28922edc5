// Views of densely packed K and V, checked.
#pragma once

#include "../support/check.hpp"
#include "../support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// Whether rows of `dim` elements at k and at v overlap.
template <class T>
[[nodiscard]] bool rows_overlap(const T* k, const T* v, std::int32_t dim) noexcept {
  const auto at_k = reinterpret_cast<std::uintptr_t>(k), at_v = reinterpret_cast<std::uintptr_t>(v);
  const std::uintptr_t distance = at_k < at_v ? at_v - at_k : at_k - at_v;
  return distance < static_cast<std::uintptr_t>(dim) * sizeof(T);
}

/// A dense KvView (View) of memory of this KvGeometry (Geometry).
template <class View, class T, class Geometry>
[[nodiscard]] View dense_kv_view(T* k, T* v, const Geometry& geometry) {
  check_argument(k != nullptr, "k", static_cast<const void*>(k), "memory of K");
  check_argument(v != nullptr, "v", static_cast<const void*>(v), "memory of V");
  check_argument(geometry.num_chunks >= 0, "geometry.num_chunks", geometry.num_chunks, "a count");
  check_argument(geometry.num_kv_heads > 0, "geometry.num_kv_heads", geometry.num_kv_heads,
                 "at least 1");
  check_argument(geometry.chunk_size > 0, "geometry.chunk_size", geometry.chunk_size, "at least 1");
  check_argument(geometry.head_dim > 0, "geometry.head_dim", geometry.head_dim, "at least 1");
  const std::int32_t value_dim = geometry.value_dim.value_or(geometry.head_dim);
  check_argument(value_dim > 0, "geometry.value_dim", value_dim,
                 "at least 1, or none for head_dim");
  const bool v_in_k = v == k && value_dim < geometry.head_dim;
  check_argument(v != k || v_in_k, "v", "k",
                 "memory of V of its own, or a geometry.value_dim less than head_dim: V in K");
  check_argument(v_in_k || !rows_overlap(k, v, geometry.head_dim), "v", "within rows of K",
                 "memory of V of its own");
  std::int64_t room = std::int64_t{1} << 62;  // strides, and their multiples, fit in 64 bits
  for (const std::int32_t factor :
       {geometry.head_dim > value_dim ? geometry.head_dim : value_dim, geometry.chunk_size,
        geometry.num_kv_heads, geometry.num_chunks})
    room /= factor > 0 ? factor : 1;
  check_argument(
      room >= std::int64_t{sizeof(T)}, "geometry.num_chunks", geometry.num_chunks,
      "num_chunks, num_kv_heads, chunk_size and head_dim that give less than 2^62 bytes");
  View view;
  view.k = k;
  view.v = v;
  view.num_chunks = geometry.num_chunks;
  view.num_kv_heads = geometry.num_kv_heads;
  view.head_dim = geometry.head_dim;
  view.chunk_size = geometry.chunk_size;
  view.stride_token = geometry.head_dim;
  view.stride_head = view.stride_token * geometry.chunk_size;
  view.stride_chunk = view.stride_head * geometry.num_kv_heads;
  if (value_dim != geometry.head_dim) {
    view.value_dim = value_dim;
    view.v_stride_token = v_in_k ? geometry.head_dim : value_dim;
    view.v_stride_head = view.v_stride_token * geometry.chunk_size;
    view.v_stride_chunk = view.v_stride_head * geometry.num_kv_heads;
  }
  return view;
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
