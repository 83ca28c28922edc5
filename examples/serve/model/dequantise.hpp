// The block formats of GGUF tensors, as floats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gguf.hpp"

namespace serve {

/// What a tensor is stored in multiples of.
struct Block {
  std::size_t elements, bytes;
};

[[nodiscard]] bool is_readable(std::uint32_t type);
inline constexpr const char* readable_types =
    "F32 (0), F16 (1), Q4_0 (2), Q4_1 (3), Q5_0 (6), Q5_1 (7), Q8_0 (8), Q4_K (12), Q5_K (13), "
    "Q6_K (14), IQ4_NL (20) or BF16 (30)";

/// \pre is_readable
[[nodiscard]] Block block_of(TensorType type);

/// Output `output` of a tensor as tensor.inputs floats.
void dequantise(const Tensor& tensor, std::size_t output, std::span<float> to);

}  // namespace serve
