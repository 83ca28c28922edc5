// WindowSearch: where a path can be resumed, of a group of layers with a sliding window, and how
// many of the group's chunks a prompt needs from there on.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/tree/core.hpp"
#include "window_chunks.hpp"
#include "window_copies.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Reads the tree and the group's chunks.
class WindowSearch {
 public:
  /// \param held  positions before a row that it reads
  WindowSearch(const TreeCore& core, const WindowChunks& chunks, std::int32_t held)
      : core_(core), chunks_(chunks), held_(held) {}

  /// Before nearest() is called often: makes it fast where there are many copies.
  void index_copies() { copies_.update(core_); }
  /// The first position that a row at `next` reads.
  [[nodiscard]] std::int32_t begin_of(std::int32_t next) const noexcept {
    return (std::max)(0, next - held_);
  }
  /// The last position up to `limit` of the path to `last` whose window has K/V, or gets it by
  /// copies of a step that is still to be built.
  [[nodiscard]] std::int32_t nearest(NodeIndex last, std::int32_t limit) const noexcept {
    std::int32_t position = limit, needed = begin_of(limit);
    for (NodeIndex i = last; i != root_node && core_.topology.node(i).end() > needed;
         i = core_.topology.node(i).parent) {
      const TreeNode& n = core_.topology.node(i);
      std::int32_t end = (std::min)(n.end(), position);
      if (end <= n.position) continue;
      ChunkIndex chunk = core_.topology.chunk_of(n, n.begin + end - 1 - n.position);
      while (end > (std::max)(n.position, needed)) {
        const std::int32_t last_slot =
            core_.topology.geometry.offset(n.begin + end - 1 - n.position);
        const std::int32_t count = (std::min)(last_slot + 1, end - n.position);
        const std::int32_t missing = num_missing(chunk, last_slot + 1 - count, count);
        if (missing > 0 && end - count + missing <= needed)
          break;  // those that are needed are there
        end -= missing > 0 ? count - missing + 1 : count;
        if (missing > 0) {
          position = end;
          needed = begin_of(position);
        }
        if (core_.topology.geometry.offset(n.begin + end - n.position) == 0)
          chunk = core_.chunk_table[chunk].prev;
      }
    }
    return position;
  }
  /// Whether a chunk of the tree, or none, has one of the group that is not available.
  [[nodiscard]] bool is_held(ChunkIndex of_tree) const noexcept {
    const ChunkIndex c = of_tree == no_chunk ? no_chunk : chunks_.find(of_tree);
    return c != no_chunk && chunks_.num_holds(c) > 0;
  }
  /// Calls f(const RowCopy&) for copies into a chunk of the tree that no step has yet, from chunks
  /// that the group has; maybe more than once.
  template <class F>
  void for_each_source(ChunkIndex of_tree, const F& f) const {
    copies_.for_each(core_, of_tree, [&](const PendingCopy& copy) {
      if (copy.step != 0 && !core_.steps.is_void(copy.step)) return;
      if (chunks_.find(copy.rows.source_chunk) != no_chunk) f(copy.rows);
    });
  }
  /// Of the available chunks, those that a prompt takes at most, from where it is resumed until it
  /// is computed.
  /// \param match     what insert() shares of it
  /// \param size      of the prompt
  /// \param position  where it is resumed, or later if others compute more of it until then
  /// \param rows      of it that are in steps at once, at most
  [[nodiscard]] std::size_t chunks_needed(const PathMatch& match, std::int32_t size,
                                          std::int32_t position, std::int32_t rows) const {
    // What the tree evicts for the prompt may leave it more room in its first chunk.
    return (std::max)(chunks_needed(match, size, position, rows, core_.room_at(match)),
                      chunks_needed(match, size, position, rows, slots_after(match)));
  }

 private:
  /// Path positions in one chunk, and how many available chunks they take.
  struct Part {
    ChunkIndex of_tree;
    std::int32_t begin, end;
    std::size_t taken;
  };

  // Slots after a match in its last chunk, free or not.
  [[nodiscard]] std::int32_t slots_after(const PathMatch& match) const noexcept {
    const auto& geometry = core_.topology.geometry;
    const std::int32_t offset = geometry.offset(core_.topology.node(match.last).begin + match.used);
    return offset == 0 ? 0 : geometry.size - offset;
  }
  // Where so many slots after the match are the prompt's.
  [[nodiscard]] std::size_t chunks_needed(const PathMatch& match, std::int32_t size,
                                          std::int32_t position, std::int32_t rows,
                                          std::int32_t room) const {
    const Array<Part> parts = parts_of(match, size, begin_of(position), room);
    std::size_t needed = 0, most = 0;
    for (std::size_t first = 0, next = 0; first < parts.size(); ++first) {
      // The steps that begin last of those whose windows touch the first part.
      const std::int64_t end = std::int64_t{parts[first].end} - 1 + held_ + rows;
      for (; next < parts.size() && parts[next].begin < end; ++next) needed += parts[next].taken;
      most = (std::max)(most, needed);
      needed -= parts[first].taken;
    }
    return most;
  }
  // The parts of a prompt from a position on, those in chunks that insert() is to take included.
  [[nodiscard]] Array<Part> parts_of(const PathMatch& match, std::int32_t size, std::int32_t begin,
                                     std::int32_t room) const {
    Array<Part> parts;
    const auto add = [&](ChunkIndex of_tree, std::int32_t first, std::int32_t end) {
      if (of_tree != no_chunk && !parts.empty() && parts.back().of_tree == of_tree)
        parts.back().end = end;
      else
        parts.push_back({of_tree, first, end, is_held(of_tree) ? 0u : 1u});
    };
    Array<NodeIndex> nodes;  // last first
    for (NodeIndex i = match.last; i != root_node && core_.topology.node(i).end() > begin;
         i = core_.topology.node(i).parent)
      nodes.push_back(i);
    for (std::size_t k = nodes.size(); k-- > 0;) {
      const TreeNode& n = core_.topology.node(nodes[k]);
      const std::int32_t first = (std::max)(n.position, begin);
      core_.topology.for_each_run(
          n, first - n.position, (std::min)(n.end(), match.length) - first,
          [&](ChunkIndex c, std::int32_t, std::int32_t count, std::int32_t done) {
            add(c, first + done, first + done + count);
          });
    }
    std::int32_t next = match.length;
    room = (std::min)(room, size - next);
    if (room > 0) {
      const TreeNode& n = core_.topology.node(match.last);
      add(core_.topology.chunk_of(n, n.begin + match.used - 1), next, next + room);
      next += room;
    }
    for (std::int32_t end; next < size; next = end) {
      end = (std::min)(size, next + core_.topology.geometry.size);
      add(no_chunk, next, end);
    }
    return parts;
  }
  // Of `count` slots from `first` on, how many there are up to the last one without K/V. A fork has
  // what its copies are to bring.
  [[nodiscard]] std::int32_t num_missing(ChunkIndex of_tree, std::int32_t first,
                                         std::int32_t count) const noexcept {
    const bool is_target = core_.chunk_table[of_tree].pending_copies > 0;
    const ChunkIndex c = chunks_.find(of_tree);
    if (c == no_chunk && !is_target) return count;
    std::int32_t end = first;
    WindowChunks::for_each_word(c, first, count, [&](const WindowChunks::Slots& slots) {
      std::uint64_t there = c == no_chunk ? 0 : chunks_.written(slots);
      if (is_target) there |= copied(of_tree, slots.word);
      if (const std::uint64_t missing = slots.mask & ~there; missing != 0)
        end = 64 * slots.word + 64 - std::countl_zero(missing);
    });
    return end - first;
  }
  // Of the slots of a word of a chunk of the tree, those that copies bring which no step has yet.
  [[nodiscard]] std::uint64_t copied(ChunkIndex of_tree, std::int32_t word) const noexcept {
    std::uint64_t bits = 0;
    for_each_source(of_tree, [&](const RowCopy& rows) {
      const ChunkIndex from = chunks_.find(rows.source_chunk);
      for (std::int32_t i = 0; i < rows.length; ++i) {
        const std::int32_t to = rows.target_begin + i;
        if (to >> 6 == word &&
            chunks_.written(WindowChunks::slot(from, rows.source_begin + i)) != 0)
          bits |= std::uint64_t{1} << (to & 63);
      }
    });
    return bits;
  }

  const TreeCore& core_;
  const WindowChunks& chunks_;
  const std::int32_t held_;
  WindowCopies copies_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
