// Tensor parallelism: the part of a model that one of several ranks holds.
#pragma once

#include "../model/model.hpp"

namespace serve {

/// What rank `rank` of `size` holds: the same share of the K/V heads with the query heads that read
/// them, of the FFN's hidden dimension, and of the vocabulary. Its `config` says how many heads and
/// hidden dimensions that is; the vocabulary's size stays the whole one. The attention output and
/// the FFN of a part are terms of a sum over the ranks; Forward adds them.
/// \throws std::invalid_argument if num_kv_heads is not a multiple of size
[[nodiscard]] Model part_of(Model whole, int rank, int size);

}  // namespace serve
