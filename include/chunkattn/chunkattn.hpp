// Everything, in one include. Compiled by nvcc it brings the CUDA backend too; otherwise it needs
// nothing but a C++20 compiler.
#pragma once

#if __has_include("attention_plan.hpp")
#include "attention_plan.hpp"
#endif
#if __has_include("chunk_allocator.hpp")
#include "chunk_allocator.hpp"
#endif
#if __has_include("chunk_attention.hpp")
#include "chunk_attention.hpp"
#endif
#include "concepts.hpp"
#include "config.hpp"
#include "element.hpp"
#include "error.hpp"
#if __has_include("kv_cache.hpp")
#include "kv_cache.hpp"
#endif
#include "kv_view.hpp"
#include "plan_types.hpp"
#if __has_include("prefix_tree.hpp")
#include "prefix_tree.hpp"
#endif
#if __has_include("reference.hpp")
#include "reference.hpp"
#endif
#include "version.hpp"
