// The codec of a cache's blocks: their K/V as records.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "../../detail/support/array.hpp"
#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../../element.hpp"
#include "../../kv_view.hpp"
#include "../../transfer/transfer.hpp"
#include "record.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// How blocks of a cache are stored.
/// \param block  tokens
/// \throws InvalidArgument for K/V that cannot be rounded like this
template <class Element, class Cache>
[[nodiscard]] TierCodec make_tier_codec(const Cache& cache, std::size_t block,
                                        std::optional<ElementType> stored_as) {
  const auto& shape = cache.options();
  const auto [k, v] = row_bytes(cache);
  TierCodec codec;
  codec.raw_bytes = codec.stored_bytes = kv_bytes(cache, block);
  codec.layers = to_size(shape.num_layers);
  codec.rows = to_size(shape.num_kv_heads) * block;
  codec.k_dim = k / sizeof(Element);
  codec.v_dim = v / sizeof(Element);
  if (!stored_as) return codec;
  if constexpr (QoElement<Element>) {
    const bool is_int8 = *stored_as == element_type_of<std::int8_t>;
    if (is_int8 || *stored_as == element_type_of<float8_e4m3>) {
      codec.encode = is_int8 ? &encode_tier_rows<Element, std::int8_t>
                             : &encode_tier_rows<Element, float8_e4m3>;
      codec.decode = is_int8 ? &decode_tier_rows<Element, std::int8_t>
                             : &decode_tier_rows<Element, float8_e4m3>;
      const std::size_t rows = codec.layers * codec.rows * (codec.v_dim > 0 ? 2 : 1);
      codec.stored_bytes = codec.raw_bytes / sizeof(Element) + rows * sizeof(float);
      return codec;
    }
  }
  fail_argument("options.stored_as", static_cast<int>(*stored_as),
                "int8 or float8_e4m3 for K/V of float, half or bfloat16; else nothing");
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
