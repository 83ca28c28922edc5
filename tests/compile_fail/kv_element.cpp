// K and V are stored as float, half or bfloat16.
// expect: QoElement
#include <chunkattn/kv_cache.hpp>
#include <chunkattn/prefix_tree.hpp>

chunkattn::PrefixTree<int, 16> tree;
#ifdef CHUNKATTN_CONTROL
chunkattn::KvCache<chunkattn::Cpu, float> cache(tree, {1, 1, 8});
#else
chunkattn::KvCache<chunkattn::Cpu, int> cache(tree, {1, 1, 8});
#endif
