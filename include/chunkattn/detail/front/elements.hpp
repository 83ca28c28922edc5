// Arrays of elements whose type is known at run time: q, k, v and out of AnyAttention.
#pragma once

#include <concepts>
#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

#include "../../element.hpp"
#include "../base/config.hpp"
#include "../base/element_type.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

template <class R>
using range_element = std::remove_pointer_t<decltype(std::data(std::declval<R&>()))>;

/// A contiguous range of float, half or bfloat16.
template <class R>
concept ElementRange = requires(R& range) {
  { std::size(range) } -> std::convertible_to<std::size_t>;
  requires QoElement<std::remove_const_t<range_element<R>>>;
};

}  // namespace detail

/// Elements that are read, of a type known at run time. Non-owning; host or device memory.
struct ConstElements {
  const void* data = nullptr;               ///< the first; null only where there are none
  ElementType type = ElementType::float32;  ///< of each of them
  std::size_t size = 0;                     ///< how many, in elements

  ConstElements() = default;
  /// `count` of them from `first` on.
  ConstElements(const void* first, ElementType element, std::size_t count) noexcept
      : data(first), type(element), size(count) {}
  /// A std::vector, std::span, std::array or the like of float, half or bfloat16.
  template <detail::ElementRange R>
  ConstElements(const R& range) noexcept
      : ConstElements(std::data(range),
                      element_type_of<std::remove_const_t<detail::range_element<const R>>>,
                      std::size(range)) {}
};

/// Elements that are written, of a type known at run time. Non-owning; host or device memory.
struct Elements {
  void* data = nullptr;                     ///< the first
  ElementType type = ElementType::float32;  ///< of each of them
  std::size_t size = 0;                     ///< how many, in elements

  Elements() = default;
  /// `count` of them from `first` on.
  Elements(void* first, ElementType element, std::size_t count) noexcept
      : data(first), type(element), size(count) {}
  /// A std::vector, std::span, std::array or the like of float, half or bfloat16, not const.
  template <class R>
    requires detail::ElementRange<std::remove_reference_t<R>> &&
             (!std::is_const_v<detail::range_element<std::remove_reference_t<R>>>)
  Elements(R&& range) noexcept
      : Elements(std::data(range),
                 element_type_of<detail::range_element<std::remove_reference_t<R>>>,
                 std::size(range)) {}

  /// The same, to be read.
  operator ConstElements() const noexcept { return {data, type, size}; }
};

CHUNKATTN_NAMESPACE_END
