// The processes of one command: itself alone, or the ranks of an MPI job.
#pragma once

#include <functional>
#include <string>

#include "communicator.hpp"

namespace serve {

/// What a process does as a rank; returns its exit status.
using RankBody = std::function<int(Communicator&)>;

/// Runs `body` as what `--parallel` says: alone ("none"), or as a rank of the job that mpirun has
/// started ("tensor"). Where one rank of several fails it prints its message and ends the whole
/// job: the others may wait for it anywhere. Called once in a process.
/// \throws examples::UsageError where this program has no MPI; and what `body` throws alone
int run_rank(const std::string& parallel, const RankBody& body);

namespace detail {
int run_mpi_rank(const RankBody& body);  // where MPI is found
}

}  // namespace serve
