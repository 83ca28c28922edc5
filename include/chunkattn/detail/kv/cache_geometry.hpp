// Checks the geometry of a K/V cache: its KvCacheOptions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>

#include "../support/check.hpp"
#include "../support/chunk_source.hpp"
#include "../support/config.hpp"
#include "write_check.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// Throws InvalidArgument unless K and V of one chunk, all layers together, are less than 2^62
/// bytes.
template <class Options>
void check_kv_geometry(const Options& options, int chunk_size, std::size_t element) {
  check_argument(options.num_layers > 0, "options.num_layers", options.num_layers, "at least 1");
  check_argument(options.num_kv_heads > 0, "options.num_kv_heads", options.num_kv_heads,
                 "at least 1");
  check_argument(options.head_dim > 0 && options.head_dim % 8 == 0, "options.head_dim",
                 options.head_dim, "a positive multiple of 8");
  const int value_dim = options.dim_of_v();
  check_argument(value_dim > 0 && value_dim % 8 == 0, "options.value_dim", value_dim,
                 "a positive multiple of 8, or none for head_dim");
  check_argument(!options.v_in_k || value_dim < options.head_dim, "options.value_dim", value_dim,
                 "less than head_dim, with v_in_k");
  check_argument(chunk_size > 0, "chunk_size", chunk_size, "at least 1");
  std::size_t room = (std::size_t{1} << 62) / (2 * (element + sizeof(float)));
  const int factors[] = {options.num_layers, options.num_kv_heads,
                         (std::max)(options.head_dim, value_dim), chunk_size};
  for (const int factor : factors) room /= static_cast<std::size_t>(factor);
  check_argument(room > 0, "options.num_kv_heads", options.num_kv_heads,
                 "num_layers, num_kv_heads, head_dim and chunk_size that give less than 2^62 bytes "
                 "per chunk");
}

/// The check that `options` asks for of a cache that follows `source`, or null.
template <class Options>
[[nodiscard]] std::shared_ptr<WriteCheck> make_write_check(const Options& options,
                                                           const ChunkSource& source) {
  if (!options.check_writes) return nullptr;
  check_argument(source.step_observers != nullptr, "options.check_writes", "true",
                 "false for memory that follows no PrefixTree: there are no steps to check");
  auto check =
      std::make_shared<WriteCheck>(options.num_layers, options.num_kv_heads, source.tree_id);
  source.step_observers->add(check);
  return check;
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
