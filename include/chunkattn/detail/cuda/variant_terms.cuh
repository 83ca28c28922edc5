// VariantTerms: what the host makes of a variant for the kernels. logit(), visible() and sink() are
// called here, on the host; what they return, expressions with the variant's numbers in them, is a
// kernel's argument. So a variant's functions need not be callable on a device, and a kernel's type
// says all that it computes. Only masked(), which returns no expression, is called by kernels. And
// how kernels evaluate expressions (detail/attention/lanes.hpp).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

#include "../../variants.hpp"
#include "ptx.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

struct SkipsNothing {};

/// The part of a variant that masked() needs: layers that differ in their sinks or slopes only have
/// it in common.
template <class V>
[[nodiscard]] auto skipping_part(const V& variant) {
  if constexpr (SkipsKeys<V>)
    return variant;
  else
    return SkipsNothing{};
}
template <class A, class B>
[[nodiscard]] auto skipping_part(const Both<A, B>& variant) {
  if constexpr (SkipsKeys<A> && SkipsKeys<B>)
    return combine(skipping_part(variant.a), skipping_part(variant.b));
  else if constexpr (SkipsKeys<A>)
    return skipping_part(variant.a);
  else
    return skipping_part(variant.b);
}

/// masked() of some variant, with its members' values. Two are equal if these are.
class HiddenKeys {
 public:
  /// Nothing is hidden.
  HiddenKeys() = default;
  template <class V>
  explicit HiddenKeys(const V& variant) {
    const auto part = skipping_part(variant);
    using Part = std::remove_const_t<decltype(part)>;
    if constexpr (SkipsKeys<Part>) {
      static_assert(std::is_trivially_copyable_v<Part> && sizeof(Part) <= sizeof(members_),
                    "a struct with masked() should hold a few numbers: combine() it with others");
      // Bytes that are no member's differ between equal structs: each call would plan anew.
      static_assert(std::is_empty_v<Part> || std::has_unique_object_representations_v<Part>,
                    "a struct with masked() should hold integers without gaps between them: fill "
                    "the gaps, and combine() it with a struct that holds the rest");
      if constexpr (!std::is_empty_v<Part>) std::memcpy(members_.data(), &part, sizeof(Part));
      range_ = [](const std::byte* members, int query) {
        alignas(Part) std::byte copy[sizeof(Part)];
        std::memcpy(copy, members, sizeof(Part));
        return KeyRange(std::launder(reinterpret_cast<const Part*>(copy))->masked(query));
      };
    }
  }

  [[nodiscard]] bool none() const noexcept { return range_ == nullptr; }
  /// The keys that are hidden from a row that sees `kv_len` positions at most.
  [[nodiscard]] KeyRange operator()(int kv_len) const {
    if (range_ == nullptr) return {};
    if (kv_len <= 0) return {0, 0x7fffffff};  // sees nothing
    const KeyRange range = range_(members_.data(), kv_len - 1);
    return range.size() > 0 ? range : KeyRange{};
  }
  friend bool operator==(const HiddenKeys& a, const HiddenKeys& b) noexcept {
    return a.range_ == b.range_ && a.members_ == b.members_;
  }

 private:
  KeyRange (*range_)(const std::byte* members, int query) = nullptr;
  std::array<std::byte, 64> members_{};
};

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

/// A variant as kernels see it. Of NoVariant nothing but that it has nothing.
template <class V>
struct VariantTerms {
  static constexpr bool changes_logits = ChangesLogits<V>;
  static constexpr bool hides_keys = HidesKeys<V>;
  static constexpr bool skips_keys = SkipsKeys<V>;
  static constexpr bool has_sinks = HasSinks<V>;

  decltype(logit_term(std::declval<const V&>())) logit;
  decltype(visible_term(std::declval<const V&>())) visible;
  decltype(sink_term(std::declval<const V&>())) sink;
  decltype(skipping_part(std::declval<const V&>())) skipping;  ///< has masked()
  float sm_scale;                                              ///< factor of q·k before `logit`
};

template <class V>
[[nodiscard]] VariantTerms<V> terms_of(const V& variant, float sm_scale) {
  static_assert(std::is_trivially_copyable_v<VariantTerms<V>>,
                "a variant goes to the device byte by byte: let it hold numbers, pointers and "
                "functions of such");
  return {logit_term(variant), visible_term(variant), sink_term(variant), skipping_part(variant),
          sm_scale};
}

/// Calls f(data) for each table of an expression.
template <class E, class F>
void for_each_table(const E& e, const F& f) {
  if constexpr (requires { e.data; }) f(e.data);
  if constexpr (requires { e.index; }) for_each_table(e.index, f);
  if constexpr (requires { e.condition; }) for_each_table(e.condition, f);
  if constexpr (requires { e.a; }) for_each_table(e.a, f);
  if constexpr (requires { e.b; }) for_each_table(e.b, f);
}

// For one logit: a register of an accumulator is one (row, key) pair. What is the same for all keys
// of a row the compiler computes once: loops over a tile are unrolled, and nothing in them is
// stored.

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
    return static_cast<Result>(call.f(LogitIndex{line.row, line.query, key, line.head}));
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
