// Addresses that were found to be device memory, so that the driver is asked once about each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../base/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::cuda {

/// A set of addresses of limited size: a hash table, which starts anew when it is three quarters
/// full. A model of 128 layers with buffers of their own uses less than half of that. (A list that
/// overwrites its oldest entry forgets everything as soon as a step uses one address more than it
/// holds: steps come back to their addresses in the same order.)
class KnownPointers {
 public:
  [[nodiscard]] bool contains(const void* pointer) const noexcept {
    return pointer != nullptr && table_[place(pointer)] == pointer;
  }
  /// `pointer` is not null and not contained.
  void insert(const void* pointer) {
    if (++size_ > most) {
      table_.assign(table_.size(), nullptr);
      size_ = 1;
    }
    table_[place(pointer)] = pointer;
  }

 private:
  static constexpr int bits = 11;
  static constexpr std::size_t most = (std::size_t{3} << bits) / 4;

  // Where it stands, or the free place where it would.
  [[nodiscard]] std::size_t place(const void* pointer) const noexcept {
    // Addresses differ in their middle bits; a product brings those to its top.
    const auto address = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(pointer));
    auto i = static_cast<std::size_t>((address * 0x9e3779b97f4a7c15u) >> (64 - bits));
    while (table_[i] != nullptr && table_[i] != pointer) i = (i + 1) % table_.size();
    return i;
  }

  std::vector<const void*> table_ = std::vector<const void*>(std::size_t{1} << bits, nullptr);
  std::size_t size_ = 0;
};

}  // namespace detail::cuda
CHUNKATTN_NAMESPACE_END
