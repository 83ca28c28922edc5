// Schedules, uploads and roundings of an attention object, for tests and measurements. It may
// change with any version.
#pragma once

#include <variant>

#include "../attention_options.hpp"
#include "../detail/support/config.hpp"
#include "../fwd.hpp"
#include "reference.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// A friend of ChunkAttention on both backends.
struct AttentionAccess {
  template <class Attention>
  [[nodiscard]] static auto& engine(Attention& attention) noexcept {
    return attention.engine_;
  }
  template <class Attention>
  [[nodiscard]] static const auto& state(const Attention& attention) noexcept {
    return attention.state_;
  }
};

}  // namespace detail

/// CPU: how the last run() was cut into tasks.
template <int HeadDim, int ValueDim, class Exec>
[[nodiscard]] const auto& schedule_of(
    const ChunkAttention<Cpu, HeadDim, ValueDim, Exec>& attention) {
  return std::visit([](const auto& engine) -> const auto& { return engine.schedule(); },
                    detail::AttentionAccess::engine(attention));
}

/// CPU: fills all that runs have left in memory, with NaN or whatever an earlier run might leave:
/// no later run may read it before it has written it.
template <int HeadDim, int ValueDim, class Exec>
void poison_scratch(ChunkAttention<Cpu, HeadDim, ValueDim, Exec>& attention, float value) {
  std::visit([&](auto& engine) { engine.poison(value); },
             detail::AttentionAccess::engine(attention));
}

/// The largest rounding errors of products by dot products over int8 K and V: queries are 16-bit
/// integers there, and probabilities, which have 15 bits with avx2.
[[nodiscard]] constexpr Rounding rounding_of_dots(InstructionSet set) noexcept {
  Rounding rounding(0x1p-22);  // far below the largest p the exp is off by 2^-19, of very little
  rounding.p_of_largest = set == InstructionSet::avx2 ? 0x1p-15 : 0x1p-16;
  rounding.query_of_largest = 0x1.02p-16;  // half of 1 / 32639
  return rounding;
}

/// The largest rounding errors of products by dot products of pairs over bfloat16 K and V.
[[nodiscard]] constexpr Rounding rounding_of_pairs(CpuOptions::Accuracy accuracy) noexcept {
  if (accuracy == CpuOptions::Accuracy::fp32) return {};
  if (accuracy == CpuOptions::Accuracy::one_term) return {0x1p-8, 0x1p-8};
  return {0x1.2p-17, 0};  // of queries that are bfloat16 by value; others are computed in fp32
}

/// CPU: how run() rounds products over K and V of T, for compare_with_reference().
template <class T, int HeadDim, int ValueDim, class Exec>
[[nodiscard]] Rounding rounding_of(const ChunkAttention<Cpu, HeadDim, ValueDim, Exec>& attention) {
  return std::visit(
      [&](const auto& engine) {
        return engine.template uses_tiles<T>()  ? rounding_of<T>(attention.options().accuracy)
               : engine.template uses_dots<T>() ? rounding_of_dots(engine.instruction_set)
               : engine.template pair_terms<T>() > 0
                   ? rounding_of_pairs(attention.options().accuracy)
                   : Rounding{};
      },
      detail::AttentionAccess::engine(attention));
}

/// CUDA: uploads and what they carried, since construction.
template <int HeadDim, int ValueDim, class Exec>
[[nodiscard]] const auto& uploads_of(
    const ChunkAttention<Cuda, HeadDim, ValueDim, Exec>& attention) {
  return detail::AttentionAccess::state(attention).upload_.counts();
}

/// CUDA: the last prepared plan on the device, with scheduler(), and geometry() that it cuts for.
template <int HeadDim, int ValueDim, class Exec>
[[nodiscard]] const auto& plan_upload_of(
    const ChunkAttention<Cuda, HeadDim, ValueDim, Exec>& attention) {
  return detail::AttentionAccess::state(attention).upload_;
}

CHUNKATTN_NAMESPACE_END
