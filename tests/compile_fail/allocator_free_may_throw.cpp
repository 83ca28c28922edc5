// Leaving must not fail, so free() must be noexcept.
// expect: ChunkAllocator
#include <chunkattn/prefix_tree.hpp>

struct Allocator {
  chunkattn::SlotIndex allocate() { return chunkattn::no_slot; }
#ifdef CHUNKATTN_CONTROL
  void free(chunkattn::SlotIndex) noexcept {}
#else
  void free(chunkattn::SlotIndex) {}
#endif
  std::size_t capacity() const noexcept { return 0; }
  std::size_t available() const noexcept { return 0; }
  std::size_t high_water() const noexcept { return 0; }
};
chunkattn::PrefixTree<int, 64, Allocator> tree;
