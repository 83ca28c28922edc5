// Random numbers for tests: a fresh seed each run, printed, and set by CHUNKATTN_SEED to repeat a
// run. CHUNKATTN_TEST_SCALE multiplies the number of random cases.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <span>
#include <utility>

#include "chunkattn/element.hpp"

namespace test {

/// The seed of this run, printed once.
inline std::uint64_t run_seed() {
  static const std::uint64_t seed = [] {
    const char* text = std::getenv("CHUNKATTN_SEED");
    std::uint64_t value = 0;
    if (text != nullptr) {
      value = std::strtoull(text, nullptr, 0);
    } else {
      std::random_device device;
      value = (static_cast<std::uint64_t>(device()) << 32) | device();
    }
    std::printf("random seed: CHUNKATTN_SEED=%llu\n", static_cast<unsigned long long>(value));
    std::fflush(stdout);
    return value;
  }();
  return seed;
}

/// `cases` multiplied by CHUNKATTN_TEST_SCALE (default 1), at least 1.
inline int scaled(int cases) {
  const char* text = std::getenv("CHUNKATTN_TEST_SCALE");
  const double factor = text != nullptr ? std::strtod(text, nullptr) : 1.0;
  return std::max(1, static_cast<int>(std::lround(cases * factor)));
}

/// A stream of random numbers; `stream` distinguishes the test cases of one run.
class Random {
 public:
  explicit Random(std::uint64_t stream = 0)
      : engine_(run_seed() + 0x9e3779b97f4a7c15ull * (stream + 1)) {}

  /// Uniform in [low, high], both included.
  int uniform(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine_); }
  std::size_t index(std::size_t size) {
    return std::uniform_int_distribution<std::size_t>(0, size - 1)(engine_);
  }
  bool chance(double probability) {
    return std::uniform_real_distribution<double>(0, 1)(engine_) < probability;
  }
  float normal() { return normal_(engine_); }
  std::uint64_t bits() { return engine_(); }

  template <class T, std::size_t N>
  const T& pick(const T (&items)[N]) {
    return items[index(N)];
  }

  /// Normal numbers of the given standard deviation.
  template <class T>
  void fill(std::span<T> values, float deviation = 1.0f) {
    for (T& value : values) value = chunkattn::from_float<T>(deviation * normal());
  }

  template <class Range>
  void shuffle(Range& range) {
    for (std::size_t i = range.size(); i > 1; --i) std::swap(range[i - 1], range[index(i)]);
  }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<float> normal_;
};

}  // namespace test
