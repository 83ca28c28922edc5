#include "run_rank.hpp"

#include "../../support/options.hpp"

namespace serve {

int run_rank(const std::string& parallel, const RankBody& body) {
  if (parallel == "none") return body(alone());
#if defined(SERVE_HAVE_MPI)
  return detail::run_mpi_rank(body);
#else
  throw examples::UsageError("--parallel = " + parallel +
                             ": this program was built without MPI (Debian: libopenmpi-dev)");
#endif
}

}  // namespace serve
