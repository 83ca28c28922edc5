// Checks of the C interface's arguments. Each failure names the field or parameter as chunkattn.h
// does, so they stand before those of the C++ front, which know other names.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../../attention_options.hpp"
#include "../../detail/attention/row_places.hpp"
#include "../../detail/kv/checks.hpp"
#include "../../detail/kv/dense_view.hpp"
#include "../../detail/support/array.hpp"
#include "../../detail/support/bit_cast.hpp"
#include "../../detail/support/check.hpp"
#include "../../detail/support/config.hpp"
#include "../../element.hpp"
#include "../../error.hpp"
#include "../../executor.hpp"
#include "../../head_rows.hpp"
#include "../../interop/detail/page_rows.hpp"
#include "../../interop/page_tables.hpp"
#include "../../variants.hpp"
#include "../chunkattn.h"
#include "pointers.hpp"

CHUNKATTN_NAMESPACE_BEGIN
namespace detail::c {

inline void check_type(std::int32_t type, const char* name) {
  check_argument(type >= CHUNKATTN_FLOAT32 && type <= CHUNKATTN_BFLOAT16, name, type,
                 "CHUNKATTN_FLOAT32 = 0, CHUNKATTN_FLOAT16 = 1 or CHUNKATTN_BFLOAT16 = 2");
}
inline bool has_scales(std::int32_t type) noexcept {
  return type == CHUNKATTN_INT8 || type == CHUNKATTN_FLOAT8_E4M3;
}
inline ElementType type_of(std::int32_t type) noexcept {
  return static_cast<ElementType>(type);
}
template <class T>
inline constexpr auto number_of = static_cast<std::int32_t>(element_type_of<T>);
static_assert(number_of<float> == CHUNKATTN_FLOAT32 && number_of<half> == CHUNKATTN_FLOAT16 &&
              number_of<bfloat16> == CHUNKATTN_BFLOAT16 &&
              number_of<std::int8_t> == CHUNKATTN_INT8 &&
              number_of<float8_e4m3> == CHUNKATTN_FLOAT8_E4M3);
inline std::size_t bytes_of(std::int32_t type) noexcept {
  return type == CHUNKATTN_FLOAT32 ? 4 : has_scales(type) ? 1 : 2;
}
inline int value_dim(const chunkattn_config& config) noexcept {
  return config.value_dim != 0 ? config.value_dim : config.head_dim;
}

/// All of it but what kernels there are for.
inline void check_config(const chunkattn_config& config) {
  if (config.version != CHUNKATTN_C_VERSION) [[unlikely]]
    fail_argument("config.version", config.version,
                  {"CHUNKATTN_C_VERSION = ", CHUNKATTN_C_VERSION});
  check_argument(config.head_dim > 0, "config.head_dim", config.head_dim, "at least 1");
  check_argument(config.value_dim >= 0, "config.value_dim", config.value_dim,
                 "at least 1, or 0 for head_dim");
  check_argument(config.num_kv_heads > 0, "config.num_kv_heads", config.num_kv_heads, "at least 1");
  if (config.num_qo_heads <= 0 || config.num_qo_heads > max_qo_heads ||
      config.num_qo_heads % config.num_kv_heads != 0) [[unlikely]]
    fail_argument("config.num_qo_heads", config.num_qo_heads,
                  {"a positive multiple of num_kv_heads = ", config.num_kv_heads, ", at most ",
                   max_qo_heads});
  check_argument(
      config.kv_type >= CHUNKATTN_FLOAT32 && config.kv_type <= CHUNKATTN_FLOAT8_E4M3,
      "config.kv_type", config.kv_type,
      "CHUNKATTN_FLOAT32 = 0, CHUNKATTN_FLOAT16 = 1, CHUNKATTN_BFLOAT16 = 2, CHUNKATTN_INT8 = 3 or "
      "CHUNKATTN_FLOAT8_E4M3 = 4");
  check_type(config.qo_type, "config.qo_type");
  check_argument(
      config.num_threads >= 0 && config.num_threads <= ThreadPool::max_threads,
      "config.num_threads", config.num_threads,
      {"at most ", ThreadPool::max_threads, ", or 0 for as many as there are CPUs to use"});
  check_argument(config.scale == 0 || is_positive_finite(config.scale), "config.scale",
                 config.scale, "a positive finite factor, or 0 for 1 / sqrt(head_dim)");
  check_argument(config.accuracy == CHUNKATTN_TWO_TERMS || config.accuracy == CHUNKATTN_ONE_TERM,
                 "config.accuracy", config.accuracy,
                 "CHUNKATTN_TWO_TERMS = 0 or CHUNKATTN_ONE_TERM = 1");
}

/// What a unit of kernels is for.
struct Kernels {
  std::int32_t head_dim, value_dim, kv_type, qo_type;
};

/// Throws for the first field of `config` that none of `compiled` has together with those before.
[[noreturn]] CHUNKATTN_COLD inline void fail_kernels(const chunkattn_config& config,
                                                     std::vector<Kernels> compiled) {
  struct Field {
    const char* name;
    std::int32_t Kernels::* of;
    std::int32_t written, meant;
  };
  std::string before;
  for (const Field& field :
       {Field{"head_dim", &Kernels::head_dim, config.head_dim, config.head_dim},
        Field{"value_dim", &Kernels::value_dim, config.value_dim, value_dim(config)},
        Field{"kv_type", &Kernels::kv_type, config.kv_type, config.kv_type},
        Field{"qo_type", &Kernels::qo_type, config.qo_type, config.qo_type}}) {
    std::vector<std::int32_t> known;
    for (const Kernels& kernels : compiled)
      if (std::find(known.begin(), known.end(), kernels.*field.of) == known.end())
        known.push_back(kernels.*field.of);
    if (std::find(known.begin(), known.end(), field.meant) == known.end()) {
      std::string list;
      for (const std::int32_t value : known) list += joined({list.empty() ? "" : ", ", value});
      fail_argument(joined({"config.", field.name}), field.written,
                    {"one that kernels were compiled for", before, ": ", list});
    }
    std::erase_if(compiled, [&](const Kernels& k) { return k.*field.of != field.meant; });
    before += joined({before.empty() ? " with " : ", ", field.name, " = ", field.written});
  }
  fail_argument("config.head_dim", config.head_dim, "one that kernels were compiled for");
}

inline PageGeometry checked_pages(std::int32_t page_size, std::int32_t num_pages,
                                  std::int32_t null_page) {
  check_argument(page_size > 0, "page_size", page_size, "at least 1");
  check_argument(num_pages > 0, "num_pages", num_pages, "at least 1");
  if (null_page < -1 || null_page >= num_pages) [[unlikely]]
    fail_argument("null_page", null_page, {"a page from 0 to ", num_pages - 1, ", or -1"});
  return {.page_size = page_size, .num_pages = num_pages, .null_page = null_page};
}

/// The tables as PagedPlan::build() takes them, which checks what they hold.
inline PageTables checked_tables(const chunkattn_tables& tables) {
  const std::int32_t count = tables.num_sequences;
  check_argument(count >= 0, "tables.num_sequences", count, "a count");
  constexpr std::int64_t most = (std::numeric_limits<std::ptrdiff_t>::max)() / 4;
  check_argument(tables.stride >= 0 && tables.stride <= most / (std::max)(count, 1),
                 "tables.stride", tables.stride, "a count of page ids that memory holds");
  checked_pointer(tables.query_start_loc, "tables.query_start_loc");
  if (count > 0) checked_pointer(tables.seq_lens, "tables.seq_lens");
  if (count > 0 && tables.stride > 0) checked_pointer(tables.block_table, "tables.block_table");
  const std::size_t n = to_size(count);
  return {std::span(tables.block_table, n * to_size(tables.stride)), tables.stride,
          std::span(tables.seq_lens, n), std::span(tables.query_start_loc, n + 1)};
}

/// Throws what PagedPlan::build() has thrown, in the names of C.
[[noreturn]] CHUNKATTN_COLD inline void fail_tables(const InvalidArgument& error,
                                                    const PageTables& tables,
                                                    const PageGeometry& pages) {
  const std::string_view text = error.what();
  if (!text.starts_with("page ")) fail(InvalidArgument(joined({"tables.", text})));
  for (std::size_t s = 0; s < tables.seq_lens.size(); ++s) {
    if (tables.query_start_loc[s + 1] == tables.query_start_loc[s]) continue;
    const std::size_t first = s * to_size(tables.stride);
    for (std::size_t p = 0; p * to_size(pages.page_size) < to_size(tables.seq_lens[s]); ++p)
      if (const std::int32_t page = tables.table[first + p]; page < 0 || page >= pages.num_pages)
        fail_argument(indexed_name("tables.block_table", first + p), page,
                      {"from 0 to ", pages.num_pages - 1, ", one of num_pages"});
  }
  fail(InvalidArgument(joined({"tables.block_table: ", text})));
}

/// K or V of a layer: rows of `row_bytes` bytes at these distances, pages first.
struct Pages {
  std::uintptr_t begin;
  std::array<std::int64_t, 3> counts, bytes_apart;
  std::int64_t row_bytes;

  /// From the first byte to the last.
  [[nodiscard]] Bytes span(std::size_t from, std::uintptr_t at) const noexcept {
    std::int64_t size = row_bytes;
    for (std::size_t i = from; i < 3; ++i) size += (counts[i] - 1) * bytes_apart[i];
    return {at, at + static_cast<std::uintptr_t>(size)};
  }
  /// Whether a row has one of these bytes. One comparison where memory is apart, as it is.
  [[nodiscard]] bool touches(Bytes bytes) const noexcept { return touches(bytes, 0, begin); }

 private:
  // All that has the same indices before number i.
  [[nodiscard]] bool touches(Bytes bytes, std::size_t i, std::uintptr_t at) const noexcept {
    if (!span(i, at).touches(bytes)) return false;
    if (i == 3) return true;
    for (std::int64_t n = 0; n < counts[i]; ++n)
      if (touches(bytes, i + 1, at + static_cast<std::uintptr_t>(n * bytes_apart[i]))) return true;
    return false;
  }
};

/// K and V of a layer, and their scales where there are some.
struct LayerPages {
  Pages k, v;
  std::optional<Pages> k_scale{}, v_scale{};
};

/// The scales of a layer of 8 bits.
inline Pages checked_scales(const char* name, const float* start, const chunkattn_layer& layer,
                            const chunkattn_config& config) {
  checked_pointer(start, name);
  constexpr auto width = static_cast<std::int64_t>(sizeof(float));
  Pages made{reinterpret_cast<std::uintptr_t>(start), {1, 1, 1}, {}, width};
  if (layer.scales == CHUNKATTN_SCALES_PER_HEAD) made.row_bytes *= config.num_kv_heads;
  if (layer.scales != CHUNKATTN_SCALES_PER_ROW) return made;
  made.counts = {layer.num_pages, config.num_kv_heads, 1};
  made.row_bytes *= layer.page_size;
  std::int64_t room = (std::int64_t{1} << 61) / width;
  for (std::size_t i = 0; i < 2; ++i) {
    const std::int64_t stride = layer.scale_strides[i];
    if (made.counts[i] == 1) continue;
    if (stride < layer.page_size) [[unlikely]]
      fail_argument(indexed_name("layer.scale_strides", i), stride,
                    {"at least the scales of a page's tokens, ", layer.page_size});
    if (stride > room / made.counts[i]) [[unlikely]]
      fail_argument(indexed_name("layer.scale_strides", i), stride,
                    "rows within the address space");
    made.bytes_apart[i] = stride * width;
  }
  return made;
}
inline void check_scales(const chunkattn_layer& layer) {
  check_argument(
      layer.scales >= CHUNKATTN_SCALES_PER_ROW && layer.scales <= CHUNKATTN_SCALES_PER_LAYER,
      "layer.scales", layer.scales,
      "CHUNKATTN_SCALES_PER_ROW = 0, CHUNKATTN_SCALES_PER_HEAD = 1 or CHUNKATTN_SCALES_PER_LAYER = "
      "2");
  if (layer.scales == CHUNKATTN_SCALES_PER_ROW) return;
  for (std::size_t i = 0; i < 2; ++i)
    check_argument(layer.scale_strides[i] == 0, indexed_name("layer.scale_strides", i),
                   layer.scale_strides[i], "0 where rows have no scales of their own");
}

inline LayerPages checked_layer(const chunkattn_layer& layer, const chunkattn_config& config) {
  const std::size_t width = bytes_of(config.kv_type);
  check_memory(layer.k, "layer.k", width, "memory of K");
  check_memory(layer.v, "layer.v", width, "memory of V");
  check_argument(layer.num_pages > 0, "layer.num_pages", layer.num_pages, "at least 1");
  check_argument(layer.page_size > 0, "layer.page_size", layer.page_size, "at least 1");
  const auto pages = [&](const char* name, const void* start, const std::int64_t* strides,
                         int dim) {
    Pages made{reinterpret_cast<std::uintptr_t>(start),
               {layer.num_pages, config.num_kv_heads, layer.page_size},
               {},
               dim * static_cast<std::int64_t>(width)};
    // Elements up to the end of the address space; differences of addresses have a sign.
    const std::uintptr_t to_end = (std::numeric_limits<std::uintptr_t>::max)() - made.begin;
    std::int64_t room =
        static_cast<std::int64_t>(
            (std::min)(to_end, (std::numeric_limits<std::uintptr_t>::max)() / 2) / width) -
        dim;
    for (std::size_t i = 0; i < 3; ++i) {
      if (made.counts[i] == 1) continue;
      if (strides[i] < dim) [[unlikely]]
        fail_argument(indexed_name(name, i), strides[i], {"at least the row's ", dim, " elements"});
      if (strides[i] > room / (made.counts[i] - 1)) [[unlikely]]
        fail_argument(indexed_name(name, i), strides[i], "rows within the address space");
      room -= strides[i] * (made.counts[i] - 1);
      made.bytes_apart[i] = strides[i] * static_cast<std::int64_t>(width);
    }
    return made;
  };
  LayerPages made{pages("layer.k_strides", layer.k, layer.k_strides, config.head_dim),
                  pages("layer.v_strides", layer.v, layer.v_strides, value_dim(config))};
  if (has_scales(config.kv_type)) {
    check_scales(layer);
    made.k_scale = checked_scales("layer.k_scale", layer.k_scale, layer, config);
    made.v_scale = checked_scales("layer.v_scale", layer.v_scale, layer, config);
  }
  return made;
}

/// That the plan's pages are in the layer.
inline void check_pages(const chunkattn_layer& layer, const PageGeometry& pages) {
  if (layer.page_size != pages.page_size) [[unlikely]]
    fail_argument("layer.page_size", layer.page_size, {"that of the plan, ", pages.page_size});
  if (layer.num_pages < pages.num_pages) [[unlikely]]
    fail_argument("layer.num_pages", layer.num_pages,
                  {"at least those of the plan, ", pages.num_pages});
}

/// That V has rows of its own to be written.
inline void check_own_v(const chunkattn_layer& layer, const LayerPages& pages) {
  check_argument(!rows_overlap(static_cast<const char*>(layer.k), static_cast<const char*>(layer.v),
                               static_cast<std::int32_t>(pages.k.row_bytes)),
                 "layer.v", "memory of layer.k", "memory of V of its own");
  if (!pages.k_scale) return;
  check_argument(layer.scales == CHUNKATTN_SCALES_PER_ROW, "layer.scales", layer.scales,
                 "CHUNKATTN_SCALES_PER_ROW = 0, to be written: each row gets a scale of its own");
  check_argument(layer.v_scale != layer.k_scale, "layer.v_scale", "memory of layer.k_scale",
                 "memory of V's scales of its own");
}

inline void check_tokens(std::int32_t num_tokens, std::int32_t num_rows) {
  if (num_tokens < num_rows) [[unlikely]]
    fail_argument("num_tokens", num_tokens, {"at least the plan's query tokens, ", num_rows});
}

/// What a call gives of q, k, v or out; `stride` is the distance of tokens without gaps in them.
struct Rows {
  const char* name;
  const void* data;
  std::int64_t stride;
  const chunkattn_rows* given = nullptr;
  bool is_apart = false;  ///< `given` says where they lie

  Rows(const char* of, const void* first, std::int64_t token_stride) noexcept
      : name(of), data(first), stride(token_stride) {}
  Rows(const char* of, const chunkattn_rows* rows) noexcept
      : name(of), data(nullptr), stride(0), given(rows), is_apart(true) {}

  [[nodiscard]] HeadRows<const void> checked(std::int32_t count, std::int32_t num_heads,
                                             std::int32_t head_dim, std::size_t width) const {
    const std::int64_t size = std::int64_t{num_heads} * head_dim;
    if (is_apart) {
      const chunkattn_rows& rows = checked_pointer(given, name);
      const HeadRows<const void> made{rows.data,
                                      count,
                                      num_heads,
                                      head_dim,
                                      rows.stride_token != 0 ? rows.stride_token : size,
                                      rows.stride_head != 0 ? rows.stride_head : head_dim};
      check_rows(name, made, width, count, num_heads, "", head_dim);
      return made;
    }
    check_memory(data, name, width, "memory of its rows");
    if (stride != 0 && stride < size) [[unlikely]]
      fail_argument(joined({name, "_stride"}), stride,
                    {"0, or at least the ", size, " elements of a token"});
    constexpr std::int64_t most = (std::numeric_limits<std::ptrdiff_t>::max)() / 2;
    if (stride > most / static_cast<std::int64_t>(width) / count) [[unlikely]]
      fail_argument(joined({name, "_stride"}), stride, "rows within the address space");
    return {data, count, num_heads, head_dim, stride != 0 ? stride : size, head_dim};
  }
};

inline void check_variant(const chunkattn_variant& variant, std::int32_t num_qo_heads) {
  check_argument(variant.window >= 0, "variant.window", variant.window,
                 "a count, or 0 for all keys");
  const bool caps = variant.soft_cap != 0, sinks = variant.sinks != nullptr;
  check_argument(!caps || is_positive_finite(variant.soft_cap), "variant.soft_cap",
                 variant.soft_cap, "a positive finite bound, or 0 for none");
  if (sinks) checked_pointer(variant.sinks, "variant.sinks");
  if (const float* const slopes = variant.alibi_slopes) {
    checked_pointer(slopes, "variant.alibi_slopes");
    check_argument(!caps && !sinks && variant.window == 0, "variant.alibi_slopes", "given",
                   "null beside window, soft_cap or sinks");
    check_slopes("variant.alibi_slopes", {slopes, to_size(num_qo_heads)});
  }
  check_argument(!caps || !sinks, "variant.sinks", "given", "null beside soft_cap");
}

/// That what run() writes is neither what it reads nor pages of K and V.
inline void check_outputs(const RowPlaces& q, const RowPlaces& out, std::span<float> lse,
                          const LayerPages& pages, const chunkattn_variant* variant,
                          std::int32_t num_qo_heads) {
  check_places(q, out, lse);
  const auto check = [](bool touches, const char* name, const char* of) {
    if (touches) [[unlikely]]
      fail_argument(name, joined({"memory of ", of}), "memory of its own");
  };
  const bool has_lse = !lse.empty();
  const auto if_any = [](const std::optional<Pages>& scales) {
    return scales ? &*scales : nullptr;
  };
  for (const auto& [of, places] : {std::pair{"layer.k", &pages.k}, std::pair{"layer.v", &pages.v},
                                   std::pair{"layer.k_scale", if_any(pages.k_scale)},
                                   std::pair{"layer.v_scale", if_any(pages.v_scale)}}) {
    if (places == nullptr) continue;
    check(
        places->touches(out.span()) && out.any_row([&](Bytes row) { return places->touches(row); }),
        "out", of);
    check(has_lse && places->touches(Bytes(lse)), "lse", of);
  }
  if (variant == nullptr) return;
  for (const auto& [of, numbers] : {std::pair{"variant.sinks", variant->sinks},
                                    std::pair{"variant.alibi_slopes", variant->alibi_slopes}}) {
    if (numbers == nullptr) continue;
    const Bytes bytes(std::span(numbers, to_size(num_qo_heads)));
    check(out.touches(bytes), "out", of);
    check(has_lse && bytes.touches(Bytes(lse)), "lse", of);
  }
}

}  // namespace detail::c
CHUNKATTN_NAMESPACE_END
