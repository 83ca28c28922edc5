// Refuses plans that are out of date.
#pragma once

#include "../../plan_view.hpp"
#include "../support/check.hpp"
#include "../support/config.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail {

inline void check_current(const LiveView& plan) {
  if (!plan.is_current()) [[unlikely]]
    fail(
        InvalidArgument("plan = out of date: expected the view that its plan built last, of a "
                        "step that is open or in flight"));
}

}  // namespace detail
CHUNKATTN_NAMESPACE_END
