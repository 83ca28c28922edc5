// Dot products of words in the lanes of a vector, as the kernels above them see them: of four
// bytes, two int16 or two bfloat16. The processor's (AVX-512 VNNI and BF16, Arm's FEAT_DotProd and
// FEAT_BF16; int16: AVX2, AVX-VNNI), a model in plain C++ (tests), or none.
#ifndef CHUNKATTN_ISA_DOTS
#define CHUNKATTN_ISA_DOTS

#include "pass.hpp"
#include "simd.hpp"

CHUNKATTN_PASS_BEGIN(DOTS)

#if defined(CHUNKATTN_PASS_DOTS)
inline constexpr bool has_dots = true;
#else
inline constexpr bool has_dots = false;
#endif
/// Over int8 K and V: of int16, not of bytes.
inline constexpr bool has_int16 = InstructionSet::CHUNKATTN_PASS == InstructionSet::avx2;
#if defined(CHUNKATTN_PASS_PAIRS)
inline constexpr bool has_pairs = true;
#else
inline constexpr bool has_pairs = false;
#endif
#if defined(CHUNKATTN_SOFTWARE_DOTS)
inline constexpr bool software_dots = true;
#else
inline constexpr bool software_dots = false;
#endif

/// Whether this processor has dot products for int8 K and V.
[[nodiscard]] inline bool runs_dots() noexcept {
  return has_dots && (software_dots || has_int16 || dot_units().int8);
}
/// Whether it has those of bfloat16, as fast as multiply-adds of floats. With a matrix unit they
/// are not used.
[[nodiscard]] inline bool runs_pairs(InstructionSet set) noexcept {
  return has_pairs && (software_dots || (set != InstructionSet::amx && dot_units().bfloat16));
}

// What the instructions take the bytes of K and V for, in products with the signed ones of queries
// and the unsigned ones of probabilities. Where it is not what they are, they come with 128 added.
#if defined(CHUNKATTN_PASS_NEON)
using KeyByte = std::int8_t;     // SDOT
using ValueByte = std::uint8_t;  // UDOT; USDOT, which fewer processors have, is not needed
#else
using KeyByte = std::uint8_t;   // VPDPBUSD
using ValueByte = std::int8_t;  // VPDPBUSD
#endif
/// What an exclusive or adds to the bytes of a word, where they come with 128 added.
template <class Byte>
inline constexpr std::uint32_t byte_offsets = std::is_unsigned_v<Byte> ? 0x80808080u : 0;

// dot_bytes(): sum + the products of each lane's four bytes, which are A in `a` and B in `b`;
// modulo 2^32. dot_int16(): sum + the products of its two int16. dot_pairs(): sum + the products of
// each lane's two bfloat16, as this architecture adds them up (see
// tests/support/software_dots.hpp); denormals are zeros. One operand is the same word in all lanes:
// as simd::spread() gives it.

using simd::bits_as;

#if defined(CHUNKATTN_PASS_AVX2)  // has it: no model takes its place
template <int W>
CHUNKATTN_INLINE simd::Unsigned<W> dot_int16(simd::Unsigned<W> sum, simd::Unsigned<W> a,
                                             simd::Unsigned<W> b) noexcept {
  static_assert(W == 8);
  const auto x = bits_as<__m256i>(a), y = bits_as<__m256i>(b);
#if defined(__AVXVNNI__)
  return bits_as<simd::u32x8>(_mm256_dpwssd_avx_epi32(bits_as<__m256i>(sum), x, y));
#else
  return sum + bits_as<simd::u32x8>(_mm256_madd_epi16(x, y));
#endif
}
#endif

#if defined(CHUNKATTN_SOFTWARE_DOTS)

template <class A, class B, int W>
CHUNKATTN_INLINE simd::Unsigned<W> dot_bytes(simd::Unsigned<W> sum, simd::Unsigned<W> a,
                                             simd::Unsigned<W> b) noexcept {
  for (int lane = 0; lane < W; ++lane)
    sum[lane] = software_dot_bytes<A, B>(sum[lane], a[lane], b[lane]);
  return sum;
}
template <int W>
CHUNKATTN_INLINE simd::Float<W> dot_pairs(simd::Float<W> sum, simd::Unsigned<W> a,
                                          simd::Unsigned<W> b) noexcept {
  for (int lane = 0; lane < W; ++lane)
#if defined(CHUNKATTN_PASS_NEON)
    sum[lane] = software_bfdot(sum[lane], a[lane], b[lane]);
#else
    sum[lane] = software_dot_pairs(sum[lane], a[lane], b[lane]);
#endif
  return sum;
}

#elif defined(CHUNKATTN_PASS_DOTS) && defined(CHUNKATTN_PASS_AVX512)

template <class A, class B, int W>
CHUNKATTN_INLINE simd::Unsigned<W> dot_bytes(simd::Unsigned<W> sum, simd::Unsigned<W> a,
                                             simd::Unsigned<W> b) noexcept {
  static_assert(std::is_unsigned_v<A> && std::is_signed_v<B>);
  if constexpr (W == 16)
    return bits_as<simd::Unsigned<W>>(
        _mm512_dpbusd_epi32(bits_as<__m512i>(sum), bits_as<__m512i>(a), bits_as<__m512i>(b)));
  else if constexpr (W == 8)
    return bits_as<simd::Unsigned<W>>(
        _mm256_dpbusd_epi32(bits_as<__m256i>(sum), bits_as<__m256i>(a), bits_as<__m256i>(b)));
  else
    return bits_as<simd::Unsigned<W>>(
        _mm_dpbusd_epi32(bits_as<__m128i>(sum), bits_as<__m128i>(a), bits_as<__m128i>(b)));
}
#if defined(CHUNKATTN_PASS_PAIRS)
template <int W>
CHUNKATTN_INLINE simd::Float<W> dot_pairs(simd::Float<W> sum, simd::Unsigned<W> a,
                                          simd::Unsigned<W> b) noexcept {
  if constexpr (W == 16)
    return _mm512_dpbf16_ps(sum, bits_as<__m512bh>(a), bits_as<__m512bh>(b));
  else if constexpr (W == 8)
    return _mm256_dpbf16_ps(sum, bits_as<__m256bh>(a), bits_as<__m256bh>(b));
  else
    return _mm_dpbf16_ps(sum, bits_as<__m128bh>(a), bits_as<__m128bh>(b));
}
#endif

#elif defined(CHUNKATTN_PASS_DOTS) && defined(CHUNKATTN_PASS_NEON)

// As assembler, since clang has the intrinsics from 16 on only, unless options promise them.
template <class A, class B, int W>
CHUNKATTN_INLINE simd::Unsigned<W> dot_bytes(simd::Unsigned<W> sum, std::uint32_t a,
                                             simd::Unsigned<W> b) noexcept {
  static_assert(std::is_signed_v<A> == std::is_signed_v<B>);
  if constexpr (std::is_signed_v<A>)
    __asm__("sdot %0.4s, %1.16b, %2.4b[0]" : "+w"(sum) : "w"(b), "w"(a));
  else
    __asm__("udot %0.4s, %1.16b, %2.4b[0]" : "+w"(sum) : "w"(b), "w"(a));
  return sum;
}
#if defined(CHUNKATTN_PASS_PAIRS)
template <int W>
CHUNKATTN_INLINE simd::Float<W> dot_pairs(simd::Float<W> sum, simd::Unsigned<W> a,
                                          std::uint32_t b) noexcept {
  __asm__("bfdot %0.4s, %1.8h, %2.2h[0]" : "+w"(sum) : "w"(a), "w"(b));
  return sum;
}
#endif

#endif

/// The longest rows of which a product with a query of 16 bits cannot leave 32 bits.
inline constexpr int max_dot_dim = 512;

/// Whether products over K and V of T may go through dot products where there are some.
template <int HeadDim, class T>
inline constexpr bool fits_dots =
    has_dots && std::is_same_v<T, std::int8_t> && HeadDim <= max_dot_dim;
template <class T>
inline constexpr bool fits_pairs = has_pairs && std::is_same_v<T, bfloat16>;

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_DOTS
