// EvictionRecord: which paths were evicted, why, and how long ago. Of what is too old it remembers
// only that there was something.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "../../detail/support/array.hpp"
#include "../../detail/support/config.hpp"
#include "../../tree_options.hpp"

CHUNKATTN_NAMESPACE_BEGIN

namespace detail {

/// The last `capacity` units of paths that were evicted, by a key that stands for the whole path up
/// to the unit's end. Memory is taken once. What drops out enters a Bloom filter, of two halves
/// that take turns: at least the `2 * capacity` that dropped out last are in it.
class EvictionRecord {
 public:
  /// One of them.
  struct Entry {
    EvictionCause cause;
    bool is_public;
    std::uint64_t tenant;
    std::uint64_t number;  ///< counts all units in the order in which they were evicted
  };

  explicit EvictionRecord(std::size_t capacity)
      : entries_(capacity),
        table_(std::bit_ceil(2 * capacity)),
        table_shift_(64 - std::countr_zero(table_.size())) {
    for (auto& half : filter_) half.assign(std::bit_ceil(32 * capacity + 63) / 64, 0);
    filter_shift_ = 64 - std::countr_zero(64 * filter_[0].size());
  }

  /// Units that were evicted so far.
  [[nodiscard]] std::uint64_t total() const noexcept { return total_; }
  [[nodiscard]] std::size_t capacity() const noexcept { return entries_.size(); }
  [[nodiscard]] std::size_t size() const noexcept {
    return total_ < capacity() ? total_ : capacity();
  }
  [[nodiscard]] std::size_t bytes() const noexcept {
    return entries_.size() * sizeof(Packed) + table_.size() * sizeof(std::uint32_t) +
           2 * filter_[0].size() * sizeof(std::uint64_t);
  }

  /// A unit is evicted: the last one, whatever was known of the same before.
  void add(std::uint64_t key, const Namespace& space, EvictionCause cause) noexcept {
    const std::size_t i = slot_of(total_);
    if (total_ >= capacity()) drop(i);
    const std::uint64_t flags =
        static_cast<std::uint64_t>(cause) | (space.is_public ? public_flag : 0);
    entries_[i] = {(key & ~flag_bits) | flags, space.tenant};
    std::size_t at = find_slot(key);
    table_[at] = static_cast<std::uint32_t>(i) + 1;
    ++total_;
  }
  /// Whether it is still known, and then what.
  [[nodiscard]] bool find(std::uint64_t key, Entry& entry) const noexcept {
    const std::uint32_t found = table_[find_slot(key)];
    if (found == 0) return false;
    entry = at(found - 1);
    return true;
  }
  /// Whether it was known once, perhaps. Wrongly of one in some thousand that never were.
  [[nodiscard]] bool may_have_had(std::uint64_t key) const noexcept {
    return has(filter_[0], key) || has(filter_[1], key);
  }
  /// Units of a tenant's own that were evicted after number `from`, up to number `to`.
  [[nodiscard]] std::uint64_t count_own(std::uint64_t tenant, std::uint64_t from,
                                        std::uint64_t to) const noexcept {
    std::uint64_t count = 0;
    for (std::uint64_t number = from + 1; number <= to; ++number) {
      const Packed& entry = entries_[slot_of(number)];
      count += entry.tenant == tenant && (entry.key & public_flag) == 0;
    }
    return count;
  }

 private:
  /// The cause and the flag take the key's lowest bits.
  struct Packed {
    std::uint64_t key = 0;
    std::uint64_t tenant = 0;
  };
  static constexpr std::uint64_t flag_bits = 15, public_flag = 8;
  static constexpr std::uint64_t bits_per_key = 16;
  static constexpr int num_probes = 8;

  /// Where unit number `n` of all is, or was.
  [[nodiscard]] std::size_t slot_of(std::uint64_t n) const noexcept { return n % capacity(); }
  [[nodiscard]] Entry at(std::size_t i) const noexcept {
    const Packed& entry = entries_[i];
    const std::size_t newest = slot_of(total_ - 1);
    const std::size_t age = newest >= i ? newest - i : newest + capacity() - i;
    return {static_cast<EvictionCause>(entry.key & (public_flag - 1)),
            (entry.key & public_flag) != 0, entry.tenant, total_ - 1 - age};
  }
  [[nodiscard]] std::size_t home(std::uint64_t key) const noexcept {
    return (key & ~flag_bits) * 0x9e3779b97f4a7c15u >> table_shift_;
  }
  /// Where the key stands in the table, or the empty slot where it would.
  [[nodiscard]] std::size_t find_slot(std::uint64_t key) const noexcept {
    const std::size_t mask = table_.size() - 1;
    std::size_t at = home(key);
    while (table_[at] != 0 && ((entries_[table_[at] - 1].key ^ key) & ~flag_bits) != 0)
      at = (at + 1) & mask;
    return at;
  }
  /// The entry at `i` is about to be overwritten.
  void drop(std::size_t i) noexcept {
    const std::uint64_t key = entries_[i].key;
    const std::size_t mask = table_.size() - 1;
    std::size_t hole = find_slot(key);
    if (table_[hole] != static_cast<std::uint32_t>(i) + 1) return;  // evicted again since then
    // Later entries of the probe run move back, so that no tombstones are needed.
    for (std::size_t j = (hole + 1) & mask; table_[j] != 0; j = (j + 1) & mask) {
      if (((j - home(entries_[table_[j] - 1].key)) & mask) >= ((j - hole) & mask)) {
        table_[hole] = table_[j];
        hole = j;
      }
    }
    table_[hole] = 0;
    remember(key);
  }

  template <class F>
  void for_each_bit(std::uint64_t key, const F& f) const noexcept {
    std::uint64_t hash = (key & ~flag_bits) * 0xd6e8feb86659fd93u;
    const std::uint64_t stride = (hash ^ (hash >> 32)) * 0x9fb21c651e98df25u | 1;
    for (int i = 0; i < num_probes; ++i, hash += stride) f(hash >> filter_shift_);
  }
  void remember(std::uint64_t key) noexcept {
    if (in_half_ * bits_per_key >= 64 * filter_[0].size()) {
      filter_[0].swap(filter_[1]);
      filter_[0].assign(filter_[1].size(), 0);
      in_half_ = 0;
    }
    for_each_bit(
        key, [this](std::uint64_t bit) { filter_[0][bit / 64] |= std::uint64_t{1} << bit % 64; });
    ++in_half_;
  }
  [[nodiscard]] bool has(const Array<std::uint64_t>& half, std::uint64_t key) const noexcept {
    bool all = true;
    for_each_bit(key,
                 [&](std::uint64_t bit) { all = all && (half[bit / 64] >> bit % 64 & 1) != 0; });
    return all;
  }

  Array<Packed> entries_;       // a ring
  Array<std::uint32_t> table_;  // one more than an index of entries_; 0: none. At most half full
  int table_shift_;
  std::uint64_t total_ = 0;
  Array<std::uint64_t> filter_[2];  // the first half is being filled
  int filter_shift_ = 0;
  std::uint64_t in_half_ = 0;  // keys in it
};

}  // namespace detail

CHUNKATTN_NAMESPACE_END
