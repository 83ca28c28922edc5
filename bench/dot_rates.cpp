// How fast this processor's dot products are against its fused multiply-adds, with one thread: what
// the table in chunkattn/detail/base/dot_units.hpp has a row from for each family of processors.
//
//   dot_rates_bench        prints operations per second, and their ratio to multiply-adds
#include <algorithm>
#include <cstdio>
#include <string>

#include "bench/dot_rate.hpp"

#if defined(CHUNKATTN_WITH_PAIRS)

namespace {

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2"))) void
multiply_floats(int iterations) {
  namespace pass = chunkattn::detail::cpu::avx512;
  using Real = pass::simd::Float<16>;
  Real sums[bench::dot_chains] = {};
  const Real a{};
  for (int i = 0; i < iterations; ++i) {
#pragma GCC unroll 16
    for (Real& sum : sums) {
      sum = pass::simd::fma(a, a, sum);
      __asm__ volatile("" : "+v"(sum));
    }
  }
}

// Whatever the table says.
bool has_pairs() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") != 0;
}

}  // namespace

int main() {
  if (!chunkattn::detail::cpu::is_supported(chunkattn::InstructionSet::avx512)) {
    std::printf("this processor has no AVX-512\n");
    return 0;
  }
  chunkattn::ThreadPool pool(1);
  double fma = 0, bytes = 0, pairs = 0;
  for (int round = 0; round < 50; ++round) {  // the best: neighbours only ever slow it down
    fma = std::max(fma, bench::dot_rate(pool, 200'000, 1, multiply_floats));
    bytes = std::max(bytes, bench::byte_rate(pool, 200'000));
    if (has_pairs())
      pairs = std::max(pairs, bench::dot_rate(pool, 200'000, 2, bench::multiply_pairs));
  }
  std::printf("%s\n", chunkattn::describe_instruction_set().c_str());
  const auto print = [&](const char* name, double rate) {
    std::printf("%-12s %8.1f G/s  %.2f x\n", name, rate * 1e-9, rate / fma);
  };
  print("VFMADD231PS", fma);
  print("VDPBF16PS", pairs);
  print("VPDPBUSD", bytes);
}

#else

int main() {
  std::printf("this build has no dot products\n");
}

#endif
