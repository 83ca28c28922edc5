// Checks of a call's arguments, before any state changes.
#pragma once

#include <iterator>
#include <span>
#include <type_traits>
#include <utility>

#include "../../kv_view.hpp"
#include "../../plan_view.hpp"
#include "../attention/row_places.hpp"
#include "../kv/checks.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"
#include "../support/instruction_sets.hpp"

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

/// A contiguous range that knows its size, what std::data() and std::size() take; or rows with
/// strides. (The concepts of <ranges> are slow to include.)
template <class R>
concept Buffer = detail::is_rows<std::remove_cvref_t<R>> || requires(R& range) {
  std::size(range);
  *std::data(range);
};

/// An argument that is no variant, where a variant or a buffer may be: a buffer, or a wrong type.
template <class R>
concept MeantAsBuffer = Buffer<R> || !std::is_class_v<R>;

/// An argument in the place of a variant: one, or a wrong type.
template <class R>
concept MeantAsVariant = !MeantAsBuffer<R>;

/// The rows of a buffer.
template <Buffer R>
[[nodiscard]] auto given_rows(R&& buffer) noexcept {
  if constexpr (detail::is_rows<std::remove_cvref_t<R>>)
    return detail::GivenRows(buffer);
  else
    return detail::GivenRows(std::span(std::data(buffer), std::size(buffer)));
}
template <Buffer R>
[[nodiscard]] auto given_to_read(const R& buffer) noexcept {
  return detail::read_only(given_rows(buffer));
}
template <class R>
using element_of = typename decltype(given_rows(std::declval<R&>()))::element_type;

/// A buffer of float, half or bfloat16.
template <class R>
concept QoRange = MeantAsBuffer<R> && Buffer<R> && QoElement<std::remove_const_t<element_of<R>>>;

/// A buffer that can be written.
template <class R>
concept WritableRange = QoRange<R> && !std::is_const_v<element_of<R>>;

/// Explains, at compile time, which of the buffers is not a QoRange.
template <class... Ranges>
constexpr void explain_buffers() {
  static_assert((Buffer<Ranges> && ...),
                "ChunkAttention: q, k, v and out must be contiguous ranges that know their size, "
                "such as std::vector and std::span; for a pointer write std::span(pointer, count)");
  static_assert(((!Buffer<Ranges> || QoRange<Ranges>) && ...),
                "ChunkAttention: the elements of q, k, v and out must be float, chunkattn::half or "
                "chunkattn::bfloat16");
}

/// explain_buffers() if the last one is written.
template <class In, class Out>
constexpr void explain_run() {
  explain_buffers<In, Out>();
  static_assert(!QoRange<Out> || WritableRange<Out>,
                "ChunkAttention::run: out is written, so its elements must not be const");
}

/// Checks that `layer` fits `plan` and these sizes of K and V heads. Chunks are checked separately.
template <class T>
void check_view(const KvView<T>& layer, const PlanView& plan, int head_dim, int value_dim) {
  using detail::check_argument;
  check_argument(plan.num_rows > 0, "plan.num_rows", plan.num_rows,
                 "at least one query row: add() a sequence to the step and build() the plan");
  if (layer.head_dim != head_dim) [[unlikely]]  // messages are put together only on failure
    detail::fail_argument("layer.head_dim", layer.head_dim,
                          {"the HeadDim of ChunkAttention, ", head_dim});
  if (layer.dim_of_v() != value_dim) [[unlikely]]
    detail::fail_argument("layer.value_dim", layer.dim_of_v(),
                          {"the ValueDim of ChunkAttention, ", value_dim});
  check_argument(layer.num_kv_heads > 0, "layer.num_kv_heads", layer.num_kv_heads, "at least 1");
  if (layer.chunk_size != plan.chunk_size) [[unlikely]]
    detail::fail_argument("layer.chunk_size", layer.chunk_size,
                          {"the plan's chunk size, ", plan.chunk_size});
  detail::check_layer_of_plan(layer, plan);
}

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
