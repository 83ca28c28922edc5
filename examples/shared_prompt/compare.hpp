// Measures one decode step of a full batch four ways, in turns, against what the machine can do,
// and holds every result against the double-precision oracle.
#pragma once

#include <algorithm>
#include <chunkattn/chunkattn.hpp>
#include <chunkattn/debug/attention.hpp>
#include <chunkattn/debug/reference.hpp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../support/machine_limits.hpp"
#include "baselines.hpp"
#include "serve.hpp"

namespace shared_prompt {

inline double median(std::vector<double> samples) {
  if (samples.empty()) return 0;
  const auto middle = samples.begin() + static_cast<std::ptrdiff_t>(samples.size() / 2);
  std::nth_element(samples.begin(), middle, samples.end());
  return *middle;
}

/// K/V memory at the moment, in bytes of one layer.
struct MemoryReport {
  std::size_t requests = 0, longest = 0;
  std::size_t tokens = 0;           ///< of all sequences
  std::size_t stored_tokens = 0;    ///< with sharing
  std::size_t common_tokens = 0;    ///< that all sequences begin with
  std::size_t chunks = 0;           ///< in use with sharing
  std::size_t unshared_chunks = 0;  ///< that would be without
  double bytes_shared = 0, bytes_unshared = 0;
  double chunk_size = 0;

  [[nodiscard]] double ratio() const { return bytes_unshared / bytes_shared; }
  [[nodiscard]] double mean_length() const {
    return static_cast<double>(tokens) / static_cast<double>(requests);
  }
  /// The paper's sharing ratio r = n_s / (n_p + n_c).
  [[nodiscard]] double sharing() const {
    return static_cast<double>(common_tokens) / mean_length();
  }
  /// 1 / (1 - r): what the ratio tends to with many sequences.
  [[nodiscard]] double paper_limit() const { return 1 / (1 - sharing()); }
  /// The same for b sequences: one copy of the common tokens is still needed.
  [[nodiscard]] double paper_at_batch() const {
    const auto b = static_cast<double>(requests);
    return 1 / (1 - sharing() * (b - 1) / b);
  }
  /// Slots that alignment to chunks leaves unused, as a part of all tokens, and the bound on it.
  [[nodiscard]] double waste() const {
    return (static_cast<double>(chunks) * chunk_size - static_cast<double>(stored_tokens)) /
           static_cast<double>(tokens);
  }
  [[nodiscard]] double waste_bound() const { return (chunk_size - 1) / mean_length(); }
};

/// One way to compute the step.
struct Variant {
  std::string key, name;
  std::string limit_name;   ///< of what the machine's limit is
  double held_bytes = 0;    ///< K/V memory
  double memory_bytes = 0;  ///< read from memory at least
  double cache_bytes = 0;   ///< read by the core, again and again
  double flops = 0;
  std::vector<double> ms;
  double floor_ms = 0;  ///< what the machine's limits allow
  double worst_of_bound = 0, max_error = 0;
  std::function<void(std::span<float>)> run;
  std::vector<float> out;

  [[nodiscard]] double time() const { return median(ms); }
  [[nodiscard]] double fastest() const { return *std::min_element(ms.begin(), ms.end()); }
  /// Best against best, so that what else the machine does touches neither. At most 1, but for
  /// rounding, as the limits are no lower than what the variants reach.
  [[nodiscard]] double of_limit() const { return std::min(1.0, floor_ms / fastest()); }
};

struct CompareReport {
  MemoryReport memory;
  std::vector<Variant> variants;  ///< the last one is ours
  /// The fastest that the machine was seen to be in this run, by a plain sweep or by one of the
  /// variants: bytes, bytes, operations per second.
  double memory_read = 0, cache_read = 0, fma = 0;
  int rounds = 0;
  std::string skipped;  ///< why baselines are missing, if they are

  [[nodiscard]] const Variant& ours() const { return variants.back(); }
  [[nodiscard]] const Variant* find(const std::string& key) const {
    for (const Variant& variant : variants)
      if (variant.key == key) return &variant;
    return nullptr;
  }
};

template <class T>
MemoryReport measure_memory(const Moment<T>& moment) {
  const chunkattn::PlanView& plan = moment.plan;
  MemoryReport report;
  report.requests = static_cast<std::size_t>(plan.num_rows);
  report.chunk_size = plan.chunk_size;
  std::set<chunkattn::ChunkIndex> chunks;
  std::set<std::pair<chunkattn::ChunkIndex, std::int32_t>> slots;
  for (std::int32_t row = 0; row < plan.num_rows; ++row) {
    const auto kv_len = static_cast<std::size_t>(plan.row_kv_len[row]);
    report.tokens += kv_len;
    report.longest = std::max(report.longest, kv_len);
    report.unshared_chunks += (kv_len + static_cast<std::size_t>(plan.chunk_size) - 1) /
                              static_cast<std::size_t>(plan.chunk_size);
    for (const chunkattn::Piece& piece : path_pieces(plan, row)) {
      chunks.insert(piece.chunk);
      for (std::int32_t i = 0; i < piece.length; ++i) slots.insert({piece.chunk, piece.begin + i});
    }
  }
  for (std::int32_t s = 0; s < plan.num_segments; ++s)
    if (plan.num_rows > 1 && plan.segments[s].num_sequences == plan.num_rows)
      report.common_tokens += static_cast<std::size_t>(plan.segments[s].length);
  report.chunks = chunks.size();
  report.stored_tokens = slots.size();
  const double chunk_bytes = 2.0 * plan.chunk_size * moment.kv.num_kv_heads * moment.kv.head_dim *
                             static_cast<double>(sizeof(T));
  report.bytes_shared = chunk_bytes * static_cast<double>(report.chunks);
  report.bytes_unshared = chunk_bytes * static_cast<double>(report.unshared_chunks);
  return report;
}

/// Errors of every variant against the oracle, for kernels that round like `rounding`, row by row
/// on all threads.
template <class T>
void compare_with_oracle(chunkattn::ThreadPool& executor, const Moment<T>& moment,
                         chunkattn::Rounding rounding, std::vector<Variant>& variants) {
  const std::size_t row_size = moment.q.size() / static_cast<std::size_t>(moment.plan.num_rows);
  std::vector<std::vector<chunkattn::OracleReport>> reports(
      static_cast<std::size_t>(moment.plan.num_rows));
  executor.parallel_for(moment.plan.num_rows, [&](int row) {
    const OwnedPlan one =
        unshared_plan(moment.plan, row, 1, 3, [&](int r) { return path_pieces(moment.plan, r); });
    const std::size_t at = static_cast<std::size_t>(moment.plan.row_token[row]) * row_size;
    const chunkattn::Reference reference =
        chunkattn::reference_attention(moment.kv, one.view(), moment.q.subspan(at, row_size));
    for (const Variant& variant : variants)
      reports[static_cast<std::size_t>(row)].push_back(chunkattn::compare_with_reference(
          reference, std::span<const float>(variant.out).subspan(at, row_size), rounding));
  });
  for (const auto& row : reports)
    for (std::size_t i = 0; i < variants.size(); ++i) {
      variants[i].worst_of_bound = std::max(variants[i].worst_of_bound, row[i].worst);
      variants[i].max_error = std::max(variants[i].max_error, row[i].max_abs_error);
    }
}

template <int HeadDim, class T>
CompareReport compare(chunkattn::ThreadPool& executor,
                      chunkattn::ChunkAttention<chunkattn::Cpu, HeadDim>& attention,
                      const Moment<T>& moment, int rounds, double memory_budget) {
  CompareReport report;
  report.rounds = rounds;
  report.memory = measure_memory(moment);
  const MemoryReport& memory = report.memory;
  const chunkattn::LiveView& plan = moment.plan;
  const int num_kv_heads = moment.kv.num_kv_heads;
  const int num_qo_heads = static_cast<int>(moment.q.size()) / (plan.num_rows * HeadDim);
  const double token_bytes = 2.0 * num_kv_heads * HeadDim * static_cast<double>(sizeof(T));
  const double all_bytes = token_bytes * static_cast<double>(memory.tokens);
  const double unique_bytes = token_bytes * static_cast<double>(memory.stored_tokens);
  const double flops = 4.0 * num_qo_heads * HeadDim * static_cast<double>(memory.tokens);

  std::optional<DenseKv<T>> dense;
  const double dense_bytes = memory.bytes_unshared / static_cast<double>(memory.unshared_chunks) *
                             static_cast<double>(memory.requests * ((memory.longest + 63) / 64));
  if (dense_bytes > memory_budget)
    report.skipped = fmt::format(
        "K/V without sharing would take {}, more than --memory allows: the two baselines without "
        "sharing are left out",
        examples::bytes_text(dense_bytes));
  else
    dense.emplace(executor, moment.kv, plan);

  OwnedPlan unshared, shared_pages = shared_pages_plan(plan);
  // The best that can be done for pages that the plan does not know to be shared: head by head.
  chunkattn::ChunkAttention<chunkattn::Cpu, HeadDim> head_by_head(
      executor, {.tuning = {.max_task_heads = 1}});
  chunkattn::KvView<T> dense_view;
  auto& variants = report.variants;
  const auto add = [&](std::string key, std::string name, std::string limit_name, double held,
                       double from_memory, double from_cache,
                       std::function<void(std::span<float>)> run) {
    Variant variant;
    variant.key = std::move(key);
    variant.name = std::move(name);
    variant.limit_name = std::move(limit_name);
    variant.held_bytes = held;
    variant.memory_bytes = from_memory;
    variant.cache_bytes = from_cache;
    variant.flops = flops;
    variant.run = std::move(run);
    variant.out.assign(moment.q.size(), 0.0f);
    variants.push_back(std::move(variant));
  };
  if (dense) {
    unshared = dense->paged_plan(plan);
    dense_view = dense->paged_view();
    add("naive", "naive, nothing shared", "memory", all_bytes, all_bytes, 0,
        [&](std::span<float> out) {
          naive_attention<HeadDim>(executor, *dense, plan, num_qo_heads, num_kv_heads, moment.q,
                                   out);
        });
    add("paged_unshared", "paged, nothing shared", "memory", memory.bytes_unshared, all_bytes, 0,
        [&](std::span<float> out) { attention.run(dense_view, unshared.view(), moment.q, out); });
  }
  add("paged_shared", "paged, shared pages", "cache", memory.bytes_shared, unique_bytes, all_bytes,
      [&](std::span<float> out) {
        head_by_head.run(moment.kv, shared_pages.view(), moment.q, out);
      });
  add("chunkattn", "chunkattn", "", memory.bytes_shared, unique_bytes, 0,
      [&](std::span<float> out) { attention.run(moment.kv, plan, moment.q, out); });

  // In turns, so that what else the machine does hits all alike; each turn begins with a sweep over
  // more memory than any cache holds, so ours and the shared pages start from cold memory too.
  examples::HugeBuffer own;
  if (!dense) {
    own = examples::HugeBuffer(std::size_t{1} << 30);
    std::memset(own.as<char>(), 1, own.bytes());
  }
  const char* sweep_data = dense ? dense->data() : own.as<char>();
  const std::size_t sweep_bytes = dense ? dense->bytes() : own.bytes();
  const std::size_t head_bytes =
      std::min(static_cast<std::size_t>(token_bytes / num_kv_heads) * memory.longest,
               sweep_bytes / static_cast<std::size_t>(executor.concurrency())) /
      512 * 512;
  std::uint64_t sink = 0;
  for (int round = -1; round < rounds; ++round) {
    for (Variant& variant : variants) {
      const double sweep_ms = examples::read_sweep_ms(executor, sweep_data, sweep_bytes, sink);
      const double ms = examples::milliseconds([&] { variant.run(variant.out); });
      if (round < 0) continue;  // warm-up
      variant.ms.push_back(ms);
      const auto rate = [](double amount, double time) { return amount / (time * 1e-3); };
      report.memory_read = std::max({report.memory_read, rate(variant.memory_bytes, ms),
                                     rate(static_cast<double>(sweep_bytes), sweep_ms)});
      report.cache_read = std::max(report.cache_read, rate(variant.cache_bytes, ms));
      report.fma = std::max(report.fma, rate(variant.flops, ms));
    }
    if (round < 0) continue;
    constexpr int repeats = 16;
    const double cache_ms =
        examples::cache_sweep_ms(executor, sweep_data, head_bytes, repeats, sink);
    report.cache_read = std::max(report.cache_read, static_cast<double>(head_bytes) * repeats *
                                                        executor.concurrency() / (cache_ms * 1e-3));
    report.fma = std::max(report.fma, examples::fma_rate(executor, 1'000'000, sink));
  }
  if (sink == 42) std::fputc('\0', stderr);  // the sums must be wanted by somebody
  for (Variant& variant : variants) {
    const double from_memory = variant.memory_bytes / report.memory_read * 1e3;
    const double from_cache = variant.cache_bytes / report.cache_read * 1e3;
    const double arithmetic = variant.flops / report.fma * 1e3;
    variant.floor_ms = std::max({from_memory, from_cache, arithmetic});
    variant.limit_name = variant.floor_ms == from_memory  ? "memory read"
                         : variant.floor_ms == from_cache ? "cache read"
                                                          : "arithmetic";
  }
  compare_with_oracle(executor, moment, chunkattn::rounding_of<T>(attention), variants);
  for (Variant& variant : variants) variant.run = nullptr;  // what it refers to goes away
  return report;
}

}  // namespace shared_prompt
