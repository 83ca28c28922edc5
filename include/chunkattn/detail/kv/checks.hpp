// Checks, of both backends, of a layer's K/V and the plan that it is used with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "../../kv_view.hpp"
#include "../../plan_view.hpp"
#include "../plan/check_current.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"
#include "write_check.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Checks the members of scales that several rows have.
template <class T>
void check_shared_scales(const KvView<T>& layer) {
  check_argument(layer.scales == KvScales::per_head || layer.scales == KvScales::per_layer,
                 "layer.scales", static_cast<int>(layer.scales),
                 "KvScales::per_row, per_head or per_layer");
  const char* const scales = name_of(layer.scales);
  const auto check_stride = [&](const char* name, std::int64_t elements) {
    check_argument(elements == 0, name, elements, {"0 where scales are ", scales});
  };
  check_stride("layer.scale_stride_chunk", layer.scale_stride_chunk);
  check_stride("layer.scale_stride_head", layer.scale_stride_head);
  const auto check_slabs = [&](const char* name, const void* slabs) {
    check_argument(slabs == nullptr, name, "given", {"null where scales are ", scales});
  };
  check_slabs("layer.k_scale_slabs", layer.k_scale_slabs);
  check_slabs("layer.v_scale_slabs", layer.v_scale_slabs);
}

/// Checks that each row has a scale of its own, which `what` reads or writes.
template <class T>
void check_row_scales(const KvView<T>& layer, const char* what) {
  if constexpr (has_row_scales<T>)
    if (layer.scales != KvScales::per_row) [[unlikely]]
      fail_argument("layer.scales", name_of(layer.scales), {"per_row: ", what});
}

/// Checks that the layer has memory and, where both have a tree_id, that it is of the plan's tree.
template <class T>
void check_layer_of_plan(const KvView<T>& layer, const PlanView& plan) {
  check_argument(layer.tree_id == plan.tree_id || layer.tree_id == 0 || plan.tree_id == 0, "layer",
                 "of another tree", "the K/V memory of the plan's tree: a KvCache made for it");
  check_argument(
      layer.num_chunks > 0 || layer.k != nullptr, "layer.num_chunks", layer.num_chunks,
      "memory for the plan's chunks: take the layer's view after the step is built, of a "
      "cache that follows its tree or was grown");
  const auto check_strides = [&](const char* of, std::int64_t token, std::int64_t chunk,
                                 std::int64_t head) {
    const auto check = [of](std::int64_t elements, std::int32_t count, const char* unit) {
      if (elements == 0 && count > 1) [[unlikely]]
        fail_argument(joined({"layer.", of, unit}), 0, {"elements from a ", unit, " to the next"});
    };
    check(token, layer.chunk_size, "token");
    check(chunk, layer.num_chunks, "chunk");
    check(head, layer.num_kv_heads, "head");
  };
  check_strides("stride_", layer.stride_token, layer.stride_chunk, layer.stride_head);
  if (layer.value_dim != 0)
    check_strides("v_stride_", layer.v_stride_token, layer.v_stride_chunk, layer.v_stride_head);
  if constexpr (has_row_scales<T>) {
    if (layer.scales == KvScales::per_row)
      check_strides("scale_stride_", 1, layer.scale_stride_chunk, layer.scale_stride_head);
    else
      check_shared_scales(layer);
  }
  // Kernels load vectors at any element; an element itself must be aligned.
  const auto check = [](const char* name, const auto* start, const void* slabs, const char* what,
                        const char* lies) {
    if (start == nullptr && slabs == nullptr) [[unlikely]]
      fail_argument(name, start, {"memory of ", what});
    if (start != nullptr && slabs != nullptr) [[unlikely]]
      fail_argument(name, start,
                    {"null, since ", what, lies, " in slabs: a share of the heads is ",
                     "heads(first, count)"});
    check_argument(reinterpret_cast<std::uintptr_t>(start) % sizeof(*start) == 0, name,
                   "misaligned", "an address that is a multiple of the element's size");
  };
  check("layer.k", layer.k, layer.k_slabs, "K", " lies");
  check("layer.v", layer.v, layer.v_slabs, "V", " lies");
  if constexpr (has_row_scales<T>) {
    check("layer.k_scale", layer.k_scale, layer.k_scale_slabs, "K's scales", " lie");
    check("layer.v_scale", layer.v_scale, layer.v_scale_slabs, "V's scales", " lie");
  }
}

/// Throws for a view that has too few chunks: says how many the plan needs.
template <class T>
[[noreturn]] CHUNKATTN_COLD void fail_chunk(const KvView<T>& view, const PlanView& plan,
                                            ChunkIndex chunk) {
  check_argument(chunk >= 0, "plan's chunk", chunk, "0 to layer.num_chunks - 1");
  for (int s = 0; s < plan.num_segments; ++s)
    for (int p = 0; p < plan.segments[s].num_pieces; ++p)
      chunk = (std::max)(chunk, plan.pieces[plan.segments[s].piece_begin + p].chunk);
  if (plan.writes != nullptr)  // which a plan made by hand for run() alone may lack
    for (int i = 0; i < plan.num_rows; ++i) chunk = (std::max)(chunk, plan.writes[i].chunk);
  for (int i = 0; i < plan.num_copies; ++i)
    chunk = (std::max)({chunk, plan.copies[i].source_chunk, plan.copies[i].target_chunk});
  fail_argument("layer.num_chunks", view.num_chunks,
                {"at least ", std::int64_t{chunk} + 1, ", which this plan needs: ",
                 view.tree_id != 0 ? "take the layer's view after the step is built"
                                   : "memory of your own, or a cache without a tree, is to have "
                                     "tree.num_chunks() chunks in each step"});
}

/// Checks that every piece of the plan is within the view's chunks.
template <class T>
void check_pieces(const KvView<T>& view, const PlanView& plan) {
  for (int s = 0; s < plan.num_segments; ++s) {
    const Segment& segment = plan.segments[s];
    const Piece* const piece = plan.pieces + segment.piece_begin;
    for (int p = 0; p < segment.num_pieces; ++p) {
      if (piece[p].chunk < 0 || piece[p].chunk >= view.num_chunks) [[unlikely]]
        fail_chunk(view, plan, piece[p].chunk);
      if (piece[p].begin < 0 || piece[p].length < 0 ||
          piece[p].begin > view.chunk_size - piece[p].length) [[unlikely]]
        fail_argument("plan's piece.begin", piece[p].begin,
                      {"positions of a chunk, 0 to ", view.chunk_size - 1,
                       ", as many as piece.length = ", piece[p].length});
    }
  }
}

/// Checks that every write target and row copy is within the view's chunks.
template <class T>
void check_writes(const KvView<T>& view, const PlanView& plan) {
  const auto check_chunk = [&](ChunkIndex chunk) {
    if (chunk < 0 || chunk >= view.num_chunks) [[unlikely]]
      fail_chunk(view, plan, chunk);
  };
  const auto fits = [&](int begin, int length) {
    return begin >= 0 && length >= 0 && begin <= view.chunk_size - length;
  };
  for (int i = 0; i < plan.num_rows; ++i) {
    const WriteTarget& target = plan.writes[i];
    if (target.chunk == no_chunk) continue;
    check_chunk(target.chunk);
    check_argument(fits(target.offset, 1), "plan's write offset", target.offset,
                   {"0 to layer.chunk_size - 1, ", view.chunk_size - 1});
  }
  for (int i = 0; i < plan.num_copies; ++i) {
    const RowCopy& copy = plan.copies[i];
    check_chunk(copy.source_chunk);
    check_chunk(copy.target_chunk);
    check_argument(fits(copy.source_begin, copy.length) && fits(copy.target_begin, copy.length),
                   "plan's row copy", copy.length, "rows within a chunk");
  }
}

/// Memory of an array.
struct Bytes {
  std::uintptr_t begin, end;

  Bytes(std::uintptr_t first, std::uintptr_t behind) noexcept : begin(first), end(behind) {}
  template <class T>
  explicit Bytes(std::span<T> array) noexcept
      : begin(reinterpret_cast<std::uintptr_t>(array.data())), end(begin + array.size_bytes()) {}

  [[nodiscard]] bool touches(Bytes other) const noexcept {
    return begin < other.end && other.begin < end;
  }
};

/// Checks that `out` is memory of its own, or `q` itself where their rows have as many bytes: then
/// what writes a row has read it, and nothing else reads it.
template <class Q, class Out>
void check_out_beside_q(std::span<const Q> q, std::span<Out> out) {
  const Bytes of_q(q), of_out(out);
  check_argument(!of_q.touches(of_out) || (of_q.begin == of_out.begin && of_q.end == of_out.end),
                 "out", "memory of q", "memory of its own, or q itself if it has as many bytes");
}

/// Checks that `lse` is memory of its own.
template <class Q, class Out>
void check_lse_beside(std::span<float> lse, std::span<const Q> q, std::span<Out> out) {
  const Bytes of_lse(lse);
  check_argument(!of_lse.touches(Bytes(q)), "lse", "memory of q", "memory of its own");
  check_argument(!of_lse.touches(Bytes(out)), "lse", "memory of out", "memory of its own");
}

/// Checks that writing rows of V does not overwrite K.
template <class T>
void check_own_v(const KvView<T>& layer) {
  check_argument(layer.value_dim != 0 || layer.v_slabs != layer.k_slabs ||
                     (layer.k_slabs == nullptr && !rows_overlap(layer.k, layer.v, layer.head_dim)),
                 "layer.v", "K's memory", "memory of V of its own, or V in K with a value_dim");
  if constexpr (has_row_scales<T>)
    check_argument((layer.v_scale == layer.k_scale && layer.v_scale_slabs == layer.k_scale_slabs) ==
                       layer.has_v_in_k(),
                   "layer.v_scale", layer.has_v_in_k() ? "apart" : "K's scales",
                   "memory of V's scales of its own, or K's scales if V is in K");
}

/// Explains, at compile time, a call of ChunkAttention with a cache in the place of a layer.
template <class Cache>
constexpr void explain_layer() {
  static_assert(!KvProvider<Cache>,
                "ChunkAttention: write cache.layer(l), the K and V of one layer, in place of the "
                "whole cache");
}

/// With KvCacheOptions::check_writes: throws unless the plan's step has written the layer.
template <class T>
CHUNKATTN_INLINE void check_written(const KvView<T>& layer, const PlanView& plan) {
  if (auto* const check = static_cast<WriteCheck*>(layer.write_check)) [[unlikely]]
    check->check_read(plan.step_number, layer.layer, layer.first_head, layer.num_kv_heads);
}
/// With KvCacheOptions::check_writes: notes that the plan's step has written the layer.
template <class T>
CHUNKATTN_INLINE void note_written(const KvView<T>& layer, const PlanView& plan) {
  if (auto* const check = static_cast<WriteCheck*>(layer.write_check)) [[unlikely]]
    check->wrote(plan.step_number, layer.layer, layer.first_head, layer.num_kv_heads);
}

}  // namespace detail

/// For KvCacheOptions::check_writes: says that a kernel of the engine's, or a captured graph, has
/// written what the plan's step writes to this layer, or is queued to, as ChunkAttention::write()
/// does itself. On any thread. Does nothing if that option is off or the memory is not a KvCache's.
/// \throws InvalidArgument for a plan that is out of date or a layer of another tree
template <class T>
void mark_written(const KvView<T>& layer, const LiveView& plan) {
  detail::check_current(plan);
  detail::check_layer_of_plan(layer, plan);
  detail::note_written(layer, plan);
}

CHUNKATTN_NAMESPACE_END
