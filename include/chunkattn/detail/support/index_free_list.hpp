// The free list of PoolAllocator.
#pragma once

#include <cstddef>
#include <cstdint>

#include "array.hpp"
#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

/// Indices that were handed out and came back, last in first out: recently used memory is reused
/// first.
class IndexFreeList {
 public:
  /// Takes a free index, or extends the range of indices by one below `limit`. -1: none left.
  std::int32_t take(std::size_t limit) {
    if (!free_.empty()) {
      const std::int32_t index = free_.back();
      free_.pop_back();
      return index;
    }
    if (high_water_ >= limit) return -1;
    if (free_.capacity() <= high_water_)  // put() must never allocate
      free_.reserve(high_water_ < 32 ? 64 : 2 * high_water_);
    return static_cast<std::int32_t>(high_water_++);
  }

  void put(std::int32_t index) noexcept { free_.push_back(index); }

  [[nodiscard]] std::size_t num_free() const noexcept { return free_.size(); }
  [[nodiscard]] std::size_t high_water() const noexcept { return high_water_; }

 private:
  Array<std::int32_t> free_;
  std::size_t high_water_ = 0;
};

}  // namespace detail
CHUNKATTN_NAMESPACE_END
