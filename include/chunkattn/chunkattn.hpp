// The whole library in one include. It needs nothing but a C++20 compiler; under nvcc it brings the
// CUDA backend too.
#pragma once

// clang-format off
#include "instruction_set.hpp"
#include "fwd.hpp"
#include "detail/base/config.hpp"  // first: it refuses what cannot compile the others
// clang-format on

// The front is here, too: kernels are compiled by those who call make_attention(), and reading it
// costs little. Units that shall be compiled fast include any_attention.hpp instead of this.
#include "allocator.hpp"
#include "any_attention.hpp"
#include "attention_plan.hpp"
#include "block_table.hpp"
#include "chunk_attention.hpp"
#include "element.hpp"
#include "error.hpp"
#include "kv_cache.hpp"
#include "kv_view.hpp"
#include "make_attention.hpp"
#include "merge_state.hpp"
#include "plan_view.hpp"
#include "prefix_tree.hpp"
#include "retention.hpp"
#include "sequence.hpp"
#include "step.hpp"
#include "testing/reference.hpp"
#include "transfer.hpp"
#include "variants.hpp"
#include "version.hpp"

#if defined(__CUDACC__)
#include "make_attention.cuh"  // with the CUDA backend that it stands before
#endif
