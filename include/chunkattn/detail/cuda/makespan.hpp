// When a launch ends, by the lengths of its items.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "../base/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// When the last of `num_blocks` blocks is done, if each takes the next item, in the order of
/// add(), as soon as it is free.
class Makespan {
 public:
  /// Items come `copies` at a time, all alike: one for each KV head.
  void start(int num_blocks, int copies) {
    // Blocks that always take copies of the same item go in step: one stands for all of them.
    const int together = std::gcd(num_blocks, copies);
    pushes_ = copies / together;
    free_.assign(static_cast<std::size_t>(num_blocks / together), 0);
    end_ = 0;
  }
  /// An item that takes `ps`, and then, from `ready` on at the earliest, `rest`. Returns when the
  /// last of its copies is done.
  std::int64_t add(std::int64_t ps, std::int64_t ready = 0, std::int64_t rest = 0) {
    std::int64_t last = 0;
    for (int i = 0; i < pushes_; ++i) {
      const std::int64_t end = std::max(free_.front() + ps, ready) + rest;
      last = std::max(last, end);
      replace_first(end);
    }
    end_ = std::max(end_, last);
    return last;
  }
  [[nodiscard]] std::int64_t end() const noexcept { return end_; }

 private:
  // The block that was free first is now the one that is at `end`. (std::pop_heap and push_heap
  // would go down and up again.)
  void replace_first(std::int64_t end) noexcept {
    std::size_t at = 0;
    for (std::size_t below = 1; below < free_.size(); below = 2 * at + 1) {
      if (below + 1 < free_.size() && free_[below + 1] < free_[below]) ++below;
      if (end <= free_[below]) break;
      free_[at] = free_[below];
      at = below;
    }
    free_[at] = end;
  }

  std::vector<std::int64_t> free_;  // a heap, the earliest first
  int pushes_ = 0;
  std::int64_t end_ = 0;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
