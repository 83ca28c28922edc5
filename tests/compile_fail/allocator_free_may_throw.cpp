// Leaving must not fail, so free() must be noexcept.
// expect: ChunkAllocator
#include <chunkattn/prefix_tree.hpp>

struct Allocator {
  chunkattn::ChunkIndex allocate() { return chunkattn::no_chunk; }
#ifdef CHUNKATTN_CONTROL
  void free(chunkattn::ChunkIndex) noexcept {}
#else
  void free(chunkattn::ChunkIndex) {}
#endif
  std::size_t capacity() const noexcept { return 0; }
  std::size_t available() const noexcept { return 0; }
  std::size_t high_water() const noexcept { return 0; }
};
chunkattn::PrefixTree<int, 64, Allocator> tree;
