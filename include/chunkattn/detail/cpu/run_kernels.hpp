// The calls that CHUNKATTN_EXTERN_KERNELS leaves out of a translation unit: they compile the
// kernels of a head size and its types. See kernels.ipp.
#pragma once

#include <variant>

#include "kernels.hpp"

CHUNKATTN_ISA_DETAIL_BEGIN
namespace cpu {

template <int HeadDim, int ValueDim, class T, class X, class Y>
void run_kernels(AnyEngine<HeadDim, ValueDim>& engines, const ExecutorRef& executor,
                 const Call<T, X, Y, NoVariant>& call) {
  std::visit([&](auto& engine) { engine.run(executor, call); }, engines);
}

template <int HeadDim, int ValueDim, class T, class K, class V>
void write_kernels(AnyEngine<HeadDim, ValueDim>& engines, const ExecutorRef& executor,
                   const KvView<T>& layer, const PlanView& plan, const HeadRows<const K>& k,
                   const HeadRows<const V>& v) {
  std::visit([&](auto& engine) { engine.write(executor, layer, plan, k, v); }, engines);
}

}  // namespace cpu
CHUNKATTN_ISA_DETAIL_END
