// One call of run(), as the kernels see it.
#pragma once

#include <cstddef>

#include "../../head_rows.hpp"
#include "../../kv_view.hpp"
#include "../../plan_view.hpp"
#include "../support/config.hpp"
#include "../support/instruction_sets.hpp"

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

/// A run's arguments, checked. K and V are T, queries X, outputs Y.
template <class T, class X, class Y, class V>
struct Call {
  const KvView<T>& kv;
  const PlanView& plan;
  HeadRows<const X> q;
  HeadRows<Y> out;
  float* lse;
  int num_qo_heads;
  int group;
  const V& variant;

  // Of one query head of a row, where the caller has it.
  const X* query(int row, int qo_head) const noexcept {
    return q.row(plan.row_token[row], qo_head);
  }
  Y* result(int row, int qo_head) const noexcept { return out.row(plan.row_token[row], qo_head); }
  float* denominator(int row, int qo_head) const noexcept {
    return lse + (static_cast<std::ptrdiff_t>(plan.row_token[row]) * num_qo_heads + qo_head);
  }
};

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
