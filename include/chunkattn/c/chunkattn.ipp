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
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../attention_options.hpp"
#include "../detail/support/array.hpp"
#include "../detail/support/check.hpp"
#include "../interop/paged_plan.hpp"
#include "../kv_view.hpp"
#include "../runtime/any_attention.hpp"
#include "../runtime/openmp_executor.hpp"
#include "../variants.hpp"
#include "chunkattn.h"
#include "kernels.ipp"

#if !CHUNKATTN_EXCEPTIONS
#error "chunkattn: chunkattn.ipp needs exceptions, which become texts there"
#endif

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
  std::vector<char> dense[2];         // copies of strided rows
  chunkattn::PlanView::Arrays slots;  // of chunkattn_write_slots()

  explicit chunkattn_attention(int num_threads) : threads(num_threads) {}
};

struct chunkattn_plan {
  chunkattn::PagedPlan plan;
  chunkattn::LiveView view{};
};

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::c {

inline char* error_text() noexcept {
  thread_local char text[1024] = "";
  return text;
}

/// Calls f; what it throws becomes the text of chunkattn_error(), and the result is `failed`.
template <class Result, class F>
Result guarded(Result failed, const F& f) noexcept {
  try {
    return f();
  } catch (const std::exception& error) {
    std::snprintf(error_text(), 1024, "%s", error.what());
  } catch (...) {
    std::snprintf(error_text(), 1024, "an unknown exception");
  }
  return failed;
}

template <class T>
T& checked_pointer(T* pointer, const char* name) {
  check_argument(pointer != nullptr, name, static_cast<const void*>(pointer), "not null");
  return *pointer;
}

inline ElementType type_of(std::int32_t type, const char* name) {
  check_argument(type >= CHUNKATTN_FLOAT32 && type <= CHUNKATTN_BFLOAT16, name, type,
                 "CHUNKATTN_FLOAT32 = 0, CHUNKATTN_FLOAT16 = 1 or CHUNKATTN_BFLOAT16 = 2");
  return type == CHUNKATTN_FLOAT32   ? ElementType::float32
         : type == CHUNKATTN_FLOAT16 ? ElementType::half
                                     : ElementType::bfloat16;
}
inline std::size_t bytes_of(std::int32_t type) noexcept {
  return type == CHUNKATTN_FLOAT32 ? 4 : 2;
}
inline int value_dim(const chunkattn_config& config) noexcept {
  return config.value_dim != 0 ? config.value_dim : config.head_dim;
}

inline std::unique_ptr<AnyAttention> make_for(const chunkattn_config& config,
                                              OpenMpExecutor& threads) {
  const HeadSize size(config.head_dim, value_dim(config));
  const ElementType kv = type_of(config.kv_type, "config.kv_type");
  const ElementType qo = type_of(config.qo_type, "config.qo_type");
  CpuOptions options;
  if (config.scale != 0) options.sm_scale = config.scale;
  if (config.accuracy == CHUNKATTN_ONE_TERM) options.accuracy = CpuOptions::Accuracy::one_term;
#define CHUNKATTN_C_CHOOSE(HeadDim, ValueDim, Kv, Qo)                     \
  if (size == HeadSize(HeadDim, ValueDim) && kv == element_type_of<Kv> && \
      qo == element_type_of<Qo>)                                          \
    return make<HeadDim, ValueDim, Kv, Qo>(threads, options);
  CHUNKATTN_C_KERNELS(CHUNKATTN_C_CHOOSE)
#undef CHUNKATTN_C_CHOOSE
  const auto named = [](HeadSize s, ElementType k, ElementType q) {
    return joined({s.head_dim, ":", s.value_dim, " of ", name_of(k), " for ", name_of(q)});
  };
  std::string known;
#define CHUNKATTN_C_NAME(HeadDim, ValueDim, Kv, Qo) \
  known += (known.empty() ? "" : ", ") +            \
           named(HeadSize(HeadDim, ValueDim), element_type_of<Kv>, element_type_of<Qo>);
  CHUNKATTN_C_KERNELS(CHUNKATTN_C_NAME)
#undef CHUNKATTN_C_NAME
  fail_argument("config.head_dim", named(size, kv, qo), {"one with kernels: ", known});
}

inline void check_heads(const chunkattn_config& config) {
  if (config.version != CHUNKATTN_C_VERSION) [[unlikely]]
    fail_argument("config.version", config.version,
                  {"CHUNKATTN_C_VERSION = ", CHUNKATTN_C_VERSION});
  check_argument(config.num_kv_heads > 0, "config.num_kv_heads", config.num_kv_heads, "at least 1");
  if (config.num_qo_heads <= 0 || config.num_qo_heads > max_qo_heads ||
      config.num_qo_heads % config.num_kv_heads != 0) [[unlikely]]
    fail_argument("config.num_qo_heads", config.num_qo_heads,
                  {"a positive multiple of num_kv_heads = ", config.num_kv_heads, ", at most ",
                   max_qo_heads});
  check_argument(config.accuracy == CHUNKATTN_TWO_TERMS || config.accuracy == CHUNKATTN_ONE_TERM,
                 "config.accuracy", config.accuracy,
                 "CHUNKATTN_TWO_TERMS = 0 or CHUNKATTN_ONE_TERM = 1");
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
  return view;
}

inline AnyKvView checked_layer(const chunkattn_layer* given, const chunkattn_attention& attention) {
  const chunkattn_layer& layer = checked_pointer(given, "layer");
  const chunkattn_config& config = attention.config;
  check_argument(layer.k != nullptr, "layer.k", static_cast<const void*>(layer.k), "memory of K");
  check_argument(layer.v != nullptr, "layer.v", static_cast<const void*>(layer.v), "memory of V");
  check_argument(layer.num_pages > 0, "layer.num_pages", layer.num_pages, "at least 1");
  check_argument(layer.page_size > 0, "layer.page_size", layer.page_size, "at least 1");
  const auto check_strides = [&](const char* name, const std::int64_t* strides, int dim) {
    const std::int64_t counts[]{layer.num_pages, config.num_kv_heads, layer.page_size};
    for (std::size_t i = 0; i < 3; ++i)
      if (counts[i] > 1 && strides[i] < dim) [[unlikely]]
        fail_argument(indexed_name(name, i), strides[i], {"at least the row's ", dim, " elements"});
  };
  check_strides("layer.k_strides", layer.k_strides, config.head_dim);
  check_strides("layer.v_strides", layer.v_strides, value_dim(config));
  return config.kv_type == CHUNKATTN_FLOAT32   ? view_of<float>(layer, config)
         : config.kv_type == CHUNKATTN_FLOAT16 ? view_of<half>(layer, config)
                                               : view_of<bfloat16>(layer, config);
}

inline const LiveView& checked_plan(const chunkattn_plan* given, const chunkattn_layer& layer) {
  const chunkattn_plan& plan = checked_pointer(given, "plan");
  check_argument(plan.view.segments_version != 0, "plan", "not built",
                 "one of which chunkattn_plan_build() has made a batch's plan");
  const PageGeometry& pages = plan.plan.geometry();
  if (layer.page_size != pages.page_size) [[unlikely]]
    fail_argument("layer.page_size", layer.page_size, {"that of the plan, ", pages.page_size});
  if (layer.num_pages < pages.num_pages) [[unlikely]]
    fail_argument("layer.num_pages", layer.num_pages,
                  {"at least those of the plan, ", pages.num_pages});
  return plan.view;
}

/// Rows of q, k or v without gaps: `data`, or a copy of it in attention.dense[buffer].
inline ConstElements dense_rows(chunkattn_attention& attention, int buffer, const char* name,
                                const void* data, std::int64_t stride, std::int32_t rows,
                                std::int64_t heads, int dim) {
  const std::int64_t size = heads * dim;
  check_argument(data != nullptr, name, data, "memory of its rows");
  if (stride != 0 && stride < size) [[unlikely]]
    fail_argument(joined({name, "_stride"}), stride,
                  {"0, or at least the ", size, " elements of a token"});
  const std::size_t width = bytes_of(attention.config.qo_type);
  const std::size_t bytes = to_size(size) * width;
  if (stride != 0 && stride != size && rows > 1) {
    std::vector<char>& copy = attention.dense[buffer];
    copy.resize(bytes * to_size(rows));
    const char* const from = static_cast<const char*>(data);
    attention.threads.parallel_for(rows, [&](int row) {
      std::memcpy(copy.data() + to_size(row) * bytes, from + to_size(row) * to_size(stride) * width,
                  bytes);
    });
    data = copy.data();
  }
  return {data, type_of(attention.config.qo_type, "config.qo_type"), to_size(rows) * to_size(size)};
}

inline void check_tokens(std::int32_t num_tokens, std::int32_t num_rows) {
  if (num_tokens < num_rows) [[unlikely]]
    fail_argument("num_tokens", num_tokens, {"at least the plan's query tokens, ", num_rows});
}

inline void write_rows(chunkattn_attention& attention, const AnyKvView& layer, const LiveView& plan,
                       const void* k, std::int64_t k_stride, const void* v, std::int64_t v_stride) {
  const chunkattn_config& config = attention.config;
  if (plan.num_rows == 0) return;
  const ConstElements keys = dense_rows(attention, 0, "k", k, k_stride, plan.num_rows,
                                        config.num_kv_heads, config.head_dim);
  const ConstElements values = dense_rows(attention, 1, "v", v, v_stride, plan.num_rows,
                                          config.num_kv_heads, value_dim(config));
  attention.attention->write(layer, plan, keys, values);
}

inline AnyVariant variant_of(const chunkattn_variant* given, std::int32_t num_qo_heads) {
  if (given == nullptr) return {};
  const chunkattn_variant& variant = *given;
  check_argument(variant.window >= 0, "variant.window", variant.window,
                 "a count, or 0 for all keys");
  const bool caps = variant.soft_cap != 0, sinks = variant.sinks != nullptr;
  if (const float* const slopes = variant.alibi_slopes) {
    check_argument(!caps && !sinks && variant.window == 0, "variant.alibi_slopes",
                   static_cast<const void*>(slopes), "null beside window, soft_cap or sinks");
    return Alibi{std::span(slopes, to_size(num_qo_heads))};
  }
  check_argument(!caps || !sinks, "variant.sinks", static_cast<const void*>(variant.sinks),
                 "null beside soft_cap");
  const SlidingWindow window{variant.window != 0 ? variant.window
                                                 : (std::numeric_limits<std::int32_t>::max)()};
  if (caps) return combine(SoftCap{variant.soft_cap}, window);
  if (sinks) return combine(Sinks{std::span(variant.sinks, to_size(num_qo_heads))}, window);
  if (variant.window != 0) return window;
  return {};
}

// Functions with C linkage are the same in every namespace, but for their attributes.
extern "C" {

CHUNKATTN_C_API int chunkattn_c_version(void) {
  return CHUNKATTN_C_VERSION;
}

CHUNKATTN_C_API const char* chunkattn_error(void) {
  return error_text();
}

CHUNKATTN_C_API chunkattn_attention* chunkattn_attention_create(const chunkattn_config* given) {
  return guarded<chunkattn_attention*>(nullptr, [&] {
    const chunkattn_config& config = checked_pointer(given, "config");
    check_heads(config);
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
    return new chunkattn_plan{
        PagedPlan({.page_size = page_size, .num_pages = num_pages, .null_page = null_page})};
  });
}

CHUNKATTN_C_API void chunkattn_plan_destroy(chunkattn_plan* plan) {
  delete plan;
}

CHUNKATTN_C_API int chunkattn_plan_build(chunkattn_plan* plan, const chunkattn_tables* given) {
  return guarded(1, [&] {
    checked_pointer(plan, "plan");
    const chunkattn_tables& tables = checked_pointer(given, "tables");
    const std::int32_t count = tables.num_sequences;
    check_argument(count >= 0, "tables.num_sequences", count, "a count");
    check_argument(tables.stride >= 0, "tables.stride", tables.stride, "a count");
    checked_pointer(tables.query_start_loc, "tables.query_start_loc");
    if (count > 0) checked_pointer(tables.seq_lens, "tables.seq_lens");
    if (count > 0 && tables.stride > 0) checked_pointer(tables.block_table, "tables.block_table");
    const std::size_t n = to_size(count);
    plan->view = plan->plan.build(
        PageTables{std::span(tables.block_table, n * to_size(tables.stride)), tables.stride,
                   std::span(tables.seq_lens, n), std::span(tables.query_start_loc, n + 1)});
    return 0;
  });
}

CHUNKATTN_C_API int chunkattn_plan_sharing(const chunkattn_plan* plan, chunkattn_sharing* sharing) {
  return guarded(1, [&] {
    const chunkattn_plan& of = checked_pointer(plan, "plan");
    const PlanView& view = of.view;
    const std::int32_t null_page = of.plan.geometry().null_page;
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
                                    const chunkattn_layer* layer, const void* k, int64_t k_stride,
                                    const void* v, int64_t v_stride, int32_t num_tokens) {
  return guarded(1, [&] {
    const AnyKvView memory = checked_layer(layer, checked_pointer(attention, "attention"));
    const LiveView& view = checked_plan(plan, *layer);
    check_tokens(num_tokens, view.num_rows);
    write_rows(*attention, memory, view, k, k_stride, v, v_stride);
    return 0;
  });
}

CHUNKATTN_C_API int chunkattn_write_slots(chunkattn_attention* attention,
                                          const chunkattn_layer* layer, const int64_t* slots,
                                          const void* k, int64_t k_stride, const void* v,
                                          int64_t v_stride, int32_t num_tokens) {
  return guarded(1, [&] {
    const AnyKvView memory = checked_layer(layer, checked_pointer(attention, "attention"));
    check_argument(num_tokens >= 0, "num_tokens", num_tokens, "a count");
    if (num_tokens == 0) return 0;
    checked_pointer(slots, "slots");
    const std::int64_t page_size = layer->page_size;
    PlanView::Arrays& arrays = attention->slots;
    arrays.writes.assign(to_size(num_tokens), {no_chunk, 0});
    for (std::size_t i = 0; i < to_size(num_tokens); ++i) {
      if (slots[i] < 0) continue;
      if (slots[i] >= page_size * layer->num_pages) [[unlikely]]
        fail_argument(indexed_name("slots", i), slots[i],
                      {"less than num_pages * page_size = ", page_size * layer->num_pages});
      arrays.writes[i] = {static_cast<ChunkIndex>(slots[i] / page_size),
                          static_cast<std::int32_t>(slots[i] % page_size)};
    }
    arrays.chunk_size = layer->page_size;
    PlanView view = arrays.view();
    view.num_rows = num_tokens;
    write_rows(*attention, memory, LiveView::unchecked(view), k, k_stride, v, v_stride);
    return 0;
  });
}

CHUNKATTN_C_API int chunkattn_run(chunkattn_attention* attention, const chunkattn_plan* plan,
                                  const chunkattn_layer* layer, const chunkattn_variant* variant,
                                  const void* q, int64_t q_stride, int32_t num_tokens, void* out,
                                  float* lse) {
  return guarded(1, [&] {
    const AnyKvView memory = checked_layer(layer, checked_pointer(attention, "attention"));
    const LiveView& view = checked_plan(plan, *layer);
    check_tokens(num_tokens, view.num_rows);
    if (view.num_rows == 0) return 0;
    const chunkattn_config& config = attention->config;
    AnyAttention::RunOptions options;
    options.variant = variant_of(variant, config.num_qo_heads);
    const std::size_t lines = to_size(view.num_rows) * to_size(config.num_qo_heads);
    if (lse != nullptr) options.lse = {lse, lines};
    checked_pointer(static_cast<char*>(out), "out");
    const ConstElements queries = dense_rows(*attention, 0, "q", q, q_stride, view.num_rows,
                                             config.num_qo_heads, config.head_dim);
    attention->attention->run(memory, view, queries,
                              {out, queries.type, lines * to_size(value_dim(config))}, options);
    return 0;
  });
}

}  // extern "C"

}  // namespace detail::c
CHUNKATTN_NAMESPACE_END
