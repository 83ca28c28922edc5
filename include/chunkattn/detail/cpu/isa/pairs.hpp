// Dot products of pairs of bfloat16 in the lanes of a vector, as the kernels above them see them:
// the processor's (AVX-512 BF16, or Arm's FEAT_BF16), a model in plain C++ (tests), or none.
#ifndef CHUNKATTN_ISA_PAIRS
#define CHUNKATTN_ISA_PAIRS

#include "pass.hpp"
#include "simd.hpp"

CHUNKATTN_PASS_BEGIN(PAIRS)

#if defined(CHUNKATTN_SOFTWARE_DOTS)

inline constexpr bool has_pairs = true;
[[nodiscard]] inline bool runs_pairs(InstructionSet) noexcept {
  return true;
}

/// sum + the products of each lane's two bfloat16, as this architecture adds them up (see
/// software_dots.hpp). Denormals are zeros.
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

#elif defined(CHUNKATTN_PASS_BF16)

inline constexpr bool has_pairs = true;
[[nodiscard]] inline bool runs_pairs(InstructionSet set) noexcept {
  return set == InstructionSet::avx512 && dot_units().bfloat16;
}

template <int W>
CHUNKATTN_INLINE simd::Float<W> dot_pairs(simd::Float<W> sum, simd::Unsigned<W> a,
                                          simd::Unsigned<W> b) noexcept {
  if constexpr (W == 16)
    return (simd::Float<W>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  else if constexpr (W == 8)
    return (simd::Float<W>)_mm256_dpbf16_ps((__m256)sum, (__m256bh)a, (__m256bh)b);
  else
    return (simd::Float<W>)_mm_dpbf16_ps((__m128)sum, (__m128bh)a, (__m128bh)b);
}

#elif defined(CHUNKATTN_PASS_BFDOT)

inline constexpr bool has_pairs = true;
[[nodiscard]] inline bool runs_pairs(InstructionSet set) noexcept {
  return set == InstructionSet::neon && dot_units().bfloat16;
}

template <int W>
CHUNKATTN_INLINE simd::Float<W> dot_pairs(simd::Float<W> sum, simd::Unsigned<W> a,
                                          std::uint32_t b) noexcept {
  __asm__("bfdot %0.4s, %1.8h, %2.2h[0]" : "+w"(sum) : "w"(a), "w"(b));
  return sum;
}

#else

inline constexpr bool has_pairs = false;
[[nodiscard]] inline bool runs_pairs(InstructionSet) noexcept {
  return false;
}

#endif

/// Whether products over K and V of T may go through dot products of pairs where there are some.
template <class T>
inline constexpr bool fits_pairs = has_pairs && std::is_same_v<T, bfloat16>;

CHUNKATTN_PASS_END

#endif  // CHUNKATTN_ISA_PAIRS
