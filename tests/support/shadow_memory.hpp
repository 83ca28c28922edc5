// ShadowMemory: K/V memory in tests of the tree: one number per (chunk, offset), the hash of the
// token path that was written there. Whatever is shared wrongly, read before it was written,
// overwritten, moved or freed too early is a wrong number.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "chunkattn/allocator.hpp"
#include "chunkattn/kv_cache.hpp"
#include "chunkattn/kv_view.hpp"
#include "chunkattn/tree_options.hpp"

namespace test {

using namespace chunkattn;

using SimToken = std::int32_t;
using Place = std::pair<ChunkIndex, std::int32_t>;

/// What an allocator may do wrong.
enum class Lie : std::uint8_t { none, in_use, too_large, negative, spent, breaks };
struct BrokenAllocator : std::runtime_error {
  BrokenAllocator() : std::runtime_error("the allocator broke") {}
};

struct ShadowMemory {
  int chunk_size = 0;
  std::vector<std::uint64_t> rows;    // [chunk][offset], 0 for garbage
  std::vector<std::uint64_t> values;  // the same for V, which is not read
  std::vector<std::uint64_t> epochs;  // [chunk]: how often the chunk was freed
  std::vector<std::uint8_t> used;     // [chunk]
  Lie lie = Lie::none;                // at the next allocation
  std::size_t lie_at = 0;             // which chunk it is about
  std::uint64_t lies = 0;             // how often it lied

  [[nodiscard]] std::size_t index(Place place) const {
    return static_cast<std::size_t>(place.first) * static_cast<std::size_t>(chunk_size) +
           static_cast<std::size_t>(place.second);
  }
  [[nodiscard]] std::uint64_t& row(Place place) { return rows[index(place)]; }
  [[nodiscard]] std::uint64_t epoch(ChunkIndex chunk) const {
    return epochs[static_cast<std::size_t>(chunk)];
  }
  /// The answer to an allocation that is a lie; nothing where there is none of that kind.
  std::optional<ChunkIndex> lied(std::size_t high_water) {
    const Lie kind = std::exchange(lie, Lie::none);
    const auto index = static_cast<ChunkIndex>(lie_at);
    ++lies;
    switch (kind) {
      case Lie::too_large:
        return static_cast<ChunkIndex>(high_water) + index;
      case Lie::negative:
        return -2 - index;
      case Lie::spent:
        return no_chunk;
      case Lie::breaks:
        throw BrokenAllocator();
      default:
        for (std::size_t i = 0; i < used.size(); ++i)
          if (used[(lie_at + i) % used.size()])
            return static_cast<ChunkIndex>((lie_at + i) % used.size());
    }
    --lies;
    return std::nullopt;
  }
};

/// A user's own allocator: a pool that turns what is freed into garbage, and lies where a test
/// wants it.
struct ShadowAllocator {
  PoolAllocator pool;
  ShadowMemory* memory = nullptr;

  ChunkIndex allocate() {
    if (memory->lie != Lie::none) [[unlikely]]
      if (const auto answer = memory->lied(pool.high_water())) return *answer;
    const std::size_t size = pool.high_water() + 1;  // first, as memory may run out
    if (size > memory->epochs.size()) {
      memory->rows.resize(size * static_cast<std::size_t>(memory->chunk_size));
      memory->used.resize(size);
      memory->epochs.resize(size);
    }
    const ChunkIndex s = pool.allocate();
    if (s != no_chunk) memory->used[static_cast<std::size_t>(s)] = 1;
    return s;
  }
  void free(ChunkIndex s) noexcept {
    ++memory->epochs[static_cast<std::size_t>(s)];
    memory->used[static_cast<std::size_t>(s)] = 0;
    std::fill_n(&memory->row({s, 0}), memory->chunk_size, 0);
    pool.free(s);
  }
  [[nodiscard]] std::size_t capacity() const noexcept { return pool.capacity(); }
  [[nodiscard]] std::size_t available() const noexcept { return pool.available(); }
  [[nodiscard]] std::size_t high_water() const noexcept { return pool.high_water(); }
};

/// The shadow as an engine's own K/V cache of one layer and head: gather_kv(), scatter_kv(),
/// swap_out() and resume() work on it. Only K means something; V lies beside it.
struct ShadowCache {
  ShadowMemory* memory;

  [[nodiscard]] KvCacheOptions options() const { return {1, 1, 1}; }
  [[nodiscard]] KvView<std::uint64_t> layer(int) const {
    memory->values.resize(memory->rows.size());
    return make_kv_view(memory->rows.data(), memory->values.data(),
                        {.num_chunks = static_cast<std::int32_t>(memory->epochs.size()),
                         .num_kv_heads = 1,
                         .chunk_size = memory->chunk_size,
                         .head_dim = 1});
  }
};

/// The hash of a path that is one token longer. `weights` distinguishes the times before and after
/// clear() apart.
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
