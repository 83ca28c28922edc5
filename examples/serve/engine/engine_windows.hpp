// The layers of the engine's model that have a window: K/V in chunks of their own, which are free
// again when the window has moved on.
#pragma once

#include <algorithm>
#include <chunkattn/cache/windowed_groups.hpp>
#include <chunkattn/cache/windowed_kv.hpp>
#include <chunkattn/chunkattn.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <variant>

#include "attention.hpp"
#include "work.hpp"

namespace serve {

template <class Tree>
class EngineWindows {
 public:
  using Layers = chunkattn::WindowedLayers<Tree>;
  using Sequence = typename Tree::Sequence;
  using Step = typename Tree::Step;

  EngineWindows(Tree& tree, std::int32_t window, std::size_t max_chunks)
      : groups_(tree, {{.window = window, .max_chunks = max_chunks}}), layers_(groups_[0]) {}

  [[nodiscard]] Layers& layers() { return layers_; }
  [[nodiscard]] const Layers& layers() const { return layers_; }
  /// The K/V of the layers, which is to travel with that of the tree.
  void set_cache(AnyCache cache) {
    std::visit(
        [this](auto* of) {
          using Cache = std::remove_pointer_t<decltype(of)>;
          kv_ = std::make_unique<chunkattn::WindowedKv<Tree, Cache>>(layers_, *of);
        },
        cache);
  }
  [[nodiscard]] chunkattn::KvCompanion<Sequence>* companion() { return kv_.get(); }
  /// Bytes of K/V that travel with a sequence of so many tokens, at most.
  [[nodiscard]] std::size_t swapped_bytes(std::size_t tokens) const {
    const auto window = static_cast<std::size_t>(layers_.options().window);
    return std::min(tokens, window - 1) * kv_->bytes_per_token();
  }

  /// Has sequences that have joined computed from where their windows are. Those that cannot be yet
  /// wait: what they lack is to come from tiers, another one is to compute it, or chunks are
  /// missing.
  template <class F>
  void resume(Group<Sequence>& group, const F& is_loading) {
    for (Sequence& sequence : group.sequences) {
      if (layers_.is_ready(sequence) || sequence.num_pending() > 0 || is_loading(sequence))
        continue;
      const std::size_t end = layers_.window_end(sequence, sequence.num_scheduled());
      if (!is_computed_again(group, sequence, end)) try_resume(sequence, end);
    }
  }
  /// A fork of what has just been computed. False if it has to wait as one that joins.
  [[nodiscard]] bool resume_fork(Sequence& fork) {
    const std::size_t all = fork.num_scheduled();
    return layers_.window_end(fork, all) == all && try_resume(fork, all);
  }
  /// Where a prompt would be resumed.
  [[nodiscard]] std::size_t find(std::span<const std::int32_t> prompt,
                                 const chunkattn::InsertOptions& options) const {
    return groups_.find(prompt, options);
  }
  [[nodiscard]] bool is_ready(const Sequence& sequence) const { return layers_.is_ready(sequence); }
  [[nodiscard]] bool has_room(const Step& step) const { return groups_.has_room(step); }
  /// Whether another prompt is likely to have room, beside those that live and have still to take
  /// what their windows need.
  [[nodiscard]] bool has_room(std::span<const std::int32_t> prompt,
                              const chunkattn::InsertOptions& options,
                              const Group<Sequence>& prefilling, std::size_t live) const {
    std::size_t needed = groups_.chunks_needed(prompt, Tree::chunk_size, options)[0] + live + 1;
    for (const Sequence& sequence : prefilling.sequences)
      needed += chunks_of_window(sequence.size()) - chunks_of_window(sequence.num_scheduled());
    return needed <= layers_.chunks_available();
  }

 private:
  // Chunks that the window of a sequence of so many tokens takes by itself.
  [[nodiscard]] std::size_t chunks_of_window(std::size_t tokens) const {
    constexpr std::size_t size = Tree::chunk_size;
    const auto window = static_cast<std::size_t>(layers_.options().window);
    return tokens <= window ? (tokens + size - 1) / size : (window + size - 2) / size + 1;
  }

  bool try_resume(Sequence& sequence, std::size_t position) {
    try {
      layers_.resume(sequence, position);
    } catch (const chunkattn::OutOfChunks&) {
      return false;
    }
    return true;
  }
  /// Whether one of the group is to compute again what a sequence lacks from `end` on. Then there
  /// is a window where the two part.
  [[nodiscard]] static bool is_computed_again(const Group<Sequence>& group,
                                              const Sequence& sequence, std::size_t end) {
    return std::any_of(group.sequences.begin(), group.sequences.end(), [&](const Sequence& other) {
      const std::size_t at = std::max(end, other.num_scheduled());
      return at < std::min(sequence.num_scheduled(), other.size()) &&
             slot_of(sequence, at) == slot_of(other, at);
    });
  }
  /// Of two sequences that are alike up to a position both have one slot there.
  [[nodiscard]] static std::pair<chunkattn::ChunkIndex, std::int32_t> slot_of(
      const Sequence& sequence, std::size_t position) {
    std::pair<chunkattn::ChunkIndex, std::int32_t> slot;
    const auto at = static_cast<std::int32_t>(position);
    sequence.for_each_run(
        {at, 1}, [&](const chunkattn::Piece& piece) { slot = {piece.chunk, piece.begin}; });
    return slot;
  }

  chunkattn::WindowedGroups<Tree> groups_;  // one: models have one window here
  Layers& layers_;
  std::unique_ptr<chunkattn::KvCompanion<Sequence>> kv_;
};

}  // namespace serve
