// LineTotal: the softmax sum and the output of a line over many parts of its walk, each with what
// its additions have rounded away so far (the rest of a fused multiply-add), so that no digits are
// lost.
//
// A line's running output takes one addition per block (of tiles some), and with each it may lose
// half a unit in its last place: equal values all lose the same way. So after window_tokens it goes
// to a total, which takes as few operations per token as one likes, and starts again. Windows begin
// at absolute positions: a line's bits do not depend on which blocks are read for others.
#ifndef CHUNKATTN_ISA_LINE_TOTAL
#define CHUNKATTN_ISA_LINE_TOTAL

#include "pass.hpp"
#include "simd.hpp"

CHUNKATTN_PASS_BEGIN(VECTORS)

/// Path positions that a line's running state covers: of 96 blocks of 64 tokens each, equal values
/// come out within 1.8e-6 of themselves (the worst of 200,000 values), and shorter contexts have no
/// total.
inline constexpr int window_tokens = 96 * block_tokens;

/// x, of which the compiler knows nothing: -ffast-math would find that all corrections are 0.
template <class V>
CHUNKATTN_INLINE V opaque(V x) noexcept {
#if defined(__x86_64__)
  __asm__("" : "+v"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#else
  __asm__("" : "+m"(x));
#endif
  return x;
}

/// sum = sum * factor + x * weight; what that rounds away goes to `lost`: all of it where the first
/// is the larger, else to a rounding of the other.
template <int W>
CHUNKATTN_INLINE void add_exactly(simd::Float<W>& sum, simd::Float<W>& lost, simd::Float<W> factor,
                                  simd::Float<W> x, simd::Float<W> weight) noexcept {
  using Vector = simd::Float<W>;
  const Vector scaled = opaque(sum * factor);
  const Vector of_product = opaque(simd::fma(sum, factor, -scaled));
  sum = opaque(simd::fma(x, weight, scaled));
  const Vector of_sum = simd::fma(x, weight, scaled - sum);
  lost = simd::fma(lost, factor, of_product + of_sum);
}

/// A view of a line's total, which is `stride` floats: [Dim] output; maximum, sum, what that lost,
/// whether anything was lost; [Dim] what the output lost, which is not touched before: one part
/// fits in fewer cache lines.
template <int Dim>
struct LineTotal {
  static constexpr int stride = 2 * Dim + 16;
  static constexpr int width = simd::width_for<Dim>;

  float* memory;

  [[nodiscard]] float* out() const noexcept { return memory; }
  /// Without what the sum has lost.
  [[nodiscard]] SoftmaxState softmax() const noexcept { return {memory[Dim], memory[Dim + 1]}; }

  /// Becomes the empty one; its output is anything.
  void clear() const noexcept { set({empty_max, 0.0f}, 0.0f, false); }

  /// Becomes a copy.
  void start(SoftmaxState softmax, const float* from) const noexcept {
    std::copy_n(from, Dim, memory);
    set(softmax, 0.0f, false);
  }

  /// With another part it becomes `to`, which may be this one.
  void add(SoftmaxState softmax, const float* from, LineTotal to) const noexcept {
    const MergedState merged = merge_states(this->softmax(), softmax);
    const auto added = [&]<int W>(simd::Float<W>& sum, simd::Float<W>& lost, simd::Float<W> x)
                           CHUNKATTN_LAMBDA {
                             add_exactly<W>(sum, lost, simd::broadcast<W>(merged.weight_a), x,
                                            simd::broadcast<W>(merged.weight_b));
                           };
    for (int i = 0; i < Dim; i += width) {
      simd::Float<width> sum = simd::load<width>(memory + i);
      simd::Float<width> lost = lost_at(i);
      added.template operator()<width>(sum, lost, simd::load<width>(from + i));
      simd::store(to.memory + i, sum);
      simd::store(to.memory + lost_begin + i, lost);
    }
    auto sum = simd::broadcast<4>(memory[Dim + 1]), lost = simd::broadcast<4>(memory[Dim + 2]);
    added.template operator()<4>(sum, lost, simd::broadcast<4>(softmax.sum));
    to.set({merged.state.max, sum[0]}, lost[0], true);
  }

  /// The end: what was lost is added, too. Output goes to `to`, which may be this one's.
  SoftmaxState close(float* to) const noexcept {
    for (int i = 0; i < Dim; i += width)
      simd::store(to + i, complete<width>(simd::load<width>(memory + i), lost_at(i)));
    return {memory[Dim], complete<4>(simd::broadcast<4>(memory[Dim + 1]),
                                     simd::broadcast<4>(memory[Dim + 2]))[0]};
  }

 private:
  static constexpr int lost_begin = Dim + 16;

  // An infinity has lost NaN, and stays.
  template <int W>
  CHUNKATTN_INLINE static simd::Float<W> complete(simd::Float<W> sum, simd::Float<W> lost) {
    const auto exponent = simd::bits_as<simd::Unsigned<W>>(lost) & 0x7f800000u;
    return simd::select<W>(exponent == 0x7f800000u, sum, sum + lost);
  }
  [[nodiscard]] simd::Float<width> lost_at(int i) const noexcept {
    return memory[Dim + 3] != 0.0f ? simd::load<width>(memory + lost_begin + i)
                                   : simd::zero<width>();
  }
  void set(SoftmaxState softmax, float lost, bool any_lost) const noexcept {
    memory[Dim] = softmax.max;
    memory[Dim + 1] = softmax.sum;
    memory[Dim + 2] = lost;
    memory[Dim + 3] = any_lost ? 1.0f : 0.0f;
  }
};

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_LINE_TOTAL
