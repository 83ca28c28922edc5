// Rows of a group's chunks, by where their tokens lie in the tree's: which there are, and those
// that come from elsewhere.
#pragma once

#include <cstdint>

#include "../../detail/support/config.hpp"
#include "../../plan_view.hpp"
#include "window_chunks.hpp"
#include "window_group.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Calls f(chunk of the group, slot, path position) for each row that is there.
template <class F>
void for_each_window_row(const WindowChunks& chunks, const Piece& of_tree, const F& f) {
  const ChunkIndex c = chunks.find(of_tree.chunk);
  for (std::int32_t i = 0; c != no_chunk && i < of_tree.length; ++i)
    if (chunks.written(WindowChunks::slot(c, of_tree.begin + i)) != 0)
      f(c, of_tree.begin + i, of_tree.position + i);
}
/// Calls copy(chunk of the group, slot, path position) for each row that is not there, and that no
/// step is to write, where the group has a chunk for it. Then it is there.
template <class F>
void load_window_rows(WindowGroup& group, const Piece& of_tree, const F& copy) {
  WindowChunks& chunks = group.chunks();
  const ChunkIndex c = chunks.find(of_tree.chunk);
  for (std::int32_t i = 0; c != no_chunk && i < of_tree.length; ++i) {
    const WindowChunks::Slots slot = WindowChunks::slot(c, of_tree.begin + i);
    if (chunks.known(slot) != 0) continue;
    copy(c, of_tree.begin + i, of_tree.position + i);
    chunks.settle(slot, /*counts=*/true);
    group.points().tell({&slot, 1}, /*is_kept=*/true);
  }
}

}  // namespace detail

CHUNKATTN_NAMESPACE_END
