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

#include "chunkattn/base/executor.hpp"
#include "chunkattn/cpu/simd.hpp"

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

/// Rates that the machine reaches with the threads of a pool.
struct Rates {
  double dram_read = 0;  ///< bytes per second, from memory beyond every cache
  double fma_peak = 0;   ///< fp32 operations per second

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

/// Reads `count` floats, a multiple of 256; independent sums and prefetching 4 KB ahead, four lines
/// at a time (see cpu::max_burst).
inline float read_all(const float* from, std::size_t count) {
  using namespace chunkattn;
  constexpr int width = simd::native_width;
  simd::Float<width> sums[4] = {};
  for (std::size_t i = 0; i + 256 <= count; i += 256) {
    for (std::size_t j = 0; j < 256; j += 64) {
      for (std::size_t line = 0; line < 64; line += 16)
        __builtin_prefetch(from + i + j + line + 1024, 0, 2);
      for (std::size_t k = 0; k < 64; k += 4 * width)
        simd::repeat<4>([&](auto s) CHUNKATTN_LAMBDA {
          sums[s] = sums[s] + simd::load<width>(from + i + j + k + s * width);
        });
    }
  }
  float total = 0;
  for (const auto& sum : sums) total += simd::reduce_sum<width>(sum);
  return total;
}

inline std::size_t last_level_cache_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return bytes > 0 ? static_cast<std::size_t>(bytes) : 0;
#else
  return 0;
#endif
}

/// Measures the machine's limits again and again, between the steps that are held against them and
/// over as many bytes as they read: neighbours on the host change the limits by tens of percents,
/// within milliseconds as within minutes.
class Machine {
 public:
  /// \param dram_bytes  read in rotation, far beyond the caches
  explicit Machine(chunkattn::ThreadPool& pool, std::size_t dram_bytes = std::size_t{2} << 30)
      : pool_(pool), sink_(static_cast<std::size_t>(pool.concurrency()) * 16), buffer_(dram_bytes) {
    // Where memory is virtual, the first pass over fresh pages is slow.
    const std::size_t samples = dram_bytes / sample_bytes;
    for (std::size_t i = 0; i < samples; ++i) static_cast<void>(sample());
    std::vector<double> read, fma;
    for (std::size_t i = 0; i < samples; ++i) {
      const Rates rates = sample();
      read.push_back(rates.dram_read);
      fma.push_back(rates.fma_peak);
    }
    overall_ = {median(read), median(fma)};
  }

  /// Both rates at this moment, reading the next `bytes`, rounded up to 64 MB.
  [[nodiscard]] Rates sample(double bytes = 0) {
    const std::size_t floats = sample_bytes / sizeof(float);
    double seconds = 0;
    int pieces = 0;
    do {
      if (at_ + floats > buffer_.count()) at_ = 0;
      seconds += 1 / read_rate(buffer_.floats() + at_, floats);
      at_ += floats;
      ++pieces;
    } while (static_cast<double>(pieces) * sample_bytes < bytes);
    return {pieces / seconds, fma_rate()};
  }
  /// What was measured at the start.
  [[nodiscard]] const Rates& overall() const { return overall_; }

  /// Bytes per second at which all threads together read memory that the last-level cache holds.
  [[nodiscard]] double cache_read() {
    std::vector<double> rates;
    const std::size_t bytes = std::min(last_level_cache_bytes() / 2, std::size_t{24} << 20);
    if (bytes == 0) return 0;
    for (int round = 0; round < 34; ++round) {
      const double rate = read_rate(buffer_.floats(), bytes / sizeof(float));
      if (round >= 3) rates.push_back(rate);  // the first ones fill the cache
    }
    return median(rates);
  }

 private:
  static constexpr std::size_t sample_bytes = std::size_t{64} << 20;

  // Each thread reads its part.
  double read_rate(const float* from, std::size_t count) {
    const int threads = pool_.concurrency();
    const std::size_t share = count / static_cast<std::size_t>(threads) / 256 * 256;
    const auto start = Clock::now();
    pool_.parallel_for(threads, [&](int t) {
      const auto i = static_cast<std::size_t>(t);
      sink_[i * 16] += read_all(from + i * share, share);
    });
    return static_cast<double>(share * sizeof(float)) * threads / seconds_since(start);
  }

  // Fused multiply-adds on registers, in independent chains.
  double fma_rate() {
    using namespace chunkattn;
    constexpr int width = simd::native_width;
    constexpr int chains = simd::num_accumulators < 12 ? 12 : simd::num_accumulators;
    constexpr int steps = 100'000;
    const auto start = Clock::now();
    pool_.parallel_for(pool_.concurrency(), [&](int t) {
      simd::Float<width> sums[chains];
      simd::repeat<chains>([&](auto c) CHUNKATTN_LAMBDA {
        sums[c] = simd::broadcast<width>(static_cast<float>(c));
      });
      const simd::Float<width> a = simd::broadcast<width>(0.5f);
      const simd::Float<width> b = simd::broadcast<width>(1.0f);
      for (int i = 0; i < steps; ++i) {
        __asm__ volatile("");  // or the compiler sums up the series
        simd::repeat<chains>([&](auto c) CHUNKATTN_LAMBDA { sums[c] = simd::fma(sums[c], a, b); });
      }
      simd::repeat<chains>(
          [&](auto c) CHUNKATTN_LAMBDA { sink_[static_cast<std::size_t>(t) * 16] += sums[c][0]; });
    });
    return 2.0 * width * chains * steps * pool_.concurrency() / seconds_since(start);
  }

  chunkattn::ThreadPool& pool_;
  std::vector<float> sink_;  // what was computed, so that it is
  Buffer buffer_;
  std::size_t at_ = 0;
  Rates overall_;
};

}  // namespace bench
