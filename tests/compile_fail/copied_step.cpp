// A step has one owner; a copy would be cancelled or run twice.
// expect: deleted
#include <chunkattn/prefix_tree.hpp>
#include <utility>

using Handle = chunkattn::PrefixTree<int, 64>::Step;

#ifdef CHUNKATTN_CONTROL
Handle take(Handle& other) {
  return std::move(other);
}
#else
Handle take(Handle& other) {
  return other;
}
#endif
