// Opens a pass: the kernels of the instruction set whose CHUNKATTN_PASS_<SET> is defined. The files
// of this folder include this one; end.hpp closes the pass.
//
// CHUNKATTN_PASS_BEGIN(UNIT) opens the set's namespace, detail::cpu::avx512 for example, and where
// the compiler's options do not promise them already, allows the instructions of a unit for the
// functions up to CHUNKATTN_PASS_END: VECTORS are the set's own, TILES and DOTS add to them.
// Nothing outside such a namespace may use what the options do not promise: it would be merged with
// the same function of another translation unit and run anywhere.
//
// CHUNKATTN_PASS is the namespace's name, and the guard of this file. end.hpp undefines it, and the
// guards of all files here: that of a new file, too.
#ifndef CHUNKATTN_PASS

#include "common.hpp"

// No set: an editor has opened a file by itself. It gets the widest set that is compiled.
#if !defined(CHUNKATTN_PASS_PORTABLE) && !defined(CHUNKATTN_PASS_NEON) && \
    !defined(CHUNKATTN_PASS_AVX2) && !defined(CHUNKATTN_PASS_AVX512)
#if defined(CHUNKATTN_WITH_AVX512)
#define CHUNKATTN_PASS_AVX512 1
#elif defined(CHUNKATTN_WITH_AVX2)
#define CHUNKATTN_PASS_AVX2 1
#elif defined(CHUNKATTN_WITH_NEON)
#define CHUNKATTN_PASS_NEON 1
#else
#define CHUNKATTN_PASS_PORTABLE 1
#endif
#endif

#if defined(__CUDACC__)  // hands a pragma that it does not know on to the compiler, and warns
#pragma nv_diagnostic push
#pragma nv_diag_suppress 1675
#endif

// clang-format off
#if defined(CHUNKATTN_PASS_AVX512)
#define CHUNKATTN_PASS avx512
#elif defined(CHUNKATTN_PASS_AVX2)
#define CHUNKATTN_PASS avx2
#elif defined(CHUNKATTN_PASS_NEON)
#define CHUNKATTN_PASS neon
#else
#define CHUNKATTN_PASS portable
#endif

#if defined(CHUNKATTN_PASS_AVX512) && !defined(CHUNKATTN_NATIVE_AVX512)
#define CHUNKATTN_VECTORS_ALLOW CHUNKATTN_ALLOW_AVX512
#elif defined(CHUNKATTN_PASS_AVX2) && !defined(CHUNKATTN_NATIVE_AVX2) && !defined(CHUNKATTN_NATIVE_AVX512)
#define CHUNKATTN_VECTORS_ALLOW CHUNKATTN_ALLOW_AVX2
#else
#define CHUNKATTN_VECTORS_ALLOW CHUNKATTN_ALLOW_NOTHING
#endif

// Before a loop over rows or vectors that are widened: without an instruction for it a vector of
// halves takes 20.
#if defined(CHUNKATTN_PASS_PORTABLE)
#define CHUNKATTN_WIDENING CHUNKATTN_ROLLED
#else
#define CHUNKATTN_WIDENING CHUNKATTN_UNROLLED
#endif

// The matrix unit: the processor's, which comes with avx512 alone, or the model of it. Its
// instructions are written as assembler, for which clang wants the permission and g++ does not.
#if defined(CHUNKATTN_PASS_AVX512) && defined(CHUNKATTN_WITH_AMX)
#define CHUNKATTN_PASS_AMX 1
#endif
#if defined(CHUNKATTN_PASS_AMX) || defined(CHUNKATTN_SOFTWARE_TILES)
#define CHUNKATTN_PASS_TILES 1
#endif
#if defined(CHUNKATTN_PASS_AMX) && defined(__clang__) && defined(CHUNKATTN_NATIVE_AVX512)
#define CHUNKATTN_TILES_ALLOW CHUNKATTN_ALLOW_AMX
#elif defined(CHUNKATTN_PASS_AMX) && defined(__clang__)
#define CHUNKATTN_TILES_ALLOW CHUNKATTN_ALLOW_AVX512_AMX
#else
#define CHUNKATTN_TILES_ALLOW CHUNKATTN_VECTORS_ALLOW
#endif

// Dot products of bytes, and of pairs of bfloat16: the processor's, which come with avx512 and neon,
// or the model of them. Who has those of pairs has those of bytes; avx2 has those of int16.
#if defined(CHUNKATTN_SOFTWARE_DOTS) || defined(CHUNKATTN_PASS_AVX2) || \
    (defined(CHUNKATTN_WITH_DOTS) && (defined(CHUNKATTN_PASS_AVX512) || defined(CHUNKATTN_PASS_NEON)))
#define CHUNKATTN_PASS_DOTS 1
#endif
#if defined(CHUNKATTN_SOFTWARE_DOTS) || \
    (defined(CHUNKATTN_PASS_DOTS) && defined(CHUNKATTN_WITH_PAIRS) && !defined(CHUNKATTN_PASS_AVX2))
#define CHUNKATTN_PASS_PAIRS 1
#endif
#if !defined(CHUNKATTN_PASS_DOTS) || defined(CHUNKATTN_SOFTWARE_DOTS) || defined(CHUNKATTN_PASS_AVX2)
#define CHUNKATTN_DOTS_ALLOW CHUNKATTN_VECTORS_ALLOW
#elif (defined(CHUNKATTN_NATIVE_AVX512) && defined(__AVX512VNNI__) && \
       (defined(__AVX512BF16__) || !defined(CHUNKATTN_PASS_PAIRS))) || \
    (defined(__ARM_FEATURE_DOTPROD) && \
     (defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) || !defined(CHUNKATTN_PASS_PAIRS)))
#define CHUNKATTN_DOTS_ALLOW CHUNKATTN_VECTORS_ALLOW
#else
#define CHUNKATTN_DOTS_ALLOW CHUNKATTN_ALLOW_DOTS
#endif

#endif  // CHUNKATTN_PASS
