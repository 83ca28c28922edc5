// The element types of CUDA's own headers, cuda_fp16.h and cuda_bf16.h. They are the same bits as
// half and bfloat16, and arrays of them are taken as arrays of those. Named here, not included.
#pragma once

#include <concepts>
#include <cstddef>
#include <iterator>
#include <span>
#include <type_traits>
#include <utility>

#include "../../element.hpp"
#include "config.hpp"

struct __half;
struct __nv_bfloat16;

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

template <class T>
struct OwnElement {
  using type = T;
};
template <class T>
struct OwnElement<const T> {
  using type = const typename OwnElement<T>::type;
};
template <>
struct OwnElement<::__half> {
  using type = half;
};
template <>
struct OwnElement<::__nv_bfloat16> {
  using type = bfloat16;
};
/// half for __half, bfloat16 for __nv_bfloat16, else T itself; const where T is.
template <class T>
using own_element = typename OwnElement<T>::type;

/// Whether T is one of CUDA's.
template <class T>
concept CudaElement = !std::same_as<T, own_element<T>>;

/// The type of what a range holds, const where it may not be written.
template <class R>
using element_of_range =
    typename decltype(std::span(std::declval<std::remove_reference_t<R>&>()))::element_type;

/// An argument: a std::span<T>, or what makes one, or the same of CUDA's type for T.
template <class T>
class ElementSpan {
 public:
  template <class R>
    requires std::convertible_to<R, std::span<T>>
  ElementSpan(R&& range) noexcept : span_(std::forward<R>(range)) {}
  template <class R>
    requires(!std::convertible_to<R, std::span<T>> &&
             CudaElement<std::remove_const_t<element_of_range<R>>> &&
             std::convertible_to<own_element<element_of_range<R>> (*)[], T (*)[]>)
  ElementSpan(R&& range) noexcept
      : span_(reinterpret_cast<T*>(std::data(range)), std::size(range)) {}

  [[nodiscard]] T* data() const noexcept { return span_.data(); }
  [[nodiscard]] std::size_t size() const noexcept { return span_.size(); }

 private:
  std::span<T> span_;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
