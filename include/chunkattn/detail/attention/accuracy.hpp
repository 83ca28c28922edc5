// How far kernels may round on the way to their results.
#pragma once

#include <type_traits>

#include "../../element.hpp"
#include "../base/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// How accurate products must be at least. It matters where the processor has a matrix unit
/// (InstructionSet::amx) and K and V are stored in 16 or 8 bits; anything else computes in fp32.
/// Such a unit multiplies bfloat16 and adds up in fp32, so queries and probabilities become sums of
/// bfloat16 terms; 16- and 8-bit K and V are such sums already. rounding_of() has the errors.
enum class Accuracy {
  /// No matrix unit: everything in fp32, to about 2^-22 of the largest terms of a sum.
  fp32,
  /// Two terms: each query element and probability off by at most 2^-17 of itself (half K and V:
  /// 2^-15.4), which is below what storing outputs in 16 bits costs.
  two_terms,
  /// One term, the fastest: off by at most 2^-8 of itself, for half K and V by 2^-7. Logits of size
  /// s are off by up to s / 256.
  one_term,
};

/// How a kernel rounds on the way to its output, beyond what fp32 does; relative.
struct Rounding {
  double p;      ///< of the probabilities and values as they are fed to PV
  double logit;  ///< of queries and keys as they are fed to QK

  /// fp32, unless told otherwise.
  constexpr Rounding(double p_ = 0x1p-24, double logit_ = 0) noexcept : p(p_), logit(logit_) {}
};

/// The largest rounding errors of products over K and V of T, by tiles (see Accuracy). Two terms of
/// bfloat16 hold a float but for 2^-17 of it, and K and V exactly. Of half K and V, which are two
/// terms themselves, the product of both second terms is left out: another 2^-16.
template <class T>
[[nodiscard]] constexpr Rounding rounding_of(Accuracy accuracy) noexcept {
  constexpr bool is_half = std::is_same_v<T, half>;
  if (std::is_same_v<T, float> || accuracy == Accuracy::fp32) return {};
  const double u =
      accuracy == Accuracy::two_terms ? (is_half ? 0x3p-17 : 0x1p-17) : (is_half ? 0x2p-8 : 0x1p-8);
  return {u, u};
}

CHUNKATTN_NAMESPACE_END
