// RetainedLists: cached nodes that no sequence uses, linked by age, a list for each level.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "../support/array.hpp"
#include "../support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// Nodes that are linked by age.
struct RetainedList {
  /// Of a list: its level times this and, where the policy learns, the group.
  static constexpr std::int64_t keys_per_level = 32;
  /// Above whatever a policy says.
  static constexpr std::int64_t key_of_pinned = (std::numeric_limits<std::int64_t>::max)();

  std::int64_t key = 0;
  std::int32_t oldest = -1, newest = -1;  ///< nodes; -1: none
  std::int32_t hand = -1;  ///< after those that an order passed over; -1: after none, or all
  bool is_queued = false;  ///< see RetainedLists::queue()
};

/// Lists by key, ascending. Those of one kind have consecutive keys.
class RetainedLists {
 public:
  [[nodiscard]] const RetainedList* begin() const noexcept { return lists_.begin(); }
  [[nodiscard]] const RetainedList* end() const noexcept { return lists_.end(); }
  [[nodiscard]] RetainedList& back() noexcept { return lists_.back(); }

  /// Makes sure that there is a list for each of `count` keys from this one on.
  void reserve(std::int64_t first, std::size_t count) {
    const std::int64_t last = first + (static_cast<std::int64_t>(count) - 1);
    if (has(recent_ + count - 1, last) && has(recent_, first)) [[likely]]
      return;
    if (const RetainedList* it = find(last); it != lists_.end() && it->key == last) return;
    if (const std::size_t most = lists_.size() + count; queue_.capacity() < most)
      queue_.reserve(2 * most);
    for (std::int64_t key = first; key <= last; ++key) {
      const auto it = find(key);
      if (it == lists_.end() || it->key != key) lists_.insert(it, RetainedList{key});
      if (key == last) return;  // the highest number may be one
    }
  }
  /// The list with this key, or the first after it.
  [[nodiscard]] RetainedList* find(std::int64_t key) noexcept {
    return std::lower_bound(
        lists_.begin(), lists_.end(), key,
        [](const RetainedList& list, std::int64_t value) { return list.key < value; });
  }
  /// The same, for lists with keys from this one on whose first was at `index`, or now is.
  [[nodiscard]] RetainedList* find_first(std::int64_t key, std::size_t& index) noexcept {
    const bool is_there = index < lists_.size() && lists_[index].key >= key &&
                          (index == 0 || lists_[index - 1].key < key);
    if (!is_there) [[unlikely]]
      index = static_cast<std::size_t>(find(key) - lists_.begin());
    return lists_.begin() + index;
  }
  /// The list `offset` after the one with this key, of the same reserve().
  [[nodiscard]] RetainedList& at(std::int64_t first, std::size_t offset) noexcept {
    if (lists_[recent_].key != first) [[unlikely]]
      search(first);
    return lists_[recent_ + offset];
  }

  /// A list that had no node gets one.
  void queue(RetainedList& list) noexcept {
    if (std::exchange(list.is_queued, true)) return;
    queue_.push_back(~list.key);
    std::push_heap(queue_.begin(), queue_.end());
  }
  /// The first list that has any node, or the last one, which may have none. O(log(lists)), since a
  /// list that is found empty leaves the queue.
  [[nodiscard]] RetainedList& lowest() noexcept {
    for (; !queue_.empty(); queue_.pop_back()) {
      RetainedList& list = *find(~queue_[0]);
      if (list.oldest >= 0) return list;
      list.is_queued = false;
      std::pop_heap(queue_.begin(), queue_.end());
    }
    return lists_.back();
  }

 private:
  [[gnu::noinline]] void search(std::int64_t first) noexcept {
    recent_ = static_cast<std::size_t>(find(first) - lists_.begin());
  }
  [[nodiscard]] bool has(std::size_t index, std::int64_t key) const noexcept {
    return index < lists_.size() && lists_[index].key == key;
  }

  Array<RetainedList> lists_;
  Array<std::int64_t> queue_;  // a heap of lists that have nodes, or had lately: ~key, lowest first
  std::size_t recent_ = 0;     // which at() found last
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
