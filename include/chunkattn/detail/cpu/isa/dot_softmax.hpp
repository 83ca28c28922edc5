// The online softmax between the products of dot_products.hpp: that of chunk_first.hpp, but for the
// order in which probabilities are added up, and with what packing them needs to know.
#ifndef CHUNKATTN_ISA_DOT_SOFTMAX
#define CHUNKATTN_ISA_DOT_SOFTMAX

#include "dot_operands.hpp"
#include "line_state.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "simd.hpp"

#if defined(CHUNKATTN_PASS_DOTS)
CHUNKATTN_PASS_BEGIN

/// e^x for x <= 0, to 2^-22 of itself near 0 and 2^-19 elsewhere, and 1 for 0; 0 where the result
/// would be subnormal, NaN for NaN. As simd::exp_nonpositive(), but in fewer steps, since these
/// weights become integers of 16 bits: 2^n (1 + r q(r)) with x log2(e) = n + r, |r| <= 1/2, and the
/// q of degree 4 that leaves the least relative error (1.6e-7).
template <int W>
CHUNKATTN_INLINE simd::Float<W> dot_weight(simd::Float<W> x) noexcept {
  using Vector = simd::Float<W>;
  const Vector lowest = simd::broadcast<W>(-87.3365f);  // 2^-126
  const Vector clamped = simd::max(lowest, x);          // in this order, which keeps NaN
  const Vector log2_e = simd::broadcast<W>(1.44269504f);
  const Vector magic = simd::broadcast<W>(0x1.8p23f + 127.0f);
  Vector shifted = simd::fma(clamped, log2_e, magic);
  const Vector scale = simd::bits_as<Vector>(simd::bits_as<simd::Unsigned<W>>(shifted) << 23);
#if defined(__FAST_MATH__)
  __asm__("" : "+m"(shifted));  // keeps (x + magic) - magic from being folded to x
#endif
  const Vector r = simd::fma(clamped, log2_e, magic - shifted);
  Vector p = simd::broadcast<W>(0x1.5bba14p-10f);
  p = simd::fma(p, r, simd::broadcast<W>(0x1.3cea88p-7f));
  p = simd::fma(p, r, simd::broadcast<W>(0x1.c6b752p-5f));
  p = simd::fma(p, r, simd::broadcast<W>(0x1.ebf9bcp-3f));
  p = simd::fma(p, r, simd::broadcast<W>(0x1.62e42ap-1f));
  p = simd::fma(p, r, simd::broadcast<W>(1.0f));
  return simd::scale_or_zero<W>(p, scale, x, lowest);
}

/// For one vector of lines: turns logits[0, count) into probabilities times the scales of V's rows,
/// with zeros behind them up to a multiple of dot_depth; moves max and sum, leaves the factor of
/// the outputs in `rescale` and the bits of the largest in `top`. Lane l sees the tokens below
/// visible[l] (all of them if `full`); where it does not see one, or rules hide it, -0 is left.
template <class Rules>
[[gnu::noinline]] void dot_softmax(const Block<std::int8_t>& block, int count, bool full,
                                   const std::int32_t* visible, float* logits, float* max,
                                   float* sum, float* rescale, std::uint32_t* top,
                                   Rules rules) noexcept {
  constexpr int width = simd::native_width;
  using Vector = simd::Float<width>;
  using Bits = simd::Unsigned<width>;
  // Operations that wait for each other; a variant's expressions are enough to do meanwhile.
  constexpr int chains = Rules::change_logits || Rules::hide ? 1 : 4;
  const auto for_each_token = [&](const auto& f) CHUNKATTN_LAMBDA {
    int t = 0;
    for (; t + chains <= count; t += chains)
      simd::repeat<chains>([&](auto i) CHUNKATTN_LAMBDA { f(t + i, i); });
    for (int left = count % chains; left > 0; --left)
      f(count - left, std::integral_constant<int, 0>{});
  };
  const auto terms = rules.template for_rows<width>();
  const simd::Int<width> seen = simd::load_int<width>(visible);
  const Vector hidden = simd::broadcast<width>(hidden_logit);
  const bool some_hidden = Rules::hide || !full;

  const Vector old_max = simd::load<width>(max);
  Vector largest[chains];
  for (Vector& x : largest) x = old_max;
  for_each_token([&](int t, auto chain) CHUNKATTN_LAMBDA {
    Vector s = simd::load<width>(logits + t * tile_lines);
    if constexpr (Rules::change_logits) s = terms.logit(s, block.position + t);
    if constexpr (Rules::hide)
      s = simd::select<width>(terms.visible(block.position + t), s, hidden);
    if (!full) s = simd::select<width>(simd::broadcast_int<width>(t) < seen, s, hidden);
    if (Rules::change_logits || some_hidden) simd::store(logits + t * tile_lines, s);
    largest[chain] = simd::max(largest[chain], s);
  });
  for (int i = chains / 2; i > 0; i /= 2)
    for (int j = 0; j < i; ++j) largest[j] = simd::max(largest[j], largest[j + i]);

  Vector totals[chains] = {};
  Bits tops[chains] = {};
  for_each_token([&](int t, auto chain) CHUNKATTN_LAMBDA {
    const Vector s = simd::load<width>(logits + t * tile_lines);
    const Vector p = dot_weight<width>(s - largest[0]);
    totals[chain] = totals[chain] + p;
    Bits bits = simd::bits_as<Bits>(p * simd::broadcast<width>(block.v_scale[t]));
    Bits mark{};
    if (some_hidden) {
      const Bits is_hidden = (Bits)(s <= hidden);
      bits &= ~is_hidden;
      mark = is_hidden & 0x80000000u;
    }
    tops[chain] = tops[chain] > bits ? tops[chain] : bits;
    simd::store(logits + t * tile_lines, simd::bits_as<Vector>(bits | mark));
  });
  for (int i = chains / 2; i > 0; i /= 2) {
    for (int j = 0; j < i; ++j) {
      totals[j] = totals[j] + totals[j + i];
      tops[j] = tops[j] > tops[j + i] ? tops[j] : tops[j + i];
    }
  }
  for (int t = count; t % dot_depth != 0; ++t)
    simd::store(logits + t * tile_lines, simd::zero<width>());

  const Vector factor = simd::exp_nonpositive<width>(old_max - largest[0]);
  simd::store(max, largest[0]);
  simd::store(sum, simd::fma(simd::load<width>(sum), factor, totals[0]));
  simd::store(rescale, factor);
  __builtin_memcpy(top, &tops[0], sizeof tops[0]);
}

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_DOT_SOFTMAX
