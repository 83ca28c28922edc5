// Kernels of the plugin, for the head sizes that CMake was given.
#pragma once

#include <chunkattn/attention_options.hpp>
#include <chunkattn/runtime/any_attention.hpp>
#include <chunkattn/runtime/make_attention.hpp>
#include <memory>
#include <span>

#include "workers.hpp"

namespace plugin {

/// Attention over K and V of float, half or bfloat16 for heads of `size`, one of head_sizes(), on
/// `workers`, which must outlive it. Variants: NoVariant, Sinks and MaskTable, the last two after
/// a SoftCap, too.
/// \throws chunkattn::InvalidArgument for another size
[[nodiscard]] std::unique_ptr<chunkattn::AnyAttention> make_attention(
    chunkattn::HeadSize size, Workers& workers, const chunkattn::CpuOptions& options);

/// The sizes of heads that kernels were compiled for.
[[nodiscard]] std::span<const chunkattn::HeadSize> head_sizes() noexcept;

/// Whether this processor has the instructions that kernels were compiled for.
[[nodiscard]] bool kernels_run_here() noexcept;

}  // namespace plugin
