// The kernels of one pass, in the order in which they build on each other; see kernels.hpp.
// clang-format off
#include "simd.hpp"
#include "line_state.hpp"
#include "chunk_first.hpp"
#include "sequence_first.hpp"
#include "partial_results.hpp"
#include "write.hpp"
#include "engine.hpp"
