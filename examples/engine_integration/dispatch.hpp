// Attention whose head_dim and K/V type are known only when the model has been loaded. The engine's
// other files see AnyAttention, and compile none of the kernels.
#pragma once

#include <chunkattn/any_attention.hpp>
#include <memory>

namespace engine {

class Threads;

/// One attention object for all layers.
/// \throws chunkattn::InvalidArgument for a head_dim that was not compiled in
std::unique_ptr<chunkattn::AnyAttention> load_attention(int head_dim, Threads& threads);

}  // namespace engine
