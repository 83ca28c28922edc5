// A mask of any values as a variant of attention: for masks that are no forest, and biases.
#pragma once

#include <chunkattn/variants.hpp>
#include <cstdint>
#include <limits>
#include <string_view>

namespace plugin {

/// Adds slope * table[row][key] to each logit; a row does not see the keys where the table has
/// minus infinity. One more logit per head is in the softmax, unless it is minus infinity.
struct MaskTable {
  static constexpr std::string_view name = "ggml mask";

  const float* table;   ///< [num_rows][num_keys]
  std::int32_t stride;  ///< num_keys
  const float* slopes;  ///< [num_qo_heads]
  const float* sinks;   ///< [num_qo_heads]

  /// What the mask adds to the logit of a row and a key, but for the slope.
  auto entry(chunkattn::lanes::At at) const {
    return chunkattn::lanes::table(table, at.row * stride + at.kv_idx);
  }
  /// The logit and its bias.
  auto logit(auto s, chunkattn::lanes::At at) const {
    return s + chunkattn::lanes::table(slopes, at.head) * entry(at);
  }
  /// Whether the row sees the key.
  auto visible(chunkattn::lanes::At at) const {
    return entry(at) > -std::numeric_limits<float>::infinity();
  }
  /// The logit that has no key.
  auto sink(chunkattn::lanes::At at) const { return chunkattn::lanes::table(sinks, at.head); }
};

}  // namespace plugin
