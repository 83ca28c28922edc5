// Decode attention on the CPU. Measures the machine's limits first, then each case as
//   ms, GFLOP/s, GB/s and `ratio` = time / max(flops / peak, bytes / DRAM read bandwidth),
// these limits measured between the steps of the case itself. Peak is that of fp32 multiply-adds,
// or of the matrix unit or dot products that attention uses; `ratio_fma` has the former in any
// case, `processor_ms` the processor time of all threads. `cold` rotates enough layers that each
// call finds its K/V in memory, not in a cache. Flops and bytes are those of the method: what is
// shared counts once for ours and once per sequence for the paged baselines' flops and, without
// sharing, bytes.
//
//   decode_bench --benchmark_filter='shared:4096' --benchmark_format=json
//   CHUNKATTN_BENCH_THREADS=2   threads (default: all)
//   CHUNKATTN_BENCH_COLD=MB     bytes in rotation (default: 4 x last-level cache, at most 2048 MB)
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/baselines.hpp"
#include "bench/decode_case.hpp"
#include "bench/machine.hpp"
#include "chunkattn/chunk_attention.hpp"
#include "examples/support/json_text.hpp"

using namespace chunkattn;

namespace {

constexpr int head_dim = 128;

/// Ours as it is, with one term, with queries of bfloat16; and the baselines.
enum class Method { ours, one_term, bf16_queries, paged_shared_pages, paged_unshared, naive };

/// A baseline's fastest way: what its pages share stays in the caches then.
CpuOptions options_of(Method method) {
  CpuOptions options;
  if (method == Method::paged_shared_pages) options.tuning.max_task_heads = 1;
  if (method == Method::one_term) options.accuracy = CpuOptions::Accuracy::one_term;
  return options;
}

struct Case {
  std::string name;
  bench::Batch batch;
  int num_qo_heads = 32;
  int num_kv_heads = 32;
  Method method = Method::ours;
  bool cold = true;
};

struct Setting {
  std::unique_ptr<ThreadPool> pool;
  std::unique_ptr<bench::Machine> machine;
  std::size_t cold_bytes = 0;
};
Setting setting;

/// Everything of one case that is built once and timed many times.
struct Prepared {
  virtual ~Prepared() = default;
  virtual void step() = 0;
  double flops = 0;
  double bytes = 0;
  bench::UnitUse unit;  ///< what computes
};

template <class T, int ChunkSize>
class PagedCase : public Prepared {
 public:
  explicit PagedCase(const Case& which)
      : planned_(which.batch, which.method != Method::paged_unshared),
        attention_(*setting.pool, options_of(which.method)),
        invariant_(*setting.pool, {.reduce = CpuOptions::Reduce::batch_invariant}),
        unshared_(planned_.view()),
        shared_pages_(which.method == Method::paged_shared_pages) {
    const auto work = planned_.work();
    const double token_bytes =
        2.0 * head_dim * sizeof(T) + (has_row_scales<T> ? 2.0 * sizeof(float) : 0.0);
    const double kv_bytes = work.tokens * which.num_kv_heads * token_bytes;
    flops = work.pairs * which.num_qo_heads * 4.0 * head_dim;
    bytes = kv_bytes + 2.0 * which.batch.size() * which.num_qo_heads * head_dim * sizeof(float);
    const bool bf16_queries = which.method == Method::bf16_queries;
    unit = bench::unit_of<T>(attention_, bf16_queries);
    const double wanted = which.cold ? static_cast<double>(setting.cold_bytes) / kv_bytes : 0.0;
    const int layers = std::clamp(static_cast<int>(wanted) + 1, 1, 512);
    cache_.emplace(planned_.tree(), KvCacheOptions{layers, which.num_kv_heads, head_dim});
    for (int l = 0; l < layers; ++l) layers_.push_back(cache_->layer(l));
    setting.pool->parallel_for(layers, [&](int l) {
      bench::fill_layer(layers_[static_cast<std::size_t>(l)], static_cast<std::uint64_t>(l));
    });
    q_.resize(static_cast<std::size_t>(which.batch.size()) *
              static_cast<std::size_t>(which.num_qo_heads) * head_dim);
    out_.resize(q_.size());
    bench::fill_random(q_.data(), q_.size(), 1);
    if (bf16_queries)
      for (const float x : q_) q_bf16_.push_back(from_float<bfloat16>(x));
    // Where memory is virtual, the first pass over fresh pages is slow.
    for (int l = 0; l < layers; ++l) PagedCase::step();
  }

  void step() override { shared_pages_ ? step_unshared() : step(planned_.view(), attention_); }
  /// A step in which each row reads its whole path by itself.
  void step_unshared() { step(unshared_.view(), attention_); }
  /// A step with CpuOptions::Reduce::batch_invariant.
  void step_invariant() { step(planned_.view(), invariant_); }

 private:
  // A step over the next layer.
  void step(const LiveView& plan, ChunkAttention<Cpu, head_dim>& attention) {
    const KvView<T>& layer = layers_[next_++ % layers_.size()];
    if constexpr (std::is_same_v<T, bfloat16>)
      if (!q_bf16_.empty()) return attention.run(layer, plan, q_bf16_, out_);
    attention.run(layer, plan, q_, out_);
  }

  bench::PlannedBatch<ChunkSize> planned_;
  ChunkAttention<Cpu, head_dim> attention_;
  ChunkAttention<Cpu, head_dim> invariant_;
  bench::UnsharedPlan unshared_;
  bool shared_pages_;
  std::optional<KvCache<Cpu, T>> cache_;
  std::vector<KvView<T>> layers_;
  std::vector<float> q_, out_;
  std::vector<bfloat16> q_bf16_;
  std::size_t next_ = 0;
};

/// Sequences of equal length only.
class NaiveCase : public Prepared {
 public:
  explicit NaiveCase(const Case& which) : case_(which) {
    for (const auto& part : which.batch.sequences[0]) tokens_ += part.tokens;
    const auto size = static_cast<std::size_t>(which.batch.size()) *
                      static_cast<std::size_t>(which.num_kv_heads) *
                      static_cast<std::size_t>(tokens_) * head_dim;
    k_.resize(size);
    v_.resize(size);
    q_.resize(static_cast<std::size_t>(which.batch.size()) *
              static_cast<std::size_t>(which.num_qo_heads) * head_dim);
    out_.resize(q_.size());
    bench::fill_random(k_.data(), size, 1);
    bench::fill_random(v_.data(), size, 2);
    bench::fill_random(q_.data(), q_.size(), 3);
    flops = 4.0 * head_dim * tokens_ * which.batch.size() * which.num_qo_heads;
    bytes = 2.0 * static_cast<double>(size) * sizeof(float);
  }
  void step() override {
    bench::naive_attention(*setting.pool, k_.data(), v_.data(), q_.data(), out_.data(),
                           case_.batch.size(), case_.num_qo_heads, case_.num_kv_heads, tokens_,
                           head_dim);
  }

 private:
  Case case_;
  int tokens_ = 0;
  std::vector<float> k_, v_, q_, out_;
};

// The prepared case stays for Google Benchmark's repeated calls; only one at a time is held.
template <class Make>
Prepared& prepared(const std::string& name, Make&& make) {
  static std::string held;
  static std::unique_ptr<Prepared> value;
  if (held != name) {
    value.reset();
    value = make();
    held = name;
    value->step();
  }
  return *value;
}

template <class Make>
void register_case(const std::string& name, bool cold, Make make) {
  benchmark::RegisterBenchmark(
      name.c_str(),
      [name, cold, make](benchmark::State& state) {
        Prepared& timed = prepared(name, make);
        bench::Machine& machine = *setting.machine;
        // Of each step: its time, and what it is held against.
        std::vector<double> seconds, processor, read, fma, floors, ratios, fma_ratios;
        bench::Rates before = machine.sample(timed.bytes);
        if (!cold) timed.step();  // what the sample evicted
        for (auto _ : state) {
          const std::clock_t processor_start = std::clock();
          const auto start = bench::Clock::now();
          timed.step();
          seconds.push_back(bench::seconds_since(start));
          processor.push_back(static_cast<double>(std::clock() - processor_start) / CLOCKS_PER_SEC);
          state.SetIterationTime(seconds.back());
          const bench::Rates after = cold ? machine.sample(timed.bytes) : before;
          const bench::Rates between = before.mean_with(after);
          read.push_back(between.dram_read);
          fma.push_back(between.fma_peak);
          floors.push_back(between.floor_seconds(timed.flops, timed.bytes, timed.unit));
          ratios.push_back(seconds.back() / floors.back());
          fma_ratios.push_back(seconds.back() / between.floor_seconds(timed.flops, timed.bytes));
          before = after;
        }
        const double median = bench::median(seconds);
        state.counters["ms"] = median * 1e3;
        state.counters["processor_ms"] = bench::median(processor) * 1e3;
        state.counters["GFLOP/s"] = timed.flops / median * 1e-9;
        state.counters["GB/s"] = timed.bytes / median * 1e-9;
        state.counters["peak_GFLOP/s"] = bench::median(fma) * 1e-9;
        state.counters["read_GB/s"] = bench::median(read) * 1e-9;
        state.counters["floor_ms"] = bench::median(floors) * 1e3;
        state.counters["ratio"] = bench::median(ratios);
        state.counters["ratio_fma"] = bench::median(fma_ratios);
      })
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond)
      ->MinTime(0.5);
}

/// Two ways to take a step, in turn over the same K/V: the time of `a` against that of `b`.
template <class T>
void add_interleaved(const std::string& name, const char* counter, const Case& which,
                     void (PagedCase<T, 64>::*a)(), void (PagedCase<T, 64>::*b)()) {
  benchmark::RegisterBenchmark(
      name.c_str(),
      [which, counter, a, b](benchmark::State& state) {
        PagedCase<T, 64> timed(which);
        std::vector<double> logs;
        for (auto _ : state) {
          const auto time = [&](void (PagedCase<T, 64>::*step)()) {
            const auto start = bench::Clock::now();
            (timed.*step)();
            return bench::seconds_since(start);
          };
          const bool a_first = logs.size() % 2 == 0;
          const double first = a_first ? time(a) : time(b);
          const double second = a_first ? time(b) : time(a);
          logs.push_back(std::log(a_first ? first / second : second / first));
          state.SetIterationTime(first + second);
        }
        // A distribution-free 95 % bound of the median: the order statistic beyond n/2 by one-sided
        // 1.645 standard deviations of the binomial distribution.
        std::sort(logs.begin(), logs.end());
        const double n = static_cast<double>(logs.size());
        const auto upper =
            static_cast<std::size_t>(std::min(n - 1, std::ceil(n / 2 + 1.645 * std::sqrt(n) / 2)));
        state.counters[counter] = std::exp(logs[logs.size() / 2]);
        state.counters["upper_95"] = std::exp(logs[upper]);
      })
      ->UseManualTime()
      ->Unit(benchmark::kMillisecond)
      ->MinTime(4);
}

std::string name_of(const std::string& method, const char* type, const Case& which) {
  return method + "/" + type + "/heads:" + std::to_string(which.num_qo_heads) + ":" +
         std::to_string(which.num_kv_heads) + "/" + which.name + (which.cold ? "/cold" : "/warm");
}

/// Ours against the paged kernel where nothing is shared.
template <class T>
void add_against_paged(const char* type, const Case& ours) {
  add_interleaved<T>(name_of("interleaved", type, ours), "ratio_to_paged", ours,
                     &PagedCase<T, 64>::step, &PagedCase<T, 64>::step_unshared);
}

/// CpuOptions::Reduce::batch_invariant against the default.
template <class T>
void add_invariant(const char* type, const Case& which) {
  add_interleaved<T>(name_of("invariant", type, which), "ratio_to_default", which,
                     &PagedCase<T, 64>::step_invariant, &PagedCase<T, 64>::step);
}

template <class T, int ChunkSize = 64>
void add(const char* type, Case which) {
  static constexpr const char* methods[] = {
      "ours",           "ours_one_term", "ours_bf16_queries", "paged_shared_pages",
      "paged_unshared", "naive"};
  const std::string name = name_of(methods[static_cast<int>(which.method)], type, which) +
                           (ChunkSize == 64 ? "" : "/chunk:" + std::to_string(ChunkSize));
  register_case(name, which.cold, [which]() -> std::unique_ptr<Prepared> {
    if (which.method == Method::naive) return std::make_unique<NaiveCase>(which);
    return std::make_unique<PagedCase<T, ChunkSize>>(which);
  });
}

Case prefix_case(int batch, int shared, int own, int kv_heads = 32, Method method = Method::ours,
                 bool cold = true) {
  return {"b:" + std::to_string(batch) + "/shared:" + std::to_string(shared) +
              "/own:" + std::to_string(own),
          bench::one_prefix(batch, shared, own),
          32,
          kv_heads,
          method,
          cold};
}

template <class T>
void add_type(const char* type) {
  for (const int kv_heads : {32, 8}) {
    for (const int shared : {1024, 2048, 4096}) {
      add<T>(type, prefix_case(32, shared, 64, kv_heads));
      add<T>(type, prefix_case(32, shared, 64, kv_heads, Method::ours, false));
    }
    for (const int own : {1024, 2048, 4096}) add<T>(type, prefix_case(32, 0, own, kv_heads));
  }
  if (std::is_same_v<T, bfloat16>)
    for (const Method method : {Method::one_term, Method::bf16_queries})
      for (const int kv_heads : {32, 8}) {
        for (const int shared : {1024, 2048, 4096})
          add<T>(type, prefix_case(32, shared, 64, kv_heads, method));
        add<T>(type, prefix_case(32, 0, 1024, kv_heads, method));
      }
  // Half and three quarters of a prompt of 2,048 shared.
  add<T>(type, prefix_case(32, 1024, 1024));
  add<T>(type, prefix_case(32, 1536, 512));
}

// Lengths 64, 128, … after one prefix.
Case staggered() {
  Case which = prefix_case(32, 2048, 64);
  which.name = "b:32/shared:2048/own:staggered";
  for (int i = 0; i < 32; ++i)
    which.batch.sequences[static_cast<std::size_t>(i)].back().tokens = 64 + 37 * i;
  return which;
}

struct TreeShape {
  std::vector<int> nodes, tokens;
};

/// The "trees" of kernel_trees.json; none where the file is not there.
std::vector<TreeShape> read_trees(const std::string& path) {
  std::vector<TreeShape> trees;
  std::ifstream file(path);
  if (!file) return trees;
  const auto document = examples::read_json(std::string(std::istreambuf_iterator<char>(file), {}));
  for (const auto& tree : document.at("trees"))
    trees.push_back({tree.at("nodes_per_level"), tree.at("tokens_per_node")});
  return trees;
}

bench::Batch tree_batch(const TreeShape& shape) {
  bench::Batch batch;
  const int leaves = shape.nodes.back();
  for (int leaf = 0; leaf < leaves; ++leaf) {
    batch.sequences.emplace_back();
    std::uint32_t id = 1;
    for (std::size_t level = 0; level < shape.nodes.size(); ++level) {
      const auto node =
          static_cast<std::uint32_t>(static_cast<std::int64_t>(leaf) * shape.nodes[level] / leaves);
      batch.sequences.back().push_back({id + node, shape.tokens[level]});
      id += static_cast<std::uint32_t>(shape.nodes[level]);
    }
  }
  return batch;
}

void add_trees() {
  const char* folder = std::getenv("CHUNKATTN_DATA");
  const std::string path =
      std::string(folder != nullptr ? folder : "../shared") + "/workloads/kernel_trees.json";
  const std::vector<TreeShape> trees = read_trees(path);
  if (trees.empty())
    std::fprintf(stderr, "no tree shapes: %s not found, set CHUNKATTN_DATA\n", path.c_str());
  constexpr std::pair<int, int> heads[] = {{32, 32}, {32, 8}, {16, 1}};
  for (std::size_t t = 0; t < trees.size(); ++t) {
    for (const auto& [qo, kv] : heads) {
      for (const Method method : {Method::ours, Method::paged_shared_pages}) {
        add<half>("fp16",
                  {"tree:" + std::to_string(t), tree_batch(trees[t]), qo, kv, method, true});
      }
    }
  }
}

void add_all() {
  add_type<float>("fp32");
  add_type<half>("fp16");
  add_type<bfloat16>("bf16");
  add_type<std::int8_t>("int8");
  add_type<float8_e4m3>("e4m3");
  constexpr Method paged[] = {Method::paged_shared_pages, Method::paged_unshared};
  for (const int shared : {1024, 2048, 4096}) {
    for (const int kv_heads : {32, 8}) {
      for (const Method method : paged) {
        add<float>("fp32", prefix_case(32, shared, 64, kv_heads, method));
        add<half>("fp16", prefix_case(32, shared, 64, kv_heads, method));
        add<bfloat16>("bf16", prefix_case(32, shared, 64, kv_heads, method));
      }
    }
    add<float>("fp32", prefix_case(32, shared, 64, 32, Method::naive));
  }
  // Against batch size and completion tokens: the paper's Figures 4 and 3.
  for (const Method method : {Method::ours, Method::paged_shared_pages, Method::paged_unshared}) {
    for (const int batch : {1, 2, 4, 8, 16, 64, 128})
      add<half>("fp16", prefix_case(batch, 2048, 64, 32, method));
    for (const int own : {1, 256, 512, 1024, 2048})
      add<half>("fp16", prefix_case(32, 2048, own, 32, method));
  }
  add_against_paged<half>("fp16", prefix_case(32, 0, 1024));
  add_against_paged<half>("fp16", prefix_case(32, 0, 1024, 8));
  add_against_paged<float>("fp32", prefix_case(32, 0, 1024));
  for (const int kv_heads : {32, 8}) {
    for (const int shared : {0, 1024, 4096}) {
      const Case which = prefix_case(32, shared, shared == 0 ? 1024 : 64, kv_heads);
      add_invariant<float>("fp32", which);
      add_invariant<half>("fp16", which);
      add_invariant<bfloat16>("bf16", which);
      add_invariant<std::int8_t>("int8", which);
    }
    add_invariant<half>("fp16", prefix_case(32, 1000, 64, kv_heads));  // a block straddles
  }
  add<half>("fp16", staggered());
  add<half, 16>("fp16", prefix_case(32, 2048, 64));
  add<half, 32>("fp16", prefix_case(32, 2048, 64));
  add<half, 128>("fp16", prefix_case(32, 2048, 64));
  add<half, 256>("fp16", prefix_case(32, 2048, 64));
  add_trees();
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  const char* threads = std::getenv("CHUNKATTN_BENCH_THREADS");
  setting.pool = std::make_unique<ThreadPool>(threads != nullptr ? std::atoi(threads) : 0);
  setting.machine = std::make_unique<bench::Machine>(*setting.pool);
  const char* cold = std::getenv("CHUNKATTN_BENCH_COLD");
  const std::size_t llc = std::max(bench::last_level_cache_bytes(), std::size_t{64} << 20);
  setting.cold_bytes = cold != nullptr ? static_cast<std::size_t>(std::atoll(cold)) << 20
                                       : std::min(4 * llc, std::size_t{2} << 30);
  const auto text = [](double value) { return std::to_string(value); };
  const bench::Rates& overall = setting.machine->overall();
  benchmark::AddCustomContext("threads", std::to_string(setting.pool->concurrency()));
  benchmark::AddCustomContext("dram_read_GB/s", text(overall.dram_read * 1e-9));
  benchmark::AddCustomContext("cache_read_GB/s", text(setting.machine->cache_read() * 1e-9));
  benchmark::AddCustomContext("fma_peak_GFLOP/s", text(overall.fma_peak * 1e-9));
  benchmark::AddCustomContext("matrix_peak_GFLOP/s", text(overall.matrix_peak * 1e-9));
  benchmark::AddCustomContext("byte_dot_peak_GOP/s", text(overall.byte_peak * 1e-9));
  benchmark::AddCustomContext("int16_dot_peak_GOP/s", text(overall.int16_peak * 1e-9));
  benchmark::AddCustomContext("pair_dot_peak_GFLOP/s", text(overall.pair_peak * 1e-9));
  benchmark::AddCustomContext("cold_MB", std::to_string(setting.cold_bytes >> 20));
  add_all();
  benchmark::RunSpecifiedBenchmarks();
}
