// PlanBuilder::update(), out of its class for CHUNKATTN_BODIES.
#pragma once

#include "../support/config.hpp"
#include "plan_builder.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

CHUNKATTN_FUNCTION void PlanBuilder::update(StepReader& step) {
  step.carry_copies(arrays_.copies);
  const bool may_advance = built_for_ == step.tree_id() && built_version_ == step.version() &&
                           built_.size() == step.entries().size() && !step.has_trees();
  if (!may_advance || !advance(step)) rebuild(step);
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
