// expect: HidesNoOption
#include <chunkattn/prefix_tree.hpp>

struct Forgets : chunkattn::RetentionOptions {
#ifdef CHUNKATTN_CONTROL
  Forgets() { retains = false; }
#else
  static constexpr bool retains = false;
#endif
};
chunkattn::PrefixTree<int, 64, chunkattn::PoolAllocator, Forgets> tree;
