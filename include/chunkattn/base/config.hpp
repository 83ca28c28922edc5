// What the compiler offers: namespaces, exceptions, host/device qualifiers, the instruction set.
#pragma once

#include "version.hpp"

#if !defined(__CUDACC__) && (!defined(__cplusplus) || __cplusplus < 202002L)
#error "chunkattn needs C++20: compile with -std=c++20 or newer"
#endif

// Everything lives in a versioned inline namespace, so that two versions of the library can be
// linked into one program without their inline functions being merged.
#define CHUNKATTN_NAMESPACE_BEGIN \
  namespace chunkattn {           \
  inline namespace v0_2 {
#define CHUNKATTN_NAMESPACE_END \
  }                             \
  }

// Code that is compiled differently for another instruction set lives one inline namespace deeper,
// named after that set: two translation units built with different -march options then never share
// a kernel. Tree, plan and K/V types stay outside, so that they can cross such a border.
#if defined(CHUNKATTN_FORCE_PORTABLE)
#define CHUNKATTN_ISA portable
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && defined(__FMA__) && defined(__F16C__)
#define CHUNKATTN_ISA avx512
#define CHUNKATTN_ISA_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define CHUNKATTN_ISA avx2
#define CHUNKATTN_ISA_AVX2 1
#elif defined(__aarch64__) && defined(__ARM_NEON)
#define CHUNKATTN_ISA neon
#define CHUNKATTN_ISA_NEON 1
#else
#define CHUNKATTN_ISA portable
#endif

#define CHUNKATTN_TEXT_OF(name) #name
#define CHUNKATTN_TEXT(name) CHUNKATTN_TEXT_OF(name)

#define CHUNKATTN_ISA_NAMESPACE_BEGIN \
  CHUNKATTN_NAMESPACE_BEGIN           \
  inline namespace CHUNKATTN_ISA {
#define CHUNKATTN_ISA_NAMESPACE_END \
  }                                 \
  CHUNKATTN_NAMESPACE_END

#if defined(__cpp_exceptions) || defined(__EXCEPTIONS)
#define CHUNKATTN_EXCEPTIONS 1
#else
#define CHUNKATTN_EXCEPTIONS 0
#endif

#if defined(__CUDACC__)
#define CHUNKATTN_HD __host__ __device__
#else
#define CHUNKATTN_HD
#endif

#define CHUNKATTN_INLINE inline __attribute__((always_inline))

// What runs once, or on failure only: compiled for size, as is what leads to it.
#define CHUNKATTN_COLD __attribute__((cold, noinline))

// Asks for a cache line ahead of its use; harmless for any address.
#define CHUNKATTN_PREFETCH(address) __builtin_prefetch(address)
#define CHUNKATTN_PREFETCH_WRITE(address) __builtin_prefetch(address, 1)
