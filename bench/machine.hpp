// The machine's own limits, measured in the same run as everything that is compared with them.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__linux__)
#include <unistd.h>
#endif

#include "bench/dot_rate.hpp"
#include "bench/matrix_rate.hpp"
#include "bench/median.hpp"
#include "chunkattn/executor.hpp"
#include "examples/support/huge_buffer.hpp"
#include "examples/support/machine_limits.hpp"

namespace bench {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Rates that the machine reaches with the threads of a pool.
struct Rates {
  double dram_read = 0;    ///< bytes per second, from memory beyond every cache
  double fma_peak = 0;     ///< fp32 operations per second
  double matrix_peak = 0;  ///< bfloat16 operations per second of matrix units, 0: there are none
  double byte_peak = 0;    ///< operations per second of dot products of bytes
  double int16_peak = 0;   ///< of int16
  double pair_peak = 0;    ///< and of pairs of bfloat16

  /// Harmonic means of these and other rates.
  [[nodiscard]] Rates mean_with(const Rates& other) const {
    const auto mean = [](double a, double b) { return a > 0 ? 2 / (1 / a + 1 / b) : 0; };
    return {mean(dram_read, other.dram_read),     mean(fma_peak, other.fma_peak),
            mean(matrix_peak, other.matrix_peak), mean(byte_peak, other.byte_peak),
            mean(int16_peak, other.int16_peak),   mean(pair_peak, other.pair_peak)};
  }
  /// The least time that so many operations and bytes can take, if `use` computes them.
  [[nodiscard]] double floor_seconds(double flops, double bytes, UnitUse use = {}) const {
    return std::max(flops * use.products / peak(use.unit), bytes / dram_read);
  }
  [[nodiscard]] double peak(Unit unit) const {
    switch (unit) {
      case Unit::matrix:
        return matrix_peak;
      case Unit::byte_dots:
        return byte_peak;
      case Unit::int16_dots:
        return int16_peak;
      case Unit::pair_dots:
        return pair_peak;
      default:
        return fma_peak;
    }
  }
};

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
      : pool_(pool), sink_(static_cast<std::size_t>(pool.concurrency()) * 8), buffer_(dram_bytes) {
    std::memset(buffer_.as<char>(), 1, dram_bytes);
    // Where memory is virtual, the first pass over fresh pages is slow.
    const std::size_t samples = dram_bytes / sample_bytes;
    for (std::size_t i = 0; i < samples; ++i) static_cast<void>(sample());
    std::vector<double> read, fma, matrix, bytes, int16, pairs;
    for (std::size_t i = 0; i < samples; ++i) {
      const Rates rates = sample();
      read.push_back(rates.dram_read);
      fma.push_back(rates.fma_peak);
      matrix.push_back(rates.matrix_peak);
      bytes.push_back(rates.byte_peak);
      int16.push_back(rates.int16_peak);
      pairs.push_back(rates.pair_peak);
    }
    overall_ = {median(read),  median(fma),   median(matrix),
                median(bytes), median(int16), median(pairs)};
  }

  /// The rates at this moment, reading the next `bytes`, rounded up to 64 MB.
  [[nodiscard]] Rates sample(double bytes = 0) {
    double seconds = 0;
    int pieces = 0;
    do {
      if (at_ + sample_bytes > buffer_.bytes()) at_ = 0;
      seconds += 1 / read_rate(at_, sample_bytes);
      at_ += sample_bytes;
      ++pieces;
    } while (static_cast<double>(pieces) * sample_bytes < bytes);
    return {pieces / seconds,           examples::fma_rate(pool_, 100'000, sink_[0]),
            matrix_rate(pool_, 20'000), byte_rate(pool_, 50'000),
            int16_rate(pool_, 50'000),  pair_rate(pool_, 50'000)};
  }
  /// What was measured at the start.
  [[nodiscard]] const Rates& overall() const { return overall_; }

  /// Bytes per second at which all threads together read memory that the last-level cache holds.
  [[nodiscard]] double cache_read() {
    std::vector<double> rates;
    const std::size_t bytes = std::min(last_level_cache_bytes() / 2, std::size_t{24} << 20);
    if (bytes == 0) return 0;
    for (int round = 0; round < 34; ++round) {
      const double rate = read_rate(0, bytes);
      if (round >= 3) rates.push_back(rate);  // the first ones fill the cache
    }
    return median(rates);
  }

 private:
  static constexpr std::size_t sample_bytes = std::size_t{64} << 20;

  // Each thread reads its part.
  double read_rate(std::size_t from, std::size_t bytes) {
    const int threads = pool_.concurrency();
    const std::size_t share = bytes / static_cast<std::size_t>(threads) / 1024 * 1024;
    const char* const data = buffer_.as<char>() + from;
    const double ms = examples::milliseconds([&] {
      pool_.parallel_for(threads, [&](int t) {
        const auto i = static_cast<std::size_t>(t);
        sink_[i * 8] += examples::sum_bytes(data + i * share, share);
      });
    });
    return static_cast<double>(share) * threads / (ms * 1e-3);
  }

  chunkattn::ThreadPool& pool_;
  std::vector<std::uint64_t> sink_;  // what was computed, so that it is
  examples::HugeBuffer buffer_;
  std::size_t at_ = 0;
  Rates overall_;
};

}  // namespace bench
