// One call of run(), as the kernels see it.
#pragma once

#include <cstddef>

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
  const X* q;
  Y* out;
  float* lse;
  int num_qo_heads;
  int group;
  const V& variant;

  // Of one query head of a row, in the caller's order.
  std::ptrdiff_t qo_index(int row, int qo_head) const noexcept {
    return static_cast<std::ptrdiff_t>(plan.row_token[row]) * num_qo_heads + qo_head;
  }
};

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
