// KvView: where the K and V of one layer lie, in a KvCache or in an engine's own memory. It owns
// nothing.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "allocator.hpp"
#include "detail/kv/chunk_base.hpp"
#include "detail/kv/dense_view.hpp"
#include "detail/kv/quantized.hpp"
#include "detail/support/check.hpp"
#include "detail/support/config.hpp"
#include "element.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// What a float scale of K or V of 8 bits is of.
enum class KvScales : std::int32_t {
  per_row,   ///< of a token and head: what write() stores
  per_head,  ///< of a KV head: k_scale and v_scale are [num_kv_heads]
  per_layer  ///< of all of the layer's K, or all of its V: k_scale and v_scale are one float each
};

/// "per_row", "per_head" or "per_layer".
[[nodiscard]] inline const char* name_of(KvScales scales) noexcept {
  return scales == KvScales::per_row    ? "per_row"
         : scales == KvScales::per_head ? "per_head"
                                        : "per_layer";
}

/// The K and V of one layer, [chunk][kv_head][token][head_dim], with strides in elements; the
/// innermost is 1. Chunk c starts at k + c * stride_chunk or, if `k_slabs` is set, in slabs of
/// 2^slab_shift chunks each, so that a pool grows without moving any. Rows of V have the size and
/// strides of those of K, unless `value_dim` is set: then they have `value_dim` elements and the
/// strides v_stride_*. Kernels of your own call k_row() and v_row(), which handle all of these.
/// It is an aggregate: for memory of your own name the members that are not as below,
/// KvView<half>{.k = k, .v = v, ...}.
///
/// Rows of 8-bit elements have float scales: element i is scale * stored_i. The scale of (chunk,
/// kv_head, token) is at scale_stride_chunk * chunk + scale_stride_head * kv_head + token of
/// `k_scale` or `v_scale`, or in slabs, as the rows are; `scales` may say that there are fewer.
/// Other elements have none.
template <class T>
struct KvView {
  T* k = nullptr;                 ///< K of chunk 0, unless in slabs
  T* v = nullptr;                 ///< V of chunk 0, unless in slabs
  T* const* k_slabs = nullptr;    ///< first K element of each slab, or null
  T* const* v_slabs = nullptr;    ///< first V element of each slab, or null
  std::int32_t slab_shift = 0;    ///< log2 of the chunks per slab
  std::int32_t num_chunks = 0;    ///< chunks that have memory
  std::int32_t num_kv_heads = 0;  ///< heads of K and of V
  std::int32_t head_dim = 0;      ///< elements per row of K
  std::int32_t chunk_size = 0;    ///< tokens per chunk
  std::int32_t first_head = 0;    ///< the head of the memory that is head 0 of this view
  std::int64_t stride_chunk = 0;  ///< elements from a chunk to the next
  std::int64_t stride_head = 0;   ///< elements from a KV head to the next
  std::int64_t stride_token = 0;  ///< elements from a token to the next

  std::int32_t value_dim = 0;       ///< elements per row of V; 0: head_dim, and K's strides
  std::int64_t v_stride_chunk = 0;  ///< of V, if value_dim is set: from a chunk to the next
  std::int64_t v_stride_head = 0;   ///< of V, if value_dim is set: from a KV head to the next
  std::int64_t v_stride_token = 0;  ///< of V, if value_dim is set: from a token to the next

  float* k_scale = nullptr;  ///< scale of the K row of chunk 0, head 0, token 0, unless in slabs
  float* v_scale = nullptr;  ///< that of the V row there
  float* const* k_scale_slabs = nullptr;  ///< first K scale of each slab, or null
  float* const* v_scale_slabs = nullptr;  ///< first V scale of each slab, or null
  std::int64_t scale_stride_chunk = 0;    ///< floats from a chunk to the next
  std::int64_t scale_stride_head = 0;     ///< floats from a KV head to the next
  /// Where there are fewer scales: then without slabs, and both strides are 0. On the CPU.
  KvScales scales = KvScales::per_row;

  std::int32_t layer = 0;       ///< index of the layer in its KvCache
  std::uint64_t tree_id = 0;    ///< number of the tree whose chunks these are; 0: not a KvCache's
  void* write_check = nullptr;  ///< of a KvCache with check_writes, for the library; else null

  /// A view of the KV heads [first, first + count): the share of a tensor-parallel rank. Its head 0
  /// is head `first` of this view. Throws InvalidArgument for heads that this view does not have.
  [[nodiscard]] KvView heads(int first, int count) const {
    if (first < 0 || first >= num_kv_heads) [[unlikely]]
      detail::fail_argument("first", first, {"0 to ", num_kv_heads - 1, ", a KV head of the view"});
    if (count < 1 || count > num_kv_heads - first) [[unlikely]]
      detail::fail_argument(
          "count", count, {"from 1 to ", num_kv_heads - first, ", the view's heads from first on"});
    KvView share = *this;
    share.num_kv_heads = count;
    if (is_dense()) {  // so that k + s * stride_chunk stays right for an engine's own kernels
      share.k = k_row(0, first, 0);
      share.v = v_row(0, first, 0);
      if constexpr (has_row_scales<T>) {
        share.k_scale = k_scale_of(0, first, 0);
        share.v_scale = v_scale_of(0, first, 0);
      }
    } else {
      share.first_head += first;
    }
    return share;
  }

  /// First element of the K row of a token: `token` counts from 0 in the chunk.
  [[nodiscard]] CHUNKATTN_HD T* k_row(ChunkIndex chunk, int kv_head, int token) const noexcept {
    return detail::chunk_base(k, k_slabs, slab_shift, chunk, stride_chunk) +
           (first_head + kv_head) * stride_head + token * stride_token;
  }
  /// First element of the V row of a token: `token` counts from 0 in the chunk.
  [[nodiscard]] CHUNKATTN_HD T* v_row(ChunkIndex chunk, int kv_head, int token) const noexcept {
    if (value_dim == 0) return v_row_as_k(chunk, kv_head, token);
    return detail::chunk_base(v, v_slabs, slab_shift, chunk, v_stride_chunk) +
           (first_head + kv_head) * v_stride_head + token * v_stride_token;
  }
  /// v_row() of a view without value_dim, for kernels that are compiled for such views only.
  [[nodiscard]] CHUNKATTN_HD T* v_row_as_k(ChunkIndex chunk, int kv_head,
                                           int token) const noexcept {
    return detail::chunk_base(v, v_slabs, slab_shift, chunk, stride_chunk) +
           (first_head + kv_head) * stride_head + token * stride_token;
  }
  /// Whether the rows of V are the first value_dim elements of those of K (KvCacheOptions::v_in_k).
  [[nodiscard]] bool has_v_in_k() const noexcept {
    return value_dim != 0 && v == k && v_slabs == k_slabs;
  }
  /// Elements per row of V.
  [[nodiscard]] CHUNKATTN_HD std::int32_t dim_of_v() const noexcept {
    return value_dim != 0 ? value_dim : head_dim;
  }
  /// Elements from a token's row of V to the next.
  [[nodiscard]] std::int64_t token_stride_of_v() const noexcept {
    return value_dim != 0 ? v_stride_token : stride_token;
  }
  /// The scale of a token's row of K, whatever it is of.
  [[nodiscard]] float* k_scale_of(ChunkIndex chunk, int kv_head, int token) const noexcept
    requires has_row_scales<T>
  {
    return scales == KvScales::per_row ? k_row_scale(chunk, kv_head, token)
                                       : k_scale + shared_scale(kv_head);
  }
  /// The same of V.
  [[nodiscard]] float* v_scale_of(ChunkIndex chunk, int kv_head, int token) const noexcept
    requires has_row_scales<T>
  {
    return scales == KvScales::per_row ? v_row_scale(chunk, kv_head, token)
                                       : v_scale + shared_scale(kv_head);
  }
  /// KvScales::per_row: scale of the K row of a token; those of the next tokens of the chunk follow
  /// it.
  [[nodiscard]] CHUNKATTN_HD float* k_row_scale(ChunkIndex chunk, int kv_head,
                                                int token) const noexcept
    requires has_row_scales<T>
  {
    return detail::chunk_base(k_scale, k_scale_slabs, slab_shift, chunk, scale_stride_chunk) +
           (first_head + kv_head) * scale_stride_head + token;
  }
  /// The same of the V row.
  [[nodiscard]] CHUNKATTN_HD float* v_row_scale(ChunkIndex chunk, int kv_head,
                                                int token) const noexcept
    requires has_row_scales<T>
  {
    return detail::chunk_base(v_scale, v_scale_slabs, slab_shift, chunk, scale_stride_chunk) +
           (first_head + kv_head) * scale_stride_head + token;
  }

 private:
  [[nodiscard]] int shared_scale(int kv_head) const noexcept {
    return scales == KvScales::per_head ? first_head + kv_head : 0;
  }
  [[nodiscard]] bool is_dense() const noexcept {
    if constexpr (has_row_scales<T>)
      if (k_scale_slabs != nullptr || v_scale_slabs != nullptr) return false;
    return k_slabs == nullptr && v_slabs == nullptr;
  }
};

/// K and V memory of all layers of a model: KvCache, or a class of an engine's own.
///
/// - `layer(l)`: the KvView of layer l.
/// - `options()`: a KvCacheOptions, or a struct with its fields.
template <class C>
concept KvProvider = requires(C& cache, const C& constant) {
  cache.layer(0).k_row(ChunkIndex{0}, 0, 0);
  { constant.options().num_layers } -> std::convertible_to<int>;
  { constant.options().num_kv_heads } -> std::convertible_to<int>;
  { constant.options().head_dim } -> std::convertible_to<int>;
};

/// The shape of one layer's K and V, for make_kv_view().
struct KvGeometry {
  std::int32_t num_chunks = 0;              ///< chunks that have memory
  std::int32_t num_kv_heads = 0;            ///< heads of K and of V
  std::int32_t chunk_size = 0;              ///< tokens per chunk
  std::int32_t head_dim = 0;                ///< elements per row of K
  std::optional<std::int32_t> value_dim{};  ///< elements per row of V; unset: head_dim
};

/// A view of an engine's own memory of float, half or bfloat16.
///
/// \param k  [num_chunks][num_kv_heads][chunk_size][head_dim], without gaps
/// \param v  [num_chunks][num_kv_heads][chunk_size][value_dim], without gaps; or k, if value_dim is
///           set: then V is in K, see KvCacheOptions::v_in_k
/// \throws InvalidArgument for missing memory and sizes that make no sense
template <class T>
  requires(!has_row_scales<T> && !is_cuda_element<T>)
[[nodiscard]] KvView<T> make_kv_view(T* k, T* v, const KvGeometry& geometry) {
  return detail::dense_kv_view<KvView<T>>(k, v, geometry);
}

/// The same of CUDA's __half or __nv_bfloat16: a KvView of half or bfloat16.
template <class T>
  requires is_cuda_element<T>
[[nodiscard]] auto make_kv_view(T* k, T* v, const KvGeometry& geometry) {
  using Own = detail::own_element<T>;
  return make_kv_view(reinterpret_cast<Own*>(k), reinterpret_cast<Own*>(v), geometry);
}

/// A view of an engine's own memory of std::int8_t or float8_e4m3.
///
/// \param k, v              as for the other types
/// \param k_scale, v_scale  [num_chunks][num_kv_heads][chunk_size], or fewer as `scales` says:
///                          element i of a row is scale times what is stored; the same memory if V
///                          is in K
/// \throws InvalidArgument for missing memory and sizes that make no sense
template <class T>
  requires has_row_scales<T>
[[nodiscard]] KvView<T> make_kv_view(T* k, T* v, float* k_scale, float* v_scale,
                                     const KvGeometry& geometry,
                                     KvScales scales = KvScales::per_row) {
  detail::check_argument(k_scale != nullptr, "k_scale", static_cast<const void*>(k_scale),
                         "memory of K's scales");
  detail::check_argument(v_scale != nullptr, "v_scale", static_cast<const void*>(v_scale),
                         "memory of V's scales");
  KvView<T> view = detail::dense_kv_view<KvView<T>>(k, v, geometry);
  view.k_scale = k_scale;
  view.v_scale = v_scale;
  view.scales = scales;
  if (scales == KvScales::per_row) {
    view.scale_stride_head = geometry.chunk_size;
    view.scale_stride_chunk = view.scale_stride_head * geometry.num_kv_heads;
  }
  return view;
}

/// Stores `count` floats in 8 bits and returns their scale: the largest magnitude divided by 127
/// (std::int8_t) or 448 (float8_e4m3), but at least 2^-126. The error of an element of std::int8_t
/// is at most half of the scale; of float8_e4m3 2^-4 of the element, or 2^-10 of the scale if that
/// is more. A row of zeros has scale 0. A row with a NaN or an infinity is stored as zeros with
/// scale NaN, so that outputs become NaN.
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
