// Two versions of the library in one process, their decode steps in turn: neighbours on the host
// change the times of both and hardly touch the ratio.
//
// Usage: compare_steps BEFORE.so AFTER.so ROUNDS wall|cpu [substring of the cases]
#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bench/median.hpp"
#include "chunkattn/executor.hpp"
#include "examples/support/huge_buffer.hpp"
#include "steps.hpp"

namespace {

using compare::Case;
using compare::Type;

constexpr const char* names[] = {"fp32", "bf16", "bf16 one term", "bf16 queries", "int8"};

std::string name_of(const Case& c) {
  char name[80];
  if (c.prefill) {
    std::snprintf(name, sizeof name, "%s %d/%d prefill %dx%d", names[static_cast<int>(c.type)],
                  compare::qo_heads, c.kv_heads, c.sequences, c.own);
    return name;
  }
  std::snprintf(name, sizeof name, "%s %d/%d b=%d %d+%d", names[static_cast<int>(c.type)],
                compare::qo_heads, c.kv_heads, c.sequences, c.shared, c.own);
  return name;
}

class Pool final : public compare::Threads {
 public:
  explicit Pool(int threads) : pool_(threads) {}
  int concurrency() override { return pool_.concurrency(); }
  void run(int n, void (*call)(void*, int), void* function) override {
    pool_.parallel_for(n, [&](int i) { call(function, i); });
  }

 private:
  chunkattn::ThreadPool pool_;
};

compare::MakeSteps load(const char* file) {
  void* const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  void* const symbol = library != nullptr ? dlsym(library, compare::make_steps_name) : nullptr;
  if (symbol == nullptr) {
    std::fprintf(stderr, "compare: %s\n", dlerror());
    std::exit(1);
  }
  return reinterpret_cast<compare::MakeSteps>(symbol);
}

/// Of the clock on the wall, or the processor time: where others use the machine as well.
double now_ms(bool cpu_time) {
  timespec now;
  clock_gettime(cpu_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

double milliseconds(compare::Steps& steps, int layer, bool cpu_time) {
  const double start = now_ms(cpu_time);
  steps.run(layer);
  return now_ms(cpu_time) - start;
}

/// Numbers in [-1, 1], as floats or two bf16 of the same value, or bytes of any.
void fill(std::span<float> memory, Type type, std::mt19937& random) {
  std::uniform_real_distribution<float> number(-1.0f, 1.0f);
  for (float& x : memory) {
    x = number(random);
    if (type == Type::fp32) continue;
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits = type == Type::int8 ? static_cast<std::uint32_t>(random())
                              : (bits & 0xffff0000u) | bits >> 16;
    std::memcpy(&x, &bits, sizeof bits);
  }
}

/// Those with `part` in their names, by type. Prefill takes long: only if `part` asks for it.
std::vector<Case> cases_with(const std::string& part) {
  std::vector<Case> cases;
  for (const Type type :
       {Type::fp32, Type::bf16, Type::bf16_one_term, Type::bf16_queries, Type::int8}) {
    for (const int kv_heads : {32, 8})
      for (const auto& [shared, own] :
           {std::pair{1024, 64}, std::pair{2048, 64}, std::pair{4096, 64}, std::pair{0, 1024}})
        cases.push_back({type, kv_heads, 32, shared, own});
    if (part.find("prefill") != std::string::npos)
      for (const auto& [sequences, tokens] : {std::pair{4, 2048}, std::pair{1, 8192}})
        cases.push_back({type, 8, sequences, 0, tokens, true});
  }
  std::erase_if(cases, [&](const Case& c) { return name_of(c).find(part) == std::string::npos; });
  return cases;
}

struct Result {
  std::vector<double> ratios;  // of the times, after over before, one of each round
  double before;               // median, in milliseconds
  bool same_bits;              // of the outputs
};

/// `k` and `v` are filled; bytes are in units of 1/128.
Result measure(const compare::MakeSteps (&make)[2], const Case& c, compare::Threads& threads,
               int rounds, bool cpu_time, std::span<float> k, std::span<float> v,
               std::mt19937& random) {
  std::vector<float> q(compare::q_size(c)), out[2] = {q, q};
  fill(q, Type::fp32, random);
  std::vector<float> q_bf16(q.size() / 2 + 1);
  fill(q_bf16, Type::bf16, random);
  std::vector<float> scales(c.type == Type::int8 ? std::size_t{2} << 20 : 0, 1.0f / 128);
  std::unique_ptr<compare::Steps> steps[2];
  for (int w = 0; w < 2; ++w)
    steps[w].reset(make[w](c,
                           {k.data(), v.data(), k.size_bytes(), scales.data(), scales.data(),
                            q.data(), q_bf16.data(), out[w].data()},
                           threads));
  std::vector<double> ratios, before;
  int layer = 0;
  for (int round = c.prefill ? -1 : -2; round < rounds; ++round) {
    double ms[2];
    for (const int w : {round & 1, 1 - (round & 1)})
      ms[w] = milliseconds(*steps[w], layer++, cpu_time);
    if (round < 0) continue;  // caches and clocks
    ratios.push_back(ms[1] / ms[0]);
    before.push_back(ms[0]);
  }
  for (const auto& step : steps) step->run(0);
  return {std::move(ratios), bench::median(before), out[0] == out[1]};
}

/// Of the cases' medians, with an interval by the bootstrap: of each case as many rounds as it has
/// are drawn, with repetition, 1,000 times.
bench::MedianInterval geometric_mean(const std::vector<std::vector<double>>& cases,
                                     std::mt19937& random) {
  const auto mean = [&](const auto& median_of) {
    double sum = 0;
    for (const std::vector<double>& ratios : cases) sum += std::log(median_of(ratios));
    return std::exp(sum / static_cast<double>(cases.size()));
  };
  std::vector<double> means(1000);
  for (double& value : means)
    value = mean([&](const std::vector<double>& ratios) {
      std::uniform_int_distribution<std::size_t> round(0, ratios.size() - 1);
      std::vector<double> drawn(ratios.size());
      for (double& ratio : drawn) ratio = ratios[round(random)];
      return bench::median(std::move(drawn));
    });
  std::sort(means.begin(), means.end());
  return {mean([](const std::vector<double>& ratios) { return bench::median(ratios); }), means[25],
          means[974]};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) {
    std::fprintf(stderr,
                 "usage: compare_steps BEFORE.so AFTER.so ROUNDS wall|cpu [part of the cases]\n");
    return 2;
  }
  const compare::MakeSteps make[2] = {load(argv[1]), load(argv[2])};
  const int rounds = std::atoi(argv[3]);
  const bool cpu_time = std::strcmp(argv[4], "cpu") == 0;
  const std::string filter = argc > 5 ? argv[5] : "";
  const std::vector<Case> cases = cases_with(filter);
  if (cases.empty()) {
    std::fprintf(stderr, "compare: no case has \"%s\" in its name\n", filter.c_str());
    return 2;
  }
  // A thread that waits for another spins: processor time is that of one.
  Pool threads(cpu_time ? 1 : 2);
  std::mt19937 random(1);
  std::printf("%-34s %7s %15s %10s\n", "case", "ratio", "95 %", "before ms");
  const examples::HugeBuffer memory(std::size_t{1280} << 20);
  const std::size_t size = memory.bytes() / sizeof(float) / 2;
  const std::span<float> k(memory.as<float>(), size), v(memory.as<float>() + size, size);
  std::vector<std::vector<double>> all;
  bool same_bits = true;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& c = cases[i];
    if (i == 0 || c.type != cases[i - 1].type) {
      fill(k, c.type, random);
      fill(v, c.type, random);
    }
    Result r = measure(make, c, threads, rounds, cpu_time, k, v, random);
    const bench::MedianInterval ratio = bench::median_interval(r.ratios);
    std::printf("%-34s %7.3f %7.3f %7.3f %10.2f\n", name_of(c).c_str(), ratio.median, ratio.low,
                ratio.high, r.before);
    std::fflush(stdout);
    same_bits = same_bits && r.same_bits;
    all.push_back(std::move(r.ratios));
  }
  const bench::MedianInterval mean = geometric_mean(all, random);
  std::printf("%-34s %7.3f %7.3f %7.3f\n\n%zu cases; %s\n", "geometric mean", mean.median, mean.low,
              mean.high, cases.size(),
              same_bits ? "the same bits" : "the bits of some outputs differ");
}
