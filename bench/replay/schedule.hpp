// `replay_bench schedule`: an engine on the prefix tree with a clock of its own, under orders in
// which waiting requests are admitted.
#pragma once

#include <span>

#include "trace_file.hpp"

namespace replay {

/// Prints a table of all workloads and orders; the trace's, if it has requests, under `name`.
/// docs/scheduling.md says what is simulated.
void run_schedules(const char* name, std::span<const TracedRequest> trace);

}  // namespace replay
