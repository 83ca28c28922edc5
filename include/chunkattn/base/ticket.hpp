// What a plan, its views and a step share, so that a view knows whether it is up to date.
#pragma once

#include <cstdint>

#include "config.hpp"

CHUNKATTN_NAMESPACE_BEGIN

/// Shared by a plan, its views and the step they were built for: which view is up to date.
struct ViewTicket {
  std::uint64_t current = 0;  ///< number of that view, 0: none
};

CHUNKATTN_NAMESPACE_END
