// Rules of a variant (variants.hpp) for the kernels: a change of logits, and a mask.
//
// A hidden key gets a logit that loses against every other, so its probability is 0; written as -0,
// which no probability of a visible key ever is, it marks the key as hidden for what comes after.
#ifndef CHUNKATTN_ISA_RULES
#define CHUNKATTN_ISA_RULES

#include "elements.hpp"
#include "evaluate.hpp"
#include "line_state.hpp"
#include "pass.hpp"
#include "simd.hpp"

CHUNKATTN_PASS_BEGIN(VECTORS)

/// The logit of a hidden key: what is not above it has no weight, whatever the maximum.
inline constexpr float hidden_logit = -3.0e38f;

/// Where p is the probability of a hidden key.
template <int W>
CHUNKATTN_INLINE simd::Int<W> is_hidden(simd::Float<W> p) noexcept {
  return simd::bits_as<simd::Unsigned<W>>(p) == 0x80000000u;
}
CHUNKATTN_INLINE bool is_hidden(float p) noexcept {
  return simd::bits_as<std::uint32_t>(p) == 0x80000000u;
}
/// The probability p of logits that may be hidden.
template <int W>
CHUNKATTN_INLINE simd::Float<W> marked(simd::Float<W> p, simd::Float<W> logit) noexcept {
  return simd::select<W>(logit <= simd::broadcast<W>(hidden_logit), simd::broadcast<W>(-0.0f), p);
}
/// Whether any lane of a condition is set.
template <int W>
CHUNKATTN_INLINE bool any_of(simd::Int<W> x) noexcept {
#if defined(CHUNKATTN_PASS_AVX512)
  if constexpr (W == 16)
    return _mm512_test_epi32_mask(simd::bits_as<__m512i>(x), simd::bits_as<__m512i>(x)) != 0;
#endif
  std::int32_t any = 0;
  for (int i = 0; i < W; ++i) any |= x[i];
  return any != 0;
}

/// A variant's functions for a vector's lanes, evaluated as far as they do not depend on the key.
template <int W, class Lanes, class Logit, class Visible>
struct Terms {
  Lanes at;
  Logit logit_of;
  Visible visible_of;

  CHUNKATTN_INLINE simd::Float<W> logit(simd::Float<W> s, int key) const {
    return as_real<W>(Evaluator<W, Lanes>{at, s, key}.of(logit_of));
  }
  CHUNKATTN_INLINE simd::Int<W> visible(int key) const {
    return Evaluator<W, Lanes>{at, simd::zero<W>(), key}.of(visible_of);
  }
};

struct NoTerm {};

template <int W, class Variant, class Lanes>
CHUNKATTN_INLINE auto terms_of(const Variant& variant, const Lanes& at) {
  const Evaluator<W, Lanes> evaluate{at, simd::zero<W>(), 0};
  const auto logit = [&]() CHUNKATTN_LAMBDA {
    if constexpr (ChangesLogits<Variant>)
      return evaluate.bind(variant.logit(lanes::Logit{}, lanes::At{}));
    else
      return NoTerm{};
  };
  const auto visible = [&]() CHUNKATTN_LAMBDA {
    if constexpr (HidesKeys<Variant>)
      return evaluate.bind(variant.visible(lanes::At{}));
    else
      return NoTerm{};
  };
  return Terms<W, Lanes, decltype(logit()), decltype(visible())>{at, logit(), visible()};
}

/// The variant's one more logit of a row and head.
template <int W, class Variant>
CHUNKATTN_INLINE float sink_of(const Variant& variant, const LogitIndex& at) {
  const KeyLanes<W> lanes{at};
  const Evaluator<W, KeyLanes<W>> evaluate{lanes, simd::zero<W>(), at.kv_idx};
  return as_real<W>(evaluate.of(lanes::expression(variant.sink(lanes::At{}))))[0];
}

/// No variant: nothing is asked, nothing is passed.
struct NoRules {
  static constexpr bool change_logits = false;
  static constexpr bool hide = false;
  CHUNKATTN_INLINE NoRules from(int) const noexcept { return {}; }
  template <int W>
  CHUNKATTN_INLINE NoTerm for_rows() const noexcept {
    return {};
  }
  template <int W>
  CHUNKATTN_INLINE NoTerm for_keys() const noexcept {
    return {};
  }
};

/// A variant and the indices of the lines from some line on.
template <class Variant>
struct VariantRules {
  static constexpr bool change_logits = ChangesLogits<Variant>;
  static constexpr bool hide = HidesKeys<Variant>;

  const Variant* variant;
  LineIndices lines;

  CHUNKATTN_INLINE VariantRules from(int line) const noexcept {
    return {variant, {lines.kv_len + line, lines.row + line, lines.head + line}};
  }
  /// For W lines at once.
  template <int W>
  CHUNKATTN_INLINE auto for_rows() const {
    return terms_of<W>(*variant, RowLanes<W>{lines});
  }
  /// For W keys of the first line at once.
  template <int W>
  CHUNKATTN_INLINE auto for_keys() const {
    return terms_of<W>(*variant, KeyLanes<W>{{*lines.row, *lines.kv_len - 1, 0, *lines.head}});
  }
};

template <class Variant, class State>
CHUNKATTN_INLINE auto rules_of(const Variant& variant, const State& state) noexcept {
  if constexpr (ChangesLogits<Variant> || HidesKeys<Variant>)
    return VariantRules<Variant>{&variant, {state.kv_len, state.row, state.head}};
  else
    return NoRules{};
}

/// Where a kernel reports that some key was hidden from some line; nothing where none can be.
template <class Rules>
using SomeHidden = std::conditional_t<Rules::hide, bool*, NoTerm>;

/// Where x is infinite or NaN.
template <int W>
CHUNKATTN_INLINE simd::Int<W> is_nonfinite(simd::Float<W> x) noexcept {
  return (simd::bits_as<simd::Unsigned<W>>(x) & 0x7f800000u) == 0x7f800000u;
}
CHUNKATTN_INLINE bool is_finite(float x) noexcept {
  return (simd::bits_as<std::uint32_t>(x) & 0x7f800000u) != 0x7f800000u;
}

/// A row of zeros.
template <int ValueDim, class T>
alignas(64) inline constexpr T zero_row[to_size(ValueDim)] = {};

/// The rows of V that hold infinities or NaN and that some line does not see: a product would make
/// NaN of 0 times these. While this object is there zeros stand in for them in the block; they are
/// added to the lines that see them.
template <int ValueDim, class T>
class NonfiniteValues {
 public:
  explicit NonfiniteValues(Block<T>& block) noexcept : block_(block) {}
  NonfiniteValues(const NonfiniteValues&) = delete;
  NonfiniteValues& operator=(const NonfiniteValues&) = delete;
  ~NonfiniteValues() {
    for (int i = 0; i < count_; ++i) block_.v[tokens_[i]] = rows_[i];
  }

  /// Looks at a token that some line does not see.
  void inspect(int t) noexcept {
    if constexpr (!std::is_same_v<T, std::int8_t>) {
      constexpr int width = simd::width_for<ValueDim>;
      simd::Int<width> found{};
      for (int i = 0; i < ValueDim; i += width)
        found = found | is_nonfinite<width>(simd::load_widened<width>(block_.v[t] + i));
      if (!any_of<width>(found)) return;
      tokens_[count_] = t;
      rows_[count_++] = block_.v[t];
      block_.v[t] = zero_row<ValueDim, T>;
    }
  }
  /// Adds those that a line sees, whose probabilities stand `stride` apart.
  void add(const float* p, int stride, float* out) const noexcept {
    for (int i = 0; i < count_; ++i)
      if (const float weight = p[tokens_[i] * stride]; !is_hidden(weight))
        add_value<ValueDim>(weight, rows_[i], out);
  }
  [[nodiscard]] bool empty() const noexcept { return count_ == 0; }

 private:
  Block<T>& block_;
  int count_ = 0;
  int tokens_[block_tokens];
  const T* rows_[block_tokens];
};

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_RULES
