// How fast this processor's dot products are against its fused multiply-adds, with one thread: what
// the table in chunkattn/detail/support/dot_units.hpp has a row from for each family of processors.
//
//   dot_rates_bench        prints operations per second, and their ratio to multiply-adds
#include <algorithm>
#include <cstdio>
#include <string>

#include "bench/dot_rate.hpp"

#if defined(CHUNKATTN_WITH_PAIRS)

namespace {

namespace pass = bench::pass;

CHUNKATTN_ALLOW_DOTS
void multiply_floats(int iterations) {
  using Real = pass::simd::Float<bench::dot_lanes>;
  Real sums[bench::dot_chains] = {};
  const Real a{};
  for (int i = 0; i < iterations; ++i) {
#pragma GCC unroll 16
    for (Real& sum : sums) {
      sum = pass::simd::fma(a, a, sum);
      CHUNKATTN_KEEP_VECTOR(sum);
    }
  }
}
CHUNKATTN_FORBID

// Whatever the table says.
bool has_pairs() {
#if defined(__aarch64__)
  constexpr unsigned long bf16 = 1ul << 14;
  return (::getauxval(AT_HWCAP2) & bf16) != 0;
#else
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") != 0;
#endif
}

}  // namespace

int main() {
  constexpr auto set = chunkattn::InstructionSet::CHUNKATTN_DOTS_SET;
  if (!chunkattn::detail::cpu::is_supported(set) || !chunkattn::detail::cpu::dot_units().int8) {
    std::printf("this processor has no dot products\n");
    return 0;
  }
  chunkattn::ThreadPool pool(1);
  double fma = 0, bytes = 0, pairs = 0;
  for (int round = 0; round < 50; ++round) {  // the best: neighbours only ever slow it down
    fma = std::max(fma, bench::dot_rate(pool, 200'000, bench::dot_lanes, multiply_floats));
    bytes = std::max(bytes, bench::byte_rate(pool, 200'000));
    if (has_pairs())
      pairs = std::max(pairs,
                       bench::dot_rate(pool, 200'000, 2 * bench::dot_lanes, bench::multiply_pairs));
  }
  std::printf("%s\n", chunkattn::describe_instruction_set().c_str());
  const auto print = [&](const char* name, double rate) {
    std::printf("%-12s %8.1f G/s  %.2f x\n", name, rate * 1e-9, rate / fma);
  };
#if defined(__aarch64__)
  print("FMLA", fma);
  print("BFDOT", pairs);
  print("SDOT", bytes);
#else
  print("VFMADD231PS", fma);
  print("VDPBF16PS", pairs);
  print("VPDPBUSD", bytes);
#endif
}

#else

int main() {
  std::printf("this build has no dot products\n");
}

#endif
