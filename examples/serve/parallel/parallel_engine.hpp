// One engine on each rank, all with the same requests, steps and trees: rank 0 decides.
//
// Requests, the clock and what ends requests early come to rank 0 and are sent to the others before
// the step in which they count; from equal histories equal engines build equal steps. What is
// sampled comes from rank 0, too: only it has the logits.
#pragma once

#include <memory>

#include "../engine/engine.hpp"
#include "../ranks/communicator.hpp"

namespace serve {

/// Called by all ranks. \throws std::logic_error where their models or options differ
void check_setup(Communicator& ranks, const Model& model, const EngineOptions& options);

/// The engine of rank 0, which all others follow until it is destroyed. Where a step throws they
/// are left in it: the exception has to leave the body of run_rank(), which ends them.
/// \param engine  of the same options as those of the others
[[nodiscard]] std::unique_ptr<Engine> lead(Communicator& ranks, std::unique_ptr<Engine> engine);

/// Any other rank: does as rank 0 does until that is done.
void follow(Communicator& ranks, Engine& engine);

}  // namespace serve
