// Counts as Prometheus reads them.
#pragma once

#include <string>

#include "service.hpp"

namespace serve {

/// The text of /metrics. \param matches  whether it says how much of prompts was cached, or
/// computed
[[nodiscard]] std::string metrics_text(const ServiceCounters& counters, const TreeSnapshot& tree,
                                       bool matches);

}  // namespace serve
