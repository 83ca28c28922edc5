// Slots: which are in use, by how many nodes, and for what. They come from the caller's allocator,
// and tokens lie in them. Nodes are known here only as indices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>

#include "../../allocator.hpp"
#include "../../plan_view.hpp"
#include "../../tree_options.hpp"
#include "../base/array.hpp"
#include "../base/check.hpp"
#include "../base/config.hpp"
#include "../base/to_size.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

using NodeIndex = std::int32_t;

/// No node, no sequence, no draft, no pin.
inline constexpr std::int32_t none = -1;

/// Tokens per slot, a power of two.
struct ChunkGeometry {
  std::int32_t size = 1;
  std::int32_t shift = 0;

  explicit constexpr ChunkGeometry(std::int32_t chunk_size) noexcept : size(chunk_size) {
    while (std::int32_t{1} << shift < size) ++shift;
  }
  /// Slots before this place of a run of slots.
  [[nodiscard]] constexpr std::int32_t slots_before(std::int32_t place) const noexcept {
    return place >> shift;
  }
  /// Offset of this place in its slot.
  [[nodiscard]] constexpr std::int32_t offset(std::int32_t place) const noexcept {
    return place & (size - 1);
  }
  /// Slots that this many places take.
  [[nodiscard]] constexpr std::int32_t slots_for(std::int32_t places) const noexcept {
    return places <= 0 ? 0 : (places + size - 1) >> shift;
  }
};

/// The nodes of a slot form a chain from ancestor to descendant with disjoint ranges. The one at
/// its end owns the free places behind it. `next` and `prev` link the slots of one node's run.
struct SlotRecord {
  NodeIndex owner = none;
  std::int32_t nodes = 0;   ///< nodes with a range in this slot
  std::int32_t active = 0;  ///< of these, used by a live or leaving sequence
  std::int32_t pinned = 0;  ///< of these, pinned
  SlotIndex next = no_slot, prev = no_slot;
  std::int32_t pending_copies = 0;  ///< copies still to be made into this slot
};

/// What a node makes of the slots that it has places in.
struct SlotUse {
  bool active = false;
  bool pinned = false;
};

/// What the tree does with tokens without knowing them. Runs lie within a slot.
class Tokens {
 public:
  virtual ~Tokens() = default;
  /// Makes room for slots [0, num_slots).
  virtual void grow(std::size_t num_slots) = 0;
  /// Adds tokens to the hash of a key.
  [[nodiscard]] virtual std::uint64_t hash(std::uint64_t seed, SlotIndex slot, std::int32_t offset,
                                           std::int32_t count) const noexcept = 0;
  /// Leading tokens that two runs of `count` have in common.
  [[nodiscard]] virtual std::int32_t common(SlotIndex a, std::int32_t offset_a, SlotIndex b,
                                            std::int32_t offset_b,
                                            std::int32_t count) const noexcept = 0;
  virtual void copy(SlotIndex from, std::int32_t offset, SlotIndex to, std::int32_t to_offset,
                    std::int32_t count) noexcept = 0;
  /// Asks early for a place that will be written.
  virtual void prefetch(SlotIndex slot, std::int32_t offset) const noexcept = 0;
};

/// The caller's allocator without its type.
class SlotAllocator {
 public:
  virtual ~SlotAllocator() = default;
  virtual SlotIndex allocate() = 0;
  virtual void free(SlotIndex slot) noexcept = 0;
  [[nodiscard]] virtual std::size_t capacity() const noexcept = 0;
  [[nodiscard]] virtual std::size_t available() const noexcept = 0;
  [[nodiscard]] virtual std::size_t high_water() const noexcept = 0;
};

template <ChunkAllocator A>
class SlotAllocatorOf final : public SlotAllocator {
 public:
  explicit SlotAllocatorOf(A allocator) : allocator_(std::move(allocator)) {}
  [[nodiscard]] const A& get() const noexcept { return allocator_; }

  SlotIndex allocate() override { return allocator_.allocate(); }
  void free(SlotIndex slot) noexcept override { allocator_.free(slot); }
  [[nodiscard]] std::size_t capacity() const noexcept override { return allocator_.capacity(); }
  [[nodiscard]] std::size_t available() const noexcept override { return allocator_.available(); }
  [[nodiscard]] std::size_t high_water() const noexcept override { return allocator_.high_water(); }

 private:
  A allocator_;
};

class Slots {
 public:
  Slots(SlotAllocator& allocator, Tokens& tokens, TreeStats& stats)
      : allocator_(allocator), tokens_(tokens), stats_(stats) {}

  [[nodiscard]] SlotRecord& operator[](SlotIndex s) noexcept { return records_[to_size(s)]; }
  [[nodiscard]] const SlotRecord& operator[](SlotIndex s) const noexcept {
    return records_[to_size(s)];
  }
  [[nodiscard]] SlotIndex next(SlotIndex s) const noexcept { return records_[to_size(s)].next; }
  /// Slots that were ever seen.
  [[nodiscard]] std::size_t size() const noexcept { return records_.size(); }
  /// Slots with pinned nodes.
  [[nodiscard]] std::size_t num_pinned() const noexcept { return num_pinned_; }
  [[nodiscard]] const SlotAllocator& allocator() const noexcept { return allocator_; }
  /// Free, or held by nothing but cache.
  [[nodiscard]] std::size_t num_available() const noexcept {
    return allocator_.available() + stats_.retained_slots;
  }

  /// A node takes its first place in a slot that others have places in.
  void add_node(SlotIndex s, SlotUse use) noexcept {
    SlotRecord& record = records_[to_size(s)];
    ++record.nodes;
    if (use.active && record.active++ == 0) --stats_.retained_slots;
    if (use.pinned) count_pin(s, 1);
  }
  /// A node gave up its last place in the slot.
  void remove_node(SlotIndex s, SlotUse use) noexcept {
    SlotRecord& record = records_[to_size(s)];
    if (use.pinned) count_pin(s, -1);
    if (record.nodes == 1) {
      if (!use.active) --stats_.retained_slots;
      give_back(s);
      return;
    }
    --record.nodes;
    if (use.active && --record.active == 0) ++stats_.retained_slots;
  }
  /// One of the slot's nodes is used from now on, or no longer.
  void set_active(SlotIndex s, bool active) noexcept {
    SlotRecord& record = records_[to_size(s)];
    if (active) {
      if (record.active++ == 0) --stats_.retained_slots;
    } else {
      if (--record.active == 0) ++stats_.retained_slots;
    }
  }
  /// One of the slot's nodes is pinned (+1) or no longer (-1).
  void count_pin(SlotIndex s, std::int32_t by) noexcept {
    SlotRecord& record = records_[to_size(s)];
    const bool was_pinned = record.pinned > 0;
    record.pinned += by;
    if (was_pinned && record.pinned == 0) --num_pinned_;
    if (!was_pinned && record.pinned > 0) ++num_pinned_;
  }

  /// Takes `count` slots aside, for take(). evict_one() makes one free where the budget is spent;
  /// false if it cannot. False, with nothing taken and nothing evicted, when that is not enough.
  /// Throws InvalidArgument, with nothing taken, where the allocator answers what is no free slot.
  template <class EvictOne>
  bool acquire(std::int32_t count, const EvictOne& evict_one) {
    if (count <= 0) return true;
    if (to_size(count) > num_available()) return false;
    struct GiveBack {
      Slots& slot_table;
      bool keep = false;
      ~GiveBack() {
        if (!keep) slot_table.release();
      }
    } guard{*this};
    acquired_.clear();
    num_taken_ = 0;
    if (acquired_.capacity() < to_size(count)) acquired_.reserve(2 * to_size(count));
    for (std::int32_t left = count; left > 0;) {
      const SlotIndex s = allocator_.allocate();
      if (s == no_slot) {
        if (!evict_one()) return false;
        continue;
      }
      if (to_size(s) >= records_.size()) [[unlikely]]
        meet(s);
      if (records_[to_size(s)].nodes++ > 0)
          [[unlikely]]  // counted, so that it is not answered twice
        fail_taken(s);
      *acquired_.end() = s;
      acquired_.take(1);
      --left;
    }
    guard.keep = true;
    return true;
  }
  /// One of the slots that were acquired, for node `owner`, behind `prev`.
  CHUNKATTN_INLINE SlotIndex take(NodeIndex owner, SlotIndex prev, SlotUse use) noexcept {
    const SlotIndex s = acquired_[num_taken_++];
    SlotRecord& record = records_[to_size(s)];  // as new, but for `nodes`, which is 1
    record.owner = owner;
    record.active = use.active ? 1 : 0;
    record.prev = prev;
    ++stats_.used_slots;
    if (!use.active) ++stats_.retained_slots;
    if (use.pinned) count_pin(s, 1);
    return s;
  }
  /// Gives back what was acquired and not needed: an eviction may have made room in a slot that is
  /// in use.
  void release() noexcept {
    for (; acquired_.size() > num_taken_; acquired_.pop_back()) {
      const SlotIndex s = acquired_.back();
      if (to_size(s) < records_.size())
        records_[to_size(s)].nodes = 0;  // else there was no memory for it
      allocator_.free(s);
    }
  }

  /// Asks early for a place whose token will be written.
  void prefetch(SlotIndex s, std::int32_t offset) const noexcept { tokens_.prefetch(s, offset); }

  void set_free_sink(std::function<void(SlotIndex)> sink) { free_sink_ = std::move(sink); }

 private:
  /// Makes a record for a slot that was never seen before.
  [[gnu::noinline]] void meet(SlotIndex s) {
    const std::size_t end = allocator_.high_water();
    if (s < 0 || to_size(s) >= end) [[unlikely]]
      fail_argument("allocator.allocate()", s,
                    {"a slot below its high_water(), ", end, ", or no_slot, ", no_slot});
    acquired_.push_back(s);  // given back if there is no memory
    grow(end);
    acquired_.pop_back();
  }
  [[noreturn]] CHUNKATTN_COLD void fail_taken(SlotIndex s) {
    --records_[to_size(s)].nodes;
    fail_argument("allocator.allocate()", s, "a free slot; the tree has this one already");
  }
  void grow(std::size_t count) {
    tokens_.grow(count);
    if (count > records_.capacity()) records_.reserve(std::max(count, 2 * records_.size()));
    records_.resize(count);
  }
  void give_back(SlotIndex s) noexcept {
    records_[to_size(s)] = SlotRecord{};
    --stats_.used_slots;
    if (free_sink_) free_sink_(s);
    allocator_.free(s);
  }

  SlotAllocator& allocator_;
  Tokens& tokens_;
  TreeStats& stats_;
  Array<SlotRecord> records_;
  Array<SlotIndex> acquired_;  // in the order handed out, in which they are taken
  std::size_t num_taken_ = 0;
  std::size_t num_pinned_ = 0;
  std::function<void(SlotIndex)> free_sink_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
