// Positions inside a chunk are found by masking.
// expect: PrefixTree: ChunkSize must be a power of two from 1 to 1024, for example 64
#include <chunkattn/prefix_tree.hpp>

#ifdef CHUNKATTN_CONTROL
chunkattn::PrefixTree<int, 64> tree;
#else
chunkattn::PrefixTree<int, 48> tree;
#endif
