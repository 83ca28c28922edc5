// The types of expressions over lanes, which describe what kernels compute: see variants.hpp.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "../support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

struct LogitIndex;

namespace lanes {

/// What the lanes of an expression hold.
enum class Kind { real, integer, truth };

/// What can be evaluated. `fixed`: the same for all keys of a row and head, so that a kernel
/// computes it once per block.
template <class E>
concept Expression = requires {
  { E::kind } -> std::convertible_to<Kind>;
  { E::fixed } -> std::convertible_to<bool>;
};
/// An expression that is a number.
template <class E>
concept Real = Expression<E> && E::kind != Kind::truth;  // integers become reals
/// An expression that is true or false.
template <class E>
concept Truth = Expression<E> && E::kind == Kind::truth;

// ---- What an expression is made of ------------------------------------------------------------

/// The logit: sm_scale * q·k, changed by the variants before this one.
struct Logit {
  static constexpr Kind kind = Kind::real;
  static constexpr bool fixed = false;
};
/// Four integers: see LogitIndex.
enum class Coordinate { key, query, row, head };
template <Coordinate C>
struct Input {
  static constexpr Kind kind = Kind::integer;
  static constexpr bool fixed = C != Coordinate::key;
};

template <class X>
struct Constant {
  static constexpr Kind kind = std::is_integral_v<X> ? Kind::integer : Kind::real;
  static constexpr bool fixed = true;
  X value;
};

/// data[index].
template <class I>
struct Table {
  static constexpr Kind kind = Kind::real;
  static constexpr bool fixed = I::fixed;
  const float* data;
  I index;
};

/// f(LogitIndex), called for each lane whose key the row may see (key <= query).
template <class F>
struct PerLane {
  static constexpr Kind kind =
      std::same_as<std::invoke_result_t<const F&, LogitIndex>, bool> ? Kind::truth : Kind::real;
  static constexpr bool fixed = false;
  F f;
};

enum class Operation { add, subtract, multiply, divide, min, max, tanh };
enum class Comparison { less, less_equal, equal, both, either };

template <class A, class B>
inline constexpr Kind common_kind =
    A::kind == Kind::integer && B::kind == Kind::integer ? Kind::integer : Kind::real;

/// An operation on two numbers; tanh has its operand twice.
template <Operation O, class A, class B>
struct Apply {
  static constexpr Kind kind =
      O == Operation::divide || O == Operation::tanh ? Kind::real : common_kind<A, B>;
  static constexpr bool fixed = A::fixed && B::fixed;
  A a;
  B b;
};

template <class E>
inline constexpr bool is_product = false;
template <class A, class B>
inline constexpr bool is_product<Apply<Operation::multiply, A, B>> = true;

template <Comparison C, class A, class B>
struct Compare {
  static constexpr Kind kind = Kind::truth;
  static constexpr bool fixed = A::fixed && B::fixed;
  A a;
  B b;
};

template <class A>
struct Not {
  static constexpr Kind kind = Kind::truth;
  static constexpr bool fixed = A::fixed;
  A a;
};

template <class C, class A, class B>
struct Select {
  static constexpr Kind kind = common_kind<A, B>;
  static constexpr bool fixed = C::fixed && A::fixed && B::fixed;
  C condition;
  A a;
  B b;
};

// ---- Operators --------------------------------------------------------------------------------

/// A number of C++, the same in all lanes.
template <class X>
concept Number = std::is_arithmetic_v<X> && !std::same_as<X, bool>;
/// One side of an operator.
template <class X>
concept Operand = Real<X> || Number<X>;
/// What an operator takes: at least one side is an expression.
template <class A, class B>
concept Operands = Operand<A> && Operand<B> && (Real<A> || Real<B>);

template <class X>
CHUNKATTN_INLINE constexpr auto expression(X x) noexcept {
  if constexpr (Expression<X>)
    return x;
  else if constexpr (std::is_integral_v<X>)
    return Constant<std::int32_t>{static_cast<std::int32_t>(x)};
  else
    return Constant<float>{static_cast<float>(x)};
}
template <Operation O, class A, class B>
CHUNKATTN_INLINE constexpr auto apply(A a, B b) noexcept {
  return Apply<O, decltype(expression(a)), decltype(expression(b))>{expression(a), expression(b)};
}
template <Comparison C, class A, class B>
CHUNKATTN_INLINE constexpr auto compare(A a, B b) noexcept {
  return Compare<C, decltype(expression(a)), decltype(expression(b))>{expression(a), expression(b)};
}

template <class A, class B>
  requires Operands<A, B>
CHUNKATTN_INLINE constexpr auto operator+(A a, B b) noexcept {
  return apply<Operation::add>(a, b);
}
template <class A, class B>
  requires Operands<A, B>
CHUNKATTN_INLINE constexpr auto operator-(A a, B b) noexcept {
  return apply<Operation::subtract>(a, b);
}
template <Real A>
CHUNKATTN_INLINE constexpr auto operator-(A a) noexcept {
  return apply<Operation::subtract>(0, a);
}
template <class A, class B>
  requires Operands<A, B>
CHUNKATTN_INLINE constexpr auto operator*(A a, B b) noexcept {
  return apply<Operation::multiply>(a, b);
}
template <class A, class B>
  requires Operands<A, B>
CHUNKATTN_INLINE constexpr auto operator/(A a, B b) noexcept {
  return apply<Operation::divide>(a, b);
}
template <class A, class B>
  requires Operands<A, B>
CHUNKATTN_INLINE constexpr auto operator<(A a, B b) noexcept {
  return compare<Comparison::less>(a, b);
}
template <class A, class B>
  requires Operands<A, B>
CHUNKATTN_INLINE constexpr auto operator>(A a, B b) noexcept {
  return compare<Comparison::less>(b, a);
}
template <class A, class B>
  requires Operands<A, B>
CHUNKATTN_INLINE constexpr auto operator<=(A a, B b) noexcept {
  return compare<Comparison::less_equal>(a, b);
}
template <class A, class B>
  requires Operands<A, B>
CHUNKATTN_INLINE constexpr auto operator>=(A a, B b) noexcept {
  return compare<Comparison::less_equal>(b, a);
}
template <class A, class B>
  requires Operands<A, B>
CHUNKATTN_INLINE constexpr auto operator==(A a, B b) noexcept {
  return compare<Comparison::equal>(a, b);
}
template <class A, class B>
  requires Operands<A, B>
CHUNKATTN_INLINE constexpr auto operator!=(A a, B b) noexcept {
  return !(a == b);
}
template <Truth A, Truth B>
CHUNKATTN_INLINE constexpr auto operator&&(A a, B b) noexcept {
  return Compare<Comparison::both, A, B>{a, b};
}
template <Truth A, Truth B>
CHUNKATTN_INLINE constexpr auto operator||(A a, B b) noexcept {
  return Compare<Comparison::either, A, B>{a, b};
}
template <Truth A>
CHUNKATTN_INLINE constexpr auto operator!(A a) noexcept {
  return Not<A>{a};
}

}  // namespace lanes
CHUNKATTN_NAMESPACE_END
