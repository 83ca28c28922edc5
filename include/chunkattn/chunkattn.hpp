// The whole library in one include. It needs nothing but a C++20 compiler; under nvcc it brings the
// CUDA backend too.
#pragma once

// clang-format off
#include "base/config.hpp"  // first: it refuses what cannot compile the others
// clang-format on

// The front is here, too: kernels are compiled by those who call make_attention(), and reading it
// costs little. Units that shall be compiled fast include any_attention.hpp instead of this.
#include "any_attention.hpp"
#include "attention/merge_state.hpp"
#include "attention/reference.hpp"
#include "attention/variant.hpp"
#include "base/concepts.hpp"
#include "base/device.hpp"
#include "base/element.hpp"
#include "base/error.hpp"
#include "base/version.hpp"
#include "chunk_attention.hpp"
#include "kv/cache.hpp"
#include "kv/transfer.hpp"
#include "kv/view.hpp"
#include "make_attention.hpp"
#include "plan/arrays.hpp"
#include "plan/attention_plan.hpp"
#include "plan/block_table.hpp"
#include "plan/view.hpp"
#include "tree/allocator.hpp"
#include "tree/nodes.hpp"
#include "tree/prefix_tree.hpp"
#include "tree/print.hpp"
#include "tree/retention.hpp"
#include "tree/sequence.hpp"
#include "tree/step.hpp"

#if defined(__CUDACC__)
#include "make_attention.cuh"  // with the CUDA backend that it stands before
#endif
