// Kernels of the package, for the head sizes and types that CMake was given.
#pragma once

#include <chunkattn/attention_options.hpp>
#include <chunkattn/runtime/any_attention.hpp>
#include <chunkattn/runtime/make_attention.hpp>
#include <memory>
#include <span>

#include "workers.hpp"

namespace binding {

/// Attention for one of head_sizes(), on `workers`, which must outlive it.
/// \throws chunkattn::InvalidArgument for another size, and options that make no sense
[[nodiscard]] std::unique_ptr<chunkattn::AnyAttention> make_attention(
    chunkattn::HeadSize size, Workers& workers, const chunkattn::CpuOptions& options);

/// The sizes of heads that kernels were compiled for.
[[nodiscard]] std::span<const chunkattn::HeadSize> head_sizes();

}  // namespace binding
