// WindowPoints: where paths can be resumed, of a group of layers with a sliding window, for those
// who follow it (events/).
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

#include "../../detail/support/config.hpp"
#include "../../detail/tree/core.hpp"
#include "../../events/detail/resume_points.hpp"
#include "window_chunks.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Keeps a token if its slot has K/V of the group.
class WindowPoints final : public ResumePoints, private FreeSink {
 public:
  /// \param held  positions before a row that it reads
  WindowPoints(const TreeCore& core, WindowChunks& chunks, std::int32_t held)
      : ResumePoints(held), core_(core), chunks_(chunks) {}

  void tell_kept(ResumeWatch& to, NodeIndex n, std::int32_t first,
                 std::int32_t count) const override {
    core_.topology.for_each_run(
        core_.topology.node(n), first, count,
        [&](ChunkIndex of_tree, std::int32_t offset, std::int32_t run, std::int32_t done) {
          const ChunkIndex c = chunks_.find(of_tree);
          if (c == no_chunk) return;
          WindowChunks::for_each_word(c, offset, run, [&](const WindowChunks::Slots& slots) {
            for_each_run(slots.word, chunks_.written(slots), [&](std::int32_t at, std::int32_t k) {
              to.on_kept(*this, n, first + done + at - offset, k, true);
            });
          });
        });
  }
  /// K/V of slots has come, or is that of no token any more.
  void tell(std::span<const WindowChunks::Slots> all, bool is_kept) const noexcept {
    if (is_watched()) [[unlikely]]
      for (const WindowChunks::Slots& slots : all) tell_slots(slots, is_kept);
  }
  /// The group ends: nothing is kept any more.
  void end() noexcept {
    if (!is_watched()) return;
    for (std::size_t c = 0; c < chunks_.high_water(); ++c) (*this)(static_cast<ChunkIndex>(c));
    chunks_.forget_all();
  }

 private:
  // f(first slot of a chunk, count) for each run of bits of a word.
  template <class F>
  static void for_each_run(std::int32_t word, std::uint64_t bits, const F& f) {
    while (bits != 0) {
      const int first = std::countr_zero(bits), count = std::countr_one(bits >> first);
      f(64 * word + first, count);
      if (first + count == 64) return;
      bits &= ~std::uint64_t{0} << (first + count);
    }
  }
  void tell_slots(const WindowChunks::Slots& slots, bool is_kept) const noexcept {
    const ChunkIndex of_tree = chunks_.of_tree(slots.chunk);
    if (of_tree == no_chunk) return;
    const Topology& topology = core_.topology;
    for_each_run(slots.word, slots.mask, [&](std::int32_t at, std::int32_t run) {
      topology.for_each_node_in(of_tree, [&](NodeIndex n, std::int32_t first) {
        const TreeNode& node = topology.node(n);
        const std::int32_t offset = topology.geometry.offset(node.begin + first);
        const std::int32_t begin = (std::max)(at, offset);
        const std::int32_t end = (std::min)(at + run, offset + node.length - first);
        if (begin < end) ResumePoints::tell(n, first + begin - offset, end - begin, is_kept);
      });
    });
  }
  // A chunk of the group is about to be free.
  void operator()(ChunkIndex c) override {
    WindowChunks::for_each_word(c, 0, core_.topology.geometry.size, [&](const auto& slots) {
      tell_slots({c, slots.word, chunks_.written(slots)}, /*is_kept=*/false);
    });
  }
  void set_watched(bool is_watched) noexcept override {
    chunks_.set_watch(is_watched ? this : nullptr);
  }

  const TreeCore& core_;
  WindowChunks& chunks_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
