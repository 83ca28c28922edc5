// CheckpointTable: states of recurrent layers that are kept, by the node of a tree that has them,
// their positions, and the order of their use. Only the caller knows what a state is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// The state after the first `position` tokens of a path, the last of which a node holds.
struct CheckpointRecord {
  std::int32_t node = -1;  ///< -1: the record is free
  std::int32_t position = 0;
  std::int32_t before = -1;  ///< the node's next one, at a smaller position; the next that is free
  std::int32_t older = -1, newer = -1;  ///< by their last use
  std::uint64_t used = 0;               ///< grows with each use of any
  std::shared_ptr<const void> state;
};

/// Checkpoints are named by their index; -1 is none.
class CheckpointTable {
 public:
  /// Those that there are.
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::int32_t oldest() const noexcept { return oldest_; }
  [[nodiscard]] std::int32_t newest() const noexcept { return newest_; }
  [[nodiscard]] const CheckpointRecord& operator[](std::int32_t i) const noexcept {
    return records_[to_size(i)];
  }
  /// The last one of a node.
  [[nodiscard]] std::int32_t last_of(std::int32_t node) const noexcept {
    return last_[to_size(node)];
  }
  /// The node's last one that is not after `position`.
  [[nodiscard]] std::int32_t nearest(std::int32_t node, std::int32_t position) const noexcept {
    std::int32_t i = last_of(node);
    while (i != -1 && records_[to_size(i)].position > position) i = records_[to_size(i)].before;
    return i;
  }
  [[nodiscard]] bool has(std::int32_t node, std::int32_t position) const noexcept {
    const std::int32_t i = nearest(node, position);
    return i != -1 && records_[to_size(i)].position == position;
  }

  /// Nodes are below `num_nodes` from now on.
  void reserve_nodes(std::size_t num_nodes) {
    if (last_.size() < num_nodes) last_.resize(num_nodes, -1);
  }
  /// Makes room for one more, so that add() cannot fail.
  void reserve() {
    if (free_ == -1 && records_.size() == records_.capacity())
      records_.reserve(2 * records_.size() + 8);
  }
  /// The youngest one, where the node has none at this position.
  void add(std::int32_t node, std::int32_t position, std::shared_ptr<const void>&& state) noexcept {
    std::int32_t i = free_;
    if (i != -1) {
      free_ = records_[to_size(i)].before;
    } else {
      i = static_cast<std::int32_t>(records_.size());
      records_.emplace_back();
    }
    records_[to_size(i)].position = position;
    records_[to_size(i)].state = std::move(state);
    link(i, node);
    append(i);
    ++size_;
  }
  /// It is used again.
  void touch(std::int32_t i) noexcept {
    remove(i);
    append(i);
  }
  /// Drops one. The end of its state, which may be anything of the caller's, is left to come last.
  [[nodiscard]] std::shared_ptr<const void> drop(std::int32_t i) noexcept {
    unlink(i);
    return forget(i);
  }
  /// Those of one node that are not after `position` are another's from now on.
  void move(std::int32_t from, std::int32_t to, std::int32_t position) noexcept {
    for (std::int32_t i; (i = nearest(from, position)) != -1;) {
      unlink(i);
      if (has(to, records_[to_size(i)].position))
        static_cast<void>(forget(i));
      else
        link(i, to);
    }
  }

 private:
  void link(std::int32_t i, std::int32_t node) noexcept {
    CheckpointRecord& record = records_[to_size(i)];
    record.node = node;
    std::int32_t* at = &last_[to_size(node)];
    while (*at != -1 && records_[to_size(*at)].position > record.position)
      at = &records_[to_size(*at)].before;
    record.before = std::exchange(*at, i);
  }
  void unlink(std::int32_t i) noexcept {
    std::int32_t* at = &last_[to_size(records_[to_size(i)].node)];
    while (*at != i) at = &records_[to_size(*at)].before;
    *at = records_[to_size(i)].before;
  }
  void append(std::int32_t i) noexcept {
    CheckpointRecord& record = records_[to_size(i)];
    record.used = ++uses_;
    record.newer = -1;
    record.older = std::exchange(newest_, i);
    (record.older != -1 ? records_[to_size(record.older)].newer : oldest_) = i;
  }
  void remove(std::int32_t i) noexcept {
    const CheckpointRecord& record = records_[to_size(i)];
    (record.older != -1 ? records_[to_size(record.older)].newer : oldest_) = record.newer;
    (record.newer != -1 ? records_[to_size(record.newer)].older : newest_) = record.older;
  }
  std::shared_ptr<const void> forget(std::int32_t i) noexcept {
    remove(i);
    std::shared_ptr<const void> state = std::move(records_[to_size(i)].state);
    records_[to_size(i)] = {};
    records_[to_size(i)].before = std::exchange(free_, i);
    --size_;
    return state;
  }

  std::vector<CheckpointRecord> records_;
  Array<std::int32_t> last_;  // by node
  std::int32_t free_ = -1, oldest_ = -1, newest_ = -1;
  std::size_t size_ = 0;
  std::uint64_t uses_ = 0;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
