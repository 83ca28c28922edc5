// Heads of a size without kernels: K, V and queries with zeros after them, for kernels of longer
// heads. Zeros add nothing to q.k, and outputs after the last element of V are dropped.
#pragma once

#include <ggml.h>

#include <chunkattn/runtime/any_attention.hpp>
#include <optional>
#include <vector>

#include "workers.hpp"

namespace plugin {

/// The shortest heads with kernels that have room for heads of `size`; none where these would be
/// more than twice as long, which ggml's own code may compute sooner.
[[nodiscard]] std::optional<chunkattn::HeadSize> size_with_kernels(
    chunkattn::HeadSize size) noexcept;

/// Copies of one tensor after another in memory that is kept.
class PaddedHeads {
 public:
  /// `tensor` [dim, tokens, heads, streams] of F32, F16 or BF16, as a dense one of `dim` elements a
  /// row; itself if it has so many. Valid until the next call.
  /// \throws std::bad_alloc without memory
  const ggml_tensor& operator()(const ggml_tensor& tensor, int dim, Workers& workers);

 private:
  std::vector<char> memory_;
  ggml_tensor copy_{};
};

}  // namespace plugin
