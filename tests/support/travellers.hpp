// A model of one layer that sees all and of groups with windows, without kernels. What a row of K/V
// holds is a function of its path, so that each can be checked wherever it has travelled.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "chunkattn/attention_plan.hpp"
#include "chunkattn/cache/windowed_kv.hpp"
#include "chunkattn/cache/windowed_layers.hpp"
#include "chunkattn/debug/tree.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/prefix_tree.hpp"
#include "chunkattn/transfer/transfer.hpp"

namespace test::travellers {

using namespace chunkattn;

/// \tparam T  of K/V
template <class Tree, class T>
class Travellers {
 public:
  using Sequence = typename Tree::Sequence;
  using Cache = KvCache<Cpu, T>;
  using Layers = WindowedLayers<Tree>;
  static constexpr KvCacheOptions shape{
      .num_layers = 2, .num_kv_heads = 2, .head_dim = 16, .value_dim = 8};

  struct Group {
    Group(Tree& tree, int window, std::size_t max_chunks, std::optional<std::size_t> max_cached)
        : layers(tree,
                 {.window = window, .max_chunks = max_chunks, .max_cached_chunks = max_cached}),
          cache(layers, shape),
          kv(layers, cache) {}
    Layers layers;
    Cache cache;
    WindowedKv<Tree, Cache> kv;
  };

  Travellers(const std::vector<int>& windows, std::size_t max_chunks,
             std::size_t max_window_chunks = 1000, std::optional<std::size_t> max_cached = {},
             TreeOptions options = {})
      : tree({.max_chunks = max_chunks}, options), cache(tree, shape) {
    for (const int window : windows) {
      groups.push_back(std::make_unique<Group>(tree, window, max_window_chunks, max_cached));
      companions.push_back(&groups.back()->kv);
    }
  }

  [[nodiscard]] bool is_ready(const Sequence& one) const {
    return std::all_of(groups.begin(), groups.end(),
                       [&](const auto& group) { return group->layers.is_ready(one); });
  }
  /// Where all groups have the window.
  [[nodiscard]] std::size_t end(const Sequence& one) const {
    return detail::end_of_all(companions, one, Sequence::whole);
  }
  bool make_ready(Sequence& one) {
    if (is_ready(one)) return true;
    if (one.num_pending() > 0) return false;
    const std::size_t position = end(one);
    for (const auto& group : groups)
      if (group->layers.resume(one, position) != position) return false;
    return true;
  }
  /// Computes at most so many rows of it; commits an output if they are the last.
  bool step(Sequence& one, std::size_t rows) {
    return step(one, rows, [] { return true; });
  }
  /// \param commits  called when the step has run: whether its output is to be committed
  template <class F>
  bool step(Sequence& one, std::size_t rows, const F& commits) {
    auto step = tree.begin_step();
    if (!make_ready(one)) return false;
    const std::size_t begin = one.num_scheduled();
    if (!step.add(one, rows)) return false;
    const auto view = plan.build(step);
    const auto paths = paths_of(one);
    write(cache, view, paths, begin, 0);
    for (std::size_t g = 0; g < groups.size(); ++g)
      write(groups[g]->cache, groups[g]->layers.view(view), paths, begin, g + 1);
    num_rows += to_size(view.num_rows);
    auto finished = std::move(step).finish();
    if (!commits()) return true;
    for (const auto& row : finished.rows())
      finished.commit(row, static_cast<int>(paths.back() % 3));
    return true;
  }
  /// All that is known of it, so many rows at a time, up to its next output.
  void compute(Sequence& one, std::size_t rows = 1000) {
    for (const std::size_t size = one.size(); one.size() == size;) REQUIRE(step(one, rows));
  }
  Sequence answer(const std::vector<int>& prompt, std::size_t rows = 1000) {
    Sequence one = tree.insert(prompt);
    compute(one, rows);
    return one;
  }

  /// All K/V that a sequence or a group has is that of its path; what no token has is NaN.
  void check(const Sequence& one) {
    const auto paths = paths_of(one);
    const TokenRange written{0, static_cast<std::int32_t>(one.num_written())};
    one.for_each_run(written, [&](const Piece& piece) {
      for (int i = 0; i < piece.length; ++i) {
        const std::uint64_t path = paths[to_size(piece.position + i)];
        check_row(cache, piece.chunk, piece.begin + i, path, 0);
        for (std::size_t g = 0; g < groups.size(); ++g) {
          const auto& chunks = chunks_of(g);
          const ChunkIndex c = chunks.find(piece.chunk);
          if (c != no_chunk && chunks.written(slot(c, piece.begin + i)) != 0)
            check_row(groups[g]->cache, c, piece.begin + i, path, g + 1);
        }
      }
    });
  }
  void check() {
    check_invariants(tree);
    for (std::size_t g = 0; g < groups.size(); ++g) {
      REQUIRE(detail::WindowAccess::group(groups[g]->layers).is_consistent());
      const auto& chunks = chunks_of(g);
      for (ChunkIndex c = 0; c < static_cast<ChunkIndex>(chunks.high_water()); ++c)
        for (std::int32_t i = 0; i < Tree::chunk_size; ++i)
          if (chunks.known(slot(c, i)) == 0) fill(groups[g]->cache, c, i, nan());
    }
  }
  /// Nothing is cached, and no sequence lives: what lies in memory is no token's.
  void poison() {
    const auto poison_all = [](Cache& kv) {
      for (ChunkIndex c = 0; c < static_cast<ChunkIndex>(kv.num_chunks()); ++c)
        for (std::int32_t i = 0; i < Tree::chunk_size; ++i) fill(kv, c, i, nan());
    };
    poison_all(cache);
    for (const auto& group : groups) poison_all(group->cache);
  }
  /// How many rows a group has of a sequence's first tokens.
  [[nodiscard]] std::size_t num_rows_of(std::size_t g, const Sequence& one) {
    const auto rows =
        gather_rows(one, {0, static_cast<std::int32_t>(one.num_written())}, groups[g]->kv);
    return rows.bytes.size() / rows.bytes_per_token;
  }
  [[nodiscard]] std::size_t recomputed() const {
    std::size_t all = 0;
    for (const auto& group : groups) all += group->layers.stats().recomputed_tokens;
    return all;
  }
  [[nodiscard]] const detail::WindowChunks& chunks_of(std::size_t g) const {
    return detail::WindowAccess::group(groups[g]->layers).chunks();
  }

  [[nodiscard]] static std::size_t to_size(std::int64_t n) { return static_cast<std::size_t>(n); }

  Tree tree;
  Cache cache;
  std::vector<std::unique_ptr<Group>> groups;
  KvCompanions<Sequence> companions;
  AttentionPlan plan;
  std::size_t num_rows = 0;

 private:
  [[nodiscard]] static detail::WindowChunks::Slots slot(ChunkIndex c, std::int32_t offset) {
    return {c, offset >> 6, std::uint64_t{1} << (offset & 63)};
  }
  [[nodiscard]] static float nan() { return std::numeric_limits<float>::quiet_NaN(); }
  [[nodiscard]] static std::vector<std::uint64_t> paths_of(const Sequence& one) {
    std::vector<std::uint64_t> paths;
    std::uint64_t path = 1;
    for (const int token : one.tokens()) {
      path = (path * 31 + static_cast<std::uint64_t>(token)) * 0x9e3779b97f4a7c15u;
      path ^= path >> 29;
      paths.push_back(path);
    }
    return paths;
  }
  /// Of the row of a path: which = 0 for K, 1 for V, 2 and 3 for scales.
  [[nodiscard]] static float value(std::uint64_t path, std::size_t group, int layer, int head,
                                   int which, int i) {
    std::uint64_t x = path + group * 10000 + to_size(layer * 1000 + head * 100 + which * 20 + i);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    return static_cast<float>((x >> 40) % 127);
  }
  template <class F>
  static void for_each_element(Cache& kv, ChunkIndex c, std::int32_t offset, const F& f) {
    for (int l = 0; l < shape.num_layers; ++l) {
      const auto view = kv.layer(l);
      for (int h = 0; h < shape.num_kv_heads; ++h) {
        for (int i = 0; i < shape.head_dim; ++i) f(view.k_row(c, h, offset)[i], l, h, 0, i);
        for (int i = 0; i < shape.dim_of_v(); ++i) f(view.v_row(c, h, offset)[i], l, h, 1, i);
        if constexpr (has_row_scales<T>) {
          f(*view.k_row_scale(c, h, offset), l, h, 2, 0);
          f(*view.v_row_scale(c, h, offset), l, h, 3, 0);
        }
      }
    }
  }
  static void fill(Cache& kv, ChunkIndex c, std::int32_t offset, float with) {
    for_each_element(kv, c, offset, [&](auto& element, int, int, int, int) {
      using E = std::remove_reference_t<decltype(element)>;
      if constexpr (std::is_same_v<E, std::int8_t>)
        element = -128;
      else
        element = from_float<E>(with);
    });
  }
  static void copy(Cache& kv, const PlanView::RowCopy& rows, int t) {
    std::vector<float> values;
    for_each_element(
        kv, rows.source_chunk, rows.source_begin + t,
        [&](auto& element, int, int, int, int) { values.push_back(static_cast<float>(element)); });
    auto value = values.begin();
    for_each_element(kv, rows.target_chunk, rows.target_begin + t,
                     [&](auto& element, int, int, int, int) {
                       element = static_cast<std::remove_reference_t<decltype(element)>>(*value++);
                     });
  }
  void write(Cache& kv, const LiveView& view, const std::vector<std::uint64_t>& paths,
             std::size_t begin, std::size_t group) {
    for (int i = 0; i < view.num_copies; ++i)
      for (int t = 0; t < view.copies[i].length; ++t) copy(kv, view.copies[i], t);
    for (int row = 0; row < view.num_rows; ++row) {
      const auto [c, offset] = view.writes[row];
      if (c == no_chunk) continue;
      for_each_element(kv, c, offset, [&](auto& element, int l, int h, int which, int at) {
        using E = std::remove_reference_t<decltype(element)>;
        element = static_cast<E>(value(paths[begin + to_size(row)], group, l, h, which, at));
      });
    }
  }
  static void check_row(Cache& kv, ChunkIndex c, std::int32_t offset, std::uint64_t path,
                        std::size_t group) {
    bool same = true;
    for_each_element(kv, c, offset, [&](auto& element, int l, int h, int which, int at) {
      same = same && static_cast<float>(element) == value(path, group, l, h, which, at);
    });
    if (!same) FAIL("group ", group, ", chunk ", c, ", slot ", offset, ": another token's K/V");
  }
};

}  // namespace test::travellers
