// WindowHolds: which chunks of a group of layers with a sliding window each live sequence holds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../detail/tree/core.hpp"
#include "window_chunks.hpp"
#include "window_search.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// The chunks that a live sequence holds, for its next row and the steps that are not over.
struct WindowHold {
  /// Path positions [begin, end) of the sequence in one chunk.
  struct Part {
    ChunkIndex chunk;
    std::int32_t begin, end;
  };

  bool is_used = false;
  std::int32_t next = 0;        ///< where its next row is, at least
  std::int32_t end = 0;         ///< one past the last row of any step; -1: its window is lost
  std::int32_t prompt_end = 0;  ///< where the prompt, sent again, would be resumed
  NodeIndex junction = none;    ///< the first node after `next`, unless it was split; or none
  std::size_t first = 0;        ///< of `parts`; those before were released
  Array<Part> parts;

  /// Whether it has the window of a row at this position.
  [[nodiscard]] bool covers(std::int32_t position) const noexcept {
    return is_used && position <= end;
  }
};

/// By sequence.
class WindowHolds {
 public:
  WindowHolds(const TreeCore& core, WindowChunks& chunks, const WindowSearch& search)
      : core_(core), chunks_(chunks), search_(search) {}

  /// Makes room for a sequence.
  void reserve(SequenceIndex s) {
    if (to_size(s) >= holds_.size()) holds_.resize(to_size(s) + 1);
  }
  [[nodiscard]] WindowHold& operator[](SequenceIndex s) noexcept { return holds_[to_size(s)]; }
  /// Null for one that never held anything.
  [[nodiscard]] const WindowHold* find(SequenceIndex s) const noexcept {
    return to_size(s) < holds_.size() ? &holds_[to_size(s)] : nullptr;
  }
  [[nodiscard]] bool covers(SequenceIndex s, std::int32_t position) const noexcept {
    return to_size(s) < holds_.size() && holds_[to_size(s)].covers(position);
  }

  void release(WindowHold& hold) noexcept {
    for (std::size_t i = hold.first; i < hold.parts.size(); ++i)
      chunks_.release(hold.parts[i].chunk);
    hold.parts.clear();
    hold.first = 0;
    hold.is_used = false;
  }
  /// The entry's rows are planned: extend() says where they are. What is there of a step that did
  /// not run, or of drafts that were rejected, is released.
  WindowHold& begin(const StepEntry& entry) noexcept {
    WindowHold& hold = holds_[to_size(entry.sequence)];
    while (hold.parts.size() > hold.first && hold.parts.back().begin >= entry.begin) {
      chunks_.release(hold.parts.back().chunk);
      hold.parts.pop_back();
    }
    hold.end = entry.end();
    return hold;
  }
  /// There is room for a part.
  void extend(WindowHold& hold, ChunkIndex c, std::int32_t begin, std::int32_t end) noexcept {
    if (hold.parts.size() == hold.first || hold.parts.back().chunk != c) {
      chunks_.hold(c);
      hold.parts.push_back({c, begin, end});
    }
    hold.parts.back().end = end;
  }
  /// The entry's rows have run.
  void advance(const StepEntry& entry) noexcept {
    WindowHold& hold = holds_[to_size(entry.sequence)];
    const std::int32_t next = entry.output_position();
    NodeIndex i = core_.sequences[entry.sequence].tail;
    if (hold.junction != none && core_.topology.node(hold.junction).position > next)
      i = hold.junction;
    for (; core_.topology.node(i).position > hold.next; i = core_.topology.node(i).parent) {
      if (core_.topology.node(i).position > next)
        hold.junction = i;
      else
        keep_junction(hold, core_.topology.node(i).position);
    }
    if (hold.prompt_end > hold.next && hold.prompt_end <= next) keep(hold, hold.prompt_end);
    hold.next = next;
    while (hold.first < hold.parts.size() && hold.parts[hold.first].end <= search_.begin_of(next))
      chunks_.release(hold.parts[hold.first++].chunk);
    if (hold.first < 32 || 2 * hold.first < hold.parts.size()) return;
    std::copy(hold.parts.begin() + hold.first, hold.parts.end(), hold.parts.begin());
    hold.parts.resize(hold.parts.size() - hold.first);
    hold.first = 0;
  }
  /// A sequence has left: the window before its next row stays cached.
  void leave(SequenceIndex s) noexcept {
    if (to_size(s) >= holds_.size()) return;
    WindowHold& hold = holds_[to_size(s)];
    if (hold.is_used) keep(hold, hold.next);
    release(hold);
  }
  /// Beyond its next row a hold has rows of drafts that were rejected, and of dropped steps: what
  /// is at this position and later is not of them.
  void end(SequenceIndex s, std::int32_t position) noexcept {
    if (to_size(s) >= holds_.size()) return;
    WindowHold& hold = holds_[to_size(s)];
    hold.end = (std::min)(hold.end, (std::max)(hold.next, position));
  }
  /// Rows of a chunk are not there that were counted on: whoever holds it is to be resumed again.
  void lose(ChunkIndex c) noexcept {
    for (WindowHold& hold : holds_)
      if (std::any_of(hold.parts.begin() + hold.first, hold.parts.end(),
                      [&](const WindowHold::Part& part) { return part.chunk == c; }))
        hold.end = -1;
  }

  /// For tests: adds how often each chunk is held.
  void count_holds(Array<std::int32_t>& holds) const {
    for (const WindowHold& hold : holds_)
      for (std::size_t i = hold.first; i < hold.parts.size(); ++i)
        ++holds[to_size(hold.parts[i].chunk)];
  }
  /// For tests: released parts do not pile up.
  [[nodiscard]] bool is_consistent() const noexcept {
    return std::none_of(holds_.begin(), holds_.end(), [](const WindowHold& hold) {
      return hold.first >= 32 && 2 * hold.first > hold.parts.size();
    });
  }

 private:
  // The window before a position stays cached.
  void keep(const WindowHold& hold, std::int32_t position) noexcept {
    const std::int32_t begin = search_.begin_of(position);
    if (begin == position) return;  // a row that reads none before it
    for (std::size_t i = hold.first; i < hold.parts.size(); ++i)
      if (hold.parts[i].end > begin && hold.parts[i].begin < position)
        chunks_.keep(hold.parts[i].chunk);
  }

  // A prompt that parts here may want what the last shared row says of its own next token, as who
  // scores it does: then it goes on a row earlier.
  void keep_junction(const WindowHold& hold, std::int32_t position) noexcept {
    keep(hold, position - 1);
    keep(hold, position);
  }

  const TreeCore& core_;
  WindowChunks& chunks_;
  const WindowSearch& search_;
  std::vector<WindowHold> holds_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
