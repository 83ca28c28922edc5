// Lines that a unit multiplies at once, and what they need in fp32: logits and values that a unit
// does not give.
#ifndef CHUNKATTN_ISA_LINE_TILE
#define CHUNKATTN_ISA_LINE_TILE

#include "elements.hpp"
#include "line_state.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "simd.hpp"

CHUNKATTN_PASS_BEGIN(VECTORS)

/// Tokens of a block that each of `count` lines from `begin` on sees, and 0 up to a whole vector;
/// returns the most. `visible` may be null.
template <class T, class State>
CHUNKATTN_INLINE int seen_tokens(const Block<T>& block, const State& state, int begin, int count,
                                 std::int32_t* visible) noexcept {
  constexpr int width = simd::native_width;
  using Int = simd::Int<width>;
  Int most{};
  for (int l = 0; l < count; l += width) {
    const Int ends = simd::load_int<width>(state.kv_len + begin + l) - block.position;
    const Int all = simd::broadcast_int<width>(block.count);
    const Int sees = (ends < all ? ends : all) & (ends > 0) & (simd::iota<width>() < count - l);
    if (visible != nullptr) __builtin_memcpy(visible + l, &sees, sizeof sees);
    most = most > sees ? most : sees;
  }
  return static_cast<int>(
      simd::reduce_max<width>(__builtin_convertvector(most, simd::Float<width>)));
}

/// Up to `Size` lines, how many of a block's tokens each of them sees, and the most.
template <int Size>
struct LineTile {
  static constexpr int size = Size;

  int begin;
  int count;
  alignas(64) std::int32_t visible[to_size(Size)] = {};
  int seen;

  template <class T, class State>
  CHUNKATTN_INLINE LineTile(const Block<T>& block, const State& state, int begin_,
                            int count_) noexcept
      : begin(begin_), count(count_), seen(seen_tokens(block, state, begin, count, visible)) {}
};

/// Logits of the first `count` tokens with one line, `stride` apart, without scales of K's rows.
template <int HeadDim, class T>
CHUNKATTN_INLINE void logits_in_fp32(const Block<T>& block, int count, const float* q,
                                     float* logits, int stride) noexcept {
  constexpr int width = simd::width_for<HeadDim>;
  for (int t = 0; t < count; ++t) {
    simd::Float<width> sum = simd::zero<width>();
    for (int i = 0; i < HeadDim; i += width)
      sum = simd::fma(simd::load_widened<width>(block.k[t] + i), simd::load<width>(q + i), sum);
    logits[t * stride] = simd::reduce_sum<width>(sum);
  }
}

/// Computes the logits of lines again, [token][Size], that see one that is not finite: a unit's sum
/// may have overflowed, or its terms have made NaN of an infinity. `q` is [line][HeadDim].
template <int HeadDim, int Size, class T>
[[gnu::noinline]] void recompute_nonfinite_logits(const Block<T>& block, const LineTile<Size>& tile,
                                                  const float* q, float* logits) noexcept {
  for (int l = 0; l < tile.count; ++l) {
    bool broken = false;
    for (int t = 0; t < tile.visible[l]; ++t) broken = broken || !is_finite(logits[t * Size + l]);
    if (broken) logits_in_fp32<HeadDim>(block, tile.visible[l], q + l * HeadDim, logits + l, Size);
  }
}

/// Adds the infinities and NaN of V from token `first` on, which a unit's product has left out, to
/// the lines that see them: p is [token][Size], out [line][ValueDim].
template <int ValueDim, int Size, class T>
[[gnu::noinline]] void add_nonfinite_values(const Block<T>& block, const LineTile<Size>& tile,
                                            int first, const float* p, float* out) noexcept {
  constexpr int width = simd::width_for<ValueDim>;
  for (int l = 0; l < tile.count; ++l, out += ValueDim) {
    for (int t = first; t < tile.visible[l]; ++t) {
      const float weight = p[t * Size + l];
      if (is_hidden(weight)) continue;
      for (int i = 0; i < ValueDim; i += width) {
        const simd::Float<width> x = simd::load_widened<width>(block.v[t] + i);
        const simd::Float<width> old = simd::load<width>(out + i);
        simd::store(out + i, simd::select<width>(is_nonfinite<width>(x), old + weight * x, old));
      }
    }
  }
}

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_LINE_TILE
