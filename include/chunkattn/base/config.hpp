// What the compiler offers: namespaces, exceptions, host/device qualifiers, inlining.
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
#define CHUNKATTN_LAMBDA __attribute__((always_inline))

// What runs once, or on failure only: compiled for size, as is what leads to it.
#define CHUNKATTN_COLD __attribute__((cold, noinline))

// Asks for a cache line ahead of its use; harmless for any address.
#define CHUNKATTN_PREFETCH(address) __builtin_prefetch(address)
#define CHUNKATTN_PREFETCH_WRITE(address) __builtin_prefetch(address, 1)
