// `replay_bench schedule`: an engine on the prefix tree with a clock of its own, under orders in
// which waiting requests are admitted.
#pragma once

namespace replay {

/// Prints a table of all workloads and orders. docs/scheduling.md says what is simulated.
void run_schedules();

}  // namespace replay
