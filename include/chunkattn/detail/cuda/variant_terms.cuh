// What the host makes of a variant for the kernels. logit(), visible() and sink() are called here,
// on the host; what they return, expressions with the variant's numbers in them, is a kernel's
// argument. So a variant's functions need not be callable on a device, and a kernel's type says all
// that it computes. Only hidden(), which returns no expression, is called by kernels.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "../../variants.hpp"
#include "hidden_keys.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// In place of an expression that a variant does not have.
struct NoTerm {};

template <class V>
[[nodiscard]] auto logit_term(const V& variant) {
  if constexpr (ChangesLogits<V>)
    return lanes::expression(variant.logit(lanes::Logit{}, lanes::At{}));
  else
    return NoTerm{};
}
template <class V>
[[nodiscard]] auto visible_term(const V& variant) {
  if constexpr (HidesKeys<V>)
    return variant.visible(lanes::At{});
  else
    return NoTerm{};
}
template <class V>
[[nodiscard]] auto sink_term(const V& variant) {
  if constexpr (HasSinks<V>)
    return lanes::expression(variant.sink(lanes::At{}));
  else
    return NoTerm{};
}

/// A variant as kernels see it.
template <class V>
struct VariantTerms {
  static constexpr bool changes_logits = ChangesLogits<V>;
  static constexpr bool hides_keys = HidesKeys<V>;
  static constexpr bool skips_keys = SkipsKeys<V>;
  static constexpr bool has_sinks = HasSinks<V>;

  decltype(logit_term(std::declval<const V&>())) logit;
  decltype(visible_term(std::declval<const V&>())) visible;
  decltype(sink_term(std::declval<const V&>())) sink;
  decltype(skipping_part(std::declval<const V&>())) skipping;  ///< has hidden()
  float sm_scale;                                              ///< factor of q·k before `logit`
};

/// No variant: kernels are compiled as if there were none.
template <>
struct VariantTerms<Plain> {
  static constexpr bool changes_logits = false;
  static constexpr bool hides_keys = false;
  static constexpr bool skips_keys = false;
  static constexpr bool has_sinks = false;
};

template <class V>
[[nodiscard]] VariantTerms<V> terms_of(const V& variant, float sm_scale) {
  static_assert(std::is_trivially_copyable_v<VariantTerms<V>>,
                "a variant goes to the device byte by byte: let it hold numbers, pointers and "
                "functions of such");
  return {logit_term(variant), visible_term(variant), sink_term(variant), skipping_part(variant),
          sm_scale};
}

/// The tables of an expression: each(e, f) calls f(data).
struct Tables {
  template <class E, class F>
  static void each(const E&, const F&) {}
  template <class I, class F>
  static void each(const lanes::Table<I>& e, const F& f) {
    f(e.data);
    each(e.index, f);
  }
  template <lanes::Operation O, class A, class B, class F>
  static void each(const lanes::Apply<O, A, B>& e, const F& f) {
    each(e.a, f);
    each(e.b, f);
  }
  template <lanes::Comparison C, class A, class B, class F>
  static void each(const lanes::Compare<C, A, B>& e, const F& f) {
    each(e.a, f);
    each(e.b, f);
  }
  template <class A, class F>
  static void each(const lanes::Not<A>& e, const F& f) {
    each(e.a, f);
  }
  template <class C, class A, class B, class F>
  static void each(const lanes::Select<C, A, B>& e, const F& f) {
    each(e.condition, f);
    each(e.a, f);
    each(e.b, f);
  }
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
