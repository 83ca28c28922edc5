// Calls the same computation compiled for four sets of instruction sets, on one tree and one cache
// that this unit made. What each unit prints must not depend on the order of linking.
#include <cmath>
#include <cstdio>
#include <cstring>

#include "attend.hpp"

#define UNIT_LIST(X) X(plain) X(portable) X(avx2) X(avx512)
#define DECLARE(unit)       \
  const char* isa_##unit(); \
  double attend_##unit(hygiene::Tree&, hygiene::Cache&, std::vector<float>&);
UNIT_LIST(DECLARE)

namespace {

int failures = 0;
std::vector<float> first;

void check(const char* name, const char* isa, bool supported,
           double (*attend)(hygiene::Tree&, hygiene::Cache&, std::vector<float>&)) {
  if (!supported) {
    std::printf("%s: SKIPPED, this machine lacks it\n", name);
    return;
  }
  hygiene::Tree tree;
  hygiene::Cache cache(tree, {1, hygiene::num_kv_heads, hygiene::head_dim});
  std::vector<float> out;
  const double error = attend(tree, cache, out);
  std::uint32_t hash = 2166136261u;
  for (const float x : out) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    hash = (hash ^ bits) * 16777619u;
  }
  if (first.empty()) first = out;
  double difference = 0;
  for (std::size_t i = 0; i < out.size(); ++i)
    difference = std::fmax(difference, std::fabs(static_cast<double>(out[i] - first[i])));
  const bool ok = error < 1e-5 && difference < 1e-5 && out.size() == first.size();
  std::printf("%s: isa %s, bits %08x, error %.2g: %s\n", name, isa, hash, error,
              ok ? "ok" : "FAILED");
  if (!ok) ++failures;
}

}  // namespace

int main() {
  check("plain", isa_plain(), true, &attend_plain);
  check("portable", isa_portable(), true, &attend_portable);
  check("avx2", isa_avx2(), __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"),
        &attend_avx2);
  check("avx512", isa_avx512(),
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl"), &attend_avx512);
  return failures;
}
