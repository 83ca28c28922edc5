// Expressions of variants (detail/attention/lanes.hpp) for one logit: a register of an accumulator
// is one (row, key) pair. What is the same for all keys of a row the compiler computes once: loops
// over a tile are unrolled, and nothing in them is stored.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../variants.hpp"
#include "ptx.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// A query head of a row: what a logit's place is made of, beside the key.
struct Line {
  std::int32_t query;  ///< path position; -1: none, nothing is read for it
  std::int32_t row;    ///< query token, in the caller's order; -1: padding of a tile
  std::int32_t head;   ///< query head
};

CHUNKATTN_DEVICE float as_real(float x) {
  return x;
}
CHUNKATTN_DEVICE float as_real(std::int32_t x) {
  return static_cast<float>(x);
}

/// tanh within two units in the last place: around 0, where the other form would lose its digits,
/// an odd polynomial fitted to [0, 0.6]. NaN stays NaN.
CHUNKATTN_DEVICE float tanh_of(float x) {
  const float size = x < 0 ? -x : x;
  const float e = ptx::exp2(size * 2.885390081777927f);  // e^2x
  const float far = ptx::fma(-2.0f, ptx::divide(1.0f, e + 1.0f), 1.0f);
  const float square = x * x;
  float p = 0.015612626f;
  p = ptx::fma(p, square, -0.052211802f);
  p = ptx::fma(p, square, 0.13313116f);
  p = ptx::fma(p, square, -0.33332598f);
  const float near = ptx::fma(p * square, x, x);
  return size < 0.6f ? near : x < 0 ? -far : far;
}

/// Evaluates expressions for the logit `s` of a line with a key.
struct Evaluator {
  Line line;
  float s;
  std::int32_t key;

  CHUNKATTN_DEVICE float of(lanes::Logit) const { return s; }
  CHUNKATTN_DEVICE std::int32_t of(lanes::Input<lanes::Coordinate::key>) const { return key; }
  CHUNKATTN_DEVICE std::int32_t of(lanes::Input<lanes::Coordinate::query>) const {
    return line.query;
  }
  CHUNKATTN_DEVICE std::int32_t of(lanes::Input<lanes::Coordinate::row>) const { return line.row; }
  CHUNKATTN_DEVICE std::int32_t of(lanes::Input<lanes::Coordinate::head>) const {
    return line.head;
  }
  template <class X>
  CHUNKATTN_DEVICE X of(const lanes::Constant<X>& c) const {
    return c.value;
  }

  template <class I>
  CHUNKATTN_DEVICE float of(const lanes::Table<I>& table) const {
    const bool read = I::fixed ? line.query >= 0 : key <= line.query;
    return read ? table.data[of(table.index)] : 0.0f;
  }
  // The function must be one that a device can call: a struct at namespace scope whose operator()
  // is marked CHUNKATTN_HD. nvcc refuses others here.
  template <class F>
  CHUNKATTN_DEVICE auto of(const lanes::PerLane<F>& call) const {
    using Result = std::conditional_t<lanes::PerLane<F>::kind == lanes::Kind::truth, bool, float>;
    if (key > line.query) return Result{};
    return static_cast<Result>(call.f(Place{line.row, line.query, key, line.head}));
  }

  template <lanes::Operation O, class A, class B>
  CHUNKATTN_DEVICE auto of(const lanes::Apply<O, A, B>& e) const {
    if constexpr (O == lanes::Operation::tanh)
      return tanh_of(as_real(of(e.a)));
    else if constexpr (lanes::Apply<O, A, B>::kind == lanes::Kind::real)
      return combined<O>(as_real(of(e.a)), as_real(of(e.b)));
    else
      return combined<O>(of(e.a), of(e.b));
  }
  template <lanes::Comparison C, class A, class B>
  CHUNKATTN_DEVICE bool of(const lanes::Compare<C, A, B>& e) const {
    using lanes::Comparison;
    const auto a = of(e.a);
    const auto b = of(e.b);
    if constexpr (C == Comparison::both)
      return a && b;
    else if constexpr (C == Comparison::either)
      return a || b;
    else if constexpr (lanes::common_kind<A, B> == lanes::Kind::real)
      return compared<C>(as_real(a), as_real(b));
    else
      return compared<C>(a, b);
  }
  template <class A>
  CHUNKATTN_DEVICE bool of(const lanes::Not<A>& e) const {
    return !of(e.a);
  }
  template <class C, class A, class B>
  CHUNKATTN_DEVICE auto of(const lanes::Select<C, A, B>& e) const {
    if constexpr (lanes::Select<C, A, B>::kind == lanes::Kind::real)
      return of(e.condition) ? as_real(of(e.a)) : as_real(of(e.b));
    else
      return of(e.condition) ? of(e.a) : of(e.b);
  }

 private:
  template <lanes::Operation O, class X>
  CHUNKATTN_DEVICE static X combined(X a, X b) {
    using lanes::Operation;
    if constexpr (O == Operation::add)
      return a + b;
    else if constexpr (O == Operation::subtract)
      return a - b;
    else if constexpr (O == Operation::multiply)
      return a * b;
    else if constexpr (O == Operation::divide)
      return ptx::divide(a, b);
    else if constexpr (O == Operation::min)
      return a < b ? a : b;
    else
      return a > b ? a : b;
  }
  template <lanes::Comparison C, class X>
  CHUNKATTN_DEVICE static bool compared(X a, X b) {
    using lanes::Comparison;
    if constexpr (C == Comparison::less)
      return a < b;
    else if constexpr (C == Comparison::less_equal)
      return a <= b;
    else
      return a == b;
  }
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
