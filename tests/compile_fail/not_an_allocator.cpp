// The allocator hands out chunk indices; std::allocator hands out memory.
// expect: ChunkAllocator
#include <chunkattn/prefix_tree.hpp>
#include <memory>

#ifdef CHUNKATTN_CONTROL
chunkattn::PrefixTree<int, 64, chunkattn::PoolAllocator> tree;
#else
chunkattn::PrefixTree<int, 64, std::allocator<int>> tree;
#endif
