// A handle is moved, or forked; a copy would leave twice.
// expect: deleted
#include <chunkattn/prefix_tree.hpp>
#include <utility>

using Sequence = chunkattn::PrefixTree<int, 64>::Sequence;

#ifdef CHUNKATTN_CONTROL
Sequence take(Sequence& other) {
  return std::move(other);
}
#else
Sequence take(Sequence& other) {
  return other;
}
#endif
