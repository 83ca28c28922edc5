// What hands out slots, the places of chunks: the concept, and the two allocators of the library.
// They know nothing of K/V memory; what follows them does (SlotSource).
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "detail/base/array.hpp"
#include "detail/base/check.hpp"
#include "detail/base/config.hpp"
#include "detail/base/index_free_list.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Index of a slot: one chunk's place in every layer's K/V memory.
using SlotIndex = std::int32_t;
inline constexpr SlotIndex no_slot = -1;

/// The largest budget: slot indices are 32-bit and signed.
inline constexpr std::size_t max_slots = 0x7fffffff;

/// Hands out slot indices. It knows nothing of K/V memory.
///
/// - `allocate()` returns a free index in [0, high_water()), or no_slot when the budget is spent.
///   It may throw; then nothing has changed. Another answer is refused by the tree's operation that
///   asked: InvalidArgument, which names the index, with nothing changed.
/// - `free(slot)` takes one back. noexcept; the caller frees each slot once.
/// - `capacity()`: the most slots that can be out at once; `max_slots` if there is no limit.
/// - `available()`: how many further calls of allocate() the budget allows.
/// - `high_water()`: one more than the largest index ever handed out. K/V memory must cover it.
template <class A>
concept ChunkAllocator = std::movable<A> && requires(A& a, const A& c, SlotIndex slot) {
  { a.allocate() } -> std::same_as<SlotIndex>;
  { a.free(slot) } noexcept;
  { c.capacity() } noexcept -> std::convertible_to<std::size_t>;
  { c.available() } noexcept -> std::convertible_to<std::size_t>;
  { c.high_water() } noexcept -> std::convertible_to<std::size_t>;
};

namespace detail {
class WriteChecks;
}

/// How many slots a tree has handed out, for K/V memory that follows it: valid wherever the tree is
/// moved, and 0 once it is gone.
struct SlotSource {
  std::shared_ptr<const void> tree;                     ///< keeps what it reads alive
  std::size_t (*slots_of)(const void* tree) = nullptr;  ///< reads it
  std::uint64_t tree_id = 0;                            ///< of the tree; 0: there is none
  /// Told of the tree's steps, for KvCacheOptions::check_writes; null: nobody is.
  std::shared_ptr<detail::WriteChecks> write_checks{};

  /// One more than the largest slot index handed out.
  [[nodiscard]] std::size_t num_slots() const { return tree ? slots_of(tree.get()) : 0; }
};

/// What K/V memory follows: PrefixTree.
///
/// - `chunk_size`: tokens per slot.
/// - `num_slots()`: slots handed out so far; `slot_source()`: the same for as long as one likes.
template <class T>
concept SlotOwner = requires(const T& tree) {
  { T::chunk_size } -> std::convertible_to<int>;
  { tree.num_slots() } -> std::convertible_to<std::size_t>;
  { tree.slot_source() } -> std::same_as<SlotSource>;
};

/// The paper's default (section 3.1): grows on demand, keeps what came back in a free list, and
/// never returns memory to the system. `PoolAllocator{.max_chunks = 8192}` sets a budget.
struct PoolAllocator {
  std::size_t max_chunks = max_slots;  ///< budget in slots
  detail::IndexFreeList pool{};        ///< its state; leave it as it is

  /// A free slot, or no_slot when the budget is spent.
  SlotIndex allocate() { return pool.take(capacity()); }
  /// Takes one back.
  void free(SlotIndex slot) noexcept { pool.put(slot); }
  /// The most slots that can be out at once.
  [[nodiscard]] std::size_t capacity() const noexcept {
    return max_chunks < max_slots ? max_chunks : max_slots;
  }
  /// Slots that can still be handed out.
  [[nodiscard]] std::size_t available() const noexcept {
    return capacity() - pool.high_water() + pool.num_free();
  }
  /// One more than the largest index handed out so far.
  [[nodiscard]] std::size_t high_water() const noexcept { return pool.high_water(); }
};

/// A fixed budget, all of it set aside at construction: high_water() is the capacity from the
/// start, so K/V memory is allocated once and nothing grows while serving.
class FixedAllocator {
 public:
  /// Throws InvalidArgument unless 1 <= num_chunks <= max_slots.
  explicit FixedAllocator(std::size_t num_chunks) : capacity_(num_chunks) {
    detail::check_argument(num_chunks >= 1 && num_chunks <= max_slots, "num_chunks", num_chunks,
                           "between 1 and 2^31 - 1");
    free_.reserve(num_chunks);
    for (std::size_t i = num_chunks; i-- > 0;) free_.push_back(static_cast<SlotIndex>(i));
  }

  /// A free slot, or no_slot when the budget is spent.
  SlotIndex allocate() {
    if (free_.empty()) return no_slot;
    const SlotIndex slot = free_.back();
    free_.pop_back();
    return slot;
  }
  /// Takes one back.
  void free(SlotIndex slot) noexcept { free_.push_back(slot); }
  /// The most slots that can be out at once.
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }
  /// Slots that can still be handed out.
  [[nodiscard]] std::size_t available() const noexcept { return free_.size(); }
  /// The capacity: K/V memory is needed for all of it from the start.
  [[nodiscard]] std::size_t high_water() const noexcept { return capacity_; }

 private:
  Array<SlotIndex> free_;
  std::size_t capacity_;
};

static_assert(ChunkAllocator<PoolAllocator>);
static_assert(ChunkAllocator<FixedAllocator>);

CHUNKATTN_NAMESPACE_END
