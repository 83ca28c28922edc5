// The machine's limits, measured: read bandwidth and fused multiply-adds. Every kernel's time is
// compared with these.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace examples {

// One register of what the compiler compiles for: arrays of longer vectors lie in memory.
#if defined(__AVX512F__)
inline constexpr std::size_t vector_bytes = 64;
#elif defined(__AVX__)
inline constexpr std::size_t vector_bytes = 32;
#else
inline constexpr std::size_t vector_bytes = 16;
#endif
using FloatLanes = float __attribute__((vector_size(vector_bytes)));
using IntLanes = std::uint64_t __attribute__((vector_size(vector_bytes)));
inline constexpr std::size_t num_lanes = vector_bytes / sizeof(float);

/// Milliseconds that `body()` takes.
template <class Body>
double milliseconds(Body&& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

/// Reads every byte once with wide loads. The result is the data's, so that nothing is optimised
/// away.
inline std::uint64_t sum_bytes(const char* data, std::size_t bytes) {
  IntLanes sums[8] = {};
  for (std::size_t at = 0; at + sizeof sums <= bytes; at += sizeof sums) {
    // Far enough ahead to keep the memory busy across pages; reading past the end is harmless.
    for (std::size_t line = 0; line < sizeof sums; line += 64)
      __builtin_prefetch(data + at + line + 4096, 0, 2);
    for (std::size_t i = 0; i < 8; ++i) {
      IntLanes part;
      std::memcpy(&part, data + at + i * sizeof part, sizeof part);
      sums[i] += part;
    }
  }
  IntLanes total = sums[0];
  for (std::size_t i = 1; i < 8; ++i) total += sums[i];
  std::uint64_t result = 0;
  for (std::size_t i = 0; i < sizeof total / 8; ++i) result += total[i];
  return result;
}

/// Milliseconds for one pass over `bytes` of memory by all threads of the executor.
template <class Exec>
double read_sweep_ms(Exec& executor, const char* data, std::size_t bytes, std::uint64_t& sink) {
  constexpr std::size_t block = std::size_t{4} << 20;
  const int blocks = static_cast<int>(bytes / block);
  std::uint64_t sums[64] = {};  // no two neighbours write one line at the same time for long
  return milliseconds([&] {
           executor.parallel_for(blocks, [&](int i) {
             const std::uint64_t sum = sum_bytes(data + static_cast<std::size_t>(i) * block, block);
             __atomic_fetch_add(&sums[static_cast<std::size_t>(i) % 64], sum, __ATOMIC_RELAXED);
           });
           for (const std::uint64_t sum : sums) sink += sum;
         }) *
         (static_cast<double>(bytes) /
          static_cast<double>(static_cast<std::size_t>(blocks) * block));
}

/// Milliseconds in which all threads read `bytes_each` of their own `repeats` times: the bandwidth
/// of the cache that holds so much.
template <class Exec>
double cache_sweep_ms(Exec& executor, const char* data, std::size_t bytes_each, int repeats,
                      std::uint64_t& sink) {
  const int threads = executor.concurrency();
  std::uint64_t total = 0;
  const double ms = milliseconds([&] {
    executor.parallel_for(threads, [&](int i) {
      std::uint64_t sum = 0;
      for (int r = 0; r < repeats; ++r) {
        asm volatile("" ::: "memory");  // or the compiler reads once and multiplies
        sum += sum_bytes(data + static_cast<std::size_t>(i) * bytes_each, bytes_each);
      }
      __atomic_fetch_add(&total, sum, __ATOMIC_RELAXED);
    });
  });
  sink += total;
  return ms;
}

/// A function with such parameters, or clang halves 64-byte vectors where it prefers shorter ones.
inline FloatLanes multiply_add(FloatLanes x, FloatLanes a, FloatLanes b) {
  return x * a + b;
}

/// fp32 operations per second of all threads (a fused multiply-add counts as two), from so many
/// iterations of 12 independent chains.
template <class Exec>
double fma_rate(Exec& executor, int iterations, std::uint64_t& sink) {
  constexpr int chains = 12;
  const int threads = executor.concurrency();
  float total = 0;
  const double ms = milliseconds([&] {
    executor.parallel_for(threads, [&](int i) {
      // Towards 1000 b, never denormal; no constants, which would be read in each operation.
      const FloatLanes a = FloatLanes{} + (1 - 1 / static_cast<float>(1000 + i)),
                       b = FloatLanes{} + static_cast<float>(1 + i);
      FloatLanes sums[chains];  // all different, or the compiler would keep one of them only
      for (int c = 0; c < chains; ++c) sums[c] = FloatLanes{} + static_cast<float>(c);
      for (int n = 0; n < iterations; ++n) {
#pragma GCC unroll 12  // or -O2 keeps the chains in memory
        for (int c = 0; c < chains; ++c) sums[c] = multiply_add(sums[c], a, b);
      }
      float own = 0;
      for (int c = 0; c < chains; ++c) own += sums[c][0];
      if (i == 0) total = own;
    });
  });
  sink += static_cast<std::uint64_t>(total);
  return 2.0 * iterations * chains * static_cast<double>(num_lanes) * threads / (ms * 1e-3);
}

}  // namespace examples
