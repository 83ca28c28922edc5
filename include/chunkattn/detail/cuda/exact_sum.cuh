// Sums of many parts that keep their digits at any length, by keeping what their additions round
// away.
#pragma once

#include "ptx.cuh"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// A sum in fp32, and what its additions have rounded away so far (the rest of a fused
/// multiply-add).
struct ExactSum {
  float sum = 0.0f;
  float lost = 0.0f;

  /// sum = sum * factor + x * weight. What that rounds away is kept: all of it where the first is
  /// the larger, else to a rounding of the other.
  CHUNKATTN_DEVICE void add(float factor, float x, float weight) {
    const float scaled = ptx::multiply(sum, factor);
    const float of_product = ptx::fma(sum, factor, -scaled);
    sum = ptx::fma(x, weight, scaled);
    const float of_sum = ptx::fma(x, weight, scaled - sum);
    lost = ptx::fma(lost, factor, of_product + of_sum);
  }
  /// With what was rounded away. (An infinity has lost NaN or an infinity, and stays.)
  CHUNKATTN_DEVICE float value() const {
    return lost > -3.0e38f && lost < 3.0e38f ? sum + lost : sum;
  }
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
