// What a unit that makes AnyAttention objects compiles kernels for: the lists it names, and finding
// in them what is asked for at run time.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "../../any_attention.hpp"
#include "../../element.hpp"
#include "../../error.hpp"
#include "../../kv_cache.hpp"
#include "../../variants.hpp"
#include "../base/check.hpp"
#include "../base/config.hpp"
#include "../base/element_type.hpp"
#include "any_kv.hpp"
#include "any_variant.hpp"
#include "elements.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

[[nodiscard]] constexpr bool all_differ(std::span<const std::string_view> names) noexcept {
  for (std::size_t i = 0; i < names.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      if (names[i] == names[j]) return false;
  return true;
}

}  // namespace detail

/// Elements per head of Q and K, and of V and O.
struct HeadSize {
  int head_dim;   ///< of Q and K
  int value_dim;  ///< of V and O

  /// As many of V as of K.
  constexpr HeadSize(int dim) noexcept : HeadSize(dim, dim) {}
  /// Each its own.
  constexpr HeadSize(int dim, int dim_of_v) noexcept : head_dim(dim), value_dim(dim_of_v) {}
  friend constexpr bool operator==(HeadSize, HeadSize) = default;
};

/// The sizes of heads that kernels are compiled for: HeadDims<64, 128, HeadSize(192, 128)>.
template <HeadSize... Sizes>
struct HeadDims {
  static_assert(sizeof...(Sizes) > 0, "HeadDims: name at least one size");
};
/// What K and V may be stored as: KvTypes<half, std::int8_t>.
template <CpuKvElement... T>
struct KvTypes {
  static_assert(sizeof...(T) > 0, "KvTypes: name at least one type");
  /// The types as numbers.
  static constexpr ElementType types[sizeof...(T)] = {element_type_of<T>...};
};
/// What q, k, v and out may be passed as on the CPU: QoTypes<float, half>.
template <QoElement... T>
struct QoTypes {
  static_assert(sizeof...(T) > 0, "QoTypes: name at least one type");
  /// The types as numbers.
  static constexpr ElementType types[sizeof...(T)] = {element_type_of<T>...};
};
/// The variants that kernels are compiled for, Plain where it is wanted:
/// Variants<Plain, SlidingWindow>.
template <AttentionVariant... V>
struct Variants {
  static_assert(sizeof...(V) > 0, "Variants: name at least one, perhaps Plain");
  static_assert((detail::NamedVariant<V> && ...),
                "Variants: a variant is found by its name at run time; give the type a member "
                "`static constexpr std::string_view name = \"...\"`");
  /// Of the variants.
  static constexpr std::string_view names[sizeof...(V)] = {VariantName<V>::value...};
  static_assert(detail::all_differ(names), "Variants: two of them have the same name");
};

namespace detail {

/// Calls f with a null T* for the T of the list whose number `type` is; `argument` had it.
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

/// Calls f with the variant as what it is, if its type is one of the list.
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

/// Elements of a type that has been found.
template <class T>
[[nodiscard]] std::span<const T> typed(const ConstElements& elements) noexcept {
  return {static_cast<const T*>(elements.data), elements.size};
}
template <class T>
[[nodiscard]] std::span<T> typed(const Elements& elements) noexcept {
  return {static_cast<T*>(elements.data), elements.size};
}

/// `elements` is of the type of `like`, the argument of the name `of`.
inline void check_same_type(const char* argument, ElementType type, const char* of,
                            ElementType like) {
  if (type != like) [[unlikely]]
    fail_argument(argument, name_of(type), {"that of ", of, ", ", name_of(like)});
}

/// A KvCache as an AnyKvCache. `LayerOf` calls layer(index, stream) as the device has it.
template <class Cache, class T, class LayerOf>
class AnyKvCacheOf final : public AnyKvCache {
 public:
  AnyKvCacheOf(SlotSource source, int chunk_size, const KvCacheOptions& options)
      : cache_(std::move(source), chunk_size, options) {}

  [[nodiscard]] ElementType type() const noexcept override { return element_type_of<T>; }
  [[nodiscard]] AnyKvView layer(int index, void* stream) override {
    return LayerOf{}(cache_, index, stream);
  }
  void grow(std::size_t num_slots) override { cache_.grow(num_slots); }
  [[nodiscard]] const KvCacheOptions& options() const noexcept override { return cache_.options(); }
  [[nodiscard]] std::size_t num_slots() const noexcept override { return cache_.num_slots(); }
  [[nodiscard]] std::size_t bytes_per_slot() const noexcept override {
    return cache_.bytes_per_slot();
  }
  [[nodiscard]] std::size_t bytes() const noexcept override { return cache_.bytes(); }
  [[nodiscard]] std::uint64_t tree_id() const noexcept override { return cache_.tree_id(); }

 private:
  Cache cache_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
