// A step that has finished is another object: std::move(step).finished().
// expect: finished
#include <chunkattn/prefix_tree.hpp>
#include <utility>

using Tree = chunkattn::PrefixTree<int, 64>;

Tree::Finished finish(Tree::Step& step) {
#ifdef CHUNKATTN_CONTROL
  return std::move(step).finished();
#else
  return step.finished();
#endif
}
