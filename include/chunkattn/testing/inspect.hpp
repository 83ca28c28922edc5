// What is inside an attention object, for tests and measurements. It may change with any version.
#pragma once

#include <variant>

#include "../attention_options.hpp"
#include "../detail/base/config.hpp"
#include "../fwd.hpp"
#include "reference.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// A friend of ChunkAttention on both backends.
struct AttentionAccess {
  template <class Attention>
  [[nodiscard]] static const auto& engine(const Attention& attention) noexcept {
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

/// CPU: how run() rounds products over K and V of T, for compare_with_reference().
template <class T, int HeadDim, int ValueDim, class Exec>
[[nodiscard]] Rounding rounding_of(const ChunkAttention<Cpu, HeadDim, ValueDim, Exec>& attention) {
  const bool uses_tiles =
      std::visit([](const auto& engine) { return engine.template uses_tiles<T>(); },
                 detail::AttentionAccess::engine(attention));
  return uses_tiles ? rounding_of<T>(attention.options().accuracy) : Rounding{};
}

/// CUDA: uploads and what they carried, since construction.
template <int HeadDim, int ValueDim, class Exec>
[[nodiscard]] const auto& uploads_of(
    const ChunkAttention<Cuda, HeadDim, ValueDim, Exec>& attention) {
  return detail::AttentionAccess::state(attention).upload_.counts();
}

/// CUDA: what the last prepared plan streams.
template <int HeadDim, int ValueDim, class Exec>
[[nodiscard]] const auto& summary_of(
    const ChunkAttention<Cuda, HeadDim, ValueDim, Exec>& attention) {
  return detail::AttentionAccess::state(attention).upload_.scheduler().summary();
}

CHUNKATTN_NAMESPACE_END
