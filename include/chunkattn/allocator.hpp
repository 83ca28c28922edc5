// Allocators of chunk indices: the concept, and the two of the library. They know nothing of K/V
// memory; KvCache has it, and learns by ChunkSource how many chunks there are.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>

#include "detail/support/array.hpp"
#include "detail/support/check.hpp"
#include "detail/support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// The index of a chunk: where the K and V of its tokens lie in every layer's memory.
using ChunkIndex = std::int32_t;
/// The index of no chunk.
inline constexpr ChunkIndex no_chunk = -1;

/// The largest budget, in chunks: indices are 32-bit and signed.
inline constexpr std::size_t max_pool_chunks = 0x7fffffff;

/// Hands out chunk indices. It knows nothing of K/V memory. All counts are in chunks.
///
/// - `allocate()` returns a free index in [0, high_water()), or no_chunk when the budget is spent.
///   It may throw if it changes nothing then. If it returns anything else, the tree's operation
///   that called it throws InvalidArgument, which names the index, and changes nothing.
/// - `free(chunk)` takes an index back. It must not throw; the tree frees each index once.
/// - `capacity()`: the most indices that can be in use at once; `max_pool_chunks`: no limit.
/// - `available()`: how many further calls of allocate() the budget allows.
/// - `high_water()`: one more than the largest index ever handed out. K/V memory must cover it.
template <class A>
concept ChunkAllocator = std::movable<A> && requires(A& a, const A& c, ChunkIndex chunk) {
  { a.allocate() } -> std::same_as<ChunkIndex>;
  { a.free(chunk) } noexcept;
  { c.capacity() } noexcept -> std::convertible_to<std::size_t>;
  { c.available() } noexcept -> std::convertible_to<std::size_t>;
  { c.high_water() } noexcept -> std::convertible_to<std::size_t>;
};

/// The paper's default (section 3.1): grows on demand, keeps the indices that come back in a free
/// list, and never returns memory to the system. `PoolAllocator{.max_chunks = 8192}` sets a budget.
struct PoolAllocator {
  /// What is handed out and what came back.
  class State {
    friend PoolAllocator;
    Array<ChunkIndex> free_;  // last in, first out: recently used memory is reused first
    std::size_t high_water_ = 0;
  };
  std::size_t max_chunks = max_pool_chunks;  ///< budget in chunks
  State state{};                             ///< leave it as it is

  /// A free index, or no_chunk when the budget is spent. Throws std::bad_alloc.
  ChunkIndex allocate() {
    State& s = state;
    if (!s.free_.empty()) {
      const ChunkIndex chunk = s.free_.back();
      s.free_.pop_back();
      return chunk;
    }
    if (s.high_water_ >= capacity()) return no_chunk;
    if (s.free_.capacity() <= s.high_water_)  // free() must never allocate
      s.free_.reserve(s.high_water_ < 32 ? 64 : 2 * s.high_water_);
    return static_cast<ChunkIndex>(s.high_water_++);
  }
  /// Takes an index back.
  void free(ChunkIndex chunk) noexcept { state.free_.push_back(chunk); }
  /// The most chunks that can be in use at once.
  [[nodiscard]] std::size_t capacity() const noexcept {
    return max_chunks < max_pool_chunks ? max_chunks : max_pool_chunks;
  }
  /// Chunks that can still be handed out.
  [[nodiscard]] std::size_t available() const noexcept {
    return capacity() - state.high_water_ + state.free_.size();
  }
  /// One more than the largest index handed out so far.
  [[nodiscard]] std::size_t high_water() const noexcept { return state.high_water_; }
};

/// A fixed budget of chunks: high_water() is the capacity from the start, so K/V memory is
/// allocated once and nothing grows while serving.
class FixedAllocator {
 public:
  /// Throws InvalidArgument unless 1 <= num_chunks <= max_pool_chunks.
  explicit FixedAllocator(std::size_t num_chunks) : capacity_(num_chunks) {
    detail::check_argument(num_chunks >= 1 && num_chunks <= max_pool_chunks, "num_chunks",
                           num_chunks, "between 1 and 2^31 - 1");
    free_.reserve(num_chunks);
    for (std::size_t i = num_chunks; i-- > 0;) free_.push_back(static_cast<ChunkIndex>(i));
  }

  /// A free index, or no_chunk when the budget is spent.
  ChunkIndex allocate() {
    if (free_.empty()) return no_chunk;
    const ChunkIndex chunk = free_.back();
    free_.pop_back();
    return chunk;
  }
  /// Takes an index back.
  void free(ChunkIndex chunk) noexcept { free_.push_back(chunk); }
  /// The most chunks that can be in use at once.
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  /// Chunks that can still be handed out.
  [[nodiscard]] std::size_t available() const noexcept { return free_.size(); }
  /// The capacity: K/V memory is needed for all of it from the start.
  [[nodiscard]] std::size_t high_water() const noexcept { return capacity_; }

 private:
  Array<ChunkIndex> free_;
  std::size_t capacity_;
};

static_assert(ChunkAllocator<PoolAllocator>);
static_assert(ChunkAllocator<FixedAllocator>);

CHUNKATTN_NAMESPACE_END
