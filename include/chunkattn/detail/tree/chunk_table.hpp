// ChunkTable: the chunks of the pool, which are in use, by how many nodes, and for what. They come
// from the caller's allocator, and tokens lie in them. Nodes are known here only as indices.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#include "../../allocator.hpp"
#include "../../tree_options.hpp"
#include "../support/array.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

using NodeIndex = std::int32_t;

/// No node, no sequence, no draft, no pin.
inline constexpr std::int32_t none = -1;

/// Tokens per chunk, a power of two.
struct ChunkGeometry {
  std::int32_t size = 1;
  std::int32_t shift = 0;

  explicit constexpr ChunkGeometry(std::int32_t chunk_size) noexcept : size(chunk_size) {
    while (std::int32_t{1} << shift < size) ++shift;
  }
  /// Chunks before this slot of a run of chunks.
  [[nodiscard]] constexpr std::int32_t chunks_before(std::int32_t slot) const noexcept {
    return slot >> shift;
  }
  /// Offset of this slot in its chunk.
  [[nodiscard]] constexpr std::int32_t offset(std::int32_t slot) const noexcept {
    return slot & (size - 1);
  }
  /// Chunks that this many slots take.
  [[nodiscard]] constexpr std::int32_t chunks_for(std::int32_t num_slots) const noexcept {
    return num_slots <= 0 ? 0 : (num_slots + size - 1) >> shift;
  }
};

/// The nodes of a chunk form a chain from ancestor to descendant with disjoint ranges. The one at
/// its end owns the free slots after it. `next` and `prev` link the chunks of one node's run.
struct ChunkRecord {
  NodeIndex owner = none;
  std::int32_t nodes = 0;   ///< nodes with a range in this chunk
  std::int32_t active = 0;  ///< of these, used by a live or leaving sequence
  std::int32_t pinned = 0;  ///< of these, pinned
  ChunkIndex next = no_chunk, prev = no_chunk;
  std::int32_t pending_copies = 0;  ///< copies still to be made into this chunk
};

/// What a node makes of the chunks that it has slots in.
struct ChunkUse {
  bool active = false;
  bool pinned = false;
};

/// What the tree does with tokens without knowing them. Runs lie within a chunk.
class Tokens {
 public:
  virtual ~Tokens() = default;
  /// Makes room for chunks [0, num_chunks).
  virtual void grow(std::size_t num_chunks) = 0;
  /// Adds tokens to the hash of a key.
  [[nodiscard]] virtual std::uint64_t hash(std::uint64_t seed, ChunkIndex chunk,
                                           std::int32_t offset,
                                           std::int32_t count) const noexcept = 0;
  /// Leading tokens that two runs of `count` have in common.
  [[nodiscard]] virtual std::int32_t common(ChunkIndex a, std::int32_t offset_a, ChunkIndex b,
                                            std::int32_t offset_b,
                                            std::int32_t count) const noexcept = 0;
  virtual void copy(ChunkIndex from, std::int32_t offset, ChunkIndex to, std::int32_t to_offset,
                    std::int32_t count) noexcept = 0;
  /// Asks early for a slot that will be written.
  virtual void prefetch(ChunkIndex chunk, std::int32_t offset) const noexcept = 0;
};

/// The caller's allocator without its type.
class AnyAllocator {
 public:
  virtual ~AnyAllocator() = default;
  virtual ChunkIndex allocate() = 0;
  virtual void free(ChunkIndex chunk) noexcept = 0;
  [[nodiscard]] virtual std::size_t capacity() const noexcept = 0;
  [[nodiscard]] virtual std::size_t available() const noexcept = 0;
  [[nodiscard]] virtual std::size_t high_water() const noexcept = 0;
};

template <ChunkAllocator A>
class AnyAllocatorOf final : public AnyAllocator {
 public:
  explicit AnyAllocatorOf(A allocator) : allocator_(std::move(allocator)) {}
  [[nodiscard]] const A& get() const noexcept { return allocator_; }

  ChunkIndex allocate() override { return allocator_.allocate(); }
  void free(ChunkIndex chunk) noexcept override { allocator_.free(chunk); }
  [[nodiscard]] std::size_t capacity() const noexcept override { return allocator_.capacity(); }
  [[nodiscard]] std::size_t available() const noexcept override { return allocator_.available(); }
  [[nodiscard]] std::size_t high_water() const noexcept override { return allocator_.high_water(); }

 private:
  A allocator_;
};

/// What is called with each chunk that goes back to the allocator.
class FreeSink {
 public:
  virtual ~FreeSink() = default;
  virtual void operator()(ChunkIndex chunk) = 0;
};
/// One that calls the caller's sink; null for nullptr, and for an empty std::function.
template <class Sink>
[[nodiscard]] std::unique_ptr<FreeSink> make_free_sink(Sink sink) {
  if constexpr (std::is_same_v<Sink, std::nullptr_t>) {
    return nullptr;
  } else {
    if constexpr (requires { sink.operator bool(); })
      if (!sink) return nullptr;
    struct Called final : FreeSink {
      Sink sink;
      explicit Called(Sink&& given) : sink(std::move(given)) {}
      void operator()(ChunkIndex chunk) override { sink(chunk); }
    };
    return std::make_unique<Called>(std::move(sink));
  }
}

class ChunkTable {
 public:
  ChunkTable(AnyAllocator& allocator, Tokens& tokens, TreeStats& stats)
      : allocator_(allocator), tokens_(tokens), stats_(stats) {}

  [[nodiscard]] ChunkRecord& operator[](ChunkIndex s) noexcept { return records_[to_size(s)]; }
  [[nodiscard]] const ChunkRecord& operator[](ChunkIndex s) const noexcept {
    return records_[to_size(s)];
  }
  [[nodiscard]] ChunkIndex next(ChunkIndex s) const noexcept { return records_[to_size(s)].next; }
  /// Chunks that were ever seen.
  [[nodiscard]] std::size_t size() const noexcept { return records_.size(); }
  /// Chunks with pinned nodes.
  [[nodiscard]] std::size_t num_pinned() const noexcept { return num_pinned_; }
  [[nodiscard]] const AnyAllocator& allocator() const noexcept { return allocator_; }
  /// Free, or held by nothing but cache.
  [[nodiscard]] std::size_t num_available() const noexcept {
    return allocator_.available() + stats_.retained_chunks;
  }

  /// A node takes its first slot in a chunk that others have slots in.
  void add_node(ChunkIndex s, ChunkUse use) noexcept {
    ChunkRecord& record = records_[to_size(s)];
    ++record.nodes;
    if (use.active && record.active++ == 0) --stats_.retained_chunks;
    if (use.pinned) count_pin(s, 1);
  }
  /// A node gave up its last slot in the chunk. Returns whether that was the last node's.
  bool remove_node(ChunkIndex s, ChunkUse use) noexcept {
    ChunkRecord& record = records_[to_size(s)];
    if (use.pinned) count_pin(s, -1);
    if (record.nodes == 1) {
      if (!use.active) --stats_.retained_chunks;
      give_back(s);
      return true;
    }
    --record.nodes;
    if (use.active && --record.active == 0) ++stats_.retained_chunks;
    return false;
  }
  /// Of each chunk of a run one node is used from now on, or no longer.
  void set_active(ChunkIndex first, ChunkIndex last, bool active) noexcept {
    ChunkRecord* const records = records_.data();
    std::size_t count = 0;  // of those that this makes used, or unused
    for (ChunkIndex s = first;; s = records[to_size(s)].next) {
      std::int32_t& users = records[to_size(s)].active;
      count += active ? users++ == 0 : --users == 0;
      if (s == last) break;
    }
    if (active)
      stats_.retained_chunks -= count;
    else
      stats_.retained_chunks += count;
  }
  /// One of the chunk's nodes is pinned (+1) or no longer (-1).
  void count_pin(ChunkIndex s, std::int32_t by) noexcept {
    ChunkRecord& record = records_[to_size(s)];
    const bool was_pinned = record.pinned > 0;
    record.pinned += by;
    if (was_pinned && record.pinned == 0) --num_pinned_;
    if (!was_pinned && record.pinned > 0) ++num_pinned_;
  }

  /// Reserves `count` chunks, for take(). evict_one() makes one free where the budget is spent;
  /// false if it cannot. False, with nothing taken and nothing evicted, when that is not enough.
  /// Throws InvalidArgument, with nothing taken, where the allocator answers what is no free chunk.
  template <class EvictOne>
  bool acquire(std::int32_t count, const EvictOne& evict_one) {
    if (count <= 0) return true;
    if (to_size(count) > num_available()) return false;
    struct GiveBack {
      ChunkTable& chunk_table;
      bool keep = false;
      ~GiveBack() {
        if (!keep) chunk_table.release();
      }
    } guard{*this};
    acquired_.clear();
    num_taken_ = 0;
    if (acquired_.capacity() < to_size(count)) acquired_.reserve(2 * to_size(count));
    for (std::int32_t left = count; left > 0;) {
      const ChunkIndex s = allocator_.allocate();
      if (s == no_chunk) {
        if (!evict_one()) return false;
        continue;
      }
      if (to_size(s) >= records_.size()) [[unlikely]]
        register_chunk(s);
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
  /// One of the chunks that were acquired, for node `owner`, after `prev`.
  CHUNKATTN_INLINE ChunkIndex take(NodeIndex owner, ChunkIndex prev, ChunkUse use) noexcept {
    const ChunkIndex s = acquired_[num_taken_++];
    ChunkRecord& record = records_[to_size(s)];  // as new, but for `nodes`, which is 1
    record.owner = owner;
    record.active = use.active ? 1 : 0;
    record.prev = prev;
    ++stats_.used_chunks;
    if (!use.active) ++stats_.retained_chunks;
    if (use.pinned) count_pin(s, 1);
    return s;
  }
  /// Gives back what was acquired and not needed: an eviction may have made room in a chunk that is
  /// in use.
  void release() noexcept {
    for (; acquired_.size() > num_taken_; acquired_.pop_back()) {
      const ChunkIndex s = acquired_.back();
      if (to_size(s) < records_.size())
        records_[to_size(s)].nodes = 0;  // else there was no memory for it
      allocator_.free(s);
    }
  }

  /// Asks early for a slot whose token will be written.
  void prefetch(ChunkIndex s, std::int32_t offset) const noexcept { tokens_.prefetch(s, offset); }

  void set_free_sink(std::unique_ptr<FreeSink> sink) { free_sink_ = std::move(sink); }

 private:
  /// Makes a record for a chunk that was never seen before.
  [[gnu::noinline]] void register_chunk(ChunkIndex s) {
    const std::size_t end = allocator_.high_water();
    if (s < 0 || to_size(s) >= end) [[unlikely]]
      fail_argument(
          "allocator.allocate()", s,
          {"a chunk from 0 on, below its high_water(), ", end, ", or no_chunk, ", no_chunk});
    acquired_.push_back(s);  // given back if there is no memory
    grow(end);
    acquired_.pop_back();
  }
  [[noreturn]] CHUNKATTN_COLD void fail_taken(ChunkIndex s) {
    --records_[to_size(s)].nodes;
    fail_argument("allocator.allocate()", s, "a free chunk; the tree has this one already");
  }
  void grow(std::size_t count) {
    tokens_.grow(count);
    records_.resize(count);
  }
  void give_back(ChunkIndex s) noexcept {
    records_[to_size(s)] = ChunkRecord{};
    --stats_.used_chunks;
    if (free_sink_) (*free_sink_)(s);
    allocator_.free(s);
  }

  AnyAllocator& allocator_;
  Tokens& tokens_;
  TreeStats& stats_;
  Array<ChunkRecord> records_;
  Array<ChunkIndex> acquired_;  // in the order handed out, in which they are taken
  std::size_t num_taken_ = 0;
  std::size_t num_pinned_ = 0;
  std::unique_ptr<FreeSink> free_sink_;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
