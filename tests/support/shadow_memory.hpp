// What stands for K/V memory in tests of the tree: one number per (slot, offset), the hash of the
// token path that was written there. Whatever is shared wrongly, read before it was written,
// overwritten, moved or freed too early is a wrong number.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "chunkattn/kv/cache.hpp"
#include "chunkattn/kv/view.hpp"
#include "chunkattn/tree/allocator.hpp"
#include "chunkattn/tree/types.hpp"

namespace test {

using namespace chunkattn;

using SimToken = std::int32_t;
using Place = std::pair<SlotIndex, std::int32_t>;

struct ShadowMemory {
  int chunk_size = 0;
  std::vector<std::uint64_t> rows;    // [slot][offset], 0 for garbage
  std::vector<std::uint64_t> epochs;  // [slot]: how often the slot was freed

  [[nodiscard]] std::size_t index(Place place) const {
    return static_cast<std::size_t>(place.first) * static_cast<std::size_t>(chunk_size) +
           static_cast<std::size_t>(place.second);
  }
  [[nodiscard]] std::uint64_t& row(Place place) { return rows[index(place)]; }
  [[nodiscard]] std::uint64_t epoch(SlotIndex slot) const {
    return epochs[static_cast<std::size_t>(slot)];
  }
};

/// A user's own allocator: a pool that turns what is freed into garbage.
struct ShadowAllocator {
  PoolAllocator pool;
  ShadowMemory* memory = nullptr;

  SlotIndex allocate() {
    const SlotIndex s = pool.allocate();
    if (s != no_slot && static_cast<std::size_t>(s) >= memory->epochs.size()) {
      memory->epochs.resize(static_cast<std::size_t>(s) + 1);
      memory->rows.resize(memory->index({s + 1, 0}));
    }
    return s;
  }
  void free(SlotIndex s) noexcept {
    ++memory->epochs[static_cast<std::size_t>(s)];
    std::fill_n(&memory->row({s, 0}), memory->chunk_size, 0);
    pool.free(s);
  }
  [[nodiscard]] std::size_t capacity() const noexcept { return pool.capacity(); }
  [[nodiscard]] std::size_t available() const noexcept { return pool.available(); }
  [[nodiscard]] std::size_t high_water() const noexcept { return pool.high_water(); }
};

/// The shadow as an engine's own K/V cache of one layer and head: gather_kv(), scatter_kv(),
/// swap_out() and resume() work on it. K and V are the same number.
struct ShadowCache {
  ShadowMemory* memory;

  [[nodiscard]] KvCacheOptions options() const { return {1, 1, 1}; }
  [[nodiscard]] KvView<std::uint64_t> layer(int) const {
    return make_kv_view(memory->rows.data(), memory->rows.data(),
                        {.num_slots = static_cast<std::int32_t>(memory->epochs.size()),
                         .num_kv_heads = 1,
                         .chunk_size = memory->chunk_size,
                         .head_dim = 1});
  }
};

/// The hash of a path that is one token longer. `weights` tells the times before and after clear()
/// apart.
inline std::uint64_t extend_hash(std::uint64_t hash, const Namespace& space, SimToken token) {
  for (const std::uint64_t part :
       {space.tenant + 1, space.adapter + 1, std::uint64_t{space.is_public ? 7u : 3u},
        static_cast<std::uint64_t>(token) + 1})
    hash = (hash ^ part) * 0x9e3779b97f4a7c15u + (hash >> 31);
  return hash | 1;  // even numbers are garbage
}
inline std::uint64_t empty_hash(std::uint64_t weights) {
  return 2 * weights + 1;
}
inline Namespace space_at(const Namespace& own, std::size_t position, std::size_t public_end) {
  if (position >= public_end) return own;
  return {.adapter = own.adapter, .is_public = true};
}

}  // namespace test
