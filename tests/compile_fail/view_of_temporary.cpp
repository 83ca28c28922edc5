// A view of arrays that are gone when the line has ended.
// expect: deleted
// expect: view()
#include <chunkattn/plan_view.hpp>

chunkattn::PlanView::Arrays make();

int segments() {
#ifdef CHUNKATTN_CONTROL
  const chunkattn::PlanView::Arrays arrays = make();
  const chunkattn::PlanView view = arrays.view();
#else
  const chunkattn::PlanView view = make().view();
#endif
  return view.num_segments;
}
