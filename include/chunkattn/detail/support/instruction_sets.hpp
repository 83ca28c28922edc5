// Instruction sets that the CPU kernels are compiled for, and which of them this processor runs.
//
// A plain build for x86-64 carries kernels for all of them and chooses at run time. Compiler
// options (-march) drop those below what they promise, and the macro CHUNKATTN_ISA leaves one:
//
//   portable, avx2, avx512, neon   that one alone, run where the processor has it
//   amx                            avx512 and amx, which is avx512 with a matrix unit
//   native                         what the compiler's options promise, nothing else
//
// CHUNKATTN_SOFTWARE_TILES is for tests: kernels of every set use a matrix unit of plain C++
// instead of the processor's, many times slower, for row blocks of as many lines as its value says.
// CHUNKATTN_SOFTWARE_DOTS: likewise dot products, of any number. The models are in tests/support,
// software_tiles.hpp and software_dots.hpp, which are to be included before the kernels.
#pragma once

#include "config.hpp"

// What the compiler's options promise. nvcc's front end does not pass target pragmas on.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && \
    defined(__AVX512VL__) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define CHUNKATTN_NATIVE_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define CHUNKATTN_NATIVE_AVX2 1
#elif defined(__aarch64__) && defined(__ARM_NEON)
#define CHUNKATTN_NATIVE_NEON 1
#else
#define CHUNKATTN_NATIVE_PORTABLE 1
#endif

#define CHUNKATTN_ISA_CHOICE_portable 2
#define CHUNKATTN_ISA_CHOICE_avx2 3
#define CHUNKATTN_ISA_CHOICE_avx512 4
#define CHUNKATTN_ISA_CHOICE_neon 5
#define CHUNKATTN_ISA_CHOICE_native 6
#define CHUNKATTN_ISA_CHOICE_amx 7
#define CHUNKATTN_PASTE_NOW(a, b) a##b
#define CHUNKATTN_PASTE(a, b) CHUNKATTN_PASTE_NOW(a, b)
#if defined(CHUNKATTN_ISA)
#define CHUNKATTN_ISA_CHOICE CHUNKATTN_PASTE(CHUNKATTN_ISA_CHOICE_, CHUNKATTN_ISA)
#else
#define CHUNKATTN_ISA_CHOICE 1
#endif
#define CHUNKATTN_ISA_OF_OPTIONS (CHUNKATTN_ISA_CHOICE == 1 || CHUNKATTN_ISA_CHOICE == 6)
// g++ for Windows aligns vectors of AVX on the stack to 16 bytes and accesses them as if to 32 or
// 64 (GCC's bug 54412). What would compile them is refused there but with
// CHUNKATTN_UNALIGNED_MOVES, which says that the assembler replaces these accesses:
// -Wa,-muse-unaligned-vector-move, of binutils 2.38.
#if defined(_WIN32) && !defined(__clang__) && !defined(CHUNKATTN_UNALIGNED_MOVES)
#define CHUNKATTN_NO_AVX 1
#endif

// CHUNKATTN_WITH_…: kernels for it are compiled. CHUNKATTN_VECTOR_SETS names those that differ in
// their vectors, CHUNKATTN_LEAST_ISA the one that asks least of the processor.
#if CHUNKATTN_ISA_CHOICE == 1 && defined(__x86_64__) && !defined(__CUDACC__) && \
    !defined(CHUNKATTN_NATIVE_AVX512) && !defined(CHUNKATTN_NO_AVX)
#define CHUNKATTN_WITH_AVX2 1
#define CHUNKATTN_WITH_AVX512 1
#if defined(CHUNKATTN_NATIVE_AVX2)
#define CHUNKATTN_VECTOR_SETS avx2_avx512
#define CHUNKATTN_LEAST_ISA avx2
#else
#define CHUNKATTN_WITH_PORTABLE 1
#define CHUNKATTN_VECTOR_SETS portable_avx2_avx512
#define CHUNKATTN_LEAST_ISA portable
#endif
#elif CHUNKATTN_ISA_CHOICE == 2 || (CHUNKATTN_ISA_OF_OPTIONS && defined(CHUNKATTN_NATIVE_PORTABLE))
#define CHUNKATTN_WITH_PORTABLE 1
#define CHUNKATTN_VECTOR_SETS portable
#define CHUNKATTN_LEAST_ISA portable
#elif CHUNKATTN_ISA_CHOICE == 3 || (CHUNKATTN_ISA_OF_OPTIONS && defined(CHUNKATTN_NATIVE_AVX2))
#define CHUNKATTN_WITH_AVX2 1
#define CHUNKATTN_VECTOR_SETS avx2
#define CHUNKATTN_LEAST_ISA avx2
#elif CHUNKATTN_ISA_CHOICE == 4 || CHUNKATTN_ISA_CHOICE == 7 || \
    (CHUNKATTN_ISA_OF_OPTIONS && defined(CHUNKATTN_NATIVE_AVX512))
#define CHUNKATTN_WITH_AVX512 1
#define CHUNKATTN_VECTOR_SETS avx512
#define CHUNKATTN_LEAST_ISA avx512
#elif CHUNKATTN_ISA_CHOICE == 5 || (CHUNKATTN_ISA_OF_OPTIONS && defined(CHUNKATTN_NATIVE_NEON))
#define CHUNKATTN_WITH_NEON 1
#define CHUNKATTN_VECTOR_SETS neon
#define CHUNKATTN_LEAST_ISA neon
#else
#error "CHUNKATTN_ISA must be portable, avx2, avx512, amx, neon or native, or not be defined"
#endif

#if defined(CHUNKATTN_NO_AVX) && \
    (defined(__AVX__) || defined(CHUNKATTN_WITH_AVX2) || defined(CHUNKATTN_WITH_AVX512))
#error \
    "g++ for Windows misaligns AVX's vectors (GCC bug 54412): compile without -mavx, -march=native and CHUNKATTN_ISA, or with clang, or with -Wa,-muse-unaligned-vector-move -DCHUNKATTN_UNALIGNED_MOVES"
#include <chunkattn/see_the_error_above>
#elif (defined(CHUNKATTN_WITH_AVX2) || defined(CHUNKATTN_WITH_AVX512)) && !defined(__x86_64__)
#error "CHUNKATTN_ISA names an instruction set of x86-64, and this is another architecture"
#elif defined(CHUNKATTN_WITH_NEON) && !defined(CHUNKATTN_NATIVE_NEON)
#error "CHUNKATTN_ISA=neon needs a compiler for AArch64"
#endif

// amx is the avx512 kernels and a few functions more. Linux alone grants its registers on request.
#if defined(CHUNKATTN_WITH_AVX512) && defined(__linux__) && !defined(__CUDACC__) && \
    !defined(CHUNKATTN_SOFTWARE_TILES) && !defined(CHUNKATTN_SOFTWARE_DOTS) &&      \
    (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#if CHUNKATTN_ISA_CHOICE == 1 || CHUNKATTN_ISA_CHOICE == 7 || \
    (CHUNKATTN_ISA_CHOICE == 6 && defined(__AMX_TILE__) && defined(__AMX_BF16__))
#define CHUNKATTN_WITH_AMX 1
#endif
#elif CHUNKATTN_ISA_CHOICE == 7
#error \
    "CHUNKATTN_ISA=amx needs Linux and g++ 11 or clang 12 at least, and no CHUNKATTN_SOFTWARE_TILES or _DOTS"
#endif

// So are the dot products of avx512 and of neon (detail/support/dot_units.hpp), CHUNKATTN_DOTS_SET.
// Those of neon may be in the compiler's options, or Linux lists them: CHUNKATTN_ASKS_ARM. But
// g++ allows them only together with all of Armv8.2-A in place of the options, so that functions of
// options that ask for something else could not be inlined.
#if !defined(__aarch64__) || !defined(__linux__) || CHUNKATTN_ISA_CHOICE == 6
#elif defined(__clang__) ||                                                           \
    !(defined(__ARM_FEATURE_CRYPTO) || defined(__ARM_FEATURE_AES) ||                  \
      defined(__ARM_FEATURE_SHA2) || defined(__ARM_FEATURE_FP16_SCALAR_ARITHMETIC) || \
      defined(__ARM_FEATURE_DOTPROD) || defined(__ARM_FEATURE_SVE))
#define CHUNKATTN_ASKS_ARM 1
#endif
#if defined(CHUNKATTN_SOFTWARE_DOTS) || defined(__CUDACC__)
#elif defined(CHUNKATTN_WITH_AVX512) && (defined(__AVX512VNNI__) || CHUNKATTN_ISA_CHOICE != 6)
#define CHUNKATTN_WITH_DOTS 1
#define CHUNKATTN_DOTS_SET avx512
#if defined(__AVX512BF16__) || CHUNKATTN_ISA_CHOICE != 6
#define CHUNKATTN_WITH_PAIRS 1
#endif
#elif defined(CHUNKATTN_WITH_NEON) && \
    (defined(__ARM_FEATURE_DOTPROD) || defined(CHUNKATTN_ASKS_ARM))
#define CHUNKATTN_WITH_DOTS 1
#define CHUNKATTN_DOTS_SET neon
#if defined(__linux__) && \
    (defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || defined(CHUNKATTN_ASKS_ARM))
#define CHUNKATTN_WITH_PAIRS 1
#endif
#endif

// CHUNKATTN_ISA_SET names all that is compiled. Kernels of avx2 use AVX-VNNI only where the options
// promise it (isa/dots.hpp).
#if defined(CHUNKATTN_WITH_AVX2) && defined(__AVXVNNI__)
#define CHUNKATTN_NAMED_SETS CHUNKATTN_PASTE(CHUNKATTN_VECTOR_SETS, _avxvnni)
#else
#define CHUNKATTN_NAMED_SETS CHUNKATTN_VECTOR_SETS
#endif
#if defined(CHUNKATTN_SOFTWARE_DOTS)
#define CHUNKATTN_ISA_SET CHUNKATTN_PASTE(CHUNKATTN_NAMED_SETS, _software_dots)
#elif defined(CHUNKATTN_SOFTWARE_TILES)
#define CHUNKATTN_ISA_SET CHUNKATTN_PASTE(CHUNKATTN_NAMED_SETS, _software_tiles)
#elif defined(CHUNKATTN_WITH_AMX)
#define CHUNKATTN_ISA_SET CHUNKATTN_PASTE(CHUNKATTN_NAMED_SETS, _amx)
#elif defined(CHUNKATTN_WITH_PAIRS)
#define CHUNKATTN_ISA_SET CHUNKATTN_PASTE(CHUNKATTN_NAMED_SETS, _pairs)
#elif defined(CHUNKATTN_WITH_DOTS)
#define CHUNKATTN_ISA_SET CHUNKATTN_PASTE(CHUNKATTN_NAMED_SETS, _dots)
#else
#define CHUNKATTN_ISA_SET CHUNKATTN_NAMED_SETS
#endif

// Code that depends on the instruction sets of a translation unit is in an inline namespace named
// after them, so units whose options promise different sets never share a kernel. Tree, plan and
// K/V types are outside, so that such units can pass them to each other.
#define CHUNKATTN_ISA_NAMESPACE_BEGIN \
  CHUNKATTN_NAMESPACE_BEGIN           \
  inline namespace CHUNKATTN_ISA_SET {
#define CHUNKATTN_ISA_NAMESPACE_END \
  }                                 \
  CHUNKATTN_NAMESPACE_END
// That namespace for code that is not public.
#define CHUNKATTN_ISA_DETAIL_BEGIN \
  CHUNKATTN_NAMESPACE_BEGIN        \
  namespace detail {               \
  inline namespace CHUNKATTN_ISA_SET {
#define CHUNKATTN_ISA_DETAIL_END \
  }                              \
  }                              \
  CHUNKATTN_NAMESPACE_END
