// The peak rate of the processor's dot products, measured; 0 where there are none that kernels use.
#pragma once

#include <type_traits>

#include "bench/matrix_rate.hpp"
#include "chunkattn/chunk_attention.hpp"
#include "chunkattn/debug/attention.hpp"
#include "examples/support/machine_limits.hpp"

namespace bench {

/// Independent chains of sums.
inline constexpr int dot_chains = 16;

// Makes the compiler compute a vector.
#if defined(__aarch64__)
#define CHUNKATTN_KEEP_VECTOR(x) __asm__ volatile("" : "+w"(x))
#else
#define CHUNKATTN_KEEP_VECTOR(x) __asm__ volatile("" : "+v"(x))
#endif

#if defined(CHUNKATTN_WITH_AVX2)

inline constexpr int int16_chains = 12;  // of 16 registers

CHUNKATTN_ALLOW_AVX2
inline void multiply_int16(int iterations) {
  using Bits = chunkattn::detail::cpu::avx2::simd::Unsigned<8>;
  Bits sums[int16_chains] = {};
  Bits a{}, b{};
  CHUNKATTN_KEEP_VECTOR(a);
  CHUNKATTN_KEEP_VECTOR(b);
  for (int i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (Bits& sum : sums) {
      Bits once = a;  // else the compiler multiplies once for all
      CHUNKATTN_KEEP_VECTOR(once);
      sum = chunkattn::detail::cpu::avx2::dot_int16<8>(sum, once, b);
      CHUNKATTN_KEEP_VECTOR(sum);
    }
  }
}
CHUNKATTN_FORBID

#endif
#if defined(CHUNKATTN_WITH_DOTS)

namespace pass = chunkattn::detail::cpu::CHUNKATTN_DOTS_SET;
inline constexpr int dot_lanes = pass::simd::native_width;

CHUNKATTN_ALLOW_DOTS
inline void multiply_bytes(int iterations) {
  using Bits = pass::simd::Unsigned<dot_lanes>;
  Bits sums[dot_chains] = {};
  const Bits b{};
  const auto a = pass::simd::spread<dot_lanes>(0);
  for (int i = 0; i < iterations; ++i) {
#pragma GCC unroll 16
    for (Bits& sum : sums) {
      sum = pass::dot_bytes<pass::KeyByte, std::int8_t, dot_lanes>(sum, a, b);
      CHUNKATTN_KEEP_VECTOR(sum);
    }
  }
}
CHUNKATTN_FORBID

#endif
#if defined(CHUNKATTN_WITH_PAIRS)

CHUNKATTN_ALLOW_DOTS
inline void multiply_pairs(int iterations) {
  using Real = pass::simd::Float<dot_lanes>;
  Real sums[dot_chains] = {};
  const pass::simd::Unsigned<dot_lanes> a{};
  const auto b = pass::simd::spread<dot_lanes>(0);
  for (int i = 0; i < iterations; ++i) {
#pragma GCC unroll 16
    for (Real& sum : sums) {
      sum = pass::dot_pairs<dot_lanes>(sum, a, b);
      CHUNKATTN_KEEP_VECTOR(sum);
    }
  }
}
CHUNKATTN_FORBID

#endif

/// Operations per second (a product and its addition count as two) of all threads of a pool, of
/// `multiply`, which does `chains` dot products of `products` products per iteration.
template <class Multiply>
double dot_rate(chunkattn::ThreadPool& pool, int iterations, int products, const Multiply& multiply,
                int chains = dot_chains) {
  const int threads = pool.concurrency();
  const double ms = examples::milliseconds(
      [&] { pool.parallel_for(threads, [&](int) { multiply(iterations); }); });
  return 2.0 * products * chains * iterations * threads / (ms * 1e-3);
}

/// Of bytes; 0: kernels use none here.
inline double byte_rate([[maybe_unused]] chunkattn::ThreadPool& pool,
                        [[maybe_unused]] int iterations) {
#if defined(CHUNKATTN_WITH_DOTS)
  constexpr auto set = chunkattn::InstructionSet::CHUNKATTN_DOTS_SET;
  if (chunkattn::detail::cpu::is_supported(set) && chunkattn::detail::cpu::dot_units().int8)
    return dot_rate(pool, iterations, 4 * dot_lanes, multiply_bytes);
#endif
  return 0;
}
/// Of int16, as kernels of avx2 use them.
inline double int16_rate([[maybe_unused]] chunkattn::ThreadPool& pool,
                         [[maybe_unused]] int iterations) {
#if defined(CHUNKATTN_WITH_AVX2)
  if (chunkattn::detail::cpu::is_supported(chunkattn::InstructionSet::avx2))
    return dot_rate(pool, iterations, 2 * 8, multiply_int16, int16_chains);
#endif
  return 0;
}
/// Of pairs of bfloat16.
inline double pair_rate([[maybe_unused]] chunkattn::ThreadPool& pool,
                        [[maybe_unused]] int iterations) {
#if defined(CHUNKATTN_WITH_PAIRS)
  constexpr auto set = chunkattn::InstructionSet::CHUNKATTN_DOTS_SET;
  if (chunkattn::detail::cpu::is_supported(set) && chunkattn::detail::cpu::dot_units().bfloat16)
    return dot_rate(pool, iterations, 2 * dot_lanes, multiply_pairs);
#endif
  return 0;
}

/// What computes products.
enum class Unit { fma, matrix, byte_dots, int16_dots, pair_dots };

/// A unit, and the products of its own that take the place of one multiplication.
struct UnitUse {
  Unit unit = Unit::fma;
  double products = 1;
};

/// What products over K and V of T go through, for queries that are bfloat16 or fp32 that is none.
template <class T, class Attention>
UnitUse unit_of(const Attention& attention, bool bf16_queries = false) {
  using chunkattn::CpuOptions;
  const chunkattn::Rounding rounding = chunkattn::rounding_of<T>(attention);
  const bool one_term = attention.options().accuracy == CpuOptions::Accuracy::one_term;
  if (rounding.p_of_largest > 0)
    return attention.options().instruction_set == chunkattn::InstructionSet::avx2
               ? UnitUse{Unit::int16_dots, 1}
               : UnitUse{Unit::byte_dots, 2};
  if (attention.options().instruction_set == chunkattn::InstructionSet::amx)
    return rounding.logit == 0                  ? UnitUse{}
           : one_term                           ? UnitUse{Unit::matrix, 1}
           : std::is_same_v<T, chunkattn::half> ? UnitUse{Unit::matrix, 3}
                                                : UnitUse{Unit::matrix, 2};
  if (rounding.logit > 0) return {Unit::pair_dots, 1};
  const bool exact_queries = bf16_queries && rounding.p > chunkattn::Rounding{}.p;
  return exact_queries ? UnitUse{Unit::pair_dots, 1.5} : UnitUse{};  // P·V has two terms
}

}  // namespace bench
