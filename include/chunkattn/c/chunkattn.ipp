// The functions of chunkattn.h, for one C++ source file of a program or shared library:
//
//     #define CHUNKATTN_C_KERNELS(X) X(64, 64, float, float) X(128, 128, chunkattn::half, float)
//     #include <chunkattn/c/chunkattn.ipp>
//
// CHUNKATTN_C_KERNELS lists head sizes of K and V, the type of K/V and that of q, k, v and out. The
// file compiles these kernels too, unless it defines CHUNKATTN_C_EXTERN_KERNELS; then others do,
// see kernels.ipp.
#pragma once

#if !defined(CHUNKATTN_C_KERNELS)
#error "chunkattn: define CHUNKATTN_C_KERNELS(X) before chunkattn.ipp, as it says"
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../attention_options.hpp"
#include "../detail/attention/row_places.hpp"
#include "../detail/support/array.hpp"
#include "../detail/support/check.hpp"
#include "../detail/support/in_use.hpp"
#include "../head_rows.hpp"
#include "../interop/paged_plan.hpp"
#include "../kv_view.hpp"
#include "../runtime/any_attention.hpp"
#include "../runtime/openmp_executor.hpp"
#include "../variants.hpp"
#include "chunkattn.h"
#include "detail/checks.hpp"
#include "detail/guarded.hpp"
#include "detail/handles.hpp"
#include "kernels.ipp"
#include "tree.ipp"

#if defined(CHUNKATTN_C_EXTERN_KERNELS)
#define CHUNKATTN_C_DECLARE(HeadDim, ValueDim, Kv, Qo)                                            \
  template <>                                                                                     \
  std::unique_ptr<chunkattn::AnyAttention> chunkattn::detail::c::make<HeadDim, ValueDim, Kv, Qo>( \
      chunkattn::OpenMpExecutor&, const chunkattn::CpuOptions&);
CHUNKATTN_C_KERNELS(CHUNKATTN_C_DECLARE)
#undef CHUNKATTN_C_DECLARE
#else
CHUNKATTN_C_KERNELS(CHUNKATTN_C_KERNEL)
#endif

struct chunkattn_attention {
  chunkattn_config config{};
  chunkattn::OpenMpExecutor threads;
  std::unique_ptr<chunkattn::AnyAttention> attention;
  std::string description;
  chunkattn::PlanView::Arrays slots;  // of chunkattn_write_slots()
  chunkattn::detail::InUse in_use;

  explicit chunkattn_attention(int num_threads) : threads(num_threads) {}
};

struct chunkattn_table_plan final : chunkattn_plan {
  explicit chunkattn_table_plan(const chunkattn::PageGeometry& pages) : plan(pages) {
    geometry = pages;
  }

  chunkattn::PagedPlan plan;
};

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::c {

inline std::unique_ptr<AnyAttention> make_for(const chunkattn_config& config,
                                              OpenMpExecutor& threads) {
  const HeadSize size(config.head_dim, value_dim(config));
  const ElementType kv = type_of(config.kv_type), qo = type_of(config.qo_type);
  CpuOptions options;
  if (config.scale != 0) options.sm_scale = config.scale;
  if (config.accuracy == CHUNKATTN_ONE_TERM) options.accuracy = CpuOptions::Accuracy::one_term;
#define CHUNKATTN_C_CHOOSE(HeadDim, ValueDim, Kv, Qo)                     \
  if (size == HeadSize(HeadDim, ValueDim) && kv == element_type_of<Kv> && \
      qo == element_type_of<Qo>)                                          \
    return make<HeadDim, ValueDim, Kv, Qo>(threads, options);
  CHUNKATTN_C_KERNELS(CHUNKATTN_C_CHOOSE)
#undef CHUNKATTN_C_CHOOSE
  std::vector<Kernels> compiled;
#define CHUNKATTN_C_LIST(HeadDim, ValueDim, Kv, Qo) \
  compiled.push_back({HeadDim, ValueDim, number_of<Kv>, number_of<Qo>});
  CHUNKATTN_C_KERNELS(CHUNKATTN_C_LIST)
#undef CHUNKATTN_C_LIST
  fail_kernels(config, std::move(compiled));
}

template <class T>
AnyKvView view_of(const chunkattn_layer& layer, const chunkattn_config& config) {
  KvView<T> view{.k = static_cast<T*>(layer.k),
                 .v = static_cast<T*>(layer.v),
                 .num_chunks = layer.num_pages,
                 .num_kv_heads = config.num_kv_heads,
                 .head_dim = config.head_dim,
                 .chunk_size = layer.page_size,
                 .stride_chunk = layer.k_strides[0],
                 .stride_head = layer.k_strides[1],
                 .stride_token = layer.k_strides[2]};
  if (value_dim(config) != config.head_dim ||
      std::memcmp(layer.k_strides, layer.v_strides, sizeof layer.k_strides) != 0) {
    view.value_dim = value_dim(config);
    view.v_stride_chunk = layer.v_strides[0];
    view.v_stride_head = layer.v_strides[1];
    view.v_stride_token = layer.v_strides[2];
  }
  if constexpr (has_row_scales<T>) {
    view.k_scale = layer.k_scale;
    view.v_scale = layer.v_scale;
    view.scales = static_cast<KvScales>(layer.scales);
    view.scale_stride_chunk = layer.scale_strides[0];
    view.scale_stride_head = layer.scale_strides[1];
  }
  return view;
}

inline AnyKvView any_view(const chunkattn_layer& layer, const chunkattn_config& config) {
  switch (config.kv_type) {
    case CHUNKATTN_FLOAT16:
      return view_of<half>(layer, config);
    case CHUNKATTN_BFLOAT16:
      return view_of<bfloat16>(layer, config);
    case CHUNKATTN_INT8:
      return view_of<std::int8_t>(layer, config);
    case CHUNKATTN_FLOAT8_E4M3:
      return view_of<float8_e4m3>(layer, config);
    default:
      return view_of<float>(layer, config);
  }
}

inline const LiveView& checked_plan(const chunkattn_plan* given, const chunkattn_layer& layer) {
  const chunkattn_plan& plan = checked_pointer(given, "plan");
  check_argument(
      plan.view.segments_version != 0, "plan", "not built",
      "one of which chunkattn_plan_build() or chunkattn_step_build() has made a batch's plan");
  check_pages(layer, plan.geometry);
  return current_view(plan);
}

inline void write_rows(chunkattn_attention& attention, const chunkattn_layer& layer,
                       const LiveView& plan, const Rows& k, const Rows& v) {
  const chunkattn_config& config = attention.config;
  if (plan.num_rows == 0) return;
  const std::size_t width = bytes_of(config.qo_type);
  const ElementType type = type_of(config.qo_type);
  const auto keys = k.checked(plan.num_rows, config.num_kv_heads, config.head_dim, width);
  const auto values = v.checked(plan.num_rows, config.num_kv_heads, value_dim(config), width);
  attention.attention->write(any_view(layer, config), plan, {type, keys}, {type, values});
}

inline int write_plan(chunkattn_attention* attention, const chunkattn_plan* plan,
                      const chunkattn_layer* given, const Rows& k, const Rows& v,
                      std::int32_t num_tokens) {
  const InUse::Call alone(checked_pointer(attention, "attention").in_use, "attention");
  const chunkattn_layer& layer = checked_pointer(given, "layer");
  check_own_v(layer, checked_layer(layer, attention->config));
  const LiveView& view = checked_plan(plan, layer);
  check_tokens(num_tokens, view.num_rows);
  write_rows(*attention, layer, view, k, v);
  return 0;
}

inline AnyVariant variant_of(const chunkattn_variant& variant, std::int32_t num_qo_heads) {
  const std::size_t heads = to_size(num_qo_heads);
  if (variant.alibi_slopes != nullptr) return Alibi{std::span(variant.alibi_slopes, heads)};
  const SlidingWindow window{variant.window != 0 ? variant.window
                                                 : (std::numeric_limits<std::int32_t>::max)()};
  if (variant.soft_cap != 0) return combine(SoftCap{variant.soft_cap}, window);
  if (variant.sinks != nullptr) return combine(Sinks{std::span(variant.sinks, heads)}, window);
  if (variant.window != 0) return window;
  return {};
}

inline int run_plan(chunkattn_attention* attention, const chunkattn_plan* plan,
                    const chunkattn_layer* given, const chunkattn_variant* variant, const Rows& q,
                    std::int32_t num_tokens, const Rows& out, float* lse) {
  const InUse::Call alone(checked_pointer(attention, "attention").in_use, "attention");
  const chunkattn_layer& layer = checked_pointer(given, "layer");
  const chunkattn_config& config = attention->config;
  const LayerPages pages = checked_layer(layer, config);
  const LiveView& view = checked_plan(plan, layer);
  check_tokens(num_tokens, view.num_rows);
  const std::int32_t heads = config.num_qo_heads;
  if (variant != nullptr) check_variant(checked_pointer(variant, "variant"), heads);
  if (view.num_rows == 0) return 0;
  const std::size_t width = bytes_of(config.qo_type);
  const auto queries = q.checked(view.num_rows, heads, config.head_dim, width);
  const auto results = out.checked(view.num_rows, heads, value_dim(config), width);
  if (lse != nullptr) checked_pointer(lse, "lse");
  const std::span<float> denominators(lse,
                                      lse != nullptr ? to_size(view.num_rows) * to_size(heads) : 0);
  check_outputs(RowPlaces(queries, width), RowPlaces(results, width), denominators, pages, variant,
                heads);

  AnyAttention::RunOptions options{.lse = denominators};
  if (variant != nullptr) options.variant = variant_of(*variant, heads);
  const ElementType type = type_of(config.qo_type);
  const HeadRows<void> written = rows_at(const_cast<void*>(results.data), results);
  attention->attention->run(any_view(layer, config), view, {type, queries}, {type, written},
                            options);
  return 0;
}

// Functions with C linkage are the same in every namespace, but for their attributes.
extern "C" {

CHUNKATTN_C_API chunkattn_attention* chunkattn_attention_create(const chunkattn_config* given) {
  return guarded<chunkattn_attention*>(nullptr, [&] {
    const chunkattn_config& config = checked_pointer(given, "config");
    check_config(config);
    auto made = std::make_unique<chunkattn_attention>(config.num_threads);
    made->config = config;
    made->attention = make_for(config, made->threads);
    made->description = describe(*made->attention) + ", " +
                        std::to_string(made->threads.concurrency()) +
                        (made->threads.are_openmp() ? " threads of OpenMP" : " threads");
    return made.release();
  });
}

CHUNKATTN_C_API void chunkattn_attention_destroy(chunkattn_attention* attention) {
  delete attention;
}

CHUNKATTN_C_API const char* chunkattn_describe(const chunkattn_attention* attention) {
  return attention != nullptr ? attention->description.c_str() : "";
}

CHUNKATTN_C_API chunkattn_plan* chunkattn_plan_create(int32_t page_size, int32_t num_pages,
                                                      int32_t null_page) {
  return guarded<chunkattn_plan*>(nullptr, [&] {
    return new chunkattn_table_plan(checked_pages(page_size, num_pages, null_page));
  });
}

CHUNKATTN_C_API int chunkattn_plan_build(chunkattn_plan* plan, const chunkattn_tables* given) {
  return guarded(1, [&] {
    auto* const pages = dynamic_cast<chunkattn_table_plan*>(&checked_pointer(plan, "plan"));
    check_argument(pages != nullptr, "plan", "of steps", "one of chunkattn_plan_create()");
    const PageTables tables = checked_tables(checked_pointer(given, "tables"));
    try {
      pages->view = pages->plan.build(tables);
    } catch (const InvalidArgument& error) {
      fail_tables(error, tables, pages->geometry);
    }
    return 0;
  });
}

CHUNKATTN_C_API int chunkattn_plan_sharing(const chunkattn_plan* plan, chunkattn_sharing* sharing) {
  return guarded(1, [&] {
    const chunkattn_plan& of = checked_pointer(plan, "plan");
    const PlanView& view = of.view;
    const std::int32_t null_page = of.geometry.null_page;
    chunkattn_sharing found{.num_tokens = view.num_rows,
                            .num_segments = view.num_segments,
                            .pages_read = 0,
                            .pages_alone = 0};
    for (int s = 0; s < view.num_segments; ++s) {
      const Piece* const first = view.pieces + view.segments[s].piece_begin;
      const std::int64_t pages =
          std::count_if(first, first + view.segments[s].num_pieces,
                        [null_page](const Piece& piece) { return piece.chunk != null_page; });
      found.pages_read += pages;
      found.pages_alone += pages * view.segments[s].num_sequences;
    }
    checked_pointer(sharing, "sharing") = found;
    return 0;
  });
}

CHUNKATTN_C_API int chunkattn_write(chunkattn_attention* attention, const chunkattn_plan* plan,
                                    const chunkattn_layer* given, const void* k, int64_t k_stride,
                                    const void* v, int64_t v_stride, int32_t num_tokens) {
  return guarded(1, [&] {
    return write_plan(attention, plan, given, {"k", k, k_stride}, {"v", v, v_stride}, num_tokens);
  });
}

CHUNKATTN_C_API int chunkattn_write_rows(chunkattn_attention* attention, const chunkattn_plan* plan,
                                         const chunkattn_layer* given, const chunkattn_rows* k,
                                         const chunkattn_rows* v, int32_t num_tokens) {
  return guarded(
      1, [&] { return write_plan(attention, plan, given, {"k", k}, {"v", v}, num_tokens); });
}

CHUNKATTN_C_API int chunkattn_write_slots(chunkattn_attention* attention,
                                          const chunkattn_layer* given, const int64_t* slots,
                                          const void* k, int64_t k_stride, const void* v,
                                          int64_t v_stride, int32_t num_tokens) {
  return guarded(1, [&] {
    const InUse::Call alone(checked_pointer(attention, "attention").in_use, "attention");
    const chunkattn_layer& layer = checked_pointer(given, "layer");
    check_own_v(layer, checked_layer(layer, attention->config));
    check_argument(num_tokens >= 0, "num_tokens", num_tokens, "a count");
    if (num_tokens == 0) return 0;
    checked_pointer(slots, "slots");
    const std::int64_t page_size = layer.page_size;
    PlanView::Arrays& arrays = attention->slots;
    arrays.writes.assign(to_size(num_tokens), {no_chunk, 0});
    for (std::size_t i = 0; i < to_size(num_tokens); ++i) {
      if (slots[i] < 0) continue;
      if (slots[i] >= page_size * layer.num_pages) [[unlikely]]
        fail_argument(indexed_name("slots", i), slots[i],
                      {"less than num_pages * page_size = ", page_size * layer.num_pages});
      arrays.writes[i] = {static_cast<ChunkIndex>(slots[i] / page_size),
                          static_cast<std::int32_t>(slots[i] % page_size)};
    }
    arrays.chunk_size = layer.page_size;
    PlanView view = arrays.view();
    view.num_rows = num_tokens;
    write_rows(*attention, layer, LiveView::unchecked(view), {"k", k, k_stride},
               {"v", v, v_stride});
    return 0;
  });
}

CHUNKATTN_C_API int chunkattn_run(chunkattn_attention* attention, const chunkattn_plan* plan,
                                  const chunkattn_layer* given, const chunkattn_variant* variant,
                                  const void* q, int64_t q_stride, int32_t num_tokens, void* out,
                                  float* lse) {
  return guarded(1, [&] {
    return run_plan(attention, plan, given, variant, {"q", q, q_stride}, num_tokens,
                    {"out", out, 0}, lse);
  });
}

CHUNKATTN_C_API int chunkattn_run_rows(chunkattn_attention* attention, const chunkattn_plan* plan,
                                       const chunkattn_layer* given,
                                       const chunkattn_variant* variant, const chunkattn_rows* q,
                                       int32_t num_tokens, const chunkattn_rows* out, float* lse) {
  return guarded(1, [&] {
    return run_plan(attention, plan, given, variant, {"q", q}, num_tokens, {"out", out}, lse);
  });
}

}  // extern "C"

}  // namespace detail::c
CHUNKATTN_NAMESPACE_END
