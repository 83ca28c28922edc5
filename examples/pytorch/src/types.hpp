// Types of Python's objects: the library's types with their parameters filled in.
#pragma once

#include <chunkattn/attention_plan.hpp>
#include <chunkattn/cache/checkpoints.hpp>
#include <chunkattn/cache/policy.hpp>
#include <chunkattn/cache/windowed_groups.hpp>
#include <chunkattn/cache/windowed_layers.hpp>
#include <chunkattn/prefix_tree.hpp>
#include <chunkattn/runtime/any_attention.hpp>
#include <cstdint>

namespace binding {

using Token = std::int32_t;
using Tree = chunkattn::PrefixTree<Token, 64, chunkattn::PoolAllocator, chunkattn::CachePolicy>;
using WindowedLayers = chunkattn::WindowedLayers<Tree>;

}  // namespace binding
