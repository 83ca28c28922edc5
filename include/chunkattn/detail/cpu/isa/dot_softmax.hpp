// The online softmax between the products of dot_products.hpp: that of chunk_first.hpp, but for the
// order in which probabilities are added up, and with what packing them needs to know.
#ifndef CHUNKATTN_ISA_DOT_SOFTMAX
#define CHUNKATTN_ISA_DOT_SOFTMAX

#include "line_state.hpp"
#include "line_tile.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "simd.hpp"

#if defined(CHUNKATTN_PASS_DOTS)
CHUNKATTN_PASS_BEGIN(VECTORS)

/// Makes the compiler compute these before what follows: left alone, it takes one chain of steps
/// after the other.
template <class V, std::size_t N>
CHUNKATTN_INLINE void in_order([[maybe_unused]] V (&x)[N]) noexcept {
#if defined(CHUNKATTN_PASS_AVX512)
  CHUNKATTN_UNROLLED
  for (V& one : x) __asm__ volatile("" : "+v"(one));
#endif
}

/// Each x becomes e^x, for x <= 0, to 2^-22 of itself near 0 and 2^-19 elsewhere, and 1 for 0; 0
/// where the result would be subnormal, NaN for NaN. As simd::exp_nonpositive(), but in fewer
/// steps, since these weights are rounded to 16 bits or fewer: 2^n (1 + r q(r)) with x log2(e) = n
/// + r, |r| <= 1/2, and the q of degree 4 that leaves the least relative error (1.6e-7). Step by
/// step for all of them: each step waits for the one before, and a processor looks only so far
/// ahead.
template <int W, int N>
CHUNKATTN_INLINE void dot_weights(simd::Float<W> (&x)[to_size(N)]) noexcept {
  using Vector = simd::Float<W>;
  const Vector lowest = simd::broadcast<W>(-87.3365f);  // 2^-126; what is less may become anything
  const Vector log2_e = simd::broadcast<W>(1.44269504f);
  const Vector magic = simd::broadcast<W>(0x1.8p23f + 127.0f);
  Vector shifted[to_size(N)], r[to_size(N)], p[to_size(N)];
  CHUNKATTN_UNROLLED
  for (int i = 0; i < N; ++i) shifted[i] = simd::fma(x[i], log2_e, magic);
#if defined(__FAST_MATH__)
  for (Vector& s : shifted) __asm__("" : "+m"(s));  // (x + magic) - magic is not to become x
#endif
  in_order(shifted);
  CHUNKATTN_UNROLLED
  for (int i = 0; i < N; ++i) r[i] = simd::fma(x[i], log2_e, magic - shifted[i]);
  in_order(r);
  CHUNKATTN_UNROLLED
  for (int i = 0; i < N; ++i) p[i] = simd::broadcast<W>(0x1.5bba14p-10f);
  const auto step = [&](float coefficient) CHUNKATTN_LAMBDA {
    CHUNKATTN_UNROLLED
    for (int i = 0; i < N; ++i) p[i] = simd::fma(p[i], r[i], simd::broadcast<W>(coefficient));
    in_order(p);
  };
  step(0x1.3cea88p-7f);
  step(0x1.c6b752p-5f);
  step(0x1.ebf9bcp-3f);
  step(0x1.62e42ap-1f);
  step(1.0f);
  CHUNKATTN_UNROLLED
  for (int i = 0; i < N; ++i) {
    const Vector scale = simd::bits_as<Vector>(simd::bits_as<simd::Unsigned<W>>(shifted[i]) << 23);
    x[i] = simd::scale_or_zero<W>(p[i], scale, x[i], lowest);
  }
}

/// Tokens whose logits of a vector of lines go through a step at once.
template <bool Masked>
inline constexpr int softmax_tokens = Masked ? 1 : simd::num_accumulators / 4;

/// f(token, how many) for all tokens, some at a time and then one by one.
template <int Tokens, class F>
CHUNKATTN_INLINE void for_tokens(int count, const F& f) noexcept {
  int t = 0;
  for (; t + Tokens <= count; t += Tokens) f(t, std::integral_constant<int, Tokens>{});
  if constexpr (Tokens > 1)
    for (; t < count; ++t) f(t, std::integral_constant<int, 1>{});
}

/// Changes and hides logits as rules and `visible` say (see dot_softmax()); raises `largest`.
template <bool Masked, class T, class Rules>
CHUNKATTN_INLINE simd::Float<simd::native_width> settle_logits(
    const Block<T>& block, int count, const std::int32_t* visible, float* logits,
    simd::Float<simd::native_width> largest, Rules rules) noexcept {
  constexpr int width = simd::native_width;
  using Vector = simd::Float<width>;
  if constexpr (!Masked) {
    Vector most[4] = {largest, largest, largest, largest};
    int t = 0;
    for (; t + 4 <= count; t += 4) {
      CHUNKATTN_UNROLLED
      for (int i = 0; i < 4; ++i) {
        most[i] = (simd::max)(most[i], simd::load<width>(logits + (t + i) * tile_lines));
      }
    }
    for (; t < count; ++t)
      most[0] = (simd::max)(most[0], simd::load<width>(logits + t * tile_lines));
    return (simd::max)((simd::max)(most[0], most[1]), (simd::max)(most[2], most[3]));
  }
  const auto terms = rules.template for_rows<width>();
  const Vector hidden = simd::broadcast<width>(hidden_logit);
  const simd::Int<width> seen = simd::load_int<width>(visible);
  for (int t = 0; t < count; ++t) {
    Vector s = simd::load<width>(logits + t * tile_lines);
    if constexpr (Rules::change_logits) s = terms.logit(s, block.position + t);
    simd::Int<width> mask = simd::broadcast_int<width>(t) < seen;
    if constexpr (Rules::hide) mask = mask & terms.visible(block.position + t);
    s = simd::select<width>(mask, s, hidden);
    simd::store(logits + t * tile_lines, s);
    largest = (simd::max)(largest, s);
  }
  return largest;
}

/// For a vector of lines: turns logits[0, count) into probabilities times the scales of V's rows,
/// with zeros after them up to a multiple of 4, the most tokens of a word; updates max and sum,
/// leaves the factor of the outputs in `rescale` and, where rows have scales, the bits of the
/// largest in `top`. `Masked`: lane l sees the tokens below visible[l], and rules are applied;
/// where it does not see one, -0 is left.
template <bool Masked, class T, class Rules>
[[gnu::noinline]] void dot_softmax(const Block<T>& block, int count, const std::int32_t* visible,
                                   float* logits, float* max, float* sum, float* rescale,
                                   std::uint32_t* top, Rules rules) noexcept {
  constexpr int width = simd::native_width;
  using Vector = simd::Float<width>;
  using Bits = simd::Unsigned<width>;
  const Vector hidden = simd::broadcast<width>(hidden_logit);
  const Vector old_max = simd::load<width>(max);
  const Vector largest = settle_logits<Masked>(block, count, visible, logits, old_max, rules);
  const Vector factor = simd::exp_nonpositive<width>(old_max - largest);
  simd::store(max, largest);
  simd::store(rescale, factor);

  Vector total = simd::zero<width>();
  Bits most{};
  for_tokens<softmax_tokens<Masked>>(
      count, [&]<int Tokens>(int t, std::integral_constant<int, Tokens>) CHUNKATTN_LAMBDA {
        float* const at = logits + t * tile_lines;
        Vector p[to_size(Tokens)];
        CHUNKATTN_UNROLLED
        for (int i = 0; i < Tokens; ++i) p[i] = simd::load<width>(at + i * tile_lines) - largest;
        dot_weights<width, Tokens>(p);
        CHUNKATTN_UNROLLED
        for (int i = 0; i < Tokens; ++i) {
          total = total + p[i];
          Bits bits = simd::bits_as<Bits>(p[i]);
          if constexpr (has_row_scales<T>)
            bits = simd::bits_as<Bits>(p[i] * simd::broadcast<width>(block.v_scale[t + i]));
          Bits mark{};
          if constexpr (Masked) {
            const Bits is_hidden = simd::bits_as<Bits>(simd::load<width>(at) <= hidden);
            bits &= ~is_hidden;
            mark = is_hidden & 0x80000000u;
          }
          if constexpr (has_row_scales<T>) most = most > bits ? most : bits;
          simd::store(at + i * tile_lines, simd::bits_as<Vector>(bits | mark));
        }
      });
  simd::store(sum, simd::fma(simd::load<width>(sum), factor, total));
  if constexpr (has_row_scales<T>) __builtin_memcpy(top, &most, sizeof most);
  for (int t = count; t % 4 != 0; ++t) simd::store(logits + t * tile_lines, simd::zero<width>());
}

/// dot_softmax() of all vectors of a tile.
template <class T, class State, class Rules>
CHUNKATTN_INLINE void softmax_of_tile(const Block<T>& block, const LineTile<tile_lines>& tile,
                                      float* logits, State& state, std::uint32_t* top,
                                      Rules rules) noexcept {
  constexpr int width = simd::native_width;
  const auto compute = [&]<bool Masked>(int at, std::bool_constant<Masked>) CHUNKATTN_LAMBDA {
    const int line = tile.begin + at;
    dot_softmax<Masked>(block, tile.seen, tile.visible + at, logits + at, state.max + line,
                        state.sum + line, state.rescale + at, top == nullptr ? nullptr : top + at,
                        rules.from(line));
  };
  for (int at = 0; at < tile.count; at += width) {
    if constexpr (!Rules::change_logits && !Rules::hide)
      if (!any_of<width>(simd::load_int<width>(tile.visible + at) < tile.seen)) {
        compute(at, std::false_type{});
        continue;
      }
    compute(at, std::true_type{});
  }
}

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_DOT_SOFTMAX
