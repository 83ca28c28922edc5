// A unit of an engine that knows a layer of a model, and of the tree no more than its plan.
#include "attention.hpp"

void attend(chunkattn::AnyAttention& attention, const chunkattn::AnyKvView& layer,
            const chunkattn::LiveView& plan, const chunkattn::AnyVariant& variant,
            std::span<const float> q, std::span<const float> k, std::span<const float> v,
            std::span<float> out) {
  attention.write(layer, plan, k, v);
  attention.run(layer, plan, q, out, {.variant = variant});
}
