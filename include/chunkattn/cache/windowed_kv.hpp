// WindowedKv: K/V of windowed layers that travels with a sequence: swapped, saved, in tiers
// (docs/windows.md).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../detail/kv/checks.hpp"
#include "../detail/support/check.hpp"
#include "../detail/support/config.hpp"
#include "../kv_view.hpp"
#include "../plan_view.hpp"
#include "../transfer/companion.hpp"
#include "../transfer/detail/slots.hpp"
#include "../transfer/transfer.hpp"
#include "../tree_options.hpp"
#include "detail/window_group.hpp"
#include "detail/window_rows.hpp"
#include "windowed_layers.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// K/V of a group of windowed layers as a companion of the tree's: swap_out(), resume() and
/// gather_rows() take it. Of a sequence the window before its next row travels. A sequence that
/// comes back with it is_ready(), and computes no token again; without a part of it, it is computed
/// from the last position on whose window is there.
///
/// Its calls are calls of the tree. Group and cache stay where they are and outlive it.
template <class Tree, KvProvider Cache>
class WindowedKv final : public KvCompanion<typename Tree::Sequence> {
  using Element = detail::cache_element<Cache>;

 public:
  using Layers = WindowedLayers<Tree>;       ///< a group of windowed layers
  using Sequence = typename Tree::Sequence;  ///< a sequence of the tree

  /// \param cache  the group's, made with it
  /// \throws InvalidArgument for another cache
  WindowedKv(WindowedLayers<Tree>& layers, Cache& cache) : layers_(layers), cache_(cache) {
    if constexpr (requires { cache.tree_id(); })
      detail::check_argument(
          cache.tree_id() == 0 || cache.tree_id() == detail::WindowAccess::id(layers), "cache",
          "of another tree or group", "the K/V memory of the group");
  }

  [[nodiscard]] std::string format() const override {
    const auto& shape = cache_.options();
    const auto [k, v] = detail::row_bytes(cache_);
    std::string text = "windowed K/V 1";
    for (const auto number :
         {std::size_t{0x01020304}, detail::to_size(layers_.options().window),
          detail::to_size(shape.num_layers), detail::to_size(shape.num_kv_heads), k, v})
      text += ' ' + std::to_string(number);
    return text + ' ' + detail::element_text<Element>();
  }
  [[nodiscard]] std::size_t bytes_per_token() const override { return kv_bytes(cache_, 1); }

  void gather(std::span<const Piece> places, CompanionRows& rows) override {
    const Views views(cache_);
    for (const Piece& piece : places)
      detail::for_each_window_row(
          group().chunks(), piece, [&](ChunkIndex chunk, std::int32_t slot, std::int32_t position) {
            std::byte* to = rows.add(position);
            views.for_each_part(chunk, slot, [&](const void* part, std::size_t bytes) {
              detail::copy_out(cache_, part, to, bytes);
              to += bytes;
            });
          });
  }
  /// What stays cached: before a position at which prompts part or ended.
  void gather_lasting(std::span<const Piece> places, CompanionRows& rows) override {
    for (const Piece& piece : places) {
      const ChunkIndex c = group().chunks().find(piece.chunk);
      if (c != no_chunk && group().chunks().is_kept(c)) gather({&piece, 1}, rows);
    }
  }
  /// Of whole windows the last one, and what comes after it; with the row before, for who goes on
  /// a row earlier.
  void trim(CompanionRows& rows) const override {
    for (std::size_t i = rows.ranges.size(); i-- > 0;) {
      const std::int32_t first = needed(detail::to_size(rows.ranges[i].end()), {}).begin;
      if (rows.ranges[i].begin <= first)
        return detail::drop_rows_before(rows, (std::max)(0, first - 1));
    }
  }
  [[nodiscard]] bool reserve(Sequence& sequence, const CompanionRows& rows) override {
    for (const TokenRange range : rows.ranges) detail::check_known(sequence, range);
    return group().hold_rows(detail::WindowAccess::idle(layers_, sequence), rows.ranges);
  }
  void scatter(Sequence& sequence, const CompanionRows& rows) override {
    detail::check_rows(*this, rows, sequence.num_written());
    (void)detail::WindowAccess::idle(layers_, sequence);
    const Views views(cache_);
    const std::byte* first = rows.bytes.data();
    for (const TokenRange range : rows.ranges) {
      const auto copy = [&](ChunkIndex chunk, std::int32_t slot, std::int32_t position) {
        const std::byte* from =
            first + detail::to_size(position - range.begin) * rows.bytes_per_token;
        views.for_each_part(chunk, slot, [&](void* part, std::size_t bytes) {
          detail::copy_in(cache_, part, from, bytes);
          from += bytes;
        });
      };
      sequence.for_each_run(
          range, [&](const Piece& piece) { detail::load_window_rows(group(), piece, copy); });
      first += detail::to_size(range.length) * rows.bytes_per_token;
    }
  }
  [[nodiscard]] std::size_t end(const Sequence& sequence, std::size_t limit) const override {
    return layers_.window_end(sequence, limit);
  }
  [[nodiscard]] TokenRange needed(std::size_t position, TokenRange) const override {
    const auto next = static_cast<std::int32_t>(position);
    const std::int32_t begin = (std::max)(0, next - layers_.options().window + 1);
    return {begin, next - begin};
  }
  void resume(Sequence& sequence, std::size_t position) override {
    layers_.resume(sequence, position);
  }

 private:
  /// Of all layers, with memory for all chunks of the group.
  class Views {
   public:
    explicit Views(Cache& cache) : row_bytes_(detail::row_bytes(cache)) {
      for (int l = 0; l < cache.options().num_layers; ++l) {
        views_.push_back(detail::host_layer(cache, l));
        detail::check_row_scales(views_.back(), "what travels with a row is its own");
      }
    }
    /// Calls f(memory, bytes) for all that a token has, in the order in which a row has it.
    template <class F>
    void for_each_part(ChunkIndex chunk, std::int32_t slot, const F& f) const {
      for (const auto& view : views_)
        for (int head = 0; head < view.num_kv_heads; ++head) {
          f(view.k_row(chunk, head, slot), row_bytes_.first);
          if (row_bytes_.second > 0) f(view.v_row(chunk, head, slot), row_bytes_.second);
          if constexpr (has_row_scales<Element>) {
            f(view.k_row_scale(chunk, head, slot), sizeof(float));
            if (row_bytes_.second > 0) f(view.v_row_scale(chunk, head, slot), sizeof(float));
          }
        }
    }

   private:
    std::pair<std::size_t, std::size_t> row_bytes_;
    std::vector<decltype(detail::host_layer(std::declval<Cache&>(), 0))> views_;
  };

  [[nodiscard]] detail::WindowGroup& group() const { return detail::WindowAccess::group(layers_); }

  WindowedLayers<Tree>& layers_;
  Cache& cache_;
};

CHUNKATTN_NAMESPACE_END
