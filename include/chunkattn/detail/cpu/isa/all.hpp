// The kernels of one pass, in the order in which they build on each other; see kernels.hpp.
// clang-format off
#include "simd.hpp"
#include "elements.hpp"
#include "tiles.hpp"
#include "line_state.hpp"
#include "evaluate.hpp"
#include "rules.hpp"
#include "tile_logits.hpp"
#include "chunk_first.hpp"
#if defined(CHUNKATTN_SOFTWARE_TILES) || defined(CHUNKATTN_PASS_AMX)
#include "tile_operands.hpp"
#include "tile_products.hpp"
#include "tile_first.hpp"
#endif
#include "sequence_first.hpp"
#include "partial_results.hpp"
#include "write.hpp"
#include "engine.hpp"
