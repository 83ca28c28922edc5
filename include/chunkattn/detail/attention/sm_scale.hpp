// The factor of q·k.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <optional>

#include "../support/check.hpp"
#include "../support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// The factor of q·k that the option sm_scale stands for. Refuses what is not positive or not
/// finite, by the bits, which -ffast-math leaves alone.
[[nodiscard]] inline float resolved_sm_scale(std::optional<float> sm_scale, int head_dim) {
  if (!sm_scale) return static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
  const auto bits = std::bit_cast<std::uint32_t>(*sm_scale);
  check_argument(bits - 1 < 0x7f800000u - 1, "options.sm_scale", *sm_scale,
                 "a positive finite factor, or none for 1 / sqrt(HeadDim)");
  return *sm_scale;
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
