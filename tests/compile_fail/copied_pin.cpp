// A pin undoes itself once; a copy would undo it twice.
// expect: deleted
#include <chunkattn/prefix_tree.hpp>
#include <utility>

using Handle = chunkattn::PrefixTree<int, 64>::Pin;

#ifdef CHUNKATTN_CONTROL
Handle take(Handle& other) {
  return std::move(other);
}
#else
Handle take(Handle& other) {
  return other;
}
#endif
