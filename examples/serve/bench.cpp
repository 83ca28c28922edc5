// serve bench: a load of requests on the engine, and what became of it.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <chunkattn/chunkattn.hpp>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "../support/options.hpp"
#include "../support/output_file.hpp"
#include "../support/table.hpp"
#include "commands.hpp"
#include "load/run_load.hpp"
#include "loaded_model.hpp"

namespace serve {

namespace {

struct Arguments {
  ModelArguments model;
  std::string cache = "tree", sharing = "token", preempt = "recompute", order = "fcfs", trace, json;
  double rate = 0, speed = 1, max_seconds = 600;
  int requests = 64, prompt_tokens = 1024, shared_tokens = 1024, completion_tokens = 64;
  int shrink = 64, max_batch = 32, chunk_size = 64, chunks = 0, step_tokens = 512, seed = 1;
};

Arguments read_arguments(int argc, char** argv, bool& help) {
  Arguments a;
  examples::Options options("serve bench", "runs a load of requests, and says how they fared");
  a.model.add_to(options);
  options.choice("--cache", {"tree", "paged", "paged_prefix"},
                 "ours; pages without sharing; shared pages that are read for each sequence",
                 a.cache);
  options.number("--rate", "R", "requests per second, Poisson; 0: all at once", a.rate, 0.0, 1e6);
  options.number("--requests", "N", "how many", a.requests, 1, 1 << 20);
  options.number("--prompt-tokens", "N", "tokens of a prompt", a.prompt_tokens, 1, 1 << 20);
  options.number("--shared-tokens", "N", "the first of these are the same in all prompts",
                 a.shared_tokens, 0, 1 << 20);
  options.number("--completion-tokens", "N", "tokens to generate", a.completion_tokens, 1, 1 << 20);
  options.text("--trace", "FILE",
               "arrivals and lengths of a trace; mooncake: the one in CHUNKATTN_DATA (../shared)",
               a.trace);
  options.number("--shrink", "N", "tokens of the trace for one of ours: 1, 2, 4, ... 512", a.shrink,
                 1, 512);
  options.number("--speed", "X", "seconds of the trace in one of ours", a.speed, 1e-3, 1e6);
  options.number("--max-batch", "N", "sequences at once", a.max_batch, 1, 1 << 16);
  options.number("--step-tokens", "N", "tokens of prompts in one step", a.step_tokens, 1, 1 << 20);
  options.number("--chunk-size", "N", "tokens of a chunk: 8, 16, 32 or 64", a.chunk_size, 8, 64);
  options.number("--chunks", "N", "chunks of K/V; 0: enough for a batch that shares nothing",
                 a.chunks, 0, 1 << 30);
  options.choice("--sharing", {"token", "chunk"},
                 "what the tree shares: any prefix, or whole chunks", a.sharing);
  options.choice("--preempt", {"recompute", "swap"}, "what happens to K/V of a preempted request",
                 a.preempt);
  options.choice("--order", {"fcfs", "cache"},
                 "who joins next: the first that came, or who shares most with those that run",
                 a.order);
  options.number("--seed", "N", "of arrivals and tokens", a.seed, 0, 1 << 30);
  options.number("--max-seconds", "S", "of real time; then what is left is cancelled",
                 a.max_seconds, 0.1, 1e6);
  options.text("--json", "FILE", "the report, as JSON", a.json);
  help = !options.parse(argc, argv);
  if (a.shared_tokens > a.prompt_tokens)
    throw examples::UsageError(
        fmt::format("--shared-tokens = {}: expected at most --prompt-tokens, {}", a.shared_tokens,
                    a.prompt_tokens));
  if (512 % a.shrink != 0)
    throw examples::UsageError(
        fmt::format("--shrink = {}: expected a power of two up to 512", a.shrink));
  return a;
}

std::vector<Arrival> make_load(const Arguments& a, const Config& config) {
  const auto size = [](int n) { return static_cast<std::size_t>(n); };
  if (a.trace.empty()) {
    if (a.prompt_tokens + a.completion_tokens > config.max_positions)
      throw examples::UsageError(
          fmt::format("--prompt-tokens and --completion-tokens = {} together: expected at most the "
                      "model's positions, {}",
                      a.prompt_tokens + a.completion_tokens, config.max_positions));
    return poisson_load({.rate = a.rate > 0 ? a.rate : std::numeric_limits<double>::infinity(),
                         .requests = size(a.requests),
                         .prompt_tokens = size(a.prompt_tokens),
                         .shared_tokens = size(a.shared_tokens),
                         .completion_tokens = size(a.completion_tokens),
                         .vocab_size = config.vocab_size,
                         .seed = size(a.seed)});
  }
  const char* data = std::getenv("CHUNKATTN_DATA");
  const std::string folder = data != nullptr ? data : "../shared";
  return trace_load({.path = a.trace == "mooncake"
                                 ? folder + "/traces/mooncake_conversation_trace.jsonl"
                                 : a.trace,
                     .requests = size(a.requests),
                     .shrink = size(a.shrink),
                     .speed = a.speed,
                     .max_length = size(config.max_positions),
                     .vocab_size = config.vocab_size});
}

EngineOptions engine_options(const Arguments& a, const Model& model,
                             const std::vector<Arrival>& load) {
  EngineOptions options;
  options.chunk_size = a.chunk_size;
  options.sharing = a.sharing == "chunk" ? chunkattn::TreeOptions::Sharing::chunk
                                         : chunkattn::TreeOptions::Sharing::token;
  options.reduce = reduce_of(a.model);
  options.kv = kv_type(a.model, model);
  options.step_tokens = static_cast<std::size_t>(a.step_tokens);
  options.max_sequences = static_cast<std::size_t>(a.max_batch);
  options.mode = a.cache == "tree"    ? Mode::tree
                 : a.cache == "paged" ? Mode::paged
                                      : Mode::paged_prefix;
  options.order = a.order == "cache" ? Order::cache : Order::fcfs;
  options.preempt = a.preempt == "swap" ? Preempt::swap : Preempt::recompute;
  std::size_t longest = 0;
  for (const Arrival& arrival : load) longest = std::max(longest, arrival.request.max_length);
  options.max_chunks =
      a.chunks > 0 ? static_cast<std::size_t>(a.chunks)
                   : options.max_sequences * (longest / static_cast<std::size_t>(a.chunk_size) + 2);
  return options;
}

/// A line on stderr, twice a second where that is a terminal, else every ten seconds.
class Progress {
 public:
  explicit Progress(std::size_t requests) : requests_(requests) {}
  void update(double wall, double now, std::size_t arrived, std::size_t ended) {
    if (wall < next_) return;
    next_ = wall + (terminal_ ? 0.5 : 10);
    fmt::print(stderr, "{}{:6.1f} s  {} of {} arrived, {} done{}", terminal_ ? "\r" : "", now,
               arrived, requests_, ended, terminal_ ? "" : "\n");
    std::fflush(stderr);
  }
  void end() const {
    if (terminal_ && next_ > 0) fmt::print(stderr, "\r\033[K");
  }

 private:
  std::size_t requests_;
  bool terminal_ = ::isatty(STDERR_FILENO) != 0;
  double next_ = 0.5;
};

nlohmann::json to_json(const Percentiles& p) {
  return {{"p50", p.p50}, {"p90", p.p90}, {"p99", p.p99}};
}

nlohmann::json to_json(const Arguments& a, const Engine& engine, const LoadReport& report) {
  const EngineStats& stats = engine.stats();
  const auto per_token =
      static_cast<double>(kv_bytes_of(engine, 1, 1)) / static_cast<double>(a.chunk_size);
  return {{"arguments",
           {{"model", a.model.model.empty() ? a.model.random : a.model.model},
            {"cache", a.cache},
            {"rate", a.rate},
            {"trace", a.trace},
            {"requests", a.requests},
            {"prompt_tokens", a.prompt_tokens},
            {"shared_tokens", a.shared_tokens},
            {"completion_tokens", a.completion_tokens},
            {"max_batch", a.max_batch},
            {"step_tokens", a.step_tokens},
            {"chunk_size", a.chunk_size},
            {"seed", a.seed},
            {"threads", a.model.threads}}},
          {"arrived", report.arrived},
          {"completed", report.completed},
          {"capped", report.capped},
          {"seconds", report.seconds},
          {"busy_seconds", report.busy_seconds},
          {"normalised_latency", report.normalised_latency},
          {"ttft", to_json(report.ttft)},
          {"tpot", to_json(report.tpot)},
          {"tokens_per_second", report.tokens_per_second()},
          {"requests_per_second", report.requests_per_second()},
          {"prompt_tokens", stats.prompt_tokens},
          {"cached_tokens", stats.cached_tokens},
          {"peak_batch", stats.peak_sequences},
          {"peak_kv_bytes", kv_bytes_of(engine, stats.peak_chunks, stats.peak_window_chunks)},
          {"batch_kv_bytes", kv_bytes_of(engine, stats.chunks, stats.window_chunks)},
          {"batch_kv_bytes_of_tokens", static_cast<double>(stats.distinct_tokens) * per_token},
          {"preemptions", stats.preemptions},
          {"swaps", stats.swaps},
          {"steps", stats.steps}};
}

void print_report(const Engine& engine, const LoadReport& report) {
  const EngineStats& stats = engine.stats();
  const auto ms = [](const Percentiles& p) {
    return fmt::format("{:.1f} / {:.1f} / {:.1f} ms", 1e3 * p.p50, 1e3 * p.p90, 1e3 * p.p99);
  };
  const auto line = [](const char* name, const std::string& text) {
    fmt::print("{}  {}\n", examples::bold(fmt::format("{:<10}", name)), text);
  };
  line("requests", fmt::format("{} of {} done in {:.1f} s{}", report.completed, report.arrived,
                               report.seconds, report.capped ? ", ended by --max-seconds" : ""));
  line("latency", fmt::format("{:.2f} ms per token, from arrival to the last",
                              1e3 * report.normalised_latency));
  line("ttft", ms(report.ttft) + " (p50 / p90 / p99)");
  line("tpot", ms(report.tpot));
  line("throughput", fmt::format("{:.1f} tokens/s, {:.3f} requests/s", report.tokens_per_second(),
                                 report.requests_per_second()));
  line("prompts", fmt::format("{} of {} tokens cached", stats.cached_tokens, stats.prompt_tokens));
  line("K/V", fmt::format("{:.1f} MiB at most, {} sequences at most; {} preempted",
                          static_cast<double>(
                              kv_bytes_of(engine, stats.peak_chunks, stats.peak_window_chunks)) /
                              (1 << 20),
                          stats.peak_sequences, stats.preemptions));
}

}  // namespace

int bench(int argc, char** argv) {
  bool help = false;
  const Arguments arguments = read_arguments(argc, argv, help);
  if (help) return 0;
  if (!arguments.json.empty()) examples::require_writable(arguments.json);
  const ProductKind kind = product_kind(arguments.model);
  chunkattn::ThreadPool executor(arguments.model.threads);
  const LoadedModel loaded = load(arguments.model, executor);
  fmt::print("{}  {}\n", examples::bold("model     "),
             examples::wrapped(describe(loaded.model), 12));
  const std::vector<Arrival> arrivals = make_load(arguments, loaded.model.config);
  Products products(executor, kind);
  try_out(products, loaded.model);
  const auto engine =
      make_engine(loaded.model, products, engine_options(arguments, loaded.model, arrivals));

  const auto clock = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  };
  Progress progress(arrivals.size());
  const double start = clock();
  const LoadReport report =
      run_load(*engine, arrivals,
               {.max_seconds = arguments.max_seconds,
                .clock = clock,
                .progress = [&](double now, std::size_t arrived, std::size_t ended) {
                  progress.update(clock() - start, now, arrived, ended);
                }});
  progress.end();
  print_report(*engine, report);
  if (!arguments.json.empty()) {
    examples::OutputFile file(arguments.json);
    const std::string text = to_json(arguments, *engine, report).dump(1) + "\n";
    file.write(text.data(), text.size());
    file.commit();
  }
  return 0;
}

}  // namespace serve
