// Dot products of bytes in the lanes of a vector, as the kernels above them see them: the
// processor's (AVX-512 VNNI, or Arm's FEAT_DotProd), a model in plain C++ (tests), or none.
#ifndef CHUNKATTN_ISA_DOTS
#define CHUNKATTN_ISA_DOTS

#include "pass.hpp"
#include "simd.hpp"

CHUNKATTN_PASS_BEGIN(DOTS)

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

#if defined(CHUNKATTN_SOFTWARE_DOTS)

inline constexpr bool has_dots = true;
[[nodiscard]] inline bool runs_dots(InstructionSet) noexcept {
  return true;
}

/// sum + the products of each lane's four bytes, which are A in `a` and B in `b`; modulo 2^32.
template <class A, class B, int W>
CHUNKATTN_INLINE simd::Unsigned<W> dot_bytes(simd::Unsigned<W> sum, simd::Unsigned<W> a,
                                             simd::Unsigned<W> b) noexcept {
  for (int lane = 0; lane < W; ++lane)
    sum[lane] = software_dot_bytes<A, B>(sum[lane], a[lane], b[lane]);
  return sum;
}

#elif defined(CHUNKATTN_PASS_VNNI)

inline constexpr bool has_dots = true;
[[nodiscard]] inline bool runs_dots(InstructionSet set) noexcept {
  return (set == InstructionSet::avx512 || set == InstructionSet::amx) && dot_units().int8;
}

template <class A, class B, int W>
CHUNKATTN_INLINE simd::Unsigned<W> dot_bytes(simd::Unsigned<W> sum, simd::Unsigned<W> a,
                                             simd::Unsigned<W> b) noexcept {
  static_assert(std::is_unsigned_v<A> && std::is_signed_v<B>);
  if constexpr (W == 16)
    return (simd::Unsigned<W>)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
  else if constexpr (W == 8)
    return (simd::Unsigned<W>)_mm256_dpbusd_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
  else
    return (simd::Unsigned<W>)_mm_dpbusd_epi32((__m128i)sum, (__m128i)a, (__m128i)b);
}

#elif defined(CHUNKATTN_PASS_DOTPROD)

inline constexpr bool has_dots = true;
[[nodiscard]] inline bool runs_dots(InstructionSet set) noexcept {
  return set == InstructionSet::neon && dot_units().int8;
}

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

#else

inline constexpr bool has_dots = false;
[[nodiscard]] inline bool runs_dots(InstructionSet) noexcept {
  return false;
}

#endif

/// The longest rows of which a product with a query of 16 bits cannot leave 32 bits.
inline constexpr int max_dot_dim = 512;

/// Whether products over K and V of T go through dot products where there are some.
template <int HeadDim, class T>
inline constexpr bool fits_dots =
    has_dots && std::is_same_v<T, std::int8_t> && HeadDim <= max_dot_dim;

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_DOTS
