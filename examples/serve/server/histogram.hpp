// Times, counted in buckets as Prometheus has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace serve {

struct Histogram {
  /// Upper bounds in seconds; what is above all is in count alone.
  static constexpr std::array<double, 12> bounds{0.005, 0.01, 0.025, 0.05, 0.1,  0.25,
                                                 0.5,   1.0,  2.5,   5.0,  10.0, 60.0};
  std::array<std::uint64_t, bounds.size()> at_most{};  ///< of each bound: so many were within it
  std::uint64_t count = 0;
  double sum = 0;

  void add(double seconds) {
    for (std::size_t i = 0; i < bounds.size(); ++i)
      if (seconds <= bounds[i]) ++at_most[i];
    ++count;
    sum += seconds;
  }
};

}  // namespace serve
