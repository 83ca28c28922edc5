// Which instruction sets the CPU kernels are compiled for, and which of them this processor runs.
//
// A plain build for x86-64 carries kernels for all of them and chooses at run time. Compiler
// options (-march) drop those below what they promise, and the macro CHUNKATTN_ISA leaves one:
//
//   portable, avx2, avx512, neon   that one alone, run where the processor has it
//   native                         what the compiler's options promise, nothing else
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
#define CHUNKATTN_PASTE_NOW(a, b) a##b
#define CHUNKATTN_PASTE(a, b) CHUNKATTN_PASTE_NOW(a, b)
#if defined(CHUNKATTN_ISA)
#define CHUNKATTN_ISA_CHOICE CHUNKATTN_PASTE(CHUNKATTN_ISA_CHOICE_, CHUNKATTN_ISA)
#else
#define CHUNKATTN_ISA_CHOICE 1
#endif

// CHUNKATTN_WITH_…: kernels for it are compiled. CHUNKATTN_ISA_SET names all of them,
// CHUNKATTN_LEAST_ISA the one that asks least of the processor.
#if CHUNKATTN_ISA_CHOICE == 2
#define CHUNKATTN_WITH_PORTABLE 1
#define CHUNKATTN_ISA_SET portable
#define CHUNKATTN_LEAST_ISA portable
#elif CHUNKATTN_ISA_CHOICE == 3
#define CHUNKATTN_WITH_AVX2 1
#define CHUNKATTN_ISA_SET avx2
#define CHUNKATTN_LEAST_ISA avx2
#elif CHUNKATTN_ISA_CHOICE == 4
#define CHUNKATTN_WITH_AVX512 1
#define CHUNKATTN_ISA_SET avx512
#define CHUNKATTN_LEAST_ISA avx512
#elif CHUNKATTN_ISA_CHOICE == 5
#define CHUNKATTN_WITH_NEON 1
#define CHUNKATTN_ISA_SET neon
#define CHUNKATTN_LEAST_ISA neon
#elif CHUNKATTN_ISA_CHOICE != 1 && CHUNKATTN_ISA_CHOICE != 6
#error "CHUNKATTN_ISA must be portable, avx2, avx512, neon or native, or not be defined"
#elif defined(CHUNKATTN_NATIVE_AVX512)
#define CHUNKATTN_WITH_AVX512 1
#define CHUNKATTN_ISA_SET avx512
#define CHUNKATTN_LEAST_ISA avx512
#elif defined(CHUNKATTN_NATIVE_NEON)
#define CHUNKATTN_WITH_NEON 1
#define CHUNKATTN_ISA_SET neon
#define CHUNKATTN_LEAST_ISA neon
#elif !defined(__x86_64__) || defined(__CUDACC__) || CHUNKATTN_ISA_CHOICE == 6
#if defined(CHUNKATTN_NATIVE_AVX2)
#define CHUNKATTN_WITH_AVX2 1
#define CHUNKATTN_ISA_SET avx2
#define CHUNKATTN_LEAST_ISA avx2
#else
#define CHUNKATTN_WITH_PORTABLE 1
#define CHUNKATTN_ISA_SET portable
#define CHUNKATTN_LEAST_ISA portable
#endif
#elif defined(CHUNKATTN_NATIVE_AVX2)
#define CHUNKATTN_WITH_AVX2 1
#define CHUNKATTN_WITH_AVX512 1
#define CHUNKATTN_ISA_SET avx2_avx512
#define CHUNKATTN_LEAST_ISA avx2
#else
#define CHUNKATTN_WITH_PORTABLE 1
#define CHUNKATTN_WITH_AVX2 1
#define CHUNKATTN_WITH_AVX512 1
#define CHUNKATTN_ISA_SET portable_avx2_avx512
#define CHUNKATTN_LEAST_ISA portable
#endif

#if (defined(CHUNKATTN_WITH_AVX2) || defined(CHUNKATTN_WITH_AVX512)) && !defined(__x86_64__)
#error "CHUNKATTN_ISA names an instruction set of x86-64, and this is another architecture"
#elif defined(CHUNKATTN_WITH_NEON) && !defined(CHUNKATTN_NATIVE_NEON)
#error "CHUNKATTN_ISA=neon needs a compiler for AArch64"
#endif

// What is compiled for one set of instruction sets or another lives one inline namespace deeper,
// named after the set: two translation units built with different options never share a kernel.
// Tree, plan and K/V types stay outside, so that they can cross such a border.
#define CHUNKATTN_ISA_NAMESPACE_BEGIN \
  CHUNKATTN_NAMESPACE_BEGIN           \
  inline namespace CHUNKATTN_ISA_SET {
#define CHUNKATTN_ISA_NAMESPACE_END \
  }                                 \
  CHUNKATTN_NAMESPACE_END

CHUNKATTN_NAMESPACE_BEGIN

/// What CPU kernels are compiled for: four lanes in plain C++, many times slower, or the vectors of
/// a processor. avx2 stands for AVX2, FMA, F16C and BMI, avx512 for AVX-512 F, BW, DQ and VL.
/// automatic: the best that the build and the processor have.
enum class InstructionSet { automatic, portable, neon, avx2, avx512 };

CHUNKATTN_NAMESPACE_END
