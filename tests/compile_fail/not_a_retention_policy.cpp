// expect: RetentionPolicy
#include <chunkattn/prefix_tree.hpp>

struct Forever {};

#ifdef CHUNKATTN_CONTROL
chunkattn::PrefixTree<int, 64, chunkattn::PoolAllocator, chunkattn::RetentionOptions> tree;
#else
chunkattn::PrefixTree<int, 64, chunkattn::PoolAllocator, Forever> tree;
#endif
