// The machine's own limits, measured in the same run as everything that is judged by them.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <new>
#include <string>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "chunkattn/cpu/simd.hpp"
#include "chunkattn/cpu/thread_pool.hpp"

namespace bench {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// Limits of the machine with the threads of a pool.
struct Machine {
  double dram_read = 0;              ///< bytes per second, from memory beyond every cache
  double cache_read = 0;             ///< bytes per second, 24 MB per pool: the last-level cache
  double fma_peak = 0;               ///< fp32 operations per second
  std::size_t last_level_cache = 0;  ///< bytes, as the system reports it (0: unknown)
  int threads = 1;

  /// The least time that so many operations and bytes can take.
  [[nodiscard]] double floor_seconds(double flops, double bytes) const {
    return std::max(flops / fma_peak, bytes / dram_read);
  }
};

/// Memory on huge pages where the system has them, touched.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : bytes_(bytes) {
    data_ = static_cast<char*>(::operator new (bytes, std::align_val_t{alignment}));
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    madvise(data_, bytes, MADV_HUGEPAGE);
#endif
    std::fill_n(data_, bytes, char{1});
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    ::operator delete (data_, std::align_val_t{alignment});
  }

  [[nodiscard]] const float* floats() const {
    return reinterpret_cast<const float*>(data_);
  }
  [[nodiscard]] std::size_t count() const {
    return bytes_ / sizeof(float);
  }

 private:
  static constexpr std::size_t alignment = std::size_t{2} << 20;
  std::size_t bytes_;
  char* data_;
};

/// Reads `count` floats, a multiple of 256; 16 independent sums and prefetching 4 KB ahead.
inline float read_all(const float* from, std::size_t count) {
  using namespace chunkattn;
  constexpr int width = simd::native_width;
  simd::Float<width> sums[8] = {};
  for (std::size_t i = 0; i + 256 <= count; i += 256) {
    for (std::size_t j = 0; j < 256; j += 16) __builtin_prefetch(from + i + j + 1024, 0, 2);
    for (std::size_t j = 0; j < 256; j += 8 * width)
      simd::repeat<8>([&](auto s) CHUNKATTN_LAMBDA {
        sums[s] = sums[s] + simd::load<width>(from + i + j + s * width);
      });
  }
  float total = 0;
  for (const auto& sum : sums) total += simd::reduce_sum<width>(sum);
  return total;
}

/// Bytes per second at which all threads together read `buffer`, the best of some rounds.
inline double read_bandwidth(chunkattn::ThreadPool& pool, const Buffer& buffer, int rounds) {
  const int threads = pool.concurrency();
  const std::size_t share = buffer.count() / static_cast<std::size_t>(threads) / 256 * 256;
  std::vector<double> rates;
  std::vector<float> sink(static_cast<std::size_t>(threads) * 16);
  for (int round = 0; round < rounds; ++round) {
    const auto start = Clock::now();
    pool.parallel_for(threads, [&](int t) {
      sink[static_cast<std::size_t>(t) * 16] +=
          read_all(buffer.floats() + static_cast<std::size_t>(t) * share, share);
    });
    rates.push_back(static_cast<double>(share * sizeof(float)) * threads / seconds_since(start));
  }
  volatile float keep = sink[0];
  static_cast<void>(keep);
  return median(rates);
}

/// fp32 operations per second of all threads together: fused multiply-adds on registers.
inline double fma_rate(chunkattn::ThreadPool& pool) {
  using namespace chunkattn;
  constexpr int width = simd::native_width;
  constexpr int chains = simd::num_accumulators < 12 ? 12 : simd::num_accumulators;
  constexpr std::int64_t steps = 20'000'000;
  std::vector<double> rates;
  std::vector<float> sink(static_cast<std::size_t>(pool.concurrency()) * 16);
  for (int round = 0; round < 5; ++round) {
    const auto start = Clock::now();
    pool.parallel_for(pool.concurrency(), [&](int t) {
      simd::Float<width> sums[chains];
      simd::repeat<chains>([&](auto c) CHUNKATTN_LAMBDA {
        sums[c] = simd::broadcast<width>(static_cast<float>(c));
      });
      simd::Float<width> a = simd::broadcast<width>(0.5f);
      const simd::Float<width> b = simd::broadcast<width>(1.0f);
      for (std::int64_t i = 0; i < steps; ++i) {
        __asm__ volatile("" : "+m"(*reinterpret_cast<char*>(&sink[0])));
        simd::repeat<chains>([&](auto c) CHUNKATTN_LAMBDA { sums[c] = simd::fma(sums[c], a, b); });
      }
      float total = 0;
      simd::repeat<chains>([&](auto c) CHUNKATTN_LAMBDA { total += sums[c][0]; });
      sink[static_cast<std::size_t>(t) * 16 % sink.size()] = total;
    });
    rates.push_back(2.0 * width * chains * static_cast<double>(steps) * pool.concurrency() /
                    seconds_since(start));
  }
  return median(rates);
}

inline std::size_t last_level_cache_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return bytes > 0 ? static_cast<std::size_t>(bytes) : 0;
#else
  return 0;
#endif
}

/// Measures all limits. `dram_bytes` is what the memory test reads: far beyond the caches.
inline Machine measure_machine(chunkattn::ThreadPool& pool,
                               std::size_t dram_bytes = std::size_t{2} << 30) {
  Machine machine;
  machine.threads = pool.concurrency();
  machine.last_level_cache = last_level_cache_bytes();
  machine.fma_peak = fma_rate(pool);
  {
    const Buffer buffer(std::size_t{24} << 20);
    read_bandwidth(pool, buffer, 3);
    machine.cache_read = read_bandwidth(pool, buffer, 31);
  }
  const Buffer buffer(dram_bytes);
  machine.dram_read = read_bandwidth(pool, buffer, 7);
  return machine;
}

}  // namespace bench
