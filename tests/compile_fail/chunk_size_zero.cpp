// A chunk must hold something.
// expect: PrefixTree: ChunkSize must be a power of two from 1 to 1024, for example 64
#include <chunkattn/prefix_tree.hpp>

#ifdef CHUNKATTN_CONTROL
chunkattn::PrefixTree<int, 1> tree;
#else
chunkattn::PrefixTree<int, 0> tree;
#endif
