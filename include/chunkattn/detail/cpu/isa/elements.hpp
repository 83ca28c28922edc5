// Vectors of stored elements as floats, and floats as elements of 16 bits.
#ifndef CHUNKATTN_ISA_ELEMENTS
#define CHUNKATTN_ISA_ELEMENTS

#include "pass.hpp"
#include "simd.hpp"

CHUNKATTN_PASS_BEGIN(VECTORS)
namespace simd {

// ---- Widening: W stored elements as floats ----------------------------------------------------

template <int W>
CHUNKATTN_INLINE Float<W> load_widened(const float* from) {
  return load<W>(from);
}

template <int W>
CHUNKATTN_INLINE Float<W> load_widened(const bfloat16* from) {
#if defined(CHUNKATTN_PASS_AVX512)
  if constexpr (W == 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(
        _mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, bits), 16));
  }
#endif
#if defined(CHUNKATTN_PASS_AVX512) || defined(CHUNKATTN_PASS_AVX2)
  if constexpr (W == 8) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
#endif
  if constexpr (W == 4) {
    u16x4 bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    return bits_as<f32x4>(__builtin_convertvector(bits, u32x4) << 16);
  }
}

/// Any half as a float, in integers but for one exact subtraction that normalises subnormals (no
/// subnormal float ever appears, so flushing them to zero does no harm).
CHUNKATTN_INLINE f32x4 widen_half_bits(u32x4 bits) {
  const u32x4 sign = (bits & 0x8000u) << 16;
  const u32x4 magnitude = (bits & 0x7fffu) << 13;
  const u32x4 exponent = magnitude & 0x0f800000u;
  const u32x4 normal = magnitude + 0x38000000u;
  const u32x4 subnormal =
      bits_as<u32x4>(bits_as<f32x4>(magnitude + 0x38800000u) - bits_as<float>(0x38800000u));
  const u32x4 is_subnormal = bits_as<u32x4>(exponent == 0u);
  const u32x4 nonfinite = bits_as<u32x4>(exponent == 0x0f800000u) & 0x7f800000u;
  return bits_as<f32x4>((is_subnormal & subnormal) | (~is_subnormal & (normal | nonfinite)) | sign);
}

template <int W>
CHUNKATTN_INLINE Float<W> load_widened(const half* from) {
#if defined(CHUNKATTN_PASS_AVX512)
  if constexpr (W == 16)
    return _mm512_maskz_cvtph_ps(0xffff,
                                 _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#endif
#if defined(CHUNKATTN_PASS_AVX512) || defined(CHUNKATTN_PASS_AVX2)
  if constexpr (W == 8)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
  if constexpr (W == 4) {
    u16x4 bits;
    __builtin_memcpy(&bits, from, sizeof bits);
#if defined(CHUNKATTN_PASS_NEON)
    return vcvt_f32_f16(bits_as<float16x4_t>(bits));
#elif defined(CHUNKATTN_PASS_AVX512) || defined(CHUNKATTN_PASS_AVX2)
    return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    return widen_half_bits(__builtin_convertvector(bits, u32x4));
#endif
  }
}

/// Sign-extended bytes of e4m3 as the bits of halves, which are 2^-8 of them, subnormal or not;
/// only NaN has to be put there.
template <class Lane, class Bits>
CHUNKATTN_INLINE Bits as_half_bits(Bits bytes) {
  constexpr Lane sign = static_cast<Lane>(0x8000), nan = static_cast<Lane>(0xbf80);
  const Bits bits = (bytes << 7) & nan;
  return bits | ((bits | sign) == nan);
}

template <int W>
CHUNKATTN_INLINE Float<W> load_widened(const float8_e4m3* from) {
#if defined(CHUNKATTN_PASS_AVX512)
  if constexpr (W == 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    const i16x16 bits = as_half_bits<std::int16_t>(bits_as<i16x16>(_mm256_cvtepi8_epi16(bytes)));
    return _mm512_maskz_cvtph_ps(0xffff, bits_as<__m256i>(bits)) * broadcast<W>(256.0f);
  }
#endif
#if defined(CHUNKATTN_PASS_AVX512) || defined(CHUNKATTN_PASS_AVX2)
  if constexpr (W == 8) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    const i16x8 bits = as_half_bits<std::int16_t>(bits_as<i16x8>(_mm_cvtepi8_epi16(bytes)));
    return _mm256_cvtph_ps(bits_as<__m128i>(bits)) * broadcast<W>(256.0f);
  }
#endif
  if constexpr (W == 4) {
    i8x4 bytes;
    __builtin_memcpy(&bytes, from, sizeof bytes);
    const i32x4 bits = as_half_bits<std::int32_t>(__builtin_convertvector(bytes, i32x4));
    return widen_half_bits(bits_as<u32x4>(bits)) * broadcast<W>(256.0f);
  }
}

template <int W>
CHUNKATTN_INLINE Float<W> load_widened(const std::int8_t* from) {
#if defined(CHUNKATTN_PASS_AVX512)
  if constexpr (W == 16) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, bits));
  }
#endif
#if defined(CHUNKATTN_PASS_AVX512) || defined(CHUNKATTN_PASS_AVX2)
  if constexpr (W == 8) {
    const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bits));
  }
#endif
  if constexpr (W == 4) {
    i8x4 bits;
    __builtin_memcpy(&bits, from, sizeof bits);
    return __builtin_convertvector(__builtin_convertvector(bits, i32x4), f32x4);
  }
}

// ---- Narrowing: rounds to nearest even --------------------------------------------------------

template <int W>
CHUNKATTN_INLINE void store_narrowed(float* to, Float<W> value) {
  store(to, value);
}

template <int W>
CHUNKATTN_INLINE void store_narrowed(half* to, Float<W> value) {
#if defined(CHUNKATTN_PASS_AVX512) || defined(CHUNKATTN_PASS_AVX2)
#if defined(CHUNKATTN_PASS_AVX512)
  if constexpr (W == 16) {
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(to),
        _mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return;
  }
#endif
  if constexpr (W == 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return;
  }
#endif
  if constexpr (W == 4) {
#if defined(CHUNKATTN_PASS_NEON)
    const float16x4_t narrow = vcvt_f16_f32(value);
    __builtin_memcpy(static_cast<void*>(to), &narrow, sizeof narrow);
#else
    for (int i = 0; i < 4; ++i) to[i] = to_half(value[i]);
#endif
  }
}

/// x rounded to nearest even to a bfloat16, as a float. NaN stays NaN.
template <int W>
CHUNKATTN_INLINE Float<W> rounded_to_bfloat16(Float<W> x) {
  const Unsigned<W> bits = bits_as<Unsigned<W>>(x);
  const Unsigned<W> is_nan = bits_as<Unsigned<W>>((bits & 0x7fffffffu) > 0x7f800000u);
  const Unsigned<W> rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return bits_as<Float<W>>(((is_nan & (bits | 0x400000u)) | (~is_nan & rounded)) & 0xffff0000u);
}

/// Stores the upper halves of floats: all there is to those that are bfloat16.
template <int W>
CHUNKATTN_INLINE void store_upper_halves(void* to, Float<W> value) {
  typedef std::uint16_t Narrow __attribute__((vector_size(2 * W)));
  const Narrow narrow = __builtin_convertvector(bits_as<Unsigned<W>>(value) >> 16, Narrow);
  __builtin_memcpy(to, &narrow, sizeof narrow);
}

template <int W>
CHUNKATTN_INLINE void store_narrowed(bfloat16* to, Float<W> value) {
  store_upper_halves<W>(to, rounded_to_bfloat16<W>(value));
}

}  // namespace simd
CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_ELEMENTS
