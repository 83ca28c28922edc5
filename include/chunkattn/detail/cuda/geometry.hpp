// Heads of a model's attention layers, as the CUDA backend counts them.
#pragma once

#include <cstdint>

#include "../base/config.hpp"
#include "tile_layout.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// Heads of the layers that a schedule serves.
struct Geometry {
  std::int32_t num_qo_heads = 0;  ///< query heads
  std::int32_t num_kv_heads = 0;  ///< heads of K and of V
  std::int32_t head_dim = 0;      ///< elements per head of K
  std::int32_t value_dim = 0;     ///< elements per head of V; 0: head_dim
  std::int32_t stored_bytes = 2;  ///< of an element of K and V
  /// Query heads that read the same K and V.
  [[nodiscard]] constexpr std::int32_t group() const noexcept {
    return num_qo_heads / num_kv_heads;
  }
  /// Elements of K and of V.
  [[nodiscard]] constexpr detail::cuda::HeadDims dims() const noexcept {
    return {head_dim, value_dim != 0 ? value_dim : head_dim, stored_bytes};
  }
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
