// `replay_bench retention`: what a cache of few chunks finds under each policy, and the most that
// it could find.
#pragma once

#include <span>

#include "trace_file.hpp"

namespace replay {

/// Prints a table of all traces, sizes and policies; the given one's, if it has requests, under
/// `name`. docs/retention.md says what is counted.
void run_retention(const char* name, std::span<const TracedRequest> trace);

}  // namespace replay
