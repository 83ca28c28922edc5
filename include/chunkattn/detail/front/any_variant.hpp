// A variant of attention whose type the kernels were compiled for elsewhere.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <new>
#include <string_view>
#include <type_traits>

#include "../../variants.hpp"
#include "../base/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// The name by which a variant is found at run time: that of the library's types, or the member
/// `static constexpr std::string_view name` of a type of yours (for Bias<F> and Mask<F>: of F).
/// A name stands for one type in the whole program. Specialise it for types that you cannot change.
template <class V>
struct VariantName {};

namespace detail {

template <class V>
concept NamesItself = requires {
  { V::name } -> std::convertible_to<std::string_view>;
};
template <class V>
concept NamedVariant = AttentionVariant<V> && requires {
  { VariantName<V>::value } -> std::convertible_to<std::string_view>;
};

/// "A + B", as a constant.
template <class A, class B>
struct JoinedName {
  static constexpr std::string_view a = VariantName<A>::value, plus = " + ",
                                    b = VariantName<B>::value;
  static constexpr auto text = [] {
    std::array<char, a.size() + plus.size() + b.size()> joined{};
    std::size_t at = 0;
    for (const std::string_view part : {a, plus, b})
      for (const char c : part) joined[at++] = c;
    return joined;
  }();
};

}  // namespace detail

/// \cond names
template <detail::NamesItself V>
struct VariantName<V> {
  static constexpr std::string_view value = V::name;
};
template <>
struct VariantName<Plain> {
  static constexpr std::string_view value = "Plain";
};
template <>
struct VariantName<SoftCap> {
  static constexpr std::string_view value = "SoftCap";
};
template <>
struct VariantName<SlidingWindow> {
  static constexpr std::string_view value = "SlidingWindow";
};
template <>
struct VariantName<Sinks> {
  static constexpr std::string_view value = "Sinks";
};
template <>
struct VariantName<Alibi> {
  static constexpr std::string_view value = "Alibi";
};
template <detail::NamesItself F>
struct VariantName<Bias<F>> {
  static constexpr std::string_view value = F::name;
};
template <detail::NamesItself F>
struct VariantName<Mask<F>> {
  static constexpr std::string_view value = F::name;
};
template <detail::NamedVariant A, detail::NamedVariant B>
struct VariantName<Both<A, B>> {
  static constexpr std::string_view value{detail::JoinedName<A, B>::text.data(),
                                          detail::JoinedName<A, B>::text.size()};
};
/// \endcond

/// A copy of a variant, of any type that has a name. What the variant points to (Sinks::logits,
/// say) is read until the call that it is given to returns.
class AnyVariant {
 public:
  /// The most bytes that a variant may have here.
  static constexpr std::size_t max_bytes = 128;

  /// Attention without a variant.
  AnyVariant() noexcept : AnyVariant(Plain{}) {}
  /// A copy of `variant`.
  template <class V>
    requires(!std::same_as<V, AnyVariant>) && AttentionVariant<V>
  AnyVariant(const V& variant) noexcept {
    static_assert(detail::NamedVariant<V>,
                  "AnyVariant: a variant is found by its name at run time; give the type a member "
                  "`static constexpr std::string_view name = \"...\"`");
    static_assert(
        std::is_trivially_copyable_v<V> && sizeof(V) <= max_bytes &&
            alignof(V) <= alignof(std::max_align_t),
        "AnyVariant: a variant must be trivially copyable and have at most 128 bytes; let "
        "it point to what is larger");
    if constexpr (detail::NamedVariant<V>) name_ = VariantName<V>::value;
    bytes_ = sizeof(V);
    ::new (static_cast<void*>(members_)) V(variant);
  }

  /// The name of its type.
  [[nodiscard]] std::string_view name() const noexcept { return name_; }
  /// The variant, if it is a V; else null.
  template <AttentionVariant V>
  [[nodiscard]] const V* get_if() const noexcept {
    if (name_ != VariantName<V>::value || bytes_ != sizeof(V)) return nullptr;
    return std::launder(reinterpret_cast<const V*>(members_));
  }

 private:
  std::string_view name_;
  std::size_t bytes_ = 0;
  alignas(std::max_align_t) unsigned char members_[max_bytes] = {};
};

CHUNKATTN_NAMESPACE_END
