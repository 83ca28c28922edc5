// `replay_bench retention`: what a cache of few chunks finds under each policy, and the most that
// it could find.
#pragma once

namespace replay {

/// Prints a table of all traces, sizes and policies. docs/retention.md says what is counted.
void run_retention();

}  // namespace replay
