// Runs a kernel from PTX: blocks, warps and their turns.
#pragma once

#include <vector>

#include "ptx/fault.hpp"
#include "ptx/machine.hpp"

namespace ptxrun {

/// What has been run so far.
struct Statistics {
  u64 launches = 0, instructions = 0, mma = 0;  // instructions: of warps
  std::vector<u64> by_form;                     // of warps
};
Statistics& statistics();

struct Launch {
  int grid = 1, threads = 32;
  std::size_t shared_bytes = 0;
  const void* params = nullptr;
  std::size_t param_bytes = 0;
  u64 seed = 1;  ///< of the turns that blocks and warps take
};

/// Runs `entry`. Blocks are under way side by side, at most four; which warp goes on, and how far,
/// is by chance. Throws a Fault that names block, line and form for what a device would not
/// forgive.
void run(const Entry& entry, const Launch& launch);

}  // namespace ptxrun
