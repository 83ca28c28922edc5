// What units of integers over int8 K and V have in common (byte_unit.hpp, int16_unit.hpp): queries
// and probabilities as integers with a scale each, sums as floats, and in fp32 what has no
// integers.
//
// A query that holds an infinity or NaN, or nothing but numbers too small for a scale, has no
// integers: its scale is NaN, and its logits are computed in fp32. Likewise the values of a line
// whose probabilities are not all finite and positive: its scale is 0.
#ifndef CHUNKATTN_ISA_INTEGERS
#define CHUNKATTN_ISA_INTEGERS

#include "dot_products.hpp"
#include "elements.hpp"
#include "line_state.hpp"
#include "line_tile.hpp"
#include "pass.hpp"
#include "rules.hpp"
#include "simd.hpp"

#if defined(CHUNKATTN_PASS_DOTS)
CHUNKATTN_PASS_BEGIN(DOTS)

/// The largest integer of a query: two signed bytes.
inline constexpr float largest_query = 127 * 256 + 127;

/// One query as integers of 16 bits: store(i, integers) receives a vector of them from dim i on.
template <int HeadDim>
struct QueryIntegers {
  std::uint32_t sum;
  float scale;  ///< what they count; NaN: there are none

  template <class Store>
  CHUNKATTN_INLINE QueryIntegers(const float* q, const Store& store) noexcept {
    constexpr int width = simd::width_for<HeadDim>;
    using Bits = simd::Unsigned<width>;
    Bits sizes{};
    for (int i = 0; i < HeadDim; i += width) {
      const Bits size = simd::bits_as<Bits>(simd::load<width>(q + i)) & 0x7fffffffu;
      sizes = sizes > size ? sizes : size;
    }
    std::uint32_t top = 0;
    for (int i = 0; i < width; ++i) top = (std::max)(top, sizes[i]);
    constexpr std::uint32_t least = 0x0d800000u;  // 2^-100: scales are normal numbers
    constexpr std::uint32_t infinity = 0x7f800000u;
    const bool has_scale = top == 0 || (top >= least && top < infinity);
    const float largest = simd::bits_as<float>(top);
    scale = has_scale ? largest / largest_query : simd::bits_as<float>(0x7fc00000u);
    const float factor = has_scale && top > 0 ? largest_query / largest : 0.0f;
    Bits total{};
    for (int i = 0; i < HeadDim; i += width) {
      // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
      simd::Float<width> x = simd::load<width>(q + i) * simd::broadcast<width>(factor);
      if (factor == 0) x = simd::zero<width>();
      const Bits integer = simd::bits_as<Bits>(x + simd::broadcast<width>(0x1.8p23f)) - 0x4b400000u;
      store(i, integer);
      total += integer;
    }
    sum = 0;
    for (int i = 0; i < width; ++i) sum += total[i];
  }
};

/// By what probabilities become integers of `Bits` bits, in each lane a line: a power of two that
/// leaves the largest of a block, whose bits `top` has, all of them.
template <int Bits, int W>
struct ProbabilityScales {
  simd::Unsigned<W> regular;  ///< lines whose probabilities are all finite and positive
  simd::Float<W> factor;      ///< from a probability to its integer
  simd::Float<W> scale;       ///< what an integer counts; 0 for the other lines

  CHUNKATTN_INLINE explicit ProbabilityScales(simd::Unsigned<W> top) noexcept {
    constexpr std::uint32_t bits = Bits, half = 1u << (23 - Bits);  // of the last bit
    regular = simd::bits_as<simd::Unsigned<W>>(top < 0x7f800000u);
    // The largest integer has all bits and rounds to no more; no scale is subnormal.
    simd::Unsigned<W> exponent = regular & ((top + half) >> 23);
    exponent = exponent > bits ? exponent : simd::Unsigned<W>{} + bits;
    factor = simd::bits_as<simd::Float<W>>((253 + bits - exponent) << 23);
    scale = simd::bits_as<simd::Float<W>>(regular & ((exponent - (bits - 1)) << 23));
  }
  /// Probabilities as integers, in the low bits of words. Adding 2^23 rounds to an integer and
  /// leaves it there.
  CHUNKATTN_INLINE static simd::Unsigned<W> integers(simd::Float<W> p,
                                                     simd::Float<W> factor) noexcept {
    return simd::bits_as<simd::Unsigned<W>>(simd::fma(p, factor, simd::broadcast<W>(0x1p23f)));
  }
};

/// The part of a unit that does not depend on what a word is: the scales of queries are row
/// `ScaleRow` of q_transposed, and probabilities have `Bits` bits.
template <int HeadDim, int ValueDim, int ScaleRow, int Bits>
class IntegerUnit {
 public:
  using Element = std::int8_t;
  using Tile = LineTile<tile_lines>;
  static constexpr int head_dim = HeadDim, value_dim = ValueDim;
  static constexpr int terms = 1, max_terms = 1;
  static constexpr bool checked_logits = false;
  template <int W>
  using Sum = simd::Unsigned<W>;

  CHUNKATTN_INLINE static auto query_factor(const float* queries, std::ptrdiff_t stride) noexcept {
    return simd::load<simd::native_width>(queries + ScaleRow * stride);
  }
  template <class V, class Factor>
  CHUNKATTN_INLINE static Factor logit(V sum, Factor factor, const Block<std::int8_t>& block,
                                       int token) noexcept {
    constexpr int width = simd::native_width;
    return as_real<width>(simd::bits_as<simd::Int<width>>(sum)) * factor *
           simd::broadcast<width>(block.k_scale[token]);
  }
  CHUNKATTN_INLINE float value_factor(int line) const noexcept { return scale_[line]; }
  template <int W>
  CHUNKATTN_INLINE static void add_values(Sum<W> sum, simd::Float<W> factor,
                                          simd::Float<W> rescaling, float* out) noexcept {
    const auto block_sum = as_real<W>(simd::bits_as<simd::Int<W>>(sum));
    simd::store(out, simd::fma(block_sum, factor, simd::load<W>(out) * rescaling));
  }

  /// Logits of queries without integers.
  template <class Operands>
  CHUNKATTN_INLINE void repair_logits(Operands& operands, const Tile& tile, bool) const noexcept {
    constexpr int width = simd::native_width;
    const float* const scale =
        operands.state.q_transposed + tile.begin + ScaleRow * operands.state.transposed_stride;
    simd::Int<width> broken{};
    for (int l = 0; l < tile.count; l += width)
      broken |= (simd::load_int<width>(reinterpret_cast<const std::int32_t*>(scale + l)) &
                 0x7fffffff) > 0x7f800000;
    if (any_of<width>(broken)) replace_logits(operands, tile, scale);
  }

  CHUNKATTN_INLINE std::uint32_t* top() noexcept { return top_; }

  /// The values of lines whose probabilities have no scale.
  template <class Operands>
  CHUNKATTN_INLINE void repair_values(const Operands& operands, const Tile& tile,
                                      float* out) const noexcept {
    if (some_unscaled_) add_values_in_fp32(operands, tile, out);
  }

 protected:
  using Real = simd::Float<simd::native_width>;
  using Words = simd::Unsigned<simd::native_width>;
  using Scales = ProbabilityScales<Bits, simd::native_width>;

  /// The scale of a vector of lines from `line` on, as a factor of their probabilities.
  CHUNKATTN_INLINE Real choose_scale(const Tile& tile, int line) noexcept {
    constexpr int width = simd::native_width;
    const Scales scales(load_words<width>(top_ + line));
    some_unscaled_ =
        some_unscaled_ || any_of<width>(simd::bits_as<simd::Int<width>>(~scales.regular) &
                                        (simd::iota<width>() < tile.count - line));
    simd::store(scale_ + line, scales.scale);
    return scales.factor;
  }
  CHUNKATTN_INLINE static Words as_integers(const float* p, Real factor) noexcept {
    return Scales::integers(simd::load<simd::native_width>(p), factor);
  }

 private:
  template <class Operands>
  [[gnu::noinline]] static void replace_logits(Operands& operands, const Tile& tile,
                                               const float* scale) noexcept {
    const Block<std::int8_t>& block = operands.block;
    for (int l = 0; l < tile.count; ++l) {
      if ((simd::bits_as<std::uint32_t>(scale[l]) & 0x7fffffffu) <= 0x7f800000u) continue;
      float* const logits = operands.logits + l;
      logits_in_fp32<HeadDim>(block, tile.seen, operands.state.q + (tile.begin + l) * HeadDim,
                              logits, tile_lines);
      for (int t = 0; t < tile.seen; ++t) logits[t * tile_lines] *= block.k_scale[t];
    }
  }
  template <class Operands>
  [[gnu::noinline]] void add_values_in_fp32(const Operands& operands, const Tile& tile,
                                            float* out) const noexcept {
    for (int l = 0; l < tile.count; ++l) {
      if (scale_[l] != 0) continue;
      for (int t = 0; t < tile.seen; ++t)
        if (const float weight = operands.logits[t * tile_lines + l]; !is_hidden(weight))
          add_value<ValueDim>(weight, operands.block.v[t], out + l * ValueDim);
    }
  }

  alignas(64) std::uint32_t top_[tile_lines];  // bits of each line's largest probability
  alignas(64) float scale_[tile_lines];        // what its integers count; 0: it has none
  bool some_unscaled_ = false;                 // of this tile of the block or one before
};

CHUNKATTN_PASS_END
#endif

#endif  // CHUNKATTN_ISA_INTEGERS
