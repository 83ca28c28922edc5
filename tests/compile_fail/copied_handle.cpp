// A handle has one owner: a copy would leave, unpin, finish or commit twice.
// each: Sequence Pin Step InFlight Finished
// expect: deleted
#include <chunkattn/prefix_tree.hpp>
#include <utility>

using Handle = chunkattn::PrefixTree<int, 64>::CHUNKATTN_EACH;

#ifdef CHUNKATTN_CONTROL
Handle take(Handle& other) {
  return std::move(other);
}
#else
Handle take(Handle& other) {
  return other;
}
#endif
