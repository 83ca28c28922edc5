// The names of the library's variants, by which they are found at run time.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <new>
#include <span>
#include <string_view>
#include <type_traits>

#include "../../detail/support/config.hpp"
#include "../../variants.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// The name by which a variant is found at run time: that of the library's types, or the member
/// `static constexpr std::string_view name` of a user's type, of Bias<F> and Mask<F> that of F.
/// A name stands for one type in the whole program.
template <class V>
struct VariantName {};

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

[[nodiscard]] constexpr bool all_differ(std::span<const std::string_view> names) noexcept {
  for (std::size_t i = 0; i < names.size(); ++i)
    for (std::size_t j = 0; j < i; ++j)
      if (names[i] == names[j]) return false;
  return true;
}

template <NamesItself V>
struct VariantName<V> {
  static constexpr std::string_view value = V::name;
};
template <>
struct VariantName<NoVariant> {
  static constexpr std::string_view value = "NoVariant";
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
template <NamesItself F>
struct VariantName<Bias<F>> {
  static constexpr std::string_view value = F::name;
};
template <NamesItself F>
struct VariantName<Mask<F>> {
  static constexpr std::string_view value = F::name;
};
template <NamedVariant A, NamedVariant B>
struct VariantName<Both<A, B>> {
  static constexpr std::string_view value{JoinedName<A, B>::text.data(),
                                          JoinedName<A, B>::text.size()};
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
