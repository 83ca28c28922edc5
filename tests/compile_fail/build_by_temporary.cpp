// A view reads its plan's arrays: those of a temporary plan are gone when it has returned.
// expect: deleted
// expect: build(
#include <chunkattn/attention_plan.hpp>
#include <chunkattn/prefix_tree.hpp>

using Tree = chunkattn::PrefixTree<int, 64>;

int rows_of(Tree::Step& step) {
#ifdef CHUNKATTN_CONTROL
  chunkattn::AttentionPlan plan;
  const auto view = plan.build(step);
#else
  const auto view = chunkattn::AttentionPlan().build(step);
#endif
  return view.num_rows;
}
