// The thin layer over vector instructions that every CPU kernel is written in: float vectors of the
// machine's width, 4 where nothing better is known. GCC's vector extension gives the types and the
// arithmetic operators; what it cannot say well (fused multiply-add, maximum) is below, once per
// instruction set.
#ifndef CHUNKATTN_ISA_SIMD
#define CHUNKATTN_ISA_SIMD

#include "pass.hpp"

CHUNKATTN_PASS_BEGIN(VECTORS)

namespace simd {

typedef float f32x4 __attribute__((vector_size(16)));
typedef std::int32_t i32x4 __attribute__((vector_size(16)));
typedef std::uint32_t u32x4 __attribute__((vector_size(16)));
typedef std::uint16_t u16x4 __attribute__((vector_size(8)));
typedef std::int8_t i8x4 __attribute__((vector_size(4)));
#if defined(CHUNKATTN_PASS_AVX512) || defined(CHUNKATTN_PASS_AVX2)
typedef float f32x8 __attribute__((vector_size(32)));
typedef std::int32_t i32x8 __attribute__((vector_size(32)));
typedef std::uint32_t u32x8 __attribute__((vector_size(32)));
typedef std::int16_t i16x8 __attribute__((vector_size(16)));
#endif
#if defined(CHUNKATTN_PASS_AVX512)
typedef float f32x16 __attribute__((vector_size(64)));
typedef std::int32_t i32x16 __attribute__((vector_size(64)));
typedef std::uint32_t u32x16 __attribute__((vector_size(64)));
typedef std::int16_t i16x16 __attribute__((vector_size(32)));
#endif

/// Vector types of W lanes.
template <int W>
struct Lanes;
template <>
struct Lanes<4> {
  using Float = f32x4;
  using Int = i32x4;
  using Unsigned = u32x4;
};

#if defined(CHUNKATTN_PASS_AVX512) || defined(CHUNKATTN_PASS_AVX2)
template <>
struct Lanes<8> {
  using Float = f32x8;
  using Int = i32x8;
  using Unsigned = u32x8;
};
#endif
// num_accumulators: sums that a loop holds in registers; tile_accumulators: those of a tile of the
// chunk-first products.
#if defined(CHUNKATTN_PASS_AVX512)
template <>
struct Lanes<16> {
  using Float = f32x16;
  using Int = i32x16;
  using Unsigned = u32x16;
};
inline constexpr int native_width = 16;
inline constexpr int num_accumulators = 16;  // of 32 registers
inline constexpr int tile_accumulators = 16;
#elif defined(CHUNKATTN_PASS_AVX2)
inline constexpr int native_width = 8;
inline constexpr int num_accumulators = 8;    // of 16 registers
inline constexpr int tile_accumulators = 12;  // eight chains of additions just keep both units busy
#elif defined(CHUNKATTN_PASS_NEON)
inline constexpr int native_width = 4;
inline constexpr int num_accumulators = 16;  // of 32 registers
inline constexpr int tile_accumulators = 16;
#else
inline constexpr int native_width = 4;
inline constexpr int num_accumulators = 8;
inline constexpr int tile_accumulators = 8;
#endif

template <int W>
using Float = typename Lanes<W>::Float;
template <int W>
using Int = typename Lanes<W>::Int;
template <int W>
using Unsigned = typename Lanes<W>::Unsigned;

/// Lanes of the widest vector that divides `elements` (a multiple of 8).
template <int elements>
inline constexpr int width_for = elements % native_width == 0         ? native_width
                                 : elements % (native_width / 2) == 0 ? native_width / 2
                                                                      : 4;

/// std::bit_cast, whose function is not compiled for this instruction set and so not inlined.
template <class To, class From>
CHUNKATTN_INLINE To bits_as(From from) {
  return __builtin_bit_cast(To, from);
}

template <int W>
CHUNKATTN_INLINE Float<W> load(const float* from) {
  Float<W> result;
  __builtin_memcpy(&result, from, sizeof result);
  return result;
}
/// A vector from memory that several multiply-adds take. With -march of a processor that has AVX2,
/// g++ makes it an operand in memory of each, which such a processor loads twice a cycle at most.
template <class V>
CHUNKATTN_INLINE V loaded_once(V from_memory) {
#if defined(CHUNKATTN_PASS_AVX2)
  __asm__("" : "+x"(from_memory));
#endif
  return from_memory;
}
template <int W>
CHUNKATTN_INLINE Float<W> load_once(const float* from) {
  return loaded_once(load<W>(from));
}
template <int W>
CHUNKATTN_INLINE Int<W> load_int(const std::int32_t* from) {
  Int<W> result;
  __builtin_memcpy(&result, from, sizeof result);
  return result;
}
template <class V>
CHUNKATTN_INLINE void store(float* to, V value) {
  __builtin_memcpy(to, &value, sizeof value);
}

template <int W>
CHUNKATTN_INLINE Float<W> broadcast(float value) {
#if defined(CHUNKATTN_PASS_AVX512) || defined(CHUNKATTN_PASS_AVX2)
#if defined(CHUNKATTN_PASS_AVX512)
  if constexpr (W == 16) return _mm512_set1_ps(value);
#endif
  if constexpr (W == 8) return _mm256_set1_ps(value);
#endif
  if constexpr (W == 4) return Float<4>{value, value, value, value};
}
template <int W>
CHUNKATTN_INLINE Int<W> broadcast_int(std::int32_t value) {
  return Int<W>{} + value;
}
/// A word for all lanes, as dot products (dots.hpp) take it: those of Arm can read one lane for
/// all.
template <int W>
CHUNKATTN_INLINE auto spread(std::uint32_t word) {
#if defined(CHUNKATTN_PASS_NEON) && !defined(CHUNKATTN_SOFTWARE_DOTS)
  return word;
#else
  return Unsigned<W>{} + word;
#endif
}
template <int W>
CHUNKATTN_INLINE Float<W> zero() {
  return Float<W>{};
}

/// a * b + c, fused where the machine can: in one place as in any other, or kernels that have to
/// give the same bits would not.
CHUNKATTN_INLINE f32x4 fma(f32x4 a, f32x4 b, f32x4 c) {
#if defined(CHUNKATTN_PASS_AVX512) || defined(CHUNKATTN_PASS_AVX2)
  return _mm_fmadd_ps(a, b, c);
#elif defined(CHUNKATTN_PASS_NEON)
  return vfmaq_f32(c, a, b);
#elif defined(__FP_FAST_FMAF)  // where GCC fuses a * b + c here and not there
  return f32x4{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]),
               __builtin_fmaf(a[2], b[2], c[2]), __builtin_fmaf(a[3], b[3], c[3])};
#else
  return a * b + c;
#endif
}
/// The larger of each lane. Where b is NaN, b; where only a is, a or b as the machine likes.
CHUNKATTN_INLINE f32x4(max)(f32x4 a, f32x4 b) {
#if defined(CHUNKATTN_PASS_AVX512) || defined(CHUNKATTN_PASS_AVX2)
  return _mm_max_ps(a, b);
#elif defined(CHUNKATTN_PASS_NEON)
  return vmaxq_f32(a, b);
#else
  return a > b ? a : b;
#endif
}
#if defined(CHUNKATTN_PASS_AVX512) || defined(CHUNKATTN_PASS_AVX2)
CHUNKATTN_INLINE f32x8 fma(f32x8 a, f32x8 b, f32x8 c) {
  return _mm256_fmadd_ps(a, b, c);
}
CHUNKATTN_INLINE f32x8(max)(f32x8 a, f32x8 b) {
  return _mm256_max_ps(a, b);
}
#endif
#if defined(CHUNKATTN_PASS_AVX512)
CHUNKATTN_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return _mm512_fmadd_ps(a, b, c);
}
CHUNKATTN_INLINE f32x16(max)(f32x16 a, f32x16 b) {
  return _mm512_maskz_max_ps(0xffff, a, b);  // the plain form makes GCC 12 warn
}
#endif

// ---- Across lanes -----------------------------------------------------------------------------

/// Lane i of the result: lane S[i] of a, or lane S[i] - W of b.
template <int W, class V, int... S>
CHUNKATTN_INLINE V shuffle(V a, V b, std::integer_sequence<int, S...>) {
#if defined(__CUDACC__)  // nvcc 13.0 does not expand a pack in the arguments of this builtin
  V result{};
  int lane = 0;
  ((result[lane++] = S < W ? a[S % W] : b[S % W]), ...);
  return result;
#else
  return __builtin_shufflevector(a, b, S...);
#endif
}

template <int W, int Half, bool lower, class V, int... I>
CHUNKATTN_INLINE V exchange(V a, V b, std::integer_sequence<int, I...>) {
  // Seen as blocks of Half lanes: the lower block of every pair of a and of b, or the upper one.
  constexpr auto source = [](int lane) {
    const bool second = (lane & Half) != 0;
    if (lower) return second ? W + lane - Half : lane;
    return second ? W + lane : lane + Half;
  };
  return shuffle<W>(a, b, std::integer_sequence<int, source(I)...>{});
}

/// Lane j of the result: the sum over the lanes of rows[j], added as reduce_sum does.
template <int W, int B = W, class V>
CHUNKATTN_INLINE V sum_lanes(const V (&rows)[to_size(B)]) {
  if constexpr (B == 1) {
    return rows[0];
  } else {
    constexpr int half = B / 2;
    constexpr auto lanes = std::make_integer_sequence<int, W>{};
    V next[to_size(half)];
    CHUNKATTN_UNROLLED
    for (int i = 0; i < half; ++i)
      next[i] = exchange<W, half, true>(rows[i], rows[i + half], lanes) +
                exchange<W, half, false>(rows[i], rows[i + half], lanes);
    return sum_lanes<W, half>(next);
  }
}

/// Transposes W vectors of W lanes: by blocks of half the size, then their halves, and so on.
template <int W, int Half = W / 2>
CHUNKATTN_INLINE void transpose(Float<W> (&rows)[to_size(W)]) {
  CHUNKATTN_UNROLLED
  for (int pair = 0; pair < W / 2; ++pair) {
    const int i = pair / Half * 2 * Half + pair % Half;
    constexpr auto lanes = std::make_integer_sequence<int, W>{};
    const Float<W> a = rows[i];
    const Float<W> b = rows[i + Half];
    rows[i] = exchange<W, Half, true>(a, b, lanes);
    rows[i + Half] = exchange<W, Half, false>(a, b, lanes);
  }
  if constexpr (Half > 1) transpose<W, Half / 2>(rows);
}

template <int W>
CHUNKATTN_INLINE float reduce_max(Float<W> value) {
  if constexpr (W == 4) {
    const float a = value[0] > value[2] ? value[0] : value[2];
    const float b = value[1] > value[3] ? value[1] : value[3];
    return a > b ? a : b;
  } else {
    Float<W / 2> low, high;
    __builtin_memcpy(&low, &value, sizeof low);
    __builtin_memcpy(&high, reinterpret_cast<const char*>(&value) + sizeof low, sizeof high);
    return reduce_max<W / 2>((max)(low, high));
  }
}
template <int W>
CHUNKATTN_INLINE float reduce_sum(Float<W> value) {
  if constexpr (W == 4) {
    return (value[0] + value[2]) + (value[1] + value[3]);
  } else {
    Float<W / 2> low, high;
    __builtin_memcpy(&low, &value, sizeof low);
    __builtin_memcpy(&high, reinterpret_cast<const char*>(&value) + sizeof low, sizeof high);
    return reduce_sum<W / 2>(low + high);
  }
}
/// The sum of N vectors, added as reduce_sum adds the N lanes of one. Spoils `parts`.
template <int N, class V>
CHUNKATTN_INLINE V sum_as_lanes(V (&parts)[to_size(N)]) {
  for (int half = N / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) parts[i] = parts[i] + parts[i + half];
  return parts[0];
}
/// `value` where the condition's lane is all ones, else `other`.
template <int W>
CHUNKATTN_INLINE Float<W> select(Int<W> condition, Float<W> value, Float<W> other) {
  return condition ? value : other;
}

template <int W, int... I>
CHUNKATTN_INLINE Int<W> iota(std::integer_sequence<int, I...>) {
  return Int<W>{I...};
}
/// 0, 1, … W - 1.
template <int W>
CHUNKATTN_INLINE Int<W> iota() {
  return iota<W>(std::make_integer_sequence<int, W>{});
}

// ---- exp --------------------------------------------------------------------------------------

/// p * scale, or 0 where x is below `lowest`. A NaN in p stays.
template <int W>
CHUNKATTN_INLINE Float<W> scale_or_zero(Float<W> p, Float<W> scale, Float<W> x, Float<W> lowest) {
#if defined(CHUNKATTN_PASS_AVX512)
  if constexpr (W == 16)
    return _mm512_maskz_mul_ps(_mm512_cmp_ps_mask(x, lowest, _CMP_NLT_UQ), p, scale);
#endif
  return select<W>(x < lowest, zero<W>(), p * scale);
}

/// e^x for x <= 0, within about one unit in the last place; 0 where the result would be subnormal
/// (minus infinity included), NaN for NaN. Two-word reduction by ln 2 to |r| <= ln(2)/2, then
/// 1 + r + r^2 q(r) with the q of degree 4 whose largest relative error is least (Remez: 3.1e-9).
template <int W>
CHUNKATTN_INLINE Float<W> exp_nonpositive(Float<W> x) {
  const Float<W> lowest = broadcast<W>(-87.3365f);  // 2^-126
  const Float<W> clamped = (max)(lowest, x);        // in this order, which keeps NaN
  // Adding 1.5 * 2^23 rounds to an integer n and leaves it in the low bits; 127 more is what the
  // exponent field of 2^n holds. Multiplied, not added as bits: an integer sum would lose NaN.
  const Float<W> magic = broadcast<W>(0x1.8p23f + 127.0f);
  Float<W> shifted = fma(clamped, broadcast<W>(1.44269504f), magic);
  const Float<W> scale = bits_as<Float<W>>(bits_as<Int<W>>(shifted) << 23);
#if defined(__FAST_MATH__)
  __asm__("" : "+m"(shifted));  // keeps (x + magic) - magic from being folded to x
#endif
  const Float<W> n = shifted - magic;
  Float<W> r = fma(n, broadcast<W>(-0x1.62e4p-1f), clamped);  // ln 2: 15 bits, exact products
  r = fma(n, broadcast<W>(-1.42860677e-6f), r);               // and the rest
  Float<W> p = broadcast<W>(0x1.6a23dp-10f);
  p = fma(p, r, broadcast<W>(0x1.123a2p-7f));
  p = fma(p, r, broadcast<W>(0x1.5558f2p-5f));
  p = fma(p, r, broadcast<W>(0x1.555492p-3f));
  p = fma(p, r, broadcast<W>(0x1.fffffcp-2f));
  p = fma(p, r, broadcast<W>(1.0f));
  p = fma(p, r, broadcast<W>(1.0f));
  return scale_or_zero<W>(p, scale, x, lowest);
}

}  // namespace simd
CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_SIMD
