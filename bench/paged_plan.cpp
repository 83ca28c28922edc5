// What a plan from page tables costs on the host: 256 sequences of 4,096 tokens that decode, of
// which the first `shared` are the same for all; and what it is worth: attention of a layer with
// and without what it shares. The column CPU is the one to read.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chunkattn/chunk_attention.hpp>
#include <chunkattn/interop/paged_plan.hpp>
#include <chunkattn/kv_view.hpp>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace {

using chunkattn::PagedPlan;
using chunkattn::PageTables;

constexpr int num_sequences = 256;
constexpr int seq_len = 4096;

enum Order { in_order, shuffled, in_runs };  // of pages in memory; runs of 1 to 4 pages

void scatter(std::vector<std::int32_t>& ids, Order order) {
  std::mt19937 random(1);
  std::vector<std::vector<std::int32_t>> runs;
  for (std::size_t i = 0, room = 0; i < ids.size(); ++i, --room) {
    if (room == 0) {
      runs.emplace_back();
      room = order == shuffled ? 1 : 1 + random() % 4;
    }
    runs.back().push_back(ids[i]);
  }
  std::shuffle(runs.begin(), runs.end(), random);
  ids.clear();
  for (const auto& run : runs) ids.insert(ids.end(), run.begin(), run.end());
}

/// Page tables as engines make them, with room for the tokens of 64 steps.
struct Batch {
  Batch(int page_size, int shared, Order order)
      : stride((seq_len + 64 + page_size - 1) / page_size),
        table(static_cast<std::size_t>(num_sequences * stride)),
        seq_lens(num_sequences, seq_len),
        query_start_loc(num_sequences + 1) {
    std::iota(query_start_loc.begin(), query_start_loc.end(), 0);
    const int shared_pages = shared / page_size;
    num_pages = shared_pages + num_sequences * (stride - shared_pages);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(num_pages));
    std::iota(ids.begin(), ids.end(), 0);
    if (order != in_order) scatter(ids, order);
    std::size_t next = static_cast<std::size_t>(shared_pages);
    for (int s = 0; s < num_sequences; ++s)
      for (int p = 0; p < stride; ++p)
        table[static_cast<std::size_t>(s * stride + p)] =
            p < shared_pages ? ids[static_cast<std::size_t>(p)] : ids[next++];
  }
  [[nodiscard]] PageTables tables() const {
    return {
        .table = table, .stride = stride, .seq_lens = seq_lens, .query_start_loc = query_start_loc};
  }

  int stride;
  int num_pages = 0;
  std::vector<std::int32_t> table, seq_lens, query_start_loc;
};

/// Every step is of another batch: the last sequence has another page at its end, so all that was
/// known is compared in vain.
void rebuild(benchmark::State& state) {
  const auto page_size = static_cast<int>(state.range(0));
  Batch batch(page_size, static_cast<int>(state.range(1)), static_cast<Order>(state.range(3)));
  PagedPlan plan(
      {.page_size = page_size, .num_pages = batch.num_pages, .joined = state.range(2) != 0});
  std::int32_t& last =
      batch.table[batch.table.size() -
                  static_cast<std::size_t>(batch.stride - (seq_len - 1) / page_size)];
  const std::int32_t pages[]{last, batch.table.back()};
  for (auto _ : state) {
    last = pages[plan.num_rebuilds() % 2];
    benchmark::DoNotOptimize(plan.build(batch.tables()).num_segments);
  }
  if (plan.num_rebuilds() != static_cast<std::uint64_t>(state.iterations()))
    state.SkipWithError("not rebuilt");
}

/// Sequences grow by a token per step, 64 steps, then the batch starts again.
void grow(benchmark::State& state) {
  const auto page_size = static_cast<int>(state.range(0));
  Batch batch(page_size, static_cast<int>(state.range(1)), static_cast<Order>(state.range(3)));
  PagedPlan plan(
      {.page_size = page_size, .num_pages = batch.num_pages, .joined = state.range(2) != 0});
  int steps = 0;
  for (auto _ : state) {
    const int step = steps++ % 64;
    for (int s = 0; s < num_sequences; ++s)  // at different offsets of a page
      batch.seq_lens[static_cast<std::size_t>(s)] = seq_len + step - s % 16;
    benchmark::DoNotOptimize(plan.build(batch.tables()).num_segments);
  }
}

/// One layer of 32 sequences that decode, 32 query and 8 KV heads of 128, bfloat16, one thread.
/// Without sharing: each has a first page of its own, behind which nothing is shared.
void attend(benchmark::State& state) {
  using namespace chunkattn;
  constexpr int batch = 32, num_heads = 32, num_kv_heads = 8, dim = 128, own = 64;
  const auto page_size = static_cast<int>(state.range(0));
  const auto shared = static_cast<int>(state.range(1));
  const int shared_pages = shared / page_size, own_pages = (own + page_size - 1) / page_size;
  const bool sharing = state.range(2) != 0;
  const int num_pages = shared_pages + batch * (own_pages + 1);
  std::vector<std::int32_t> table, seq_lens(batch, shared + own), query_start_loc(batch + 1);
  std::iota(query_start_loc.begin(), query_start_loc.end(), 0);
  for (int s = 0, next = shared_pages; s < batch; ++s) {
    for (int p = 0; p < shared_pages; ++p) table.push_back(p == 0 && !sharing ? next++ : p);
    for (int p = 0; p < own_pages; ++p) table.push_back(next++);
  }
  const auto elements = static_cast<std::size_t>(num_pages) * num_kv_heads *
                        static_cast<std::size_t>(page_size) * dim;
  std::vector<bfloat16> k(elements), v(elements), q(batch * num_heads * dim), out(q.size());
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (auto* values : {&k, &v, &q})
    for (bfloat16& value : *values) value = from_float<bfloat16>(normal(random));
  const auto layer = make_kv_view(k.data(), v.data(), {num_pages, num_kv_heads, page_size, dim});
  PagedPlan plan({.page_size = page_size, .num_pages = num_pages});
  const LiveView view =
      plan.build(PageTables{table, shared_pages + own_pages, seq_lens, query_start_loc});
  ChunkAttention<Cpu, dim> attention(1);
  for (auto _ : state) attention.run(layer, view, q, out);
}
BENCHMARK(attend)
    ->ArgNames({"page", "shared", "sharing"})
    ->ArgsProduct({{16, 128}, {2048, 4096}, {0, 1}})
    ->Unit(benchmark::kMillisecond);

void cases(benchmark::internal::Benchmark* made) {
  made->ArgNames({"page", "shared", "joined", "order"})->Unit(benchmark::kMicrosecond);
  for (const int page : {1, 16, 128})
    for (const int shared : {0, 2048, 4032})
      for (const int joined : {0, 1})
        for (const int order : {in_order, shuffled, in_runs})
          made->Args({page, shared, joined, order});
}
BENCHMARK(rebuild)->Apply(cases);
BENCHMARK(grow)->Apply(cases);

}  // namespace

BENCHMARK_MAIN();
