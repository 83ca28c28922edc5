// WindowCopies: which copies of a tree go into a chunk, found without going over all.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/tree/core.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// An index of TreeCore::pending_copies by the chunk that they go into. It may be older than that
/// list, which for_each() notices.
class WindowCopies {
 public:
  /// Brings it up to date: O(copies that came since the last time), and O(all) where some went.
  void update(const TreeCore& core) {
    const auto& copies = core.pending_copies;
    if (size_ > copies.size() || (size_ > 0 && copies[size_ - 1].rows.target_chunk != last_))
      size_ = 0;
    if (next_.size() < copies.size()) next_.resize(copies.size());
    for (; size_ < copies.size(); ++size_) {
      const ChunkIndex c = copies[size_].rows.target_chunk;
      if (to_size(c) >= first_.size()) first_.resize(to_size(c) + 1, none);
      std::int32_t& first = first_[to_size(c)];
      // Before it came there may have been others, or the list was another one.
      next_[size_] = is_into(core, c, first, size_) ? first : none;
      first = static_cast<std::int32_t>(size_);
      last_ = c;
    }
  }
  /// Calls f(const PendingCopy&) for those into a chunk of the tree, maybe more than once.
  template <class F>
  void for_each(const TreeCore& core, ChunkIndex into, const F& f) const {
    std::int32_t left = core.chunk_table[into].pending_copies;
    if (left > 0 && to_size(into) < first_.size())
      for (std::int32_t i = first_[to_size(into)];
           left > 0 && is_into(core, into, i, core.pending_copies.size());
           i = next_[to_size(i)], --left)
        f(core.pending_copies[to_size(i)]);
    if (left == 0) [[likely]]
      return;
    for (const PendingCopy& copy : core.pending_copies)
      if (copy.rows.target_chunk == into) f(copy);
  }

 private:
  // Whether copy `i` is one of the first `end`, and goes into this chunk.
  [[nodiscard]] static bool is_into(const TreeCore& core, ChunkIndex chunk, std::int32_t i,
                                    std::size_t end) noexcept {
    return i >= 0 && to_size(i) < end && core.pending_copies[to_size(i)].rows.target_chunk == chunk;
  }

  Array<std::int32_t> first_;   ///< by chunk: the last copy into it, none, or what was once there
  Array<std::int32_t> next_;    ///< by copy: one before it into the same chunk, or none
  std::size_t size_ = 0;        ///< copies that are known
  ChunkIndex last_ = no_chunk;  ///< what the last one of these goes into
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
