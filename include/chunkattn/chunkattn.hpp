// The core in one include: the prefix tree, K/V memory, plans and the attention kernels. It needs
// nothing but a C++20 compiler; under nvcc it brings the CUDA backend too. all.hpp has the rest.
#pragma once

// clang-format off
#include "detail/support/config.hpp"  // first: it refuses what cannot compile the others
// clang-format on

#include "allocator.hpp"
#include "attention_options.hpp"
#include "attention_plan.hpp"
#include "chunk_attention.hpp"
#include "element.hpp"
#include "error.hpp"
#include "executor.hpp"
#include "fwd.hpp"
#include "head_rows.hpp"
#include "kv_cache.hpp"
#include "kv_view.hpp"
#include "merge_state.hpp"
#include "plan_view.hpp"
#include "prefix_tree.hpp"
#include "sequence.hpp"
#include "step.hpp"
#include "tree_options.hpp"
#include "variants.hpp"
#include "version.hpp"

#if defined(__CUDACC__)
#include "cuda.cuh"
#endif
