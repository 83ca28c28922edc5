// Looks up sizes, types and variants that are known at run time in the lists that kernels were
// compiled for.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "../../detail/attention/row_places.hpp"
#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../../element.hpp"
#include "../../kv_cache.hpp"
#include "../../variants.hpp"
#include "../any_attention.hpp"
#include "variant_name.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Calls f with a null T*, for the T of the list with this ElementType, which argument `argument`
/// has.
template <template <class...> class List, class... T, class F>
void with_type(List<T...>, ElementType type, const char* argument, const F& f) {
  const auto call = [&]<class X>(X* null) {
    f(null);
    return true;
  };
  if (!((type == element_type_of<T> && call(static_cast<T*>(nullptr))) || ...)) [[unlikely]]
    fail_argument(argument, name_of(type),
                  {"one that this program was built with: ", listed(List<T...>::types)});
}

/// Calls f(const KvView<T>&) if the view's type is one of the list.
template <class Types, class F>
void with_layer(Types types, const AnyKvView& layer, const F& f) {
  with_type(types, layer.type(), "layer.type()", [&]<class T>(T*) { f(layer.as<T>()); });
}

/// Calls f with the variant in its own type, if that is one of the list.
template <class... V, class F>
void with_variant(Variants<V...>, const AnyVariant& variant, const F& f) {
  const auto call = [&]<class X>(const X* typed) {
    if (typed != nullptr) f(*typed);
    return typed != nullptr;
  };
  if (!(call(variant.get_if<V>()) || ...)) [[unlikely]]
    fail_argument("variant", variant.name(),
                  {"one that this program was built with: ", listed(Variants<V...>::names)});
}

/// Returns f.operator()<Size>() for the size of the list that `asked` is.
template <HeadSize... Sizes, class F>
[[nodiscard]] std::unique_ptr<AnyAttention> with_size(HeadDims<Sizes...>, HeadSize asked,
                                                      const F& f) {
  std::unique_ptr<AnyAttention> made;
  if (((asked == Sizes && (made = f.template operator()<Sizes>(), true)) || ...)) return made;
  const auto text = [](HeadSize size) {
    return size.head_dim == size.value_dim ? joined({size.head_dim})
                                           : joined({size.head_dim, ":", size.value_dim});
  };
  std::string sizes;
  ((sizes += (sizes.empty() ? "" : ", ") + text(Sizes)), ...);
  fail_argument("head_dim", text(asked), {"one that this program was built with: ", sizes});
}

/// The elements as T, their type.
template <class T>
[[nodiscard]] GivenRows<const T> typed(const ConstElements& elements) noexcept {
  if (const auto& r = elements.rows)
    return GivenRows<const T>(rows_at(static_cast<const T*>(r->data), *r));
  return GivenRows<const T>(std::span(static_cast<const T*>(elements.data), elements.size));
}
template <class T>
[[nodiscard]] GivenRows<T> typed(const Elements& elements) noexcept {
  if (const auto& r = elements.rows) return GivenRows<T>(rows_at(static_cast<T*>(r->data), *r));
  return GivenRows<T>(std::span(static_cast<T*>(elements.data), elements.size));
}

/// The same for kernels that take no strides.
template <class T, class Given>
[[nodiscard]] auto typed_array(const char* argument, const Given& elements) {
  check_argument(!elements.rows, argument, "HeadRows",
                 "elements without gaps: kernels of this device take no strides");
  return typed<T>(elements).array;
}

/// Checks that `elements` has the type of `like`, the argument named `of`.
inline void check_same_type(const char* argument, ElementType type, const char* of,
                            ElementType like) {
  if (type != like) [[unlikely]]
    fail_argument(argument, name_of(type), {"that of ", of, ", ", name_of(like)});
}

/// A KvCache as an AnyKvCache. `LayerOf` calls layer(index, stream) as the device has it.
template <class Cache, class T, class LayerOf>
class AnyKvCacheOf final : public AnyKvCache {
 public:
  AnyKvCacheOf(ChunkSource source, int chunk_size, const KvCacheOptions& options)
      : cache_(ChunkAccess::cache<Cache>(std::move(source), chunk_size, options)) {}

  [[nodiscard]] ElementType type() const noexcept override { return element_type_of<T>; }
  [[nodiscard]] AnyKvView layer(int index, void* stream) override {
    return LayerOf{}(cache_, index, stream);
  }
  void grow(std::size_t num_chunks) override { cache_.grow(num_chunks); }
  [[nodiscard]] const KvCacheOptions& options() const noexcept override { return cache_.options(); }
  [[nodiscard]] std::size_t num_chunks() const noexcept override { return cache_.num_chunks(); }
  [[nodiscard]] std::size_t bytes_per_chunk() const noexcept override {
    return cache_.bytes_per_chunk();
  }
  [[nodiscard]] std::size_t bytes() const noexcept override { return cache_.bytes(); }
  [[nodiscard]] std::uint64_t tree_id() const noexcept override { return cache_.tree_id(); }

 private:
  Cache cache_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
