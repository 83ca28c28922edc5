// NaN is not equal to itself: a prompt of such tokens would not be found where it stands.
// expect: TokenType
// expect: EqualToItself
#include <chunkattn/prefix_tree.hpp>

#ifdef CHUNKATTN_CONTROL
chunkattn::PrefixTree<long long, 64> tree;
#else
chunkattn::PrefixTree<double, 64> tree;
#endif
