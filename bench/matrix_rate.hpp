// The peak rate of the processor's matrix unit, measured; 0 where there is none.
#pragma once

#include "chunkattn/chunk_attention.hpp"
#include "examples/support/machine_limits.hpp"

namespace bench {

#if defined(CHUNKATTN_WITH_AMX)

// The tiles' own instructions are assembler, for which clang alone wants the permission.
#if defined(__clang__)
CHUNKATTN_ALLOW_AVX512_AMX
#else
CHUNKATTN_ALLOW_AVX512
#endif
inline void multiply_tiles(int iterations) {
  alignas(64) static const char zeros[1024] = {};
  chunkattn::detail::cpu::avx512::AmxTiles tiles(true);
  tiles.zero<0>();
  tiles.zero<1>();
  tiles.zero<2>();
  tiles.zero<3>();
  tiles.load<4>(zeros, 64);
  tiles.load<5>(zeros, 64);
  tiles.load<6>(zeros, 64);
  tiles.load<7>(zeros, 64);
  for (int i = 0; i < iterations; ++i) {
    tiles.dot<0, 4, 6>();
    tiles.dot<1, 4, 7>();
    tiles.dot<2, 5, 6>();
    tiles.dot<3, 5, 7>();
  }
}
CHUNKATTN_FORBID

/// bfloat16 operations per second of all threads of a pool, in so many rounds of four independent
/// products of tiles.
inline double matrix_rate(chunkattn::ThreadPool& pool, int iterations) {
  if (!chunkattn::detail::cpu::is_supported(chunkattn::InstructionSet::amx)) return 0;
  constexpr double flops_of_dot = 2.0 * 16 * 16 * 32;
  const int threads = pool.concurrency();
  const double ms = examples::milliseconds(
      [&] { pool.parallel_for(threads, [&](int) { multiply_tiles(iterations); }); });
  return 4.0 * iterations * flops_of_dot * threads / (ms * 1e-3);
}

#else

inline double matrix_rate(chunkattn::ThreadPool&, int) {
  return 0;
}

#endif

}  // namespace bench
