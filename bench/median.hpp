// Medians of measurements, on a machine that others use too.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace bench {

inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

/// A median, and what holds it with 95 %.
struct MedianInterval {
  double median, low, high;
};

/// By the order statistics beyond the middle by 1.96 standard deviations of the binomial
/// distribution: whatever the distribution of the values, of which there is at least one.
inline MedianInterval median_interval(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const double last = static_cast<double>(values.size() - 1);
  const double reach = 1.96 * std::sqrt(last + 1) / 2;
  const auto at = [&](double i) {
    return values[static_cast<std::size_t>(std::clamp(std::round(i), 0.0, last))];
  };
  return {at(last / 2), at(last / 2 - reach), at(last / 2 + reach)};
}

}  // namespace bench
