// The factor of q·k.
#pragma once

#include <cmath>
#include <optional>

#include "../support/bit_cast.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// The factor of q·k that the option sm_scale stands for.
/// \throws InvalidArgument for one that is not positive and finite
[[nodiscard]] inline float resolved_sm_scale(std::optional<float> sm_scale, int head_dim) {
  if (!sm_scale) return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
  check_argument(is_positive_finite(*sm_scale), "options.sm_scale", *sm_scale,
                 "a positive finite factor, or none for 1 / sqrt(HeadDim)");
  return *sm_scale;
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
