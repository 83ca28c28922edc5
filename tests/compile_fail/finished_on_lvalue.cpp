// A step ends by being moved from: std::move(step).finish().
// each: step.finish step.submit in_flight.finish
// expect: write std::move(
// lines: 12
#include <chunkattn/prefix_tree.hpp>
#include <utility>

using Tree = chunkattn::PrefixTree<int, 64>;

void finish(Tree::Step& step, Tree::InFlight& in_flight) {
#ifdef CHUNKATTN_CONTROL
  (void)std::move(step).submit();
  (void)std::move(in_flight).finish();
#else
  [[maybe_unused]] auto ended = CHUNKATTN_EACH();
#endif
}
