// The whole CPU library in one include. It needs nothing but a C++20 compiler.
#pragma once

#include "attention_plan.hpp"
#include "chunk_allocator.hpp"
#include "chunk_attention.hpp"
#include "concepts.hpp"
#include "config.hpp"
#include "device.hpp"
#include "element.hpp"
#include "error.hpp"
#include "kv_cache.hpp"
#include "kv_view.hpp"
#include "plan_types.hpp"
#include "prefix_tree.hpp"
#include "reference.hpp"
#include "retention.hpp"
#include "version.hpp"
