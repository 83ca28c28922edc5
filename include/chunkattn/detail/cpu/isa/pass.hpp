// Opens a pass: the kernels of the instruction set whose CHUNKATTN_PASS_<SET> is defined. The files
// of this folder include this one; end.hpp closes the pass.
//
// CHUNKATTN_PASS_BEGIN opens the set's namespace, detail::cpu::avx512 for example, and where the
// compiler's options do not promise that set already, allows it for the functions up to
// CHUNKATTN_PASS_END. Nothing outside such a namespace may use what the options do not promise: it
// would be merged with the same function of another translation unit and run anywhere.
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
#define CHUNKATTN_PASS_ALLOW CHUNKATTN_ALLOW_AVX512
#define CHUNKATTN_PASS_FORBID CHUNKATTN_FORBID
#elif defined(CHUNKATTN_PASS_AVX2) && !defined(CHUNKATTN_NATIVE_AVX2) && !defined(CHUNKATTN_NATIVE_AVX512)
#define CHUNKATTN_PASS_ALLOW CHUNKATTN_ALLOW_AVX2
#define CHUNKATTN_PASS_FORBID CHUNKATTN_FORBID
#else
#define CHUNKATTN_PASS_ALLOW
#define CHUNKATTN_PASS_FORBID
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
#define CHUNKATTN_TILES_FORBID CHUNKATTN_FORBID
#elif defined(CHUNKATTN_PASS_AMX) && defined(__clang__)
#define CHUNKATTN_TILES_ALLOW CHUNKATTN_ALLOW_AVX512_AMX
#define CHUNKATTN_TILES_FORBID CHUNKATTN_FORBID
#else
#define CHUNKATTN_TILES_ALLOW CHUNKATTN_PASS_ALLOW
#define CHUNKATTN_TILES_FORBID CHUNKATTN_PASS_FORBID
#endif

// Dot products of bytes: the processor's, which come with avx512 and neon, or the model of them.
#if defined(CHUNKATTN_PASS_AVX512) && defined(CHUNKATTN_WITH_DOTS)
#define CHUNKATTN_PASS_VNNI 1
#elif defined(CHUNKATTN_PASS_NEON) && defined(CHUNKATTN_WITH_DOTS)
#define CHUNKATTN_PASS_DOTPROD 1
#endif
#if defined(CHUNKATTN_PASS_VNNI) || defined(CHUNKATTN_PASS_DOTPROD) || defined(CHUNKATTN_SOFTWARE_DOTS)
#define CHUNKATTN_PASS_DOTS 1
#endif
#if (defined(CHUNKATTN_PASS_VNNI) && !(defined(CHUNKATTN_NATIVE_AVX512) && defined(__AVX512VNNI__))) || \
    (defined(CHUNKATTN_PASS_DOTPROD) && !defined(__ARM_FEATURE_DOTPROD))
#define CHUNKATTN_DOTS_ALLOW CHUNKATTN_ALLOW_DOTS
#define CHUNKATTN_DOTS_FORBID CHUNKATTN_FORBID
#else
#define CHUNKATTN_DOTS_ALLOW CHUNKATTN_PASS_ALLOW
#define CHUNKATTN_DOTS_FORBID CHUNKATTN_PASS_FORBID
#endif

// And those of pairs of bfloat16.
#if defined(CHUNKATTN_PASS_AVX512) && defined(CHUNKATTN_WITH_PAIRS)
#define CHUNKATTN_PASS_BF16 1
#elif defined(CHUNKATTN_PASS_NEON) && defined(CHUNKATTN_WITH_PAIRS)
#define CHUNKATTN_PASS_BFDOT 1
#endif
#if defined(CHUNKATTN_PASS_BF16) || defined(CHUNKATTN_PASS_BFDOT) || defined(CHUNKATTN_SOFTWARE_DOTS)
#define CHUNKATTN_PASS_PAIRS 1
#endif
#if (defined(CHUNKATTN_PASS_BF16) && !(defined(CHUNKATTN_NATIVE_AVX512) && defined(__AVX512BF16__))) || \
    (defined(CHUNKATTN_PASS_BFDOT) && !defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define CHUNKATTN_PAIRS_ALLOW CHUNKATTN_ALLOW_PAIRS
#define CHUNKATTN_PAIRS_FORBID CHUNKATTN_FORBID
#else
#define CHUNKATTN_PAIRS_ALLOW CHUNKATTN_PASS_ALLOW
#define CHUNKATTN_PAIRS_FORBID CHUNKATTN_PASS_FORBID
#endif

// A pragma stands last in a macro: g++ 14 loses the braces that follow it there.
#define CHUNKATTN_PASS_BEGIN      \
  CHUNKATTN_ISA_DETAIL_BEGIN      \
  namespace cpu::CHUNKATTN_PASS { \
  CHUNKATTN_PASS_ALLOW
#define CHUNKATTN_PASS_END \
  }                        \
  CHUNKATTN_ISA_DETAIL_END \
  CHUNKATTN_PASS_FORBID

// The same around functions that may use the matrix unit besides.
#define CHUNKATTN_TILES_BEGIN     \
  CHUNKATTN_ISA_DETAIL_BEGIN      \
  namespace cpu::CHUNKATTN_PASS { \
  CHUNKATTN_TILES_ALLOW
#define CHUNKATTN_TILES_END \
  }                         \
  CHUNKATTN_ISA_DETAIL_END  \
  CHUNKATTN_TILES_FORBID

// And around functions that may use dot products of bytes, or of pairs of bfloat16.
#define CHUNKATTN_DOTS_BEGIN      \
  CHUNKATTN_ISA_DETAIL_BEGIN      \
  namespace cpu::CHUNKATTN_PASS { \
  CHUNKATTN_DOTS_ALLOW
#define CHUNKATTN_DOTS_END \
  }                        \
  CHUNKATTN_ISA_DETAIL_END \
  CHUNKATTN_DOTS_FORBID

#define CHUNKATTN_PAIRS_BEGIN     \
  CHUNKATTN_ISA_DETAIL_BEGIN      \
  namespace cpu::CHUNKATTN_PASS { \
  CHUNKATTN_PAIRS_ALLOW
#define CHUNKATTN_PAIRS_END \
  }                         \
  CHUNKATTN_ISA_DETAIL_END  \
  CHUNKATTN_PAIRS_FORBID

#endif  // CHUNKATTN_PASS
