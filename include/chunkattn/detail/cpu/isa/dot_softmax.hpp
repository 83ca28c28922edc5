// The online softmax between the products of dot_products.hpp or pair_products.hpp: that of
// chunk_first.hpp, but for the order in which probabilities are added up, and with what packing
// them needs to know.
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

/// Operations that wait for each other; a variant's expressions are enough to do meanwhile.
template <int Vectors, class Rules>
inline constexpr int dot_chains = Rules::change_logits || Rules::hide ? 1 : 4 / Vectors;

/// f(token, vector, chain) for all tokens and vectors.
template <int Vectors, int Chains, class F>
CHUNKATTN_INLINE void for_each_logit(int count, const F& f) noexcept {
  int t = 0;
  for (; t + Chains <= count; t += Chains)
    simd::repeat<Chains>([&](auto i) CHUNKATTN_LAMBDA {
      simd::repeat<Vectors>([&](auto v) CHUNKATTN_LAMBDA { f(t + i, v, i); });
    });
  for (int left = count % Chains; left > 0; --left)
    simd::repeat<Vectors>(
        [&](auto v) CHUNKATTN_LAMBDA { f(count - left, v, std::integral_constant<int, 0>{}); });
}

/// Changes and hides logits as rules and `visible` say (see dot_softmax()); raises `largest`.
template <int Vectors, class T, class Rules>
CHUNKATTN_INLINE void settle_logits(const Block<T>& block, int count, bool full,
                                    const std::int32_t* visible, float* logits,
                                    simd::Float<simd::native_width> (&largest)[Vectors],
                                    Rules rules) noexcept {
  constexpr int width = simd::native_width;
  constexpr int chains = dot_chains<Vectors, Rules>;
  using Vector = simd::Float<width>;
  const auto terms = rules.template for_rows<width>();
  const Vector hidden = simd::broadcast<width>(hidden_logit);
  Vector most[Vectors][chains];
  for (int v = 0; v < Vectors; ++v)
    for (Vector& x : most[v]) x = largest[v];
  for_each_logit<Vectors, chains>(count, [&](int t, auto v, auto chain) CHUNKATTN_LAMBDA {
    float* const at = logits + t * tile_lines + v * width;
    Vector s = simd::load<width>(at);
    if constexpr (Rules::change_logits) s = terms.logit(s, block.position + t);
    if constexpr (Rules::hide)
      s = simd::select<width>(terms.visible(block.position + t), s, hidden);
    if (!full)
      s = simd::select<width>(
          simd::broadcast_int<width>(t) < simd::load_int<width>(visible + v * width), s, hidden);
    if (Rules::change_logits || Rules::hide || !full) simd::store(at, s);
    most[v][chain] = simd::max(most[v][chain], s);
  });
  for (int v = 0; v < Vectors; ++v) {
    largest[v] = most[v][0];
    for (int i = 1; i < chains; ++i) largest[v] = simd::max(largest[v], most[v][i]);
  }
}

/// For some vectors of lines: turns logits[0, count) into probabilities times the scales of V's
/// rows, with zeros behind them up to a multiple of dot_depth; moves max and sum, leaves the factor
/// of the outputs in `rescale` and, where rows have scales, the bits of the largest in `top`. Lane
/// l sees the tokens below visible[l] (all of them if `full`); where it does not see one, or rules
/// hide it, -0 is left.
template <int Vectors, class T, class Rules>
[[gnu::noinline]] void dot_softmax(const Block<T>& block, int count, bool full,
                                   const std::int32_t* visible, float* logits, float* max,
                                   float* sum, float* rescale, std::uint32_t* top,
                                   Rules rules) noexcept {
  constexpr int width = simd::native_width;
  using Vector = simd::Float<width>;
  using Bits = simd::Unsigned<width>;
  constexpr int chains = dot_chains<Vectors, Rules>;
  const Vector hidden = simd::broadcast<width>(hidden_logit);
  const bool some_hidden = Rules::hide || !full;

  Vector old_max[Vectors], largest[Vectors], factor[Vectors];
  for (int v = 0; v < Vectors; ++v) largest[v] = old_max[v] = simd::load<width>(max + v * width);
  settle_logits(block, count, full, visible, logits, largest, rules);
  simd::repeat<Vectors>([&](auto v) CHUNKATTN_LAMBDA {
    factor[v] = simd::exp_nonpositive<width>(old_max[v] - largest[v]);
    simd::store(max + v * width, largest[v]);
    simd::store(rescale + v * width, factor[v]);
  });

  Vector totals[Vectors][chains] = {};
  Bits tops[Vectors][chains] = {};
  for_each_logit<Vectors, chains>(count, [&](int t, auto v, auto chain) CHUNKATTN_LAMBDA {
    float* const at = logits + t * tile_lines + v * width;
    const Vector s = simd::load<width>(at);
    const Vector p = dot_weight<width>(s - largest[v]);
    totals[v][chain] = totals[v][chain] + p;
    Bits bits = simd::bits_as<Bits>(p);
    if constexpr (has_row_scales<T>)
      bits = simd::bits_as<Bits>(p * simd::broadcast<width>(block.v_scale[t]));
    Bits mark{};
    if (some_hidden) {
      const Bits is_hidden = (Bits)(s <= hidden);
      bits &= ~is_hidden;
      mark = is_hidden & 0x80000000u;
    }
    if constexpr (has_row_scales<T>) tops[v][chain] = tops[v][chain] > bits ? tops[v][chain] : bits;
    simd::store(at, simd::bits_as<Vector>(bits | mark));
  });
  simd::repeat<Vectors>([&](auto v) CHUNKATTN_LAMBDA {
    for (int i = 1; i < chains; ++i) {
      totals[v][0] = totals[v][0] + totals[v][i];
      tops[v][0] = tops[v][0] > tops[v][i] ? tops[v][0] : tops[v][i];
    }
    float* const to = sum + v * width;
    simd::store(to, simd::fma(simd::load<width>(to), factor[v], totals[v][0]));
    if constexpr (has_row_scales<T>) __builtin_memcpy(top + v * width, &tops[v][0], sizeof(Bits));
    for (int t = count; t % dot_depth != 0; ++t)
      simd::store(logits + t * tile_lines + v * width, simd::zero<width>());
  });
}

/// Tokens of a block that each of `count` lines from `begin` on sees, and 0 up to a whole vector;
/// returns the most. `visible` may be null.
template <class T, class State>
CHUNKATTN_INLINE int dot_visible(const Block<T>& block, const State& state, int begin, int count,
                                 std::int32_t* visible) noexcept {
  constexpr int width = simd::native_width;
  using Int = simd::Int<width>;
  Int most{};
  for (int l = 0; l < count; l += width) {
    const Int ends = simd::load_int<width>(state.kv_len + begin + l) - block.position;
    const Int all = simd::broadcast_int<width>(block.count);
    const Int sees =
        (ends < all ? ends : all) & (Int)(ends > 0) & (Int)(simd::iota<width>() < count - l);
    if (visible != nullptr) __builtin_memcpy(visible + l, &sees, sizeof sees);
    most = most > sees ? most : sees;
  }
  return static_cast<int>(
      simd::reduce_max<width>(__builtin_convertvector(most, simd::Float<width>)));
}

/// dot_softmax() of all vectors of a tile, its `count` lines from `begin` on.
template <class T, class State, class Rules>
CHUNKATTN_INLINE void softmax_of_tile(const Block<T>& block, int seen, int count,
                                      const std::int32_t* visible, float* logits, int begin,
                                      State& state, std::uint32_t* top, Rules rules) noexcept {
  constexpr int width = simd::native_width;
  const auto compute = [&]<int Vectors>(int at,
                                        std::integral_constant<int, Vectors>) CHUNKATTN_LAMBDA {
    bool full = true;
    for (int i = at; i < at + Vectors * width; i += width)
      full = full && !any_of<width>(simd::load_int<width>(visible + i) < seen);
    dot_softmax<Vectors>(block, seen, full, visible + at, logits + at, state.max + begin + at,
                         state.sum + begin + at, state.rescale + at,
                         top == nullptr ? nullptr : top + at, rules.from(begin + at));
  };
  if constexpr (!Rules::change_logits && !Rules::hide)
    if (count > width) return compute(0, std::integral_constant<int, 2>{});
  for (int at = 0; at < count; at += width) compute(at, std::integral_constant<int, 1>{});
}

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_DOT_SOFTMAX
