// Which node continues a path with a given key: one hash table for the whole tree.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../base/array.hpp"
#include "../base/config.hpp"
#include "records.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

inline std::uint64_t mix_hash(std::uint64_t hash, std::uint64_t value) noexcept {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

/// Open-addressing table of published nodes by the hash of (parent, namespace, key tokens). A hash
/// only proposes a node; the caller compares.
class ChildIndex {
 public:
  [[nodiscard]] bool has_room(std::size_t count) const noexcept {
    return 2 * count + 2 <= table_.size();
  }

  /// Makes room for `count` entries in all; inserting them then cannot fail.
  void reserve(std::size_t count) {
    if (has_room(count)) return;
    const std::size_t wanted = 2 * count + 2;
    std::size_t capacity = table_.empty() ? 64 : table_.size();
    while (capacity < wanted) capacity *= 2;
    Array<Entry> grown(capacity);
    table_.swap(grown);
    for (const Entry& entry : grown)
      if (entry.node != none) place(entry);
  }

  void insert(std::uint32_t hash, NodeIndex node) noexcept {
    place({hash, node});
    ++size_;
  }

  void erase(std::uint32_t hash, NodeIndex node) noexcept {
    const std::size_t mask = table_.size() - 1;
    std::size_t hole = hash & mask;
    while (table_[hole].node != node) hole = (hole + 1) & mask;
    // Shift later entries of the probe run back, so that no tombstones are needed.
    for (std::size_t i = (hole + 1) & mask; table_[i].node != none; i = (i + 1) & mask) {
      const std::size_t home = table_[i].hash & mask;
      if (((i - home) & mask) >= ((i - hole) & mask)) {
        table_[hole] = table_[i];
        hole = i;
      }
    }
    table_[hole] = {};
    --size_;
  }

  /// The first node with this hash that `same(node)` confirms, or none.
  template <class Same>
  [[nodiscard]] NodeIndex find(std::uint32_t hash, const Same& same) const {
    if (table_.empty()) return none;
    const std::size_t mask = table_.size() - 1;
    for (std::size_t i = hash & mask; table_[i].node != none; i = (i + 1) & mask)
      if (table_[i].hash == hash && same(table_[i].node)) return table_[i].node;
    return none;
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }

 private:
  struct Entry {
    std::uint32_t hash = 0;
    NodeIndex node = none;
  };

  void place(Entry entry) noexcept {
    const std::size_t mask = table_.size() - 1;
    std::size_t i = entry.hash & mask;
    while (table_[i].node != none) i = (i + 1) & mask;
    table_[i] = entry;
  }

  Array<Entry> table_;  // power of two, at most half full
  std::size_t size_ = 0;
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
