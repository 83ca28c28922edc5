// Variants of attention: what a model does to logits besides scaling them, as small structs that
// are passed to run(). A variant has some of these members; those that it lacks cost nothing:
//
//     auto logit(auto s, lanes::At at) const    the logit that replaces s
//     auto visible(lanes::At at) const          whether the row sees the key (later keys never)
//     KeyRange masked(int query) const          keys that no row at this position sees: not read
//     auto sink(lanes::At at) const             one more logit, without a value, for all keys
//     void check(int num_qo_heads) const        throws InvalidArgument if members make no sense
//
// logit, visible and sink return expressions, and are called on the host for every device. masked
// is called on the device, too: for CUDA mark it CHUNKATTN_HD and let it read nothing but members.
// Positions are indices in the sequence, so results do not depend on what is shared.
//
// Expressions describe what to compute for one lane. A lane is one logit: of one query head of one
// row with one key. Some kernels hold consecutive keys in a vector, some consecutive rows, so a
// variant cannot compute with vectors. Its functions get placeholders and return an expression (a
// type); each kernel evaluates it on its own vectors, compiled for its own instruction set:
//
//     auto logit(auto s, lanes::At at) const { return s + slope * (at.kv_idx - at.q_idx); }
//
// There are reals (float), integers (int) and truths (the results of comparisons). Operators are
// those of C++: + - * / (real, whatever the operands), comparisons, && || ! (of which both sides
// are computed), and select, min, max, tanh, table, per_lane.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "detail/attention/lanes.hpp"
#include "detail/attention/variant_members.hpp"
#include "detail/support/bit_cast.hpp"
#include "detail/support/check.hpp"
#include "detail/support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Which logit: what a function of yours gets from per_lane() and from the
/// reference.
struct LogitIndex {
  int row;     ///< query token, in the caller's order: as in q
  int q_idx;   ///< its position in the sequence
  int kv_idx;  ///< the key's position in the sequence, at most `q_idx`
  int head;    ///< query head
};

namespace lanes {

/// Placeholders for the members of LogitIndex, in expressions.
struct At {
  Input<Coordinate::key> kv_idx;   ///< the key's position in the sequence
  Input<Coordinate::query> q_idx;  ///< the row's position in the sequence
  Input<Coordinate::row> row;      ///< query token, in the caller's order
  Input<Coordinate::head> head;    ///< query head
};

/// Expression: the smaller of a and b.
template <class A, class B>
  requires Operands<A, B>
CHUNKATTN_INLINE constexpr auto(min)(A a, B b) noexcept {
  return apply<Operation::min>(a, b);
}
/// Expression: the larger of a and b.
template <class A, class B>
  requires Operands<A, B>
CHUNKATTN_INLINE constexpr auto(max)(A a, B b) noexcept {
  return apply<Operation::max>(a, b);
}
/// Expression: the hyperbolic tangent, within about two units in the last place.
template <Real A>
CHUNKATTN_INLINE constexpr auto tanh(A a) noexcept {
  return apply<Operation::tanh>(a, a);
}
/// Expression: a if `condition` is true, else b. Both are computed.
template <Truth C, Operand A, Operand B>
CHUNKATTN_INLINE constexpr auto select(C condition, A a, B b) noexcept {
  return Select<C, decltype(expression(a)), decltype(expression(b))>{condition, expression(a),
                                                                     expression(b)};
}
/// Expression: data[index]. It is read only for keys up to the row's own position.
/// \param data  memory of the device that computes, read until run() has finished
template <Expression I>
  requires(I::kind == Kind::integer)
CHUNKATTN_INLINE constexpr auto table(const float* data, I index) noexcept {
  return Table<I>{data, index};
}
/// Expression: f(LogitIndex), a number or a bool, called for one lane after the other. For what the
/// other expressions cannot say. `f` is copied with the variant, so let it hold pointers, not
/// containers.
template <class F>
  requires std::is_invocable_v<const F&, LogitIndex>
CHUNKATTN_INLINE constexpr auto per_lane(F f) noexcept {
  return PerLane<F>{f};
}

}  // namespace lanes

/// The keys at the path positions [begin, end).
struct KeyRange {
  std::int32_t begin = 0;  ///< the first
  std::int32_t end = 0;    ///< one past the last; none where it is not above `begin`

  /// How many there are.
  [[nodiscard]] CHUNKATTN_HD constexpr std::int32_t size() const noexcept {
    return end > begin ? end - begin : 0;
  }
};

/// Attention without a variant.
struct NoVariant {};

/// What run() takes as a variant: NoVariant, or a type with logit, visible or sink. If it has
/// masked(), it has visible(), too, which is false for all keys in masked().
template <class V>
concept AttentionVariant = std::copy_constructible<V> &&
                           (std::same_as<V, NoVariant> || detail::ChangesLogits<V> ||
                            detail::HidesKeys<V> || detail::HasSinks<V>) &&
                           (!detail::SkipsKeys<V> || detail::HidesKeys<V>);

/// Keeps logits within ±cap: cap * tanh(s / cap). An infinite q·k becomes ±cap.
struct SoftCap {
  float cap;  ///< positive, finite

  /// The capped logit.
  auto logit(auto s, lanes::At) const { return cap * tanh(s / cap); }
  /// Throws InvalidArgument for a cap that is not positive and finite.
  void check(int) const {
    detail::check_argument(detail::is_positive_finite(cap), "SoftCap::cap", cap,
                           "a positive finite bound");
  }
};

/// A row sees the last `size` keys, itself included, and the first `keep` of the sequence.
struct SlidingWindow {
  std::int32_t size;      ///< at least 1
  std::int32_t keep = 0;  ///< first tokens of the path that stay visible ("attention sinks")

  /// Whether the key is in the window, or one of the first.
  auto visible(lanes::At at) const { return at.q_idx - at.kv_idx < size || at.kv_idx < keep; }
  /// The keys between the first `keep` and the window.
  [[nodiscard]] CHUNKATTN_HD KeyRange masked(int query) const noexcept {
    return {keep, query - size + 1};
  }
  /// Throws InvalidArgument for sizes below 1 and negative counts.
  void check(int) const {
    detail::check_argument(size > 0, "SlidingWindow::size", size, "at least 1 key");
    detail::check_argument(keep >= 0, "SlidingWindow::keep", keep, "a count");
  }
};

/// A learned logit per query head that is in the softmax but has no value: it makes `out` smaller
/// and is counted in lse. Of results to be merged by merge_state() only one may have it.
struct Sinks {
  std::span<const float> logits;  ///< [num_qo_heads], memory of the device; minus infinity: none

  /// The logit of the row's query head.
  auto sink(lanes::At at) const { return lanes::table(logits.data(), at.head); }
  /// Throws InvalidArgument unless there is one for each query head.
  void check(int num_qo_heads) const {
    detail::check_per_head("Sinks::logits", logits, num_qo_heads);
  }
};

/// Attention with linear biases (ALiBi): adds slope * (key - query), so that distant keys weigh
/// less.
struct Alibi {
  std::span<const float> slopes;  ///< [num_qo_heads], memory of the device; positive, finite

  /// The logit and its bias.
  auto logit(auto s, lanes::At at) const {
    return s + lanes::table(slopes.data(), at.head) * (at.kv_idx - at.q_idx);
  }
  /// Throws InvalidArgument unless there is one for each query head.
  void check(int num_qo_heads) const {
    detail::check_per_head("Alibi::slopes", slopes, num_qo_heads);
  }
};

namespace detail {
inline void check_host_memory(const Alibi& alibi) {
  check_slopes("Alibi::slopes", alibi.slopes);
}
}  // namespace detail

/// Adds f(LogitIndex) to each logit.
template <class F>
struct Bias {
  F f;  ///< called for every logit, by several threads at once

  /// The logit and its bias.
  auto logit(auto s, lanes::At) const { return s + lanes::per_lane(f); }
};
template <class F>
Bias(F) -> Bias<F>;

/// A row sees the keys for which f(LogitIndex) is true.
template <class F>
struct Mask {
  F f;  ///< called for every logit, by several threads at once

  /// f(LogitIndex).
  auto visible(lanes::At) const { return lanes::per_lane(f); }
};
template <class F>
Mask(F) -> Mask<F>;

namespace detail {

/// Two variants at once: see combine().
template <AttentionVariant A, AttentionVariant B>
struct Both {
  static_assert(!(HasSinks<A> && HasSinks<B>), "two variants with sinks: add them up in one");
  A a;  ///< the first
  B b;  ///< the second

  /// Through both, or the one that changes logits.
  auto logit(auto s, lanes::At at) const
    requires ChangesLogits<A> || ChangesLogits<B>
  {
    if constexpr (!ChangesLogits<A>)
      return b.logit(s, at);
    else if constexpr (!ChangesLogits<B>)
      return a.logit(s, at);
    else
      return b.logit(a.logit(s, at), at);
  }
  /// Whether both show the key.
  auto visible(lanes::At at) const
    requires HidesKeys<A> || HidesKeys<B>
  {
    if constexpr (!HidesKeys<A>)
      return b.visible(at);
    else if constexpr (!HidesKeys<B>)
      return a.visible(at);
    else
      return a.visible(at) && b.visible(at);
  }
  /// The longer of what they hide: both are hidden, but one range is all that can be said.
  [[nodiscard]] CHUNKATTN_HD KeyRange masked(int query) const
    requires SkipsKeys<A> || SkipsKeys<B>
  {
    KeyRange range;
    if constexpr (SkipsKeys<A>) range = a.masked(query);
    if constexpr (SkipsKeys<B>)
      if (const KeyRange other = b.masked(query); other.size() > range.size()) range = other;
    return range;
  }
  /// That of the one which has sinks.
  auto sink(lanes::At at) const
    requires HasSinks<A> || HasSinks<B>
  {
    if constexpr (HasSinks<A>)
      return a.sink(at);
    else
      return b.sink(at);
  }
  /// Checks both.
  void check(int num_qo_heads) const {
    if constexpr (ChecksItself<A>) a.check(num_qo_heads);
    if constexpr (ChecksItself<B>) b.check(num_qo_heads);
  }
};

template <class A, class B>
void check_host_memory(const Both<A, B>& both) {
  check_host_memory(both.a);
  check_host_memory(both.b);
}

}  // namespace detail

/// Several variants at once: a logit goes through them from left to right, a row sees the keys that
/// all of them show. At most one may have sinks. In a list of types (Variants) it is
/// `decltype(combine(SlidingWindow{}, SoftCap{}))`.
template <AttentionVariant A>
[[nodiscard]] constexpr A combine(A a) {
  return a;
}
template <AttentionVariant A, AttentionVariant B, AttentionVariant... More>
[[nodiscard]] constexpr auto combine(A a, B b, More... more) {
  return combine(detail::Both<A, B>{a, b}, more...);
}

CHUNKATTN_NAMESPACE_END
