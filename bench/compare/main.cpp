// Two versions of the library in one process, their decode steps in turn: neighbours on the host
// change the times of both and hardly touch the ratio.
//
// Usage: compare_steps BEFORE.so AFTER.so ROUNDS [substring of the cases]
#include <dlfcn.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "bench/median.hpp"
#include "steps.hpp"

namespace {

using compare::Case;

std::string name_of(const Case& c) {
  char name[80];
  std::snprintf(name, sizeof name, "%s %d/%d b=%d %d+%d", c.is_bf16 ? "bf16" : "fp32",
                compare::qo_heads, c.kv_heads, c.sequences, c.shared, c.own);
  return name;
}

compare::MakeSteps load(const char* file) {
  void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  void* const symbol = library != nullptr ? dlsym(library, compare::make_steps_name) : nullptr;
  if (symbol == nullptr) {
    std::fprintf(stderr, "compare: %s\n", dlerror());
    std::exit(1);
  }
  return reinterpret_cast<compare::MakeSteps>(symbol);
}

double milliseconds(compare::Steps& steps) {
  const auto start = std::chrono::steady_clock::now();
  steps.run();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

/// Numbers in [-1, 1], as `bf16` or float.
void fill(std::vector<float>& memory, bool bf16, std::mt19937& random) {
  std::uniform_real_distribution<float> number(-1.0f, 1.0f);
  for (float& x : memory) {
    x = number(random);
    if (!bf16) continue;
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits = (bits & 0xffff0000u) | bits >> 16;  // two of the same
    std::memcpy(&x, &bits, sizeof bits);
  }
}

/// Those with `part` in their names, by type.
std::vector<Case> cases_with(const std::string& part) {
  std::vector<Case> cases;
  for (const bool bf16 : {false, true})
    for (const int kv_heads : {32, 8})
      for (const auto& [shared, own] :
           {std::pair{1024, 64}, std::pair{4096, 64}, std::pair{0, 1024}})
        cases.push_back({bf16, kv_heads, 32, shared, own});
  std::erase_if(cases, [&](const Case& c) { return name_of(c).find(part) == std::string::npos; });
  return cases;
}

struct Result {
  bench::MedianInterval ratio;  // of the times, after over before
  double before;                // median, in milliseconds
  bool same_bits;               // of the outputs
};

/// `k` and `v` are filled.
Result measure(const compare::MakeSteps (&make)[2], const Case& c, int rounds,
               std::vector<float>& k, std::vector<float>& v, std::mt19937& random) {
  std::vector<float> q(compare::q_size(c)), out[2] = {q, q};
  fill(q, false, random);
  std::unique_ptr<compare::Steps> steps[2];
  for (int w = 0; w < 2; ++w)
    steps[w].reset(make[w](c, {k.data(), v.data(), q.data(), out[w].data()}));
  std::vector<double> ratios, before;
  for (int round = -2; round < rounds; ++round) {
    double ms[2];
    for (const int w : {round & 1, 1 - (round & 1)}) ms[w] = milliseconds(*steps[w]);
    if (round < 0) continue;  // caches and clocks
    ratios.push_back(ms[1] / ms[0]);
    before.push_back(ms[0]);
  }
  return {bench::median_interval(ratios), bench::median(before), out[0] == out[1]};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr,
                 "usage: compare_steps BEFORE.so AFTER.so ROUNDS [substring of the cases]\n");
    return 2;
  }
  const compare::MakeSteps make[2] = {load(argv[1]), load(argv[2])};
  const int rounds = std::atoi(argv[3]);
  const std::string filter = argc > 4 ? argv[4] : "";
  const std::vector<Case> cases = cases_with(filter);
  if (cases.empty()) {
    std::fprintf(stderr, "compare: no case has \"%s\" in its name\n", filter.c_str());
    return 2;
  }
  std::mt19937 random(1);
  std::printf("%-28s %7s %15s %10s\n", "case", "ratio", "95 %", "before ms");
  std::vector<float> k(std::size_t{160} << 20), v(k.size());
  double logarithms = 0;
  bool same_bits = true;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    if (i == 0 || c.is_bf16 != cases[i - 1].is_bf16) {
      fill(k, c.is_bf16, random);
      fill(v, c.is_bf16, random);
    }
    const Result r = measure(make, c, rounds, k, v, random);
    std::printf("%-28s %7.3f %7.3f %7.3f %10.2f\n", name_of(c).c_str(), r.ratio.median, r.ratio.low,
                r.ratio.high, r.before);
    std::fflush(stdout);
    logarithms += std::log(r.ratio.median);
    same_bits = same_bits && r.same_bits;
  }
  std::printf("\n%zu cases, geometric mean of the medians %.3f; %s\n", cases.size(),
              std::exp(logarithms / static_cast<double>(cases.size())),
              same_bits ? "the same bits" : "the bits of some outputs differ");
}
