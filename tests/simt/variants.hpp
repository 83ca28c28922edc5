// The emulated kernels as a backend of test::check_variant_on().
#pragma once

#include <span>
#include <type_traits>

#include "simt/attention.hpp"
#include "support/variant_cases.hpp"

namespace simt {

template <int HeadDim, int ValueDim = HeadDim>
struct CudaModes {
  template <class T>
  using Query = std::conditional_t<chunkattn::has_row_scales<T>, chunkattn::half, T>;
  static constexpr int head_dim = HeadDim;
  static constexpr int value_dim = ValueDim;
  static constexpr int long_path = 400;  ///< tokens from which on runs are cut

  test::Random random{99};

  /// Calls check(out, lse, rounding) with each answer: shared and cut as often as that can be, and
  /// neither.
  template <class T, class E, class V, class F>
  void each_answer(const chunkattn::KvView<E>& kv, const chunkattn::PlanView& plan,
                   std::span<const T> q, const V& variant, const F& check) {
    for (const bool eager : {true, false}) {
      CAPTURE(eager);
      chunkattn::detail::cuda::CostModel model = eager_model();
      if (!eager) model.wait_ps = std::int64_t{1} << 50;
      shuffle_turns(random);
      const StepResult<T> got =
          attention_step<T, chunkattn::detail::cuda::HeadDims{HeadDim, ValueDim}>(
              kv, plan, q, model, random.uniform(2, 3), 3, 0, variant);
      check(std::span<const T>(got.out), got.lse, chunkattn::unit_roundoff<T>());
    }
  }
  template <class E, class T, class V, class F>
  void each_answer(const test::AttentionCase<E, T>& problem, const V& variant, const F& check) {
    each_answer<T>(problem.kv.view, problem.plan.view(), problem.q, variant, check);
  }
};

}  // namespace simt
