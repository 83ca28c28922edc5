// The whole library in one include: the core and all components.
#pragma once

// clang-format off
#include "detail/support/config.hpp"  // first: it refuses what cannot compile the others
// clang-format on

#include "cache/admission.hpp"
#include "cache/annotations.hpp"
#include "cache/cached_leaf.hpp"
#include "cache/checkpoints.hpp"
#include "cache/explain.hpp"
#include "cache/policy.hpp"
#include "cache/scored_policy.hpp"
#include "cache/windowed_groups.hpp"
#include "cache/windowed_kv.hpp"
#include "cache/windowed_layers.hpp"
#include "chunkattn.hpp"
#include "debug/attention.hpp"
#include "debug/reference.hpp"
#include "debug/tree.hpp"
#include "events/cache_event.hpp"
#include "events/cache_events.hpp"
#include "events/mirror.hpp"
#include "interop/block_table.hpp"
#include "interop/page_tables.hpp"
#include "interop/paged_plan.hpp"
#include "interop/paged_view.hpp"
#include "runtime/any_attention.hpp"
#include "runtime/make_attention.hpp"
#include "runtime/openmp_executor.hpp"
#include "tiers/tiers.hpp"
#include "transfer/companion.hpp"
#include "transfer/transfer.hpp"
