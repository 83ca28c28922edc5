// An insert whose tokens fail to be copied would stop half-way.
// expect: TokenType
// expect: NothrowCopyable
#include <chunkattn/prefix_tree.hpp>
#include <string>
#include <string_view>

#ifdef CHUNKATTN_CONTROL
chunkattn::PrefixTree<std::string_view, 64> tree;
#else
chunkattn::PrefixTree<std::string, 64> tree;
#endif
