// Counts as Prometheus reads them.
#pragma once

#include <string>

#include "service.hpp"

namespace serve {

/// The text of /metrics.
[[nodiscard]] std::string metrics_text(const ServiceCounters& counters, const TreeSnapshot& tree);

}  // namespace serve
