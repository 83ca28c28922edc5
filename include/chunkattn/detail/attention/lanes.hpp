// The language that variants of attention are written in: expressions over lanes. A lane is one
// logit, of one query head of one row with one key; some kernels hold consecutive keys in a vector,
// some consecutive rows. So a variant does not compute with vectors. Its functions are given
// placeholders and return what is to be computed, as a type; each kernel evaluates that on vectors
// of its own, compiled for its own instruction set:
//
//     auto logit(auto s, lanes::At at) const { return s + slope * (at.key - at.query); }
//
// There are reals (float), integers (int) and truths (the results of comparisons). Operators are
// those of C++: + - * / (real, whatever the operands), comparisons, && || ! (of which both sides
// are computed), and select, min, max, tanh, table, per_lane.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "../base/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// One logit's place: what per_lane() and the oracle hand to a user's function.
struct Place {
  int row;    ///< query token, in the caller's order: as in q
  int query;  ///< its path position
  int key;    ///< path position of the key, at most `query`
  int head;   ///< query head
};

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

/// \cond evaluators  kernels look into these, users name none of them
/// The logit: sm_scale * q·k, and what variants before this one made of it.
struct Logit {
  static constexpr Kind kind = Kind::real;
  static constexpr bool fixed = false;
};
/// Four integers: see Place.
enum class Coordinate { key, query, row, head };
template <Coordinate C>
struct Input {
  static constexpr Kind kind = Kind::integer;
  static constexpr bool fixed = C != Coordinate::key;
};

/// \endcond
/// The places of a vector's logits, lane by lane: see Place.
struct At {
  Input<Coordinate::key> key;      ///< path position of the key
  Input<Coordinate::query> query;  ///< path position of the row
  Input<Coordinate::row> row;      ///< query token, in the caller's order
  Input<Coordinate::head> head;    ///< query head
};
/// \cond evaluators

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

/// f(Place), called for each lane whose key the row may see (key <= query).
template <class F>
struct PerLane {
  static constexpr Kind kind =
      std::same_as<std::invoke_result_t<const F&, Place>, bool> ? Kind::truth : Kind::real;
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
/// \endcond

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

/// The smaller of each lane.
template <class A, class B>
  requires Operands<A, B>
CHUNKATTN_INLINE constexpr auto min(A a, B b) noexcept {
  return apply<Operation::min>(a, b);
}
/// The larger of each lane.
template <class A, class B>
  requires Operands<A, B>
CHUNKATTN_INLINE constexpr auto max(A a, B b) noexcept {
  return apply<Operation::max>(a, b);
}
/// The hyperbolic tangent, within about two units in the last place.
template <Real A>
CHUNKATTN_INLINE constexpr auto tanh(A a) noexcept {
  return apply<Operation::tanh>(a, a);
}
/// a where `condition` holds, else b.
template <Truth C, Operand A, Operand B>
CHUNKATTN_INLINE constexpr auto select(C condition, A a, B b) noexcept {
  return Select<C, decltype(expression(a)), decltype(expression(b))>{condition, expression(a),
                                                                     expression(b)};
}
/// data[index]: nothing is read for a key beyond the row's own position, nor for a row without one.
template <Expression I>
  requires(I::kind == Kind::integer)
CHUNKATTN_INLINE constexpr auto table(const float* data, I index) noexcept {
  return Table<I>{data, index};
}
/// f(Place), a number or a bool, one lane after the other: for what lanes cannot say. It is copied
/// with the variant, so it should capture pointers, not containers.
template <class F>
  requires std::is_invocable_v<const F&, Place>
CHUNKATTN_INLINE constexpr auto per_lane(F f) noexcept {
  return PerLane<F>{f};
}

}  // namespace lanes
CHUNKATTN_NAMESPACE_END
