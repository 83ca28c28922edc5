// Macros for what the compiler offers: namespaces, exceptions, host/device qualifiers, inlining.
#pragma once

#include "../../version.hpp"

// A compiler that cannot compile the library prints why, and nothing else: the file included last
// does not exist, which ends the compilation.
#if defined(_MSC_VER) || (defined(__clang__) ? __clang_major__ < 14 : __GNUC__ < 12)
#error "chunkattn needs g++ 12, clang 14, or a newer one; on Windows, those of mingw-w64"
#include <chunkattn/see_the_error_above>
#elif __cplusplus < 202002L
#error "chunkattn needs C++20: compile with -std=c++20 or newer"
#include <chunkattn/see_the_error_above>
#elif __SIZEOF_POINTER__ != 8
#error "chunkattn needs a 64-bit target: compile without -m32 or -mx32"
#include <chunkattn/see_the_error_above>
#endif

#if defined(__cpp_exceptions) || defined(__EXCEPTIONS)
#define CHUNKATTN_EXCEPTIONS 1
#define CHUNKATTN_ABI v0_4
#else
#define CHUNKATTN_EXCEPTIONS 0
#define CHUNKATTN_ABI v0_4_no_exceptions
#endif

// Everything lives in an inline namespace that names the version and whether failures throw, so
// that units that differ in these can be linked into one program without their inline functions
// being merged.
#define CHUNKATTN_NAMESPACE_BEGIN \
  namespace chunkattn {           \
  inline namespace CHUNKATTN_ABI {
#define CHUNKATTN_NAMESPACE_END \
  }                             \
  }

#if defined(__CUDACC__)
#define CHUNKATTN_HD __host__ __device__
#else
#define CHUNKATTN_HD
#endif

#define CHUNKATTN_INLINE inline __attribute__((always_inline))
#define CHUNKATTN_LAMBDA __attribute__((always_inline))

// For functions that run once, or on failure only: they, and the branches to them, are compiled for
// size.
#define CHUNKATTN_COLD __attribute__((cold, noinline))

// Large functions that depend on no type of the program. Units with CHUNKATTN_EXTERN_KERNELS only
// declare them; the one that includes kernels.ipp defines and emits them all.
#if !defined(CHUNKATTN_EXTERN_KERNELS)
#define CHUNKATTN_BODIES 1
#define CHUNKATTN_FUNCTION inline
#elif defined(CHUNKATTN_KERNELS_UNIT)
#define CHUNKATTN_BODIES 1
#define CHUNKATTN_FUNCTION __attribute__((used)) inline
#else
#define CHUNKATTN_BODIES 0
#define CHUNKATTN_FUNCTION
#endif

// Prefetches a cache line; harmless for any address.
#define CHUNKATTN_PREFETCH(address) __builtin_prefetch(address)
#define CHUNKATTN_PREFETCH_WRITE(address) __builtin_prefetch(address, 1)
