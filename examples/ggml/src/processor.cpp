// Compiled with the options of the kernels, which say what those need.
#include "kernels.hpp"

namespace plugin {

bool kernels_run_here() noexcept {
#if defined(__x86_64__) && defined(__GNUC__)
#ifdef __AVX512BF16__
  if (!__builtin_cpu_supports("avx512bf16")) return false;
#endif
#ifdef __AVX512VNNI__
  if (!__builtin_cpu_supports("avx512vnni")) return false;
#endif
#ifdef __AVX512F__
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return false;
#endif
#ifdef __AVX2__
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("bmi2"))
    return false;
#endif
#endif
  return true;
}

}  // namespace plugin
