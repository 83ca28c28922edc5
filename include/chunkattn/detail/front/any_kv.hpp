// K and V whose element type is known at run time: a view of a layer, and a cache behind virtual
// functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <variant>

#include "../../element.hpp"
#include "../../error.hpp"
#include "../../kv_cache.hpp"
#include "../../kv_view.hpp"
#include "../base/check.hpp"
#include "../base/config.hpp"
#include "../base/element_type.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// A KvView of any element type. It owns nothing.
class AnyKvView {
 public:
  /// No memory: refused by every call.
  AnyKvView() = default;
  /// The same K and V.
  template <CpuKvElement T>
  AnyKvView(const KvView<T>& view) noexcept : view_(view) {
    using Numbered =
        std::variant_alternative_t<static_cast<std::size_t>(element_type_of<T>), Views>;
    static_assert(std::is_same_v<Numbered, KvView<T>>, "type() is the index");
  }

  /// Of K and of V.
  [[nodiscard]] ElementType type() const noexcept {
    return static_cast<ElementType>(view_.index());
  }
  /// The view as that of T. \throws InvalidArgument if T is not type()
  template <CpuKvElement T>
  [[nodiscard]] const KvView<T>& as() const {
    const KvView<T>* const view = std::get_if<KvView<T>>(&view_);
    if (view == nullptr) [[unlikely]]
      detail::fail_argument("layer.type()", name_of(type()), {element_name<T>()});
    return *view;
  }
  /// f(const KvView<T>&) of the T that it has.
  template <class F>
  decltype(auto) visit(F&& f) const {
    return std::visit(f, view_);
  }
  /// The KV heads [first, first + count), as KvView::heads() has it.
  [[nodiscard]] AnyKvView heads(int first, int count) const {
    return visit([&](const auto& view) -> AnyKvView { return view.heads(first, count); });
  }

 private:
  using Views = std::variant<KvView<float>, KvView<half>, KvView<bfloat16>, KvView<std::int8_t>,
                             KvView<float8_e4m3>>;
  Views view_;
};

/// A view of an engine's own memory, laid out as for make_kv_view(k, v, geometry).
/// \param k_scale, v_scale  scales of 8-bit rows, [num_slots][num_kv_heads][chunk_size]; null for
///                          other types
/// \throws InvalidArgument where memory is missing or sizes make no sense
[[nodiscard]] inline AnyKvView make_any_kv_view(ElementType type, void* k, void* v,
                                                const KvGeometry& geometry,
                                                float* k_scale = nullptr,
                                                float* v_scale = nullptr) {
  const auto view = [&]<class T>(T*) -> AnyKvView {
    if constexpr (has_row_scales<T>) {
      return make_kv_view(static_cast<T*>(k), static_cast<T*>(v), k_scale, v_scale, geometry);
    } else {
      detail::check_argument(k_scale == nullptr && v_scale == nullptr, "k_scale", "given",
                             {"null: rows of ", element_name<T>(), " have no scales"});
      return make_kv_view(static_cast<T*>(k), static_cast<T*>(v), geometry);
    }
  };
  switch (type) {
    case ElementType::float32:
      return view(static_cast<float*>(nullptr));
    case ElementType::half:
      return view(static_cast<half*>(nullptr));
    case ElementType::bfloat16:
      return view(static_cast<bfloat16*>(nullptr));
    case ElementType::int8:
      return view(static_cast<std::int8_t*>(nullptr));
    case ElementType::float8_e4m3:
      return view(static_cast<float8_e4m3*>(nullptr));
  }
  detail::fail_argument("type", static_cast<int>(type), "an ElementType");
}

/// A KvCache of some device and element type: AnyAttention::make_cache() makes it.
class AnyKvCache {
 public:
  AnyKvCache() = default;
  AnyKvCache(const AnyKvCache&) = delete;
  AnyKvCache& operator=(const AnyKvCache&) = delete;
  virtual ~AnyKvCache() = default;

  /// Of K and of V.
  [[nodiscard]] virtual ElementType type() const noexcept = 0;
  /// K and V of layer `index`, for all slots that the tree has handed out so far. Take it anew in
  /// each step, on the thread that calls the tree: it grows the memory where the tree has grown.
  /// \param stream  CUDA: the cudaStream_t that may be capturing; else null
  /// \throws InvalidArgument for a layer that the cache does not have; std::bad_alloc or
  ///         DeviceError without memory
  [[nodiscard]] virtual AnyKvView layer(int index, void* stream = nullptr) = 0;
  /// Makes room for slots [0, num_slots) in every layer; never moves one.
  virtual void grow(std::size_t num_slots) = 0;

  /// The geometry it was made for.
  [[nodiscard]] virtual const KvCacheOptions& options() const noexcept = 0;
  /// Slots that have memory in every layer.
  [[nodiscard]] virtual std::size_t num_slots() const noexcept = 0;
  /// Bytes of K and V of one slot, all layers together.
  [[nodiscard]] virtual std::size_t bytes_per_slot() const noexcept = 0;
  /// Bytes held, all layers together.
  [[nodiscard]] virtual std::size_t bytes() const noexcept = 0;
  /// Number of the tree that it follows.
  [[nodiscard]] virtual std::uint64_t tree_id() const noexcept = 0;
};

/// A cache of known element type as a KvProvider: for for_each_kv_span(), gather_kv() and what else
/// moves K/V.
template <CpuKvElement T>
class KvCacheOf {
 public:
  /// `cache` must outlive this object. \throws InvalidArgument if T is not its type
  explicit KvCacheOf(AnyKvCache& cache) : cache_(&cache) {
    if (cache.type() != element_type_of<T>) [[unlikely]]
      detail::fail_argument("cache.type()", name_of(cache.type()), {element_name<T>()});
  }
  /// K and V of layer `index`.
  [[nodiscard]] KvView<T> layer(int index) { return cache_->layer(index).template as<T>(); }
  /// The cache's geometry.
  [[nodiscard]] const KvCacheOptions& options() const noexcept { return cache_->options(); }
  /// Number of the tree that the cache follows.
  [[nodiscard]] std::uint64_t tree_id() const noexcept { return cache_->tree_id(); }

 private:
  AnyKvCache* cache_;
};

CHUNKATTN_NAMESPACE_END
