// The common part of all passes: what the kernels include, and how the compiler is allowed an
// instruction set that its options do not promise.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../../attention_options.hpp"
#include "../../../element.hpp"
#include "../../../kv_view.hpp"
#include "../../../merge_state.hpp"
#include "../../../plan_view.hpp"
#include "../../../variants.hpp"
#include "../../attention/state.hpp"
#include "../../support/array.hpp"
#include "../../support/config.hpp"
#include "../../support/dot_units.hpp"
#include "../../support/instruction_sets.hpp"
#include "../../support/spin_lock.hpp"
#include "../block.hpp"
#include "../call.hpp"
#include "../executor_ref.hpp"
#include "../prefetch.hpp"
#include "../schedule.hpp"
#include "../task_queue.hpp"
#include "../walk.hpp"

#if defined(CHUNKATTN_WITH_AVX2) || defined(CHUNKATTN_WITH_AVX512)
#include <immintrin.h>
#elif defined(CHUNKATTN_WITH_NEON)
#include <arm_neon.h>
#endif

// A pragma stands last in a macro: g++ 14 loses the braces that follow it there.
#define CHUNKATTN_PASS_BEGIN(UNIT) \
  CHUNKATTN_ISA_DETAIL_BEGIN       \
  namespace cpu::CHUNKATTN_PASS {  \
  CHUNKATTN_##UNIT##_ALLOW
#define CHUNKATTN_PASS_END \
  }                        \
  CHUNKATTN_ISA_DETAIL_END \
  CHUNKATTN_FORBID

// Before a short loop over arrays of vectors: unrolled, they live in registers. Before the loop
// around it, whose vectors take all registers: unrolled too, as g++ does at -O3, they leave them.
#if defined(__clang__)
#define CHUNKATTN_UNROLLED _Pragma("clang loop unroll(full)")
#define CHUNKATTN_ROLLED _Pragma("clang loop unroll(disable)")
#else
#define CHUNKATTN_UNROLLED _Pragma("GCC unroll 64")
#define CHUNKATTN_ROLLED _Pragma("GCC unroll 1")
#endif

// clang-format off
#if defined(__clang__)
#define CHUNKATTN_ALLOW_NOTHING _Pragma("clang attribute push")
#define CHUNKATTN_FORBID _Pragma("clang attribute pop")
#else
#define CHUNKATTN_ALLOW_NOTHING _Pragma("GCC push_options")
#define CHUNKATTN_FORBID _Pragma("GCC pop_options")
#endif

#if defined(__aarch64__) && defined(__clang__)
#define CHUNKATTN_ALLOW_DOTS \
  _Pragma("clang attribute push(__attribute__((target(\"dotprod,bf16\"))), apply_to = function)")
#elif defined(__aarch64__)
#define CHUNKATTN_ALLOW_DOTS \
  _Pragma("GCC push_options") _Pragma("GCC target(\"arch=armv8.2-a+dotprod+bf16\")")
#elif defined(__clang__)
#define CHUNKATTN_ALLOW_AVX2                                                                  \
  _Pragma("clang attribute push(__attribute__((target(\"avx2,fma,f16c,bmi,bmi2\"))), apply_to = function)")
#define CHUNKATTN_ALLOW_AVX512                                                                \
  _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2\"))), apply_to = function)")
#define CHUNKATTN_ALLOW_DOTS                                                                  \
  _Pragma("clang attribute push(__attribute__((target(\"avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2\"))), apply_to = function)")
#define CHUNKATTN_ALLOW_AMX                                                                   \
  _Pragma("clang attribute push(__attribute__((target(\"amx-tile,amx-bf16\"))), apply_to = function)")
#define CHUNKATTN_ALLOW_AVX512_AMX                                                            \
  _Pragma("clang attribute push(__attribute__((target(\"amx-tile,amx-bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2\"))), apply_to = function)")
#else
#define CHUNKATTN_ALLOW_AVX2   \
  _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,fma,f16c,bmi,bmi2\")")
#define CHUNKATTN_ALLOW_AVX512 \
  _Pragma("GCC push_options") \
  _Pragma("GCC target(\"avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2\")")
#define CHUNKATTN_ALLOW_DOTS \
  _Pragma("GCC push_options") \
  _Pragma("GCC target(\"avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2\")")
#endif
