// A Finished that is dropped discards its outputs: a loop over the rows of a temporary one would
// find none.
// expect: deleted
// expect: rows()
#include <chunkattn/prefix_tree.hpp>
#include <utility>

using Tree = chunkattn::PrefixTree<int, 64>;

void commit(Tree::InFlight& in_flight) {
#ifdef CHUNKATTN_CONTROL
  auto finished = std::move(in_flight).finish();
  for (auto& row : finished.rows()) finished.commit(row, 7);
#else
  for (const auto& row : std::move(in_flight).finish().rows()) (void)row;
#endif
}
