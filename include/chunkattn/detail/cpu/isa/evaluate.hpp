// Expressions of variants (detail/attention/lanes.hpp) on this pass's vectors. The lanes are
// consecutive keys of one line, or consecutive lines with one key.
#ifndef CHUNKATTN_ISA_EVALUATE
#define CHUNKATTN_ISA_EVALUATE

#include "pass.hpp"
#include "simd.hpp"

CHUNKATTN_PASS_BEGIN(VECTORS)

/// What the variant needs to know of the lines of a task, beside their kv_len.
struct LineIndices {
  const std::int32_t* kv_len;  ///< [lines] the row's position is one less
  const std::int32_t* row;     ///< [lines] query token, in the caller's order
  const std::int32_t* head;    ///< [lines] query head
};

/// Lanes that are keys key, key + 1, … of one line.
template <int W>
struct KeyLanes {
  LogitIndex line;  ///< its key is not looked at

  CHUNKATTN_INLINE simd::Int<W> q_idx() const { return simd::broadcast_int<W>(line.q_idx); }
  CHUNKATTN_INLINE simd::Int<W> row() const { return simd::broadcast_int<W>(line.row); }
  CHUNKATTN_INLINE simd::Int<W> head() const { return simd::broadcast_int<W>(line.head); }
  CHUNKATTN_INLINE static simd::Int<W> keys(int key) { return simd::iota<W>() + key; }
  CHUNKATTN_INLINE LogitIndex index(int key, int lane) const {
    return {line.row, line.q_idx, key + lane, line.head};
  }
};

/// Lanes that are W lines, with one key.
template <int W>
struct RowLanes {
  LineIndices lines;  ///< from the first of them on

  CHUNKATTN_INLINE simd::Int<W> q_idx() const { return simd::load_int<W>(lines.kv_len) - 1; }
  CHUNKATTN_INLINE simd::Int<W> row() const { return simd::load_int<W>(lines.row); }
  CHUNKATTN_INLINE simd::Int<W> head() const { return simd::load_int<W>(lines.head); }
  CHUNKATTN_INLINE static simd::Int<W> keys(int key) { return simd::broadcast_int<W>(key); }
  CHUNKATTN_INLINE LogitIndex index(int key, int lane) const {
    return {lines.row[lane], lines.kv_len[lane] - 1, key, lines.head[lane]};
  }
};

/// A sub-expression that is the same for all keys, evaluated before the loop over them.
template <class V, lanes::Kind K>
struct Bound {
  static constexpr lanes::Kind kind = K;
  static constexpr bool fixed = true;
  V value;
};

template <int W>
CHUNKATTN_INLINE simd::Float<W> as_real(simd::Float<W> x) {
  return x;
}
template <int W>
CHUNKATTN_INLINE simd::Float<W> as_real(simd::Int<W> x) {
  return __builtin_convertvector(x, simd::Float<W>);
}

/// tanh: an odd polynomial around 0, where 1 - e^-2x would lose its digits. NaN stays NaN.
template <int W>
CHUNKATTN_INLINE simd::Float<W> tanh_lanes(simd::Float<W> x) {
  using Real = simd::Float<W>;
  const simd::Unsigned<W> bits = simd::bits_as<simd::Unsigned<W>>(x);
  const Real size = simd::bits_as<Real>(bits & 0x7fffffffu);
  const Real e = simd::exp_nonpositive<W>(size * -2.0f);
  const Real outer = (1.0f - e) / (1.0f + e);
  const Real square = x * x;
  Real p = simd::broadcast<W>(62.0f / 2835.0f);
  p = simd::fma(p, square, simd::broadcast<W>(-17.0f / 315.0f));
  p = simd::fma(p, square, simd::broadcast<W>(2.0f / 15.0f));
  p = simd::fma(p, square, simd::broadcast<W>(-1.0f / 3.0f));
  const Real inner = simd::fma(p * square, size, size);
  const Real result = simd::select<W>(size < simd::broadcast<W>(0.3f), inner, outer);
  return simd::bits_as<Real>(simd::bits_as<simd::Unsigned<W>>(result) | (bits & 0x80000000u));
}

/// Evaluates expressions for the logits `s` at the key (or the first key) `key`.
template <int W, class Lanes>
struct Evaluator {
  using Real = simd::Float<W>;
  using Int = simd::Int<W>;

  const Lanes& at;
  Real s;
  int key;

  CHUNKATTN_INLINE Real of(lanes::Logit) const { return s; }
  CHUNKATTN_INLINE Int of(lanes::Input<lanes::Coordinate::key>) const { return Lanes::keys(key); }
  CHUNKATTN_INLINE Int of(lanes::Input<lanes::Coordinate::query>) const { return at.q_idx(); }
  CHUNKATTN_INLINE Int of(lanes::Input<lanes::Coordinate::row>) const { return at.row(); }
  CHUNKATTN_INLINE Int of(lanes::Input<lanes::Coordinate::head>) const { return at.head(); }
  CHUNKATTN_INLINE Real of(const lanes::Constant<float>& c) const {
    return simd::broadcast<W>(c.value);
  }
  CHUNKATTN_INLINE Int of(const lanes::Constant<std::int32_t>& c) const {
    return simd::broadcast_int<W>(c.value);
  }
  template <class V, lanes::Kind K>
  CHUNKATTN_INLINE V of(const Bound<V, K>& bound) const {
    return bound.value;
  }

  template <class I>
  CHUNKATTN_INLINE Real of(const lanes::Table<I>& table) const {
    // A line beyond the last, or one that sees nothing, stands at position -1.
    const Int read = I::fixed ? Int(at.q_idx() >= 0) : Int(Lanes::keys(key) <= at.q_idx());
    const Int index = read & of(table.index);
    Real result{};
    for (int lane = 0; lane < W; ++lane) result[lane] = table.data[index[lane]];
    return result;
  }
  template <class F>
  CHUNKATTN_INLINE auto of(const lanes::PerLane<F>& call) const {
    using Result = std::conditional_t<lanes::PerLane<F>::kind == lanes::Kind::truth, Int, Real>;
    Result result{};
    for (int lane = 0; lane < W; ++lane) {
      const LogitIndex index = at.index(key, lane);
      if (index.kv_idx > index.q_idx) continue;
      if constexpr (std::is_same_v<Result, Int>)
        result[lane] = call.f(index) ? -1 : 0;
      else
        result[lane] = static_cast<float>(call.f(index));
    }
    return result;
  }

  // Multiply-adds are written as such, so that no compiler fuses one in this kernel and not in
  // that.
  template <lanes::Operation O, class A, class B>
  CHUNKATTN_INLINE auto of(const lanes::Apply<O, A, B>& e) const {
    using lanes::Operation;
    constexpr bool real = lanes::Apply<O, A, B>::kind == lanes::Kind::real;
    if constexpr (O == Operation::tanh) {
      return tanh_lanes<W>(as_real<W>(of(e.a)));
    } else if constexpr (O == Operation::add && real && lanes::is_product<B>) {
      return simd::fma(as_real<W>(of(e.b.a)), as_real<W>(of(e.b.b)), as_real<W>(of(e.a)));
    } else if constexpr (O == Operation::add && real && lanes::is_product<A>) {
      return simd::fma(as_real<W>(of(e.a.a)), as_real<W>(of(e.a.b)), as_real<W>(of(e.b)));
    } else if constexpr (real) {
      return combined<O>(as_real<W>(of(e.a)), as_real<W>(of(e.b)));
    } else {
      return combined<O>(of(e.a), of(e.b));
    }
  }
  template <lanes::Comparison C, class A, class B>
  CHUNKATTN_INLINE Int of(const lanes::Compare<C, A, B>& e) const {
    using lanes::Comparison;
    if constexpr (C == Comparison::both)
      return of(e.a) & of(e.b);
    else if constexpr (C == Comparison::either)
      return of(e.a) | of(e.b);
    else if constexpr (lanes::common_kind<A, B> == lanes::Kind::real)
      return compared<C>(as_real<W>(of(e.a)), as_real<W>(of(e.b)));
    else
      return compared<C>(of(e.a), of(e.b));
  }
  template <class A>
  CHUNKATTN_INLINE Int of(const lanes::Not<A>& e) const {
    return ~of(e.a);
  }
  template <class C, class A, class B>
  CHUNKATTN_INLINE auto of(const lanes::Select<C, A, B>& e) const {
    if constexpr (lanes::Select<C, A, B>::kind == lanes::Kind::real)
      return simd::select<W>(of(e.condition), as_real<W>(of(e.a)), as_real<W>(of(e.b)));
    else
      return Int(of(e.condition) ? of(e.a) : of(e.b));
  }

  /// The expression with all that is the same for all keys evaluated.
  template <class E>
  CHUNKATTN_INLINE auto bind(const E& e) const {
    if constexpr (E::fixed)
      return Bound<decltype(of(e)), E::kind>{of(e)};
    else
      return bind_parts(e);
  }

 private:
  template <lanes::Operation O, class V>
  CHUNKATTN_INLINE static V combined(V a, V b) {
    using lanes::Operation;
    if constexpr (O == Operation::add) return a + b;
    if constexpr (O == Operation::subtract) return a - b;
    if constexpr (O == Operation::multiply) return a * b;
    if constexpr (O == Operation::divide) return a / b;
    if constexpr (O == Operation::min) return a < b ? a : b;
    if constexpr (O == Operation::max) return a > b ? a : b;
  }
  template <lanes::Comparison C, class V>
  CHUNKATTN_INLINE static Int compared(V a, V b) {
    using lanes::Comparison;
    if constexpr (C == Comparison::less) return a < b;
    if constexpr (C == Comparison::less_equal) return a <= b;
    if constexpr (C == Comparison::equal) return a == b;
  }

  template <class E>
  CHUNKATTN_INLINE E bind_parts(const E& e) const {
    return e;
  }
  template <class I>
  CHUNKATTN_INLINE auto bind_parts(const lanes::Table<I>& e) const {
    return lanes::Table<decltype(bind(e.index))>{e.data, bind(e.index)};
  }
  template <lanes::Operation O, class A, class B>
  CHUNKATTN_INLINE auto bind_parts(const lanes::Apply<O, A, B>& e) const {
    return lanes::Apply<O, decltype(bind(e.a)), decltype(bind(e.b))>{bind(e.a), bind(e.b)};
  }
  template <lanes::Comparison C, class A, class B>
  CHUNKATTN_INLINE auto bind_parts(const lanes::Compare<C, A, B>& e) const {
    return lanes::Compare<C, decltype(bind(e.a)), decltype(bind(e.b))>{bind(e.a), bind(e.b)};
  }
  template <class A>
  CHUNKATTN_INLINE auto bind_parts(const lanes::Not<A>& e) const {
    return lanes::Not<decltype(bind(e.a))>{bind(e.a)};
  }
  template <class C, class A, class B>
  CHUNKATTN_INLINE auto bind_parts(const lanes::Select<C, A, B>& e) const {
    return lanes::Select<decltype(bind(e.condition)), decltype(bind(e.a)), decltype(bind(e.b))>{
        bind(e.condition), bind(e.a), bind(e.b)};
  }
};

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_EVALUATE
