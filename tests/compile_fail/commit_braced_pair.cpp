// {7, 2} reads like two outputs, but could be a pointer and a length: say which list it is.
// expect: no matching
#include <chunkattn/prefix_tree.hpp>
#include <vector>

using Tree = chunkattn::PrefixTree<int, 64>;

void commit(Tree::Finished& done, const chunkattn::ScheduledSequence& row) {
#ifdef CHUNKATTN_CONTROL
  done.commit(row, std::vector<int>{7, 2});
#else
  done.commit(row, {7, 2});
#endif
}
